"""evaluate.py: the scores of train.py, of many models on many test sets."""

import contextlib
import csv
import io
import json
import shutil
import sys
from unittest import mock

import evaluate
import export
import numpy
import pytest
import soundfile
from local import manifest
from outputs import checkpoints, scores

TWO = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")


@pytest.fixture(scope="module")
def trained(here, tmp_path_factory):
    """The output folder of a run of one epoch, tested at its end."""
    folder = tmp_path_factory.mktemp("trained") / "1986"
    here(folder, best_metric="WER")
    return folder


@pytest.fixture(scope="module")
def bad_csv(trained, corpus, tmp_path_factory):
    """A test set in which four of five clips are in bad shape.

    Vanished, corrupt, longer than the model hears, and without speech; its
    rows name speakers and categories.
    """
    folder = tmp_path_factory.mktemp("bad")
    rows = manifest.read(trained / "manifests/test.csv", str(corpus))
    good = next(iter(rows.values()))
    (folder / "corrupt.wav").write_bytes(b"RIFF, and no more")
    clips = [
        ("good", good["wav"], "", "", good["wrd"]),
        ("corrupt", folder / "corrupt.wav", "", "", "네"),
        ("no_speech", good["wav"], 0, 0.3, ""),
        ("too_long", folder / "long.flac", "", "", "길다"),
        ("vanished", folder / "vanished.wav", "", "", "없다"),
    ]
    soundfile.write(folder / "long.flac", numpy.zeros(16000 * 6), 16000)
    with open(folder / "test.csv", "w", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(manifest.COLUMNS)
        for name, wav, start, stop, text in clips:
            cut = start, stop, "ours", f"of {name}"
            writer.writerow([name, 1.0, wav, f"by {name}", text, *cut])
    return folder / "test.csv"


@pytest.fixture(scope="module")
def score(corpus):
    """Runs main() here; returns its evaluation.json and what it printed."""

    def start(out, models, manifests, *flags, **options):
        options = {"device": "cpu", "data_folder": corpus, **options}
        arguments = [
            *(f"--model={one}" for one in models),
            *(f"--manifest={one}" for one in manifests),
            *(f"--{name}={value}" for name, value in options.items()),
            f"--out={out}",
            *flags,
        ]
        printed = io.StringIO()
        with contextlib.ExitStack() as stack:
            argv = mock.patch.object(sys, "argv", ["evaluate.py", *arguments])
            stack.enter_context(argv)
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            evaluate.main()
        text = (out / "evaluation.json").read_text(encoding="utf-8")
        return json.loads(text), printed.getvalue()

    return start


@pytest.fixture(scope="module")
def copy(trained, tmp_path_factory):
    """A Hugging Face folder of the run's best checkpoint."""
    folder = tmp_path_factory.mktemp("copy") / "exported"
    export.export(str(trained), folder, "hf", "float32")
    return folder


@pytest.fixture(scope="module")
def scored(trained, hub, copy, bad_csv, score, tmp_path_factory):
    """A base model, a run and its exported copy.

    On a good and a bad test set, and one that is heard as English.
    """
    out = tmp_path_factory.mktemp("scored")
    (out / "scores").mkdir()
    (out / "scores/mine.txt").write_text("foreign")
    evaluation, printed = score(
        out,
        [f"base={hub}", trained, copy],
        [trained / "manifests/test.csv", bad_csv],
        english=trained / "manifests/test.csv",
        probes=2,
        resamples=50,
    )
    return out, evaluation, printed


def names(trained, bad_csv):
    """Of the run, and of the two manifests called test.csv."""
    of_run = f"{trained.parent.name}-1986"
    return of_run, "manifests-test", f"{bad_csv.parent.name}-test"


def result(evaluation, model, test_set):
    (found,) = (
        one
        for one in evaluation["results"]
        if (one["model"], one["test_set"]) == (model, test_set)
    )
    return found


def test_scores_are_those_of_train_and_those_of_the_copy(
    scored, trained, bad_csv
):
    """With the precision, search and bound of the run, told by its folder."""
    out, evaluation, _ = scored
    run, good, _ = names(trained, bad_csv)
    expected = (trained / "scores/test.jsonl").read_text(encoding="utf-8")
    for model in (run, "exported"):
        assert scores(out, f"{model}/{good}") == scores(trained)
        path = out / f"scores/{model}/{good}.jsonl"
        assert path.read_text(encoding="utf-8") == expected
    settings = evaluation["settings"]
    assert settings["precision"] == "fp32" and settings["beam_size"] == 1
    assert settings["max_new_tokens"] == 8
    assert settings["heard as English"] == "english_test"


def test_every_model_is_scored_on_every_set(scored, trained, bad_csv):
    _, evaluation, _ = scored
    run, *sets = names(trained, bad_csv)
    found = [(r["model"], r["test_set"]) for r in evaluation["results"]]
    sets.append("english_test")
    assert found == [(m, s) for m in ("base", run, "exported") for s in sets]
    for one in evaluation["results"]:
        assert 0 < one["real_time_factor"] < 100
        assert one["scores"]["loss"] > 0
        low, high = one["analysis"]["intervals"]["CER"]
        assert low <= one["scores"]["CER"] <= high or low == high
    texts = [
        [u["hypothesis"] for u in result(evaluation, m, sets[0])["utterances"]]
        for m in ("base", run)
    ]
    assert texts[0] != texts[1]


def test_later_models_are_compared_with_the_first(scored, trained, bad_csv):
    _, evaluation, _ = scored
    run, *sets = names(trained, bad_csv)
    sets.append("english_test")
    found = [
        (pair["test_set"], pair["model_a"], pair["model_b"])
        for pair in evaluation["paired"]
    ]
    assert found == [(s, "base", m) for s in sets for m in (run, "exported")]
    for pair in evaluation["paired"]:
        rates = [
            result(evaluation, pair[m], pair["test_set"])["scores"]["CER"]
            for m in ("model_a", "model_b")
        ]
        assert pair["CER"]["difference"] == pytest.approx(rates[1] - rates[0])


def test_the_english_set_is_heard_as_english(scored, trained, bad_csv):
    """Here the same clips as the good set, so that nothing else differs."""
    _, evaluation, _ = scored
    _, good, _ = names(trained, bad_csv)
    korean, english = (
        result(evaluation, "base", name)["scores"]["loss"]
        for name in (good, "english_test")
    )
    assert korean != english


def test_bad_clips_are_counted_listed_and_scored_as_empty(
    scored, trained, bad_csv
):
    _, evaluation, _ = scored
    run, _, bad = names(trained, bad_csv)
    found = result(evaluation, run, bad)
    failed = ["corrupt", "too_long", "vanished"]
    assert found["scores"]["n_failed"] == 3
    assert found["scores"]["n_utterances"] == 5
    assert found["analysis"]["failed"] == failed
    for one in found["utterances"]:
        assert (one["hypothesis"] == "") == (one["id"] in failed), one
        assert ("failed" in one["flags"]) == (one["id"] in failed)
        assert one["speaker"] == f"by {one['id']}"
        assert one["category"] == f"of {one['id']}"
    cut = found["utterances"][2]
    assert (cut["id"], cut["start"], cut["stop"]) == ("no_speech", 0, 0.3)
    assert cut["n_chars"] == 0


def test_probes_and_curves(scored, trained, bad_csv):
    _, evaluation, _ = scored
    run, *_ = names(trained, bad_csv)
    probed = {(p["model"], p["kind"]) for p in evaluation["probes"]}
    kinds = "silence", "noise", "music"
    models = "base", run, "exported"
    assert probed == {(m, kind) for m in models for kind in kinds}
    curves = {one["model"]: one["curves"] for one in evaluation["runs"]}
    ours = str(trained / "curves.jsonl")
    assert curves == {"base": None, run: ours, "exported": None}


def test_files_and_what_is_printed(scored, trained, bad_csv):
    out, _, printed = scored
    for name in ("report.html", "scores.csv", "scores.md", "evaluation.json"):
        assert (out / name).stat().st_size > 0
        assert str(out / name) in printed
    assert (out / "scores.md").read_text(encoding="utf-8") in printed
    page = (out / "report.html").read_text(encoding="utf-8")
    assert names(trained, bad_csv)[0] in page
    assert (out / "scores/mine.txt").read_text() == "foreign"


def test_a_checkpoint_is_its_run(trained, score, tmp_path):
    """Kept elsewhere, and at other batches."""
    moved = shutil.copytree(checkpoints(trained)[0], tmp_path / "CKPT+moved")
    evaluation, _ = score(
        tmp_path / "out",
        [f"again={moved}"],
        [trained / "manifests/test.csv"],
        max_new_tokens=8,
        precision="fp32",
        batch_size=2,
        probes=0,
        audio="none",
        resamples=5,
    )
    found = result(evaluation, "again", "test")["scores"]
    expected = scores(trained)
    assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-4)
    assert found == expected
    assert evaluation["paired"] == evaluation["probes"] == []


