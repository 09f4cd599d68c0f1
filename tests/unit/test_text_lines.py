"""What is found in a text file, and what is read of it later."""

import gzip
import multiprocessing
import os
import pickle
import tracemalloc

import numpy as np
import pytest
from local import text_lines
from local.text_lines import MAX_BYTES, TextLines


def fits(label):
    """Texts of up to 200 characters."""
    return len(label) <= 200


@pytest.fixture
def lines(tmp_path):
    """TextLines of a file of some bytes."""

    def of(content, max_lines=0, seed=0, fits=fits):
        path = tmp_path / "text.txt"
        path.write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )
        return TextLines(path, max_lines, seed, fits)

    return of


def left_out(found):
    return {k: v for k, v in found.counts.items() if v and k != "lines"}


LONG = "가" * 333 + "a"  # 1000 bytes
CONTENTS = [  # bytes, texts, counts but those of lines
    ("가나\n다라\n", ["가나", "다라"], {"kept": 2}),
    ("가나\n다라", ["가나", "다라"], {"kept": 2}),
    ("가나\r\n다라\r\n", ["가나", "다라"], {"kept": 2}),
    ("\ufeff가나\n다라\n", ["가나", "다라"], {"kept": 2}),
    ("가나\n\n \t\r\n다라\n\n", ["가나", "다라"], {"kept": 2, "empty": 3}),
    ("가\n\u3164\u200b\n\0\0\n", ["가"], {"kept": 1, "empty": 2}),
    ("가\0나\n", ["가 나"], {"kept": 1}),
    ("\u1112\u1161\u11ab  글\n", ["한 글"], {"kept": 1}),
    ("가\x85나\u2028다\x0b라\r마\n", ["가 나 다 라 마"], {"kept": 1}),
    ("가\n".encode("cp949") + b"a\n", ["a"], {"kept": 1, "not_utf8": 1}),
    ("가나\n".encode()[1:] + b"a\n", ["a"], {"kept": 1, "not_utf8": 1}),
    (f"{'a' * 200}\n{'b' * 201}\n", ["a" * 200], {"kept": 1, "too_long": 1}),
    (f"{'a' * 2000}\nb\n", ["b"], {"kept": 1, "too_long": 1}),
    ("a" * (3 * 2**20) + "\nb", ["b"], {"kept": 1, "too_long": 1}),
    ("b\n" + "a" * (3 * 2**20), ["b"], {"kept": 1, "too_long": 1}),
]


@pytest.mark.parametrize("content, texts, counts", CONTENTS)
def test_what_is_kept_of_a_file(lines, content, texts, counts):
    found = lines(content)
    assert [found[i] for i in range(len(found))] == texts
    assert left_out(found) == counts
    assert found.counts["lines"] == sum(counts.values())
    assert found.sizes.dtype == np.int32 and found.starts.dtype == np.int64


@pytest.mark.parametrize("n_more", range(-3, 4))
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_longest_line(lines, n_more, end):
    line = "a" * (MAX_BYTES + n_more)
    found = lines(f"b\n{line}{end}", fits=lambda label: True)
    assert found.counts["lines"] == 2
    assert found.counts["too_long"] == (n_more > 0)
    assert found[len(found) - 1] == ("b" if n_more > 0 else line)


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "is empty"),
        (b"\n \n\r\n\n", "begins with 64 KiB of blanks"),
        (b"\0\0\n\0", "2 lines, 0 kept, 2 empty"),
        ("가나\n다".encode("cp949"), "2 of its first 2 lines are not UTF-8"),
        (b"1\n2\n3\n" + "가\n".encode("cp949") * 9, "iconv -f CP949 -t UTF-8"),
        (b"a" * 2**21, "1 lines, 0 kept.*1 too long.*a sentence a line"),
        (gzip.compress("가나\n".encode()), "compressed.*gunzip -k"),
    ],
)
def test_a_file_without_lines_is_told(lines, content, told):
    with pytest.raises(ValueError, match=f"text_file='.*text.txt'.*{told}"):
        lines(content)


def test_what_is_no_file_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="text_file=.*no such file"):
        TextLines(tmp_path / "no.txt", 0, 0, fits)
    with pytest.raises(ValueError, match="text_file=.*is a folder"):
        TextLines(tmp_path, 0, 0, fits)


