"""The table of --plan_memory: its batch, its parts, the largest batches."""

import re

import pytest
from local import lora, memory, memory_table, sources

LORA = lora.Lora(32, 64, 0.05, ["q_proj", "v_proj"], "both")
RUN = {
    "whisper_hub": "random:tiny",
    "adaptation": "full",
    "lora": LORA._asdict(),
    "base_precision": "fp32",
    "optimizer_name": "adamw",
    "precision": "bf16",
    "gradient_checkpointing": False,
    "batch_size": 64,
    "max_batch_length": 160,
    "eval_precision": "bf16",
    "test_batch_size": 32,
    "max_new_tokens": 444,
    "encoder_context": "true_length",
    "device": "cuda",
}
CONFIG = sources.load_config(RUN["whisper_hub"])


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda device: None)


def mode(adaptation="full", **changed):
    fields = "precision", "base_precision", "gradient_checkpointing"
    known = {k: RUN[k] for k in (*fields, "device")}
    known["optimizer"] = RUN["optimizer_name"]
    return memory.mode_of(CONFIG, adaptation, LORA, **{**known, **changed})


@pytest.mark.parametrize(
    "adaptation, context, batch_size, length_s, n_clips, seconds, n_tokens",
    [
        ("full", "true_length", 64, 160, 62, 2.56, 19),  # 2.5 s, rounded up
        ("full", "true_length", 20, 160, 19, 8.32, 52),
        ("full", "true_length", 1, 8, 1, 8.32, 52),  # one clip is no less
        ("full", "true_length", 1, 500, 1, 30, 175),
        ("full", "true_length", 640, 8, 25, 0.32, 6),
        ("full", "true_length", 6, 0, 6, 30, 175),  # no limit
        ("full", "full", 64, 160, 5, 30, 175),
        ("full", "full", 4, 160, 4, 30, 175),
        ("full", "full", 4, 20, 1, 30, 175),
        ("full", "mixed", 4, 20, 1, 30, 175),  # more than 4 of 5 s
        ("full", "mixed", 4, 40, 3, 10.24, 63),  # more than 1 of 30 s
        ("frozen_encoder", "full", 20, 160, 19, 8.32, 52),  # trimmed
    ],
)
def test_the_fullest_batch(
    adaptation, context, batch_size, length_s, n_clips, seconds, n_tokens
):
    found = memory_table.fullest(
        CONFIG, mode(adaptation), context, batch_size, length_s
    )
    assert found == (n_clips, round(seconds * 16000), n_tokens)


def test_the_decoder_has_so_many_positions():
    assert memory_table._n_tokens(100 * 16000) == 448


def bytes_of(batch):
    return memory_table._step_of(CONFIG, mode(), batch)


@pytest.mark.parametrize("gb", [2, 8, 141])
def test_the_largest_batch_fits_and_one_more_does_not(gb):
    batch = memory.Batch(3, 80000, 33)
    n_clips = memory_table.largest(bytes_of(batch), 1e9 * gb)
    free = 1e9 * gb - max(1e9, 0.08e9 * gb)
    assert bytes_of(batch)(n_clips) <= free < bytes_of(batch)(n_clips + 1)


@pytest.mark.parametrize("n_bytes, n_clips", [(1.1e9, 0), (1e15, 2**16)])
def test_nothing_fits_or_everything(n_bytes, n_clips):
    batch = memory.Batch(1, 5120, 6)
    assert memory_table.largest(bytes_of(batch), n_bytes) == n_clips


def test_the_lines():
    assert {*memory_table.SETTINGS, "device"} == RUN.keys()
    lines = memory_table.told(**RUN).splitlines()
    plan = memory.plan(CONFIG, mode(), memory.Batch(62, 40960, 19))
    assert lines[:3] == [
        "model   random:tiny: 37.2 M weights trained, 0.6 M frozen",
        "mode    adaptation=full, precision=bf16, "
        "gradient_checkpointing=False, optimizer_name=adamw",
        "batch   62 clips of 2.56 s, 158.7 s in all, 19 tokens each",
    ]
    for part, n_bytes in plan.items():
        name = "at once, at most" if part == "total" else part
        assert f"{name:<24}{memory.readable(n_bytes):>10}" in lines
    assert [line.split()[0] for line in lines[-8:]] == [
        str(gb) for gb in memory_table.GPUS_GB
    ]
    assert not re.search(r"none|this", "\n".join(lines[-8:]))
    scored = memory.scoring(CONFIG, mode(), 32, "bf16", 444)
    assert f"scoring 32 clips{memory.readable(scored):>18}" in lines
    assert max(map(len, lines[5:])) <= 80


def test_what_a_line_says_fits():
    """Set as told, the fullest batch takes no more than is free."""
    line = memory_table.told(**RUN).splitlines()[-6]
    assert line.startswith("16 GB")
    (n_clips, length_s), _ = re.findall(r"(\d+) clips, (\d+) s", line)
    limits = int(n_clips), int(length_s)
    batch = memory_table.fullest(CONFIG, mode(), "true_length", *limits)
    assert memory.plan(CONFIG, mode(), batch)["total"] <= 15e9


def test_scoring_holds_keys_and_values():
    """Of tiny: 4 layers, 384 wide, a context of 1500 and 444 tokens."""
    one, two = (memory.scoring(CONFIG, mode(), n, "fp32", 444) for n in (1, 2))
    cached = 2 * 4 * 4 * 384 * (1500 + 444)
    assert cached < two - one < cached + 3e6


@pytest.mark.parametrize(
    "changed, pattern",
    [
        (
            {"adaptation": "lora", "base_precision": "int8"},
            "base_precision=int",
        ),
        ({"adaptation": "lora"}, r"0\.6 M weights trained, 37\.8 M frozen"),
        (
            {"whisper_hub": "random:large-v3"},
            "8 GB +none fits +none fits +none fits",
        ),
        (
            {"gradient_checkpointing": True},
            r"(?m)^GPU +a step +test_batch_size$",
        ),
        ({"adaptation": "frozen_encoder"}, "29.6 M weights trained"),
    ],
)
def test_what_is_told(changed, pattern):
    assert re.search(pattern, memory_table.told(**{**RUN, **changed}))


def test_this_machine_is_told_too(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda device: 3e9)
    told = memory_table.told(**{**RUN, "device": "cuda:1"})
    assert re.fullmatch(r"this one +\d+ clips, .*", told.splitlines()[-1])


def test_a_machine_without_a_gpu_plans_for_one():
    dropout = {**RUN, "adaptation": "lora"}
    on_cpu = memory_table.told(**{**dropout, "device": "cpu"})
    assert on_cpu == memory_table.told(**{**dropout, "device": "cuda"})


def test_a_pattern_that_names_nothing():
    wrong = LORA._replace(target_modules=["q"])._asdict()
    with pytest.raises(ValueError, match="lora_target_modules"):
        memory_table.told(**{**RUN, "adaptation": "lora", "lora": wrong})