@pytest.mark.slow
@pytest.mark.parametrize("base_precision", ["fp32", "bf16", "int8", "int4"])
def test_a_run_of_adapters_beside_its_base(
    here, hub, score, tmp_path, base_precision
):
    """The scores and texts of its own test, to the byte."""
    run = tmp_path / "run"
    precision = "bf16" if base_precision == "bf16" else "fp32"
    computed = {"precision": precision, "eval_precision": precision}
    options = {"base_precision": base_precision, "lr": 0.01, **computed}
    here(run, adaptation="lora", **options)
    manifest = run / "manifests/test.csv"
    batches = {"batch_size": 32, "probes": 0, "resamples": 20}
    out = tmp_path / "out"
    evaluation, _ = score(out, [f"mine={run}"], [manifest], "--base", **batches)
    for name in ("test.json", "test.jsonl"):
        theirs, ours = run / "scores" / name, out / "scores/mine" / name
        assert theirs.read_bytes() == ours.read_bytes()
    (paired,) = evaluation["paired"]
    assert (paired["model_a"], paired["model_b"]) == ("base", "mine")
    assert {"CER", "WER"} <= paired.keys()
    losses = [
        result(evaluation, name, "test")["scores"]["loss"]
        for name in ("base", "mine")
    ]
    assert losses[0] != losses[1]


def test_problems_end_it_before_anything_is_written(score, tmp_path):
    with pytest.raises(SystemExit, match="evaluate.py: 2 problem"):
        score(tmp_path / "out", ["/no/such"], ["x.csv"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_score_as_one(scored, trained, bad_csv, corpus, run):
    out, evaluation, _ = scored
    process = run(
        *(f"--model={trained}", f"--manifest={trained}/manifests/test.csv"),
        *(f"--manifest={bad_csv}", f"--data_folder={corpus}"),
        *("--device=cpu", "--batch_size=2", "--probes=1"),
        f"--out={out / 'two'}",
        script="evaluate.py",
        launcher=TWO,
    )
    assert process.stdout.count("Text policy") == 1
    text = (out / "two/evaluation.json").read_text(encoding="utf-8")
    two = json.loads(text)
    assert two["settings"]["processes"] == 2
    for one in two["results"]:
        alone = result(evaluation, one["model"], one["test_set"])
        losses = [found["scores"].pop("loss") for found in (one, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert one["scores"] == alone["scores"]
        assert one["utterances"] == alone["utterances"]
