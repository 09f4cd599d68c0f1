"""A frozen encoder is heard alike, computed or read from disk."""

import os
import pickle
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from conftest import logged, write_audio
from local import encoder_cache, frozen, model, packing, ranks
from local.frozen import FrozenEncoder

from speechbrain.dataio.batch import PaddedBatch

MAX_SAMPLES = 80000  # random:quickstart's context
SECONDS = {"a": 1.0, "b": 2.3, "c": 0.7, "d": 4.5}
N_FRAMES = {"a": 50 + 50, "b": 115 + 50, "c": 35 + 50, "d": 250}
TOKENS = torch.tensor([[50258, 50264, 50359, 50363, 1, 20]])


@pytest.fixture
def rows(tmp_path):
    """ID to row of a manifest, with its audio."""
    return {
        name: {
            "wav": str(write_audio(tmp_path / f"{name}.wav", seconds, seed=i)),
            "start": None,
            "stop": None,
            "duration": seconds,
            "wrd": "가",
        }
        for i, (name, seconds) in enumerate(SECONDS.items())
    }


@pytest.fixture
def whisper(build):
    return build("frozen_encoder").train()


@pytest.fixture
def opened(whisper, rows, tmp_path):
    """Opens the states' folder, as each start of a run does."""

    def opened(precision="fp32", whisper=whisper, rows=rows):
        kept = FrozenEncoder(str(tmp_path / "states"))
        kept.open(whisper, precision, rows, tmp_path)
        return kept

    return opened


def read(kept, row):
    return dict(zip(frozen.PROVIDED, kept.read(frozen._clips(row), 80000)))


def heard(kept, whisper, rows):
    """What the decoder hears of rows, as in a step of training."""
    batch = PaddedBatch([read(kept, row) for row in rows.values()])
    wavs, lengths = batch.sig
    return kept.hear(whisper, batch, {"wav": wavs}, lengths)


