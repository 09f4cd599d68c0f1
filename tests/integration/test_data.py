"""What a run hears: shards, several corpora, telephone lines."""

import json
from collections import Counter

import pytest
from local import feature_shards
from outputs import curves, scores

CONSTANT = {"max_batch_length": 0, "log_interval_steps": 1}


@pytest.fixture(scope="module")
def on_audio(here, tmp_path_factory):
    """A run that computes its log-mels as it goes."""
    return here(tmp_path_factory.mktemp("audio"), **CONSTANT)


def test_shards_give_the_losses_of_audio(on_audio, here, corpus, hub, tmp_path):
    manifests = f"{on_audio.output_folder}/manifests"
    shards = tmp_path / "shards"
    feature_shards.make(manifests, shards, hub, data_folder=str(corpus))
    brain = here(tmp_path / "run", features_folder=shards, **CONSTANT)
    assert brain.seen == on_audio.seen
    pairs = zip(curves(brain.output_folder), curves(on_audio.output_folder))
    for found, expected in pairs:
        assert len(found) == len(expected) > 0
        for row, other in zip(found, expected):
            row, other = row.get("valid", row), other.get("valid", other)
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-3)
    both = [scores(b.output_folder) for b in (brain, on_audio)]
    assert both[0]["loss"] == pytest.approx(both[1]["loss"], rel=1e-3)


def test_several_corpora_by_weight(here, corpus, tmp_path):
    listed = [
        {"corpus": "manifest", "folder": str(corpus), "name": "a", "weight": 2},
        {"corpus": "manifest", "folder": ".", "name": "b", "weight": 0.5},
    ]
    brain = here(
        tmp_path, number_of_epochs=2, corpora=json.dumps(listed), **CONSTANT
    )
    for epoch in (1, 2):
        counts = Counter(
            identifier[0]
            for e, ids in brain.seen
            for identifier in ids
            if e == epoch
        )
        assert counts == {"a": 68, "b": 17}
    report = json.loads((tmp_path / "prepare_report.json").read_text())
    assert report["leakage"]["splits"]["test_a"]["texts"]["shared"] == 0
    assert sorted(p.stem for p in (tmp_path / "scores").glob("*_?.json")) == [
        *("test_a", "test_b")
    ]


def test_telephone(on_audio, here, tmp_path):
    brain = here(tmp_path / "b", telephone_share=1.0, **CONSTANT)
    assert brain.seen == on_audio.seen
    (steps, _), (plain, _) = (
        curves(b.output_folder) for b in (brain, on_audio)
    )
    assert steps[0]["loss"] != plain[0]["loss"]
