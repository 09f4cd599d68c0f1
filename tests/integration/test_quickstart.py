"""The quickstart learns to listen: the whole of it, as `make quickstart`."""

import csv
import json
import subprocess
import sys

import pytest
from outputs import checkpoints, scores

TESTS = "test", "test.true_length"


@pytest.fixture(scope="module")
def quickstart(run, recipe, tmp_path_factory):
    """The arguments of a finished quickstart, and its output folder."""
    corpus, folder = (tmp_path_factory.mktemp(n) for n in ("spoken", "run"))
    command = [sys.executable, "-m", "local.synthesize", str(corpus)]
    subprocess.run(command, cwd=recipe, check=True)
    arguments = [
        *("hparams/quickstart.yaml", "--device=cpu"),
        *(f"--data_folder={corpus}", f"--output_folder={folder}"),
    ]
    run(*arguments)
    return arguments, folder


@pytest.fixture(scope="module")
def again(quickstart, run):
    """Its folder, its scores, and a start that tests it again.

    On one more test set, too: each clip with the audio of another.
    """
    arguments, folder = quickstart
    before = [scores(folder, name) for name in TESTS]
    with open(folder / "manifests/test.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    wavs = [row["wav"] for row in rows]
    for row, wav in zip(rows, wavs[7:] + wavs[:7]):
        row["wav"] = wav
    path = folder / "manifests/test_shuffled.csv"
    with open(path, "w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return folder, before, run(*arguments, "--test_only")


def rate(records):
    errors = sum(record["errors"] for record in records)
    return 100 * errors / sum(len(record["reference"]) for record in records)


def test_it_hears_new_sentences_and_a_new_voice(quickstart):
    """At full context, and at each clip's own."""
    _, folder = quickstart
    assert scores(folder)["CER"] <= 10
    assert scores(folder, "test.true_length")["CER"] <= 12
    assert len(checkpoints(folder)) <= 2
    lines = (folder / "scores/test.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for voice, limit in (("known voice", 10), ("new voice", 20)):
        of_voice = [r for r in records if r["category"] == voice]
        assert len(of_voice) >= 60
        assert rate(of_voice) <= limit, voice
    syllables = set("".join(r["reference"] for r in records)) - {" "}
    assert len(syllables) >= 120


def test_with_the_audio_of_another_clip_it_fails(again):
    """It listens: a model that only knew the language would not notice."""
    folder, *_ = again
    assert scores(folder, "test_shuffled")["CER"] >= 55


def test_only_prints_the_same_score_to_the_last_digit(again):
    folder, before, process = again
    assert [scores(folder, name) for name in TESTS] == before
    assert all(f"{flat['CER']:.2f}" in process.stdout for flat in before)
