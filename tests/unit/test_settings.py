"""Every setting is checked, and all problems are told together."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import HPARAMS, QUICKSTART, own
from hyperpyyaml import resolve_references
from local import settings
from local.settings import RULES

import speechbrain as sb

LARGE = HPARAMS / "train_large_v3.yaml"
INT8 = "--base_precision=int8"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("hparams", sorted(HPARAMS.glob("*.yaml")))
def test_the_files_are_right_as_they_are(check, hparams):
    assert check(hparams=hparams) == []


@pytest.mark.parametrize(
    "argument",
    [
        "--lr=5e-6",
        "--lr=1",
        "--whisper_hub=random:tiny",
        "--whisper_hub=openai/whisper-small",
        "--whisper_hub=./corpus",
        "--encoder_context=true_length",
        "--compile_layers=True",
        "--adaptation=lora",
        "--lora_target_modules=[q_proj, fc1]",
        "--lora_target_modules=all-linear",
        "--lora_alpha=0.5",
        "--base_precision=fp32",
        "--optimizer_name=adamw_8bit",
        "--packing=text",
        "--max_batch_length=160",
        "--max_batch_length=0.5",
        "--columns={text: 문장, path: 파일}",
        "--speeds=[90, 100]",
        "--precision=fp32",
        "--max_grad_norm=0.5",
        "--schedule=cosine",
        "--warmup_steps=0.05",
        "--warmup_steps=2000",
        "--embedding_lr_multiplier=0.1",
        "--ckpt_interval_steps=500",
        "--nonfinite_patience=2",
        "--keep_last=5",
        "--ckpt_interval_minutes=2",
        "--train_loader_kwargs={num_workers: 3}",
        "--manifest_folder=corpus",
        "--output_folder=$elsewhere",
        "--seed=0",
        "--device=cpu",
        "--debug",
    ],
)
def test_right_values(check, argument):
    adapted = ["--adaptation=lora"] if "--lora_" in argument else []
    assert check(argument, *adapted) == []


WRONG = {
    "whisper_hub": [
        ("random:huge", "choose random: with tiny, base, small"),
        ("./none", "there is no such folder"),
        ("/none", "there is no such folder"),
        ("7", "give a hub name, a local folder, or random:SIZE"),
    ],
    "adaptation": [
        ("LoRA", "choose full, frozen_encoder, lora"),
        ("Full", "choose full, frozen_encoder, lora"),
    ],
    "base_precision": [
        ("fp16", "choose fp32, bf16, int8, int4"),
        ("8", "choose fp32, bf16, int8, int4"),
    ],
    "lora_rank": [
        ("0", "a whole number of at least 1"),
        ("8.0", "a whole number of at least 1"),
    ],
    "lora_alpha": [("0", "give a number above 0"), ("a", "a number above 0")],
    "lora_dropout": [("1", "at most 0.99"), ("-0.1", "of at least 0")],
    "lora_target_modules": [
        ("[]", "give a list of names such as [q_proj, v_proj]"),
        ("[q_proj, 5]", "a regular expression, or all-linear"),
        ('""', "give a list of names"),
        ('"("', "no regular expression: missing )"),
    ],
    "lora_part": [("all", "choose both, encoder, decoder")],
    "new_tokens": [("add", "choose none, extend, replace")],
    "n_new_tokens": [("0", "a whole number of at least 1")],
    "new_tokens_text": [
        ("5", "give a file, or nothing"),
        ("none.txt", "there is no such file"),
    ],
    "new_rows": [("random", "choose mean, normal")],
    "new_rows_lr_multiplier": [("-1", "a number of at least 0")],
    "encoder_context": [
        ("short", "choose true_length, full, mixed"),
        ("30", "choose true_length, full, mixed"),
    ],
    "gradient_checkpointing": [("maybe", "choose True, False")],
    "compile_layers": [("default", "choose True, False")],
    "encoder_cache_folder": [
        ("5", "give a folder, or nothing"),
        ("[a]", "give a folder, or nothing"),
    ],
    "corpus": [("zerot", "choose aihub, clovacall, common_voice, fleurs, ")],
    "data_folder": [("", "give a text"), ("5", "give a text")],
    "text_form": [("phonetic", "choose spelling, pronunciation")],
    "columns": [
        ("text", "give a mapping such as {path: file"),
        ("{txt: a}", "txt is none of path, text, id"),
    ],
    "corpora": [
        ("zeroth", "give a list of mappings such as [{corpus: zeroth"),
        ("[{corpus: zerot, folder: a}]", "zerot"),
        ("[{corpus: zeroth, folder: a, weigth: 2}]", "weigth"),
        ("[{corpus: zeroth, folder: a, weight: 0}]", "weight"),
        ("[{corpus: zeroth, folder: a}, {corpus: zeroth, folder: b}]", "name"),
    ],
    "keep_no_speech": [("yes", "choose True, False")],
    "packing": [
        ("times", "choose none, text, timestamps"),
        ("True", "choose none, text, timestamps"),
    ],
    "asr_ratio": [
        ("0", "give a number of at least 0.01, at most 1"),
        ("1.5", "of at least 0.01, at most 1"),
        ("half", "of at least 0.01, at most 1"),
    ],
    "text_file": [
        ("[a]", "give a file, or nothing"),
        ("none.txt", "there is no such file"),
        ("/tmp", "is a folder; give a UTF-8 file"),
    ],
    "max_text_lines": [("-1", "a whole number of at least 0")],
    "heldout_share": [
        ("0", "give a number above 0, at most 0.5"),
        ("0.6", "above 0, at most 0.5"),
        ("a", "above 0, at most 0.5"),
    ],
    "manifest_folder": [("5", "give a folder, or nothing")],
    "features_folder": [("5", "give a folder, or nothing")],
    "train_csv": [("", "give a name in the folder")],
    "valid_csv": [("[a]", "give a name in the folder")],
    "test_csv": [("/a/test.csv", "give a name in the folder")],
    "seed": [
        ("-1", "a whole number of at least 0"),
        ("1.5", "a whole number of at least 0"),
        ("True", "a whole number of at least 0"),
    ],
    "output_folder": [("", "give a text")],
    "save_folder": [("5", "give a text")],
    "number_of_epochs": [("0", "a whole number of at least 1")],
    "batch_size": [("2.0", "a whole number of at least 1")],
    "max_batch_length": [
        ("-1", "give a number of at least 0"),
        (".inf", "give a number of at least 0"),
        ("long", "give a number of at least 0"),
    ],
    "grad_accumulation_factor": [("0", "a whole number of at least 1")],
    "lr": [
        ("0", "give a number above 0"),
        ("-1e-5", "give a number above 0"),
        ("1e-5x", "give a number above 0"),
        (".nan", "give a number above 0"),
        (".inf", "give a number above 0"),
    ],
    "optimizer_name": [
        ("adam", "choose adamw, adamw_8bit"),
        ("AdamW", "choose adamw, adamw_8bit"),
    ],
    "schedule": [("cosin", "choose noam, cosine, linear, constant")],
    "warmup_steps": [
        ("-1", "give a whole number of steps, or a share of the run below 1"),
        ("1.0", "give a whole number of steps"),
        ("a", "give a whole number of steps"),
    ],
    "embedding_lr_multiplier": [("-0.1", "a number of at least 0")],
    "weight_decay": [("-0.1", "give a number of at least 0")],
    "max_grad_norm": [("0", "above 0"), ("-1", "above 0"), ("nan", "above 0")],
    "nonfinite_patience": [("0", "a whole number of at least 1")],
    "label_smoothing": [("1", "of at least 0, at most 0.99")],
    "augment": [("1.5", "choose True, False")],
    "speeds": [
        ("[]", "give a list of percents such as [95, 100, 105]"),
        ("95", "give a list of percents"),
        ("[0.9, 1.1]", "give whole percents between 50 and 200"),
        ("[100, 250]", "give whole percents between 50 and 200"),
    ],
    "telephone_share": [("1.1", "of at least 0, at most 1")],
    "noise_folder": [("5", "give a folder, or nothing")],
    "noise_share": [("-1", "of at least 0, at most 1")],
    "snr_db": [
        ("5", "give two numbers of decibels such as [5, 20]"),
        ("[5, loud]", "give two numbers of decibels"),
        ("[20, 5]", "give the lower number first"),
    ],
    "reverb_folder": [("5", "give a folder, or nothing")],
    "reverb_share": [("2", "of at least 0, at most 1")],
    "precision": [],  # a run option: below
    "eval_precision": [],
    "best_metric": [("cer", "choose CER, WER"), ("BLEU", "choose CER, WER")],
    "valid_interval_steps": [("-1", "a whole number of at least 0")],
    "valid_max_utterances": [("0.5", "a whole number of at least 0")],
    "early_stopping_patience": [("-1", "a whole number of at least 0")],
    "early_stopping_min_delta": [("-1", "a number of at least 0")],
    "collapse_share": [("101", "at most 100"), ("-1", "of at least 0")],
    "collapse_patience": [("-1", "a whole number of at least 0")],
    "score_before_training": [("2", "choose True, False")],
    "test_batch_size": [("0", "a whole number of at least 1")],
    "test_beam_size": [("0", "a whole number of at least 1")],
    "max_new_tokens": [("0", "at most 448"), ("449", "at most 448")],
    "ckpt_interval_steps": [("-1", "a whole number of at least 0")],
    "ckpt_interval_minutes": [("-1", "a number of at least 0")],
    "keep_last": [("0", "a whole number of at least 1")],
    "log_interval_steps": [("0", "a whole number of at least 1")],
    "tensorboard": [("2", "choose True, False")],
    "dry_run": [("2", "choose True, False")],
    "plan_memory": [("24", "choose True, False")],
    "num_workers": [("-1", "a whole number of at least 0")],
}


def test_every_rule_has_a_wrong_value():
    assert WRONG.keys() == RULES.keys()


def test_no_setting_is_taken_for_an_option_of_speechbrain():
    """Its parser takes the beginning of an option's name for the option."""
    words = [
        f"--{name}={'fp32' if 'precision' in name else 1}" for name in RULES
    ]
    _, run_opts, overrides = sb.parse_arguments([str(QUICKSTART), *words])
    reached = set(settings._given(overrides)) | run_opts.overridden_args
    assert RULES.keys() - reached == set()


