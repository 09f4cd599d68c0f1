"""Where a model fails: tables worked out by hand, and jiwer's counts.

In: made-up records.
Out: the dictionary of the report.
"""

import json

import jiwer
import pytest
from hypothesis import (
    given,
    settings,
    strategies as st,
)
from local import analysis, bootstrap, confusions, metrics
from local.metrics import Record


def records_of(*pairs, **options):
    return [
        Record(f"u{place}", *pair, 1.0, **options)
        for place, pair in enumerate(pairs)
    ]


def analyse(*pairs):
    return analysis.analyse(records_of(*pairs), n=20)


hangul = st.text(st.sampled_from("가나다 "), max_size=12)
pairs_of_hangul = st.lists(st.tuples(hangul, hangul), min_size=1, max_size=6)


@given(pairs_of_hangul)
@settings(max_examples=60, deadline=None)
def test_edits_are_jiwers(pairs):
    pairs = bootstrap.scored(records_of(*pairs))
    references, hypotheses = map(list, zip(*pairs))
    found = confusions.edits(pairs)
    aligned = {
        "characters": jiwer.process_characters(references, hypotheses),
        "words": jiwer.process_words(references, hypotheses),
    }
    for unit, counts in aligned.items():
        expected = {name: getattr(counts, name) for name in found[unit]}
        assert found[unit] == expected


EDITS = [  # reference, hypothesis; hits, substitutions, deletions, insertions
    ("가고 싶어", "가고싶어", (4, 0, 1, 0), (0, 1, 1, 0)),
    ("네, 가요.", "네 가", (3, 0, 1, 0), (1, 1, 0, 0)),
    ("", "네 네", (0, 0, 0, 3), (0, 0, 0, 2)),
    ("날씨", "날시", (1, 1, 0, 0), (0, 1, 0, 0)),
]


@pytest.mark.parametrize("reference, hypothesis, characters, words", EDITS)
def test_edits_by_hand(reference, hypothesis, characters, words):
    found = analyse((reference, hypothesis))["edits"]
    names = ["hits", "substitutions", "deletions", "insertions"]
    assert list(found["words"]) == names
    assert tuple(found["characters"].values()) == characters
    assert tuple(found["words"].values()) == words


CONFUSIONS = [  # pairs; syllables, words, inserted, deleted
    (
        [("날씨가", "날시가")],
        [["씨", "시", 1]],
        [["날씨가", "날시가", 1]],
        [],
        [],
    ),
    ([("나는 집에 가", "나는 집에")], [], [], [], [["가", "", 1]]),
    ([("네", "네 음 네")], [], [], [["", "네", 1], ["", "음", 1]], []),
    ([("가고 싶어", "가고싶어")], [], [], [], []),
    ([("네.", "네")], [], [], [], []),
    (  # the most frequent first, equals in the order of the alphabet
        [("나", "라"), ("다", "가"), ("가", "나"), ("다", "가")],
        [["다", "가", 2], ["가", "나", 1], ["나", "라", 1]],
        [["다", "가", 2], ["가", "나", 1], ["나", "라", 1]],
        [],
        [],
    ),
]


@pytest.mark.parametrize("pairs, syllables, words, more, less", CONFUSIONS)
def test_confusions(pairs, syllables, words, more, less):
    assert analyse(*pairs)["confusions"] == {
        **{"syllables": syllables, "words": words},
        **{"inserted": more, "deleted": less},
    }


def test_thirty_confusions_at_most():
    pairs = [(chr(0xAC00 + i), chr(0xB000 + i)) for i in range(40)]
    found = analyse(*pairs)["confusions"]
    assert len(found["syllables"]) == len(found["words"]) == 30


