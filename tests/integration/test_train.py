"""train.py: a run, its files, its modes, its ends."""

import json

import pytest
from outputs import checkpoints, curves, scores
from safetensors import safe_open

RANDOM = {"whisper_hub": "random:quickstart"}  # as in ``trained``


@pytest.fixture(scope="module")
def trained(run, small, tmp_path_factory):
    """A finished run of one epoch."""
    folder = tmp_path_factory.mktemp("trained")
    process = run(*small(folder))
    return folder, process


def tensors(checkpoint):
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def test_a_run_leaves_its_files(trained):
    folder, process = trained
    for name in (
        "hyperparams.yaml log.txt env.log train_log.txt train.py "
        "prepare_report.json wer_test.txt manifests/train.csv learning_rate.png "
        "manifests/valid.csv manifests/test.csv scores/test.jsonl "
        "scores/test.true_length.json scores/test.true_length.jsonl"
    ).split():
        assert (folder / name).is_file(), name
    picture = (folder / "learning_curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    flat = scores(folder)
    assert set(flat) == {
        *("CER", "CER_no_space", "WER", "sWER", "CER_raw", "WER_raw"),
        *("loss", "n_utterances", "n_reference_chars", "n_failed"),
        "text_policy",
    }
    lines = (folder / "scores/test.jsonl").read_text().splitlines()
    assert len(lines) == flat["n_utterances"] > 0
    assert set(json.loads(lines[0])) == {
        *("id", "reference", "hypothesis", "errors", "duration", "category"),
    }
    table = process.stdout.splitlines()
    assert any(line.split()[:1] == ["test"] for line in table)
    assert str(checkpoints(folder)[0]) in process.stdout


def test_the_other_metric_finds_a_checkpoint_too(trained, here):
    """And gives the same scores; of ready manifests."""
    folder, _ = trained
    names = "test", "test.true_length"
    before = [scores(folder, name) for name in names]
    ready = {"manifest_folder": folder / "manifests", **RANDOM}
    here(folder, "--test_only", best_metric="WER", **ready)
    assert [scores(folder, name) for name in names] == before


def test_audio_that_is_not_there_is_told_before_training(
    trained, here, tmp_path
):
    folder, _ = trained
    settings = {"manifest_folder": folder / "manifests", "data_folder": "."}
    with pytest.raises(SystemExit) as told:
        here(tmp_path, **settings)
    assert str(told.value).count("none of its audio is there") == 3
    assert not checkpoints(tmp_path)


def test_a_second_start_prepares_nothing_and_goes_on(trained, here):
    folder, _ = trained
    prepared = (folder / "manifests/train.csv").stat().st_mtime_ns
    brain = here(folder, number_of_epochs=2, **RANDOM)
    assert (folder / "manifests/train.csv").stat().st_mtime_ns == prepared
    assert [row["epoch"] for row in curves(folder)[1]] == [1, 2]
    assert "preparing" not in brain.printed
    assert len(checkpoints(folder)) <= 2  # best and newest


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16", "augment": True, "label_smoothing": 0.1},
        {"adaptation": "frozen_encoder", "test_beam_size": 2},
        {"gradient_checkpointing": True, "grad_accumulation_factor": 3},
        {
            "adaptation": "frozen_encoder",
            "precision": "bf16",
            "score_before_training": True,
            "best_metric": "WER",
            "num_workers": 1,
        },
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_modes(settings, here, tmp_path):
    here(tmp_path, **settings)
    (checkpoint,) = checkpoints(tmp_path)
    names = set(tensors(checkpoint))
    frozen = settings.get("adaptation") == "frozen_encoder"
    assert any(name.startswith("encoder") for name in names) == (not frozen)
    assert any(name.startswith("decoder") for name in names)
    untouched = [p.name for p in tmp_path.glob("scores/*untouched*.json")]
    assert untouched == ["test.untouched.json"] * (
        settings.get("score_before_training", False)
    )
    assert scores(tmp_path)["n_utterances"] > 0


@pytest.mark.parametrize(
    "yaml",
    ["train_large_v3", pytest.param("train_turbo", marks=pytest.mark.slow)],
)
def test_published_settings(yaml, run, corpus, tmp_path):
    run(
        f"hparams/{yaml}.yaml",
        *("--device=cpu", "--whisper_hub=random:quickstart"),
        *("--corpus=manifest", f"--data_folder={corpus}"),
        *(f"--output_folder={tmp_path}", "--number_of_epochs=1"),
        *("--max_new_tokens=8", "--num_workers=1", "--lr=0.001"),
    )
    assert scores(tmp_path)["n_utterances"] > 0
    assert scores(tmp_path, "test.untouched")["n_utterances"] > 0


def test_debug_leaves_no_checkpoint(here, tmp_path):
    here(tmp_path, "--debug")
    assert not checkpoints(tmp_path)


def test_failed_clips_are_scored_as_empty(trained, here, corpus):
    """A clip that vanished after the preparation."""
    folder, _ = trained
    row = (folder / "manifests/test.csv").read_text().splitlines()[1]
    clip = corpus / row.split(",")[2].replace("$data_root/", "")
    hidden = clip.rename(clip.with_suffix(".hidden"))
    try:
        here(folder, "--test_only", **RANDOM)
    finally:
        hidden.rename(clip)
    assert scores(folder)["n_failed"] == 1
    lines = (folder / "scores/test.jsonl").read_text().splitlines()
    failed = [r for r in map(json.loads, lines) if r["id"] == clip.stem]
    assert failed[0]["hypothesis"] == ""


def test_all_settings_problems_come_before_any_work(run, small, tmp_path):
    out = tmp_path / "out"
    process = run(
        *small(out, adaptation="lorra", lr=-1, best_metric="BLEU"),
        "--lernrate=3",
        "--opt_class={wieght_decay: 0.1}",
        check=False,
    )
    assert process.returncode != 0
    message = process.stderr
    for part in (
        "5 problem(s)",
        "adaptation='lorra': choose full, frozen_encoder",
        "lr=-1",
        "best_metric='BLEU': choose CER, WER",
        "lernrate: no such setting",
        "opt_class.wieght_decay: no such setting; did you mean weight_decay",
    ):
        assert part in message
    assert not out.exists()


def test_checkpoints_of_another_model_are_refused(trained, here):
    folder, _ = trained
    with pytest.raises(SystemExit, match="trained with adaptation='full'"):
        here(folder, adaptation="frozen_encoder", **RANDOM)


def test_other_training_data_in_one_folder_is_refused(trained, here):
    folder, _ = trained
    other = {"train_csv": "test.csv", "valid_csv": "train.csv", **RANDOM}
    with pytest.raises(SystemExit, match="a run on other training clips"):
        here(folder, number_of_epochs=3, **other)
    assert "epoch: 3," not in (folder / "train_log.txt").read_text()


def test_testing_what_was_never_trained_is_refused(here, tmp_path):
    with pytest.raises(SystemExit, match="no checkpoint"):
        here(tmp_path / "none", "--test_only")


@pytest.mark.slow
def test_compile(run, small, tmp_path):
    """SpeechBrain's --compile, which wraps the whole module."""
    run(*small(tmp_path), "--compile")
    assert scores(tmp_path)["n_utterances"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("adaptation", ["full", "frozen_encoder"])
def test_compiled_layers_learn_the_same(adaptation, run, small, here, tmp_path):
    """In many shapes, without so many variants that some are not compiled."""
    settings = {"adaptation": adaptation, "number_of_epochs": 2, "lr": 0.003}
    settings["score_before_training"] = True
    here(tmp_path / "plain", **settings)
    compiled = small(tmp_path / "compiled", compile_layers=True, **settings)
    process = run(*compiled)
    assert "recompile_limit" not in process.stderr
    plain, compiled = (scores(tmp_path / n) for n in ("plain", "compiled"))
    assert compiled["loss"] == pytest.approx(plain["loss"], rel=1e-4)