@pytest.mark.parametrize("n", range(max(map(len, WRONG.values()))))
def test_a_wrong_value_is_named_with_the_choices(check, n):
    """The n-th of each setting, all told together."""
    given = {k: rows[n] for k, rows in WRONG.items() if len(rows) > n}
    arguments = [f"--{name}={value}" for name, (value, _) in given.items()]
    folder = None if "data_folder" in given else "corpus"
    lines = check(*arguments, data_folder=folder)
    told = {line.partition("=")[0] for line in lines}
    assert told == given.keys() and len(lines) == len(given)
    for name, (value, message) in given.items():
        (line,) = (one for one in lines if one.startswith(f"{name}="))
        assert message in line
        assert not value.isalpha() or value in line


@pytest.mark.parametrize("name", ["precision", "eval_precision"])
@pytest.mark.parametrize("value", ["fp8", "bfloat16", "float32"])
def test_precision(check, tmp_path, capsys, name, value):
    with pytest.raises(SystemExit):  # SpeechBrain's own parser
        check(f"--{name}={value}")
    assert "fp32" in capsys.readouterr().err
    content = QUICKSTART.read_text(encoding="utf-8")
    lines = content.splitlines()
    changed = [
        f"{name}: {value}" if line.startswith(f"{name}:") else line
        for line in lines
    ]
    (tmp_path / "own.yaml").write_text("\n".join(changed), encoding="utf-8")
    (line,) = check(hparams=tmp_path / "own.yaml")
    assert line == f"{name}={value!r}: choose fp32, bf16, fp16"


