"""What a step takes of memory, and how large a batch a GPU can take.

In: the settings of a run; no corpus, no weights.
Out: a table for the terminal.
"""

import math

from local import batching, dataio, memory, sources
from local.audio import SAMPLE_RATE
from local.lora import Lora
from local.memory import readable
from local.model import MAX_TOKENS

GPUS_GB = (8, 12, 16, 24, 40, 48, 80, 141)  # 1e9 bytes; cards have more
# 99 of 100 clips have fewer: 853 read clips, Whisper's tokenizer.
TOKENS_PER_S = 5.7
SHORTEST_S = 0.1
# Assumed, not measured: what the CUDA context and its libraries take, and
# what the allocator cannot use of its blocks.
RESERVE_BYTES = 1e9
RESERVE_SHARE = 0.08
MOST_CLIPS = 2**16
CHECKPOINTING = "gradient_checkpointing"
SETTINGS = (  # of a run, by their names; beside device
    "whisper_hub",
    "adaptation",
    "lora",
    "base_precision",
    "optimizer_name",
    "precision",
    CHECKPOINTING,
    "batch_size",
    "max_batch_length",
    "encoder_context",
)


def told(
    *,
    whisper_hub,
    adaptation,
    lora,
    base_precision,
    optimizer_name,
    precision,
    gradient_checkpointing,
    batch_size,
    max_batch_length,
    encoder_context,
    device,
):
    """The parts of a step at the fullest batch; the largest batch by GPU.

    Arguments
    ---------
    whisper_hub, adaptation, base_precision, optimizer_name, precision : str
    lora : dict
        Fields of ``local.lora.Lora``, for adaptation "lora".
    gradient_checkpointing : bool
    batch_size : int
        Clips of a micro-batch, at most.
    max_batch_length : float
        Seconds of a micro-batch, at most; 0: no limit.
    encoder_context : str
        One of ``local.model.CONTEXTS``; a frozen encoder trims to the clip.
    device : str
        Of this machine; the parts are told for it.

    Returns
    -------
    str

    Raises
    ------
    ValueError
        No such size, or no layer for ``lora``.
    OSError
        The source is not there.
    """
    config = sources.load_config(whisper_hub)
    mode = memory.mode_of(
        config,
        adaptation,
        Lora(**lora),
        precision=precision,
        base_precision=base_precision,
        gradient_checkpointing=gradient_checkpointing,
        optimizer=optimizer_name,
        device=device,
    )
    limits = batch_size, max_batch_length
    batch = fullest(config, mode, encoder_context, *limits)
    counted = memory.weights(config, mode)
    lines = [
        f"model   {whisper_hub}: {_millions(counted.n_trained)} weights "
        f"trained, {_millions(counted.n_frozen)} frozen",
        f"mode    {_mode(mode)}",
        f"batch   {_batch(batch)}",
        "        (a clip longer than max_batch_length is a batch by itself)",
        "",
        *_parts(memory.plan(config, mode, batch)),
        "",
        *_gpus(config, mode, batch),
    ]
    return "\n".join(lines)


def fullest(config, mode, encoder_context, batch_size, max_batch_length):
    """The batch that takes most, of those that fill the settings' limits.

    Batches of ``batching.Batches`` hold clips of like length: as many as
    ``batch_size`` of them, or a few that are at the model's full context. A
    clip longer than ``max_batch_length`` is a batch by itself, which only the
    corpus tells.

    Arguments
    ---------
    config : transformers.WhisperConfig
    mode : local.memory.Mode
    encoder_context : str
    batch_size : int
    max_batch_length : float

    Returns
    -------
    local.memory.Batch
    """
    context_s = config.max_source_positions / 50
    short_s = max(SHORTEST_S, min(context_s, max_batch_length / batch_size))
    if mode.freeze_encoder:
        encoder_context = "true_length"
    lengths = {
        "true_length": [short_s],
        "full": [context_s],
        "mixed": [short_s, context_s],
    }[encoder_context]
    if not max_batch_length:
        lengths = [context_s]
    batches = []
    for seconds in lengths:
        context = int(batching.context_samples(seconds, context_s))
        n_clips = batch_size
        if max_batch_length:
            most = int(max_batch_length * SAMPLE_RATE / context)
            n_clips = max(1, min(batch_size, most))
        batches.append(memory.Batch(n_clips, context, _n_tokens(context)))
    return max(batches, key=lambda b: memory.plan(config, mode, b)["total"])


