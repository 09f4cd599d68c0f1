"""Runs of train.py that are killed at chosen moments, and compared.

A run is a subprocess in a session of its own. Its processes are known by a
mark in their environment: torchrun gives each worker another session.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import yaml
from outputs import checkpoints
from safetensors.torch import load_file

KINDS = ("line", "validation", "checkpoint", "delay")
POLL_S = 0.002
LIMIT_S = 300  # of one start
TIMINGS = ("clips_per_s", "wait")  # in curves.jsonl
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
MARK = "KILLED_BY_A_TEST"
TOLD = re.compile(r"(removed \S+,|.*damaged|Loading|SIGTERM|.*none found) .*")


class Moment(NamedTuple):
    """When to end a start of a run.

    kind : str
        line: one of the step, or of a later one, is new in curves.jsonl;
        validation: the first one from the step on has begun; checkpoint: the
        same, and a folder of a temporary name in save/ holds ``share`` of a
        checkpoint's bytes; delay: ``seconds`` have passed since the start;
        scores: those of the first test set lie there.
    step : int
        Of the optimizer.
    seconds : float
        Waited beyond what the kind says.
    """

    kind: str
    step: int = 0
    share: float = 0.0
    seconds: float = 0.0


class Start(NamedTuple):
    """A start of a run: its return code, its output, where it ended.

    ``reached``: the moment came before the run's own end. ``inside``: a
    validation had no line yet, a folder still had its temporary name.
    """

    moment: Moment
    code: int
    printed: str
    reached: bool
    step: int
    inside: bool


def draw(seed, kinds, n_steps, longest_s=10.0):
    """A moment of each kind; order and places follow from the seed.

    Arguments
    ---------
    seed : int
    kinds : sequence of str
    n_steps : int
        Of the run. The last four of them are spared: it shall not end before
        all moments have come.
    longest_s : float
        The most that a delay may last.
    """
    chance = random.Random(seed)
    kinds = chance.sample(kinds, len(kinds))
    steps = sorted(chance.sample(range(1, n_steps - 3), len(kinds)))
    return [_draw_one(chance, *one, longest_s) for one in zip(kinds, steps)]


def _draw_one(chance, kind, step, longest_s):
    if kind == "line":
        return Moment(kind, step, seconds=chance.random() / 20)
    if kind == "validation":
        return Moment(kind, step, seconds=chance.random() / 50)
    if kind == "checkpoint":
        return Moment(kind, step, share=chance.random() * 0.8)
    return Moment(kind, seconds=chance.random() * longest_s)


class Watch:
    """Says when a moment has come; what lay there before does not count.

    Arguments
    ---------
    folder : Path
        Of the run's output.
    moment : Moment
    due : set of int
        Optimizer steps that a validation follows.
    """

    def __init__(self, folder, moment, due):
        self.curves, self.save = folder / "curves.jsonl", folder / "save"
        self.moment, self.due = moment, due
        self.n_old = len(curve(folder))
        self.old = {path.name for path in temporary(folder)}
        self.changed = None

    def came(self):
        """Whether the moment is here, but for its seconds."""
        kind = self.moment.kind
        return kind == "delay" or getattr(self, f"_{kind}")()

    def _new_lines(self):
        """None while there is nothing new; a cut makes no line new."""
        with contextlib.suppress(FileNotFoundError):
            stat = self.curves.stat()
            if (stat.st_size, stat.st_mtime_ns) != self.changed:
                self.changed = stat.st_size, stat.st_mtime_ns
                lines = curve(self.curves.parent)
                self.n_old = min(self.n_old, len(lines))
                return lines[self.n_old :]
        return None

    def _line(self):
        lines = self._new_lines()
        return bool(lines) and lines[-1]["step"] >= self.moment.step

    def _validation(self):
        last = (self._new_lines() or [{"step": -1}])[-1]
        begun = "valid" not in last and last["step"] in self.due
        return begun and last["step"] >= self.moment.step

    def _checkpoint(self):
        folder = self.curves.parent
        new = [p for p in temporary(folder) if p.name not in self.old]
        lines = curve(folder) if new else ()
        if not lines or lines[-1]["step"] < self.moment.step:
            return False
        whole = max(map(size, checkpoints(folder)), default=0)
        return any(size(p) >= self.moment.share * whole for p in new)

    def _scores(self):
        return (self.curves.parent / "scores/test.json").exists()


def curve(folder):
    """Whole lines of curves.jsonl; none where there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        text = (folder / "curves.jsonl").read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines()]
    return []


def temporary(folder):
    """What lies in save/ and is no checkpoint: one that is being made, …"""
    with contextlib.suppress(FileNotFoundError):
        paths = sorted((folder / "save").iterdir())
        return [path for path in paths if not path.name.startswith("CKPT+")]
    return []


def size(folder):
    """Bytes of a folder's files, of one that may vanish meanwhile."""
    total = 0
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def processes(mark):
    """Ids of all processes that carry a mark; none of them need be a child."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill(process, mark):
    """Ends a run and all it has started, as a power failure would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while left := processes(mark):
        assert time.monotonic() < deadline, f"{left} outlive SIGKILL"
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    process.wait()


