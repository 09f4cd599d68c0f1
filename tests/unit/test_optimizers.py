"""The optimizers: what they train, and what a step changes."""

import copy
import math
import sys

import pytest
import torch
from conftest import host_reads
from hyperpyyaml import load_hyperpyyaml
from local import optimizers, schedules
from local.optimizers import OPTIMIZERS

import speechbrain as sb

LR, DECAY = 1e-2, 0.1
SHAPES = (64, 128), (7,), (), (65, 64)  # 8192, 7, 1 and 4160 weights


def parameters():
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return list(map(torch.nn.Parameter, values))


def build(weights, optimizer):
    return optimizers.build(weights, optimizer, LR, DECAY)


def give(weights, seed=0, scale=1.0):
    """Gradients that a seed tells."""
    generator = torch.Generator().manual_seed(seed)
    for p in weights:
        p.grad = scale * torch.randn(p.shape, generator=generator)


def step(weights, optimizer, seed=0):
    give(weights, seed)
    optimizer.step()


def content(weights, optimizer):
    """All that a step may change, in tensors of its own."""
    state = [optimizer.state.get(p, {}) for p in weights]
    return copy.deepcopy([[p.detach() for p in weights], state])


def same(one, other):
    """Whether two are the same to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(one[k], other[k]) for k in one
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_adamw_is_the_fused_one_of_torch():
    ours, theirs = parameters(), parameters()
    optimizer = build(ours, "adamw")
    assert type(optimizer) is torch.optim.AdamW
    fused = torch.optim.AdamW(theirs, lr=LR, weight_decay=DECAY, fused=True)
    assert optimizer.defaults == fused.defaults
    for n in range(3):
        step(ours, optimizer, n)
        step(theirs, fused, n)
    assert same(content(ours, optimizer), content(theirs, fused))


def test_both_have_the_same_settings():
    for name in ("lr", "betas", "eps", "weight_decay"):
        one, other = [build(parameters(), o).defaults[name] for o in OPTIMIZERS]
        assert one == other, name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_trained_goes_in_by_its_order(optimizer):
    weights = parameters()
    weights[1].requires_grad_(False)
    frozen = torch.zeros(4, dtype=torch.int8)  # of a quantised base
    frozen = torch.nn.Parameter(frozen, requires_grad=False)
    weights.insert(2, frozen)
    (group,) = build(iter(weights), optimizer).param_groups
    left = [weights[n] for n in (0, 3, 4)]
    assert list(map(id, group["params"])) == list(map(id, left))
    with pytest.raises(ValueError, match="empty parameter list"):
        build([frozen], optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_speechbrain_builds_it_from_yaml(optimizer):
    """Its groups without weight decay, then the embedding's own group."""
    values = load_hyperpyyaml(
        "opt_class: !name:local.optimizers.build\n"
        f"    optimizer: {optimizer}\n    lr: {LR}\n    weight_decay: {DECAY}\n"
    )
    module = torch.nn.Embedding(64, 128), torch.nn.LayerNorm(128)
    brain = sb.Brain(
        modules={"model": torch.nn.Sequential(*module)},
        opt_class=values["opt_class"],
        run_opts={"device": "cpu", "remove_vector_weight_decay": True},
    )
    brain.init_optimizers()
    table = module[0].weight
    schedules.separate(brain.optimizer, table, 0.5)
    groups = brain.optimizer.param_groups
    sizes = [len(group["params"]) for group in groups]
    decays = [group["weight_decay"] for group in groups]
    assert (sizes, decays) == ([2, 0, 1], [0.0, DECAY, DECAY])
    assert groups[2]["params"][0] is table
    brain.optimizer.step()  # without gradients
    step([table, *module[1].parameters()], brain.optimizer)
    assert len(brain.optimizer.state) == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_group_has_its_own_rate(optimizer):
    """The schedule's, set before each step; 0 leaves weights alone."""
    weights, twins = parameters(), parameters()
    made, twin = build(weights, optimizer), build(twins, optimizer)
    schedules.separate(made, weights[0], 0.0)
    schedule = schedules.Schedule("linear", LR, 2)
    before = content(weights, made)[0]
    for n in (1, 2, 3):
        schedule.set(made, n, 4)
        schedule.set(twin, n, 4)
        step(weights, made, n)
        step(twins, twin, n)
    assert torch.equal(weights[0], before[0])
    for one, other, old in zip(weights[1:], twins[1:], before[1:]):
        assert torch.equal(one, other) and not torch.equal(one, old)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("skipped", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_nothing(optimizer, skipped, bad):
    """As train.py makes steps; what follows is as if it had not been."""
    weights, twins = parameters(), parameters()
    made, twin = build(weights, optimizer), build(twins, optimizer)
    for n in range(1, 5):
        give(weights, n, bad if n == skipped else 1.0)
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        made.found_inf = (~norm.isfinite()).float()
        made.grad_scale = None
        before = content(weights, made)
        made.step()
        if n == skipped:
            after = content(weights, made)
            assert same(after[0], before[0])
            assert n == 1 or same(after[1], before[1])
        else:
            give(twins, n)
            torch.nn.utils.clip_grad_norm_(twins, 1.0)
            twin.step()
    assert same(content(weights, made), content(twins, twin))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scaler_skips_steps_of_both(optimizer):
    weights, twins = parameters(), parameters()
    made, twin = build(weights, optimizer), build(twins, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for n, bad in enumerate([1.0, math.inf, 1.0, math.nan, 1.0]):
        give(weights, n, scaler.get_scale() * bad)
        scaler.scale(torch.zeros(()))  # as of a loss
        scaler.unscale_(made)
        scaler.step(made)
        scaler.update()
        if bad == 1.0:
            step(twins, twin, n)
    assert scaler.get_scale() == 1.0
    assert same(content(weights, made), content(twins, twin))


def test_the_host_waits_once_a_step():
    weights = parameters()
    made = build(weights, "adamw_8bit")
    for found_inf in (1.0, 0.0):
        made.found_inf = torch.tensor(found_inf)
        give(weights)
        with host_reads() as found:
            made.step()
            torch.zeros(1).add_(1)
        assert found == ["_local_scalar_dense"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_stay_where_they_are(optimizer):
    """Under DDP they live in its buckets."""
    weights = parameters()
    made = build(weights, optimizer)
    give(weights)
    grads = [p.grad for p in weights]
    places = [p.data_ptr() for p in weights]
    made.step()
    made.zero_grad(set_to_none=False)
    assert all(p.grad is grad for p, grad in zip(weights, grads))
    assert [p.data_ptr() for p in weights] == places


@pytest.mark.parametrize(
    "optimizer, n, n_bytes",  # of the moments and their scales
    [
        ("adamw", 8192, 8 * 8192),
        ("adamw_8bit", 8192, 2 * 8192 + 2 * 4 * 32),
        ("adamw_8bit", 4097, 2 * 4097 + 2 * 4 * 17),
        ("adamw_8bit", 4096, 2 * 4096 + 2 * 4 * 16),
        ("adamw_8bit", 4095, 8 * 4095),
    ],
)
def test_the_bytes_of_the_state(optimizer, n, n_bytes):
    weights = [torch.nn.Parameter(torch.ones(n))]
    made = build(weights, optimizer)
    step(weights, made)
    state = made.state[weights[0]].items()
    tables = "step", "qmap1", "qmap2"  # of torch 4 bytes; of all tensors
    found = [v.nbytes for k, v in state if k not in tables]
    assert sum(found) == n_bytes


def test_both_learn_the_same():
    """A regression on unlike scales, 20 steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator)
    x *= torch.logspace(-1, 1, 64)
    y = x @ torch.randn(64, 80, generator=generator)
    losses, weights = [], []
    for optimizer in OPTIMIZERS:
        weight = torch.nn.Parameter(torch.zeros(64, 80))
        made = optimizers.build([weight], optimizer, 0.03, 0.01)
        for _ in range(20):
            made.zero_grad()
            loss = (x @ weight - y).square().mean()
            loss.backward()
            made.step()
        losses.append(loss.item())
        weights.append(weight.detach())
    start = y.square().mean().item()
    assert losses[0] < 0.5 * start
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    apart = (weights[1] - weights[0]).norm() / weights[0].norm()
    assert 0 < apart < 0.1


NOT_ON = (
    "optimizer_name='adamw_8bit': not on device='{}'; choose cpu or cuda, or "
)
NOT_ON += "optimizer_name=adamw"
PROBLEMS = [  # optimizer, device, what is said
    ("adamw", "mps", None),
    ("adamw_8bit", "", None),
    ("adamw_8bit", "cpu", None),
    ("adamw_8bit", torch.device("cpu"), None),
    ("adamw_8bit", "cuda", None),
    ("adamw_8bit", torch.device("cuda", 1), None),
    ("adamw_8bit", "mps", NOT_ON.format("mps")),
    ("adamw_8bit", "xpu:0", NOT_ON.format("xpu:0")),
    ("AdamW", "cpu", "optimizer_name='AdamW': choose adamw, adamw_8bit"),
    (None, "cpu", "optimizer_name=None: choose adamw, adamw_8bit"),
]


@pytest.mark.parametrize("optimizer, device, said", PROBLEMS)
def test_what_cannot_run_is_told(optimizer, device, said):
    assert optimizers.problem(optimizer, device) == said


def test_an_unknown_name_is_refused():
    with pytest.raises(
        ValueError, match="optimizer_name='sgd': choose adamw, "
    ):
        build(parameters(), "sgd")


def test_bitsandbytes_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert optimizers.problem("adamw", "cpu") is None
    said = optimizers.problem("adamw_8bit", "cpu")
    assert said.startswith(
        "optimizer_name='adamw_8bit': bitsandbytes cannot be "
    )
    assert said.endswith(
        "pip install bitsandbytes, or choose optimizer_name=adamw"
    )
    assert build(parameters(), "adamw")
    with pytest.raises(ValueError, match="pip install bitsandbytes"):
        build(parameters(), "adamw_8bit")