def largest(config, mode, batch, n_bytes):
    """Clips, each as long as those of a batch, that a device can take.

    Arguments
    ---------
    config : transformers.WhisperConfig
    mode : local.memory.Mode
    batch : local.memory.Batch
    n_bytes : float
        Of the device, of which a reserve is left.

    Returns
    -------
    int
        0 where a single one does not fit; ``MOST_CLIPS`` at most.
    """
    free = n_bytes - max(RESERVE_BYTES, RESERVE_SHARE * n_bytes)

    def fits(n_clips):
        some = batch._replace(n_clips=n_clips)
        return memory.plan(config, mode, some)["total"] <= free

    fitting, too_many = 0, 1
    while too_many <= MOST_CLIPS and fits(too_many):
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1 and fitting < MOST_CLIPS:
        middle = (fitting + too_many) // 2
        if fits(middle):
            fitting = middle
        else:
            too_many = middle
    return fitting


def _n_tokens(context_samples):
    """Of the longest decoder input that so much speech will have."""
    n_text = math.ceil(TOKENS_PER_S * context_samples / SAMPLE_RATE)
    return min(dataio.N_PREFIX + n_text, MAX_TOKENS)


def _mode(mode):
    parts = [f"adaptation={mode.adaptation}"]
    if mode.lora:
        parts.append(f"base_precision={mode.base_precision}")
    parts += [
        f"precision={mode.precision}",
        f"{CHECKPOINTING}={mode.gradient_checkpointing}",
        f"optimizer_name={mode.optimizer}",
    ]
    return ", ".join(parts)


def _batch(batch):
    seconds = batch.context_samples / SAMPLE_RATE
    return (
        f"{batch.n_clips} clip{'s' if batch.n_clips > 1 else ''} of "
        f"{seconds:.2f} s, {batch.n_clips * seconds:.1f} s in all, "
        f"{batch.n_tokens} tokens each"
    )


def _parts(n_bytes):
    for part, n in n_bytes.items():
        if part == "total":
            yield f"{'at once, at most':<24}{readable(n):>10}"
        elif n:
            yield f"{part:<24}{readable(n):>10}"


def _gpus(config, mode, batch):
    """The largest batch by GPU, as the run is and with checkpointing."""
    modes = {"as set": mode}
    if not mode.gradient_checkpointing:
        with_it = mode._replace(gradient_checkpointing=True)
        modes[f"{CHECKPOINTING}=True"] = with_it
    yield (
        "The largest batch of such clips: their number for batch_size, at "
        "least, and"
    )
    yield (
        f"max_batch_length. {readable(RESERVE_BYTES)} or {RESERVE_SHARE:.0%} "
        "of a GPU is assumed to be CUDA's own."
    )
    yield "GPU         " + "".join(f"{name:<24}" for name in modes).rstrip()
    rows = [(f"{gb} GB", 1e9 * gb, "cuda") for gb in GPUS_GB]
    if n_bytes := memory.device_bytes(mode.device):
        rows.append((f"this {mode.device}", n_bytes, mode.device))
    for name, n_bytes, device in rows:
        found = [
            _largest(config, m._replace(device=device), batch, n_bytes)
            for m in modes.values()
        ]
        yield f"{name:<12}" + "".join(f"{told:<24}" for told in found).rstrip()


def _largest(config, mode, batch, n_bytes):
    n_clips = largest(config, mode, batch, n_bytes)
    if not n_clips:
        return "none fits"
    seconds = n_clips * batch.context_samples / SAMPLE_RATE
    clips = f"{n_clips} clip{'s' if n_clips > 1 else ''}"
    return f"{clips}, {math.ceil(seconds)} s"


def _millions(n):
    return f"{n / 1e6:,.1f} M"
