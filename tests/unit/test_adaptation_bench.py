"""The adaptation benchmark's own arithmetic: rounds, memory, failures, rows."""

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import adaptation  # noqa: E402
import adaptation_run  # noqa: E402
import voices  # noqa: E402


@pytest.mark.parametrize(
    "steps, rounds, ends",
    [
        (12, 2, [7, 12]),
        (100, 3, [34, 67, 100]),
        (5, 3, [3, 4, 5]),
        (3, 1, [3]),
    ],
)
def test_rounds_share_the_steps_behind_the_warm_up(steps, rounds, ends):
    assert adaptation.ends_of(steps, rounds) == ends


@pytest.mark.parametrize(
    "log, status, expected",
    [
        ("a\nTypeError: b\n", 1, "TypeError: b"),
        ("x\ntrain.py: two things:\n- one\n- other\n", 1, "train.py: two thi"),
        ("train.py: two:\n- one\n- other\n", 1, "train.py: two: - one - other"),
        ("", 1, "exit status 1"),
        ("all is well\n", -9, "killed by signal 9"),
    ],
)
def test_a_failure_tells_its_last_words(tmp_path, log, status, expected):
    (tmp_path / "log").write_text(log, encoding="utf-8")
    told = adaptation.last_words(tmp_path / "log", status)
    assert told.startswith(expected)


def row(**changed):
    return {
        "n_trained": 1000,
        "of_rounds": [1.0, 3.0],
        "clips_per_s": 2.0,
        "weights_bytes": 4000,
        "checkpoint_bytes": 12_000_000,
        "peak_mib": 200.0,
        **changed,
    }


def test_ratios_are_to_full():
    rows = {
        "full": row(),
        "lora_int8": row(peak_mib=50.0, weights_bytes=40),
        "lora_int4": {"failed": "not installed"},
    }
    adaptation.add_ratios(rows)
    assert rows["full"]["peak_mib_vs_full"] == 1
    assert rows["lora_int8"]["peak_mib_vs_full"] == 0.25
    assert rows["lora_int8"]["weights_bytes_vs_full"] == 0.01
    assert rows["lora_int4"] == {"failed": "not installed"}
    alone = {"lora_int8": row()}
    adaptation.add_ratios(alone)
    assert alone["lora_int8"] == row()


def test_a_table_has_as_many_cells_in_each_row():
    scores = {"loss": 0.5, "CER": 9.0, "loss_before": 1.0, "CER_before": 40.0}
    rows = {
        "full": row(**scores),
        "lora_fp32": row(),
        "lora_int4": {"failed": "a | b", "loss_before": 1.0},
    }
    lines = adaptation.table(rows).splitlines()
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert "9.00 % (40.00)" in lines[2]
    assert "a / b" in lines[4]


def test_the_peak_counts_what_was_held_and_what_is_freed_again():
    held = torch.zeros(2**20)

    def function():
        first = torch.zeros(3 * 2**20)
        del first
        return torch.zeros(2**20)

    gc.collect()  # of other tests
    before = adaptation_run.held_bytes()
    peak = adaptation_run.peak_bytes(function, torch.device("cpu"))
    assert before >= held.nbytes
    assert peak - before == pytest.approx(3 * 2**22, rel=0.01)
    shared = held[: 2**19]
    assert adaptation_run.held_bytes() - before < shared.nbytes


def test_noise_is_as_long_as_asked(tmp_path):
    folder = adaptation.noise(tmp_path, 2.0, 1)
    lines = (folder / "train.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + adaptation.N_NOISE
    assert {line.split(",")[1] for line in lines[1:]} == {"2.000"}


def test_other_voices_speak_otherwise():
    clips = voices.plan(60, 7)
    assert {clip.speaker for clip in clips} == set(voices.VOICES)
    assert not set(voices.VOICES) & set(voices.synthesize.VOICES)
    assert {clip.split for clip in clips} == {"train", "valid"}
    assert np.ptp([clip.pitch for clip in clips]) > 50
    assert min(clip.rate for clip in clips) >= voices.RATES[0]
    assert len({clip.id for clip in clips}) == 60
