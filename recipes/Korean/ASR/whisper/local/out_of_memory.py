"""What to say when a batch did not fit into memory.

In: an error, its batch, the settings that memory hangs on.
Out: an error that names the batch, the peak, and what to lower.
"""

import contextlib
import errno
import re
import sys

import torch

from local.memory import device_bytes, readable

N_NAMED = 5  # clips of a batch that a message names
SETTINGS = (
    "max_batch_length",
    "batch_size",
    "grad_accumulation_factor",
    "gradient_checkpointing",
    "precision",
    "adaptation",
    "base_precision",
    "optimizer_name",
)
# What libraries say where they raise a plain RuntimeError.
SAID = ("out of memory", "defaultcpuallocator", "alloc_failed", "bad_alloc")
ASKED = re.compile(r"to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.I)
UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@contextlib.contextmanager
def explained(batch, context_s, settings, device):
    """Has an error of too little memory name its batch, and what to lower.

    Arguments
    ---------
    batch : PaddedBatch
        With ``id``, ``duration`` and ``tokens_bos``.
    context_s : float
        Of the encoder, for each clip.
    settings : dict
        Names of ``SETTINGS`` to their values.
    device : str

    Raises
    ------
    RuntimeError
        In place of what ``is_out_of_memory`` knows.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        n_tokens = batch.tokens_bos.data.shape[1]
        of_batch = batch.id, batch.duration, context_s, n_tokens
        told = out_of_memory(error, *of_batch, settings, device)
        raise RuntimeError(told) from error


def is_out_of_memory(error):
    """Whether an exception says that the device or the host was full."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(s in text for s in SAID)


def out_of_memory(
    error, ids, durations_s, context_s, n_tokens, settings, device
):
    """What to tell where a training batch did not fit.

    Arguments
    ---------
    error : Exception
        For which ``is_out_of_memory`` holds.
    ids : sequence of str
        Of the batch's clips.
    durations_s : sequence of float
        Of each of them.
    context_s : float
        Of the encoder, for each of them.
    n_tokens : int
        Of the longest label.
    settings : dict
        Name to present value, of those that decide about memory; remedies
        come from ``SETTINGS``, as far as they are there.
    device : str or torch.device

    Returns
    -------
    str
        The batch, the memory, the settings and what to set, a line each.
    """
    asked = ASKED.search(str(error))
    if asked:
        n_bytes = float(asked[1]) * UNITS[asked[2].lower()]
        asked = f": {readable(n_bytes)} more did not fit"
    told = [f"{name}={value}" for name, value in settings.items()]
    lines = [
        f"out of memory on {device}{asked or ''}",
        f"batch: {_batch(ids, durations_s, context_s, n_tokens)}",
        f"memory: {_usage(device)}",
        f"settings: {', '.join(told) or 'unknown'}",
        f"remedy: {_remedy(settings, len(ids), context_s)}",
    ]
    return "\n  ".join(lines)


def _batch(ids, durations_s, context_s, n_tokens):
    names = ", ".join(map(str, ids[:N_NAMED]))
    if len(ids) > N_NAMED:
        names += ", …"
    if not context_s:  # text without audio
        return f"{len(ids)} line(s) ({names}), the longest {n_tokens} tokens"
    lengths = sorted(float(seconds) for seconds in durations_s) or [0.0]
    return (
        f"{len(ids)} clip(s) of {lengths[0]:.1f} to {lengths[-1]:.1f} s "
        f"({names}), encoder context {context_s:.1f} s, longest label "
        f"{n_tokens} tokens"
    )


def _usage(device):
    peak, total = _peak_bytes(device), device_bytes(device)
    told = [] if peak is None else [f"{readable(peak)} at its peak"]
    told += [] if total is None else [f"{readable(total)} in all"]
    return ", ".join(told) or "unknown"


def _remedy(settings, n_clips, context_s):
    """The settings to change, with values."""
    smaller = _smaller_batch(settings, n_clips, context_s)
    ways = [smaller] if smaller else []
    if settings.get("gradient_checkpointing") is False:
        ways.append("--gradient_checkpointing=True")
    if settings.get("precision") == "fp32":
        ways.append("--precision=bf16")
    if not smaller:
        ways += _smaller_model(settings)
    if not ways:
        return "a smaller whisper_hub, or a device with more memory"
    text = f"set {' or '.join(ways)}"
    factor = settings.get("grad_accumulation_factor")
    if smaller and factor:
        text += f"; --grad_accumulation_factor={2 * factor} keeps a step's size"
    return text


def _smaller_model(settings):
    """What is left where a single clip does not fit."""
    adaptation = settings.get("adaptation")
    if adaptation in ("full", "frozen_encoder"):
        if settings.get("optimizer_name") == "adamw":
            yield "--optimizer_name=adamw_8bit"
        if adaptation == "full":
            yield "--adaptation=frozen_encoder"
        yield "--adaptation=lora"
    base = settings.get("base_precision")
    if adaptation == "lora" and base == "fp32":
        # A bf16 base is multiplied under autocast alone.
        is_fp32 = settings.get("precision") == "fp32"
        yield f"--base_precision={'int8' if is_fp32 else 'bf16'}"
    elif adaptation == "lora" and base in ("bf16", "int8"):
        yield f"--base_precision={'int8' if base == 'bf16' else 'int4'}"


def _smaller_batch(settings, n_clips, context_s):
    """Half of the limit that a batch has met; None for a single clip."""
    if n_clips < 2:
        return None
    if "test_batch_size" in settings:
        return f"--test_batch_size={n_clips // 2}"
    most = settings.get("batch_size")
    length_s = settings.get("max_batch_length")
    if length_s and not (most and n_clips >= most):
        # Text without audio has no seconds: then all of the limit counts.
        half_s = min(length_s, n_clips * context_s or length_s) / 2
        return f"--max_batch_length={max(1, int(half_s))}"
    return f"--batch_size={n_clips // 2}"


def _peak_bytes(device):
    """What this process has had at most; None where nobody tells."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
