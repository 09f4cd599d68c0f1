"""Bootstrap intervals: their points against jiwer, their width by theory.

In: made-up records.
Out: percentages.
"""

import math

import jiwer
import numpy as np
import pytest
from hypothesis import (
    given,
    settings,
    strategies as st,
)
from local import bootstrap, metrics
from local.bootstrap import RATES, UNITS, intervals, paired
from local.metrics import Record


def records_of(*pairs, speakers=()):
    speakers = [*speakers, *[""] * len(pairs)]
    return [
        Record(f"u{i:05}", *pair, 1.0, speaker=speakers[i])
        for i, pair in enumerate(pairs)
    ]


def coins(n, share, seed=0):
    """One syllable each, a share of which is wrong."""
    wrong = np.random.default_rng(seed).random(n) < share
    return [("가", "나" if is_wrong else "가") for is_wrong in wrong]


hangul = st.text(st.sampled_from("가나다라 "), max_size=12)
pairs_of_hangul = st.lists(st.tuples(hangul, hangul), max_size=6)


@given(pairs_of_hangul)
@settings(max_examples=60, deadline=None)
def test_counts_give_the_scores_and_jiwers(pairs):
    records = records_of(*pairs)
    scored = bootstrap.scored(records)
    table = bootstrap.counts(scored)
    found = dict(zip(RATES, bootstrap.rates(table.sum(0)).tolist()))
    scores = metrics.score(records)
    assert found == pytest.approx({rate: scores[rate] for rate in RATES})
    if any(reference for reference, _ in scored):
        ours = [found["CER"], found["WER"]]
        jiwers = [f(*map(list, zip(*scored))) for f in (jiwer.cer, jiwer.wer)]
        assert ours == pytest.approx([100 * rate for rate in jiwers])


COUNTS = [  # reference, hypothesis, edits and units of each rate
    ("가고 싶어", "가고싶어", [[1, 5], [0, 4], [2, 2], [0, 2]]),
    ("", "네 네", [[3, 0], [2, 0], [2, 0], [2, 0]]),
    ("네", "", [[1, 1]] * 4),
]


@pytest.mark.parametrize("reference, hypothesis, expected", COUNTS)
def test_counts_by_hand(reference, hypothesis, expected):
    (found,) = bootstrap.counts([(reference, hypothesis)]).tolist()
    assert found == expected


def test_an_interval_has_the_width_of_its_binomial():
    n, share = 2000, 0.2
    records = records_of(*coins(n, share))
    rate = metrics.score(records)["CER"]
    low, high = intervals(records, n=4000)["CER"]
    sigma = 100 * math.sqrt(share * (1 - share) / n)
    assert low == pytest.approx(rate - 1.96 * sigma, abs=0.15 * sigma)
    assert high == pytest.approx(rate + 1.96 * sigma, abs=0.15 * sigma)
    low, high = intervals(records, n=4000, level=0.6827)["CER"]
    assert high - low == pytest.approx(2 * sigma, rel=0.06)


def test_long_utterances_weigh_more():
    # Of two, each drawn 0, 1 or 2 times: 0 %, 100 * 3 / 12 % or 100 %.
    records = records_of(("가나다", ""), ("가나다라마바사아자",) * 2)
    table = bootstrap.counts(bootstrap.scored(records))
    found = bootstrap.resampled(table, n=400)[:, 0]
    values, times = np.unique(found, return_counts=True)
    assert values.tolist() == [0, 25, 100]
    assert np.abs(times / 400 - [0.25, 0.5, 0.25]).max() < 0.07


@pytest.mark.parametrize("n_draws", [1, 7, 2**20])
def test_pieces_of_the_resamples_are_each_whole(monkeypatch, n_draws):
    monkeypatch.setattr(bootstrap, "N_DRAWS", n_draws)
    table = np.ones((3, 4, 2), dtype=np.int64)
    found = bootstrap.resampled(table, n=10)
    assert found.shape == (10, 4)
    assert (found == 100).all()
    times = bootstrap._times_drawn(np.random.default_rng(0), 10, 3)
    assert times.sum(1).tolist() == [3] * 10


def test_a_seed_repeats_and_another_does_not():
    records = records_of(*coins(50, 0.3))
    assert intervals(records) == intervals(records)
    table = bootstrap.counts(bootstrap.scored(records))
    one, other = (bootstrap.resampled(table, seed=seed) for seed in (0, 1))
    assert (one != other).any()


DEGENERATE = [  # records, every rate's interval
    (records_of(), [0, 0]),
    (records_of(("가", "나")), [100, 100]),
    (records_of(("", "")), [0, 0]),
    (records_of(("", "가"), ("", "가")), [100, 100]),
]


