"""Contexts and batches of a run: what is encoded, logged, scored, resumed."""

import json
import re

import pytest
from outputs import scores

CONTEXT, STEP = 5 * 16000, 5120  # samples: the model's context, the grid
BUDGET_S = 20
EPOCHS = 2


@pytest.fixture(scope="module", params=["true_length", "full", "mixed"])
def trained(request, here, tmp_path_factory):
    """(encoder_context, Brain) of a run of two epochs under a budget."""
    name = request.param
    settings = {"encoder_context": name, "max_batch_length": BUDGET_S}
    folder = tmp_path_factory.mktemp(name)
    return name, here(folder, number_of_epochs=EPOCHS, **settings)


def logged(folder, name):
    """A figure of each epoch in train_log.txt."""
    log = (folder / "train_log.txt").read_text(encoding="utf-8")
    return [float(x) for x in re.findall(rf"train {name}: ([\d.e+-]+)", log)]


def test_what_is_encoded_keeps_the_budget_and_the_context(trained):
    name, brain = trained
    for _, n_clips, n_samples in brain.encoded:
        assert n_clips <= 8
        assert n_clips * n_samples / 16000 <= BUDGET_S
        assert n_samples % STEP == 0 or n_samples == CONTEXT
    contexts = {n_samples for _, _, n_samples in brain.encoded}
    assert (contexts == {CONTEXT}) == (name == "full")
    assert (CONTEXT in contexts) == (name != "true_length")
    for epoch in range(1, EPOCHS + 1):
        seen = [clip for e, ids in brain.seen if e == epoch for clip in ids]
        assert len(seen) == len(set(seen)) == 34


def test_the_log_tells_padding_and_silence(trained):
    name, brain = trained
    folder = brain.output_folder
    padding, silence = logged(folder, "padding"), logged(folder, "silence")
    assert len(padding) == len(silence) == EPOCHS
    assert all(0 <= value <= 10 for value in padding)
    encoded = sum(n * samples for _, n, samples in brain.encoded) / 16000
    clips = EPOCHS * brain.train_seconds
    assert sum(silence) / EPOCHS == pytest.approx(
        100 * (1 - clips / encoded), abs=0.5
    )
    assert (padding == silence) == (name == "true_length")


def test_both_scores_are_written_and_printed(trained):
    _, brain = trained
    table = [line.split()[:1] for line in brain.printed.splitlines()]
    for name in ("test", "test.true_length"):
        assert [name] in table
        assert scores(brain.output_folder, name)["n_utterances"] == 5
        assert (brain.output_folder / f"scores/{name}.jsonl").is_file()
    losses = {
        scores(brain.output_folder, name)["loss"]
        for name in ("test", "test.true_length")
    }
    assert len(losses) == 2


def flat_and_texts(folder, name):
    lines = (folder / f"scores/{name}.jsonl").read_text("utf-8").splitlines()
    return scores(folder, name), [json.loads(line) for line in lines]


@pytest.mark.parametrize("trained", ["mixed"], indirect=True)
def test_a_score_does_not_depend_on_the_batch(trained, here):
    """Of the 34 training clips, many to a context."""
    _, brain = trained
    folder, found = brain.output_folder, []
    for size in (32, 3):
        here(folder, "--test_only", test_csv="train.csv", test_batch_size=size)
        names = "train", "train.true_length"
        found.append([flat_and_texts(folder, name) for name in names])
    for (flat, texts), (other_flat, other_texts) in zip(*found):
        assert texts == other_texts
        # A context that hung on the neighbours would change it by 1e-3.
        loss, other_loss = flat.pop("loss"), other_flat.pop("loss")
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert flat == other_flat


def test_a_frozen_encoder_knows_its_full_context_alone(here, tmp_path):
    settings = {"adaptation": "frozen_encoder"}
    settings["encoder_context"] = "true_length"
    with pytest.raises(SystemExit, match="knows its full context alone"):
        here(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
