"""Preparation: what is kept, what is dropped and why, and when it is redone."""

import json
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import write_audio
from local import manifest, prepare, prepare_report
from local.files import LOCK

HEADER = "path\ttext\tsplit\tid\tstart\tend\n"


@pytest.fixture
def corpus(tmp_path):
    """A folder; call it to add rows to its manifest."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    listed = folder / "manifest.tsv"
    listed.write_text(HEADER)

    def add(*rows):
        with open(listed, "a", encoding="utf-8") as file:
            for row in rows:
                file.write("\t".join(map(str, row)) + "\n")
        return folder

    add.folder, add.listed = folder, listed
    return add


def clip(corpus, name, seconds=0.1, **options):
    write_audio(corpus.folder / name, seconds, **options)
    return name


def simple(corpus, n_train=6):
    """A whole corpus: train, valid and test."""
    for i in range(n_train):
        corpus((clip(corpus, f"{i}.wav", seed=i), f"문장 {i}", "train"))
    corpus((clip(corpus, "v.wav"), "검증", "valid"))
    corpus((clip(corpus, "t.wav"), "시험", "test"))
    return corpus.folder


def run(folder, out, **settings):
    """Prepares, and returns rows by split and the report."""
    settings = {"label_fits": lambda text: len(text) <= 20, **settings}
    prepare.prepare("manifest", folder, out, **settings)
    return outcome(out, folder)


def outcome(out, folder):
    splits = {
        path.stem: manifest.read(path, str(folder))
        for path in sorted(out.glob("*.csv"))
    }
    report = json.loads((out / prepare.REPORT).read_text(encoding="utf-8"))
    return splits, report


def snapshot(folder):
    return {
        path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


# What is dropped


def messy(corpus):
    """One clip for each reason, and clips that only look like trouble."""
    write_audio(corpus.folder / "zero.wav", seconds=0)
    (corpus.folder / "broken.wav").write_bytes(b"RIFF no more")
    (corpus.folder / "folder.wav").mkdir()
    soundfile.write(
        corpus.folder / "nan.wav", np.full(99, np.nan), 16000, subtype="FLOAT"
    )
    good, long = clip(corpus, "good.wav"), clip(corpus, "long.wav", 3.1)
    corpus(
        (good, "하나", "train", "good"),
        ("none.wav", "하나", "train", "none"),
        ("folder.wav", "하나", "train", "folder"),
        ("broken.wav", "하나", "train", "broken"),
        ("nan.wav", "하나", "test", "nan"),
        ("zero.wav", "하나", "train", "zero"),
        (good, "하나", "train", "after", 5, 6),
        (good, "하나", "train", "beyond", 0.05, 1),
        (good, "하나", "train", "backwards", 6, 5),
        ("lone.wav",),
        (good, "", "train", "silent"),
        (good, " \u200b ", "test", "blank"),
        (long, "하나", "train", "long"),
        (long, "하나", "test_far", "long-test"),
        (long, "하나", "train", "cut", 0, 2.5),
        (good, "가" * 21, "train", "wordy"),
        (good, "둘", "train", "good"),
        (good, "셋", "valid", "valid"),
    )
    return corpus.folder


REASONS = {
    "none": "missing_audio",
    "folder": "missing_audio",
    "broken": "unreadable_audio",
    "nan": "unreadable_audio",
    "zero": "empty_audio",
    "after": "empty_audio",
    "beyond": "unreadable_audio",
    "backwards": "empty_audio",
    "good": "duplicate_id",
    "long": "too_long",
    "long-test": "too_long",
    "wordy": "label_too_long",
    "lone": "missing_transcript",
}


@pytest.mark.parametrize("keep_no_speech", [True, False])
def test_each_reason_is_counted_and_listed(corpus, tmp_path, keep_no_speech):
    splits, report = run(
        messy(corpus),
        tmp_path / "out",
        max_duration_s=3.0,
        keep_no_speech=keep_no_speech,
    )
    kept = [row for rows in splits.values() for row in rows]
    wanted, silent = dict(REASONS), ["silent", "blank"]
    listed = {clip["id"]: clip["reason"] for clip in report["dropped_clips"]}
    if not keep_no_speech:
        wanted |= dict.fromkeys(silent, "empty_text")
    assert listed == wanted
    assert sorted(kept) == sorted(
        ["good", "cut", "valid"] + (silent if keep_no_speech else [])
    )
    assert report["dropped"] == Counter(wanted.values())
    assert {k: v["clips"] for k, v in report["kept"].items()} == {
        name: len(rows) for name, rows in splits.items()
    }
    assert splits["train"]["good"]["wrd"] == "하나"  # the first of the two
    assert splits["train"]["cut"]["duration"] == 2.5
    if keep_no_speech:
        assert splits["test"]["blank"]["wrd"] == ""


def test_the_list_names_split_file_and_error(corpus, tmp_path):
    folder = messy(corpus)
    _, report = run(folder, tmp_path / "out", max_duration_s=3.0)
    dropped = {clip["id"]: clip for clip in report["dropped_clips"]}
    assert dropped["nan"] == {
        "id": "nan",
        "split": "test",
        "reason": "unreadable_audio",
        "wav": str(folder / "nan.wav"),
        "detail": f"{folder}/nan.wav holds samples that are not numbers",
    }
    summary = prepare_report.summary(tmp_path / "out" / prepare.REPORT)
    assert "dropped, too_long: 2 (train 1, test_far 1)" in summary
    assert "train: 3 clips, 0.00 h" in summary


def test_leftover_markup_is_counted_and_kept(corpus, tmp_path):
    name = clip(corpus, "a.wav")
    folder = corpus(
        (name, "그거 (진짜", "train", "marked"),
        (name, "그거", "train", "plain"),
        (name, "둘", "valid", "v"),
        (name, "셋", "test", "t"),
    )
    splits, report = run(folder, tmp_path / "out")
    assert list(splits["train"]) == ["marked", "plain"]
    assert report["leftover_markup"] == 1
    assert report["leftover_markup_ids"] == ["marked"]


@pytest.mark.parametrize(
    "speed, kept",
    [(1.0, {"2.8", "3.0"}), (0.95, {"2.8"}), (0.93, set())],
)
def test_training_clips_grow_by_speed_perturbation(
    corpus, tmp_path, speed, kept
):
    for seconds in ("2.8", "3.0", "3.01"):
        name = clip(corpus, f"{seconds}.wav", float(seconds))
        corpus((name, "가", "train", seconds))
        corpus((name, "나", "test", f"test {seconds}"))
    corpus((clip(corpus, "v.wav"), "다", "valid"))
    splits, _ = run(
        corpus.folder,
        tmp_path / "out",
        max_duration_s=3.0,
        slowest_speed=speed,
    )
    assert set(splits["train"]) == kept
    assert set(splits["test"]) == {"test 2.8", "test 3.0"}


def test_nothing_left(corpus, tmp_path):
    folder = corpus(("a.wav", "가", "train"), ("b.wav", "나", "test"))
    with pytest.raises(ValueError) as error:
        run(folder, tmp_path / "out")
    assert str(error.value) == (
        f"{folder}: no clip is left of 2 found\n"
        f"  - 2 missing_audio, such as 'a', no audio file '{folder}/a.wav'"
    )
    assert not (tmp_path / "out" / prepare.REPORT).exists()
    corpus.listed.write_text(HEADER)
    with pytest.raises(ValueError, match="no clip is left of 0 found"):
        run(folder, tmp_path / "out")


# What is made right


def test_decomposed_text_is_composed(corpus, tmp_path):
    label = unicodedata.normalize("NFD", "닭볶음 값")
    folder = corpus((clip(corpus, "a.wav"), label, "train", "a"))
    splits, _ = run(folder, tmp_path / "out")
    assert [r["wrd"] for rows in splits.values() for r in rows.values()] == [
        "닭볶음 값"
    ]


def test_whatever_a_reader_gives_is_composed(corpus, tmp_path, monkeypatch):
    label = unicodedata.normalize("NFD", "값\t둘")
    wav = str(corpus.folder / clip(corpus, "a.wav"))
    found = [manifest.Utterance("a", wav, label, "test")]
    monkeypatch.setattr(prepare.readers, "read", lambda *_, **__: iter(found))
    splits, _ = run(simple(corpus), tmp_path / "out")
    assert splits["test"]["a"]["wrd"] == "값 둘"


@pytest.mark.parametrize("rate, channels", [(8000, 1), (44100, 2)])
def test_wrong_rate_and_stereo(corpus, tmp_path, rate, channels):
    simple(corpus)
    name = clip(corpus, "odd.wav", 1.5, rate=rate, channels=channels)
    folder = corpus((name, "가", "train", "odd"))
    splits, report = run(folder, tmp_path / "out")
    assert report["dropped"] == {}
    assert splits["train"]["odd"]["duration"] == 1.5
    assert splits["train"]["odd"]["wav"] == str(folder / "odd.wav")


# Held out


def many(corpus, n_texts=40, n_readings=3):
    name = clip(corpus, "a.wav")
    for reading in range(n_readings):
        for i in range(n_texts):
            corpus((name, f"문장 {i}", "train", f"{i}-{reading}"))
    return corpus.folder


def test_texts_are_held_out_with_all_their_readings(corpus, tmp_path):
    splits, report = run(many(corpus), tmp_path / "out", heldout_share=0.1)
    assert {k: len(v) for k, v in splits.items()} == {
        "train": 32 * 3,
        "valid": 4 * 3,
        "test": 4 * 3,
    }
    texts = {k: {r["wrd"] for r in v.values()} for k, v in splits.items()}
    assert not texts["train"] & (texts["valid"] | texts["test"])
    assert not texts["valid"] & texts["test"]
    again, _ = run(corpus.folder, tmp_path / "again", heldout_share=0.1)
    assert again == splits


def test_only_what_is_missing_is_held_out(corpus, tmp_path):
    corpus((clip(corpus, "t.wav"), "시험", "test_own", "t"))
    splits, _ = run(many(corpus), tmp_path / "out")
    assert set(splits) == {"train", "valid", "test_own"}
    assert list(splits["test_own"]) == ["t"]
    assert len(splits["valid"]) == 3


def test_at_least_one_text_is_held_out(corpus, tmp_path):
    splits, _ = run(many(corpus, 5), tmp_path / "out", heldout_share=0.001)
    sizes = {name: len(rows) for name, rows in splits.items()}
    assert sizes == {"train": 9, "valid": 3, "test": 3}


def test_a_split_without_a_clip_left_is_not_made_of_train(corpus, tmp_path):
    corpus(("gone.wav", "시험", "test"), ("gone too.wav", "검증", "valid"))
    splits, report = run(many(corpus, 5), tmp_path / "out")
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": 15,
        "valid": 0,
        "test": 0,
    }
    assert report["kept"]["test"]["clips"] == 0


def test_an_empty_test_beside_another_gets_no_manifest(
    corpus, tmp_path, caplog, monkeypatch
):
    corpus((clip(corpus, "o.wav"), "다른", "test_own"))
    corpus(("gone.wav", "시험", "test"), ("gone too.wav", "검증", "test_far"))
    splits, report = run(many(corpus, 5), tmp_path / "out")
    assert set(splits) == set(report["kept"]) == {"train", "valid", "test_own"}
    assert report["empty_tests"] == ["test", "test_far"]
    assert report["dropped_by_split"]["missing_audio"]["test_far"] == 1
    told = "no clip is left of test, test_far ("
    assert told in caplog.text and "no manifest is written" in caplog.text
    lines = prepare_report.summary(tmp_path / "out" / prepare.REPORT)
    assert "test_far: no clip is left, and no manifest\n" in lines
    monkeypatch.setattr(prepare.measured, "clips", None)
    assert run(corpus.folder, tmp_path / "out")[1] == report


def test_only_tests_without_a_clip_are_told_with_a_remedy(
    corpus, tmp_path, caplog
):
    corpus(("gone.wav", "시험", "test"))
    splits, report = run(many(corpus, 5), tmp_path / "out")
    assert splits["test"] == {} and report["empty_tests"] == []
    assert "no clip is left of test (" in caplog.text
    assert "this corpus alone needs a test: mend its clips" in caplog.text


def test_too_few_texts_to_hold_some_out(corpus, tmp_path, caplog):
    folder = corpus((clip(corpus, "a.wav"), "하나", "train"))
    splits, _ = run(folder, tmp_path / "out")
    assert {k: len(v) for k, v in splits.items()} == {
        "train": 0,
        "valid": 1,
        "test": 0,
    }
    assert "too few texts to hold some out: add clips" in caplog.text


# When it is done again


def test_a_second_call_does_nothing(corpus, tmp_path, monkeypatch):
    folder, out = simple(corpus), tmp_path / "out"
    first = run(folder, out)
    before = snapshot(out)
    with monkeypatch.context() as patched:
        patched.setattr(prepare.measured, "clips", None)
        assert run(folder, out) == first
    assert snapshot(out) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"max_duration_s": 5.0},
        {"slowest_speed": 0.9},
        {"text_form": "pronunciation"},
        {"columns": {"text": "text"}},
        {"keep_no_speech": False},
        {"heldout_share": 0.3},
    ],
)
def test_other_settings_prepare_again(corpus, tmp_path, settings):
    folder, out = simple(corpus), tmp_path / "out"
    _, report = run(folder, out)
    before = snapshot(out)
    _, changed = run(folder, out, **settings)
    assert snapshot(out)[out / "train.csv"] != before[out / "train.csv"]
    assert changed["settings"] != report["settings"]


def test_changed_transcripts_prepare_again(corpus, tmp_path):
    folder, out = simple(corpus), tmp_path / "out"
    run(folder, out)
    corpus((clip(corpus, "new.wav"), "새것", "train", "new"))
    assert "new" in run(folder, out)[0]["train"]
    same_size = corpus.listed.read_text().replace("새것", "헌것")
    corpus.listed.write_text(same_size)
    assert run(folder, out)[0]["train"]["new"]["wrd"] == "헌것"


@pytest.mark.parametrize("lost", ["train.csv", "test.csv"])
def test_a_lost_file_prepares_again(corpus, tmp_path, lost):
    folder, out = simple(corpus), tmp_path / "out"
    first = run(folder, out)
    (out / lost).unlink()
    assert run(folder, out) == first


@pytest.mark.parametrize("content", ["", '{"kept": ', "[]", "{}", "null"])
def test_a_broken_report_prepares_again(corpus, tmp_path, content):
    folder, out = simple(corpus), tmp_path / "out"
    first = run(folder, out)
    (out / prepare.REPORT).write_text(content)
    assert run(folder, out) == first


def test_a_split_that_is_gone_leaves_no_file(corpus, tmp_path):
    folder, out = simple(corpus), tmp_path / "out"
    corpus((clip(corpus, "o.wav"), "다른", "test_other", "o"))
    assert "test_other" in run(folder, out)[0]
    (out / "notes.csv").write_text("my own")
    listed = corpus.listed.read_text().replace("test_other", "test")
    corpus.listed.write_text(listed)
    run_again = {"label_fits": lambda text: True}
    prepare.prepare("manifest", folder, out, **run_again)
    names = {path.name for path in out.iterdir()} - {prepare.REPORT, LOCK}
    assert names == {"train.csv", "valid.csv", "test.csv", "notes.csv"}


def test_foreign_manifests_are_left_alone(corpus, tmp_path):
    folder, out = simple(corpus), tmp_path / "out"
    out.mkdir()
    (out / "test_mine.csv").write_text("mine")
    with pytest.raises(ValueError, match="test_mine.csv was not written"):
        run(folder, out)
    (out / "test_mine.csv").rename(tmp_path / "mine")
    run(folder, out)
    (tmp_path / "mine").rename(out / "test_mine.csv")
    corpus((clip(corpus, "new.wav"), "새것", "train", "new"))
    prepare.prepare("manifest", folder, out, label_fits=lambda text: True)
    assert (out / "test_mine.csv").read_text() == "mine"


# Where it is written


def test_the_corpus_folder_is_only_read(corpus, tmp_path):
    folder = messy(corpus)
    before = snapshot(folder)
    run(folder, tmp_path / "out", max_duration_s=3.0)
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", ["", "train.csv"])
def test_manifests_never_replace_the_corpus(corpus, name):
    """Whose own list may well be called train.csv."""
    folder = simple(corpus)
    rows = corpus.listed.read_text().replace("\t", ",")
    corpus.listed.unlink()
    (folder / "train.csv").write_text(rows)
    before = snapshot(folder)
    with pytest.raises(ValueError, match="inside the corpus folder"):
        run(folder / name, folder)
    if not name:
        with pytest.raises(ValueError, match="inside the corpus folder"):
            run(folder, folder / "results" / "manifests")
    assert snapshot(folder) == before


# The command


@pytest.mark.parametrize(
    "option, message",
    [
        ("--heldout_share=2", "heldout_share=2.0: give a number above 0"),
        ("--text_form=foo", "text_form='foo': choose spelling, pronunciation"),
        ("--max_duration_s=nan", "nan is not above 0"),
        ('--columns={"txt": "x"}', "txt is none of path"),
    ],
)
def test_wrong_values_of_the_command(
    corpus, tmp_path, monkeypatch, capsys, option, message
):
    words = ["prepare", "manifest", str(simple(corpus)), "--out"]
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "out"), option])
    with pytest.raises(SystemExit):
        prepare.main()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_decoded_is_no_label(corpus, tmp_path):
    folder = simple(corpus)
    corpus((clip(corpus, "bad.wav"), "\ufffd\ufffd 네", "train", "bad"))
    _, report = run(folder, tmp_path / "out")
    assert report["dropped"] == {"missing_transcript": 1}


def test_a_good_clip_takes_the_id_of_a_bad_one(corpus, tmp_path):
    folder = simple(corpus)
    corpus(("gone.wav", "하나", "train", "same"))
    corpus((clip(corpus, "good.wav"), "둘", "train", "same"))
    kept, report = run(folder, tmp_path / "out")
    assert kept["train"]["same"]["wrd"] == "둘"
    assert report["dropped"] == {"missing_audio": 1}


def test_command_line(corpus, tmp_path):
    simple(corpus)
    folder = corpus(("gone.wav", "가", "train"))
    done = subprocess.run(
        [sys.executable, "-m", "local.prepare", "manifest"]
        + [folder, "--out", tmp_path / "out"],
        cwd=Path(prepare.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        "train: 6 clips, 0.00 h",
        "valid: 1 clips, 0.00 h",
        "test: 1 clips, 0.00 h",
    ]
    assert "dropped, missing_audio: 1 (train 1)" in done.stdout
    splits, _ = outcome(tmp_path / "out", folder)
    assert set(splits) == {"train", "valid", "test"}


@pytest.mark.parametrize(
    "option, kept",
    [
        ([], 8),
        (["--drop_no_speech"], 7),
        (["--max_duration_s", "0.05"], None),
        (["--slowest_speed", "0.001", "--drop_no_speech"], 2),
    ],
)
def test_options_of_the_command(corpus, tmp_path, monkeypatch, option, kept):
    simple(corpus, 5)
    folder = corpus((clip(corpus, "s.wav"), "", "train"))
    words = ["prepare", "manifest", folder, "--out", tmp_path / "out", *option]
    words += ["--whisper_hub", "random:quickstart"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    if kept is None:
        with pytest.raises(SystemExit, match="no clip is left of 8"):
            prepare.main()
        return
    prepare.main()
    splits, _ = outcome(tmp_path / "out", folder)
    assert sum(map(len, splits.values())) == kept


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no does not exist"):
        run(tmp_path / "no", tmp_path / "out")
    assert not (tmp_path / "out").exists()
