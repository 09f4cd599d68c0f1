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

KINDS = ("lines", "validation", "checkpoint", "delay")
POLL_S = 0.002
LIMIT_S = 300  # of one start
TIMINGS = ("clips_per_s", "wait")  # in curves.jsonl
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
MARK = "KILLED_BY_A_TEST"
TOLD = re.compile(r"(removed \S+,|.*damaged|Loading|SIGTERM|.*none found) .*")


class Moment(NamedTuple):
    """When to end a start of a run.

    kind : str
        lines: ``nth`` lines of curves.jsonl are new; validation: the ``nth``
        one has begun; checkpoint: the ``nth`` folder under a temporary name
        in save/ holds ``share`` of a checkpoint's bytes; delay: ``seconds``
        have passed since the start.
    seconds : float
        Waited beyond what the kind says.
    """

    kind: str
    nth: int = 1
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


def draw(seed, kinds, longest_s=10.0):
    """A moment of each kind, in an order and at places that follow from seed.

    Few lines, validations and checkpoints each: many kills fit into a run.
    """
    chance = random.Random(seed)
    kinds = chance.sample(kinds, len(kinds))
    return [_draw_one(chance, kind, longest_s) for kind in kinds]


def _draw_one(chance, kind, longest_s):
    if kind == "lines":
        return Moment(kind, chance.randint(1, 4), seconds=chance.random() / 20)
    if kind == "validation":
        return Moment(kind, seconds=chance.random() / 50)
    if kind == "checkpoint":
        return Moment(kind, chance.randint(1, 2), share=chance.random() * 0.8)
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
        self.seen = set()
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

    def _lines(self):
        return len(self._new_lines() or ()) >= self.moment.nth

    def _validation(self):
        lines = self._new_lines()
        if lines and "valid" not in lines[-1] and lines[-1]["step"] in self.due:
            self.seen.add(lines[-1]["step"])
            return len(self.seen) >= self.moment.nth
        return False

    def _checkpoint(self):
        for path in temporary(self.curves.parent):
            if path.name not in self.old:
                self.seen.add(path.name)
                if len(self.seen) >= self.moment.nth:
                    others = map(size, checkpoints(self.curves.parent))
                    whole = max(others, default=0)
                    return size(path) >= self.moment.share * whole
        return False


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


def newest_and_best(folder, metric="CER"):
    """Name to checkpoint folder: of the newest, and of the lowest metric."""
    told = {path: meta(path) for path in checkpoints(folder)}
    told = dict(sorted(told.items(), key=lambda item: -item[1]["unixtime"]))
    scored = [path for path in told if metric in told[path]]
    best = min(scored, key=lambda path: told[path][metric])
    return {"newest": next(iter(told)), "best": best}


def differences(folder, other):
    """What two finished runs do not share: curves, checkpoints, scores.

    Returns
    -------
    list of str
        Empty where every float and every bit are the same; timings, clock
        times and sizes of files are not compared.
    """
    found = _different_curves(curve(folder), curve(other))
    ours, theirs = newest_and_best(folder), newest_and_best(other)
    for name in ours:
        found += _different_checkpoints(name, ours[name], theirs[name])
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
