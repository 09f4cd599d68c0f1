"""Checkpoints of the optimizers that a run builds."""

import copy
import json

import pytest
import torch
from local import optimizer_state, optimizers, schedules
from local.checkpoints import Checkpointer
from safetensors.torch import load_file
from test_optimizers import content, parameters, same, step

OPTIMIZERS = optimizers.OPTIMIZERS
N_SMALL = 8  # weights of 32 bits among those of ``parameters``


def made(optimizer, n_steps=0, n_frozen=0):
    """(weights, optimizer) with a group for the first one alone."""
    weights = parameters()
    for p in weights[:n_frozen]:
        p.requires_grad_(False)
    one = optimizers.build(weights, optimizer, 1e-2, 0.1)
    schedules.separate(one, weights[0], 0.1)
    for n in range(n_steps):
        step(weights[n_frozen:], one, n)
    return weights, one


def copied(weights, others):
    for p, other in zip(weights, others):
        other.data.copy_(p.data)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("n_steps", [0, 1, 3])
@pytest.mark.parametrize("n_frozen", [0, 1, 2])
def test_a_run_goes_on_to_the_bit(tmp_path, optimizer, n_steps, n_frozen):
    weights, one = made(optimizer, n_steps, n_frozen)
    Checkpointer(tmp_path, {"optimizer": one}).save({}, False)
    others, fresh = made(optimizer, n_frozen=n_frozen)
    for group in fresh.param_groups:
        group["lr"] = 77.0
    Checkpointer(tmp_path, {"optimizer": fresh}).recover_if_possible()
    copied(weights, others)
    assert same(content(others, fresh), content(weights, one))
    for n in range(3, 6):
        step(weights[n_frozen:], one, n)
        step(others[n_frozen:], fresh, n)
    assert same(content(others, fresh), content(weights, one))
    lrs = [group["lr"] for group in fresh.param_groups]
    assert lrs == [group["lr"] for group in one.param_groups]


def test_it_may_be_read_into_one_that_has_run(tmp_path):
    """Nothing of what it had is left."""
    path = tmp_path / "optimizer.ckpt"
    weights, one = made("adamw_8bit", 2)
    optimizer_state.save(one, path)
    others, used = made("adamw_8bit", 5)
    optimizer_state.load(used, path, False)
    copied(weights, others)
    assert same(content(others, used), content(weights, one))
    step(weights, one, 9)
    step(others, used, 9)
    assert same(content(others, used), content(weights, one))


def test_weights_whose_first_step_was_passed_over(tmp_path):
    weights, one = made("adamw_8bit")
    one.found_inf = torch.ones(())
    step(weights, one)
    optimizer_state.save(one, tmp_path / "optimizer.ckpt")
    fresh = made("adamw_8bit")[1]
    optimizer_state.load(fresh, tmp_path / "optimizer.ckpt", False)
    assert not fresh.state and not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    "optimizer, wanted", [("adamw", 8), ("adamw_8bit", 2 + 2 * 4 / 256)]
)
def test_the_bytes_of_a_checkpoint(tmp_path, optimizer, wanted):
    """A weight's; the tables that all 8-bit tensors share are 2 kB."""
    weights = [torch.nn.Parameter(torch.ones(2048, 512)) for _ in range(2)]
    one = optimizers.build(weights, optimizer, 1e-2, 0.1)
    step(weights, one)
    Checkpointer(tmp_path, {"optimizer": one}).save({}, False)
    sizes = [p.stat().st_size for p in tmp_path.glob("CKPT+*/*")]
    n_weights = sum(p.numel() for p in weights)
    assert sum(sizes) == pytest.approx(wanted * n_weights, abs=8000)


def test_what_stands_in_8_bits(tmp_path):
    """A table of floats to each code, two bytes a weight, a scale a block."""
    weights, one = made("adamw_8bit", 1)
    optimizer_state.save(one, tmp_path / "optimizer.ckpt")
    tensors = load_file(tmp_path / "optimizer.safetensors").values()
    n_bytes = {torch.uint8: 0, torch.float32: 0}
    for tensor in tensors:
        if tensor.shape != (256,):  # not a table
            n_bytes[tensor.dtype] += tensor.nbytes
    n_blocks = sum(-(-p.numel() // 256) for p in weights if p.numel() > 4095)
    n_large = sum(p.numel() for p in weights) - N_SMALL
    assert n_bytes[torch.uint8] == 2 * n_large
    assert n_bytes[torch.float32] == 2 * 4 * (N_SMALL + n_blocks)


OTHERS = [  # saved, this run's, what is said
    ("adamw", "adamw_8bit", "it is AdamW, this run has AdamW8bit"),
    ("adamw_8bit", "adamw", "it is AdamW8bit, this run has AdamW"),
]


@pytest.mark.parametrize("saved, own, said", OTHERS)
def test_the_other_optimizer_is_refused(tmp_path, saved, own, said):
    path = tmp_path / "optimizer.ckpt"
    optimizer_state.save(made(saved, 2)[1], path)
    weights, other = made(own, 1)
    before = content(weights, other)
    with pytest.raises(ValueError, match="choose another output_folder") as e:
        optimizer_state.load(other, path, False)
    assert said in str(e.value)
    assert same(content(weights, other), before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("saved, own", [(0, 1), (1, 0), (2, 1)])
def test_what_trains_other_weights_is_refused(tmp_path, optimizer, saved, own):
    """Such as a checkpoint of adaptation=full in a frozen_encoder run."""
    path = tmp_path / "optimizer.ckpt"
    optimizer_state.save(made(optimizer, 2, saved)[1], path)
    other = made(optimizer, 0, own)[1]
    with pytest.raises(ValueError, match="its groups have "):
        optimizer_state.load(other, path, False)
    assert not other.state


def before_build(n_frozen, n_steps):
    """As runs had it once: frozen weights in the groups, without a state."""
    weights = parameters()
    for p in weights[:n_frozen]:
        p.requires_grad_(False)
    one = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1, fused=True)
    schedules.separate(one, weights[3], 0.1)
    for n in range(n_steps):
        step(weights[n_frozen:], one, n)
    return weights, one


@pytest.mark.parametrize("n_frozen", [0, 1, 2])
def test_a_checkpoint_from_before_goes_on(tmp_path, n_frozen):
    path = tmp_path / "optimizer.ckpt"
    weights, old = before_build(n_frozen, 3)
    optimizer_state.save(old, path)
    shapes = [g["params"] for g in json.loads(path.read_text())["groups"]]
    assert list(map(len, shapes)) == [3, 1]
    others = copy.deepcopy(weights)
    new = optimizers.build(others, "adamw", 1e-2, 0.1)
    schedules.separate(new, others[3], 0.1)
    optimizer_state.load(new, path, False)
    assert same(content(others, new), content(weights, old))
    for n in range(3, 5):
        step(weights[n_frozen:], old, n)
        step(others[n_frozen:], new, n)
    assert same(content(others, new), content(weights, old))


def test_a_checkpoint_from_before_of_other_weights_is_refused(tmp_path):
    path = tmp_path / "optimizer.ckpt"
    optimizer_state.save(before_build(2, 3)[1], path)
    weights = parameters()
    weights[0].requires_grad_(False)
    new = optimizers.build(weights, "adamw", 1e-2, 0.1)
    schedules.separate(new, weights[3], 0.1)
    with pytest.raises(ValueError, match=r"have \[3, 1\] parameters, .* \[2"):
        optimizer_state.load(new, path, False)
    assert not new.state
