"""The hparams files: alike, short, runnable, and used to the last key."""

import csv
import re
from pathlib import Path

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from local import model, settings

from speechbrain.utils.run_opts import RunOptions

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/Korean/ASR/whisper"
FILES = sorted(RECIPE.glob("hparams/*.yaml"))
TRAIN = (RECIPE / "train.py").read_text(encoding="utf-8")
OBJECTS = "# === Objects: identical in every hparams file ===\n"
KEY = re.compile(r"^(\w+):(.*)$", re.M)

every_file = pytest.mark.parametrize(
    "path", FILES, ids=[path.stem for path in FILES]
)


def read(path):
    return path.read_text(encoding="utf-8")


def header(path):
    """Comment lines at the head of the file."""
    lines = []
    for line in read(path).splitlines():
        if not line.startswith("#"):
            break
        lines.append(line)
    return lines


def top_level(path):
    """Key to what stands on its line."""
    return dict(KEY.findall(read(path)))


def scalars(path):
    above, _ = read(path).split(OBJECTS)
    return {key for key, _ in KEY.findall(above)}


def test_there_are_files():
    assert {"quickstart", "train_large_v3", "train_turbo"} <= {
        path.stem for path in FILES
    }


@every_file
def test_header_gives_the_command(path):
    command = f"python train.py hparams/{path.name}"
    assert any(
        re.match(rf"# +{re.escape(command)}( |$)", line)
        for line in header(path)
    )


@every_file
def test_length(path):
    assert len(read(path).splitlines()) <= 240


@every_file
def test_nothing_is_commented_out(path):
    for line in read(path).splitlines()[len(header(path)) :]:
        comment = re.match(r"\s*#\s*(.*)", line)
        if comment:
            assert not re.match(r"-?\s*\w+:(\s|$)|- |!", comment[1]), line


def test_objects_are_the_same_in_every_file():
    assert all(read(path).count(OBJECTS) == 1 for path in FILES)
    assert len({read(path).split(OBJECTS)[1] for path in FILES}) == 1


def test_keys_are_the_same_in_every_file_and_in_one_order():
    assert len({tuple(top_level(path)) for path in FILES}) == 1


@every_file
def test_every_key_stands_once(path):
    keys = [key for key, _ in KEY.findall(read(path))]
    assert len(keys) == len(set(keys))


@every_file
def test_every_scalar_has_a_rule_and_every_rule_a_scalar(path):
    assert scalars(path) == set(settings.RULES)


@every_file
def test_loads_without_building_the_model(path, tmp_path, monkeypatch):
    def built(*_, **__):
        raise AssertionError("the model is built while the file is read")

    monkeypatch.setattr(model.Whisper, "__init__", built)
    state = torch.random.get_rng_state()
    with open(path, encoding="utf-8") as file:
        hparams = load_hyperpyyaml(
            file,
            {
                "data_folder": str(tmp_path),
                "output_folder": str(tmp_path / "out"),
            },
        )
    torch.random.set_rng_state(state)
    assert hparams["save_folder"] == f"{tmp_path}/out/save"
    assert hparams["data_folder"] == str(tmp_path)
    assert callable(hparams["whisper"])
    with pytest.raises(AssertionError, match="while the file is read"):
        hparams["whisper"]()


@every_file
def test_output_folder_is_named_after_the_file(path):
    value = top_level(path)["output_folder"].strip()
    assert value == f"!ref results/{path.stem}/<seed>"


@every_file
def test_every_key_is_used(path):
    """As SpeechBrain's tests/utils/check_yaml.py looks for it."""
    text = read(path)
    run_options = RunOptions().as_dict()
    unused = []
    for key, value in top_level(path).items():
        used = (
            re.search(rf"!ref [^\n]*<{key}[\[>]", text)
            or f'["{key}"]' in TRAIN
            or re.search(rf"(hparams|modules)\.{key}\b", TRAIN)
            or re.search(rf'attr\(self\.hparams, "{key}"', TRAIN)
            or f'hparams.get("{key}"' in TRAIN
            or key in run_options
            or "!apply" in value
        )
        if not used:
            unused.append(key)
    assert unused == []


def rows():
    with open(ROOT / "tests/recipes/Korean.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_file_has_a_row_for_speechbrains_recipe_tests():
    paths = [path.relative_to(ROOT) for path in RECIPE.rglob("*.yaml")]
    yamls = [str(path) for path in paths if "results" not in path.parts]
    assert sorted(row["Hparam_file"] for row in rows()) == sorted(yamls)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["Hparam_file"])
def test_rows(row):
    assert None not in row and None not in row.values()
    assert row["Task"] and row["test_debug_flags"]
    assert row["Dataset"] == "Korean"
    for column in ("Script_file", "Hparam_file", "Data_prep_file"):
        assert (ROOT / row[column]).is_file(), row[column]
    readme = read(ROOT / row["Readme_file"])
    for column in ("Result_url", "HF_repo"):
        assert row[column] in readme
    known = set(top_level(ROOT / row["Hparam_file"]))
    known |= set(RunOptions().as_dict())
    flags = re.findall(r"--(\w+)", row["test_debug_flags"])
    assert set(flags) <= known
    assert "train.py" in row["test_debug_checks"]
