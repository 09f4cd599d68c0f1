"""Scores against a table worked out by hand, and against jiwer.

In: pairs of texts.
Out: rates in percent, and the files that hold them.
"""

import builtins
import json
import os
import unicodedata

import jiwer
import pytest
import torch
from hypothesis import (
    given,
    settings,
    strategies as st,
)
from local import metrics, text
from local.metrics import Record, score, space_normalized

from speechbrain.dataio.batch import PaddedBatch

RATES = ("CER", "CER_no_space", "WER", "sWER")


def records_of(*pairs):
    return [
        Record(f"u{place}", reference, hypothesis, 1.0)
        for place, (reference, hypothesis) in enumerate(pairs)
    ]


NFD = unicodedata.normalize("NFD", "한국어를 배워요")
BY_HAND = [  # rule, pairs, CER, CER_no_space, WER, sWER
    ("equal", [("가고 싶어", "가고 싶어")], 0, 0, 0, 0),
    ("a space missing", [("가고 싶어", "가고싶어")], 20, 0, 100, 0),
    ("a space too many", [("가고싶어", "가고 싶어")], 25, 0, 200, 0),
    ("1 of 9", [("오늘은날씨가좋아요", "오늘은날시가좋아요")], 100 / 9)
    + (100 / 9, 100, 100),
    ("a word of three", [("나는 집에 가", "나는 집에")], 200 / 7, 20)
    + (100 / 3, 100 / 3),
    ("decomposed", [("한국어를 배워요", NFD)], 0, 0, 0, 0),
    ("punctuation, width, case", [("네, ＯＫ.", "네 ok")], 0, 0, 0, 0),
    ("no hypothesis", [("가고 싶어", "")], 100, 100, 100, 100),
    ("no reference", [("", "네 그래")], 100, 100, 100, 100),
    ("neither", [("", "")], 0, 0, 0, 0),
    ("no utterance", [], 0, 0, 0, 0),
    # 4 insertions (3 without the space) over 2 characters, 2 words over 1
    ("into silence counts", [("네요", "네요"), ("", "네 그래")], 200, 150)
    + (200, 200),
    # 4 pairs of a space and a syllable too many
    ("a loop", [("네", "네 네 네 네 네")], 800, 400, 400, 400),
    ("silence recognised", [("네", "네"), ("", "")], 0, 0, 0, 0),
    ("lengths weigh", [("가나다라마바사", "가나다라마바사"), ("아", "어")])
    + (12.5, 12.5, 50, 50),
]


@pytest.mark.parametrize("rule, pairs, cer, no_space, wer, swer", BY_HAND)
def test_by_hand(rule, pairs, cer, no_space, wer, swer):
    scores = score(records_of(*pairs))
    expected = (cer, no_space, wer, swer)
    assert [scores[rate] for rate in RATES] == pytest.approx(expected), rule


SPACING = [  # rule, reference, hypothesis, the hypothesis spaced anew
    ("copied", "가고 싶어", "가고싶어", "가고 싶어"),
    ("taken off", "가고싶어", "가 고 싶어", "가고싶어"),
    ("behind a substitution", "가고 싶어", "가구싶어", "가구 싶어"),
    ("a substitution keeps its own", "가 나다", "가 라다", "가 라다"),
    ("an insertion keeps its own", "가나", "가 라나", "가 라나"),
    ("before the reference's first", "가", "아가", "아 가"),
    ("the first syllable missed", "가나 다라", "가나 라", "가나라"),
    ("nothing said", "가 나", "", ""),
    ("nothing to say", "", "가 나", "가 나"),
]


@pytest.mark.parametrize("rule, reference, hypothesis, spaced", SPACING)
def test_space_normalized(rule, reference, hypothesis, spaced):
    assert space_normalized(reference, hypothesis) == spaced, rule


def test_raw_scores_count_what_the_others_forgive():
    scores = score(records_of(("네, 가요.", "네 가요")))
    assert (scores["CER"], scores["WER"]) == (0, 0)
    assert scores["CER_raw"] == pytest.approx(100 * 2 / 6)
    assert scores["WER_raw"] == 100


def test_counts():
    records = [
        Record("a", "네, 가요.", "네", 1.5),
        Record("b", "", "", 0.5, failed=True),
    ]
    scores = score(records, loss=0.1 + 0.2)
    assert scores["loss"] == 0.1 + 0.2
    assert scores["n_utterances"] == 2
    assert scores["n_reference_chars"] == len("네 가요")
    assert scores["n_failed"] == 1


def test_the_text_policy_is_named():
    assert score([])["text_policy"] == text.POLICY == "korean-1"


