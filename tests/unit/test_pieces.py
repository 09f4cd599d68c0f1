"""Texts that new tokens are learned from: bad ones counted, large ones cut."""

import csv
import gzip

import conftest
import pytest
from local import pieces


@pytest.fixture
def warned(monkeypatch):
    return conftest.logged(monkeypatch, pieces.logger, "warning")


def written(tmp_path, content):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    "content, expected, n_bad",
    [
        ("가\n나\n".encode(), ["가", "나"], 0),
        ("가\r\n나".encode(), ["가", "나"], 0),
        ("가\n\n \n나".encode(), ["가", "", "", "나"], 0),
        ("\ufeff가\n".encode(), ["가"], 0),
        ("\u1100\u1161\n".encode(), ["가"], 0),  # decomposed
        ("가\0나\tabc\n".encode(), ["가 나 abc"], 0),
        (b"\xb0\xa1\n" + "가\n".encode(), ["가"], 1),  # CP949
        (b"abc\n\xff\xfe\n" + "가".encode() + b"\xed\x95\n", ["abc"], 2),
    ],
)
def test_lines(tmp_path, warned, content, expected, n_bad):
    path = written(tmp_path, content)
    found = pieces.lines(path)
    read = [next(found) for _ in expected]
    assert read == expected
    if pieces.HANGUL.search("".join(expected)):
        assert not [*found]
        assert warned == [f"{path}: {n_bad} lines are not UTF-8"] * bool(n_bad)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n",
        b"abc\n",
        "가나다\n".encode("utf-16"),
        "가나다\n".encode("cp949"),
        gzip.compress("가나다\n".encode() * 99),
    ],
)
def test_a_file_without_hangul_is_refused(tmp_path, content):
    path = written(tmp_path, content)
    with pytest.raises(ValueError, match="text.txt' has no line with Hangul"):
        list(pieces.lines(path))


@pytest.mark.parametrize("name", ["absent.txt", "."])
def test_a_missing_file_is_told(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="new_tokens_text"):
        next(pieces.lines(str(tmp_path / name)))
    with pytest.raises(FileNotFoundError, match="train.csv"):
        next(pieces.transcripts(tmp_path / name))


def test_no_file_has_no_lines():
    assert not [*pieces.lines("")]


def test_a_line_of_any_length_is_read_in_parts(tmp_path, warned):
    n = pieces.LONGEST_LINE  # bytes, no multiple of a letter's three
    found = [*pieces.lines(written(tmp_path, "가".encode() * n))]
    assert max(len(line.encode()) for line in found) <= n
    assert n - 9 < sum(map(len, found)) <= n
    assert not warned


def test_of_a_large_file_some_lines_are_read_evenly(tmp_path, monkeypatch):
    path = written(
        tmp_path, b"".join(b"%03d\xea\xb0\x80\n" % n for n in range(100))
    )
    monkeypatch.setattr(pieces, "MAX_BYTES", 300)  # of 700
    found = [*pieces.lines(path)]
    assert found == [f"{n:03d}가" for n in range(0, 100, 3)]


def test_transcripts(tmp_path):
    path = tmp_path / "train.csv"
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ID", "wrd"])
        rows.writerows([["a", "가, 나"], ["b", " \u1100\u1161 "], ["c"], []])
    assert [*pieces.transcripts(path)] == ["가, 나", "가", ""]
    path.write_text("ID,text\na,가\n", encoding="utf-8")
    assert [*pieces.transcripts(path)] == [""]
