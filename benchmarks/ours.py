"""This recipe's arms: train.py itself, one lever at a time.

In: settings and clips.
Out: arms; each call of one takes the same clips and tells how long it took.

train.py's ``main`` reads manifests, settings and weights as in any run; where
it would begin to train, an arm takes its Brain and data over.
"""

import math
import sys
import tempfile
import time
from unittest import mock

import torch
from arms import RECIPE, Stopwatch, in_batches

import speechbrain as sb
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.decoders.seq2seq import S2SWhisperGreedySearcher

sys.path.insert(0, str(RECIPE))
import train  # noqa: E402
from local import batching, decode  # noqa: E402

HPARAMS = RECIPE / "hparams/train_large_v3.yaml"
MICRO_BATCHES = 15
BY_COST = "by cost"  # an arm's batches: micro-batches of like length
TRAINERS = {
    "full": {"encoder_context": "full"},
    "true_length_random": {"encoder_context": "true_length"},
    "true_length": {"encoder_context": "true_length", BY_COST: True},
    "mixed": {"encoder_context": "mixed", BY_COST: True},
    "checkpointing": {
        "encoder_context": "true_length",
        BY_COST: True,
        "gradient_checkpointing": True,
    },
    "compile": {
        "encoder_context": "true_length",
        BY_COST: True,
        "compile_layers": True,
    },
}
FROM_DISK = {
    "frozen": {"adaptation": "frozen_encoder"},
    "frozen_cached": {"adaptation": "frozen_encoder"},
    "e2e": {"encoder_context": "true_length"},
}


def build(name, settings, clips):
    """An arm by its name."""
    if name.startswith("decode"):
        return Decoder(settings, clips, name.endswith("_by_length"))
    return Trainer(name, settings, clips)


class Taken(Exception):
    """Ends ``main`` with what it would have trained."""


def take(settings, overrides):
    """What train.py's ``main`` builds of these settings.

    Returns
    -------
    brain : train.ASR
    train_set : DynamicItemDataset
    loader_kwargs : dict
        For the training data.
    """
    output = tempfile.mkdtemp(dir=settings.folder, prefix="ours_")
    overrides = {
        "whisper_hub": settings.model_folder,
        "corpus": "manifest",
        "data_folder": settings.clips_folder,
        "manifest_folder": settings.clips_folder,
        "output_folder": output,
        "score_before_training": False,
        "precision": settings.precision,
        "eval_precision": settings.precision,
        "device": settings.device,
        "seed": settings.seed,
    } | overrides

    def fit(brain, epochs, train_set, valid_set, train_loader_kwargs, **rest):
        raise Taken(brain, train_set, train_loader_kwargs)

    argv = [f"--{name}={value}" for name, value in overrides.items()]
    argv = ["train.py", str(HPARAMS), *argv]
    with mock.patch.object(sys, "argv", argv):
        with mock.patch.object(train.ASR, "fit", fit):
            try:
                train.main()
            except Taken as taken:
                return taken.args


class Trainer:
    """One lever setting; ``FROM_DISK`` reads FLAC, the others memory."""

    def __init__(self, name, settings, clips):
        by_disk = name in FROM_DISK
        lever = dict(FROM_DISK.get(name) or TRAINERS[name])
        if by_disk or lever.pop(BY_COST, False):
            batches = _by_cost(settings, clips, lever)
        else:
            batches = _at_random(settings)
        if name == "frozen_cached":
            lever["encoder_cache_folder"] = settings.folder / "encoder_cache"
        if "adaptation" in lever:
            lever["encoder_context"] = "full"
        workers = settings.workers if name == "e2e" else 0
        brain, data, loader_kwargs = take(
            settings, {**lever, **batches, "num_workers": workers}
        )
        self.loader = brain.make_dataloader(
            data if by_disk else in_memory(data),
            sb.Stage.TRAIN,
            **loader_kwargs,
        )
        with mock.patch.object(train.ASR, "tell_plan"):
            brain.on_fit_start()
        brain.interrupts.interval_s = 0  # no checkpoints
        self.brain, self.settings, self.epoch = brain, settings, 0
        # What is compiled or kept in the first epoch is no part of the rest.
        self.slow_to_warm = name in ("compile", "frozen_cached")

    def warm_up(self):
        """One step; an epoch where the first one does more than others."""
        if self.slow_to_warm:
            self()
        else:
            self._epoch(stop=self.brain.grad_accumulation_factor)

    def __call__(self):
        """One epoch of Brain's own loop."""
        steps_before = self.brain.optimizer_step
        self.brain.monitor.totals = [0.0, 0.0]
        answer = self._epoch(stop=None)
        steps = self.brain.optimizer_step - steps_before
        self.brain.monitor.fetch()
        nats, tokens = self.brain.monitor.totals
        shares = self.brain.train_sampler.shares
        told = {k: float(v) for k, v in shares.items()}
        told["loss"] = nats / tokens
        clips_per_step = self.settings.n_clips / steps
        return answer | told | {"clips_per_step": clips_per_step}

    def _epoch(self, stop):
        self.epoch += 1
        stopwatch = Stopwatch(self.settings.device)
        waited = Waited(self.loader, stop)
        stopwatch.start()
        self.brain._fit_train(waited, epoch=self.epoch, enable=False)
        seconds = stopwatch.seconds()
        self.brain.step = 0
        working_s = seconds - waited.first_s
        return {
            "seconds": seconds,
            "data_wait": 100 * waited.later_s / working_s,
        }


