"""What is said when a batch did not fit into memory."""

from types import SimpleNamespace

import pytest
import torch
from local.out_of_memory import explained

NOW = {
    "max_batch_length": 160,
    "batch_size": 64,
    "grad_accumulation_factor": 2,
    "gradient_checkpointing": False,
}


def batch(n_clips):
    tokens = SimpleNamespace(data=torch.zeros(n_clips, 31))
    return SimpleNamespace(
        id=[f"clip{n}" for n in range(n_clips)],
        duration=torch.linspace(1.0, 7.5, n_clips),
        tokens_bos=tokens,
    )


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't "
            "allocate memory: you tried to allocate 400 bytes"
        ),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "cudnn", "python"],
)
def test_the_batch_the_peak_and_the_remedy_are_named(error):
    with pytest.raises(RuntimeError) as told:
        with explained(batch(8), 7.68, NOW, "cpu"):
            raise error
    assert told.value.__cause__ is error
    for part in (
        "8 clips (clip0, clip1, clip2, clip3, clip4, …) of 1.0 to 7.5 s",
        "context of 7.68 s",
        "up to 31 tokens",
        "the peak so far is ",
        "Now max_batch_length=160, batch_size=64",
        "try --max_batch_length=31 or --gradient_checkpointing=True",
        "grad_accumulation_factor",
    ):
        assert part in str(told.value)


@pytest.mark.parametrize(
    "n_clips, checkpointing, remedy",
    [
        (1, False, "try --gradient_checkpointing=True."),
        (2, True, "try --max_batch_length=8."),
        (1, True, "try a smaller model or a larger GPU."),
    ],
)
def test_what_can_still_be_lowered(n_clips, checkpointing, remedy):
    now = {**NOW, "gradient_checkpointing": checkpointing}
    with pytest.raises(RuntimeError, match=remedy):
        with explained(batch(n_clips), 8.0, now, "cpu"):
            raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), KeyError("id")]
)
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as told:
        with explained(batch(2), 8.0, NOW, "cpu"):
            raise error
    assert told.value is error


def test_a_true_allocation_that_fails():
    with pytest.raises(RuntimeError, match="out of memory on cpu at 2 clips"):
        with explained(batch(2), 8.0, NOW, "cpu"):
            torch.empty(2**60, dtype=torch.uint8)
