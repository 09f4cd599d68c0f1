"""Schedules, validations by steps, early ends, guards: of whole runs."""

import math
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import train
import yaml
from outputs import checkpoints, curves
from safetensors.torch import load_file

LR = 0.002
N_STEPS = 18  # two epochs of 34 clips, four to a batch
RUN = {"number_of_epochs": 2, "batch_size": 4, "max_batch_length": 0}
RUN |= {"valid_csv": "train.csv", "valid_max_utterances": 3}
RUN |= {"lr": LR, "log_interval_steps": 1, "encoder_context": "true_length"}
EVERY_4 = {"valid_interval_steps": 4}


@pytest.fixture(scope="module")
def plain(here, tmp_path_factory):
    """A run that validates at the end of an epoch."""
    return here(tmp_path_factory.mktemp("plain"), augment=True, **RUN)


@pytest.fixture(scope="module")
def validated(here, tmp_path_factory):
    """The same, that validates on three clips after every fourth step, too."""
    folder = tmp_path_factory.mktemp("validated")
    settings = {"schedule": "cosine", "warmup_steps": 0.25, "keep_last": 3}
    return here(folder, augment=True, **settings, **EVERY_4, **RUN)


def meta(checkpoint):
    return yaml.safe_load((checkpoint / "CKPT.yaml").read_text("utf-8"))


@pytest.mark.parametrize("name", ["plain", "validated"])
def test_the_rates_of_a_run_are_those_of_its_formula(name, request):
    steps, _ = curves(request.getfixturevalue(name).output_folder)
    assert [row["step"] for row in steps] == list(range(1, N_STEPS + 1))
    w = 100
    noam = [LR * min(n / w, math.sqrt(w / n)) for n in range(1, N_STEPS + 1)]
    w = round(0.25 * N_STEPS)
    cosine = [
        LR * n / w
        if n <= w
        else LR * (1 + math.cos(math.pi * (n - w) / (N_STEPS - w + 1))) / 2
        for n in range(1, N_STEPS + 1)
    ]
    expected = {"plain": noam, "validated": cosine}[name]
    assert [row["lr"] for row in steps] == pytest.approx(expected, rel=1e-12)


def test_validation_changes_nothing(here, tmp_path, plain):
    """Not with dropped chunks and speeds drawn anew in every micro-batch."""
    brain = here(tmp_path, augment=True, **EVERY_4, **RUN)
    assert brain.seen == plain.seen
    for name, tensor in plain.trained.items():
        assert torch.equal(brain.trained[name], tensor), name
    (steps, valid), (expected, _) = map(curves, (tmp_path, plain.output_folder))
    for row, other in zip(steps, expected, strict=True):
        assert row["loss"] == other["loss"]
        assert row["grad_norm"] == other["grad_norm"]
    assert [row["step"] for row in valid] == [4, 8, 9, 12, 16, 18]


def test_validation_hears_the_same_few_clips_each_time(validated):
    records = validated.valid_ids
    assert len(records) == 6 and len(records[0]) == 3
    assert all(ids == records[0] for ids in records)


def test_what_is_kept_is_the_newest_three_and_the_best(validated):
    folder = validated.output_folder
    _, valid = curves(folder)
    rates = [row["valid"]["CER"] for row in valid]
    kept = {meta(path)["steps"]: meta(path) for path in checkpoints(folder)}
    best = max(i for i, rate in enumerate(rates) if rate == min(rates))
    assert sorted(kept) == sorted({12, 16, 18, valid[best]["step"]})
    for row in valid[-3:]:
        assert kept[row["step"]]["CER"] == row["valid"]["CER"]


