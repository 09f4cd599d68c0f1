"""Runs of train.py in this process: sooner, and they tell what they did."""

import contextlib
import functools
import io
import logging
import sys
from pathlib import Path
from unittest import mock

import train
from local import curves
from transformers import AutoTokenizer

import speechbrain as sb
from speechbrain.utils import logger

RECIPE = Path(train.__file__).parent
load_tokenizer = functools.cache(train.sources.load_tokenizer)
models_own = functools.cache(AutoTokenizer.from_pretrained)  # half a second


class Stopped(Exception):
    """The power failed."""


class Recorded(train.ASR):
    """Keeps the micro-batches and the weights of a run.

    ``seen``: (epoch, IDs) of each micro-batch of the training.
    ``encoded``: (epoch, clips, samples) of each call of the encoder therein.
    ``tokens``: decoder input of the last micro-batch.
    ``valid_ids``: IDs of each validation.
    ``trained``: weights after the last step, before the best are loaded.
    ``train_seconds``: of all training clips.
    ``output_folder``, and ``printed``: what the run told on its terminal.
    """

    def __init__(self, stop_after_step, **options):
        super().__init__(**options)
        self.stop_after_step = stop_after_step
        self.seen, self.encoded, self.trained = [], [], None
        self.valid_ids = []
        self.output_folder = Path(self.hparams.output_folder)

    def on_fit_start(self):
        super().on_fit_start()
        encode_padded = self.whisper.encode_padded

        def record(wav, n_samples):
            if self.whisper.training:
                entry = self.epoch, len(wav), int(n_samples)
                self.encoded.append(entry)
            return encode_padded(wav, n_samples)

        self.whisper.encode_padded = record

    def make_dataloader(self, dataset, stage, **options):
        if stage == sb.Stage.TRAIN:
            rows = dataset.data.values()
            self.train_seconds = sum(row["duration"] for row in rows)
        return super().make_dataloader(dataset, stage, **options)

    def fit_batch(self, batch):
        if self.optimizer_step == self.stop_after_step:
            raise Stopped
        self.seen.append((self.epoch, list(batch.id)))
        self.tokens = batch.tokens_bos.data
        return super().fit_batch(batch)

    def validated(self, *told):
        self.valid_ids.append(sorted(self.records))
        super().validated(*told)

    def test(self, test_sets, contexts, suffix=""):
        if not suffix:
            state = self.whisper.trained_state()
            self.trained = {k: v.clone() for k, v in state.items()}
        super().test(test_sets, contexts, suffix)


def start(*arguments, stop_after_step=None):
    """Runs main() of train.py; returns its Brain.

    Arguments
    ---------
    *arguments : str
        Of the command line.
    stop_after_step : int or None
        Ends the run as a power failure would, after so many steps.
    """
    brains = []

    def make(**options):
        brains.append(Recorded(stop_after_step, **options))
        return brains[-1]

    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        for context in (
            contextlib.chdir(RECIPE),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            _logging_restored(),
            mock.patch.object(sys, "argv", ["train.py", *map(str, arguments)]),
            mock.patch.object(sys, "excepthook", sys.excepthook),
            mock.patch.object(train, "ASR", make),
            mock.patch.object(train.sources, "load_tokenizer", load_tokenizer),
            mock.patch.object(AutoTokenizer, "from_pretrained", models_own),
            # The list of installed packages takes a second, a picture half.
            mock.patch.object(logger, "get_environment_description", str),
            mock.patch.object(curves, "draw"),
            contextlib.suppress(Stopped),
        ):
            stack.enter_context(context)
        train.main()
    brains[0].printed = printed.getvalue()
    return brains[0]


@contextlib.contextmanager
def _logging_restored():
    """A run logs into its folder, and sends all loggers there."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
