"""Saved weights beside a model: what differs is told."""

import copy
import re

import pytest
import torch
from local import saved_weights

NEW = {"mode": "extend", "merges": [["a", "b"], ["c", "d"]], "ids": [5, 6]}
OURS = {"whisper_hub": "hub", "adaptation": "full"}
OWN = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}


def refused(saved=OWN, theirs=OURS, ours=OURS):
    with pytest.raises(ValueError) as error:
        saved_weights.require_own("x/whisper.ckpt", saved, OWN, theirs, ours)
    assert str(error.value).startswith("x/whisper.ckpt")
    return str(error.value)


def changed(**values):
    return {**OURS, "new_tokens": {**copy.deepcopy(NEW), **values}}


@pytest.mark.parametrize(
    "theirs",
    [OURS, {**OURS, "new_tokens": None}, {**OURS, "whisper_hub": "moved"}],
)
def test_its_own(theirs):
    saved_weights.require_own("x", OWN, OWN, theirs, OURS)
    more = changed(), changed()
    saved_weights.require_own("x", OWN, OWN, *more)


def test_another_adaptation_and_another_size():
    told = "other weights than adaptation='full' trains: ['b'] …"
    assert told in refused({"a": OWN["a"]})
    wider = {**OWN, "a": torch.zeros(1, 3)}  # would be broadcast
    assert "a has the shape (1, 3), not (2, 3)" in refused(wider)


def test_another_base():
    theirs = {**OURS, "base_sha256": "f" * 64}
    for ours in (OURS, {**OURS, "base_sha256": "0" * 64}):
        assert "whisper_hub='hub' here: their SHA-256" in refused(OWN, theirs)
        assert "the source it was trained from" in refused(OWN, theirs, ours)
    saved_weights.require_base("x", OURS, theirs)  # older ones do not tell it


@pytest.mark.parametrize(
    "theirs, ours, told",
    [
        (changed(), OURS, "(2 by new_tokens='extend') than those here (none)"),
        (OURS, changed(), "(none) than those here (2 by new_tokens='extend')"),
        (
            changed(mode="replace"),
            changed(),
            "(2 by new_tokens='replace') than",
        ),
        (changed(ids=[5, 7]), changed(), "other new tokens (2 by"),
        (changed(merges=NEW["merges"][::-1]), changed(), "other new tokens"),
        (
            changed(merges=NEW["merges"][:1], ids=[5]),
            changed(),
            "(1 by new_tokens='extend') than those here (2 by",
        ),
    ],
)
def test_other_new_tokens_are_told_before_other_sizes(theirs, ours, told):
    smaller = {**OWN, "a": torch.zeros(1, 3)}
    found = refused(smaller, theirs, ours)
    assert told in found and "choose another output_folder" in found


@pytest.mark.parametrize(
    "new",
    [
        5,
        [],
        {},
        "extend",
        {**NEW, "mode": "none"},
        {**NEW, "mode": ["extend"]},
        {**NEW, "ids": [5]},
        {**NEW, "ids": [5, 5]},
        {**NEW, "ids": ["5", "6"]},
        {**NEW, "ids": [5, -1]},
        {**NEW, "merges": [["a", "b"], ["c"]]},
        {**NEW, "merges": [["a", "b"], ["c", 3]]},
        {**NEW, "merges": []},
        {**NEW, "merges": [], "ids": []},
    ],
)
def test_damaged_new_tokens_are_told(new):
    damaged = {**OURS, "new_tokens": new}
    told = re.escape("x/whisper.ckpt: the new tokens are damaged")
    with pytest.raises(ValueError, match=told):
        saved_weights.new_tokens("x/whisper.ckpt", damaged)
    assert "damaged" in refused(OWN, damaged)
