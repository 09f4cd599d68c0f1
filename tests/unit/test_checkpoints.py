"""Checkpoints under kills, damage, full disks and several processes."""

import copy
import ctypes
import errno
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import shutil
import signal
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import logged
from hyperpyyaml import load_hyperpyyaml
from local import checkpoints, files, optimizer_state
from local.checkpoints import Checkpointer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import speechbrain as sb
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.epoch_loop import EpochCounter

FORK = multiprocessing.get_context("fork")
N_RANKS = 2


@register_checkpoint_hooks
class Weights:
    """Saves like the model: safetensors beside a text."""

    def __init__(self, n=8, value=0):
        self.tensor = torch.full((n,), float(value))

    @mark_as_saver
    def save(self, path):
        path.write_text("weights", encoding="utf-8")
        save_file({"weight": self.tensor}, path.with_name("model.safetensors"))

    @mark_as_loader
    def load(self, path, end_of_epoch):
        assert path.read_text(encoding="utf-8") == "weights"
        # In memory that is no file's.
        found = load_file(path.with_name("model.safetensors"))
        self.tensor = found["weight"].clone()


@register_checkpoint_hooks
class Failing:
    """Raises what it is told to, when it is saved."""

    def __init__(self, error=None):
        self.error = error

    @mark_as_saver
    def save(self, path):
        path.write_text("x", encoding="utf-8")
        if self.error:
            raise self.error

    @mark_as_loader
    def load(self, path, end_of_epoch):
        pass


def make(folder, weights=None, **options):
    weights = weights or Weights()
    return Checkpointer(folder, {"whisper": weights}, **options)


def save(checkpointer, value, end_of_epoch=True, **meta):
    """Saves weights of a value; its checkpoint, which may be gone."""
    checkpointer.recoverables["whisper"].tensor.fill_(value)
    checkpointer.save({"steps": value, **meta}, end_of_epoch)
    return value


def steps(found):
    return sorted(one.meta["steps"] for one in found)


def loads(checkpointer, one):
    """Whether a checkpoint gives back what it says it is."""
    checkpointer.load_checkpoint(one)
    weights = checkpointer.recoverables["whisper"].tensor
    return bool((weights == one.meta["steps"]).all())


def test_a_checkpoint_is_speechbrains_with_a_list_of_its_files(tmp_path):
    checkpointer = make(tmp_path / "save")
    before = time.time()
    save(checkpointer, 3, False, CER=12.5, epoch=1)
    (path,) = (tmp_path / "save").iterdir()
    assert path.name.startswith(time.strftime("CKPT+%Y-%m-"))
    assert path.name.endswith("+00")
    text = (path / "CKPT.yaml").read_text(encoding="utf-8")
    meta = yaml.safe_load(text)
    assert text.startswith("# yamllint disable\n")
    assert before <= meta.pop("unixtime") <= time.time()
    sizes = {p.name: p.stat().st_size for p in path.iterdir()}
    del sizes["CKPT.yaml"]
    assert sizes.keys() == {"whisper.ckpt", "model.safetensors"}
    where = {"steps": 3, "CER": 12.5, "epoch": 1, "end-of-epoch": False}
    assert meta == {**where, "files": sizes}
    one = checkpointer.newest()
    assert one.path == path and one.meta["CER"] == 12.5
    assert one.paramfiles == {"whisper": path / "whisper.ckpt"}
    stock = sb.utils.checkpoints.Checkpointer(tmp_path / "save")
    assert stock.find_checkpoint().path == path


def test_what_is_saved_is_recovered(tmp_path):
    checkpointer = make(tmp_path, keep_last=3)
    assert checkpointer.recover_if_possible() is None
    assert checkpointer.newest() is None and checkpointer.best() is None
    for value in (1, 2, 3):
        save(checkpointer, value)
    other = make(tmp_path)
    assert other.recover_if_possible().meta["steps"] == 3
    assert (other.recoverables["whisper"].tensor == 3).all()
    assert all(loads(other, one) for one in other.list_checkpoints())


def test_the_stock_way_of_saving_works(tmp_path):
    """What SpeechBrain's Brain calls by itself."""
    checkpointer = make(tmp_path)
    one = checkpointer.save_checkpoint(meta={"steps": 0}, name="mine")
    assert one == checkpointer.newest()
    assert one.path == tmp_path / "CKPT+mine"
    assert one.meta["end-of-epoch"] is True
    checkpointer.save_and_keep_only(end_of_epoch=False)
    assert checkpointer.newest() != one
    with pytest.raises(OSError, match="cannot write a checkpoint"):
        for _ in range(2):  # a name that is taken is not replaced
            checkpointer.save_checkpoint(name="again")
    assert not list(tmp_path.glob("tmp+*"))


def test_debug_moves_the_folder(tmp_path):
    checkpointer = make(tmp_path / "a")
    (tmp_path / "b").mkdir()
    checkpointer.checkpoints_dir = tmp_path / "b"
    save(checkpointer, 1)
    assert not list((tmp_path / "a").iterdir())
    assert checkpointer.newest().path.parent == tmp_path / "b"


