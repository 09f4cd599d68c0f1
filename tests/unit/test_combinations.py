"""Settings that cannot be had together, or not on this machine."""

import re
import sys

import pytest
import torch
from conftest import own
from local import combinations

FROZEN = "--adaptation=frozen_encoder"
SHORT = "--encoder_context=true_length"
CACHE = "--encoder_cache_folder=states"
AUGMENT = "--augment=True"
TIMES = "--packing=timestamps"
SHARDS = "--features_folder=corpus"
LORA = "--adaptation=lora"
TEXT = f"--text_file={__file__}"
UNREAD = "asr_ratio=0.5: .*train nothing that reads text; choose lora_part=both"
NOT_TRAINED = (
    "encoder_context='{}': .*knows its full context alone; choose full"
)
TRAINED = "encoder_cache_folder='states': .*; leave it empty, or choose adapt"
CHANGED = "encoder_cache_folder='states': augment=True changes .*choose one"
MOVED = r"packing='timestamps': .*speeds=\[{}\] moves .* choose speeds=\[100\]"

COMBINATIONS = [
    # The file's own encoder_context, mixed, does not count beside it.
    ([FROZEN], []),
    ([FROZEN, "--encoder_context=full"], []),
    ([FROZEN, "--encoder_context=mixed"], [NOT_TRAINED.format("mixed")]),
    ([FROZEN, SHORT], [NOT_TRAINED.format("true_length")]),
    ([FROZEN, "--encoder_context=no"], ["encoder_context='no': choose "]),
    ([FROZEN, CACHE], []),
    ([FROZEN, CACHE, TIMES], []),
    (["--adaptation=full", CACHE], [TRAINED]),
    ([CACHE], [TRAINED]),
    (['--encoder_cache_folder=""'], []),
    (["--adaptation=frozen", CACHE], ["adaptation='frozen': choose"]),
    ([FROZEN, CACHE, AUGMENT], [CHANGED]),
    ([FROZEN, CACHE, AUGMENT, "--speeds=[100]"], [CHANGED]),
    ([FROZEN, CACHE, "--telephone_share=0.1"], [".*telephone_share=0.1 chan"]),
    ([FROZEN, AUGMENT], []),
    ([CACHE, AUGMENT], [TRAINED, CHANGED]),
    (["--warmup_steps=0"], ["warmup_steps=0: noam falls .*; give at least 1"]),
    (["--warmup_steps=0", "--schedule=cosine"], []),
    (["--warmup_steps=0", "--schedule=cosin"], ["schedule='cosin': choose"]),
    ([TIMES], []),
    ([TIMES, "--speeds=[90]"], []),  # not in use
    ([TIMES, AUGMENT], [MOVED.format("95, 100, 105")]),
    ([TIMES, AUGMENT, "--speeds=[90]"], [MOVED.format("90")]),
    ([TIMES, AUGMENT, "--speeds=[100]"], []),
    (["--packing=text", AUGMENT], []),
    ([SHARDS], []),
    ([SHARDS, AUGMENT], ["features_folder='corpus': augment=True needs wavef"]),
    (
        [SHARDS, "--telephone_share=0.5"],
        ["features_folder=.*telephone_share=0"],
    ),
    (
        [SHARDS, "--noise_folder=corpus"],
        [".*no audio", ".*set noise_folder=''"],
    ),
    ([SHARDS, "--noise_folder="], []),
    ([SHARDS, "--packing=text"], ["features_folder=.*packing='text' needs"]),
    ([SHARDS, FROZEN, CACHE], ["features_folder=.*encoder_cache_folder='sta"]),
    (
        ["--asr_ratio=0.5"],
        ["asr_ratio=0.5: there is no text_file .*asr_ratio=1"],
    ),
    ([TEXT], ["text_file=.*asr_ratio=1.0 leaves no batch for it; choose asr_"]),
    ([TEXT, "--asr_ratio=0.5"], []),
    ([TEXT, "--asr_ratio=0.5", LORA], []),
    ([TEXT, "--asr_ratio=0.5", LORA, "--lora_part=encoder"], [UNREAD]),
    (
        [
            TEXT,
            "--asr_ratio=0.5",
            LORA,
            "--lora_target_modules=.*[.]encoder[.].*_proj",
        ],
        [UNREAD],
    ),
    (
        [
            TEXT,
            "--asr_ratio=0.5",
            LORA,
            "--lora_target_modules=.*encoder_attn.(q|k|v)_proj",
        ],
        [UNREAD],
    ),
    (["--new_tokens=extend", "--new_rows=normal"], []),
    (["--new_tokens=replace", FROZEN], []),
    (["--new_rows=normal"], ["new_rows: new_tokens='none' adds none; choose"]),
    (["--new_tokens=extend", LORA], ["new_tokens='extend': .*no embeddings"]),
    (
        ["--new_tokens=replace", SHARDS],
        ["new_tokens='replace': .*without them"],
    ),
    ([TIMES, AUGMENT, "--speeds=[]"], [r"speeds=\[\]: give a list"]),
    ([TIMES, "--augment=maybe"], ["augment='maybe': choose"]),
    (
        [FROZEN, SHORT, CACHE, TIMES, AUGMENT, "--speeds=[90]"],
        [NOT_TRAINED.format("true_length"), CHANGED, MOVED.format("90")],
    ),
]