def start(command, recipe, folder, moment=None, due=(), gently=False):
    """Starts a run, and ends it at a moment unless it ends before.

    Arguments
    ---------
    command : list of str
    recipe, folder : Path
        That it is started in, and of its output.
    moment : Moment or None
        None: it may go on to its end.
    due : iterable of int
        Steps that a validation follows.
    gently : bool
        SIGTERM to the process that was started, instead of SIGKILL to all.
    """
    mark = f"{MARK}={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    watch = Watch(folder, moment, set(due)) if moment else None
    told = folder.with_name(f"{folder.name}.told")
    with open(told, "w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=recipe,
            env={**env, name: value},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            reached = _reached(process, watch)
            if reached and gently:
                process.send_signal(signal.SIGTERM)
                process.wait(LIMIT_S)
        finally:
            kill(process, mark)
    assert not processes(mark)
    step, inside = _ended(folder, moment, set(due), watch)
    printed = told.read_text(encoding="utf-8", errors="replace")
    return Start(moment, process.returncode, printed, reached, step, inside)


def _reached(process, watch):
    """Whether a moment came before the end of a run."""
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < deadline, f"over {LIMIT_S} s"
        if watch and watch.came():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(watch.moment.seconds)
            return process.poll() is None
        time.sleep(POLL_S)
    return False


def _ended(folder, moment, due, watch):
    """(step of the last line, whether something was left half done)."""
    last = (curve(folder) or [{"step": 0}])[-1]
    kind = moment.kind if moment else ""
    if kind == "validation":
        return last["step"], "valid" not in last and last["step"] in due
    if kind == "checkpoint":
        left = {path.name for path in temporary(folder)}
        return last["step"], bool(left - watch.old)
    return last["step"], False


def run_to_the_end(command, recipe, folder, moments=(), due=()):
    """Starts a command again after each kill, and then until it finishes.

    Returns
    -------
    list of Start
        The last one is that which came to its end, with return code 0.
    """
    starts = []
    for moment in (*moments, None):
        starts.append(start(command, recipe, folder, moment, due))
        if not starts[-1].reached:
            break
    end = starts[-1]
    assert end.code == 0, f"{table(starts)}\n{end.code}\n{end.printed[-6000:]}"
    return starts


def table(starts):
    """The kills of a run, and what the start after each one told."""
    rows = ["kind        step  inside  the next start told"]
    for one, after in zip(starts, starts[1:]):
        inside = "yes" if one.inside else "-"
        head = f"{one.moment.kind:<10} {one.step:>5}  {inside:<6}"
        told = re.sub(r"\S+/save/", "", after.printed)
        told = [found[0] for found in TOLD.finditer(told)] or ["-"]
        rows.append(f"{head}  {told[0]}")
        rows += [" " * (len(head) + 2) + line for line in told[1:]]
    return "\n".join(rows)


def meta(checkpoint):
    """What CKPT.yaml tells."""
    return yaml.safe_load((checkpoint / "CKPT.yaml").read_text("utf-8"))


def newest(folder):
    """The checkpoint that was saved last."""
    return max(checkpoints(folder), key=lambda path: meta(path)["unixtime"])


def best(folder, metric="CER"):
    """The checkpoint of the lowest metric, the newest among equals."""
    told = {path: meta(path) for path in checkpoints(folder)}
    scored = [path for path in told if metric in told[path]]

    def worth(path):
        return told[path][metric], -told[path]["unixtime"]

    return min(scored, key=worth)


def differences(folder, other):
    """What two finished runs do not share: curves, checkpoints, scores.

    Returns
    -------
    list of str
        Empty where every float and every bit are the same; timings, clock
        times and sizes of files are not compared.
    """
    found = _different_curves(curve(folder), curve(other))
    for find in (newest, best):
        pair = find(folder), find(other)
        found += _different_checkpoints(find.__name__, *pair)
    files = [
        {p.name: p.read_bytes() for p in Path(f, "scores").glob("*.json*")}
        for f in (folder, other)
    ]
    names = sorted(files[0].keys() | files[1].keys())
    return found + [n for n in names if files[0].get(n) != files[1].get(n)]


def _different_curves(lines, others):
    # As text: NaN is not equal to itself.
    told, told_others = (
        [
            json.dumps({k: v for k, v in row.items() if k not in TIMINGS})
            for row in rows
        ]
        for rows in (lines, others)
    )
    rows = itertools.zip_longest(told, told_others)
    return [f"{row} not {other}" for row, other in rows if row != other]


def _different_checkpoints(name, ours, theirs):
    told, told_others = (
        {k: v for k, v in meta(p).items() if k not in ("unixtime", "files")}
        for p in (ours, theirs)
    )
    found = [] if told == told_others else [f"{name}: {told} not {told_others}"]
    for file in ("model.safetensors", "optimizer.safetensors"):
        if (ours / file).read_bytes() != (theirs / file).read_bytes():
            tensors, others = load_file(ours / file), load_file(theirs / file)
            keys = sorted(tensors.keys() | others.keys())
            wrong = [k for k in keys if _differ(tensors.get(k), others.get(k))]
            found.append(f"{name}: {file}: {len(wrong)} tensors: {wrong[:3]}")
    return found


def _differ(tensor, other):
    if tensor is None or other is None or tensor.shape != other.shape:
        return True
    return tensor.numpy().tobytes() != other.numpy().tobytes()


def python(*launcher):
    """The head of a command: this interpreter, and torchrun or nothing."""
    return [sys.executable, *launcher, "train.py"]


def with_dropout(hub, folder, dropout=0.1):
    """A copy of a model's folder whose layers drop out."""
    shutil.copytree(hub, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "dropout": dropout}), "utf-8")
    return folder