INF, NAN = math.inf, math.nan
KEPT = [  # keep_last, metric of each save (None: not told), what is left
    (1, [None], [1]),
    (1, [None, None, None], [3]),
    (3, [None, None, None, None], [2, 3, 4]),
    (1, [9.0, 5.0, 7.0, 8.0], [2, 4]),
    (1, [9.0, 5.0, 7.0, 4.0], [4]),
    (3, [1.0, 5.0, 7.0, 8.0, 9.0], [1, 3, 4, 5]),
    (3, [8.0, 5.0, 7.0, 4.0, 9.0], [3, 4, 5]),
    (1, [5.0, None, None], [1, 3]),
    (1, [5.0, 5.0, 6.0], [2, 3]),  # newest among equals
    (1, [0.0, 5.0, 0], [3]),
    (1, [NAN, 5.0, NAN, 6.0], [2, 4]),
    (1, [INF, 5.0, -INF, 6.0], [2, 4]),
    (1, ["1", 5.0, True, 6.0], [2, 4]),
]


@pytest.mark.parametrize(("keep_last", "metrics", "left"), KEPT)
def test_the_newest_and_the_best_are_kept(tmp_path, keep_last, metrics, left):
    checkpointer = make(tmp_path, keep_last=keep_last, best_metric="WER")
    for value, metric in enumerate(metrics, start=1):
        told = {} if metric is None else {"WER": metric}
        save(checkpointer, value, CER=-value, **told)
    assert steps(checkpointer.list_checkpoints()) == left
    assert checkpointer.newest().meta["steps"] == len(metrics)
    assert len(list(tmp_path.iterdir())) == len(left)
    plain = [
        (metric, -value)
        for value, metric in enumerate(metrics, start=1)
        if type(metric) in (int, float) and math.isfinite(metric)
    ]
    best = checkpointer.best()
    assert best is None if not plain else best.meta["steps"] == -min(plain)[1]
    with pytest.raises(AssertionError):
        make(tmp_path, keep_last=0)


COLLAPSED = [  # keep_last, CER and collapsed of each save, what is left
    (1, [(9.0, False), (5.0, True), (8.0, True)], [1, 3], 1),
    (1, [(5.0, True), (9.0, False), (7.0, True)], [2, 3], 2),
    (1, [(5.0, True), (9.0, False)], [2], 2),
    (1, [(9.0, None), (5.0, True), (8.0, True)], [1, 3], 1),
    (1, [(9.0, True), (5.0, True), (8.0, True)], [2, 3], 2),
    (2, [(9.0, False), (1.0, True), (8.0, True), (7.0, True)], [1, 3, 4], 1),
    (1, [(9.0, False), (5.0, "true"), (8.0, False)], [2, 3], 2),
]


@pytest.mark.parametrize(("keep_last", "saves", "left", "best"), COLLAPSED)
def test_a_collapsed_one_is_best_only_where_all_are(
    tmp_path, keep_last, saves, left, best
):
    """None: of a version that did not tell; it counts as sound."""
    checkpointer = make(tmp_path, keep_last=keep_last)
    for value, (cer, collapsed) in enumerate(saves, start=1):
        told = {} if collapsed is None else {"collapsed": collapsed}
        save(checkpointer, value, CER=cer, **told)
    assert steps(checkpointer.list_checkpoints()) == left
    chosen = make(tmp_path).best().meta
    assert chosen["steps"] == best
    assert chosen.get("collapsed") == saves[best - 1][1]


def test_what_was_kept_before_counts(tmp_path):
    """A start finds its own; the metric may be another one then."""
    first = make(tmp_path, keep_last=3)
    for value, cer in enumerate([3.0, 1.0, 2.0], start=1):
        save(first, value, CER=cer, WER=-cer)
    second = make(tmp_path, keep_last=1, best_metric="WER")
    assert second.best().meta["steps"] == 1
    save(second, 4)
    assert steps(second.list_checkpoints()) == [1, 4]


def test_a_clock_that_goes_back_changes_no_order(tmp_path, monkeypatch):
    checkpointer = make(tmp_path, keep_last=2)
    now = [2e9]
    monkeypatch.setattr(checkpoints.time, "time", lambda: now[0])
    for value in range(1, 6):
        save(checkpointer, value)
        now[0] -= 1000 if value < 3 else 0  # then it stands still
        assert checkpointer.newest().meta["steps"] == value
    assert steps(checkpointer.list_checkpoints()) == [4, 5]


def test_the_old_stays_until_the_new_is_there(tmp_path, monkeypatch):
    checkpointer = make(tmp_path)
    save(checkpointer, 1)
    calls = []

    def told(name, function):
        def call(path, *args, **kwargs):
            calls.append((name, Path(path).name[:4], len(whole())))
            return function(path, *args, **kwargs)

        return call

    def whole():
        return make(tmp_path).list_checkpoints()

    monkeypatch.setattr(files, "sync", told("sync", files.sync))
    monkeypatch.setattr(os, "rename", told("rename", os.rename))
    monkeypatch.setattr(
        checkpoints.shutil, "rmtree", told("rmtree", shutil.rmtree)
    )
    save(checkpointer, 2)
    assert [name for name, *_ in calls] == [
        *("rmtree", "sync", "sync"),  # nothing; the files in any order
        *("sync", "sync", "rename", "sync"),  # CKPT.yaml, folder; parent
        *("rename", "rmtree"),  # the old one
    ]
    assert [n for *_, n in calls] == [1] * 6 + [2, 2, 1]
    assert [calls[i][1] for i in (3, 4, 5, 7, 8)] == [
        *("CKPT", "tmp+", "tmp+", "CKPT", "tmp+")
    ]


