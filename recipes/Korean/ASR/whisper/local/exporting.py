"""A fine-tuned model in the forms that other programs load.

In: a Whisper with its weights, and where they come from.
Out: a Hugging Face folder, or a CTranslate2 folder, compared with the model.
"""

import contextlib
import copy
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from transformers import (
    GenerationConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from local import checkpoints, decode, files, probes, random_model, trained
from local.model import MAX_TOKENS
from local.sources import RANDOM

logger = logging.getLogger(__name__)

FORMATS = ("hf", "ct2")
QUANTIZATIONS = (  # CTranslate2's
    "float32",
    "float16",
    "bfloat16",
    "int16",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
)
NO_SCORES = ("unixtime", "end-of-epoch")  # among them in a checkpoint
FASTER_WHISPER_S = 30  # of context; it pads to them whatever a model takes
COPIED = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")
CLIP_S = 5  # of music, at which copy and model are compared
N_TOKENS = 32  # of its text
MOST_LOGITS = 1e-4  # difference that rounding makes, of the largest logit
MOST_STATES = {"float32": 1e-3}  # the same of CTranslate2's encoder states
MOST_STATES_QUANTIZED = 0.3


@contextlib.contextmanager
def replacing_folder(out):
    """A folder under a temporary name, which gets its own when it is whole.

    Arguments
    ---------
    out : Path
        Not there, or empty.

    Yields
    ------
    Path

    Raises
    ------
    ValueError
        ``out`` holds something.
    OSError
        It cannot be written.
    """
    out = out.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"'{out}' is there already; remove it, or name another folder"
        )
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.replace(temporary, out)
    except SafetensorError as error:  # a full disk, in its own words
        raise OSError(
            files.error_number(error),
            f"cannot write {out}: {error}; free space there or choose another "
            "folder",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_hugging_face(whisper, folder, provenance):
    """Writes a folder that Transformers loads and transcribes Korean with.

    Its ``generate`` needs no arguments: it writes what ours does, greedily.

    Arguments
    ---------
    whisper : local.model.Whisper
        On the CPU, in evaluation mode.
    folder : Path
        There already.
    provenance : dict
        What ``provenance_of`` gives.

    Returns
    -------
    float
        Largest difference of the logits, once loaded again, to the model's,
        as a part of the largest one.

    Raises
    ------
    ValueError
        What was written is not what was to be written.
    """
    generation = _generation_config(whisper)
    _for_generation(whisper, generation).save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # not for us alone
    # Apart, not as a processor: faster-whisper reads these files.
    whisper.tokenizer.save_pretrained(folder)
    whisper.feature_extractor.save_pretrained(folder)
    _write(folder, provenance)
    return _compare_hugging_face(whisper, folder)


def write_ctranslate2(whisper, folder, quantization, provenance):
    """Writes a folder that CTranslate2 and faster-whisper load.

    faster-whisper only where the model takes 30 s, which is told otherwise.

    Arguments
    ---------
    whisper, folder, provenance
        As for ``write_hugging_face``.
    quantization : str
        One of ``QUANTIZATIONS``.

    Returns
    -------
    float
        Largest difference of the encoder's states to the model's, as a part
        of the largest state.

    Raises
    ------
    ValueError
        What was written is not what was to be written.
    """
    from ctranslate2.converters import TransformersConverter

    if whisper.context_s != FASTER_WHISPER_S:
        logger.warning(
            "the model takes %g s at once: CTranslate2 transcribes with it, "
            "faster-whisper, which gives it %d s, does not",
            whisper.context_s,
            FASTER_WHISPER_S,
        )
    plain, converted = folder / "hugging_face", folder / "converted"
    plain.mkdir()
    write_hugging_face(whisper, plain, provenance)
    converter = TransformersConverter(str(plain), copy_files=list(COPIED))
    converter.convert(str(converted), quantization=quantization)
    shutil.rmtree(plain)
    for path in converted.iterdir():
        path.rename(folder / path.name)
    converted.rmdir()
    _write(folder, {**provenance, "quantization": quantization})
    return _compare_ctranslate2(whisper, folder, quantization)


def require_ctranslate2():
    """Raises ValueError where CTranslate2 is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ValueError(
            "--format ct2: CTranslate2 is not installed; pip install "
            "ctranslate2 faster-whisper, or choose --format hf"
        )


def provenance_of(given, source, whisper):
    """Where a model comes from, and how it was scored.

    Arguments
    ---------
    given : str
        As the user named the model.
    source : local.trained.Source
    whisper : local.model.Whisper

    Returns
    -------
    dict
        ``source``, ``checkpoint`` and its ``scores``, what the weights were
        before, ``precision``, ``beam_size`` and ``max_new_tokens`` of the
        run's test, and ``versions``. Of a copy of a copy: the first one's.
    """
    earlier = Path(source.path) / trained.PROVENANCE
    told = {"source": given}
    if source.kind == "checkpoint":
        meta = _meta(Path(source.path))
        told |= {"checkpoint": Path(source.path).name, "scores": meta}
        told |= whisper.identity
    elif earlier.is_file():
        told = json.loads(earlier.read_text(encoding="utf-8"))
    names = ("torch", "transformers", "speechbrain")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {**told, **trained.run_settings(source), "versions": versions}


def _meta(checkpoint):
    """What a checkpoint was saved with: scores, steps, epoch."""
    found = checkpoints.Checkpointer(checkpoint.parent)
    for one in found.list_checkpoints():
        if one.path.resolve() == checkpoint:
            return {k: v for k, v in one.meta.items() if k not in NO_SCORES}
    raise AssertionError(f"resolved, and not there: {checkpoint}")


def _write(folder, provenance):
    text = json.dumps(provenance, ensure_ascii=False, indent=2)
    with files.replacing(folder / trained.PROVENANCE) as file:
        file.write(f"{text}\n")


def _for_generation(whisper, generation):
    """Our weights in Transformers' whole model; none is copied."""
    config = copy.deepcopy(whisper.model.config)
    config.dtype = torch.float32  # whatever the source was stored in
    # They were for generation, in the years before its own config.
    config.forced_decoder_ids = None
    config.suppress_tokens = config.begin_suppress_tokens = None
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    model.model = whisper.model
    model.proj_out.weight = whisper.model.decoder.embed_tokens.weight
    model.generation_config = generation
    return model.eval()


def _generation_config(whisper):
    """What makes ``generate`` write Korean, as ``decode.greedy`` does."""
    tokenizer = whisper.tokenizer
    ids = tokenizer.convert_tokens_to_ids
    vocabulary = tokenizer.get_vocab()
    ours = dict(
        is_multilingual=True,
        lang_to_id={
            token: vocabulary[token]
            for token in map("<|{}|>".format, LANGUAGES)
            if token in vocabulary
        },
        task_to_id={task: ids(f"<|{task}|>") for task in random_model.TASKS},
        no_timestamps_token_id=ids("<|notimestamps|>"),
        prev_sot_token_id=ids("<|startofprev|>"),
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.prefix_tokens[0],
        max_length=MAX_TOKENS,
        language="ko",
        task="transcribe",
        return_timestamps=False,
        forced_decoder_ids=None,
        begin_suppress_tokens=[],  # no speech is transcribed by nothing
        suppress_tokens=_suppressed(whisper),
    )
    source = _source_generation_config(whisper.identity["whisper_hub"])
    return GenerationConfig(**{**source, **ours})


def _suppressed(whisper):
    """Ids that no text holds, without timestamps.

    Long audio is cut by timestamps; where they are not asked for, a model
    writes none.
    """
    last = whisper.tokenizer.convert_tokens_to_ids("<|notimestamps|>")
    ids = decode.suppressed_tokens(
        whisper.tokenizer,
        whisper.config.vocab_size,
        whisper.suppressed_by_source,
    )
    return [token for token in ids if token <= last]


def _source_generation_config(whisper_hub):
    """Of the model before: its alignment heads tell times of words."""
    if whisper_hub.startswith(RANDOM):
        return {}
    try:
        return GenerationConfig.from_pretrained(whisper_hub).to_dict()
    except OSError:  # a folder without one
        return {}


# The copy beside the model


def _clip(whisper):
    """(samples,) of music: it sounds in every model's context."""
    context_s = min(CLIP_S, whisper.context_s)
    return probes.clips(2, context_s)["music"][1]


@torch.no_grad()
def _compare_hugging_face(whisper, folder):
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    clip = _clip(whisper)
    states = whisper.encode(clip[None])
    tokens = _greedy(whisper, states)
    decoder_input = torch.tensor([[*whisper.tokenizer.prefix_tokens, *tokens]])
    ours = whisper.logits(whisper.decode(decoder_input, states))
    theirs = model(_mel(whisper, clip), decoder_input_ids=decoder_input).logits
    difference = _difference(theirs, ours)
    _require(folder, difference <= MOST_LOGITS, f"logits by {difference:.2g}")
    features = extractor(
        clip.numpy(), sampling_rate=extractor.sampling_rate, return_tensors="pt"
    )
    ids = model.generate(**features, max_new_tokens=N_TOKENS)[0]
    copied = tokenizer.decode(ids, skip_special_tokens=True)
    wanted = whisper.tokenizer.decode(tokens, skip_special_tokens=True)
    _require(folder, copied == wanted, f"text: {copied!r}, not {wanted!r}")
    return difference


@torch.no_grad()
def _compare_ctranslate2(whisper, folder, quantization):
    import ctranslate2
    import numpy

    model = ctranslate2.models.Whisper(
        str(folder), device="cpu", compute_type="float32"
    )
    clip = _clip(whisper)
    mel = ctranslate2.StorageView.from_array(_mel(whisper, clip).numpy())
    heard = model.encode(mel, to_cpu=True)
    states = whisper.encode(clip[None])
    difference = _difference(torch.from_numpy(numpy.array(heard)), states)
    most = MOST_STATES.get(quantization, MOST_STATES_QUANTIZED)
    told = f"encoder states by {difference:.2g}"
    _require(folder, difference <= most, told)
    if quantization != "float32":
        return difference
    prompts = [whisper.tokenizer.prefix_tokens]
    most = 2 * N_TOKENS  # of which it writes half
    written = model.generate(mel, prompts, beam_size=1, max_length=most)
    ids, wanted = written[0].sequences_ids[0], _greedy(whisper, states)
    _require(folder, ids == wanted, f"tokens: {ids}, not {wanted}")
    return difference


def _greedy(whisper, states):
    return decode.greedy(whisper, states, N_TOKENS, _suppressed(whisper))[0]


def _mel(whisper, clip):
    """(1, mels, frames) at the full context."""
    n_spare = whisper.context_samples - len(clip)
    return whisper.log_mel_spectrogram(F.pad(clip[None], (0, n_spare)))


def _difference(copied, original):
    """The largest, as a part of the largest value."""
    largest = original.abs().max().clamp(min=1)
    return ((copied - original).abs().max() / largest).item()


def _require(folder, is_equal, difference):
    if not is_equal:
        raise ValueError(
            f"'{folder}' was written and removed: loaded again, it differs "
            f"from the model in {difference}; report it with the versions of "
            "torch, transformers and ctranslate2"
        )
