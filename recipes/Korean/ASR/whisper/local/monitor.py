"""What a run tells of itself while it trains.

In: the figures of each step, on the device; the scores of each validation.
Out: a progress bar, train_log.txt, curves.jsonl and its picture, TensorBoard.
"""

import contextlib
import json
import math
import os
import time
from pathlib import Path

import torch
from tqdm import tqdm

from local import curves, files
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.distributed import if_main_process
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
CURVES = "curves.jsonl"
PICTURE = "learning_curves.png"
# Steps skipped above it may only seek a loss scale that fits: each halves it,
# and a run begins with 65536, which is 16 steps away.
LOSS_SCALE_BLAMED = 1.0


@register_checkpoint_hooks
class Monitor:
    """Collects the figures of steps; fetches and tells them now and then.

    Fetching makes the host wait for the device, so the figures of
    ``log_interval_steps`` steps are fetched together. A line covers the same
    steps whenever checkpoints and validations happen: what was collected for
    the next one is kept in checkpoints, and a run that goes on from one cuts
    curves.jsonl back to where it was then.

    Arguments
    ---------
    folder : str
        Of the run's output.
    train_logger : speechbrain.utils.train_logger.TrainLogger
        Of train_log.txt.
    log_interval_steps : int
        Steps a line.
    with_tensorboard : bool
        Events too, in ``<folder>/tensorboard``.
    """

    def __init__(
        self, folder, train_logger, log_interval_steps, with_tensorboard
    ):
        self.folder, self.train_logger = Path(folder), train_logger
        self.log_interval_steps = log_interval_steps
        self.with_tensorboard = with_tensorboard
        self.bar = self.tensorboard = None
        self.on_device = []  # figures and clips of each step not fetched yet
        # Of each step since the last line: nats, tokens, norm; and of those
        # nats and tokens the text's.
        self.window = []
        # Since the last validation: nats, tokens, the text's nats and tokens.
        self.totals = [0.0] * 4
        self.counts = {"skipped": 0, "failed": 0}  # since the run began
        self.n_in_row = self.most_in_row = 0  # skipped steps that count
        self.n_unread = 0  # steps in a row of which no clip could be read
        self.loss_scale = None  # of the last step, in fp16
        self.last_step = 0
        self.offset = 0  # bytes of curves.jsonl at the checkpoint
        self.wait_s = self.train_s = self.n_clips = 0
        self.since = time.monotonic()

    def begin(self, step, n_steps, nonfinite_patience, show):
        """Opens the bar; takes back what a killed run told too much.

        Arguments
        ---------
        step, n_steps : int
            Of the optimizer: done, and of the whole run.
        nonfinite_patience : int
            Steps in a row whose gradients are not finite, then stop; those
            of a loss scale above ``LOSS_SCALE_BLAMED`` do not count.
        show : bool
            Whether to draw a progress bar.
        """
        self.nonfinite_patience, self.last_step = nonfinite_patience, step
        self.bar = tqdm(
            total=n_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            smoothing=0,  # the time left counts validations in
            disable=None if show else True,  # None: where there is a terminal
        )
        if not if_main_process():
            return
        path = self.folder / CURVES
        size = path.stat().st_size if path.exists() else 0
        if size > self.offset:
            os.truncate(path, self.offset)
        elif size < self.offset:
            logger.warning("%s has lost lines of before step %d", path, step)
        if self.with_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(
                str(self.folder / "tensorboard"), purge_step=step + 1
            )

    def end(self):
        """Closes the bar and the event file, if they are open."""
        if self.bar is not None:
            self.bar.close()
        if self.tensorboard:
            self.tensorboard.close()

    def timed(self, loader):
        """The batches of a loader; times the wait for each."""
        iterator = iter(loader)
        self.since = time.monotonic()
        while True:
            start = time.monotonic()
            batch = next(iterator, None)
            self.wait_s += time.monotonic() - start
            if batch is None:
                break
            yield batch
        self._clock()

    def _clock(self):
        """Counts what has passed as time of the training."""
        now = time.monotonic()
        self.train_s += now - self.since
        self.since = now

    @contextlib.contextmanager
    def aside(self):
        """A validation or a checkpoint: no time of the training."""
        self._clock()
        yield
        self.since = time.monotonic()

    def step(self, step, epoch, rate, figures, n_clips):
        """Takes in a step; tells those of ``log_interval_steps`` together.

        Arguments
        ---------
        step, epoch : int
        rate : float
        figures : torch.Tensor
            (6,) or, in fp16, (7,), over all ranks: summed loss in nats,
            tokens, items that could not be read; nats and tokens of text
            without audio, which count in the first two as well; gradient
            norm; loss scale.
        n_clips : int
            Over all ranks.

        Raises
        ------
        ValueError
            ``nonfinite_patience`` steps in a row changed nothing.
        OSError
            A file cannot be written; tells which.
        """
        self.last_step = step
        self.on_device.append((figures, n_clips))
        self.n_clips += n_clips
        self.bar.update()
        if step % self.log_interval_steps:
            return
        self.fetch()
        self._clock()
        self._tell(step, epoch, rate)
        self.window = []
        self._require_progress(step)

    def _require_progress(self, step):
        if self.n_unread >= self.nonfinite_patience:
            raise OSError(
                f"no clip of {self.n_unread} steps in a row before step {step} "
                "could be read: has the corpus gone? log.txt names them; bring "
                "it back, then start the same command again"
            )
        if self.most_in_row < self.nonfinite_patience:
            return
        where, remedy = "", ""
        if self.loss_scale is not None:
            where = f", at loss scales down to {self.loss_scale:g}"
            remedy = ", or with precision=bf16 or fp32 instead of fp16"
        raise ValueError(
            f"the gradients of {self.most_in_row} steps in a row, shortly "
            f"before step {step}, were not finite{where}, and "
            f"nonfinite_patience={self.nonfinite_patience}; go on from the "
            "last checkpoint with a lower lr or longer warmup_steps"
            f"{remedy}"
        )

    def fetch(self):
        """Figures from the device; the host waits for all steps so far."""
        if not self.on_device:
            return
        figures, n_clips = zip(*self.on_device)
        rows = zip(n_clips, torch.stack(figures).tolist())
        self.on_device = []
        for n, row in rows:
            nats, tokens, failed, text_nats, text_tokens, norm, *scale = row
            told = nats, tokens, text_nats, text_tokens
            self.window.append([nats, tokens, norm, text_nats, text_tokens])
            self.loss_scale = scale[0] if scale else None
            self.counts["failed"] += int(failed)
            if tokens > text_tokens:  # any label has its end token
                self.n_unread = 0
            elif failed and n:  # not lines of text alone
                self.n_unread += 1
            if math.isfinite(norm) and math.isfinite(nats):
                self.totals = [a + b for a, b in zip(self.totals, told)]
            self._count_skipped(math.isfinite(norm))

    def _count_skipped(self, is_finite):
        self.counts["skipped"] += not is_finite
        if is_finite:
            self.n_in_row = 0
        elif (self.loss_scale or 0) <= LOSS_SCALE_BLAMED:
            self.n_in_row += 1
        self.most_in_row = max(self.most_in_row, self.n_in_row)

    def _tell(self, step, epoch, rate):
        finite = [row for row in self.window if math.isfinite(sum(row))]
        sums = map(sum, zip(*finite or [(math.nan,) * 5]))
        nats, tokens, norms, *text = sums
        stats = {
            **_losses(nats, tokens, *text),
            "grad_norm": norms / max(len(finite), 1),
            "skipped": len(self.window) - len(finite),
        }
        if self.loss_scale is not None:
            stats["loss_scale"] = self.loss_scale
        speed = {
            "clips_per_s": self.n_clips / max(self.train_s, 1e-3),
            "wait": 100 * self.wait_s / max(self.train_s, 1e-3),
        }
        self.wait_s = self.train_s = self.n_clips = 0
        where = {"epoch": epoch, "steps": step, "lr": rate}
        self.bar.set_postfix(
            loss=f"{stats['loss']:.3f}",
            lr=f"{rate:.2e}",
            norm=f"{stats['grad_norm']:.2f}",
            clips_per_s=f"{speed['clips_per_s']:.1f}",
            wait=f"{speed['wait']:.0f}%",
        )
        self._log(where, train_stats={**stats, **speed, **self.counts})
        line = {"step": step, "epoch": epoch, "lr": rate, **stats, **speed}
        self._append(line)
        self._events(step, "train", {"lr": rate, **stats, **speed})

    def validated(self, step, epoch, rate, scores, shares):
        """Tells a validation, beside the training since the one before.

        Arguments
        ---------
        step, epoch : int
        rate : float
            Of the last step.
        scores, shares : dict
            Name to number: of the validation; of the batches of this epoch.
        """
        self.fetch()
        self._require_progress(step)
        train = {**_losses(*self.totals), **shares, **self.counts}
        self.totals = [0.0] * 4
        where = {"epoch": epoch, "steps": step, "lr": rate}
        self._log(where, train_stats=train, valid_stats=scores)
        self._append({"step": step, "epoch": epoch, "valid": scores})
        self._events(step, "valid", scores)
        if if_main_process():
            try:
                curves.draw(self.folder / CURVES, self.folder / PICTURE)
            except Exception as error:  # no picture is worth a run
                logger.warning("no learning curves were drawn: %s", error)

    def _log(self, where, **stats):
        with _written(self.train_logger.save_file):
            self.train_logger.log_stats(
                where, **stats, verbose=self.bar.disable
            )

    def _append(self, line):
        if not if_main_process():
            return
        path = self.folder / CURVES
        with _written(path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _events(self, step, stage, stats):
        if self.tensorboard:
            for name, value in stats.items():
                self.tensorboard.add_scalar(f"{stage}/{name}", value, step)

    @mark_as_saver
    def save(self, path):
        """Writes what the next lines will be made of.

        Raises
        ------
        ValueError
            The run must stop: one that went on from here would stop, too.
        """
        self.fetch()
        self._require_progress(self.last_step)
        curves_file = self.folder / CURVES
        offset = 0
        if curves_file.exists():
            files.sync(curves_file)
            offset = curves_file.stat().st_size
        state = {
            "window": self.window,
            "totals": self.totals,
            "counts": self.counts,
            "n_in_row": self.n_in_row,
            "n_unread": self.n_unread,
            "offset": offset,
        }
        Path(path).write_text(json.dumps(state), encoding="utf-8")

    @mark_as_loader
    def load(self, path, end_of_epoch):
        """Reads what ``save`` wrote."""
        del end_of_epoch
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        no_text = 0.0, 0.0  # older checkpoints tell nothing of it
        state["window"] = [[*row, *no_text][:5] for row in state["window"]]
        state["totals"] = [*state["totals"], *no_text][:4]
        vars(self).update(state)


def _losses(nats, tokens, text_nats, text_tokens):
    """Nats a token: of all; where there was text, of clips and of text."""
    losses = {"loss": nats / max(tokens, 1)}
    if text_tokens > 0:
        if tokens > text_tokens:
            losses["asr_loss"] = (nats - text_nats) / (tokens - text_tokens)
        losses["text_loss"] = text_nats / text_tokens
    return losses


@contextlib.contextmanager
def _written(path):
    """Says which file could not be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}; free space there, then "
            "start the same command again: it goes on from the last checkpoint",
        ) from error
