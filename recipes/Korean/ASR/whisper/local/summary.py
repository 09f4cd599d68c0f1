"""What a run will do, told before its first step.

In: plain values: of the model, the data, the steps; bytes by part.
Out: a block of lines for the terminal; the seconds of each phase of start-up.
"""

import os
import textwrap
import time
from pathlib import Path

from local import curves, dataio, memory
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
PICTURE = "learning_rate.png"
ADAPTERS_LR = 1e-4  # the lowest that is usual for them


class Phases:
    """Seconds of each phase of start-up, the imports before it included."""

    def __init__(self):
        self.seconds = {}
        self.last = time.monotonic()
        lived_s = _process_seconds()
        if lived_s is not None:
            self.seconds["imports"] = lived_s

    def done(self, name):
        """What has passed since the last call was ``name``."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def __str__(self):
        return ", ".join(f"{k} {_lasted(v)}" for k, v in self.seconds.items())


def _process_seconds():
    """How long this process has lived; None where the system has no /proc."""
    try:
        stat = Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])  # since the boot
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return now_s - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # macOS has no boot time either
        return None


def _lasted(seconds):
    """6.1 s, 4.2 min, 3.0 h."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 99.95 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def tell(
    whisper,
    batches,
    schedule,
    output_folder,
    valid_rows,
    largest,
    tokenizer,
    *,
    precision,
    checkpointing,
    optimizer,
    device,
    n_steps,
    **of_run,
):
    """Logs what a run will do, and draws its rates into learning_rate.png.

    Arguments
    ---------
    whisper : local.model.Whisper
    batches : local.batching.Batches
        The largest comes first.
    schedule : local.schedules.Schedule
    output_folder : str
    valid_rows : iterable of dict
        With a ``duration``.
    largest : list of str
        Labels of the largest batch.
    tokenizer : transformers.WhisperTokenizer
    precision : str
    checkpointing : bool
    optimizer : str
        One of ``local.optimizers.OPTIMIZERS``.
    device : str
        Of the model.
    n_steps : int
    **of_run
        Of ``describe``.
    """
    rates = [schedule.rate(n, n_steps) for n in range(1, n_steps + 1)]
    curves.draw_rates(rates, Path(output_folder) / PICTURE)
    n_text = max(len(dataio.encode(text, tokenizer)) for text in largest)
    base = whisper.identity.get("base_precision", "fp32")
    mode = memory.mode_of(
        whisper.config,
        whisper.identity["adaptation"],
        whisper.lora,
        precision=precision,
        base_precision=base,
        gradient_checkpointing=checkpointing,
        optimizer=optimizer,
        device=device,
    )
    batch = memory.Batch(
        n_clips=-(-len(batches.batches[0]) // batches.n_ranks),
        context_samples=int(batches.contexts[0]),
        n_tokens=dataio.N_PREFIX + n_text,
    )
    counted = memory.weights(whisper.config, mode)
    n_weights = counted.n_trained + counted.n_frozen
    n_trained = sum(t.numel() for t in whisper.trained_state().values())
    told = describe(
        model="{whisper_hub}, {adaptation}".format(**whisper.identity),
        base_precision=base,
        n_trained=n_trained,  # of the model itself, not of its plan
        n_frozen=n_weights - n_trained,
        train_s=batches.epoch_s,
        n_texts=int((batches.n_clips == 0).sum()),
        valid_s=[row["duration"] for row in valid_rows],
        n_steps=n_steps,
        n_ranks=batches.n_ranks,
        precision=precision,
        n_bytes=memory.plan(whisper.config, mode, batch),
        device_bytes=memory.device_bytes(device),
        **of_run,
    )
    logger.info("the run:\n%s\n%s", told, schedule.table(n_steps))
    if whisper.lora and schedule.lr < ADAPTERS_LR:
        logger.warning(
            "lr=%s is a rate for whole weights; adapters usually take 1e-4 to "
            "1e-3: --lr=0.0005",
            schedule.lr,
        )
    if schedule.n_warmup(n_steps) > n_steps:
        logger.warning(
            "warmup_steps=%s are more than the run's %d: it never reaches lr",
            schedule.warmup_steps,
            n_steps,
        )


def describe(
    *,
    model,
    base_precision,
    n_trained,
    n_frozen,
    train_s,
    n_texts,
    valid_s,
    n_epochs,
    n_steps,
    n_done,
    n_ranks,
    precision,
    n_bytes,
    device_bytes,
    phases,
):
    """The lines of a run.

    Arguments
    ---------
    model : str
        Its source and adaptation mode.
    base_precision : str
        Of what is frozen beside adapters; "fp32" in other modes.
    n_trained, n_frozen : int
        Weights.
    train_s, valid_s : sequence of float
        Durations of the clips of an epoch and of a validation.
    n_texts : int
        Batches of text without audio in an epoch, of all ranks.
    n_epochs, n_steps, n_done : int
        Steps of the optimizer: of the run, and made before.
    n_ranks : int
    precision : str
    n_bytes : dict
        Part to bytes, "total" among them, as ``memory.plan`` gives them.
    device_bytes : int or None
        Of a GPU, or what a process may take of the host.
    phases : Phases

    Returns
    -------
    str
    """
    n_weights = n_trained + n_frozen
    share = 100 * n_trained / max(n_weights, 1)
    parts = ", ".join(
        f"{part} {memory.readable(n)}"
        for part, n in n_bytes.items()
        if part != "total" and n >= 5e5
    )
    there = f" of {memory.readable(device_bytes)}" if device_bytes else ""
    base = "" if base_precision == "fp32" else f" on {base_precision}"
    rows = {
        "model": f"{model}{base}, {precision}",
        "trained": f"{_millions(n_trained)} of {_millions(n_weights)} "
        f"weights ({share:.1f} %), {_millions(n_frozen)} frozen",
        "training": f"{_heard(train_s)}"
        + (f", {n_texts:,} batches of text" if n_texts else "")
        + " an epoch",
        "validation": _heard(valid_s),
        "steps": f"{n_steps:,} in {n_epochs} epochs"
        + (f", going on after step {n_done:,}" if n_done else ""),
        "a step": f"{len(train_s) * n_epochs / max(n_steps, 1):.1f} clips, "
        f"{sum(train_s) * n_epochs / max(n_steps, 1):.1f} s of audio on average, "
        f"over {n_ranks} process{'es' if n_ranks > 1 else ''}",
        "memory": f"about {memory.readable(n_bytes['total'])}{there} a process at most: "
        f"{parts}",
        "start-up": str(phases),
    }
    return "\n".join(
        textwrap.fill(f"{name:<12}{text}", 80, subsequent_indent=" " * 12)
        for name, text in rows.items()
    )


def _millions(n):
    return f"{n / 1e6:,.1f} M"


def _heard(durations_s):
    hours = sum(durations_s) / 3600
    return f"{len(durations_s):,} clips, {hours:,.2f} h"