def test_the_log_shows_the_run(validated):
    folder = validated.output_folder
    log = (folder / "train_log.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"train grad_norm: ", log)) == N_STEPS
    assert len(re.findall(r"valid CER: ", log)) == 6


def test_the_published_settings_for_eight_gpus(here, tmp_path, recipe):
    """As the README gives them; smaller where a size is meant."""
    readme = (recipe / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(
        r"^torchrun .*--early_stopping_patience.*$", readme, re.M
    )
    given = dict(re.findall(r"--(\w+)=(\S+)", line))
    for name in ("nproc_per_node", "corpus", "data_folder"):
        del given[name]
    sizes = {"batch_size": 4, "max_batch_length": 0}
    sizes |= {"valid_interval_steps": 2, "valid_max_utterances": 3}
    assert sizes.keys() < given.keys()
    here(tmp_path, **{**given, **sizes, "log_interval_steps": 1})
    steps, valid = curves(tmp_path)
    n = len(steps)
    w = max(1, round(0.05 * n))
    assert steps[w - 1]["lr"] == 5e-5
    last = 5e-5 * (1 + math.cos(math.pi * (n - w) / (n - w + 1))) / 2
    assert steps[-1]["lr"] == pytest.approx(last, rel=1e-12)
    assert [row["step"] for row in valid] == [*range(2, n, 2), n]
    assert len(checkpoints(tmp_path)) in (5, 6)


def test_a_run_that_does_not_improve_ends_early_and_stays_ended(here, tmp_path):
    settings = {"early_stopping_patience": 2, "early_stopping_min_delta": 1000}
    settings |= {**RUN, **EVERY_4, "number_of_epochs": 9, "keep_last": 1}
    brain = here(tmp_path, **settings)
    _, valid = curves(tmp_path)
    assert [row["step"] for row in valid] == [4, 8, 9]
    assert brain.optimizer_step == 9
    again = here(tmp_path, **settings)
    assert again.seen == []
    more = here(tmp_path, **{**settings, "early_stopping_patience": 3})
    assert curves(tmp_path)[1][-1]["step"] == 12
    assert more.optimizer_step == 12


def test_a_validation_that_was_broken_off_comes_first(
    here, tmp_path, plain, monkeypatch
):
    """Twice killed: what it saved tells where the data stood, too."""
    settings = {"augment": True, **EVERY_4, **RUN}
    evaluate = train.ASR.evaluate_batch

    def signalled(self, batch, stage):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, batch, stage)

    with monkeypatch.context() as patched:
        patched.setattr(train.ASR, "evaluate_batch", signalled)
        with pytest.raises(SystemExit) as ended:
            here(tmp_path, **settings)
    assert ended.value.code == 143
    assert [meta(path)["steps"] for path in checkpoints(tmp_path)] == [4]
    assert curves(tmp_path)[1] == []
    here(tmp_path, stop_after_step=6, **settings)
    assert [row["step"] for row in curves(tmp_path)[1]] == [4]
    rest = here(tmp_path, **settings)
    assert rest.seen == plain.seen[4:]
    for name, tensor in plain.trained.items():
        assert torch.equal(rest.trained[name], tensor), name


def test_a_signal_in_the_last_validation_is_heard(here, tmp_path, monkeypatch):
    validated = train.ASR.validated

    def signalled(self, *told):
        validated(self, *told)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train.ASR, "validated", signalled)
    with pytest.raises(SystemExit) as ended:
        here(tmp_path, **{**RUN, "number_of_epochs": 1})
    assert ended.value.code == 143
    assert not (tmp_path / "scores").exists()


def test_a_run_that_ends_early_leaves_no_worker_behind(run, small, tmp_path):
    """They do not hear the signal that would end them."""
    early = {"early_stopping_patience": 1, "early_stopping_min_delta": 1000}
    settings = {**RUN, **early, "valid_interval_steps": 2, "num_workers": 1}
    run(*small(tmp_path, **settings), "--eval_precision=fp32", timeout=200)
    assert [row["step"] for row in curves(tmp_path)[1]] == [2, 4]


