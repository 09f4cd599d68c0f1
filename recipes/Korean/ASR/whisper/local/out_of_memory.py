"""What to say when a batch did not fit into memory.

In: a batch and its context; the settings that memory hangs on.
Out: an error that names the batch, the peak, and what to lower.
"""

import contextlib
import resource

import torch

SETTINGS = (
    "max_batch_length",
    "batch_size",
    "grad_accumulation_factor",
    "gradient_checkpointing",
)
N_NAMED = 5  # clips of a batch
# What libraries say where they raise a plain RuntimeError.
SAID = ("out of memory", "can't allocate memory", "alloc_failed", "bad_alloc")


@contextlib.contextmanager
def explained(batch, context_s, settings, device):
    """Has an error of too little memory name its batch, and what to lower.

    Arguments
    ---------
    batch : PaddedBatch
        With ``id``, ``duration`` and ``tokens_bos``.
    context_s : float
        What the encoder was given for each clip.
    settings : dict
        Names of ``SETTINGS`` to their values.
    device : str

    Raises
    ------
    RuntimeError
        In place of torch.OutOfMemoryError, or of what a CPU's allocator says.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(_told(batch, context_s, settings, device)) from error


def is_out_of_memory(error):
    """Whether an exception tells of too little memory."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    told = str(error).lower()
    return isinstance(error, kinds) or any(said in told for said in SAID)


def _told(batch, context_s, settings, device):
    ids, durations_s = batch.id, [float(s) for s in batch.duration]
    shown = ", ".join(ids[:N_NAMED]) + ", …" * (len(ids) > N_NAMED)
    now = ", ".join(f"{name}={settings[name]}" for name in SETTINGS)
    remedies = []
    if len(ids) > 1:
        remedies.append(f"--max_batch_length={context_s * len(ids) / 2:.0f}")
    if not settings["gradient_checkpointing"]:
        remedies.append("--gradient_checkpointing=True")
    remedies = " or ".join(remedies) or "a smaller model or a larger GPU"
    return (
        f"out of memory on {device} at {len(ids)} clips ({shown}) of "
        f"{min(durations_s):.1f} to {max(durations_s):.1f} s at a context of "
        f"{context_s:.2f} s, with labels of up to "
        f"{batch.tokens_bos.data.shape[1]} tokens; the peak so far is "
        f"{_peak(device)}. Now {now}; try {remedies}. With smaller batches a "
        "larger grad_accumulation_factor keeps the size of a step"
    )


def _peak(device):
    if device.startswith("cuda"):
        total = torch.cuda.get_device_properties(device).total_memory
        peak = torch.cuda.max_memory_allocated(device)
        return f"{peak / 1e9:.1f} of {total / 1e9:.1f} GB"
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{kib * 1024 / 1e9:.1f} GB"
