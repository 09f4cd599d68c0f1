"""Preparation of what nobody would call a corpus, on a disk that is full."""

import builtins
import errno
import json
import os
import re

import pytest
from conftest import write_audio
from local import audio, clip_store, manifest, prepare, prepare_report
from local.files import LOCK

LISTED = "manifest.jsonl"


@pytest.fixture
def corpus(tmp_path):
    """A folder; call it to write its list of clips."""
    folder = tmp_path / "corpus"

    def write(*rows):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / LISTED).write_text(lines)
        return folder

    write_audio(folder / "a.wav", 0.1)
    return write


def row(identifier, label="하나", path="a.wav", split="train", **more):
    return {
        "id": identifier,
        "text": label,
        "path": path,
        "split": split,
    } | more


WHOLE = [row("t"), row("v", "둘", split="valid"), row("s", "셋", split="test")]


def run(folder, out, **settings):
    """Prepares; the IDs of train, and the report."""
    settings = {"label_fits": lambda text: len(text) < 99, **settings}
    prepare.prepare("manifest", folder, out, **settings)
    report = json.loads((out / prepare.REPORT).read_text(encoding="utf-8"))
    rows = manifest.read(out / "train.csv", str(folder))
    return list(rows), report


def reasons(report):
    return {clip["id"]: clip["reason"] for clip in report["dropped_clips"]}


@pytest.mark.parametrize(
    "identifier",
    ["a\nb", "a\rb", "a\r\nb", 'a,"b"', "a\0b", "$x", "가 나", "'"],
)
def test_any_id(corpus, tmp_path, identifier):
    rows, report = run(corpus(*WHOLE, row(identifier)), tmp_path / "out")
    assert rows == ["t", identifier]
    assert report["dropped"] == {}


@pytest.mark.parametrize(
    "odd, reason",
    [
        ({"path": "a\0.wav"}, "missing_audio"),
        ({"path": "x" * 5000}, "missing_audio"),
        ({"path": "../corpus"}, "missing_audio"),
        ({"path": "\ud800.wav"}, "name_not_unicode"),
        ({"speaker": "\udcb0"}, "name_not_unicode"),
        ({"text": "가나다 " * 250_000}, "label_too_long"),
        ({"text": None}, "missing_transcript"),
        ({"text": "\ufffd"}, "missing_transcript"),
        ({"start": 1e9, "end": 1e10}, "empty_audio"),
        ({"start": "x", "end": 1}, "empty_audio"),
    ],
)
def test_an_odd_clip_is_dropped_by_name(corpus, tmp_path, odd, reason):
    folder = corpus(*WHOLE, row("odd") | odd, row("good"))
    rows, report = run(folder, tmp_path / "out")
    assert rows == ["t", "good"]
    assert reasons(report) == {"odd": reason}
    assert report["dropped_by_split"] == {reason: {"train": 1}}


def test_an_id_that_is_no_unicode(corpus, tmp_path):
    rows, report = run(corpus(*WHOLE, row("\udcb0x")), tmp_path / "out")
    assert rows == ["t"]
    assert reasons(report) == {"\\udcb0x": "name_not_unicode"}


def test_a_file_that_vanishes(corpus, tmp_path, monkeypatch):
    """Between being looked for and being opened."""

    def without_file(read):
        def wrapper(path, *cut):
            if not str(path).endswith("a.wav"):
                os.unlink(path)
            return read(path, *cut)

        return wrapper

    for name in ("b.wav", "c.pcm"):
        (tmp_path / "corpus" / name).write_bytes(b"1234")
    for read in (audio._read_container, audio._read_headerless):
        monkeypatch.setattr(audio, read.__name__, without_file(read))
    folder = corpus(*WHOLE, row("b", path="b.wav"), row("c", path="c.pcm"))
    rows, report = run(folder, tmp_path / "out")
    assert rows == ["t"]
    assert reasons(report) == {"b": "unreadable_audio", "c": "missing_audio"}


def test_a_header_that_promises_too_much(corpus, tmp_path, monkeypatch):
    def huge(path, start, stop):
        raise MemoryError("Unable to allocate 1. TiB")

    folder = corpus(*WHOLE)
    monkeypatch.setattr(audio, "decode", huge)
    with pytest.raises(ValueError, match="of 3 found\n.*3 unreadable_audio"):
        run(folder, tmp_path / "out")


def test_two_clips_of_one_sound(corpus, tmp_path):
    _, report = run(corpus(*WHOLE, row("again")), tmp_path / "out")
    shared = report["leakage"]
    assert shared["copies_in_train"]["examples"] == [
        {"first": "t", "copy": "again"}
    ]
    assert shared["splits"]["test"]["audio"] == {
        "shared": 1,
        "clips": 1,
        "examples": [{"train": "t", "test": "s"}],
    }
    assert shared["splits"]["test"]["texts"]["shared"] == 0