@pytest.mark.parametrize("records, expected", DEGENERATE)
@pytest.mark.parametrize("unit", UNITS)
def test_too_little_for_an_interval(records, expected, unit):
    assert intervals(records, unit=unit) == dict.fromkeys(RATES, expected)
    differences = paired(records, records, unit=unit)
    for found in differences.values():
        assert set(found.values()) == {0}


def test_whole_speakers_are_drawn():
    # One of two speakers is always wrong: the rate is 0, 50 or 100 %.
    pairs = [("가", "가")] * 50 + [("가", "나")] * 50
    records = records_of(*pairs, speakers=["a"] * 50 + ["b"] * 50)
    assert intervals(records, unit="speaker")["CER"] == [0, 100]
    low, high = intervals(records)["CER"]
    assert 35 < low < 50 < high < 65


def test_clips_without_a_speaker_are_drawn_by_themselves():
    records = records_of(*coins(60, 0.5))
    assert intervals(records, unit="speaker") == intervals(records)
    some = records_of(*[("가", "나")] * 5, speakers=["a", "", "a", "", "b"])
    table = bootstrap.counts(bootstrap.scored(some))
    drawn = bootstrap.by_unit(table, some, "speaker")
    assert drawn[:, 0, 1].tolist() == [2, 1, 1, 1]


def test_paired_by_hand():
    a = records_of(("가나", "가"), ("다라", "다라"), ("마 바", "마 바"))
    b = records_of(("가나", "가나"), ("다라", "다라"), ("마 바", "마바"))
    found = paired(a, list(reversed(b)))
    differences = [found[rate]["difference"] for rate in RATES]
    # a: 1 of 7, 1 of 6, 1 of 4 words twice. b: 1 of 7, 0, 2 of 4, 0
    assert differences == pytest.approx([0, -100 / 6, 25, -25])
    assert list(found["CER"]) == [
        *("difference", "low", "high", "probability_better")
    ]
    # The CER is lower where the first is drawn more often than the third:
    # of 27 draws 10, and as many where it is higher.
    assert found["CER"]["probability_better"] == pytest.approx(
        10 / 27, abs=0.05
    )
    # The sWER is lower where the first is drawn at all.
    assert found["sWER"]["probability_better"] == pytest.approx(
        19 / 27, abs=0.05
    )


def test_a_paired_interval_is_narrower():
    a = coins(400, 0.4)
    b = [(ref, ref if i % 10 == 0 else hyp) for i, (ref, hyp) in enumerate(a)]
    found = paired(records_of(*a), records_of(*b))["CER"]
    assert found["low"] < found["difference"] < found["high"] < 0
    assert found["probability_better"] == 1
    low, high = intervals(records_of(*a))["CER"]
    assert found["high"] - found["low"] < (high - low) / 2


def test_two_ways_are_mirrored():
    a, b = records_of(*coins(50, 0.4)), records_of(*coins(50, 0.2, seed=1))
    ahead, back = paired(a, b)["WER"], paired(b, a)["WER"]
    assert ahead["difference"] == -back["difference"]
    assert ahead["low"] == pytest.approx(-back["high"])


OTHERS = [  # b against one clip "u00000" of "가"; what the message says
    ([], "1 utterances are scored in one of the two alone: u00000;"),
    ([Record("x", "가", "", 1.0)], "2 utterances .*alone: u00000, x;"),
    (records_of(("나", "")), "1 utterances have two references: u00000;"),
    (records_of(("가", "")) * 2, "1 utterances stand twice.*: u00000;"),
    (records_of(*[("가", "")] * 9), "8 utt.* u00005, …; compare two models"),
]


@pytest.mark.parametrize("b, message", OTHERS)
def test_other_utterances_are_not_compared(b, message):
    with pytest.raises(ValueError, match=message):
        paired(records_of(("가", "가")), b)


def test_references_that_score_alike_are_one():
    a, b = records_of(("네, 가요.", "네")), records_of(("네 가요", "네"))
    assert paired(a, b)["CER"]["difference"] == 0


WRONG = [
    ({"n": 0}, "n=0"),
    ({"level": 95}, "level=95 must lie"),
    ({"level": 0}, "level=0"),
    ({"unit": "word"}, "unit='word' is unknown; choose utterance or speaker"),
]


@pytest.mark.parametrize("options, message", WRONG)
@pytest.mark.parametrize("n_clips", [0, 2])
def test_wrong_options(options, message, n_clips):
    records = records_of(*coins(n_clips, 0.5))
    with pytest.raises(ValueError, match=message):
        intervals(records, **options)
    with pytest.raises(ValueError, match=message):
        paired(records, records, **options)
