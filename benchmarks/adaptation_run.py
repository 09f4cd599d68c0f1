"""One run of train.py, which stops for a while after each of its rounds.

In: the command line of train.py, and which steps end a round, as JSON on the
command line; one line on stdin for each round.
Out: one line of JSON on stdout when the run is warm, one for each round, and a
last one of what the run has come to.

train.py's ``main`` does all that it does in any run, but that it tells no
plan, validates only at the end, and leaves out the tests after it.
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from arms import MIB, RECIPE, Stopwatch
from torch.profiler import ProfilerActivity, profile

import speechbrain as sb

sys.path.insert(0, str(RECIPE))
import train  # noqa: E402


class Run:
    """What stands in for a step and for a validation of train.ASR.

    Arguments
    ---------
    ends : list of int
        Steps after which a round is over, warm-up counted; the last one ends
        the run.
    validates : bool
        Whether the run ends with a validation; else with a checkpoint alone.
    answers : file
    """

    def __init__(self, ends, validates, answers):
        self.ends, self.validates, self.answers = ends, validates, answers
        self.step, self.validate = train.ASR.fit_batch, train.ASR._fit_valid
        self.seconds, self.n_clips, self.peak_mib = 0.0, 0, None

    def fit_batch(self, brain, batch):
        """A step that is timed; the first one waits until all is warm."""
        if self.peak_mib is None:
            self.warm_up(brain)
            self.answer({})
        stopwatch = Stopwatch(brain.device)
        stopwatch.start()
        mean = self.step(brain, batch)
        self.seconds += stopwatch.seconds()
        self.n_clips += len(batch.id)
        if brain.optimizer_step in self.ends:
            found = {"seconds": self.seconds, "n_clips": self.n_clips}
            self.seconds, self.n_clips = 0.0, 0
            if brain.optimizer_step < self.ends[-1]:
                self.answer(found)
            else:
                self.last_round = found
        return mean

    def warm_up(self, brain):
        """Two steps on the fullest batch; the second tells the memory."""
        brain.optimizer_step_limit = self.ends[-1]
        batch = fullest(brain)
        self.step(brain, batch)  # the optimizer's moments are made
        step = lambda: self.step(brain, batch)  # noqa: E731
        self.peak_mib = peak_bytes(step, brain.device) / MIB

    def fit_valid(self, brain, valid_set, epoch, enable):
        """The end of an epoch; that of the last one ends the process."""
        if brain.optimizer_step < self.ends[-1]:
            brain.step = 0
            return
        if self.validates:
            self.validate(brain, valid_set, epoch, enable)
        else:
            brain.save()
        told = self.last_round | outcome(brain) | {"peak_mib": self.peak_mib}
        self.answers.write(json.dumps(told) + "\n")
        sys.exit()

    def answer(self, found):
        """Writes a line and waits for one; ends where nobody asks further."""
        self.answers.write(json.dumps(found) + "\n")
        if not sys.stdin.readline():
            sys.exit()


def fullest(brain):
    """A batch, as large as the largest, of the clips with the longest labels.

    The same in every mode, whatever its order of the clips.
    """
    loader = brain.loaders[sb.Stage.TRAIN]
    rows = list(loader.dataset.data.values())
    by_label = sorted(range(len(rows)), key=lambda i: -len(rows[i]["wrd"]))
    n_clips = max(map(len, brain.train_sampler.batches))
    items = [loader.dataset[i] for i in by_label[:n_clips]]
    return loader.collate_fn(items)


def peak_bytes(function, device):
    """Most that PyTorch's allocator holds during a function.

    On a GPU by its own count. On a CPU, which has none: what tensors hold
    before, and what a profile of the function adds at its highest.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated()
    before = held_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        function()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        p.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    events = [e for e in events if e["name"] == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        most = max(most, now)
    return before + most


def held_bytes():
    """What all tensors hold that can be reached, views counted once."""
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def outcome(brain):
    """What is trained, what the checkpoint takes, and how well it does."""
    whisper, newest = brain.whisper, brain.checkpointer.newest()
    trained = whisper.trained_state().values()
    sizes = {p.name: p.stat().st_size for p in newest.path.iterdir()}
    weights = [n for name, n in sizes.items() if "model.safetensors" in name]
    found = {
        "n_trained": sum(tensor.numel() for tensor in trained),
        "weights_bytes": sum(weights),
        "checkpoint_bytes": sum(sizes.values()),
        "device": str(brain.device),
    }
    for name in ("loss", "CER"):
        if name in newest.meta:
            found[name] = newest.meta[name]
    return found


def main(argv, ends, validates):
    """Runs train.py."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    run = Run(ends, validates, answers)
    patches = {
        "tell_plan": lambda brain: None,
        "fit_batch": lambda brain, batch: run.fit_batch(brain, batch),
        "_fit_valid": lambda brain, **given: run.fit_valid(brain, **given),
    }
    with mock.patch.object(sys, "argv", argv):
        with mock.patch.multiple(train.ASR, **patches):
            train.main()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