def test_all_problems_are_told_together(check):
    lines = check(
        "--lr=fast",
        "--batch_szie=4",
        "--whisper={adaptaton: full}",
        "--best_metric=BLEU",
        "--precision=fp16",
        "--max_grad_norm=-1",
        data_folder="no/such",
    )
    starts = [
        "batch_szie:",
        "whisper.adaptaton:",
        "lr='fast'",
        "max_grad_norm=",
    ]
    starts += ["best_metric='BLEU'", "data_folder='no/such'"]
    if not torch.cuda.is_available():
        starts.append("precision='fp16'")
    for start in starts:
        assert sum(line.startswith(start) for line in lines) == 1, start
    assert len(lines) == len(starts)


@pytest.mark.parametrize(
    "argument, message",
    [
        (
            "--optimizer_step_limit=ten",
            "optimizer_step_limit='ten': give a who",
        ),
        ("--batch_szie=4", "batch_szie: no such setting; did you mean batch_"),
        ("--learning=1", "learning: no such setting; there are .*lr, warmup"),
        (
            "--train_loader_kwargs={num_worker: 1}",
            "train_loader_kwargs.num_worker: .* did you mean num_workers",
        ),
        (
            "--wav_augment={augmentatons: []}",
            "wav_augment.augmentatons: .* did you mean augmentations",
        ),
        ("--opt_class=adam", "opt_class='adam': give a mapping"),
    ],
)
def test_mistyped(check, argument, message):
    (line,) = check(argument)
    assert re.match(message, line)


