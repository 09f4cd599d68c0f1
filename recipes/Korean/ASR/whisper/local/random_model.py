"""Whisper with random weights: real architecture, true vocabulary, no network.

In: a size ("tiny", …, "large-v3", "quickstart") and a seed.
Out: a Hugging Face folder, or its tokenizer alone; for tests and benchmarks.
"""

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.models.whisper.tokenization_whisper import LANGUAGES

TASKS = ("translate", "transcribe")
N_TIMESTAMPS = 1501  # 0.00 s to 30.00 s in steps of 0.02 s


@dataclass(frozen=True)
class Size:
    """Dimensions as published in openai/whisper's model card."""

    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    n_mels: int = 80
    n_languages: int = 99
    context_s: int = 30
    init_std: float = 0.02


SIZES = {
    "tiny": Size(384, 6, 4, 4),
    "base": Size(512, 8, 6, 6),
    "small": Size(768, 12, 12, 12),
    "medium": Size(1024, 16, 24, 24),
    "large-v2": Size(1280, 20, 32, 32),
    "large-v3": Size(1280, 20, 32, 32, n_mels=128, n_languages=100),
    "large-v3-turbo": Size(1280, 20, 32, 4, n_mels=128, n_languages=100),
    # Not OpenAI's: learns a small synthetic corpus on two CPU cores. Wider
    # initial weights: it is trained from nothing, and learns to listen sooner.
    "quickstart": Size(144, 2, 2, 2, context_s=5, init_std=0.06),
}


def size_named(name: str) -> Size:
    """The dimensions of a size; ValueError with the choices otherwise."""
    if name not in SIZES:
        raise ValueError(f"no size '{name}'; choose {', '.join(SIZES)}")
    return SIZES[name]


def build_tokenizer(size: Size):
    """Whisper's multilingual tokenizer, from openai-whisper's asset.

    Returns
    -------
    transformers.WhisperTokenizer
        Ids equal those of OpenAI's tokenizer, timestamps included.
    """
    from tokenizers import AddedToken
    from transformers import WhisperTokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    vocab, merges = TikTokenConverter().extract_vocab_merges_from_model(
        _asset("multilingual.tiktoken")
    )
    tokenizer = WhisperTokenizer(vocab=vocab, merges=merges)
    special = ["<|startoftranscript|>"]
    special += _language_tokens(size)
    special += [f"<|{task}|>" for task in TASKS]
    special += ["<|startoflm|>", "<|startofprev|>"]
    special += ["<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(
        [
            AddedToken(f"<|{0.02 * i:.2f}|>", normalized=False)
            for i in range(N_TIMESTAMPS)
        ]
    )
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def build_config(size: Size, tokenizer):
    """The architecture, a ``transformers.WhisperConfig``."""
    from transformers import WhisperConfig

    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    return WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=size.n_mels,
        d_model=size.width,
        encoder_layers=size.encoder_layers,
        decoder_layers=size.decoder_layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        max_source_positions=50 * size.context_s,  # one per 20 ms
        max_target_positions=448,
        init_std=size.init_std,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=end + 1,
    )


def build_folder(name: str, folder: Path, seed: int) -> str:
    """Writes a randomly initialised Whisper as Transformers reads it.

    Arguments
    ---------
    name : str
        A key of ``SIZES``.
    folder : Path
        Reused when it is complete; written under a temporary name.
    seed : int
        The same seed gives the same weights; the global state of the random
        numbers is not touched.

    Returns
    -------
    str
        The folder.
    """
    from transformers import (
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    folder = Path(folder)
    if folder.is_dir():
        return str(folder)
    size = size_named(name)
    tokenizer = build_tokenizer(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration(build_config(size, tokenizer))
    model.generation_config = _generation_config(size, tokenizer)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    WhisperFeatureExtractor(
        feature_size=size.n_mels, chunk_length=size.context_s
    ).save_pretrained(temporary)
    os.replace(temporary, folder)
    return str(folder)


def _asset(filename: str) -> str:
    spec = importlib.util.find_spec("whisper")
    path = Path(spec.origin).parent / "assets" / filename if spec else None
    if path is None or not path.is_file():
        raise FileNotFoundError(
            "whisper_hub=random:… takes the vocabulary from the package "
            "openai-whisper, which is not installed: pip install openai-whisper"
        )
    return str(path)


def _language_tokens(size: Size):
    # In the order of OpenAI's ids; Cantonese came last, with large-v3.
    return [f"<|{code}|>" for code in LANGUAGES][: size.n_languages]


def _generation_config(size: Size, tokenizer):
    from transformers import GenerationConfig

    ids = tokenizer.convert_tokens_to_ids
    end = ids("<|endoftext|>")
    return GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=end + 1,
        max_length=448,
        is_multilingual=True,
        lang_to_id={token: ids(token) for token in _language_tokens(size)},
        task_to_id={task: ids(f"<|{task}|>") for task in TASKS},
        no_timestamps_token_id=ids("<|notimestamps|>"),
        prev_sot_token_id=ids("<|startofprev|>"),
        begin_suppress_tokens=[ids("Ġ"), end],
        suppress_tokens=[],
    )
