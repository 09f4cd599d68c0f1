"""Runs whose model collapses: caught, told, stopped; the best one stays."""

import dataclasses
import re
import subprocess
import sys

import pytest
import train
from local import checkpoints
from outputs import curves

RUN = {"number_of_epochs": 2, "batch_size": 4, "max_batch_length": 0}
RUN |= {"valid_csv": "train.csv", "valid_max_utterances": 3}
RUN |= {"encoder_context": "true_length", "valid_interval_steps": 4}
RUN |= {"collapse_patience": 3}
LR = 0.001  # of the quickstart
LOOP = " 네 네 네 네 네"


@pytest.fixture
def collapsing(monkeypatch):
    """Models hear half of a text until step 4; then all, but one loops."""
    score = train.ASR.on_stage_end

    def heard(brain, n, record):
        text = record.reference
        if brain.optimizer_step <= 4:
            return text[: len(text) // 2]
        return text + LOOP * (n == 0)

    def faked(brain, stage, *arguments):
        brain.records = {
            key: dataclasses.replace(r, hypothesis=heard(brain, n, r))
            for n, (key, r) in enumerate(sorted(brain.records.items()))
        }
        return score(brain, stage, *arguments)

    monkeypatch.setattr(train.ASR, "on_stage_end", faked)


def saved(folder):
    """Steps of the checkpoints, and the best one's meta."""
    found = checkpoints.Checkpointer(folder / "save")
    kept = [one.meta["steps"] for one in found.list_checkpoints()]
    return kept, found.best().meta


def test_a_run_that_collapses_stops_even_if_it_was_killed(
    here, tmp_path, collapsing
):
    """Killed behind the second of three collapsed validations."""
    brain = here(tmp_path, stop_after_step=10, **RUN)
    assert [one["step"] for one in brain.since_sound] == [8, 9]
    assert brain.early_stopping.n_worse == 2
    with pytest.raises(ValueError) as raised:
        here(tmp_path, **RUN)
    assert "3 validation(s) in a row" in str(raised.value)
    assert re.search(r"step 8: .*; step 9: .*; step 12: ", str(raised.value))
    _, valid = curves(tmp_path)
    valid = {row["step"]: row["valid"] for row in valid}
    assert valid.keys() == {4, 8, 9, 12}
    assert valid[8]["CER"] < valid[4]["CER"]
    told = [valid[n]["collapsed"] for n in valid]
    assert told == [False, True, True, True]
    assert valid[12]["loops"] == pytest.approx(100 / 3)
    kept, best = saved(tmp_path)
    assert kept == [4, 12] and best["steps"] == 4
    assert best["collapsed"] is False and best["loops"] == 0
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert (
        len(re.findall(r"a loop in the validation: .*'네' \d times", log)) == 3
    )
    log = (tmp_path / "train_log.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"valid loops: 33.33.*collapsed: True", log)) == 3


@pytest.mark.slow
def test_a_rate_a_hundred_times_too_high_is_caught(here, recipe, tmp_path):
    """A model that has learned to listen goes on with the lr of no model."""
    corpus, run = tmp_path / "spoken", tmp_path / "run"
    command = [sys.executable, "-m", "local.synthesize", str(corpus)]
    subprocess.run(command, cwd=recipe, check=True)
    plain = {"data_folder": corpus, "batch_size": 16, "max_new_tokens": 60}
    plain |= {"number_of_epochs": 4, "collapse_patience": 2}
    sound = here(run, **plain, stop_after_step=190)
    _, before = saved(run)
    assert before["epoch"] == 2 and not before["collapsed"]
    assert sound.since_sound == []
    with pytest.raises(ValueError, match="2 validation.s. in a row") as raised:
        here(run, **plain, valid_interval_steps=20, lr=100 * LR)
    kept, best = saved(run)
    assert best["steps"] == before["steps"] == kept[0] < kept[1]
    assert "lower lr" in str(raised.value)
