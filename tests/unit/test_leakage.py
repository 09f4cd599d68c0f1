"""What train has in common with the other splits, in numbers and examples."""

import numpy as np
import pytest
from local import leakage
from local.clip_store import ClipStore
from local.manifest import Utterance


@pytest.fixture
def store(tmp_path):
    clips = ClipStore(tmp_path / "clips.sqlite")
    yield clips
    clips.close()


def add(store, split, label="", speaker="", sound=None, corpus=""):
    """Keeps a clip; its ID tells its split and its number in all."""
    (n_clips,) = store.rows("SELECT count(*) FROM clip").fetchone()
    name = f"{split}{n_clips}"
    clip = Utterance(name, "", label, split, speaker, corpus=corpus)
    store.keep(clip, leakage.of_text(label), sound, False)


@pytest.mark.parametrize(
    "first, second, same",
    [
        ("가고 싶어.", "가고싶어", True),
        ("３시, OK!", "3시 ok", True),
        ("\u1100\u1161", "가", True),
        ("가다", "가요", False),
        ("3.5", "35", False),
    ],
)
def test_texts_compare_as_scored_without_spaces(first, second, same):
    assert (leakage.of_text(first) == leakage.of_text(second)) == same


@pytest.mark.parametrize("label", ["", "...", "~ !"])
def test_an_empty_text_is_no_text(label):
    assert leakage.of_text(label) is None


def test_audio_is_told_by_samples_and_rate():
    samples = np.arange(9, dtype=np.float32)
    same = leakage.of_audio(np.stack([samples, samples], 1)[:, 0], 8000)
    assert leakage.of_audio(samples, 8000) == same
    assert leakage.of_audio(samples, 16000) != same
    assert leakage.of_audio(samples[1:], 8000) != same
    assert leakage.of_audio(samples[:0], 8000) is None


def test_each_kind_is_counted_by_split(store):
    add(store, "train", "하나", "kim", b"1")
    add(store, "train", "하나.", "kim", b"2")
    add(store, "train", "", "", None)
    add(store, "valid", "하 나", "lee", b"1")
    add(store, "valid", "하나!", "kim", b"3")
    add(store, "valid", "", "", None)
    add(store, "test", "둘", "park", b"3")
    found = leakage.between(store, ["train", "valid", "test", "test_none"])
    none = {"shared": 0, "clips": 0, "examples": []}
    assert found == {
        "splits": {
            "valid": {
                "texts": {
                    "shared": 1,
                    "clips": 2,
                    "examples": [{"train": "train0", "valid": "valid3"}],
                },
                "speakers": {
                    "shared": 1,
                    "clips": 1,
                    "examples": [{"train": "train0", "valid": "valid4"}],
                },
                "audio": {
                    "shared": 1,
                    "clips": 1,
                    "examples": [{"train": "train0", "valid": "valid3"}],
                },
            },
            "test": dict.fromkeys(("texts", "speakers", "audio"), none),
            "test_none": dict.fromkeys(("texts", "speakers", "audio"), none),
        },
        "without_speaker": {"train": 1, "valid": 1},
        "copies_in_train": {"clips": 0, "examples": []},
    }


def test_copies_within_train(store):
    for sound in (b"1", b"2", b"1", b"1", None, None):
        add(store, "train", sound=sound)
    assert leakage.between(store, ["train"])["copies_in_train"] == {
        "clips": 2,
        "examples": [{"first": "train0", "copy": "train3"}],
    }


def test_a_speaker_is_one_within_a_corpus(store):
    add(store, "train", "가", "kim", b"1", corpus="one")
    add(store, "test", "가", "kim", b"1", corpus="two")
    shared = leakage.between(store, ["test"])["splits"]["test"]
    counts = {kind: found["shared"] for kind, found in shared.items()}
    assert counts == {"texts": 1, "speakers": 0, "audio": 1}


def test_examples_are_few(store):
    for split in ("train", "test"):
        for i in range(leakage.N_EXAMPLES + 5):
            add(store, split, f"문장 {i}")
    texts = leakage.between(store, ["test"])["splits"]["test"]["texts"]
    assert texts["shared"] == texts["clips"] == leakage.N_EXAMPLES + 5
    assert len(texts["examples"]) == leakage.N_EXAMPLES


@pytest.mark.parametrize("kind", leakage.SHARED)
def test_nothing_is_sorted(store, kind):
    """A sort of all clips would take the folder for temporary files."""
    columns, told = leakage.SHARED[kind]
    plan = store.rows(
        f"EXPLAIN QUERY PLAN SELECT {columns}, split, count(*)"
        f" FROM clip WHERE {told} GROUP BY {columns}, split"
    )
    words = " ".join(row[-1] for row in plan)
    assert "COVERING INDEX" in words and "TEMP B-TREE" not in words
