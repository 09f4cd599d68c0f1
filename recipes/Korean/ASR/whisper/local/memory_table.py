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
    "eval_precision",
    "test_batch_size",
    "max_new_tokens",
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
    eval_precision,
    test_batch_size,
    max_new_tokens,
    device,
):
    """The parts of a step at the fullest batch; the largest batches by GPU.

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
    eval_precision : str
    test_batch_size, max_new_tokens : int
        Of scoring.
    device : str
        Of this machine. Where it is a CPU, all is told for a GPU.

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
        device="cuda" if device == "cpu" else device,
    )
    limits = batch_size, max_batch_length
    batch = fullest(config, mode, encoder_context, *limits)
    counted = memory.weights(config, mode)

    def scoring(n_clips):
        rest = n_clips, eval_precision, max_new_tokens
        return memory.scoring(config, mode, *rest)

    lines = [
        f"model   {whisper_hub}: {_millions(counted.n_trained)} weights "
        f"trained, {_millions(counted.n_frozen)} frozen",
        f"mode    {_mode(mode)}",
        f"batch   {_batch(batch)}",
        "        which fills batch_size and max_batch_length, in clips of like",
        "        length; a longer clip of the corpus is a batch by itself",
        "",
        "a step on a GPU",
        *_parts(memory.plan(config, mode, batch)),
        f"{f'scoring {test_batch_size} clips':<24}"
        f"{readable(scoring(test_batch_size)):>10}",
        "",
        *_gpus(config, mode, batch, scoring),
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


def largest(n_bytes_of, n_bytes):
    """Clips at once that a device can take.

    Arguments
    ---------
    n_bytes_of : callable
        Number of clips to the bytes that they take.
    n_bytes : float
        Of the device, of which a reserve is left.

    Returns
    -------
    int
        0 where a single one does not fit; ``MOST_CLIPS`` at most.
    """
    free = n_bytes - max(RESERVE_BYTES, RESERVE_SHARE * n_bytes)
    fitting, too_many = 0, 1
    while too_many <= MOST_CLIPS and n_bytes_of(too_many) <= free:
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1 and fitting < MOST_CLIPS:
        middle = (fitting + too_many) // 2
        if n_bytes_of(middle) <= free:
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


def _gpus(config, mode, batch, scoring):
    """The largest batches by GPU, as the run is and with checkpointing."""
    modes = {"a step": mode}
    if not mode.gradient_checkpointing:
        with_it = mode._replace(gradient_checkpointing=True)
        modes["a step, checkpointing"] = with_it
    seconds = batch.context_samples / SAMPLE_RATE
    yield f"The most clips of {seconds:.2f} s, as in the batch above: set batch_size"
    yield "to their number and max_batch_length to their seconds."
    yield (
        f"{readable(RESERVE_BYTES)} or {RESERVE_SHARE:.0%} of a GPU is assumed "
        "to be CUDA's own."
    )
    names = [*modes, "test_batch_size"]
    yield "GPU         " + "".join(f"{name:<26}" for name in names).rstrip()
    rows = [(f"{gb} GB", 1e9 * gb) for gb in GPUS_GB]
    if n_bytes := memory.device_bytes(mode.device):
        rows.append(("this one", n_bytes))
    for name, n_bytes in rows:
        found = [
            _most(_step_of(config, one, batch), n_bytes, seconds)
            for one in modes.values()
        ]
        found.append(str(largest(scoring, n_bytes) or "none fits"))
        yield f"{name:<12}" + "".join(f"{told:<26}" for told in found).rstrip()


def _step_of(config, mode, batch):
    def n_bytes(n_clips):
        some = batch._replace(n_clips=n_clips)
        return memory.plan(config, mode, some)["total"]

    return n_bytes


def _most(n_bytes_of, n_bytes, seconds):
    n_clips = largest(n_bytes_of, n_bytes)
    if not n_clips:
        return "none fits"
    clips = f"{n_clips} clip{'s' if n_clips > 1 else ''}"
    return f"{clips}, {max(1, math.floor(n_clips * seconds))} s"


def _millions(n):
    return f"{n / 1e6:,.1f} M"