def test_what_cannot_be_removed_ends_no_run(tmp_path, monkeypatch):
    checkpointer = make(tmp_path)
    save(checkpointer, 1)
    warned = logged(monkeypatch, checkpoints.logger, "warning")

    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(checkpoints.shutil, "rmtree", rmtree)
    save(checkpointer, 2)
    assert steps(checkpointer.list_checkpoints()) == [2]
    assert len(warned) == 1 and "busy" in warned[0]
    checkpointer.clean()
    assert len(warned) == 2 and "busy" in warned[1]
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 2
    warned = logged(monkeypatch, checkpoints.logger, "warning")
    make(tmp_path).clean()
    assert len(warned) == 1 and "tmp+CKPT+" in warned[0]
    assert steps(make(tmp_path).list_checkpoints()) == [2]
    assert len(list(tmp_path.iterdir())) == 1


def edit(path, change):
    """Writes a changed meta."""
    meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(meta)
    path.write_text(yaml.safe_dump(meta, explicit_end=True), encoding="utf-8")


def cut(path, n_bytes=-1):
    os.truncate(path, path.stat().st_size + n_bytes)


def changed(name, value):
    return lambda p: edit(
        p / "CKPT.yaml", lambda meta: meta.update({name: value})
    )


def without(name):
    return lambda p: edit(p / "CKPT.yaml", lambda meta: meta.pop(name))