def test_a_cut_sounds_like_itself(corpus, tmp_path):
    folder = corpus(
        row("whole"),
        row("first", start=0, end=0.05),
        row("second", split="test", start=0.05, end=0.1),
        row("same", split="valid", start=0, end=0.05),
    )
    _, report = run(folder, tmp_path / "out")
    splits = report["leakage"]["splits"]
    assert splits["test"]["audio"]["shared"] == 0
    assert splits["valid"]["audio"]["examples"] == [
        {"train": "first", "valid": "same"}
    ]


def test_the_summary_reads_no_list_of_clips(corpus, tmp_path, monkeypatch):
    gone = [row(f"g{i}", path="none.wav") for i in range(50)]
    folder = corpus(*WHOLE, *gone, row("m", "그거 ("))
    _, report = run(folder, tmp_path / "out")
    assert report["leftover_markup_ids"] == ["m"]
    assert len(report["dropped_clips"]) == 50
    path = tmp_path / "out" / prepare.REPORT
    head = prepare_report.head(path)
    assert {**head, **{k: report[k] for k in prepare_report.LISTS}} == report
    assert not set(prepare_report.LISTS) & set(head)
    lines = prepare_report.summary(path).splitlines()
    assert "dropped, missing_audio: 50 (train 50)" in lines
    shared = "test shares with train: 0 texts, 0 speakers, 1 audio (1 clips)"
    assert any(line.startswith(shared) for line in lines)


# A full disk

OLDER = [*WHOLE, row("older", "넷")]
N_FILES = 5  # three splits, the report, and the report of work in progress
replace = os.replace


class FullDisk:
    """Fails from the n-th call on, as a full disk would."""

    def __init__(self, function, n_before):
        self.function, self.n_left = function, n_before

    def __call__(self, path, *arguments, **settings):
        writes = self.function is replace or "w" in str(arguments[:1])
        self.n_left -= writes
        if writes and self.n_left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.function(path, *arguments, **settings)


def contents(folder):
    return {
        path: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name != LOCK
    }


@pytest.mark.parametrize(
    "where, name, n_before, is_whole",
    [(os, "replace", n, n < N_FILES) for n in range(N_FILES + 4)]
    + [(builtins, "open", n, True) for n in range(N_FILES)],
)
def test_a_full_disk_claims_nothing(
    corpus, tmp_path, monkeypatch, where, name, n_before, is_whole
):
    folder, out = corpus(*OLDER), tmp_path / "out"
    older = run(folder, out)
    before = contents(out)
    shorter = {"label_fits": lambda text: text != "넷", "heldout_share": 0.3}
    with monkeypatch.context() as patched:
        full = FullDisk(getattr(where, name), n_before)
        patched.setattr(where, name, full)
        with pytest.raises(OSError, match="No space left") as error:
            prepare.prepare("manifest", folder, out, **shorter)
    assert re.search(rf"\(\d+ bytes are free in {out}\)", str(error.value))
    assert (contents(out) == before) == is_whole
    assert not (out / ".preparing").exists()
    # Neither the older settings nor the newer ones find it finished.
    assert run(folder, out) == older
    assert run(folder, out, **shorter)[0] == ["t"]


def test_a_full_disk_while_clips_are_stored(corpus, tmp_path, monkeypatch):
    folder, out = corpus(*WHOLE), tmp_path / "out"
    run(folder, out)
    before = contents(out)
    corpus(*WHOLE, *(row(f"{i}", speaker="x" * 500) for i in range(99)))
    small = "PRAGMA max_page_count = 20;" + clip_store._SCHEMA
    monkeypatch.setattr(clip_store, "_SCHEMA", small)
    with pytest.raises(OSError) as error:
        run(folder, out)
    assert error.value.errno == errno.ENOSPC
    for words in (
        f"{out}/.preparing/clips.sqlite: database or disk is full",
        "free space there",
        "bytes are free in",
    ):
        assert words in str(error.value)
    assert contents(out) == before


def test_what_a_killed_preparation_has_left_goes(corpus, tmp_path):
    out = tmp_path / "out"
    (out / ".preparing").mkdir(parents=True)
    (out / ".preparing/clips.sqlite").write_bytes(b"half")
    (out / ".preparing/test_half.csv").write_bytes(b"half")
    run(corpus(*WHOLE), out)
    assert sorted(path.name for path in contents(out)) == sorted(
        ["train.csv", "valid.csv", "test.csv", prepare.REPORT]
    )
