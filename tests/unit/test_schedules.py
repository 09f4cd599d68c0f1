"""The learning rate of every step."""

import math

import pytest
import torch
from hypothesis import (
    example,
    given,
    settings,
    strategies as st,
)
from local.schedules import SCHEDULES, Schedule, separate
from transformers import (
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from speechbrain.nnet.schedulers import NoamScheduler

LR = 0.8
HALF, ROOT = math.sqrt(0.5), math.sqrt(1 / 3)


def optimizer(*multipliers):
    """SGD with a group for each; None: a group without a multiplier."""
    groups = []
    for multiplier in multipliers:
        group = {"params": [torch.nn.Parameter(torch.zeros(1))]}
        if multiplier is not None:
            group["lr_multiplier"] = multiplier
        groups.append(group)
    return torch.optim.SGD(groups, lr=9.0)


# Formulas


@pytest.mark.parametrize(
    "schedule, warmup_steps, n_steps, shares",  # of lr, at steps 1, 2, …
    [
        ("noam", 4, 9, [1 / 4, 2 / 4, 3 / 4, 1, math.sqrt(4 / 5)]),
        ("noam", 1, 3, [1, HALF, ROOT, 1 / 2]),
        ("noam", 0, 3, [1, HALF, ROOT]),  # takes one step
        ("noam", 4, 2, [1 / 4, 2 / 4, 3 / 4, 1]),
        ("linear", 2, 5, [1 / 2, 1, 3 / 4, 2 / 4, 1 / 4, 0, 0]),
        ("linear", 1, 4, [1, 3 / 4, 2 / 4, 1 / 4, 0]),
        ("linear", 0, 4, [4 / 5, 3 / 5, 2 / 5, 1 / 5, 0]),
        ("linear", 3, 3, [1 / 3, 2 / 3, 1, 0, 0]),
        ("linear", 4, 2, [1 / 4, 2 / 4, 3 / 4, 1, 0, 0]),
        ("cosine", 2, 5, [1 / 2, 1, (1 + HALF) / 2, 1 / 2, (1 - HALF) / 2]),
        ("cosine", 2, 5, [1 / 2, 1, (1 + HALF) / 2, 1 / 2, 0.1464466, 0, 0]),
        ("cosine", 0, 2, [3 / 4, 1 / 4, 0, 0]),  # 60 and 120 degrees
        ("cosine", 3, 3, [1 / 3, 2 / 3, 1, 0, 0]),
        ("cosine", 4, 2, [1 / 4, 2 / 4, 3 / 4, 1, 0, 0]),
        ("constant", 4, 2, [1, 1, 1]),
        ("constant", 0, 2, [1, 1, 1]),
    ],
)
def test_a_rate_is_as_worked_out_by_hand(
    schedule, warmup_steps, n_steps, shares
):
    one = Schedule(schedule, LR, warmup_steps)
    found = [one.rate(step, n_steps) for step in range(1, len(shares) + 1)]
    assert found == pytest.approx([LR * share for share in shares], abs=1e-7)
    assert [rate == 0 for rate in found] == [share == 0 for share in shares]


@pytest.mark.parametrize("model_size", [None, 512])
def test_noam_is_speechbrains_up_to_the_documented_factor(model_size):
    """Its own ``lr`` and ours differ by (model_size · w)^-0.5."""
    warmup_steps, theirs = 7, optimizer(None)
    scheduler = NoamScheduler(LR, warmup_steps, model_size)
    peak = LR * (model_size * warmup_steps) ** -0.5 if model_size else LR
    one = Schedule("noam", peak, warmup_steps)
    for step in range(1, 40):
        scheduler(theirs)
        (group,) = theirs.param_groups
        assert one.rate(step, 39) == pytest.approx(group["lr"], rel=1e-12)
        if model_size:
            documented = model_size**-0.5 * min(
                step**-0.5, step * warmup_steps**-1.5
            )
            assert group["lr"] == pytest.approx(LR * documented, rel=1e-12)


@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 20])
@pytest.mark.parametrize(
    "schedule, theirs",
    [
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
    ],
)
def test_step_n_of_n_is_that_of_transformers_with_one_more(
    schedule, theirs, warmup_steps
):
    n_steps = 20
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = theirs(sgd, warmup_steps, n_steps + 1)
    one = Schedule(schedule, LR, warmup_steps)
    for step in range(1, n_steps + 2):
        sgd.step()
        scheduler.step()
        (expected,) = scheduler.get_last_lr()
        found = one.rate(step, n_steps)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-15), step


@pytest.mark.parametrize(
    "schedule, warmup_steps, n_steps, expected",
    [
        ("cosine", 0, 100, 0),
        ("cosine", 1, 100, 1),
        ("cosine", 250, 100, 250),
        ("cosine", 0.05, 1000, 50),
        ("linear", 0.25, 18, 4),  # 4.5: to the even one, as round() has it
        ("linear", 0.25, 19, 5),
        ("linear", 0.001, 100, 1),
        ("noam", 0.999, 3, 3),
        ("noam", 0, 100, 1),
        ("constant", 50, 100, 0),
        ("constant", 0.5, 100, 0),
    ],
)
def test_warm_up_steps(schedule, warmup_steps, n_steps, expected):
    found = Schedule(schedule, LR, warmup_steps).n_warmup(n_steps)
    assert (found, type(found)) == (expected, int)