LOOPS = [  # reference, hypothesis, is a loop
    ("네", "네 네 네 네", True),
    ("네", "네 네 네", False),
    ("네 네", "네 네 네 네", False),
    ("ㅋㅋㅋㅋ", "ㅋㅋㅋㅋㅋㅋㅋㅋ", False),
    ("ㅋㅋㅋㅋ", "ㅋㅋㅋㅋㅋㅋㅋㅋㅋ", True),
    ("하하하하", "하하하하", False),
    ("좋아요", "좋아 좋아 좋아 좋아요", True),
    ("정말 좋아요", "정말" + " 오늘은 날씨가 정말 아주 좋아요" * 4, True),
    ("백만 원", "1000000 원", False),
    ("일", "1 1 1 1", True),
    ("카드 1111", "카드 일일일일", True),
    ("", "어 어 어 어 어", True),
    ("네 네 네 네 네", "", False),
    ("", "", False),
    ("a.c", "axc axc axc axc", True),
    ("(((", "(", False),
]


@pytest.mark.parametrize("reference, hypothesis, expected", LOOPS)
def test_loops(reference, hypothesis, expected):
    assert analysis.is_loop(reference, hypothesis) is expected
    record = Record("a", reference, hypothesis, 1.0)
    assert ("repetition" in analysis.flags(record)) is expected


INVENTED = [  # reference, hypothesis, was not said
    ("", "네", True),
    ("", "", False),
    (".", "음.", True),
    ("네", "시청해 주셔서 감사합니다", True),
    ("네", "네 알겠습니다", False),
    ("오늘 날씨 좋네요", "구독 부탁드립니다", True),
    ("오늘 날씨 좋네요", "오늘은 날시가 좋내요", False),
    ("오늘 날씨 좋네요", "감사", False),
    ("네", "네 " * 20, False),
    ("", "네 " * 20, True),
    ("010-1234-5678", "공일공 일이삼사 오육칠팔", False),
    ("서울", "", False),
    # 10 insertions to 10 characters; to 11.
    ("가나다라마바사아자차", "가나다라마바사아자차카타파하거너더러머버", True),
    (
        "가나다라마바사아자차카",
        "가나다라마바사아자차카타파하거너더러머버서",
        False,
    ),
    ("네", "알겠습니다", True),
    # One of five matches; two do.
    ("가나다라마", "가거너더러", True),
    ("가나다라마", "가나너더러", False),
]


@pytest.mark.parametrize("reference, hypothesis, expected", INVENTED)
def test_invented(reference, hypothesis, expected):
    record = Record("a", reference, hypothesis, 1.0)
    assert ("hallucination" in analysis.flags(record)) is expected


def test_flags():
    failed = Record("a", "네", "", 1.0, failed=True)
    assert analysis.flags(failed) == ["failed"]
    mixed = Record("a", "3시.", "세 시", 1.0)
    assert analysis.flags(mixed) == ["number"]
    silence = Record("a", "", "네 네 네 네", 1.0)
    assert analysis.flags(silence) == ["repetition", "hallucination"]
    assert analysis.flags(Record("a", "네", "예", 1.0)) == []


GROUPED = [  # reference, hypothesis, seconds, category, speaker
    ("가나", "가나", 2.0, "전화", "b"),
    ("가나", "가다", 2.1, "전화", "a"),
    ("가 나", "가나", 30.0, "방송", "a"),
    ("가", "", 31.0, "", "c"),
]


def grouped_records():
    return [
        Record(f"u{i}", ref, hyp, seconds, category, speaker)
        for i, (ref, hyp, seconds, category, speaker) in enumerate(GROUPED)
    ]


def test_groups_by_hand():
    found = analysis.analyse(grouped_records(), n=50)
    rows = {
        kind: [(g["name"], g["CER"], g["WER"]) for g in found[kind]]
        for kind in ("by_category", "by_duration", "by_speaker")
    }
    assert rows["by_category"] == [
        ("", 100, 100),
        ("방송", pytest.approx(100 / 3), 100),
        ("전화", 25, 50),
    ]
    assert rows["by_duration"] == [
        ("0-2 s", 0, 0),
        ("2-5 s", 50, 100),
        ("20-30 s", pytest.approx(100 / 3), 100),
        ("30 s-", 100, 100),
    ]
    assert rows["by_speaker"] == [
        *[("c", 100, 100), ("a", 40, 100), ("b", 0, 0)]
    ]


