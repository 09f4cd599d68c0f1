"""Two processes are one process with twice the batch."""

import json
from pathlib import Path

import pytest
import torch
from outputs import checkpoints, scores
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("rank_weights.py")
TWO = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
# 34 training clips: the last step of an epoch is smaller than the others.
SETTINGS = {"number_of_epochs": 2, "lr": 0.0003, "warmup_steps": 4}


@pytest.fixture(scope="module")
def one_and_two(run, small, tmp_path_factory):
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    run(
        one,
        *small(one / "run", batch_size=8, **SETTINGS),
        script=SCRIPT,
    )
    run(
        two,
        *small(two / "run", batch_size=4, **SETTINGS),
        "--distributed_backend=gloo",
        script=SCRIPT,
        launcher=TWO,
    )
    return one, two


def test_weights_are_those_of_one_process(one_and_two):
    one, two = one_and_two
    expected = load_file(one / "rank0.safetensors")
    first = load_file(two / "rank0.safetensors")
    second = load_file(two / "rank1.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(
            first[name], tensor, atol=2e-5, rtol=1e-3, msg=name
        )


def test_scores_are_those_of_one_process(one_and_two):
    one, two = (folder / "run" for folder in one_and_two)
    flat_one, flat_two = scores(one), scores(two)
    loss_one, loss_two = flat_one.pop("loss"), flat_two.pop("loss")
    assert loss_two == pytest.approx(loss_one, rel=1e-3)
    assert flat_two == flat_one
    lines = [
        [json.loads(line)["id"] for line in open(f / "scores/test.jsonl")]
        for f in (one, two)
    ]
    assert lines[0] == lines[1]
    assert len(set(lines[1])) == len(lines[1])


def test_accumulation_is_one_batch_too(one_and_two, run, small, tmp_path):
    one, _ = one_and_two
    run(
        tmp_path,
        *small(
            tmp_path / "run",
            batch_size=2,
            grad_accumulation_factor=4,
            **SETTINGS,
        ),
        script=SCRIPT,
    )
    expected = load_file(one / "rank0.safetensors")
    for name, tensor in load_file(tmp_path / "rank0.safetensors").items():
        torch.testing.assert_close(
            tensor, expected[name], atol=2e-5, rtol=1e-3, msg=name
        )
    assert checkpoints(tmp_path / "run")
