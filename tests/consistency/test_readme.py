"""Every train.py command of every README and YAML header passes the checks."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from local import settings, sources

import speechbrain as sb

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/Korean/ASR/whisper"
TEXTS = [ROOT / "README.md", RECIPE / "README.md", *RECIPE.glob("hparams/*")]


def commands():
    """Each command line as a parameter."""
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        for line in re.findall(r"^[#> ]*((?:python|torchrun) .*)$", text, re.M):
            if "train.py" in line:
                yield pytest.param(line, id=f"{path.name}: {line}")


def test_there_are_commands():
    assert len(list(commands())) >= 12


@pytest.fixture(scope="module")
def large():
    """What every source is taken for: the hub is not asked."""
    return sources.load_config("random:large-v3")


@pytest.mark.parametrize("command", list(commands()))
def test_command(command, large, tmp_path, monkeypatch):
    words = shlex.split(command)
    arguments = words[words.index("train.py") + 1 :]
    assert (RECIPE / arguments[0]).is_file()
    for i, argument in enumerate(arguments):
        if re.match(r"--(data|manifest|features)_folder=", argument):
            arguments[i] = f"{argument.split('=')[0]}={tmp_path}"
        if argument.startswith("--text_file="):
            arguments[i] = f"--text_file={__file__}"
    if not any(a.startswith("--data_folder=") for a in arguments):
        arguments.append(f"--data_folder={tmp_path}")
    for folder in re.findall(r"folder: ([^,}]+)", command):
        (tmp_path / folder).mkdir(parents=True)
    arguments.append(f"--output_folder={tmp_path}")
    if "--test_only" in arguments:
        (tmp_path / "save/CKPT+0").mkdir(parents=True)
        (tmp_path / "save/CKPT+0/CKPT.yaml").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(sources, "load_config", lambda _: large)
    monkeypatch.chdir(RECIPE)
    hparams_file, run_opts, overrides = sb.parse_arguments(arguments)
    settings.check(hparams_file, overrides, run_opts)
