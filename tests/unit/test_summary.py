"""What a run will do, told before its first step."""

import multiprocessing
import re
import time

import pytest
from conftest import LORA, logged
from local import batching, memory, schedules, summary
from local.summary import Phases

RUN = {
    "model": "openai/whisper-large-v3, full",
    "base_precision": "fp32",
    "n_trained": 1_500_000_000,
    "n_frozen": 500_000_000,
    "train_s": [9.0] * 1000,
    "n_texts": 0,
    "valid_s": [3.6] * 100,
    "n_epochs": 2,
    "n_steps": 40,
    "n_done": 0,
    "n_ranks": 8,
    "precision": "bf16",
    "n_bytes": {"weights": 8e9, "logits": 2e8, "nothing": 0, "total": 8.2e9},
    "device_bytes": 80e9,
    "phases": "imports 6.1 s",
}


@pytest.mark.parametrize(
    "changed, line",
    [
        (
            {"n_texts": 7},
            "training    1,000 clips, 2.50 h, 7 batches of text an epoch",
        ),
        ({}, "model       openai/whisper-large-v3, full, bf16"),
        (
            {"model": "random:tiny, lora", "base_precision": "int8"},
            "model       random:tiny, lora on int8, bf16",
        ),
        (
            {},
            "trained     1,500.0 M of 2,000.0 M weights (75.0 %), 500.0 M frozen",
        ),
        ({}, "training    1,000 clips, 2.50 h an epoch"),
        ({}, "validation  100 clips, 0.10 h"),
        ({}, "steps       40 in 2 epochs"),
        (
            {"n_done": 12},
            "steps       40 in 2 epochs, going on after step 12",
        ),
        (
            {},
            "a step      50.0 clips, 450.0 s of audio on average, over 8 processes",
        ),
        (
            {"n_ranks": 1},
            "a step      50.0 clips, 450.0 s of audio on average, over 1 process",
        ),
        (
            {},
            "memory      about 8.2 GB of 80.0 GB a process at most: weights 8.0 GB, "
            "logits\n            200 MB",
        ),
        (
            {"device_bytes": None},
            "memory      about 8.2 GB a process at most: "
            "weights 8.0 GB, logits 200 MB",
        ),
        ({}, "start-up    imports 6.1 s"),
    ],
)
def test_lines(changed, line):
    told = summary.describe(**{**RUN, **changed})
    assert f"{line}\n" in f"{told}\n"
    assert max(map(len, told.splitlines())) <= 80


def test_phases_add_up_and_begin_with_the_process():
    before = time.time()
    phases = Phases()
    time.sleep(0.02)
    phases.done("corpus")
    phases.done("model")
    time.sleep(0.02)
    phases.done("corpus")
    assert list(phases.seconds) == ["imports", "corpus", "model"]
    assert 0.04 <= phases.seconds["corpus"] <= time.time() - before
    assert phases.seconds["model"] < phases.seconds["corpus"]
    assert phases.seconds["imports"] > 0
    pattern = r"imports [\d.]+ (s|min|h), corpus 0\.\d s, model 0\.0 s"
    assert re.fullmatch(pattern, str(phases))


def test_a_process_is_as_old_as_it_is():
    """A child's age is its own; its folder in /proc tells no such thing."""
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    child = fork.Process(
        target=lambda: queue.put((time.sleep(0.3), summary._process_seconds()))
    )
    mine = summary._process_seconds()
    child.start()
    child.join()
    _, age = queue.get()
    assert 0.28 < age < 0.28 + summary._process_seconds() - mine


def test_without_proc_the_imports_are_not_told(monkeypatch):
    def fails(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(summary.Path, "read_text", fails)
    phases = Phases()
    phases.done("corpus")
    assert list(phases.seconds) == ["corpus"]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.04, "corpus 0.0 s"),
        (31.04, "corpus 31.0 s"),
        (99.96, "corpus 1.7 min"),
        (3600, "corpus 60.0 min"),
        (10800, "corpus 3.0 h"),
    ],
)
def test_long_phases(seconds, text):
    phases = Phases()
    phases.seconds = {"corpus": seconds}
    assert str(phases) == text


@pytest.mark.parametrize("adaptation", ["full", "frozen_encoder", "lora"])
def test_a_run_is_told_what_is_planned(
    build, tokenizer, monkeypatch, tmp_path, adaptation
):
    whisper = build(adaptation)
    batches = batching.Batches([4.0] * 9, 3, 0, "full", 5, seed=1)
    told = logged(monkeypatch, summary.logger, "info")
    warned = logged(monkeypatch, summary.logger, "warning")
    summary.tell(
        whisper,
        batches,
        schedules.Schedule("constant", 1e-5, 1),
        tmp_path,
        [{"duration": 3.0}],
        ["가나다"],
        tokenizer,
        precision="bf16",
        checkpointing=True,
        optimizer="adamw_8bit",
        device="cpu",
        n_epochs=1,
        n_steps=3,
        n_done=0,
        phases="",
    )
    mode = memory.mode_of(
        whisper.config,
        adaptation,
        LORA,
        precision="bf16",
        base_precision="fp32",
        gradient_checkpointing=True,
        optimizer="adamw_8bit",
        device="cpu",
    )
    n_text = len(tokenizer.encode("가나다", add_special_tokens=False))
    batch = memory.Batch(3, 5 * 16000, 4 + n_text)
    plan = memory.plan(whisper.config, mode, batch)
    n_trained = sum(t.numel() for t in whisper.trained_state().values())
    assert [line[:8] for line in warned] == (
        ["lr=1e-05"] if adaptation == "lora" else []
    )
    assert f"about {memory.readable(plan['total'])} of" in told[0]
    assert f"trained     {summary._millions(n_trained)} of" in told[0]