def test_records_of_a_batch():
    clips = [
        ("a-1", "네.", 1.25, "전화", False),
        ("b", "", 2, "", False),
        ("c", "가요", 0.1, "", True),
    ]
    names = "id", "wrd", "duration", "category", "failed"
    batch = PaddedBatch(
        [
            {**dict(zip(names, clip)), "sig": torch.zeros(3 + n)}
            for n, clip in enumerate(clips)
        ]
    )
    found = metrics.records(batch, ["네", "음", "무엇"])
    assert list(found) == ["a-1", "b", "c"]
    assert list(found.values()) == [
        Record("a-1", "네.", "네", 1.25, "전화"),
        Record("b", "", "음", 2.0),
        Record("c", "가요", "", 0.1, failed=True),  # whatever was decoded
    ]
    # They go to other processes and into JSON: no tensors.
    types = {type(v) for r in found.values() for v in vars(r).values()}
    assert types == {str, float, bool}
    assert score(found.values())["n_failed"] == 1


def test_table():
    one = score(records_of(("가고 싶어", "가고싶어"), ("네", "네")))
    other = score([Record("a", "네", "", 1.0, failed=True)], loss=0.5)
    lines = metrics.table({"test": one, "test.true_length": other}).split("\n")
    assert [line.split() for line in lines] == [
        ["test", "set", "CER", "CER_no_space", "WER", "sWER"]
        + ["n_utterances", "n_failed"],
        ["test", "16.67", "0.00", "66.67", "0.00", "2", "0"],
        ["test.true_length"] + ["100.00"] * 4 + ["1", "1"],
    ]
    assert len({len(line) for line in lines}) == 1  # columns stand


def test_a_table_without_a_test_set():
    (line,) = metrics.table({}).splitlines()
    assert line.split()[:3] == ["test", "set", "CER"]


hangul = st.text(st.sampled_from("가나다라 "), max_size=12)
pairs_of_hangul = st.lists(st.tuples(hangul, hangul), min_size=1, max_size=6)


@given(pairs_of_hangul)
@settings(max_examples=60, deadline=None)
def test_equals_jiwer(pairs):
    pairs = [(" ".join(r.split()), " ".join(h.split())) for r, h in pairs]
    references, hypotheses = zip(*pairs, strict=True)
    scores = score(records_of(*pairs))
    if any(references):
        wer = 100 * jiwer.wer(list(references), list(hypotheses))
        cer = 100 * jiwer.cer(list(references), list(hypotheses))
        assert scores["WER"] == scores["WER_raw"] == pytest.approx(wer)
        assert scores["CER"] == scores["CER_raw"] == pytest.approx(cer)


@given(pairs_of_hangul, st.randoms())
@settings(max_examples=30, deadline=None)
def test_order_does_not_matter(pairs, random):
    records = records_of(*pairs)
    shuffled = random.sample(records, len(records))
    assert score(records) == score(shuffled)


@given(hangul, hangul)
@settings(max_examples=60, deadline=None)
def test_spacing_changes_no_character(reference, hypothesis):
    spaced = space_normalized(reference, hypothesis)
    assert spaced.replace(" ", "") == hypothesis.replace(" ", "")
    assert spaced == " ".join(spaced.split())


def test_files_round_trip(tmp_path):
    records = [
        Record("한/1", "네, 가요.", '"네"\n\u2028', 1.25, "전화"),
        Record("b", "", "어", 0.1),
    ]
    folder = tmp_path / "scores"
    scores = score(records, 1 / 3)
    metrics.write_scores(folder, "test.full", records, scores)
    saved = json.loads((folder / "test.full.json").read_text("utf-8"))
    assert saved == scores
    text = (folder / "test.full.jsonl").read_text("utf-8")
    assert "네, 가요." in text
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    assert rows == [metrics.record_row(record) for record in records]
    assert rows[0] == {
        "id": "한/1",
        "reference": "네, 가요.",
        "hypothesis": '"네"\n\u2028',
        "errors": 3,  # " 가요"
        "duration": 1.25,
        "category": "전화",
    }
    assert len(list(folder.iterdir())) == 2


def full_disk(*_arguments, **_options):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("owner, name", [(os, "replace"), (builtins, "open")])
def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch, owner, name):
    old = records_of(("네", "네"))
    metrics.write_scores(tmp_path, "test", old, score(old))
    metrics.write_alignments(tmp_path / "wer_test.txt", old)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    new = records_of(("네", "아니"))
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full_disk)
        with pytest.raises(OSError, match="cannot write .*test.jsonl"):
            metrics.write_scores(tmp_path, "test", new, score(new))
        with pytest.raises(OSError, match="cannot write .*wer_test.txt"):
            metrics.write_alignments(tmp_path / "wer_test.txt", new)
    assert not list(tmp_path.glob("*.tmp"))
    assert {path: path.read_bytes() for path in before} == before


def test_alignments_show_normalised_words(tmp_path):
    path = tmp_path / "wer_test.txt"
    records = records_of(("네, 가요.", "네 가"), ("", "어"), ("", ""))
    metrics.write_alignments(path, records)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("%WER 100.00 [ 2 / 2, 1 ins, 0 del, 1 sub ]")
    first = next(n for n, line in enumerate(lines) if line.startswith("u0,"))
    words = [lines[first + n].split(" ; ") for n in (1, 2, 3)]
    assert [[w.strip() for w in row] for row in words] == [
        ["네", "가요"],
        ["=", "S"],
        ["네", "가"],
    ]