@pytest.mark.parametrize("argument", ["--lr=[1", "--lr=1 --lr=2", "stray"])
def test_a_command_line_that_cannot_be_read(argument):
    words = [str(QUICKSTART), *argument.split()]
    hparams_file, run_opts, overrides = sb.parse_arguments(words)
    with pytest.raises(ValueError, match="command line.*(?s:.*)each once"):
        settings.check(hparams_file, overrides, run_opts)


# A file of one's own


def test_a_setting_unknown_in_the_file(check, tmp_path):
    (line,) = check(hparams=own(tmp_path, "\nlr: ", "\nmodel_size: 5\nlr: "))
    assert line.startswith("model_size: no such setting; remove it")


def test_a_setting_missing_in_the_file(check, tmp_path):
    hparams = own(tmp_path, "\ntest_beam_size: ", "\n# ")
    assert check(hparams=hparams) == ["test_beam_size: missing in the file"]


def test_a_missing_file_names_those_there_are(check, tmp_path):
    shutil.copytree(HPARAMS, tmp_path / "hparams")
    with pytest.raises(FileNotFoundError) as error:
        check(hparams="hparams/train_larg.yaml")
    assert "no hyperparameter file 'hparams/train_larg.yaml'" in str(
        error.value
    )
    assert "hparams/train_turbo.yaml" in str(error.value)
    shutil.rmtree(tmp_path / "hparams")
    with pytest.raises(FileNotFoundError, match="start from the recipe folder"):
        check(hparams="hparams/train_larg.yaml")


# Folders and hardware


def test_data_folder_is_not_given(check):
    assert check(hparams=LARGE, data_folder=None) == [
        "data_folder: missing; give --data_folder=FOLDER"
    ]


def test_data_folder_is_not_there(check):
    assert check(data_folder="none") == [
        "data_folder='none': no such folder; --data_folder=FOLDER must exist"
    ]


def test_the_quickstart_corpus_is_not_made_yet(check):
    (line,) = check(data_folder=None)
    assert "first run python -m local.synthesize results/quick" in line


def test_manifest_folder_is_not_there(check):
    (line,) = check("--manifest_folder=none", data_folder="nor this")
    assert line.startswith("manifest_folder='none': no such folder")
    assert check("--manifest_folder=corpus", data_folder="nor this") == []


@pytest.mark.parametrize("name", settings.FOLDERS[1:])
def test_an_optional_folder_is_not_there(check, name):
    assert check(f"--{name}=none") == [
        f"{name}='none': no such folder; --{name}=FOLDER must exist"
    ]


@pytest.mark.parametrize(
    "arguments, n_lines",
    [
        (["--corpus=huggingface"], 1),
        (["--corpus=huggingface", "--data_folder=org/name"], 0),
        (["--corpus=huggingface", "--data_folder=org/name:ko"], 0),
        (["--corpus=zeroth", "--data_folder=org/name"], 1),
        (["--manifest_folder=none", "--corpus=huggingface"], 1),
    ],
)
def test_a_hub_name_is_no_folder(check, arguments, n_lines):
    if not any(a.startswith("--data_folder") for a in arguments):
        arguments = [*arguments, "--data_folder=none"]
    assert len(check(*arguments, data_folder=None)) == n_lines


@pytest.mark.parametrize(
    "folders, missing",
    [
        (["zeroth", "fleurs"], ["corpus/zeroth", "corpus/fleurs"]),
        (["../corpus", "zeroth"], ["corpus/zeroth"]),
    ],
)
def test_the_folders_of_several_corpora(check, folders, missing):
    listed = ", ".join(
        f"{{corpus: manifest, name: a{i}, folder: {folder}}}"
        for i, folder in enumerate(folders)
    )
    lines = check(f"--corpora=[{listed}]")
    assert len(lines) == len(missing)
    for line, folder in zip(lines, missing):
        assert line == f"corpora: no such folder '{folder}'"


def test_run_options_are_saved_with_the_settings(tmp_path):
    words = [str(QUICKSTART), "--eval_precision=bf16", "--lr=2e-5"]
    words += ["--ckpt_interval_steps=7", f"--data_folder={tmp_path}"]
    words += ["--test_csv=시험.csv"]
    hparams_file, run_opts, overrides = sb.parse_arguments(words)
    overrides = settings.check(hparams_file, overrides, run_opts)
    content = QUICKSTART.read_text(encoding="utf-8")
    saved = settings.plain(resolve_references(content, overrides).getvalue())
    assert saved["eval_precision"] == "bf16" and saved["lr"] == 2e-5
    assert saved["ckpt_interval_steps"] == 7
    assert saved["ckpt_interval_minutes"] == 0
    assert saved["test_csv"] == "시험.csv"


