"""One program from its cold start, in a process of its own.

In: "prepare" or "train"; when it was started; the program's command line.
Out: seconds and memory, as a line of JSON, the last one on stdout.
"""

import functools
import json
import os
import re
import runpy
import sys
import time
from pathlib import Path
from unittest import mock

RECIPE = Path(__file__).resolve().parents[1] / "recipes/Korean/ASR/whisper"


class FirstBatch(Exception):
    """Ends train.py where it would compute for the first time."""


def prepare(began):
    """``python -m local.prepare``, all of it."""
    runpy.run_module("local.prepare", run_name="__main__")
    return {"seconds": time.monotonic() - began}


def train(began):
    """train.py until its loop has the first batch of training data in hand.

    Arguments
    ---------
    began : float
        By ``time.monotonic``, which on Linux all processes share.

    Returns
    -------
    dict
        ``seconds`` in all, and those of its parts: ``imports``, ``manifest``
        (rows read and checked), ``model``, and ``first_batch``, from
        ``Brain.fit`` on; ``with_workers_mib``, the memory of this process and
        of its data workers at that moment, shared pages counted once.
    """
    import train
    from local import model

    parts = {"imports": time.monotonic() - began}

    def stop(brain, batch):
        raise FirstBatch(time.monotonic() - began, resident_mib())

    patches = [
        timed(train, "dataio_prepare", parts, "manifest"),
        timed(model.Whisper, "__init__", parts, "model"),
        timed(train.ASR, "fit", parts, "first_batch"),
        mock.patch.object(train.ASR, "fit_batch", stop),
    ]
    for patch in patches:
        patch.start()
    try:
        train.main()
    except FirstBatch as reached:
        seconds, with_workers_mib = reached.args
    return {
        "seconds": seconds,
        "parts_s": parts,
        "with_workers_mib": with_workers_mib,
    }


def timed(owner, name, seconds, label):
    """A patch that notes how long a function takes, however it ends."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        began = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[label] = time.monotonic() - began

    return mock.patch.object(owner, name, wrapper)


def resident_mib():
    """Memory of this process and its children, shared pages counted once."""
    threads = Path("/proc/self/task").glob("*/children")
    children = " ".join(path.read_text() for path in threads).split()
    pids = [os.getpid(), *children]
    return sum(_kib(f"/proc/{pid}/smaps_rollup", "Pss") for pid in pids) / 1024


def peak_mib():
    """Most memory of this process so far.

    ``getrusage`` would begin with the peak of the process that started it.
    """
    return _kib("/proc/self/status", "VmHWM") / 1024


def _kib(path, name):
    text = Path(path).read_text(encoding="utf-8")
    return int(re.search(rf"^{name}:\s*(\d+) kB", text, re.M)[1])


if __name__ == "__main__":
    program, began, *sys.argv[1:] = sys.argv[1:]
    sys.path.insert(0, str(RECIPE))
    answer = {"prepare": prepare, "train": train}[program](float(began))
    answer |= {"cpu_s": time.process_time(), "peak_mib": peak_mib()}
    print(json.dumps(answer))
