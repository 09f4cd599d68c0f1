"""The store of clips: what goes in comes out, in order, from the disk."""

import hashlib
import tracemalloc

import pytest
from local.clip_store import ClipStore
from local.manifest import Utterance


def clip(identifier, split="train", label="가", **more):
    return Utterance(identifier, "/a.wav", label, split, **more)


@pytest.fixture
def store(tmp_path):
    clips = ClipStore(tmp_path / "clips.sqlite")
    yield clips
    clips.close()


def keep(store, *clips):
    for one in clips:
        store.keep(one, None, None, False)


def test_clips_come_back_in_order(store):
    full = clip(
        'b\n,"x"',
        speaker="kim",
        category="call",
        start=1.25,
        stop=3.0,
        duration=1.75,
        session="7",
        corpus="own",
    )
    others = clip("9"), clip("a\0b", label=""), clip("007", "test")
    keep(store, full, *others)
    assert list(store.clips("train")) == [full, *others[:2]]
    assert list(store.clips("test")) == [others[2]]
    assert "007" in store and "7" not in store


def test_totals(store):
    store.keep(clip("a", duration=1.5, session="s"), None, None, True)
    store.keep(clip("b", label="", duration=2.0), None, None, False)
    assert store.totals("train") == {
        "clips": 2,
        "seconds": 3.5,
        "no_speech": 1,
        "marked": 1,
        "sessions": 1,
    }
    assert store.totals("test")["clips"] == 0
    assert list(store.leftovers()) == ["a"]


def test_splits_are_as_clips_told_them(store):
    store.drop(clip("x", "test_b"), "too_long", "")
    keep(store, clip("a", "test_a"), clip("b", "valid"))
    store.drop(clip("y", "test_b"), "empty_text", "why")
    assert store.splits() == ["train", "test_a", "valid", "test_b"]
    assert store.dropped == {
        ("too_long", "test_b"): 1,
        ("empty_text", "test_b"): 1,
    }
    assert list(store.dropped_clips()) == [
        ("x", "test_b", "too_long", "/a.wav", ""),
        ("y", "test_b", "empty_text", "/a.wav", "why"),
    ]


@pytest.mark.parametrize("share, n_texts", [(0.001, 1), (0.25, 5), (0.5, 10)])
def test_texts_are_held_out_in_the_order_of_their_hash(store, share, n_texts):
    """As every version of the preparation has chosen them."""
    labels = [f"문장 {i}" for i in range(20)]
    for reading in range(2):
        keep(store, *(clip(f"{t}-{reading}", label=t) for t in labels))
    keep(store, clip("v", "valid", "검증"))
    store.hold_out("test", share)
    ordered = sorted(labels, key=lambda t: hashlib.sha1(t.encode()).digest())
    held_out = [c.text for c in store.clips("test")]
    assert sorted(held_out) == sorted(ordered[:n_texts] * 2)
    assert {c.text for c in store.clips("train")} == set(ordered[n_texts:])
    assert len(list(store.clips("valid"))) == 1


def test_nothing_is_held_out_of_nothing(store):
    store.hold_out("test", 0.5)
    assert list(store.clips("test")) == []


def test_stores_are_added(tmp_path, store):
    other = ClipStore(tmp_path / "other ?#.sqlite")
    other.keep(clip("1", "test"), b"text", b"sound", True)
    keep(other, clip("2"), clip("3", "test"))
    other.drop(clip("4", "test"), "too_long", "why")
    other.close()
    keep(store, clip("own-0", corpus="own"))
    for name in ("a", "b"):
        store.add(
            tmp_path / "other ?#.sqlite",
            name,
            {"train": "train", "test": f"test_{name}"},
            {"too_long": {"test": 1}},
        )
    assert [c.id for c in store.clips("train")] == ["own-0", "a-2", "b-2"]
    assert [c.corpus for c in store.clips("test_b")] == ["b", "b"]
    assert list(store.leftovers()) == ["a-1", "b-1"]
    assert [row[:2] for row in store.dropped_clips()] == [
        ("a-4", "test_a"),
        ("b-4", "test_b"),
    ]
    assert store.dropped["too_long", "test_b"] == 1
    assert store.rows(
        "SELECT count(*) FROM clip WHERE spoken = ? AND audio = ?",
        b"text",
        b"sound",
    ).fetchone() == (2,)


def test_memory_is_flat(store):
    def peak(numbers):
        tracemalloc.start()
        for i in numbers:
            keep(store, clip(f"{i}", label=f"{i}"))
        store.hold_out("test", 0.5)
        for split in ("train", "test"):
            assert sum(1 for _ in store.clips(split))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few = peak(range(100))
    assert peak(range(100, 5000)) < few + 100_000  # bytes