class Waited:
    """Iterates over a loader and keeps the time that it took.

    Its first batch stands apart: the loader's processes start then, once an
    epoch however long.
    """

    def __init__(self, loader, stop):
        self.loader, self.stop = loader, stop
        self.first_s = self.later_s = 0.0

    def __iter__(self):
        batches = iter(self.loader)
        n_taken = 0
        while n_taken != self.stop:
            began = time.perf_counter()
            batch = next(batches, None)
            waited_s = time.perf_counter() - began
            if batch is None:
                return
            if n_taken == 0:
                self.first_s = waited_s
            else:
                self.later_s += waited_s
            n_taken += 1
            yield batch


def in_memory(dataset):
    """The same items, read and tokenized once."""
    items = {item.pop("id"): item for item in dataset}
    keys = ["id", *next(iter(items.values()))]
    return DynamicItemDataset(items, output_keys=keys)


def _at_random(settings):
    return {
        "max_batch_length": 0,
        "batch_size": settings.micro_batch,
        "grad_accumulation_factor": settings.accumulation,
    }


def _by_cost(settings, clips, lever):
    """Micro-batches by cost, of which steps hold ``clips_per_step`` clips.

    In a micro-batch lies no more audio than in that of another trainer. An
    epoch has ``MICRO_BATCHES`` or more, since clips of so few would be less
    alike than those of a corpus, and padded more.
    """
    seconds = [clip.duration for clip in clips]
    n_steps = settings.n_clips // settings.clips_per_step
    needed = max(sum(seconds) / (30 * settings.micro_batch), MICRO_BATCHES)
    accumulation = math.ceil(needed / n_steps)
    context = lever.get("encoder_context", "true_length")
    for budget_s in range(30, 30 * settings.n_clips):
        batches = batching.Batches(
            seconds, settings.n_clips, budget_s, context, 30, settings.seed
        )
        if len(batches) <= n_steps * accumulation:
            break
    return {
        "max_batch_length": budget_s,
        "batch_size": settings.n_clips,
        "grad_accumulation_factor": accumulation,
    }


class Decoder:
    """Validation's greedy decoding at the full context."""

    def __init__(self, settings, clips, by_length):
        source = {"whisper_hub": settings.ending_folder, "num_workers": 0}
        self.brain, _, _ = take(settings, source)
        self.brain.modules.eval()
        # SpeechBrain's list, so that both sides write the same texts.
        search = S2SWhisperGreedySearcher(
            self.brain.whisper, min_decode_ratio=0.0, max_decode_ratio=1.0
        )
        self.suppressed = list(search.get_tokens_to_suppress)
        self.settings, self.stopwatch = settings, Stopwatch(settings.device)
        with torch.no_grad(), settings.autocast():
            self.states = [
                self.brain.whisper.encode(waveforms)
                for waveforms in in_batches(clips, settings, by_length)
            ]

    def warm_up(self):
        """One round."""
        self()

    def __call__(self):
        """Decodes every clip; texts as lists of token ids."""
        texts = []
        self.stopwatch.start()
        for states in self.states:
            with self.settings.autocast():
                texts += decode.greedy(
                    self.brain.whisper,
                    states,
                    self.settings.max_new_tokens,
                    self.suppressed,
                )
        return {"seconds": self.stopwatch.seconds(), "texts": texts}
