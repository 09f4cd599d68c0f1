"""Files that are whole, that one run holds, that run no code when read."""

import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import logged
from local import files
from safetensors import SafetensorError

HOLDER = """
import os, sys, time
from local import files
try:
    held = files.lock(sys.argv[1])
except ValueError as error:
    sys.exit(str(error))
print("held", flush=True)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other():
    """Starts other processes; each takes the lock of a folder, and waits."""
    started = []
    recipe = str(Path(files.__file__).parents[1])

    def start(folder, *words):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder), *words],
            env={**os.environ, "PYTHONPATH": recipe},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    path = tmp_path / "scores.json"
    path.write_text("old", encoding="utf-8")
    with files.replacing(path) as file:
        file.write("새\r\n")
        assert path.read_text(encoding="utf-8") == "old"
    assert path.read_bytes() == "새\r\n".encode()
    assert os.listdir(tmp_path) == ["scores.json"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyError("x")]
)
def test_what_cannot_be_written_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "scores.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(type(error)) as raised, files.replacing(path) as file:
        file.write("new")
        raise error
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["scores.json"]
    if isinstance(error, OSError):
        assert raised.value.errno == errno.ENOSPC
        assert f"cannot write {path}: No space" in str(raised.value)


def test_a_lock_tells_who_has_it_and_can_be_taken_again(tmp_path):
    folder = tmp_path / "results" / "1986"
    for _ in range(2):
        held = files.lock(folder)
        told = json.loads((folder / "run.lock").read_bytes())
        # That reading has ended the lock; the words are what counts here.
        assert told.keys() == {"pid", "host", "since"}
        assert (told["pid"], told["host"]) == (
            os.getpid(),
            socket.gethostname(),
        )
        since = time.mktime(time.strptime(told["since"], "%Y-%m-%d %H:%M:%S"))
        assert 0 <= time.time() - since < 60
        held.close()
    assert os.listdir(folder) == ["run.lock"]


def test_a_folder_in_use_is_refused_until_its_run_ends(tmp_path, other):
    first = other(tmp_path)
    assert first.stdout.readline() == "held\n"
    wanted = (
        rf"'{re.escape(str(tmp_path))}' is in use by process "
        rf"{first.pid} on {re.escape(socket.gethostname())} since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d; stop that run, or choose another "
        r"folder"
    )
    for _ in range(2):  # being refused, and told why, does not end the lock
        with pytest.raises(ValueError) as raised:
            files.lock(tmp_path)
        assert re.fullmatch(wanted, str(raised.value))
    second = other(tmp_path)
    assert second.wait(20) == 1
    assert re.fullmatch(wanted, second.stderr.read().strip())
    first.communicate("")  # ends as a run does
    files.lock(tmp_path).close()


def test_a_lock_ends_with_a_killed_run(tmp_path, other):
    first = other(tmp_path)
    assert first.stdout.readline() == "held\n"
    first.send_signal(signal.SIGKILL)
    first.wait(20)
    files.lock(tmp_path).close()


def test_a_lock_is_not_a_childs(tmp_path, other):
    """A worker that outlives its run holds nothing."""
    first = other(tmp_path, "fork")
    assert first.stdout.readline() == "held\n"
    child = int(first.stdout.readline())
    try:
        with pytest.raises(ValueError, match=f"process {first.pid} on"):
            files.lock(tmp_path)
        first.send_signal(signal.SIGKILL)
        first.wait(20)
        os.kill(child, 0)  # it lives
        files.lock(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_ends_or_closes_ends_no_lock(tmp_path, other):
    held = files.lock(tmp_path)
    child = os.fork()
    if child == 0:
        held.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert other(tmp_path).wait(20) == 1
    held.close()


@pytest.mark.parametrize("words", ["", "{", "[1]", '{"pid": 3}', "\xff\x00"])
def test_a_holder_that_has_not_signed_is_another_process(
    tmp_path, other, words
):
    first = other(tmp_path)
    assert first.stdout.readline() == "held\n"
    (tmp_path / "run.lock").write_text(words, encoding="latin-1")
    with pytest.raises(ValueError, match="in use by another process; stop"):
        files.lock(tmp_path)


@pytest.mark.parametrize("code", ["ENOLCK", "EINVAL", "ENOTSUP", "ENOSYS"])
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, code):
    def lockf(*_):
        raise OSError(getattr(errno, code), "no locks here")

    warned = logged(monkeypatch, files.logger, "warning")
    monkeypatch.setattr(fcntl, "lockf", lockf)
    with files.lock(tmp_path) as held:
        assert not held.closed
    (text,) = warned
    assert str(tmp_path) in text and "no locks here" in text


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(OSError, match="choose another folder"):
        files.lock(tmp_path / "file" / "run")


SYNCED = [  # is a folder, what fsync meets, whether it matters
    (True, None, False),
    (True, errno.EINVAL, False),
    (True, errno.ENOTSUP, False),
    (True, errno.EIO, True),
    (False, None, False),
    (False, errno.EINVAL, True),
    (False, errno.ENOSPC, True),
]


@pytest.mark.parametrize(("is_folder", "number", "matters"), SYNCED)
def test_only_folders_may_know_no_fsync(
    tmp_path, monkeypatch, is_folder, number, matters
):
    path = tmp_path / "x"
    path.mkdir() if is_folder else path.touch()
    synced = []

    def fsync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if matters:
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            files.sync(path)
    else:
        files.sync(path)
    assert synced == [str(path)]


NO_SPACE = "Error while serializing: I/O error: No space left on device"
NUMBERS = [
    (OSError(28, "No space left on device"), 28),
    (PermissionError(13, "Permission denied"), 13),
    (OSError("without a number"), None),
    (RuntimeError("os error 28"), None),
    (KeyboardInterrupt(), None),
    (SafetensorError(f"{NO_SPACE} (os error 28)"), 28),
    (
        SafetensorError('IoError(Os { code: 122, kind: Other, message: "" })'),
        122,
    ),
    (SafetensorError("Error while serializing: InvalidHeader"), None),
]


@pytest.mark.parametrize(("error", "number"), NUMBERS)
def test_the_systems_number_of_an_error(error, number):
    assert files.error_number(error) == number


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.numpy(force=True).tobytes()


VALUES = [
    0.1,
    1e-300,
    -0.0,
    float("inf"),
    2**77,
    -3,
    True,
    None,
    "가 \u2028 \ud7a3",
    [],
    {},
    [1, [2.5, {"a": None}]],
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_read_back(tmp_path, value):
    path = tmp_path / "x.ckpt"
    files.save_state({"value": value}, path)
    found = files.load_state(path)["value"]
    assert repr(found) == repr(value)  # -0.0 and True equal others
    assert os.listdir(tmp_path) == ["x.ckpt"]


DTYPES = (
    [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    + [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    + [torch.bool]
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_read_back_to_the_bit(tmp_path, dtype):
    """Every pattern of bits, NaNs of any payload among them."""
    generator = torch.Generator().manual_seed(3)
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (64 * 8,), generator=generator)
    tensor = raw.to(torch.uint8).view(dtype)
    path = tmp_path / "x.ckpt"
    files.save_state({"tensor": tensor}, path)
    found = files.load_state(path)["tensor"].view(torch.uint8)
    assert found.tolist() == tensor.view(torch.uint8).tolist()


def test_tensors_may_share_their_memory(tmp_path):
    base = torch.arange(12.0)
    state = {
        "whole": base,
        "same": base,
        "part": base[3:5],
        "turned": base.view(3, 4).T,
        "nested": {"list": [base[:1], {"deep": torch.tensor(7)}]},
        "empty": torch.zeros(0, 3),
        "empty too": torch.zeros(0),
        "trained": torch.ones(2, requires_grad=True),
        "lr": 0.5,
    }
    path = tmp_path / "x.ckpt"
    files.save_state(state, path)
    found = files.load_state(path)
    assert list(found) == list(state)
    for name in ("whole", "same", "part", "turned", "empty", "empty too"):
        assert bits(found[name]) == bits(state[name])
    assert bits(found["nested"]["list"][0]) == bits(base[:1])
    assert bits(found["nested"]["list"][1]["deep"]) == bits(torch.tensor(7))
    assert not found["trained"].requires_grad
    found["whole"].zero_()
    assert bits(found["same"]) == bits(base)  # each has its own


def test_tensors_outlive_their_file(tmp_path):
    """Mapped memory would keep a removed file's blocks, or be cut with it."""
    path = tmp_path / "x.ckpt"
    tensor = torch.randn(100_000)
    files.save_state({"tensor": tensor}, path)
    found = files.load_state(path)["tensor"]
    assert "x.safetensors" not in Path("/proc/self/maps").read_text()
    os.truncate(tmp_path / "x.safetensors", 0)
    assert torch.equal(found, tensor)