@pytest.mark.parametrize("arguments, messages", COMBINATIONS)
def test_combinations(check, arguments, messages):
    lines = check(*arguments)
    assert len(lines) == len(messages), lines
    for line, message in zip(lines, messages):
        assert re.match(message, line)


def test_tensorboard_that_is_not_installed(check, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = check("--tensorboard=True")
    assert re.match("tensorboard=True: .*pip install tensorboard", line)


@pytest.mark.parametrize(
    "context, arguments, n_lines",
    [
        ("mixed", [], 1),
        ("full", [], 0),
        ("full", ["--encoder_context=mixed"], 1),
        ("mixed", ["--encoder_context=full"], 0),
        ("mixed", ["--adaptation=full"], 0),
    ],
)
def test_a_file_that_freezes_the_encoder(
    check, tmp_path, context, arguments, n_lines
):
    path = own(tmp_path, "\nadaptation: full ", "\nadaptation: frozen_encoder ")
    text = path.read_text(encoding="utf-8")
    assert "\nencoder_context: mixed " in text
    text = text.replace(
        "\nencoder_context: mixed ", f"\nencoder_context: {context} "
    )
    path.write_text(text, encoding="utf-8")
    lines = check(*arguments, hparams=path)
    assert len(lines) == n_lines
    assert all(re.match(NOT_TRAINED.format("mixed"), line) for line in lines)


# Adapters, a base of less precision, a smaller optimizer

LORA = {
    "adaptation": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_part": "both",
}
CONTEXT = "encoder_context='mixed': .*choose full"
DECODER = {"lora_part": "decoder"}


@pytest.mark.parametrize(
    "settings, given, device, messages",
    [
        ({}, {}, "cpu", []),
        ({"encoder_context": "mixed"}, {"encoder_context"}, "cpu", []),
        (
            {**DECODER, "encoder_context": "mixed"},
            {"encoder_context"},
            "cpu",
            [CONTEXT],
        ),
        # The file's own does not count beside what was asked for.
        ({**DECODER, "encoder_context": "mixed"}, {"lora_part"}, "cpu", []),
        ({**DECODER, "encoder_context": "mixed"}, {"adaptation"}, "cpu", []),
        ({**DECODER, "encoder_context": "mixed"}, {}, "cpu", [CONTEXT]),
        ({**DECODER, "encoder_cache_folder": "states"}, {}, "cpu", []),
        (
            {"encoder_cache_folder": "states"},
            {},
            "cpu",
            ["encoder_cache_folder='states': .*lora with lora_part=decoder"],
        ),
        (
            {"lora_target_modules": ["query"]},
            {},
            "cpu",
            [r"lora_target_modules=\['query'\]: .*give a list of some of fc1"],
        ),
        (
            {"whisper_hub": "results/none"},
            {},
            "cpu",
            ["whisper_hub='results/none' cannot be reached"],
        ),
        ({"base_precision": "int8"}, {}, "cpu", []),
        ({"base_precision": "int4"}, {}, None, []),
        (
            {"base_precision": "int4"},
            {},
            "mps",
            ["base_precision='int4': not on mps; choose bf16 or fp32"],
        ),
        (
            {"base_precision": "int8", "adaptation": "full"},
            {},
            "cpu",
            ["base_precision='int8': adaptation='full' .*choose adaptation=lo"],
        ),
        (
            {"base_precision": "bf16", "adaptation": "frozen_encoder"},
            {},
            "cpu",
            ["base_precision='bf16': .*; choose adaptation=lora, or base_prec"],
        ),
        (
            {"base_precision": "bf16", "precision": "fp32"},
            {},
            "cpu",
            ["precision='fp32': base_precision='bf16' .*choose precision=bf16"],
        ),
        (
            {"base_precision": "bf16", "eval_precision": "fp32"},
            {},
            "cpu",
            ["eval_precision='fp32': .*choose eval_precision=bf16, or base_p"],
        ),
        ({"base_precision": "bf16", "precision": "fp16"}, {}, "cuda", []),
        ({"base_precision": "int8", "eval_precision": "fp32"}, {}, "cpu", []),
        (
            {"base_precision": "int4", "compile_layers": True},
            {},
            "cpu",
            ["compile_layers=True: base_precision='int4' .*leave it False, or"],
        ),
        ({"base_precision": "bf16", "compile_layers": True}, {}, "cpu", []),
        ({"optimizer_name": "adamw_8bit"}, {}, "cpu", []),
        (
            {"optimizer_name": "adamw_8bit"},
            {},
            "mps",
            [
                "optimizer_name='adamw_8bit': not on device='mps'; choose cpu or cuda"
            ],
        ),
    ],
)
def test_adapters_and_their_base(quickstart, settings, given, device, messages):
    plain = {"whisper_hub": quickstart, **LORA, **settings}
    lines = combinations.problems(plain, dict.fromkeys(given), device)
    assert len(lines) == len(messages), lines
    for line, message in zip(lines, messages):
        assert re.match(message, line)


@pytest.mark.parametrize(
    "capability, choices", [((7, 0), "int4 or bf16 or fp32"), ((7, 5), "")]
)
def test_a_gpu_that_cannot_multiply_int8(monkeypatch, capability, choices):
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability
    )
    plain = {**LORA, "base_precision": "int8"}
    lines = combinations.problems(plain, {}, "cuda:0")
    assert len(lines) == bool(choices)
    assert all(f"7.0, it takes 7.5; choose {choices}" in one for one in lines)


@pytest.mark.parametrize(
    "settings, messages",
    [
        ({}, ["adaptation='lora': PEFT is not installed: pip install peft"]),
        (
            {"base_precision": "int4"},
            ["adaptation='lora': PEFT", "base_precision='int4': bitsandbytes"],
        ),
        ({"adaptation": "full"}, []),
    ],
)
def test_libraries_that_are_not_installed(monkeypatch, settings, messages):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    lines = combinations.problems({**LORA, **settings}, {}, "cpu")
    assert len(lines) == len(messages)
    assert all(map(str.startswith, lines, messages))


def test_adapters_that_no_run_would_have(check):
    (line,) = check("--lora_rank=64", "--lora_part=decoder")
    assert line == (
        "lora_part, lora_rank: adaptation='full' has no adapters; choose "
        "adaptation=lora, or leave them out"
    )


def test_an_encoder_without_adapters_is_frozen_whatever_names_them(check):
    adapters = (
        "--adaptation=lora",
        "--lora_target_modules=[encoder_attn.q_proj]",
    )
    assert check(*adapters, "--encoder_cache_folder=cache") == []
    (line,) = check(*adapters, "--encoder_context=true_length")
    assert line.startswith("encoder_context='true_length': a frozen encoder")
