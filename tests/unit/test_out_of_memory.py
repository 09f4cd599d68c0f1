"""What is said when a batch did not fit into memory."""

import errno
import multiprocessing
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from local import out_of_memory

GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total "
    "capacity of 79.10 GiB of which 1.20 GiB is free."
)
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 800000000 bytes. Error code 12 "
    "(Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error, expected",
    [
        (GPU, True),
        (CPU, True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("std::bad_alloc"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError("out of memory"), False),
        (RuntimeError("The size of tensor a (3) must match b (4)"), False),
        (ValueError("out of memory"), False),
        (RuntimeError(), False),
        (KeyboardInterrupt(), False),
    ],
    ids=repr,
)
def test_is_out_of_memory(error, expected):
    assert out_of_memory.is_out_of_memory(error) is expected


def test_what_pytorch_itself_raises():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert out_of_memory.is_out_of_memory(caught.value)
    assert "4503599.6 GB more did not fit" in told(caught.value)


SETTINGS = {
    "max_batch_length": 160,
    "batch_size": 64,
    "gradient_checkpointing": False,
    "precision": "bf16",
    "adaptation": "full",
    "base_precision": "fp32",
    "optimizer_name": "adamw",
    "grad_accumulation_factor": 2,
}


def told(error=CPU, n_clips=20, context_s=8.0, device="cpu", **changed):
    return out_of_memory.out_of_memory(
        error,
        [f"clip{n}" for n in range(n_clips)],
        torch.linspace(7.61, 7.98, n_clips),
        context_s,
        61,
        {**SETTINGS, **changed},
        device,
    )


def test_a_batch_that_is_scored_halves_its_own_setting():
    error = out_of_memory.out_of_memory(
        CPU, ["a"] * 9, [1.0] * 9, 30.0, 61, {"test_batch_size": 9}, "cpu"
    )
    assert "remedy: set --test_batch_size=4" in error
    assert "grad_accumulation" not in error


def test_text_without_audio_has_no_seconds():
    error = told(n_clips=20, context_s=0.0, max_batch_length=40)
    assert "--max_batch_length=20 or" in error
    assert "batch: 20 line(s) (clip0" in error


def test_the_message(monkeypatch):
    monkeypatch.setattr(out_of_memory, "_peak_bytes", lambda device: 77.9e9)
    monkeypatch.setattr(out_of_memory, "device_bytes", lambda device: 85e9)
    assert told(GPU, device="cuda:0").splitlines() == [
        "out of memory on cuda:0: 2.7 GB more did not fit",
        "  batch: 20 clip(s) of 7.6 to 8.0 s (clip0, clip1, clip2, clip3, "
        "clip4, …), encoder context 8.0 s, longest label 61 tokens",
        "  memory: 77.9 GB at its peak, 85.0 GB in all",
        "  settings: max_batch_length=160, batch_size=64, "
        "gradient_checkpointing=False, precision=bf16, adaptation=full, "
        "base_precision=fp32, optimizer_name=adamw, "
        "grad_accumulation_factor=2",
        "  remedy: set --max_batch_length=80 or --gradient_checkpointing=True"
        "; --grad_accumulation_factor=4 keeps a step's size",
    ]


CHECKPOINTING = "--gradient_checkpointing=True"
LORA = "--adaptation=lora"
LEAST = {"gradient_checkpointing": True, "optimizer_name": "adamw_8bit"}
ON_FP32 = {**LEAST, "adaptation": "lora"}


@pytest.mark.parametrize(
    "n_clips, context_s, changed, remedies",
    [
        (20, 8.0, {}, ["--max_batch_length=80", CHECKPOINTING]),
        (10, 8.0, {}, ["--max_batch_length=40", CHECKPOINTING]),
        (64, 1.0, {}, ["--batch_size=32", CHECKPOINTING]),
        (3, 8.0, {"max_batch_length": 0}, ["--batch_size=1", CHECKPOINTING]),
        (2, 0.32, {}, ["--max_batch_length=1", CHECKPOINTING]),
        (
            20,
            8.0,
            {"gradient_checkpointing": True, "precision": "fp32"},
            ["--max_batch_length=80", "--precision=bf16"],
        ),
        (
            1,
            30.0,
            {},
            [
                CHECKPOINTING,
                "--optimizer_name=adamw_8bit",
                "--adaptation=frozen_encoder",
                LORA,
            ],
        ),
        (1, 30.0, {**LEAST, "adaptation": "frozen_encoder"}, [LORA]),
        (1, 30.0, ON_FP32, ["--base_precision=bf16"]),
        (
            1,
            30.0,
            {**ON_FP32, "precision": "fp32"},
            ["--precision=bf16", "--base_precision=int8"],
        ),
        (
            1,
            30.0,
            {**ON_FP32, "base_precision": "bf16"},
            ["--base_precision=int8"],
        ),
        (
            1,
            30.0,
            {**ON_FP32, "base_precision": "int8"},
            ["--base_precision=int4"],
        ),
    ],
)
def test_remedies(n_clips, context_s, changed, remedies):
    line = told(CPU, n_clips, context_s, **changed).splitlines()[-1]
    found, _, accumulation = line.partition(";")
    assert found == f"  remedy: set {' or '.join(remedies)}"
    assert bool(accumulation) == (n_clips > 1)


def test_nothing_is_left_to_lower():
    message = out_of_memory.out_of_memory(
        MemoryError(), [], [], 30.0, 0, {}, "cpu"
    )
    assert "out of memory on cpu\n" in message
    assert "0 clip(s)" in message
    assert message.endswith(
        "a smaller whisper_hub, or a device with more memory"
    )


def test_nothing_is_left_of_an_int4_base():
    line = told(CPU, 1, 8.0, **ON_FP32, base_precision="int4").splitlines()[-1]
    assert line == (
        "  remedy: a smaller whisper_hub, or a device with more memory"
    )


def full(queue):
    """In a process of its own: what it is told when it is full."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 10**9
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        torch.empty(5 * 10**9)
    except RuntimeError as error:
        message = out_of_memory.out_of_memory(error, [], [], 30.0, 0, {}, "cpu")
        queue.put((most, out_of_memory._peak_bytes("cpu"), message))


def test_a_process_that_is_really_full():
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    process = fork.Process(target=full, args=(queue,))
    process.start()
    process.join()
    assert not queue.empty()
    most, peak, message = queue.get()
    assert "out of memory on cpu: 20.0 GB more did not fit" in message
    assert f"{out_of_memory.readable(most)} in all" in message
    assert 50e6 < peak < most


def test_an_error_of_a_batch_is_explained_and_no_other():
    batch = SimpleNamespace(
        id=["a", "b"],
        duration=torch.tensor([1.0, 7.5]),
        tokens_bos=SimpleNamespace(data=torch.zeros(2, 31)),
    )
    now = {"max_batch_length": 160, "gradient_checkpointing": False}
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError) as told:
        with out_of_memory.explained(batch, 7.68, now, "cpu"):
            raise error
    assert told.value.__cause__ is error
    assert "2 clip(s) of 1.0 to 7.5 s (a, b)" in str(told.value)
    assert "--gradient_checkpointing=True" in str(told.value)
    for other in (KeyError("id"), RuntimeError("shapes"), OSError(28, "full")):
        with pytest.raises(type(other)) as told:
            with out_of_memory.explained(batch, 7.68, now, "cpu"):
                raise other
        assert told.value is other
