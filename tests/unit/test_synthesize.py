"""The quickstart's corpus: what is planned, and what is heard.

In: a small number of sentences.
Out: a corpus in a temporary folder; the full plan without a sound.
"""

import csv
import sys

import pytest
import soundfile
from local import synthesize


@pytest.fixture(scope="module")
def clips():
    return synthesize.plan()


def texts(clips, split):
    return [clip.text for clip in clips if clip.split == split]


def rows_of(folder):
    with open(folder / "manifest.tsv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def contents_of(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_split_sizes(clips):
    assert len(texts(clips, "train")) == 1250
    assert len(texts(clips, "valid")) == 60
    assert len(texts(clips, "test")) == 190
    assert len({clip.id for clip in clips}) == 1500


def test_held_out_sentences_are_new_but_their_words_are_not(clips):
    assert len({clip.text for clip in clips}) == len(clips)
    known = set(" ".join(texts(clips, "train")).split())
    held_out = texts(clips, "valid") + texts(clips, "test")
    assert set(" ".join(held_out).split()) <= known


def test_the_test_text_has_many_syllables(clips):
    syllables = set("".join(texts(clips, "test"))) - {" "}
    assert len(syllables) >= 120


def test_the_held_out_voice_is_heard_in_the_test_set_only(clips):
    splits = [c.split for c in clips if c.speaker == synthesize.HELD_OUT_VOICE]
    assert splits == ["test"] * 60
    speakers = {c.speaker for c in clips if c.split == "test"}
    assert speakers == {*synthesize.VOICES, synthesize.HELD_OUT_VOICE}


def test_texts_are_hangul_with_single_spaces(clips):
    characters = set("".join(clip.text for clip in clips)) - {" "}
    assert all("가" <= character <= "힣" for character in characters)
    assert all(c.text == " ".join(c.text.split()) for c in clips)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("삼촌이", "삼촌가"),
        ("누나가", "누나이"),
        ("삼촌은", "삼촌는"),
        ("이모는", "이모은"),
        ("책을", "책를"),
        ("편지를", "편지을"),
    ],
)
def test_particles(clips, right, wrong):
    corpus = "\n".join(f" {clip.text} " for clip in clips)
    assert f" {right} " in corpus
    assert f" {wrong} " not in corpus


def test_seeds_differ_and_repeat(clips):
    assert synthesize.plan(200, seed=1) == synthesize.plan(200, seed=1)
    assert synthesize.plan(200, seed=1) != synthesize.plan(200, seed=2)


@pytest.mark.parametrize("n_sentences", [12, 13, 40, 300])
def test_small_plans(n_sentences):
    clips = synthesize.plan(n_sentences)
    assert len(clips) == n_sentences
    assert {clip.split for clip in clips} == {"train", "valid", "test"}
    assert len({clip.text for clip in clips}) == n_sentences


def test_too_few_sentences_are_refused():
    with pytest.raises(ValueError, match="n_sentences=11"):
        synthesize.plan(11)


def test_too_few_syllables_are_refused(monkeypatch):
    monkeypatch.setattr(synthesize, "MIN_TEST_SYLLABLES", 10000)
    monkeypatch.setattr(synthesize, "N_TEST", 1000)
    with pytest.raises(ValueError, match="distinct syllables"):
        synthesize.plan(1500)


def test_a_small_corpus_is_the_same_twice(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        synthesize.synthesize(folder, n_sentences=12)
    assert contents_of(first) == contents_of(second)
    rows = rows_of(first)
    assert list(rows[0]) == list(synthesize.COLUMNS)
    planned = [(c.id, c.text) for c in synthesize.plan(12)]
    assert [(row["id"], row["text"]) for row in rows] == planned
    for row in rows:
        info = soundfile.info(first / row["path"])
        assert (info.samplerate, info.channels) == (16000, 1)
        assert info.subtype == "PCM_16"
        assert 1.0 <= info.duration <= synthesize.MAX_DURATION_S
        samples, _ = soundfile.read(first / row["path"])
        assert 0.1 < abs(samples).max() < 1


def test_a_finished_corpus_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(
        synthesize, "_speak_in_parallel", lambda clips, out: None
    )
    synthesize.synthesize(tmp_path, n_sentences=12)
    before = contents_of(tmp_path)
    manifest = (tmp_path / "manifest.tsv").stat()
    synthesize.synthesize(tmp_path, n_sentences=12)
    assert (tmp_path / "manifest.tsv").stat() == manifest
    synthesize.synthesize(tmp_path, n_sentences=13)
    assert contents_of(tmp_path) != before
    assert len(rows_of(tmp_path)) == 13


def test_an_interrupted_corpus_has_no_manifest(tmp_path, monkeypatch):
    def interrupt(clips, out):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        synthesize, "_speak_in_parallel", lambda clips, out: None
    )
    synthesize.synthesize(tmp_path, n_sentences=12)
    monkeypatch.setattr(synthesize, "_speak_in_parallel", interrupt)
    with pytest.raises(KeyboardInterrupt):
        synthesize.synthesize(tmp_path, n_sentences=13)
    assert not (tmp_path / "manifest.tsv").exists()


def test_a_foreign_manifest_is_not_overwritten(tmp_path):
    (tmp_path / "manifest.tsv").write_text("mine")
    with pytest.raises(FileExistsError, match="another folder"):
        synthesize.synthesize(tmp_path, n_sentences=12)
    assert (tmp_path / "manifest.tsv").read_text() == "mine"


def test_errors_name_the_folder_and_the_package(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match=str(file)):
        synthesize.synthesize(file, n_sentences=12)
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(ModuleNotFoundError, match="pip install espeakng-load"):
        synthesize.synthesize(tmp_path / "out", n_sentences=12)