def alone(whisper, row):
    """(frames, width) of a clip, encoded at full context and trimmed."""
    samples, _ = packing.read(frozen._clips(row), MAX_SAMPLES)
    n_frames = min(-(-len(samples) // 320) + model.TRIM_FRAMES, 250)
    return whisper.encode(samples[None])[0, :n_frames]


def check(heard, expected):
    """Each clip's states where the mask is True, and zeros behind."""
    states, mask = heard["encoder_states"], heard["encoder_mask"]
    lengths = [len(clip) for clip in expected]
    assert mask.dtype == torch.bool and mask.shape == states.shape[:2]
    assert mask.sum(1).tolist() == lengths
    assert states.shape[1] == max(lengths)
    for got, real, clip in zip(states, mask, expected):
        assert real[: len(clip)].all()
        torch.testing.assert_close(got[real], clip)
        assert (got[~real] == 0).all()


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and torch.equal(left[name], right[name])
        for name in left
    )


@pytest.fixture
def encoded(monkeypatch, whisper):
    """Numbers of clips that were encoded at each call."""
    calls, encode = [], whisper.encode

    def counting(wavs, *args, **kwargs):
        calls.append(len(wavs))
        return encode(wavs, *args, **kwargs)

    monkeypatch.setattr(whisper, "encode", counting)
    return calls


# Without a folder


def test_a_clip_is_encoded_at_full_context_and_trimmed(whisper, rows):
    kept = FrozenEncoder("")
    kept.open(whisper, "fp32", rows, "")
    kept.refresh()
    samples = [packing.read(frozen._clips(r), 80000)[0] for r in rows.values()]
    batch = PaddedBatch([{"sig": clip} for clip in samples])
    got = kept.hear(whisper, batch, {"wav": batch.sig.data}, batch.sig.lengths)
    check(got, [alone(whisper, row) for row in rows.values()])
    assert got["encoder_mask"].sum(1).tolist() == list(N_FRAMES.values())
    # Another neighbour, and less padding: the same.
    batch = PaddedBatch([{"sig": samples[0]}])
    check(
        kept.hear(whisper, batch, {"wav": batch.sig.data}, batch.sig.lengths),
        [alone(whisper, rows["a"])],
    )


ROUNDED_DOWN = [  # relative lengths in fp32 that would lose a frame
    n
    for n in range(1, MAX_SAMPLES, 320)
    if int(torch.tensor(n / MAX_SAMPLES) * MAX_SAMPLES) < n
]


@pytest.mark.parametrize(
    "n_samples", [1, 319, 320, 321, 16001, 79999, *ROUNDED_DOWN[::8]]
)
def test_frames_of_odd_lengths(whisper, n_samples):
    samples = torch.randn(n_samples)
    batch = PaddedBatch([{"sig": samples}, {"sig": torch.randn(80000)}])
    got = FrozenEncoder("").hear(
        whisper, batch, {"wav": batch.sig.data}, batch.sig.lengths
    )
    expected = min(-(-n_samples // 320) + 50, 250)
    assert got["encoder_mask"].sum(1).tolist() == [expected, 250]


# With a folder


@pytest.mark.parametrize(
    "precision, dtype",
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
    ],
)
def test_the_second_epoch_hears_what_the_first_did(
    opened, whisper, rows, encoded, precision, dtype
):
    kept = opened(precision)
    first = heard(kept, whisper, rows)
    expected = [alone(whisper, row) for row in rows.values()]
    check(first, [clip.to(dtype) for clip in expected])
    kept.refresh()
    encoded.clear()
    again = read(kept, rows["b"])
    wanted = first["encoder_states"][1, : N_FRAMES["b"]]
    assert torch.equal(again["states"], wanted)
    assert again["n_frames"] == N_FRAMES["b"]
    assert again["sig"].shape == (1,) and not again["failed"]
    assert same(heard(kept, whisper, rows), first)
    # So does another run, and a worker of its loader.
    kept = opened(precision)
    assert same(heard(kept, whisper, rows), first)
    in_worker = pickle.loads(pickle.dumps(kept))
    assert torch.equal(read(in_worker, rows["b"])["states"], wanted)
    assert encoded == []


def test_the_decoder_trains_alike(opened, whisper, rows):
    """Loss and gradients, bit for bit."""
    kept = opened()
    found = []
    for _ in range(2):
        whisper.zero_grad()
        _, logits = whisper(
            TOKENS.expand(4, -1), 3, **heard(kept, whisper, rows)
        )
        logits.logsumexp(-1).sum().backward()
        layer = whisper.model.decoder.layers[0].encoder_attn.v_proj
        found.append([logits.detach(), layer.weight.grad.clone()])
        assert layer.weight.grad.abs().sum() > 0
        kept.refresh()
    assert all(map(torch.equal, *found))
    # And as where nothing is kept.
    samples = [packing.read(frozen._clips(r), 80000)[0] for r in rows.values()]
    batch = PaddedBatch([{"sig": clip} for clip in samples])
    plain = FrozenEncoder("").hear(
        whisper, batch, {"wav": batch.sig.data}, batch.sig.lengths
    )
    _, logits = whisper(TOKENS.expand(4, -1), 3, **plain)
    assert torch.equal(logits, found[0][0])


@pytest.mark.parametrize("there", ["a", "bd", "abc"])
def test_a_batch_of_which_some_are_kept(opened, whisper, rows, encoded, there):
    kept = opened()
    heard(kept, whisper, {name: rows[name] for name in there})
    kept.refresh()
    before = read(kept, rows[there[0]])["states"]
    encoded.clear()
    got = heard(kept, whisper, rows)
    assert encoded == [len(rows) - len(there)]
    check(got, [alone(whisper, row) for row in rows.values()])
    kept.refresh()
    encoded.clear()
    assert same(heard(kept, whisper, rows), got)
    assert encoded == []
    assert torch.equal(read(kept, rows[there[0]])["states"], before)


def test_a_failed_clip_is_not_kept(opened, whisper, rows, tmp_path):
    rows["b"]["wav"] = str(tmp_path / "gone.wav")
    with open(rows["c"]["wav"], "wb") as file:
        file.write(b"RIFF no more")
    rows["d"].update(start=90.0, stop=91.0)
    kept = opened()
    for name in "bcd":
        got = read(kept, rows[name])
        assert got["failed"] and got["key"] == "" and got["n_frames"] == 0
        assert got["sig"].shape == (1600,)
    got = heard(kept, whisper, rows)
    assert got["encoder_mask"].sum(1).tolist() == [100, 55, 55, 55]
    kept.refresh()
    assert len(kept.cache) == 1
    assert read(kept, rows["a"])["n_frames"] == 100
    assert read(kept, rows["b"])["failed"]
    assert same(heard(kept, whisper, rows), got)
    # A clip that is back is encoded and kept.
    write_audio(tmp_path / "gone.wav", 2.3)
    heard(kept, whisper, rows)
    kept.refresh()
    assert read(kept, rows["b"])["n_frames"] == N_FRAMES["b"]


def test_packs_and_cuts_have_states_of_their_own(opened, whisper, rows):
    first, second = frozen._clips(rows["a"]) + frozen._clips(rows["b"])
    cut = first._replace(start=0.2, stop=1.0, duration=0.8)
    packs = {
        "a": rows["a"],
        "a+1": {"clips": [first, second], "duration": 3.3},
        "b+1": {"clips": [second, first], "duration": 3.3},
        "cut": {"clips": [cut], "duration": 0.8},
    }
    kept = opened(rows=packs)
    got = heard(kept, whisper, packs)
    check(got, [alone(whisper, pack) for pack in packs.values()])
    assert got["encoder_mask"].sum(1).tolist() == [100, 215, 215, 90]
    kept.refresh()
    assert len(kept.cache) == 4
    assert same(heard(kept, whisper, packs), got)
    assert read(kept, packs["b+1"])["n_frames"] == 215


def test_a_clip_that_stands_twice_in_an_epoch_is_kept_once(
    opened, whisper, rows, monkeypatch
):
    kept = opened()
    keys, put = [], kept.cache.put_batch
    monkeypatch.setattr(
        kept.cache, "put_batch", lambda k, s: (keys.extend(k), put(k, s))
    )
    kept.refresh()
    for names in ("aab", "ba"):
        some = {place: rows[name] for place, name in enumerate(names)}
        got = heard(kept, whisper, some)
        check(got, [alone(whisper, rows[name]) for name in names])
    assert len(keys) == len(set(keys)) == 2


def test_ranks_read_what_each_other_kept(
    opened, whisper, rows, encoded, monkeypatch, tmp_path
):
    kept = []
    for rank in range(2):
        monkeypatch.setattr(ranks, "here", lambda rank=rank: (rank, 2))
        kept.append(opened())
        heard(kept[rank], whisper, {k: rows[k] for k in ("ab", "cd")[rank]})
    for _ in ("valid", "train"):  # all have written by the second
        for one in kept:
            one.refresh()
    encoded.clear()
    first, second = (heard(one, whisper, rows) for one in kept)
    assert same(first, second) and encoded == []
    files = sorted(p.name[:5] for p in tmp_path.glob("states/*/*.data"))
    assert files == ["rank0", "rank1"]


# When a run starts


@pytest.fixture
def told(monkeypatch):
    return logged(monkeypatch, frozen.logger, "info")


Usage = namedtuple("Usage", "total used free")


def full_disk(monkeypatch):
    usage = Usage(2**40, 2**40 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_a_full_disk_is_told_before_training(
    opened, whisper, rows, monkeypatch, tmp_path
):
    full_disk(monkeypatch)
    with pytest.raises(ValueError, match="encoder cache needs .*states, where"):
        opened()
    assert not list(tmp_path.glob("states/*/*"))


def test_what_is_kept_needs_no_room(opened, whisper, rows, monkeypatch, told):
    kept = opened()
    heard(kept, whisper, rows)
    kept.refresh()
    with monkeypatch.context() as patched:
        full_disk(patched)
        kept = opened()
        assert read(kept, rows["a"])["n_frames"] == 100
        more = {**rows, "e": {**rows["a"], "stop": 0.5}}
        with pytest.raises(ValueError, match="encoder cache needs"):
            opened(rows=more)
    opened(rows=more)
    assert "states of 0 clips" in told[0] and "of 4 more" in told[0]
    assert "states of 4 clips" in told[1] and "of 0 more" in told[1]
    assert "states of 4 clips" in told[-1] and "of 1 more" in told[-1]


def test_the_room_is_that_of_the_states(
    opened, whisper, rows, monkeypatch, tmp_path
):
    asked = []
    monkeypatch.setattr(
        encoder_cache, "require_space", lambda *given: asked.append(given)
    )
    kept = opened("bf16")
    heard(kept, whisper, rows)
    kept.refresh()
    files = tmp_path.glob("states/*/*")
    ((_, needed, kept_free),) = asked
    assert needed == sum(file.stat().st_size for file in files)
    trained = sum(p.numel() for p in whisper.parameters() if p.requires_grad)
    assert kept_free > 3 * 12 * trained  # three checkpoints


def last_bit(whisper):
    weight = whisper.model.encoder.layers[1].fc2.weight.data.view(-1)
    weight[-1:] = torch.nextafter(weight[-1:], torch.tensor([9.0]))


def change_decoder(whisper):
    whisper.model.decoder.layers[0].fc1.weight.data += 1


def change_trim(whisper):
    model.TRIM_FRAMES = 60


def touch(whisper):
    del whisper


@pytest.mark.parametrize(
    "change, precision, n_found",
    [
        (touch, "fp32", 4),
        (change_decoder, "fp32", 4),
        (touch, "bf16", 0),
        (last_bit, "fp32", 0),
        (change_trim, "fp32", 0),
    ],
)
def test_states_of_another_encoder_are_not_found(
    opened, whisper, rows, monkeypatch, change, precision, n_found
):
    monkeypatch.setattr(model, "TRIM_FRAMES", model.TRIM_FRAMES)
    kept = opened()
    heard(kept, whisper, rows)
    kept.refresh()
    change(whisper)
    kept = opened(precision)
    found = [read(kept, row)["n_frames"] > 0 for row in rows.values()]
    assert sum(found) == n_found
    expected = [alone(whisper, row) for row in rows.values()]
    got = heard(kept, whisper, rows)
    check(got, [clip.to(kept.dtype) for clip in expected])


def test_a_file_that_was_changed_is_heard_anew(opened, whisper, rows, tmp_path):
    kept = opened()
    heard(kept, whisper, rows)
    kept.refresh()
    write_audio(tmp_path / "a.wav", 1.2, seed=9)
    assert read(kept, rows["a"])["n_frames"] == 0
    check(
        heard(kept, whisper, rows),
        [alone(whisper, row) for row in rows.values()],
    )


# When a run ends badly


def test_a_run_that_dies(opened, whisper, rows, encoded):
    """What it had put is there whole, or not at all."""
    dead = opened()  # to the end: nothing of it is flushed or closed
    heard(dead, whisper, rows)
    kept = opened()
    expected = [alone(whisper, row) for row in rows.values()]
    check(heard(kept, whisper, rows), expected)
    kept.refresh()
    encoded.clear()
    check(heard(kept, whisper, rows), expected)
    assert encoded == []


def cut_off(path):
    os.truncate(path, path.stat().st_size - 5)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit])
@pytest.mark.parametrize("suffix", ["index", "data"])
def test_a_torn_file(opened, whisper, rows, encoded, tmp_path, damage, suffix):
    kept = opened()
    first = heard(kept, whisper, rows)
    kept.refresh()
    (path,) = tmp_path.glob(f"states/*/*.{suffix}")
    damage(path)
    kept = opened()
    found = {k: read(kept, row)["n_frames"] for k, row in rows.items()}
    assert found == {**N_FRAMES, "d": 0}  # the last one
    encoded.clear()
    got = heard(kept, whisper, rows)
    assert encoded == [1]
    torch.testing.assert_close(got, first)
    kept.refresh()
    assert same(heard(opened(), whisper, rows), got)
    assert encoded == [1]


@pytest.mark.parametrize("same_disk", [True, False])
def test_room_for_checkpoints_where_they_share_the_disk(
    same_disk, opened, whisper, monkeypatch, tmp_path
):
    asked = []
    monkeypatch.setattr(
        encoder_cache, "require_space", lambda *given: asked.append(given)
    )
    if not same_disk:
        there = {str(tmp_path): Path("/proc")}
        monkeypatch.setattr(
            encoder_cache, "existing", lambda f: there.get(str(f), tmp_path)
        )
    opened()
    trained = sum(p.numel() for p in whisper.parameters() if p.requires_grad)
    room = asked[0][2] - encoder_cache.MARGIN_BYTES
    assert room == (3 * 12 * trained if same_disk else 0)


def test_a_home_folder_is_found(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert FrozenEncoder("~/states").folder == "/home/me/states"