def test_the_decoder_is_asked_of_long_lines_that_are_drawn_alone(lines):
    asked = []

    def remember(label):
        asked.append(label)
        return True

    content = "".join(f"{'a' * 300}{i}\n" for i in range(2000)) + "b\n"
    found = lines(content, max_lines=20, fits=remember)
    assert left_out(found) == {"kept": 20, "not_drawn": 1981}
    assert 20 <= len(asked) < 400 and "b" not in asked
    # No text of more tokens passes for a short one: composing triples one.
    asked.clear()
    grows = "\U0001d160" * (text_lines.FEW_BYTES // 4 + 1)
    lines(grows, fits=remember)
    assert len(asked) == 1


# Draws


def numbered(n_lines):
    return "".join(f"{i}\n" for i in range(n_lines))


def test_a_draw_follows_from_the_seed_in_the_order_of_the_file(lines):
    def drawn(*arguments):
        found = lines(numbered(500), *arguments)
        return [int(found[i]) for i in range(len(found))]

    one = drawn(50, 1)
    assert len(set(one)) == 50 and one == sorted(one)
    assert one == drawn(50, 1) != drawn(50, 2)
    assert len({tuple(drawn(1, seed)) for seed in range(9)}) > 5
    assert drawn(500, 1) == drawn(501, 1) == drawn(0, 1) == list(range(500))


def test_every_line_is_drawn_as_often_as_any(lines):
    """Blank ones between them, and those that do not fit, change nothing."""
    content = "".join(
        f"{i}\n\n{'a' * 300}\n" + "\n" * (i % 5) for i in range(20)
    )
    n_draws, n_most = 400, 5
    counts = np.zeros(20)
    for seed in range(n_draws):
        found = lines(content, n_most, seed)
        assert len(found) == n_most
        counts[[int(found[i]) for i in range(n_most)]] += 1
    share = n_most / 20
    wanted, variance = n_draws * share, n_draws * share * (1 - share)
    chi_squared = ((counts - wanted) ** 2 / variance).sum() * 19 / 20
    assert chi_squared < 43.8  # p = 0.001, 19 degrees of freedom


def test_memory_holds_no_more_than_positions(lines):
    """4 MB of text; 200 lines of it are 2.4 kB."""
    content = ("가" * 60 + "\n") * 22_000
    found = lines(content.encode(), 200)  # what is imported first is not meant
    del content
    tracemalloc.start()
    again = TextLines(found.path, 200, 1, fits)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert again.counts["not_drawn"] == 21_800
    assert peak < 300_000


# Reading


def test_any_process_reads(lines):
    found = lines("가나\n다라\n" * 100)
    copy = pickle.loads(pickle.dumps(found))
    assert [copy[i] for i in range(4)] == ["가나", "다라"] * 2
    with multiprocessing.get_context("fork").Pool(2) as pool:
        texts = pool.map(found.__getitem__, range(200), chunksize=10)
    assert texts == ["가나", "다라"] * 100


def test_a_file_may_be_replaced_but_not_changed(lines, tmp_path):
    found = lines("가나\n다라\n마바\n")
    (tmp_path / "new.txt").write_text("다른 것\n", encoding="utf-8")
    held = found.path.with_suffix(".held")
    os.link(found.path, held)
    os.replace(tmp_path / "new.txt", found.path)
    assert found[1] == "다라"  # of the one that was opened
    changes = [
        b"",
        "가나\n".encode(),
        b"a\n" * 10,
        b"\xff" * 30,
        b" " * 30,
        "가나\n다라라\n".encode(),
        "가나가다라\n".encode(),
    ]
    for changed in changes:
        held.write_bytes(changed)
        with pytest.raises(ValueError, match="text_file=.*was changed"):
            found[1]
    held.write_bytes("가나\n다라\n마바\n더\n".encode())  # it grew
    assert [found[i] for i in range(3)] == ["가나", "다라", "마바"]


def test_the_digest_tells_other_lines_apart(lines):
    content = numbered(100)
    digest = lines(content, 10, 1).digest
    assert digest == lines(content, 10, 1).digest
    others = [
        lines(content, 11, 1),
        lines(content, 10, 2),
        lines(f"{content}a\n", 10, 1),
        lines(content.replace("7\n8\n", "78\n\n"), 10, 1),
        lines(content.replace("7\n8\n", "8\n7\n"), 10, 1),
    ]
    assert digest not in [one.digest for one in others]
