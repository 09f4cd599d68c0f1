"""A frozen encoder's outputs, kept from the first epoch on."""

import shutil
from collections import namedtuple

import pytest
import torch
from outputs import curves

FROZEN = {"adaptation": "frozen_encoder", "max_batch_length": 0}


@pytest.fixture(scope="module")
def kept(here, tmp_path_factory):
    """A run of two epochs that keeps the states, and the folder of them."""
    cache = tmp_path_factory.mktemp("cache")
    settings = {**FROZEN, "encoder_cache_folder": cache}
    folder = tmp_path_factory.mktemp("kept")
    return here(folder, number_of_epochs=2, **settings), cache


def n_bytes(cache):
    return {p: p.stat().st_size for p in cache.rglob("*") if p.is_file()}


def test_the_weights_are_those_without_a_cache(kept, here, tmp_path):
    brain, _ = kept
    plain = here(tmp_path, number_of_epochs=2, **FROZEN)
    assert plain.seen == brain.seen
    assert sum(n for _, n, _ in plain.encoded) == 2 * 34
    for name, tensor in plain.trained.items():
        assert torch.equal(brain.trained[name], tensor), name
    told, expected = (curves(b.output_folder) for b in (brain, plain))
    assert told[1] == expected[1]
    for row, other in zip(told[0], expected[0], strict=True):
        assert (row["loss"], row["lr"]) == (other["loss"], other["lr"])


def test_each_clip_is_encoded_once_and_never_again(kept, here, tmp_path):
    brain, cache = kept
    assert [epoch for epoch, _, _ in brain.encoded] == [1] * 5
    assert sum(n_clips for _, n_clips, _ in brain.encoded) == 34
    before = n_bytes(cache)
    assert sum(before.values()) > 34 * 144 * 4 * 50  # a second of each clip
    again = here(tmp_path, encoder_cache_folder=cache, **FROZEN)
    assert again.seen == brain.seen[:5]
    assert again.encoded == []
    assert n_bytes(cache) == before


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"augment": True, **FROZEN}, "augment=True changes"),
        ({"adaptation": "full"}, "a trained encoder's outputs change"),
    ],
)
def test_what_would_change_is_not_kept(settings, told, here, tmp_path):
    settings["encoder_cache_folder"] = tmp_path / "cache"
    with pytest.raises(SystemExit, match=told):
        here(tmp_path / "out", **settings)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_training(here, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 2 * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    out, cache = tmp_path / "out", tmp_path / "cache"
    with pytest.raises(ValueError, match="where 0.0 GB are free"):
        here(out, encoder_cache_folder=cache, **FROZEN)
    assert not cache.exists()
    assert not (out / "train_log.txt").exists()
