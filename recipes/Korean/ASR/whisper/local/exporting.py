"""A fine-tuned model in the forms that other programs load.

In: a Whisper with its weights, and where they come from.
Out: a Hugging Face, CTranslate2 or PEFT folder, compared with the model.
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
from safetensors import SafetensorError
from transformers import GenerationConfig, WhisperForConditionalGeneration
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from local import (
    adapter_folder,
    checkpoints,
    copies,
    decode,
    engines,
    files,
    random_model,
    trained,
)
from local.model import ADAPTER_FILE, MAX_TOKENS
from local.sources import RANDOM

logger = logging.getLogger(__name__)

FORMATS = ("hf", "ct2", "adapter")
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
NO_SCORES = ("unixtime", "end-of-epoch", "files")  # among them in a checkpoint
FASTER_WHISPER_S = 30  # of context; it pads to them whatever a model takes
COPIED = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")


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
    return copies.compare_hugging_face(whisper, folder)


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
    return copies.compare_ctranslate2(whisper, folder, quantization)


def write_adapter(whisper, folder, source, provenance):
    """Writes a folder that PEFT loads beside the base.

    Arguments
    ---------
    whisper : local.model.Whisper
        With its adapters, beside a base in fp32.
    folder : Path
        There already.
    source : local.trained.Source
        The checkpoint that holds them.
    provenance : dict
        What ``provenance_of`` gives.

    Returns
    -------
    float
        Largest difference of the logits, as for ``write_hugging_face``.

    Raises
    ------
    ValueError
        What was written is not what was to be written.
    """
    shutil.copy(Path(source.path) / ADAPTER_FILE, folder)
    name = adapter_folder.CONFIG_FILE
    config = json.loads((Path(source.path) / name).read_text(encoding="utf-8"))
    # Where it lies now: a run of random weights may have moved.
    config["base_model_name_or_path"] = whisper.source
    with files.replacing(folder / name) as file:
        json.dump(config, file, indent=2, sort_keys=True)  # as PEFT does
    _write(folder, provenance)
    return copies.compare_adapter(whisper, folder)


def merge(whisper, source, random_folder):
    """Adds a model's adapters to its weights, and tells what that changes.

    Adapters that learned beside a base of less precision have learned its
    rounding too, which the base in fp32 is without.

    Arguments
    ---------
    whisper : local.model.Whisper
        Beside a base in fp32; changed in place.
    source : local.trained.Source
        Where it was loaded from.
    random_folder : str or Path
        As for ``trained.load``.

    Raises
    ------
    ValueError
        The logits are others than before.
    """
    tokens, before = copies.logits(whisper)
    whisper.merge()
    _, merged = copies.logits(whisper, tokens)
    difference = copies.difference(merged, before)
    if difference > copies.MOST_LOGITS:
        raise ValueError(
            f"model '{source.path}': merged, its logits differ by "
            f"{difference:.2g} of the largest; choose --format adapter, and "
            "report it with the versions of torch and peft"
        )
    base = trained.identity(source)["base_precision"]
    if base == "fp32":
        return
    if lacking := trained.problem(source, "cpu"):
        logger.warning("not compared with the model as trained: %s", lacking)
        return
    as_trained = trained.load(source, "cpu", random_folder).float()
    logger.warning(
        "merged into the base in fp32: logits differ by %.2g of the largest "
        "from those beside the base in %s, with which the adapters learned",
        copies.difference(merged, copies.logits(as_trained, tokens)[1]),
        base,
    )


def require_adapter(source):
    """Raises ValueError where a model is no LoRA run."""
    told = trained.identity(source)
    if source.kind == "adapter":
        why = "it is such a folder already; copy it"
    elif told["adaptation"] != "lora":
        why = "its weights are whole; choose --format hf or ct2"
    else:
        return
    raise ValueError(f"--format adapter: model '{source.path}': {why}")


def require_ctranslate2(source):
    """Raises ValueError where CTranslate2 is missing, or cannot run a model."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ValueError(
            "--format ct2: CTranslate2 is not installed; pip install "
            "ctranslate2 faster-whisper, or choose --format hf"
        )
    tokenizer = engines.load_tokenizer(source)
    n_ids = max(tokenizer.get_vocab().values()) + 1
    if above := decode.above_timestamps(tokenizer, n_ids):
        raise ValueError(
            f"--format ct2: model '{source.path}': it has {len(above)} tokens "
            "above the timestamps, which CTranslate2 and faster-whisper take "
            "for timestamps; choose --format hf, or train with new_tokens="
            "replace from a base without such tokens"
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
        before, of adapters also the base's precision in training and whether
        they are ``merged``; ``precision``, ``beam_size`` and
        ``max_new_tokens`` of the run's test, and ``versions``. Of a copy of a
        copy: the first one's.
    """
    earlier = Path(source.path) / trained.PROVENANCE
    told = {"source": given}
    if source.kind == "checkpoint":
        meta = _meta(Path(source.path))
        told |= {"checkpoint": Path(source.path).name, "scores": meta}
        told |= trained.identity(source)
        if new := told.get("new_tokens"):  # the tokenizer has the rest
            told["new_tokens"] = {"mode": new["mode"], "n": len(new["ids"])}
    elif earlier.is_file():
        told = json.loads(earlier.read_text(encoding="utf-8"))
    elif source.kind == "adapter":
        told |= {**whisper.identity, **trained.identity(source)}
    if told.get("adaptation") == "lora":
        told["merged"] = whisper.lora is None
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
        suppress_tokens=copies.suppressed(whisper),
    )
    source = _source_generation_config(whisper.identity["whisper_hub"])
    if decode.above_timestamps(tokenizer, whisper.config.vocab_size):
        # Two of them in a row would end a segment, and what follows is lost.
        # Of audio over 30 s, generate now hears the first 30 s alone.
        ours["force_unique_generate_call"] = True
    return GenerationConfig(**{**source, **ours})


def _source_generation_config(whisper_hub):
    """Of the model before: its alignment heads tell times of words."""
    if whisper_hub.startswith(RANDOM):
        return {}
    try:
        return GenerationConfig.from_pretrained(whisper_hub).to_dict()
    except OSError:  # a folder without one
        return {}
