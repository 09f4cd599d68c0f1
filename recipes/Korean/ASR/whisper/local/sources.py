"""A model source: what is read of it beside its weights, and which those are.

In: a hub name, a local folder, or random:SIZE.
Out: tokenizer, feature extractor, configuration; the weights' digest.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

from transformers import utils

from local import random_model

BLOCK = 2**22  # bytes read at a time
KINDS_OF_WEIGHTS = (  # in Transformers' order
    utils.SAFE_WEIGHTS_NAME,
    utils.SAFE_WEIGHTS_INDEX_NAME,
    utils.WEIGHTS_NAME,
    utils.WEIGHTS_INDEX_NAME,
)
RANDOM = "random:"
KOREAN = 50264  # id of <|ko|>; the English-only models have it one lower


def load_tokenizer(whisper_hub):
    """The tokenizer of a model source, prefixed for Korean transcription.

    Arguments
    ---------
    whisper_hub : str
        A hub name, a local folder, or ``random:SIZE``.

    Returns
    -------
    transformers.WhisperTokenizer
        ``prefix_tokens`` is ``<|startoftranscript|><|ko|><|transcribe|>
        <|notimestamps|>``.

    Raises
    ------
    FileNotFoundError
        The source is not there, or holds no tokenizer.
    ValueError
        The source is English-only, or not a Whisper.
    """
    if whisper_hub.startswith(RANDOM):
        size = random_model.size_named(whisper_hub[len(RANDOM) :])
        tokenizer = random_model.build_tokenizer(size)
    else:
        from transformers import WhisperTokenizer

        load_config(whisper_hub)  # an unreachable hub is told once
        tokenizer = WhisperTokenizer.from_pretrained(whisper_hub)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            # What Transformers makes of a source without any file.
            raise FileNotFoundError(
                f"whisper_hub='{whisper_hub}' has no tokenizer, or cannot be "
                "reached; give a hub name, a Hugging Face folder or random:SIZE"
            )
    if tokenizer.get_vocab().get("<|ko|>") != KOREAN:
        raise ValueError(
            f"whisper_hub='{whisper_hub}' is English-only or no Whisper; choose "
            "a multilingual Whisper such as openai/whisper-large-v3"
        )
    tokenizer.set_prefix_tokens(language="ko", task="transcribe")
    return tokenizer


def load_extractor(whisper_hub):
    """How a source makes log-mels: their number, filters, context."""
    from transformers import WhisperFeatureExtractor

    if whisper_hub.startswith(RANDOM):
        size = random_model.size_named(whisper_hub[len(RANDOM) :])
        return WhisperFeatureExtractor(
            feature_size=size.n_mels, chunk_length=size.context_s
        )
    return WhisperFeatureExtractor.from_pretrained(whisper_hub)


def load_config(whisper_hub):
    """The architecture of a source, a ``transformers.WhisperConfig``.

    Raises
    ------
    FileNotFoundError
        The source is not there, or cannot be reached.
    """
    if whisper_hub.startswith(RANDOM):
        size = random_model.size_named(whisper_hub[len(RANDOM) :])
        return random_model.build_config(
            size, random_model.build_tokenizer(size)
        )
    from transformers import WhisperConfig

    try:
        return WhisperConfig.from_pretrained(whisper_hub)
    except OSError as error:
        raise FileNotFoundError(
            f"whisper_hub='{whisper_hub}' cannot be reached, or has no "
            "config.json; give a hub name, a Hugging Face folder or random:SIZE "
            f"({str(error).splitlines()[0]})"
        ) from error


def context_seconds(whisper_hub):
    """Seconds of audio that the model's encoder takes in (30 for OpenAI's)."""
    if whisper_hub.startswith(RANDOM):
        return random_model.size_named(whisper_hub[len(RANDOM) :]).context_s
    return load_config(whisper_hub).max_source_positions // 50


def sha256(source):
    """Digest of the files that Transformers reads a source's weights from.

    Of a single file it is what the hub shows as its SHA-256; of several, that
    of their contents in the order of their names. About 1 GB/s.

    Arguments
    ---------
    source : str
        A hub name or a local folder.

    Returns
    -------
    str
        64 hexadecimal digits.

    Raises
    ------
    FileNotFoundError
        It has no weights.
    """
    digest = hashlib.sha256()
    for path in _weight_files(source):
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _weight_files(source):
    """Paths; safetensors before pickles, one file before its parts."""
    find = partial(
        utils.cached_file, source, _raise_exceptions_for_missing_entries=False
    )
    for kind in KINDS_OF_WEIGHTS:
        path = find(kind)
        if path and path.endswith(".json"):
            parts = json.loads(Path(path).read_text("utf-8"))["weight_map"]
            return [find(part) for part in sorted(set(parts.values()))]
        if path:
            return [path]
    raise FileNotFoundError(
        f"whisper_hub='{source}' has no weights; give a hub name or a Hugging "
        f"Face folder with {' or '.join(KINDS_OF_WEIGHTS)}"
    )


def suppressed(source):
    """The ids that a source's own generation config suppresses."""
    from transformers import GenerationConfig

    if source.startswith(RANDOM):
        return None
    try:
        return GenerationConfig.from_pretrained(source).suppress_tokens
    except OSError:  # a folder without one
        return None