DAMAGES = {  # what is done to a folder, and what is said of it
    "no meta": (lambda p: (p / "CKPT.yaml").unlink(), "No such file"),
    "empty meta": (lambda p: os.truncate(p / "CKPT.yaml", 0), "not whole"),
    "no UTF-8": (lambda p: (p / "CKPT.yaml").write_bytes(b"\xff"), "utf-8"),
    "no YAML": (lambda p: (p / "CKPT.yaml").write_text("{\n\n"), "line 3"),
    "a list": (lambda p: (p / "CKPT.yaml").write_text("[a]\n...\n"), "keys"),
    "an object": (
        lambda p: (p / "CKPT.yaml").write_text("!!python/name:os.system\n"),
        "python/name",
    ),
    "meta is a folder": (
        lambda p: (p / "CKPT.yaml").unlink() or (p / "CKPT.yaml").mkdir(),
        "Is a directory",
    ),
    "no files": (without("files"), "not whole"),
    "no time": (without("unixtime"), "not whole"),
    "no end-of-epoch": (without("end-of-epoch"), "not whole"),
    "time is a text": (changed("unixtime", "now"), "not whole"),
    "time is NaN": (changed("unixtime", NAN), "not whole"),
    "files is a list": (changed("files", ["model.safetensors"]), ""),
    "other bytes": (changed("files", {"whisper.ckpt": 8}), "7 bytes, not 8"),
    "bytes are a text": (changed("files", {"whisper.ckpt": "7"}), "not 7"),
    "number for a name": (changed("files", {3: 4}), "int"),
    "cut": (lambda p: cut(p / "model.safetensors"), "bytes, not"),
    "longer": (lambda p: cut(p / "model.safetensors", 1), "bytes, not"),
    "file deleted": (lambda p: (p / "whisper.ckpt").unlink(), "whisper.ckpt"),
    "all deleted": (
        lambda p: [file.unlink() for file in p.iterdir()],
        "CKPT.yaml",
    ),
    "one more file": (lambda p: (p / "._whisper.ckpt").touch(), None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, monkeypatch, damage):
    change, reason = DAMAGES[damage]
    checkpointer = make(tmp_path, keep_last=2)
    save(checkpointer, 1, CER=2.0)
    save(checkpointer, 2, CER=1.0)
    path = checkpointer.newest().path
    change(path)
    warned = logged(monkeypatch, checkpoints.logger, "warning")
    for _ in range(2):
        newest = checkpointer.recover_if_possible()
        if reason is None:
            assert newest.path == path and set(newest.paramfiles) <= {"whisper"}
        else:
            assert (
                newest.meta["steps"] == checkpointer.best().meta["steps"] == 1
            )
            assert loads(checkpointer, newest)
    if reason is None:
        assert not warned
        return
    (text,) = warned  # once
    assert text.startswith(f"half-written or damaged checkpoint {path}: ")
    assert text.endswith("; skipped") and reason in text and "\n" not in text
    save(checkpointer, 3, CER=3.0)
    assert path.exists()  # the user may know better
    assert steps(checkpointer.list_checkpoints()) == [1, 3]


def test_a_meta_that_is_cut_anywhere_is_none(tmp_path, monkeypatch):
    checkpointer = make(tmp_path)
    save(checkpointer, 1, CER=12.25)
    path = checkpointer.newest().path / "CKPT.yaml"
    text = path.read_bytes()
    logged(monkeypatch, checkpoints.logger, "warning")
    for n in range(len(text)):
        path.write_bytes(text[:n])
        assert not checkpointer.list_checkpoints(), text[:n]
    path.write_bytes(text)
    assert checkpointer.list_checkpoints()


def test_other_things_in_the_folder_are_no_checkpoints(tmp_path, monkeypatch):
    checkpointer = make(tmp_path)
    save(checkpointer, 1)
    warned = logged(monkeypatch, checkpoints.logger, "warning")
    (tmp_path / "CKPT+a_file").touch()
    (tmp_path / "notes").mkdir()
    shutil.copytree(checkpointer.newest().path, tmp_path / "tmp+CKPT+x")
    shutil.copytree(checkpointer.newest().path, tmp_path / "best")
    assert steps(checkpointer.list_checkpoints()) == [1]
    assert not warned
    checkpointer.clean()
    assert len(warned) == 1 and str(tmp_path / "tmp+CKPT+x") in warned[0]
    names = {p.name for p in tmp_path.iterdir()}
    wanted = {"CKPT+a_file", "notes", "best"}
    assert names == wanted | {checkpointer.newest().path.name}


FULL = "I/O error: No space left on device (os error 28)"
ERRORS = [  # raised inside a save; number and remedy that the user is told
    (OSError(errno.ENOSPC, "x"), errno.ENOSPC, "Free space"),
    (SafetensorError(FULL), errno.ENOSPC, "Free space"),
    (OSError(errno.EDQUOT, "x"), errno.EDQUOT, "Free space"),
    (OSError(errno.EFBIG, "x"), errno.EFBIG, "Free space"),
    (OSError(errno.EACCES, "x"), errno.EACCES, "Mend that"),
    (OSError(errno.EIO, "x"), errno.EIO, "Mend that"),
]


@pytest.mark.parametrize(("error", "number", "remedy"), ERRORS)
def test_a_save_that_fails_says_what_to_do(tmp_path, error, number, remedy):
    checkpointer = make(tmp_path, Weights(10**6))
    failing = Failing()
    checkpointer.add_recoverable("failing", failing)
    save(checkpointer, 1)
    last = checkpointer.newest().path
    failing.error = error
    with pytest.raises(OSError) as raised:
        save(checkpointer, 2)
    assert raised.value.errno == number and raised.value.__cause__ is error
    free = r"\d+\.\d [GM]B are free there"
    assert re.search(
        r"cannot write a checkpoint of about 4\.0 MB to "
        rf"{re.escape(str(tmp_path))}: {re.escape(os.strerror(number))} "
        rf"\({free}\)\. The last good one is {re.escape(str(last))}\. "
        rf"{remedy}, then start the same command again$",
        str(raised.value),
    )
    assert list(tmp_path.iterdir()) == [last]
    assert loads(checkpointer, checkpointer.newest())
    failing.error = None
    save(checkpointer, 3)
    assert steps(checkpointer.list_checkpoints()) == [3]


@pytest.mark.parametrize(
    "error", [RuntimeError("a defect"), KeyboardInterrupt(), OSError("?")]
)
def test_other_errors_pass_and_leave_nothing(tmp_path, error):
    checkpointer = make(tmp_path)
    checkpointer.add_recoverable("failing", Failing(error))
    with pytest.raises(type(error)) as raised:
        save(checkpointer, 1)
    assert raised.value is error
    assert not list(tmp_path.iterdir())


def test_the_first_save_tells_what_it_would_take(tmp_path):
    """Trained parameters, and their state."""
    checkpointer = make(tmp_path)
    optimizer = trained(lambda groups: torch.optim.AdamW(groups), 500_000)[1]
    checkpointer.add_recoverable("optimizer", optimizer)
    optimizer.add_param_group({"params": frozen(500_000)})
    checkpointer.add_recoverable("failing", Failing(OSError(28, "x")))
    with pytest.raises(OSError, match="about 6.0 MB .*There is no earlier"):
        save(checkpointer, 1)


def frozen(n):
    return [torch.nn.Parameter(torch.zeros(n), requires_grad=False)]


def in_child(function, *args):
    """Calls a function in a process of its own; what it returns."""
    queue = FORK.SimpleQueue()

    def run():
        try:
            queue.put((function(*args), ""))
        except BaseException:
            queue.put((None, traceback.format_exc()))

    process = FORK.Process(target=run)
    process.start()
    value, failure = queue.get()
    process.join(60)
    assert not failure, failure
    return value


MIB = 2**20
NEW_NAMESPACES = 0x00020000 | 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER


def on_small_disk(folder, n_bytes):
    """Whether this process, alone, sees an empty disk of that size there."""
    libc, user, group = ctypes.CDLL(None), os.geteuid(), os.getegid()
    if libc.unshare(NEW_NAMESPACES):
        return False
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny", encoding="utf-8")
    (own / "uid_map").write_text(f"0 {user} 1", encoding="utf-8")
    (own / "gid_map").write_text(f"0 {group} 1", encoding="utf-8")
    options = f"size={n_bytes},mode=777".encode()
    return not libc.mount(b"x", str(folder).encode(), b"tmpfs", 0, options)


def fill_a_disk(folder):
    if not on_small_disk(folder, 8 * MIB):
        return None
    weights = Weights(MIB // 2)  # 2 MiB: old and new fit
    checkpointer = make(folder, weights)
    save(checkpointer, 1, CER=1.0)
    weights.tensor = torch.zeros(2 * MIB)  # 8 MiB
    with pytest.raises(OSError, match="No space left on device") as raised:
        save(checkpointer, 2)
    assert raised.value.errno == errno.ENOSPC
    n_saved = 0
    for n_pages in range(12):  # left beside the tensors
        weights.tensor = torch.zeros(MIB // 2)
        (folder / "other").unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        left = 2 * MIB + 4096 * n_pages
        with open(folder / "other", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, free - left)
        try:
            save(checkpointer, 3 + n_pages)
            n_saved += 1
        except OSError as error:
            assert error.errno == errno.ENOSPC
            assert steps(checkpointer.list_checkpoints())[-1] == 1
        assert not list(folder.glob("tmp+*"))
        for one in checkpointer.list_checkpoints():
            assert loads(checkpointer, one)
    return n_saved


def test_a_full_disk_costs_no_checkpoint(tmp_path):
    n_saved = in_child(fill_a_disk, tmp_path)
    if n_saved is None:
        pytest.skip("no disk of our own")
    assert 3 < n_saved < 12


def write_too_much(folder):
    weights = Weights(MIB // 4)
    checkpointer = make(folder, weights)
    save(checkpointer, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))
    weights.tensor = torch.zeros(MIB)
    with pytest.raises(OSError, match="File too large") as raised:
        save(checkpointer, 2)
    assert raised.value.errno == errno.EFBIG
    assert loads(checkpointer, checkpointer.newest())
    assert steps(checkpointer.list_checkpoints()) == [1]
    assert len(list(folder.iterdir())) == 1


def test_a_limit_on_files_costs_no_checkpoint(tmp_path):
    in_child(write_too_much, tmp_path)


@pytest.fixture
def shared():
    """A folder that nobody but root would be kept out of."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o777)
    shutil.rmtree(folder)


def without_rights(folder, inside, mode):
    if os.geteuid() == 0:
        os.setuid(65534)
    folder = folder / "save"
    checkpointer = make(folder)
    save(checkpointer, 1)
    first = checkpointer.newest().path
    (first if inside else folder).chmod(mode)
    try:
        save(checkpointer, 2)
    except OSError as error:
        assert error.errno == errno.EACCES
        assert f"The last good one is {first}. Mend that" in str(error)
    found = steps(make(folder).list_checkpoints())
    return found, sorted(p.name.split("+")[0] for p in folder.iterdir())


RIGHTS = [  # inside a checkpoint, mode, what is listed, what is there
    (False, 0o555, [1], ["CKPT"]),
    (True, 0o555, [2], ["CKPT", "tmp"]),
    (True, 0o000, [2], ["CKPT", "CKPT"]),
]


@pytest.mark.parametrize(("inside", "mode", "found", "names"), RIGHTS)
def test_missing_rights(shared, inside, mode, found, names):
    assert in_child(without_rights, shared, inside, mode) == (found, names)


def save_on(folder, pipe):
    """Saves without end; tells each step when it is saved."""
    checkpointer = make(folder, Weights(5_000_000), keep_last=2)  # 20 MB
    newest = checkpointer.newest()
    start = newest.meta["steps"] if newest else 0
    for value in itertools.count(start + 1):
        save(checkpointer, value, CER=(value * 7) % 5 + 1.0)
        os.write(pipe, value.to_bytes(4, "little"))


def killed(target, *args, after_s=60):
    """The steps that a process told; killed a while after the first one."""
    reader, writer = os.pipe()
    process = FORK.Process(target=target, args=(*args, writer))
    process.start()
    os.close(writer)
    with open(reader, "rb", buffering=0) as file:
        told = file.read(4)
        process.join(after_s)
        process.kill()
        process.join()
        told += file.read()
    starts = range(0, len(told), 4)
    return [int.from_bytes(told[n : n + 4], "little") for n in starts]


def survives(folder, saved, monkeypatch):
    """Whether a save was cut; all that is listed loads."""
    warned = logged(monkeypatch, checkpoints.logger, "warning")
    checkpointer = make(folder, Weights(0))
    found = checkpointer.list_checkpoints()
    assert not warned  # what has the name is whole
    assert all(loads(checkpointer, one) for one in found)
    if saved:
        assert checkpointer.newest().meta["steps"] >= max(saved)
    if found and "CER" in found[0].meta:
        lowest = min(one.meta["CER"] for one in found)
        assert checkpointer.best().meta["CER"] == lowest
    checkpointer.clean()
    assert len(list(folder.iterdir())) == len(found)
    return bool(warned)


def test_a_kill_costs_no_checkpoint(tmp_path, monkeypatch):
    chance = random.Random(1986)
    saved, n_cut = [], 0
    for _ in range(10):
        after_s = chance.random() * 0.2
        saved += killed(save_on, tmp_path, after_s=after_s)
        n_cut += survives(tmp_path, saved, monkeypatch)
    assert n_cut > 2, n_cut
    assert saved == sorted(saved) and len(saved) >= 10


CALLS = ("rename", "fsync", "unlink", "rmdir", "mkdir", "open", "replace")


def killed_at(folder, n, pipe):
    """Saves thrice; dies before one of the calls of the last."""
    checkpointer = make(folder, Weights(8))
    save(checkpointer, 1, CER=1.0)
    save(checkpointer, 2, CER=2.0)
    os.write(pipe, (2).to_bytes(4, "little"))
    moments = itertools.count()

    def die():
        if next(moments) == n:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(function):
        def call(*args, **kwargs):
            die()
            return function(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))
    Path.write_text = dying(Path.write_text)
    save(checkpointer, 3, CER=3.0)
    os.write(pipe, (3).to_bytes(4, "little"))


def test_a_kill_at_any_call_costs_no_checkpoint(tmp_path, monkeypatch):
    """The best one stays, the second is replaced by the third."""
    newest, n_cut = [], 0
    for n in itertools.count():
        folder = tmp_path / str(n)
        saved = killed(killed_at, folder, n)
        n_cut += survives(folder, saved, monkeypatch)
        newest.append(make(folder).newest().meta["steps"])
        assert make(folder).best().meta["steps"] == 1
        if saved == [2, 3]:
            break
    assert newest == sorted(newest) and set(newest) == {2, 3}
    assert len(newest) > 15 and n_cut > 10, (len(newest), n_cut)


def parameters(n=6):
    torch.manual_seed(7)
    shapes = [(n // 2, 2), (4,), (), (3, 2, 2)]
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def step(weights, optimizer, n, skipped=()):
    for i in range(n):
        torch.manual_seed(i)
        for m, weight in enumerate(weights):
            weight.grad = None if m in skipped else torch.randn(weight.shape)
        optimizer.step(lambda: torch.tensor(1.0))


def trained(build, n=6, n_steps=3, skipped=()):
    """(weights, optimizer): two groups, one of them with a multiplier."""
    weights = parameters(n)
    groups = [
        {"params": weights[:1]},
        {"params": weights[1:], "lr_multiplier": 0.1, "weight_decay": 0.3},
    ]
    optimizer = build(groups)
    step(weights, optimizer, n_steps, skipped)
    return weights, optimizer


def exactly(value):
    """What two states must share; for tensors type, shape, bits."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous()
        data = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), data.tolist()
    if isinstance(value, dict):
        return {k: exactly(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [exactly(v) for v in value]
    return type(value), repr(value)


class Packed(torch.optim.Optimizer):
    """State of many types, as 8-bit optimizers have it."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0})

    def step(self, closure=None):
        shared = torch.arange(4.0)
        for n, (group, p) in enumerate(
            (g, p) for g in self.param_groups for p in g["params"]
        ):
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state["state1"] = (p.grad * 100).to(torch.uint8)
            state["table"] = shared
            state["big"] = torch.tensor([2**60 + n, -1])
            state["half"] = p.grad.half().flatten()[::2]
            state["brain"] = p.grad.bfloat16()
            state["double"] = p.grad.double() / 3
            state["flag"] = p.grad > 0
            state["nested"] = {"absmax": p.grad.abs().max(), "n": n, "x": None}
            state["several"] = [p.grad.clone(), 0.1]
            with torch.no_grad():
                p -= group["lr"] * state["half"].sum() * state["step"]


AdamW = torch.optim.AdamW
OPTIMIZERS = {
    "AdamW": AdamW,
    "fused": lambda groups: AdamW(groups, fused=True),
    "foreach": lambda groups: AdamW(groups, foreach=True, amsgrad=True),
    "rate is a tensor": lambda groups: AdamW(groups, lr=torch.tensor(1e-3)),
    "odd numbers": lambda groups: AdamW(groups, 1 / 3, (0.1 + 0.2, 1 - 1e-9)),
    "SGD": lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9),
    "no state": lambda groups: torch.optim.SGD(groups, 0.1),
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
    "Packed": Packed,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_to_the_bit(tmp_path, name):
    build = OPTIMIZERS[name]
    weights, optimizer = trained(build)
    Checkpointer(tmp_path, {"optimizer": optimizer}).save({}, True)
    others, fresh = trained(build, n_steps=0)
    for group in fresh.param_groups:
        group["lr"] = 77.0
    assert exactly(fresh.state_dict()) != exactly(optimizer.state_dict())
    Checkpointer(tmp_path, {"optimizer": fresh}).recover_if_possible()
    assert exactly(fresh.state_dict()) == exactly(optimizer.state_dict())
    assert fresh.param_groups[1]["lr_multiplier"] == 0.1
    for other, weight in zip(others, weights):
        other.data.copy_(weight.data)
    step(weights, optimizer, 3)
    step(others, fresh, 3)
    assert exactly(others) == exactly(weights)
    assert exactly(fresh.state_dict()) == exactly(optimizer.state_dict())


@pytest.mark.parametrize("skipped", [(), (1,), (0, 1, 2, 3)])
@pytest.mark.parametrize("n_steps", [0, 1])
def test_a_parameter_may_have_no_state(tmp_path, n_steps, skipped):
    optimizer = trained(AdamW, n_steps=n_steps, skipped=skipped)[1]
    Checkpointer(tmp_path, {"optimizer": optimizer}).save({}, True)
    fresh = trained(AdamW, n_steps=0)[1]
    Checkpointer(tmp_path, {"optimizer": fresh}).recover_if_possible()
    assert exactly(fresh.state_dict()) == exactly(optimizer.state_dict())


def test_the_files_of_an_optimizer(tmp_path):
    """Its tensors by parameter and name; JSON without parameters' numbers."""
    optimizer = trained(AdamW)[1]
    path = tmp_path / "optimizer.ckpt"
    optimizer_state.save(optimizer, path)
    tensors = load_file(tmp_path / "optimizer.safetensors")
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert tensors.keys() == {f"state.{n}.{k}" for n in range(4) for k in kinds}
    saved = json.loads(path.read_text(encoding="utf-8"))
    shapes = [group["params"] for group in saved["groups"]]
    assert shapes == [[[3, 2]], [[4], [], [3, 2, 2]]]
    assert saved["groups"][1]["lr_multiplier"] == 0.1


def ungrouped(groups):
    return AdamW([p for group in groups for p in group["params"]])


def moved(groups):
    groups[0]["params"].append(groups[1]["params"].pop(0))
    return AdamW(groups)


def turned(groups):
    groups[1]["params"].reverse()
    return AdamW(groups)


OTHERS = [  # an optimizer that is not the saved one, what is said
    (lambda g: torch.optim.SGD(g, 0.1), 6, "it is AdamW, this run has SGD"),
    (ungrouped, 6, r"[1, 3] parameters, this run's [4]"),
    (moved, 6, r"[1, 3] parameters, this run's [2, 2]"),
    (turned, 6, "parameter 0 of group 1 has the shape [4], here [3, 2, 2]"),
    (AdamW, 8, "parameter 0 of group 0 has the shape [3, 2], here [4, 2]"),
]


@pytest.mark.parametrize(("build", "n", "wanted"), OTHERS)
def test_another_optimizer_is_told(tmp_path, build, n, wanted):
    path = tmp_path / "optimizer.ckpt"
    optimizer_state.save(trained(AdamW)[1], path)
    other = trained(build, n)[1]
    before = exactly(copy.deepcopy(other.state_dict()))
    with pytest.raises(ValueError) as raised:
        optimizer_state.load(other, path, True)
    text = str(raised.value)
    assert text.startswith(f"{path} is of another optimizer: ")
    assert wanted in text and "choose another output_folder" in text
    assert exactly(other.state_dict()) == before


NUMBERS = [2.0**16, 1 / 3, 2.0**-24, 2.0**127]


@pytest.mark.parametrize("scale", NUMBERS)
def test_a_scaler_goes_on_exactly(tmp_path, scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=7)
    state = {**scaler.state_dict(), "_growth_tracker": 5}
    scaler.load_state_dict(state)
    Checkpointer(tmp_path, {"scaler": scaler}).save({}, True)
    fresh = torch.amp.GradScaler("cpu")
    Checkpointer(tmp_path, {"scaler": fresh}).recover_if_possible()
    assert exactly(fresh.state_dict()) == exactly(state)
    names = {p.name for p in next(tmp_path.iterdir()).iterdir()}
    assert names == {"CKPT.yaml", "scaler.ckpt"}


def test_a_scaler_may_be_new(tmp_path):
    save(make(tmp_path), 1)
    checkpointer = make(tmp_path)
    scaler = torch.amp.GradScaler("cpu")
    checkpointer.add_recoverable("scaler", scaler, optional_load=True)
    with pytest.warns(UserWarning, match="optional"):
        assert checkpointer.recover_if_possible()


def refuse(*args, **kwargs):
    raise AssertionError("a pickle")


class Attack:
    """Once unpickled, a folder is gone."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return shutil.rmtree, (str(self.path),)


def brain(folder):
    """SpeechBrain's own, which adds itself and its optimizer."""
    checkpointer = Checkpointer(
        folder, {"epoch_counter": EpochCounter(3), "whisper": Weights()}
    )
    scaler = torch.amp.GradScaler("cpu")
    checkpointer.add_recoverable("scaler", scaler, optional_load=True)
    made = sb.Brain(
        modules={"linear": torch.nn.Linear(3, 2)},
        opt_class=AdamW,
        run_opts={"device": "cpu"},
        checkpointer=checkpointer,
    )
    made.on_fit_start()
    return made


@pytest.fixture
def brained(tmp_path):
    """A checkpoint of a Brain after a step, and that Brain."""
    made = brain(tmp_path / "save")
    made.modules["linear"](torch.ones(1, 3)).sum().backward()
    made.optimizer.step()
    made.optimizer_step = 5
    made.checkpointer.save({"CER": 3.0}, False)
    return made.checkpointer.newest(), made


def test_no_file_is_a_pickle(brained, monkeypatch):
    one, made = brained
    for module, name in [
        *((torch, "save"), (torch, "load")),
        *((pickle, name) for name in ("dump", "dumps", "load", "loads")),
    ]:
        monkeypatch.setattr(module, name, refuse)
    made.checkpointer.save({"CER": 2.0}, False)
    found = brain(one.path.parent)
    assert found.optimizer_step == 5
    state = found.optimizer.state_dict()
    assert exactly(state) == exactly(made.optimizer.state_dict())
    paths = list(one.path.parent.glob("CKPT+*/*"))
    names = {path.name for path in paths}
    assert names >= {"brain.ckpt", "scaler.ckpt", "optimizer.safetensors"}
    for path in paths:
        if path.suffix == ".safetensors":
            assert load_file(path)
        else:  # JSON, YAML, a number, a word
            value = yaml.safe_load(path.read_text(encoding="utf-8"))
            assert isinstance(value, (dict, int, str))


@pytest.mark.parametrize("name", ["optimizer.ckpt", "scaler.ckpt"])
@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_a_pickle_that_was_slipped_in_is_not_run(
    tmp_path, brained, monkeypatch, name, write
):
    one, _ = brained
    victim = tmp_path / "victim"
    victim.mkdir()
    with open(one.path / name, "wb") as file:
        write(Attack(victim), file)
    warned = logged(monkeypatch, checkpoints.logger, "warning")
    brain(one.path.parent)  # passed over, for its size
    assert len(warned) == 1 and name in warned[0]
    size = (one.path / name).stat().st_size
    edit(one.path / "CKPT.yaml", lambda m: m["files"].update({name: size}))
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        brain(one.path.parent)
    assert victim.exists()


def test_what_would_be_pickled_is_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    module = torch.nn.Linear(1, 1)
    with pytest.raises(AssertionError, match="Linear"):
        checkpointer.add_recoverable("module", module)
    with pytest.raises(AssertionError, match="object"):
        checkpointer.add_recoverables({"thing": object()})
    optimizer = trained(AdamW)[1]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(AssertionError, match="ExponentialLR"):
        checkpointer.add_recoverable("schedule", schedule)
    assert not checkpointer.recoverables


def test_hooks_that_are_given_are_used(tmp_path):
    saved, loaded = [], []

    def save_hook(obj, path):
        saved.append(path.name)
        path.write_text("x", encoding="utf-8")

    checkpointer = Checkpointer(tmp_path)
    checkpointer.add_recoverable(
        "optimizer",
        trained(AdamW)[1],
        custom_load_hook=lambda obj, path, end: loaded.append((path.name, end)),
        custom_save_hook=save_hook,
    )
    checkpointer.save({}, False)
    checkpointer.recover_if_possible()
    assert saved == ["optimizer.ckpt"]
    assert loaded == [("optimizer.ckpt", False)]


def test_a_yaml_file_can_name_it(tmp_path):
    made = load_hyperpyyaml(
        "counter: !new:speechbrain.utils.epoch_loop.EpochCounter\n"
        "    limit: 3\n"
        "checkpointer: !new:local.checkpoints.Checkpointer\n"
        f"    checkpoints_dir: {tmp_path}/save\n"
        "    keep_last: 2\n"
        "    best_metric: WER\n"
        "    recoverables:\n"
        "        epoch_counter: !ref <counter>\n"
    )
    made["counter"].current = 2
    made["checkpointer"].save({"WER": 1.0}, True)
    made["counter"].current = 0
    made["checkpointer"].recover_if_possible()
    assert made["counter"].current == 2
    assert made["checkpointer"].keep_last == 2
    assert made["checkpointer"].best().meta["WER"] == 1.0


def rank(number, folder, queue):
    """What one of several processes sees of three saves."""
    os.environ["RANK"] = str(number)
    store = dist.FileStore(str(folder / "store"), N_RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=number, world_size=N_RANKS
    )
    warned, made = [], []
    checkpoints.logger.warning = lambda *args: warned.append(args)
    checkpointer = make(folder / "save")
    checkpointer.add_recoverable("optimizer", trained(AdamW)[1])
    checkpointer.add_recoverable("scaler", torch.amp.GradScaler("cpu"))
    for place, name in [(os, "rename"), (os, "mkdir"), (Path, "write_text")]:
        setattr(place, name, slowly(getattr(place, name), made))
    seen = []
    for value, cer in enumerate([3.0, 1.0, 2.0], start=1):
        weights = checkpointer.recoverables["whisper"].tensor
        weights.fill_(value + 10 * number)  # the first rank's are saved
        checkpointer.save({"CER": cer}, False)
        checkpointer.recover_if_possible()
        seen.append((weights_of(checkpointer), names(checkpointer)))
    dist.barrier()
    saved = checkpointer.save_checkpoint({"CER": 9.0})
    if number == 0:
        cut(checkpointer.newest().path / "model.safetensors")
        (folder / "save" / "tmp+CKPT+x").mkdir()
    dist.barrier()
    newest = checkpointer.newest().meta["CER"]
    if number:
        checkpointer.clean()
        assert (folder / "save" / "tmp+CKPT+x").exists()
    dist.barrier()
    checkpointer.clean()
    told = len(made), saved is None, len(warned), newest
    queue.put((number, seen, told, sb.utils.distributed.MAIN_PROC_ONLY))
    dist.barrier()
    dist.destroy_process_group()


def slowly(write, made):
    """Counts, and leaves other ranks the time to run ahead."""

    def call(*args, **kwargs):
        made.append(1)
        time.sleep(0.03)
        return write(*args, **kwargs)

    return call


def weights_of(checkpointer):
    return checkpointer.recoverables["whisper"].tensor[0].item()


def names(checkpointer):
    return [one.path.name for one in checkpointer.list_checkpoints()]


def test_all_ranks_see_what_the_first_one_saves(tmp_path):
    queue = FORK.Queue()
    processes = [
        FORK.Process(target=rank, args=(number, tmp_path, queue))
        for number in range(N_RANKS)
    ]
    for process in processes:
        process.start()
    try:
        found = sorted(queue.get(timeout=60) for _ in processes)
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    first, second = found
    assert first[1] == second[1]
    assert [value for value, _ in first[1]] == [1, 2, 3]
    assert [len(listed) for _, listed in first[1]] == [1, 1, 2]
    # (calls that write, not told its checkpoint, warnings, newest CER)
    assert first[2][1:] == (False, 2, 2.0) and first[2][0] >= 8
    assert second[2] == (0, True, 0, 2.0)
    assert first[3] == second[3] == 0
    assert len(os.listdir(tmp_path / "save")) == 3


def test_a_folder_of_damaged_checkpoints_alone_is_not_begun_anew(tmp_path):
    one = make(tmp_path, keep_last=2)
    for value in (1, 2):
        save(one, value)
    for path in tmp_path.glob("CKPT+*/model.safetensors"):
        path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(ValueError, match="none of its 2 checkpoints is whole"):
        make(tmp_path).clean()
    shutil.rmtree(next(tmp_path.glob("CKPT+*")))
    with pytest.raises(ValueError, match="none of its 1 checkpoints is whole"):
        make(tmp_path).clean()
    make(tmp_path / "other").clean()