def test_another_name_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="'cosin'.*noam, cosine, linear, con"):
        Schedule("cosin", LR, 10)


# Whatever is asked for

ANY = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(SCHEDULES),
        "lr": st.floats(1e-12, 1e3),
        "warmup_steps": st.integers(0, 10**6)
        | st.floats(0, 1, exclude_min=True, exclude_max=True),
    }
)
STEPS = st.integers(1, 10**6)


@given(ANY, STEPS, STEPS)
@example({"schedule": "linear", "lr": 0.1, "warmup_steps": 3}, 3, 3)
@example({"schedule": "cosine", "lr": 0.1, "warmup_steps": 2}, 3, 1)
@settings(max_examples=300, deadline=None)
def test_a_rate_is_from_0_to_lr_and_in_a_run_above_0(asked, step, n_steps):
    one = Schedule(**asked)
    rate = one.rate(step, n_steps)
    assert type(rate) is float
    assert 0 <= rate <= asked["lr"]
    assert rate > 0 or step > n_steps
    assert Schedule(**asked).rate(step, n_steps) == rate  # to the bit


@given(ANY, st.integers(1, 300))
@settings(max_examples=100, deadline=None)
def test_rates_rise_to_lr_at_the_end_of_the_warm_up_and_then_fall(
    asked, n_steps
):
    one = Schedule(**asked)
    rates = [one.rate(step, n_steps) for step in range(1, n_steps + 10)]
    w = max(1, one.n_warmup(n_steps))
    top, rest = rates[:w], rates[w - 1 :]
    assert top == sorted(top)
    assert rest == sorted(rest, reverse=True)
    if one.n_warmup(n_steps) and len(rates) >= w:
        assert rates[w - 1] == asked["lr"]


# In an optimizer


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_group_has_the_rate_times_its_multiplier(schedule):
    one, sgd = Schedule(schedule, LR, 3), optimizer(None, 0.25, 0.0, 2.0)
    for step in (1, 3, 10, 2):  # nothing hangs on what was set before
        rate = one.set(sgd, step, 10)
        assert rate == one.rate(step, 10) > 0
        found = [group["lr"] for group in sgd.param_groups]
        assert found == [rate, 0.25 * rate, 0.0, 2 * rate]


def test_a_parameter_of_its_own_rate_is_trained_once():
    own, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    adam = torch.optim.AdamW([other, own], lr=LR, weight_decay=0.125)
    separate(adam, own, 0.5)
    rest, mine = adam.param_groups
    assert rest["params"] == [other]
    assert mine["params"][0] is own and len(mine["params"]) == 1
    assert mine["lr_multiplier"] == 0.5 and "lr_multiplier" not in rest
    assert mine["weight_decay"] == 0.125 and mine["betas"] == rest["betas"]
    Schedule("constant", 0.01, 0).set(adam, 1, 1)
    own.grad, other.grad = torch.ones(2), torch.ones(2)
    adam.step()  # Adam's first step is the rate, beside the decay
    torch.testing.assert_close(other.data, torch.ones(2) * 0.98875)
    torch.testing.assert_close(own.data, torch.ones(2) * 0.994375)


def test_what_an_optimizer_does_not_hold_is_not_added():
    sgd = optimizer(None, 0.5)
    before = [dict(group) for group in sgd.param_groups]
    separate(sgd, torch.nn.Parameter(torch.ones(1)), 0.5)
    assert sgd.param_groups == before


# For the terminal


@pytest.mark.parametrize(
    "schedule, warmup_steps, n_steps, marked",
    [
        ("noam", 500, 20000, [1, 500, 20000]),
        ("cosine", 0.013, 14063, [1, 183, 14063]),
        ("linear", 0, 14063, [1, 14063]),
        ("linear", 900, 100, [1, 100]),  # longer than the run
        ("constant", 7, 5000, [1, 5000]),
        ("noam", 1, 1, [1]),
        ("cosine", 2, 3, [1, 2, 3]),
    ],
)
def test_the_table_has_the_first_the_highest_and_the_last(
    schedule, warmup_steps, n_steps, marked
):
    one = Schedule(schedule, 2e-3, warmup_steps)
    head, *lines = one.table(n_steps).splitlines()
    assert head.split() == ["step", "rate"]
    steps = [int(line.split()[0].replace(",", "")) for line in lines]
    assert steps == sorted(set(steps)) and set(marked) <= set(steps)
    assert steps[0] == 1 and steps[-1] == n_steps
    assert min(10, n_steps) <= len(steps) <= 12
    for step, line in zip(steps, lines):
        assert line.split()[1] == f"{one.rate(step, n_steps):.2e}"
    assert len({len(line) for line in lines}) == 1
    gaps = [after - before for before, after in zip(steps, steps[1:])]
    assert max(gaps, default=1) <= -(-n_steps // 10) + 1


def test_a_table_has_no_more_rows_than_asked_for():
    one = Schedule("cosine", LR, 0.25)
    assert one.table(1000, n_rows=3).splitlines() == [
        " step  rate",
        "    1  3.20e-03",
        "  250  8.00e-01",
        "1,000  3.50e-06",
    ]
