"""Two processes are one process with twice the batch."""

import json
from pathlib import Path

import pytest
import torch
from outputs import scores
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("distributed_runs.py")
TWO = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
# 34 training clips: the last step of an epoch is smaller than the others.
SETTINGS = {"number_of_epochs": 2, "lr": 0.0003, "warmup_steps": 4}
BUDGET = {"encoder_context": "mixed", "max_batch_length": 12}
FIXED = ("true_length", "full")  # contexts that hang on no chance
# Of the lines of this file; on them the encoder has no part in a step.
WITH_TEXT = {"asr_ratio": 0.4, "text_file": __file__, "new_tokens": "extend"}
WITH_TEXT |= {"n_new_tokens": 20, "new_rows_lr_multiplier": 2.0}
WITH_TEXT |= {"grad_accumulation_factor": 3}  # text before and behind a sum


def settings(encoder_context):
    return {
        "encoder_context": encoder_context,
        "max_batch_length": 0,
        **(WITH_TEXT if encoder_context == "true_length" else {}),
        **SETTINGS,
    }


@pytest.fixture(scope="module")
def two(run, small, hub, tmp_path_factory):
    """A folder of what distributed_runs.py leaves, in it a folder for each run."""
    folder = tmp_path_factory.mktemp("two")
    runs = {name: settings(name) for name in FIXED}
    runs["budget"] = {**SETTINGS, **BUDGET}
    arguments = {
        name: [
            *small(
                folder / name,
                whisper_hub=hub,
                batch_size=4,
                distributed_backend="gloo",
                **of_run,
            )
        ]
        for name, of_run in runs.items()
    }
    (folder / "runs.json").write_text(json.dumps(arguments), encoding="utf-8")
    run(folder, script=SCRIPT, launcher=TWO)
    return folder


@pytest.fixture(scope="module", params=FIXED)
def one_and_two(request, here, two, tmp_path_factory):
    """A run by itself, and the name of the same on two ranks."""
    folder = tmp_path_factory.mktemp("one")
    return here(folder, **settings(request.param)), two / request.param


def of_ranks(two, name):
    """(weights, {"seen": …, "encoded": …}) of each rank."""
    for rank in range(2):
        stem = f"{two / name}.{rank}"
        took = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
        yield load_file(f"{stem}.safetensors"), took


def assert_close(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=2e-5, rtol=1e-3, msg=name
        )


def test_weights_are_those_of_one_process(one_and_two):
    one, folder = one_and_two
    (first, _), (second, _) = of_ranks(folder.parent, folder.name)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert_close(first, one.trained)


@pytest.mark.parametrize("name", ["test", "test.true_length"])
def test_scores_are_those_of_one_process(one_and_two, name):
    one, folder = one_and_two
    flat_one, flat_two = scores(one.output_folder, name), scores(folder, name)
    loss_one, loss_two = flat_one.pop("loss"), flat_two.pop("loss")
    assert loss_two == pytest.approx(loss_one, rel=1e-3)
    assert flat_two == flat_one
    lines = [
        [json.loads(line)["id"] for line in open(f / f"scores/{name}.jsonl")]
        for f in (one.output_folder, folder)
    ]
    assert lines[0] == lines[1]
    assert len(set(lines[1])) == len(lines[1])


def test_under_a_budget_ranks_run_through_the_same_shapes(two):
    """So none waits for another, and none starves one of a collective call."""
    (first, took), (second, other) = of_ranks(two, "budget")
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    contexts, other_contexts = (
        [(epoch, n_samples) for epoch, _, n_samples in rank["encoded"]]
        for rank in (took, other)
    )
    assert contexts == other_contexts
    assert len({n_samples for _, n_samples in contexts}) > 3
    for epoch in (1, 2):
        ids, other_ids = (
            {clip for e, ids in rank["seen"] if e == epoch for clip in ids}
            for rank in (took, other)
        )
        assert len(ids | other_ids) == 34
        assert len(ids & other_ids) <= 1  # a lone tail goes to both
    for _, n_clips, n_samples in took["encoded"] + other["encoded"]:
        assert n_clips * n_samples / 16000 <= BUDGET["max_batch_length"]


@pytest.mark.slow  # test_steps has a step of it
@pytest.mark.parametrize("one_and_two", ["full"], indirect=True)
def test_accumulation_is_one_batch_too(one_and_two, here, tmp_path):
    """At full context: else a clip's depends on those it shares a batch with."""
    one, _ = one_and_two
    smaller = {"batch_size": 2, "grad_accumulation_factor": 4}
    parts = here(tmp_path, **smaller, **settings("full"))
    assert len(parts.seen) > 3 * len(one.seen)
    assert parts.optimizer_step == one.optimizer_step
    assert_close(parts.trained, one.trained)
