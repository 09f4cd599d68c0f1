"""Encoder states on disk: bit for bit, or not there."""

import itertools
import logging
import multiprocessing
import os
import pickle
import shutil
import time

import numpy as np
import pytest
import torch
from local import cache_files, encoder_cache
from local.cache_files import RECORD
from local.encoder_cache import EncoderCache

WIDTH = 8
FORK = multiprocessing.get_context("fork")


def states(i, dtype=torch.float32):
    """(frames, width) of clip i, of a length of its own."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(3 + i % 5, WIDTH, generator=generator).to(dtype)


def filled(folder, clips, writer="writer"):
    cache = EncoderCache(folder, "f", writer)
    cache.put_batch([str(i) for i in clips], [states(i) for i in clips])
    cache.refresh()
    return cache


def found(cache, n):
    """Which of n clips there are; each one found must be right."""
    there = []
    for i in range(n):
        read = cache.get(str(i))
        if read is not None:
            assert torch.equal(read, states(i))
            there.append(i)
    return there


def only(folder, suffix):
    (path,) = (folder / "f").glob(f"*{suffix}")
    return path


def truncate(path, n_bytes):
    os.truncate(path, path.stat().st_size - n_bytes)


# Reading what was written


@pytest.mark.parametrize("dtype", encoder_cache.DTYPES)
def test_states_come_back_bit_for_bit(tmp_path, dtype):
    special = [float("nan"), float("inf"), -0.0, 1e-7]
    odd = torch.tensor([special * 2] * 3).to(dtype)
    cache = EncoderCache(tmp_path, "f")
    cache.put_batch(["a", "b"], [states(1, dtype), odd])
    cache.put("c", states(2, dtype))
    cache.refresh()
    for opened in (cache, EncoderCache(tmp_path, "f")):
        assert len(opened) == 3
        for key, expected in [
            ("a", states(1, dtype)),
            ("b", odd),
            ("c", states(2, dtype)),
        ]:
            read = opened.get(key)
            assert read.dtype == dtype and read.shape == expected.shape
            as_bytes = read.view(torch.uint8), expected.view(torch.uint8)
            assert torch.equal(*as_bytes)


def test_an_unknown_key(tmp_path):
    for cache in (EncoderCache(tmp_path, "f"), filled(tmp_path, range(3))):
        assert "9" not in cache and cache.get("9") is None
    assert "2" in cache


def test_opening_writes_nothing(tmp_path):
    EncoderCache(tmp_path / "none", "f").refresh()
    assert not (tmp_path / "none").exists()


def test_what_is_put_may_change_afterwards(tmp_path):
    cache, tensor = EncoderCache(tmp_path, "f"), torch.ones(2, WIDTH)
    cache.put("a", tensor)
    tensor.zero_()
    cache.refresh()
    assert torch.equal(cache.get("a"), torch.ones(2, WIDTH))


def test_trimmed_and_trainable_states(tmp_path):
    """A slice of a batch is no contiguous tensor, and may want gradients."""
    batch = torch.randn(2, 9, WIDTH, requires_grad=True).transpose(0, 1)
    cache = EncoderCache(tmp_path, "f")
    cache.put_batch(["a", "b"], [batch[:4, 0], batch[:7, 1]])
    cache.refresh()
    assert torch.equal(cache.get("a"), batch[:4, 0])
    assert torch.equal(cache.get("b"), batch[:7, 1])


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.ones(2, 2, dtype=torch.double)],
        [torch.ones(2, 2), torch.ones(1, 2).half()],
    ],
)
def test_a_dtype_that_cannot_be_stored(tmp_path, tensors):
    with pytest.raises(ValueError, match="torch.bfloat16"):
        EncoderCache(tmp_path, "f").put_batch(
            ["a", "b"][: len(tensors)], tensors
        )


# Several writers and readers


def test_two_writers_and_who_reads_them(tmp_path):
    first = filled(tmp_path, range(0, 5), "rank0")
    second = filled(tmp_path, range(5, 9), "rank1")
    assert len(first) == 5 and len(second) == 9
    first.refresh()
    assert found(first, 9) == found(second, 9) == list(range(9))
    first.put("9", states(9))
    first.flush()
    second.refresh()
    assert len(second) == 10
    assert found(second, 10) == list(range(10))
    names = sorted(p.name[:5] for p in (tmp_path / "f").glob("*.data"))
    assert names == ["rank0", "rank1"]


def test_a_clip_that_two_wrote(tmp_path):
    filled(tmp_path, range(3))
    assert len(filled(tmp_path, range(1, 4))) == 4


def test_other_fingerprint(tmp_path, caplog):
    filled(tmp_path, range(3))
    assert encoder_cache.other_caches(tmp_path, "f") == ""
    with caplog.at_level(logging.INFO):
        assert len(EncoderCache(tmp_path, "other")) == 0
    n_bytes = sum(p.stat().st_size for p in (tmp_path / "f").iterdir())
    line = encoder_cache.other_caches(tmp_path, "other")
    assert line in caplog.text
    assert line.startswith(f"{tmp_path} holds 1 other encoder cache")
    assert f"{n_bytes / 1e9:.1f} GB" in line and line.endswith(": f")


class Clips(torch.utils.data.Dataset):
    def __init__(self, cache, n):
        self.cache, self.n = cache, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.cache.get(str(i))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_read_the_same(tmp_path, start):
    cache = filled(tmp_path, range(12))
    assert cache.get("0") is not None  # has an open file to inherit
    loader = torch.utils.data.DataLoader(
        Clips(cache, 12),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=start,
    )
    for i, read in enumerate(loader):
        assert torch.equal(read, states(i))


def test_a_pickled_copy_writes_files_of_its_own(tmp_path):
    cache = filled(tmp_path, range(3))
    copy = pickle.loads(pickle.dumps(cache))
    copy.put("3", states(3))
    cache.put("4", states(4))
    copy.flush()
    cache.refresh()
    assert found(cache, 6) == [0, 1, 2, 3, 4]


def test_a_forked_copy_writes_files_of_its_own(tmp_path):
    cache = filled(tmp_path, range(3))

    def write():
        cache.put_batch(["3", "5"], [states(3), states(5)])
        cache.flush()

    process = FORK.Process(target=write)
    process.start()
    process.join(30)
    cache.put("4", states(4))
    cache.refresh()
    assert process.exitcode == 0
    assert found(cache, 6) == list(range(6))
    assert len(list((tmp_path / "f").glob("*.data"))) == 2


# What a crash leaves


@pytest.mark.parametrize("n_torn", [1, 13, RECORD.itemsize - 1])
def test_a_torn_index_record(tmp_path, n_torn):
    filled(tmp_path, range(4))
    truncate(only(tmp_path, ".index"), n_torn)
    assert found(EncoderCache(tmp_path, "f"), 4) == [0, 1, 2]


def test_a_record_that_is_still_being_written(tmp_path):
    reader, index = filled(tmp_path, range(4)), only(tmp_path, ".index")
    whole = index.read_bytes()
    index.write_bytes(whole[:-5])
    reader = EncoderCache(tmp_path, "f")
    assert len(reader) == 3
    index.write_bytes(whole)
    reader.refresh()
    assert found(reader, 4) == [0, 1, 2, 3]


def test_an_index_past_its_data(tmp_path):
    filled(tmp_path, range(4))
    truncate(only(tmp_path, ".data"), 1)
    cache = EncoderCache(tmp_path, "f")
    assert "3" not in cache
    assert found(cache, 4) == [0, 1, 2]


def test_a_record_of_more_than_its_whole_file(tmp_path):
    filled(tmp_path, range(1))
    record = np.fromfile(only(tmp_path, ".index"), RECORD)
    record["n_frames"] = 2**31
    record.tofile(only(tmp_path, ".index"))
    assert "0" not in EncoderCache(tmp_path, "f")


def test_an_index_without_its_data(tmp_path):
    cache = filled(tmp_path, range(4))
    only(tmp_path, ".data").unlink()
    assert len(EncoderCache(tmp_path, "f")) == 0
    cache = pickle.loads(pickle.dumps(cache))  # knows of it, opens it anew
    assert found(cache, 4) == []


@pytest.mark.parametrize("byte", [0, 255])
def test_an_index_whose_tail_is_rubbish(tmp_path, byte):
    """A power cut may leave pages of zeros, or anything else."""
    filled(tmp_path, range(4))
    with open(only(tmp_path, ".index"), "ab") as file:
        file.write(bytes([byte]) * 3 * RECORD.itemsize)
    cache = EncoderCache(tmp_path, "f")
    assert len(cache) == 4
    assert found(cache, 4) == [0, 1, 2, 3]


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_of_data(tmp_path, caplog):
    cache = filled(tmp_path, range(4))
    flip(only(tmp_path, ".data"), -1)
    assert found(cache, 4) == [0, 1, 2]
    assert cache.get("3") is None
    assert caplog.text.count("checksum") == 1  # warned once
    cache.put("3", states(3))  # as after any get that had nothing
    cache.refresh()
    assert found(cache, 4) == [0, 1, 2, 3]


def test_no_flipped_byte_of_the_index_gives_wrong_states(tmp_path):
    filled(tmp_path, range(2))
    for position in range(RECORD.itemsize):
        index = only(tmp_path, ".index")
        flip(index, position)
        assert found(EncoderCache(tmp_path, "f"), 2) == [1]
        flip(index, position)


def test_two_keys_of_one_number(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_files, "number", lambda key: 7)
    cache = filled(tmp_path, range(3))
    assert found(cache, 4) == [0, 1, 2]


def test_kill_while_writing(tmp_path):
    def write():
        cache = EncoderCache(tmp_path, "f")
        for i in itertools.count(step=4):
            clips = range(i, i + 4)
            cache.put_batch([str(j) for j in clips], [states(j) for j in clips])

    process = FORK.Process(target=write)
    process.start()
    try:
        while len(EncoderCache(tmp_path, "f")) < 40:
            assert process.is_alive()
            time.sleep(0.001)
    finally:
        process.kill()
        process.join()
    cache = EncoderCache(tmp_path, "f")
    n_clips = len(cache)
    assert found(cache, n_clips + 8) == list(range(n_clips))
    resumed = filled(tmp_path, range(n_clips, n_clips + 2))
    assert found(resumed, n_clips + 8) == list(range(n_clips + 2))


# A disk that is full


def assert_gives_up(cache, caplog):
    """One warning, then silence; what was there stays."""
    for i in range(3, 9):
        cache.put(str(i), states(i))
    cache.refresh()
    cache.put("9", states(9))
    cache.refresh()
    assert caplog.text.count("No space left") == 1
    assert "free space or name another folder" in caplog.text


@pytest.mark.parametrize("n_written", [0, 7, 200])
def test_a_disk_that_fills_up(tmp_path, monkeypatch, caplog, n_written):
    """However much of the next entries, or of their records, still fits."""
    cache = filled(tmp_path, range(3))
    n_data = only(tmp_path, ".data").stat().st_size
    pwrite, left = os.pwrite, [n_written]

    def full(descriptor, data, offset):
        if not left[0]:
            raise OSError(28, "No space left on device")
        n_taken = pwrite(descriptor, data[: left[0]], offset)
        left[0] -= n_taken
        return n_taken

    monkeypatch.setattr(os, "pwrite", full)
    assert_gives_up(cache, caplog)
    reopened = EncoderCache(tmp_path, "f")
    assert found(cache, 10) == found(reopened, 10)
    assert found(cache, 10)[:3] == [0, 1, 2]
    n_records = only(tmp_path, ".index").stat().st_size // RECORD.itemsize
    assert n_records == len(cache)  # none was written before its data
    if n_written < 100:  # no entry fitted, and its part was given back
        assert only(tmp_path, ".data").stat().st_size == n_data


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
@pytest.mark.parametrize("file", ["data", "index"])
def test_the_systems_own_full_device(tmp_path, caplog, file):
    cache = filled(tmp_path, range(3))
    setattr(cache._own, file, open("/dev/full", "wb", buffering=0))
    assert_gives_up(cache, caplog)
    assert (
        found(cache, 10) == found(EncoderCache(tmp_path, "f"), 10) == [0, 1, 2]
    )


def test_space_is_left_for_checkpoints(tmp_path, monkeypatch, caplog):
    cache = filled(tmp_path, range(3))
    monkeypatch.setattr(cache_files, "MARGIN_BYTES", 10**18)
    assert_gives_up(cache, caplog)
    assert found(cache, 10) == [0, 1, 2]


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "f").touch()
    cache = EncoderCache(tmp_path, "f")
    cache.put("a", states(0))
    cache.refresh()
    assert "exists" in caplog.text and cache.get("a") is None


def set_free(monkeypatch, n_bytes):
    usage = shutil.disk_usage("/")._replace(free=n_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize("margin, fits", [(0, True), (1, False)])
def test_require_space(tmp_path, monkeypatch, margin, fits):
    folder, n_bytes = tmp_path / "not" / "there", 460 * 10**9
    set_free(monkeypatch, n_bytes + encoder_cache.MARGIN_BYTES - margin)
    if fits:
        encoder_cache.require_space(folder, n_bytes)
    else:
        with pytest.raises(ValueError):
            encoder_cache.require_space(folder, n_bytes)
    assert not folder.exists()


def test_a_refusal_names_all(tmp_path, monkeypatch):
    set_free(monkeypatch, 10**9 + encoder_cache.MARGIN_BYTES)
    with pytest.raises(ValueError) as error:
        encoder_cache.require_space(tmp_path / "cache", 460 * 10**9)
    for part in [
        "460.0 GB",
        f"in {tmp_path / 'cache'}",
        "1.0 GB are free",
        "another disk",
        "fewer clips",
        "empty",
    ]:
        assert part in str(error.value)


def test_space_in_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is no folder"):
        encoder_cache.require_space(tmp_path / "file" / "cache", 1)


@pytest.mark.parametrize("dtype", encoder_cache.DTYPES)
def test_the_estimate_is_what_is_written(tmp_path, dtype):
    durations_s = [0.14, 0.141, 1.0, 2.999, 28.99, 29.5, 30.0]
    frames = [57, 58, 100, 200, 1500, 1500, 1500]
    cache = EncoderCache(tmp_path, "f")
    for i, n_frames in enumerate(frames):
        cache.put(str(i), torch.zeros(n_frames, WIDTH, dtype=dtype))
    cache.flush()
    written = sum(p.stat().st_size for p in (tmp_path / "f").iterdir())
    assert written == encoder_cache.bytes_needed(
        durations_s, 50, 50, 1500, WIDTH, dtype
    )


# Identities


def test_a_changed_file_is_another_clip(tmp_path, monkeypatch):
    wav, other = tmp_path / "a.wav", tmp_path / "b.wav"
    times = (10**9, 10**9)
    for path in (wav, other):
        path.write_bytes(b"1234")
        os.utime(path, ns=times)
    keys = [
        encoder_cache.key(str(wav), None, None),
        encoder_cache.key(str(other), None, None),
        encoder_cache.key(str(wav), 0.0, 1.5),
        encoder_cache.key(str(wav), 0.0, 1.6),
        encoder_cache.key(str(wav), 0.1, 1.5),
    ]
    wav.write_bytes(b"12345")
    os.utime(wav, ns=times)
    keys.append(encoder_cache.key(str(wav), None, None))  # size
    os.utime(wav, ns=(times[0], times[1] + 1))
    keys.append(encoder_cache.key(str(wav), None, None))  # time
    assert len(set(keys)) == len(keys)
    monkeypatch.chdir(tmp_path)
    assert encoder_cache.key("a.wav", None, None) == keys[-1]
    with pytest.raises(FileNotFoundError):
        encoder_cache.key("none.wav", None, None)


def encoder():
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2)
    )
    return module.eval()


def last_bit(module):
    weight = module[2].weight.data.view(torch.int32)
    weight[1, 1] ^= 1


@pytest.mark.parametrize(
    "change",
    [
        last_bit,
        lambda module: module[1].running_mean.add_(1),
        lambda module: module.half(),
        lambda module: module.add_module("more", torch.nn.Linear(1, 1)),
        lambda module: module[0].weight.set_(module[0].weight.view(3, 2)),
    ],
    ids=["last_bit", "buffer", "dtype", "name", "shape"],
)
def test_other_weights_have_another_fingerprint(monkeypatch, change):
    monkeypatch.setattr(encoder_cache, "CHUNK", 2)
    first = encoder_cache.fingerprint(encoder(), torch.float16)
    assert first == encoder_cache.fingerprint(encoder(), torch.float16)
    changed = encoder()
    with torch.no_grad():
        change(changed)
    assert first != encoder_cache.fingerprint(changed, torch.float16)


def test_other_settings_have_another_fingerprint(monkeypatch):
    module, half = encoder(), torch.float16
    digests = [
        encoder_cache.fingerprint(module, half),
        encoder_cache.fingerprint(module, torch.bfloat16),
        encoder_cache.fingerprint(module, half, trim=50),
        encoder_cache.fingerprint(module, half, trim=51),
        encoder_cache.fingerprint(module, half, trim=50, rate=16000),
    ]
    swapped = encoder_cache.fingerprint(module, half, rate=16000, trim=50)
    assert swapped == digests[-1]
    monkeypatch.setattr(encoder_cache, "VERSION", 0)
    digests.append(encoder_cache.fingerprint(module, half))
    assert len(set(digests)) == len(digests)
