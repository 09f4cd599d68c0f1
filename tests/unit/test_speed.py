"""The speed benchmark's own arithmetic: clips, operations, ratios."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from local import random_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import WhisperForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import clips  # noqa: E402
import flops  # noqa: E402
import report  # noqa: E402


def test_a_seed_gives_the_same_clips():
    first, second = clips.make(8, 1), clips.make(8, 1)
    assert [clip.text for clip in first] == [clip.text for clip in second]
    assert all((a.samples == b.samples).all() for a, b in zip(first, second))
    assert first[0].text != clips.make(8, 2)[0].text


@pytest.mark.parametrize("n_clips", [16, 64, 640])
def test_few_clips_have_the_mean_of_many(n_clips):
    seconds = clips.durations(n_clips, np.random.default_rng(1986))
    assert sum(seconds) / n_clips == pytest.approx(clips.MEAN_S, rel=0.05)
    assert clips.SHORTEST_S <= min(seconds) < max(seconds) <= clips.LONGEST_S


@pytest.mark.parametrize("size", ["tiny", "large-v3-turbo"])
@pytest.mark.parametrize("n_tokens", [20, 200])
def test_operations_are_those_that_torch_counts(size, n_tokens):
    size = random_model.size_named(size)
    config = random_model.build_config(size, random_model.build_tokenizer(size))
    config._attn_implementation = "eager"  # the counter knows no fused one
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
        mel = torch.randn(1, size.n_mels, 100 * size.context_s)
        tokens = torch.zeros(1, n_tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        logits = model(mel, decoder_input_ids=tokens).logits
    forward = counter.get_total_flops()
    ours = flops.forward(config, size.context_s, n_tokens)
    assert ours == pytest.approx(forward, rel=0.02)
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    both = forward + counter.get_total_flops()
    ours = flops.training(config, size.context_s, n_tokens)
    assert ours == pytest.approx(both, rel=0.02)


@pytest.mark.parametrize(
    "name, known",
    [("NVIDIA H200", True), ("NVIDIA GeForce RTX 3090", False), (None, False)],
)
def test_the_peak_of_an_unknown_device_is_not_guessed(name, known):
    assert (flops.peak(name) is not None) == known


def test_a_ratio_is_the_median_of_neighbours():
    # The machine was busy in the second round, for both.
    slow = [{"seconds": s} for s in (4.0, 12.0, 5.0)]
    fast = [{"seconds": s} for s in (1.0, 3.0, 1.0)]
    groups = [{"fast": fast}, {"slow": slow, "fast": fast}]
    assert report.ratio(groups, "slow", "fast", "seconds") == 4.0


def test_arms_that_did_not_take_turns_have_no_ratio():
    groups = [{"fast": [{"seconds": 1.0}]}, {"slow": [{"seconds": 2.0}]}]
    assert report.ratio(groups, "slow", "fast", "seconds") is None


def test_padding_of_a_run_by_the_yaml():
    assert 0 < report.corpus_padding(seed=1986) <= 10
