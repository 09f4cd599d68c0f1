"""The parts of a plan, of large-v3 above all; what a device has."""

import json
import os

import pytest
import torch
from local import lora, memory, random_model

RANK_32 = lora.Lora(32, 64, 0.05, ["q_proj", "v_proj"], "both")


class Tokenizer:
    """As many tokens as large-v3's, of which a configuration asks nothing."""

    def __len__(self):
        return 51866

    def convert_tokens_to_ids(self, token):
        return 50257


LARGE = random_model.build_config(
    random_model.size_named("large-v3"), Tokenizer()
)


def large(n_clips=1, seconds=30, n_tokens=40, lora=None, **changed):
    """The plan of large-v3, fully trained in bf16."""
    mode = memory.mode_of(
        LARGE,
        changed.pop("adaptation", "lora" if lora else "full"),
        lora,
        **{
            "precision": "bf16",
            "base_precision": "fp32",
            "gradient_checkpointing": False,
            "optimizer": "adamw",
            "device": "cuda",
            **changed,
        },
    )
    batch = memory.Batch(n_clips, round(seconds * 16000), n_tokens)
    return memory.plan(LARGE, mode, batch)


def activations(plan):
    parts = ("encoder activations", "decoder activations", "logits")
    return sum(plan[part] for part in parts)


@pytest.mark.parametrize("seconds, gib", [(30, 2.84), (8, 0.81)])
def test_large_v3_keeps_as_much_as_was_measured(seconds, gib):
    """Saved tensors at true size, without attention's copy by frame."""
    clip = activations(large(2, seconds)) - activations(large(1, seconds))
    assert clip / 2**30 == pytest.approx(gib, rel=0.1)


def test_large_v3_in_a_table():
    plan = large()
    assert plan["weights"] / 1e9 == pytest.approx(6.17, abs=0.01)
    assert plan["autocast weights"] / 1e9 == pytest.approx(3.08, abs=0.01)
    assert sum(plan.values()) - plan["total"] >= plan["total"]


@pytest.mark.parametrize(
    "less",
    [
        {"gradient_checkpointing": True},
        {"adaptation": "frozen_encoder"},
        {"optimizer": "adamw_8bit"},
        {"n_clips": 19},
        {"seconds": 6.08},
        {"n_tokens": 60},
        {"lora": RANK_32},
    ],
    ids=str,
)
def test_what_lowers_a_plan(less):
    usual = {"n_clips": 20, "seconds": 8, "n_tokens": 80}
    assert large(**{**usual, **less})["total"] < large(**usual)["total"]


ORDERED = [  # each takes less than the one before it
    {"lora": RANK_32._replace(rank=64)},
    {"lora": RANK_32},
    {"lora": RANK_32._replace(dropout=0.0)},
    {"lora": RANK_32, "base_precision": "bf16"},
    {"lora": RANK_32, "base_precision": "int8"},
    {"lora": RANK_32, "base_precision": "int4"},
    {"lora": RANK_32._replace(part="decoder"), "base_precision": "int4"},
]


def test_what_lowers_a_plan_of_adapters():
    totals = [large(2, 8, **mode)["total"] for mode in ORDERED]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)


def test_the_bars_of_a_small_gpu():
    """A step of one clip of 8 s, beside full fine-tuning, and in 8 GB."""
    full, adapters = large(1, 8), large(1, 8, lora=RANK_32)
    assert adapters["total"] <= 0.4 * full["total"]
    on_int8 = large(1, 8, lora=RANK_32, base_precision="int8")
    assert on_int8["total"] < 7e9


def test_moments_of_8_bits():
    """2 bytes a weight, their scales; small tensors as ever."""
    n_small = 0
    for name, shape in memory._shapes(json.dumps(LARGE.to_dict())):
        n = torch.Size(shape).numel()
        is_trained = name != "encoder.embed_positions.weight"
        n_small += n if is_trained and n < 4096 else 0
    in_8 = large(optimizer="adamw_8bit")["optimizer"]
    expected = (1_541_570_560 - n_small) * (2 + 8 / 256) + 8 * n_small
    assert in_8 == pytest.approx(expected, rel=1e-6)


def test_bf16_weights_are_cast_to_fp16_as_fp32_ones_are():
    on_bf16 = {"lora": RANK_32, "base_precision": "bf16"}
    casts = large(**on_bf16)["autocast weights"]
    again = large(**on_bf16, precision="fp16")["autocast weights"]
    assert again == large(lora=RANK_32)["autocast weights"] > 10 * casts


def test_fp16_takes_as_much_as_bf16_and_less_than_fp32():
    assert large(precision="fp16") == large()
    plan = large(20, precision="fp32")
    assert plan["autocast weights"] == 0
    assert plan["total"] > large(20)["total"]
    with pytest.raises(KeyError):
        large(precision="int8")


def test_an_odd_number_of_samples_is_a_frame_more():
    assert large(seconds=4.001) == large(seconds=4.02)


def test_a_frozen_encoder_is_heard_a_second_longer_up_to_its_context():
    def heard(seconds):
        plan = large(seconds=seconds, adaptation="frozen_encoder")
        return plan["decoder activations"]

    second = heard(8) - heard(7)
    assert heard(29) == heard(30) == pytest.approx(heard(8) + 21 * second)
    trained = large(seconds=9)["decoder activations"]
    assert heard(8) == trained
    passing = large(seconds=8, adaptation="frozen_encoder")[
        "encoder activations"
    ]
    assert (
        passing == large(adaptation="frozen_encoder")["encoder activations"] > 0
    )


@pytest.mark.parametrize(
    "n_bytes, expected",
    [
        (0, "1 MB"),
        (2e6, "2 MB"),
        (154.4e6, "154 MB"),
        (999.4e6, "999 MB"),
        (999.6e6, "1.0 GB"),
        (1.26e9, "1.3 GB"),
        (139.8e9, "139.8 GB"),
    ],
)
def test_readable(n_bytes, expected):
    assert memory.readable(n_bytes) == expected


def test_a_limit_counts_as_the_device(monkeypatch, tmp_path):
    memory_of_host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.device_bytes("cpu") <= memory_of_host
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("123456789\n")
    limits = [str(tmp_path / name) for name in ("none", "max", "limit")]
    monkeypatch.setattr(memory, "CGROUPS", limits[:2])
    assert memory.device_bytes("cpu") == memory_of_host
    monkeypatch.setattr(memory, "CGROUPS", limits)
    assert memory.device_bytes("cpu") == 123456789
    assert memory.device_bytes("meta") is None