def test_all_files_have_the_usual_rights(tmp_path):
    path = tmp_path / "x.ckpt"
    files.save_state({"tensor": torch.ones(1)}, path)
    (tmp_path / "usual").touch()
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return shutil.rmtree, (str(self.path),)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {
    "cut JSON": lambda p: cut(p),
    "empty JSON": lambda p: os.truncate(p, 0),
    "other JSON": lambda p: p.write_text("[1, 2]", encoding="utf-8"),
    "no UTF-8": lambda p: p.write_bytes(b'{"a": "\xff"}'),
    "cut tensors": lambda p: cut(p.with_suffix(".safetensors")),
    "empty tensors": lambda p: os.truncate(p.with_suffix(".safetensors"), 0),
    "lost tensors": lambda p: p.with_suffix(".safetensors").unlink(),
    "unknown tensor": lambda p: p.write_text('{"a": {"$tensor": "b"}}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_told(tmp_path, damage):
    path = tmp_path / "x.ckpt"
    files.save_state({"tensor": torch.ones(100), "lr": 0.5}, path)
    DAMAGES[damage](path)
    with pytest.raises(ValueError, match=r"x\.ckpt is damaged .*remove"):
        files.load_state(path)


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_no_pickle_is_run(tmp_path, name):
    victim = tmp_path / "victim"
    victim.mkdir()
    path = tmp_path / "x.ckpt"
    files.save_state({"tensor": torch.ones(100)}, path)
    for write in (pickle.dump, torch.save):
        with open(tmp_path / name, "wb") as file:
            write(Attack(victim), file)
        with pytest.raises(ValueError, match="is damaged"):
            files.load_state(path)
    assert victim.exists()
    with open(tmp_path / name, "wb") as file:
        pickle.dump(Attack(victim), file)
    pickle.loads((tmp_path / name).read_bytes())
    assert not victim.exists()  # it would have worked