def test_a_debug_run_leaves_the_curves_of_a_true_one(here, tmp_path):
    here(tmp_path, **{**RUN, "number_of_epochs": 1})
    before = (tmp_path / "curves.jsonl").read_bytes()
    brain = here(tmp_path, "--debug", **RUN, valid_interval_steps=2)
    assert brain.optimizer_step == 4
    assert (tmp_path / "curves.jsonl").read_bytes() == before


def test_the_best_checkpoint_is_what_is_tested(validated):
    best = validated.checkpointer.best()
    assert best.meta["CER"] == min(
        row["valid"]["CER"] for row in curves(validated.output_folder)[1]
    )
    weights = load_file(best.path / "model.safetensors")
    for name, tensor in validated.whisper.trained_state().items():
        assert torch.equal(weights[name], tensor), name
    # The newest are others.
    assert not all(
        torch.equal(weights[name], tensor)
        for name, tensor in validated.trained.items()
    )


def test_a_step_that_is_not_finite_is_left_out_and_too_many_stop(
    here, tmp_path, monkeypatch
):
    bad = {3, 7, 8, 9}
    clip = torch.nn.utils.clip_grad_norm_
    n = [0]

    def poisoned(parameters, max_norm):
        n[0] += 1
        norm = clip(parameters, max_norm)
        return norm * math.nan if n[0] in bad else norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", poisoned)
    settings = {**RUN, "nonfinite_patience": 2, "log_interval_steps": 2}
    with pytest.raises(ValueError, match="2 steps in a row.*patience=2"):
        here(tmp_path, **settings, valid_interval_steps=2)
    steps, _ = curves(tmp_path)
    assert [row["skipped"] for row in steps] == [0, 1, 0, 2]
    weights = load_file(checkpoints(tmp_path)[-1] / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_out_of_memory_names_the_batch_and_what_to_lower(
    here, tmp_path, monkeypatch
):
    def fails(self, predictions, batch, stage):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(train.ASR, "compute_objectives", fails)
    with pytest.raises(RuntimeError) as told:
        here(tmp_path, **RUN)
    message = str(told.value)
    for part in ("4 clip(s)", "max_batch_length", "gradient_checkpointing"):
        assert part in message
    assert isinstance(told.value.__cause__, torch.OutOfMemoryError)


def test_a_plan_is_told_and_nothing_trained(here, tmp_path):
    settings = {**RUN, "schedule": "linear", "warmup_steps": 3}
    with pytest.raises(SystemExit) as ended:
        here(tmp_path, "--dry_run=True", **settings)
    assert not ended.value.code
    assert not checkpoints(tmp_path)
    assert not (tmp_path / "curves.jsonl").exists()
    picture = (tmp_path / "learning_rate.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert f"{N_STEPS} steps" in log or re.search(rf"steps +{N_STEPS}", log)
    assert "2.00e-03" in log
    assert "findfont" not in log  # matplotlib would tell 0.6 MB of fonts


HOLDER = """
import sys, time
sys.path.insert(0, ".")
from local import files
held = files.lock(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_two_runs_into_one_folder_are_refused(here, tmp_path, recipe):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=recipe,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SystemExit, match=f"process {holder.pid}"):
            here(tmp_path, **RUN)
    finally:
        holder.kill()
        holder.wait()
    assert not (tmp_path / "log.txt").exists()


@pytest.mark.slow
def test_tensorboard_takes_back_what_a_killed_run_told(here, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator

    settings = {**RUN, "tensorboard": True, "ckpt_interval_steps": 3}
    here(tmp_path, stop_after_step=5, **settings)
    here(tmp_path, **settings)
    found = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    steps = [event.step for event in found.Scalars("train/loss")]
    assert steps == list(range(1, N_STEPS + 1))
    losses = [event.value for event in found.Scalars("train/loss")]
    told = [row["loss"] for row in curves(tmp_path)[0]]
    assert losses == pytest.approx(told, rel=1e-6)