def test_a_group_is_scored_as_a_set_of_its_own():
    records = [
        *(Record(f"a{i}", "가나 다", "가다 " * (i % 3), i) for i in range(20)),
        *(Record(f"b{i}", "라", "라", 2.5, "전화") for i in range(3)),
    ]
    found = analysis.analyse(records, n=50, seed=3)
    for group in found["by_category"]:
        own = [r for r in records if r.category == group["name"]]
        scores = metrics.score(own)
        assert group["CER"] == pytest.approx(scores["CER"])
        assert group["WER"] == pytest.approx(scores["WER"])
        assert group["n_utterances"] == scores["n_utterances"]
        assert group["n_reference_chars"] == scores["n_reference_chars"]
        assert group["hours"] == sum(r.duration for r in own) / 3600
        bounds = bootstrap.intervals(own, n=50, seed=3)["CER"]
        assert [group["low"], group["high"]] == bounds
    assert found["by_speaker"] == []  # none is named


def test_intervals_are_bootstraps():
    records = grouped_records() * 3
    for unit in bootstrap.UNITS:
        options = {"n": 40, "seed": 5, "level": 0.8, "unit": unit}
        found = analysis.analyse(records, **options)["intervals"]
        assert found == bootstrap.intervals(records, **options)


def test_rates_of_loops_and_inventions():
    pairs = (
        [("네", "네 네 네 네")] * 60 + [("", "네")] * 20 + [("네", "네")] * 20
    )
    found = analyse(*pairs)
    assert found["repetition"]["rate"] == 60
    assert found["repetition"]["ids"] == [f"u{i}" for i in range(50)]
    invented = [f"u{i}" for i in range(60, 80)]
    assert found["hallucination"] == {"rate": 20, "ids": invented}


def test_all_failed_clips_are_listed():
    records = records_of(*[("네", "")] * 70, failed=True)
    found = analysis.analyse(records, n=5)["failed"]
    assert found == [f"u{i}" for i in range(70)]


def test_numbers_stand_apart():
    pairs = [("3시 5분", "세시 오분"), ("네 그래", "네 그랴"), ("2명", "두명")]
    found = analyse(*pairs)["numbers"]
    assert (found["n_mixed"], found["utterances"]) == (3, 2)
    assert found["ids"] == ["u0", "u2"]
    assert found["CER_merged"] == pytest.approx(100 / 11)  # of 5 + 4 + 2
    assert found["WER_merged"] == 20  # 1 of 5
    scores = metrics.score(records_of(*pairs))
    assert scores["CER"] == pytest.approx(100 * 4 / 11)
    assert scores["WER"] == 80


@given(pairs_of_hangul)
@settings(max_examples=20, deadline=None)
def test_without_numbers_merged_rates_are_the_scores(pairs):
    records = records_of(*pairs)
    found = analysis.analyse(records, n=2)["numbers"]
    scores = metrics.score(records)
    merged = found["CER_merged"], found["WER_merged"]
    assert merged == pytest.approx((scores["CER"], scores["WER"]))


@pytest.mark.parametrize("records", [[], grouped_records()])
def test_all_of_it_is_json(records):
    found = analysis.analyse(iter(records), n=5)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert list(found) == [
        *("intervals", "edits", "by_category", "by_duration", "by_speaker"),
        *("confusions", "repetition", "hallucination", "failed", "numbers"),
    ]


def test_nothing_to_analyse():
    found = analysis.analyse([], n=5)
    assert found["repetition"] == {"rate": 0, "ids": []}
    assert found["by_duration"] == found["failed"] == []
    assert found["intervals"]["CER"] == [0, 0]
