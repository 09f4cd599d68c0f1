"""Runs of the recipe: as a user starts them, a subprocess each; and in here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import recorded
from local import random_model

RECIPE = Path(__file__).parents[2] / "recipes/Korean/ASR/whisper"
N_SENTENCES = 40


@pytest.fixture(scope="session")
def recipe():
    """The folder that train.py is started in."""
    return RECIPE


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A spoken corpus of 40 short clips."""
    folder = tmp_path_factory.mktemp("corpus")
    command = [sys.executable, "-m", "local.synthesize", str(folder)]
    command += [f"--n_sentences={N_SENTENCES}"]
    subprocess.run(command, cwd=RECIPE, check=True)
    return folder


@pytest.fixture(scope="session")
def run():
    """Starts train.py; returns the finished process."""

    def start(
        *arguments,
        script="train.py",
        launcher=(),
        check=True,
        timeout=1200,
    ):
        process = subprocess.run(
            [sys.executable, *launcher, script, *map(str, arguments)],
            cwd=RECIPE,
            env={**os.environ, "TQDM_DISABLE": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and process.returncode:
            told = process.stdout[-4000:] + process.stderr[-4000:]
            pytest.fail(f"{process.args}\n{told}")
        return process

    return start


@pytest.fixture(scope="session")
def small(corpus):
    """Arguments of a run that takes seconds."""

    def arguments(output_folder, **settings):
        settings = {
            "data_folder": corpus,
            "output_folder": output_folder,
            "number_of_epochs": 1,
            "batch_size": 8,
            "max_new_tokens": 8,
            "precision": "fp32",
            **settings,
        }
        return [
            "hparams/quickstart.yaml",
            "--device=cpu",
            *(f"--{name}={value}" for name, value in settings.items()),
        ]

    return arguments


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A folder of ``random:quickstart``, built once for many runs."""
    folder = tmp_path_factory.mktemp("hub") / "quickstart"
    return random_model.build_folder("quickstart", folder, seed=1986)


@pytest.fixture(scope="session")
def here(small, hub):
    """Runs train.py in this process; returns its ``recorded.Recorded``."""

    def start(output_folder, *flags, stop_after_step=None, **settings):
        settings = {"whisper_hub": hub, **settings}
        arguments = [*small(output_folder, **settings), *flags]
        return recorded.start(*arguments, stop_after_step=stop_after_step)

    return start