@pytest.mark.parametrize("name", ["manifest_folder", "encoder_cache_folder"])
def test_a_folder_can_be_left_empty(check, name):
    assert check(f"--{name}=") == []


@pytest.mark.parametrize("name", ["precision", "eval_precision"])
def test_fp16_on_a_cpu(check, gpu, name):
    assert check(f"--{name}=fp16") == []
    assert check(f"--{name}=fp16", "--device=cpu") == [
        f"{name}='fp16': not on a CPU; choose bf16 or fp32"
    ]


def test_fp16_without_a_gpu(check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = check("--precision=fp16")
    assert line.startswith("precision='fp16': not on a CPU")


# Checkpoints


def checkpoint(folder, **identity):
    path = folder / "save/CKPT+2026-01-01+00-00-00+00"
    path.mkdir(parents=True)
    (path / "CKPT.yaml").touch()
    (path / "whisper.ckpt").write_text(json.dumps(identity))


@pytest.mark.parametrize(
    "saved, named",
    [
        ({"whisper_hub": "openai/whisper-base", "adaptation": "full"}, True),
        ({"whisper_hub": "random:quickstart", "adaptation": "lora"}, True),
        ({"whisper_hub": "random:quickstart", "seed": 77}, True),
        ({"whisper_hub": "random:quickstart", "adaptation": "full"}, False),
    ],
)
def test_checkpoints_of_another_model(check, tmp_path, saved, named):
    checkpoint(tmp_path, **saved)
    lines = check(f"--output_folder={tmp_path}")
    assert len(lines) == named
    if named:
        assert lines[0].startswith(f"save_folder='{tmp_path}/save': CKPT+2026")
        assert "was trained with" in lines[0]
        assert "or another output_folder" in lines[0]
    # Told beside the rest, too.
    assert len(check(f"--output_folder={tmp_path}", "--lr=0")) == 1 + named


def test_test_only_without_a_checkpoint(check, tmp_path):
    (line,) = check("--test_only", f"--output_folder={tmp_path}")
    assert line.startswith("test_only: no checkpoint in save_folder=")
    checkpoint(tmp_path, whisper_hub="random:quickstart", adaptation="full")
    assert check("--test_only", f"--output_folder={tmp_path}") == []


def rows(**changed):
    row = {"wrd": "가", "duration": 1.0}
    return {"a": row, "b": {**row, **changed}}


def split(**changed):
    row = {"wrd": "가", "duration": 1.0}
    return SimpleNamespace(data={"a": row, "b": {**row, **changed}})


def test_ranks_must_hold_the_same_clips(tmp_path, monkeypatch):
    splits = {"train": split(), "valid": None, "test": split()}
    settings.require_same_data(tmp_path, tmp_path, splits)
    monkeypatch.setattr(settings.ranks, "here", lambda: (0, 2))
    monkeypatch.setattr(settings.ranks, "gather", lambda own: [own, "other"])
    with pytest.raises(ValueError, match="clips of train must be the same"):
        settings.require_same_data(tmp_path, tmp_path, splits)


def test_a_run_goes_on_with_the_clips_of_its_checkpoint(tmp_path):
    folders = tmp_path, tmp_path
    (tmp_path / "CKPT+1").mkdir()
    settings.require_same_data(*folders, {"train": split()})
    (tmp_path / "CKPT+1/CKPT.yaml").touch()
    settings.require_same_data(*folders, {"train": split(duration=2)})
    with pytest.raises(ValueError, match="other training clips, labels"):
        settings.require_same_data(*folders, {"train": split(wrd="나")})


@pytest.mark.parametrize("device", ["cuda", "cuda:9"])
def test_a_gpu_that_is_not_there(check, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    problems = check(f"--device={device}", "--adaptation=lora", INT8)
    assert problems == [
        f"device='{device}': PyTorch finds 0 GPU(s) here; choose cpu, or "
        "cuda:N below that"
    ]


@pytest.mark.parametrize(
    "asked", ["--device=cuda", "--precision=fp16", "--test_only"]
)
def test_a_plan_may_be_for_another_machine(check, tmp_path, asked):
    checkpoint(tmp_path, adaptation="full")
    run = f"--output_folder={tmp_path}", "--adaptation=lora", INT8, asked
    assert check(*run)
    assert check(*run, "--plan_memory=True", data_folder="") == []
