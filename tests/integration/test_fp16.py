"""Steps in fp16 with a loss scale; on a CPU, where settings refuse them."""

import math

import pytest
import test_steps
import torch
import train
from outputs import curves
from test_steps import HostWaits, batch, same, step, weights

make_brain = test_steps.make_brain  # the fixture
PATIENCE = 3  # of its Brains
TOO_HIGH = 2.0**32  # of whichever step: gradients pass what fp16 can hold


def in_fp16(brain, **options):
    """A Brain as SpeechBrain makes it of precision=fp16 on a GPU."""
    brain.scaler = torch.GradScaler("cpu", **options)
    brain.training_ctx = torch.autocast("cpu", torch.float16)
    return brain


def poison(brain):
    """Every gradient of one tensor is infinite from here on."""
    bias = brain.whisper.model.decoder.layer_norm.bias
    bias.register_hook(lambda grad: torch.full_like(grad, math.inf))


def gradients(brain, *seeds):
    """What a step's update is made of, flat; and the line that tells it."""
    found = []
    update = brain.optimizer.step

    def record(*arguments, **options):
        parameters = brain.whisper.parameters()
        grads = [p.grad.flatten() for p in parameters if p.grad is not None]
        found.append(torch.cat(grads))
        return update(*arguments, **options)

    brain.optimizer.step = record
    step(brain, batch(brain, *seeds))
    return found[0], curves(brain.monitor.folder)[0][-1]


def test_a_run_that_overflows_at_first_settles(make_brain, tmp_path):
    brain = in_fp16(make_brain(log_interval_steps=1), init_scale=TOO_HIGH)
    start = weights(brain)
    moved = []
    for n in range(1, 20):
        step(brain, batch(brain, n))
        moved.append(not same(start, weights(brain)))
        if sum(moved) == 2:
            break
    n_skipped = moved.index(True)
    assert n_skipped > PATIENCE
    rows, _ = curves(tmp_path)
    assert [row["skipped"] for row in rows] == [1] * n_skipped + [0, 0]
    halved = [TOO_HIGH / 2**n for n in range(n_skipped + 1)]
    told = [row["loss_scale"] for row in rows]
    assert told == [*halved, halved[-1]]
    log = (tmp_path / "train_log.txt").read_text(encoding="utf-8")
    last = log.splitlines()[-1]
    assert f"train skipped: {n_skipped}" in last
    assert f"train loss_scale: {halved[-1]:.2e}" in last


def test_a_run_whose_every_step_is_skipped_stops(make_brain, tmp_path):
    options = dict(log_interval_steps=1)
    brain = in_fp16(make_brain(**options), init_scale=4.0)
    poison(brain)
    start = weights(brain)
    advice = "of 3 steps in a row.*step 5.*down to 0.25.*lower lr.*bf16 or fp32"
    with pytest.raises(ValueError, match=advice):
        for n in range(9):
            step(brain, batch(brain, n))
    assert same(start, weights(brain))
    told = [row["loss_scale"] for row in curves(tmp_path)[0]]
    assert told == [4.0, 2.0, 1.0, 0.5, 0.25]


def test_a_step_is_that_of_fp32_and_its_norm_the_true_one(make_brain):
    """Whatever the loss scale; clipped to the same norm, too."""
    options = dict(log_interval_steps=1, max_grad_norm=1e-3)
    expected, line = gradients(make_brain(**options), 1, 2)
    assert line["grad_norm"] > 1 and "loss_scale" not in line
    for scale in (16.0, 65536.0):
        brain = in_fp16(make_brain(**options), init_scale=scale)
        found, told = gradients(brain, 1, 2)
        assert told["loss_scale"] == scale
        assert told["loss"] == pytest.approx(line["loss"], rel=1e-3)
        assert told["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-2)
        assert found.norm().item() == pytest.approx(1e-3, rel=1e-3)
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_the_host_waits_for_no_step_in_fp16(make_brain):
    brain = in_fp16(make_brain())
    batches = [batch(brain, n) for n in range(2)]
    with HostWaits() as waits:
        step(brain, *batches)
    assert brain.optimizer_step == 2
    assert not waits.found


def test_a_killed_run_keeps_its_loss_scale(here, tmp_path, monkeypatch):
    """And how long ago it grew: two steps, at the checkpoint after step 6."""
    init = train.loop.Loop.__init__

    def with_scaler(self, **options):
        init(self, **options)
        in_fp16(self, init_scale=1024.0, growth_interval=4)
        self.checkpointer.add_recoverable("scaler", self.scaler)

    monkeypatch.setattr(train.loop.Loop, "__init__", with_scaler)
    settings = {"batch_size": 2, "max_batch_length": 0}
    settings |= {"log_interval_steps": 1, "ckpt_interval_steps": 3}
    for last in (7, 9):
        here(tmp_path, stop_after_step=last, **settings)
    told = {row["step"]: row["loss_scale"] for row in curves(tmp_path)[0]}
    assert [*told] == list(range(1, 10))
    assert [*told.values()] == [1024.0] * 4 + [2048.0] * 4 + [4096.0]
