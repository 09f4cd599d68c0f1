"""Digits against words: ways to say a number, and texts written alike.

In: a table of tokens; a table of pairs.
Out: readings, and pairs.
"""

import time

import pytest
from hypothesis import (
    given,
    settings,
    strategies as st,
)
from local import numbers, text
from local.numbers import merge, readings

READINGS = [  # token, all of its readings
    ("0", "영 공 제로"),
    ("7", "칠"),
    ("35", "삼십오 삼오"),
    ("11", "십일 일십일 일일"),
    ("365", "삼백육십오 삼육오"),
    ("010", "공일공 영일영 십 일십 10"),
    ("2천", "이천"),
    ("1만", "만 일만"),
    ("3만원", "삼만원"),
    ("0.5", "영점오 영쩜오 공점오 공쩜오 제로점오 제로쩜오"),
    ("3.05", "삼점영오 삼쩜영오 삼점공오 삼쩜공오"),
    ("3시", "세시 삼시"),
    ("20살", "스무살 이십살 이공살 이영살"),
    ("3분", "세분 삼분"),
    ("3층", "삼층"),
    ("6월", "육월 유월"),
    ("10월", "시월 십월 일십월 일공월 일영월"),
    ("7%가", "칠퍼센트가 칠프로가 칠퍼가 칠%가 7퍼센트가 7프로가 7퍼가 7%가"),
    ("3m", "삼미터 삼m 3미터 3m"),
    ("2 g", "이그램 이그람 이g 2그램 2그람 2g"),
    ("5℃", "오도 오℃ 5도 5℃"),
    ("3mp", "삼mp"),
    ("5m23", "오m23"),
    ("10:30", "열시삼십분 십시삼십분"),
    ("9:00", "아홉시 구시"),
    ("00:00", "영시"),
    ("2/3", "삼분의이"),
    (
        "02-12",
        "공이일이 공이에일이 공이다시일이 영이일이 영이에일이 영이다시일이",
    ),
    ("2024.1.5", ""),
    ("1,00", ""),
    ("삼", ""),
    ("제3", ""),
    ("", ""),
]


@pytest.mark.parametrize("token, expected", READINGS)
def test_readings(token, expected):
    found = readings(token)
    assert found == set(expected.split())


AMONG = [  # token, one of its readings
    ("10000", "만"),
    ("10,000", "일만"),
    ("16,000", "만육천"),
    ("16,000", "1만6천"),
    ("16,000", "16000"),
    ("20,000", "2만"),
    ("3000", "3천"),
    ("110000", "십일만"),
    ("100000000", "일억"),
    ("123456789", "일억이천삼백사십오만육천칠백팔십구"),
    ("1970", "천구백칠십"),
    ("2008", "이천팔"),
    ("24.2", "이십사쩜이"),
    ("1,000.5", "천점오"),
    ("15kg", "십오킬로"),
    ("15㎏", "십오킬로그램"),
    ("45대", "마흔다섯대"),
    ("124개", "백스물네개"),
    ("101개", "백한개"),
    ("99세", "구십구세"),
    ("21 명", "스물한 명"),
]


@pytest.mark.parametrize("token, reading", AMONG)
def test_among_the_readings(token, reading):
    assert reading in readings(token)


NOT_AMONG = [
    ("3층", "세층"),
    ("35", "서른다섯"),
    ("12", "이십"),
    ("20개", "스물개"),
]


@pytest.mark.parametrize("token, reading", NOT_AMONG)
def test_not_among_the_readings(token, reading):
    assert reading not in readings(token)


ALIKE = [  # with digits, in words, as both are written then, numbers
    ("3시에 봐요", "세 시에 봐요", "3시에 봐요", 1),
    ("3달", "석 달", "3달", 1),
    ("4장", "넉 장", "4장", 1),
    ("20 명", "이십명", "20 명", 1),
    ("2016년 7월 4일", "이천십육년 칠월 사일", "2016년 7월 4일", 3),
    ("16,000명 이상", "만육천명 이상", "16,000명 이상", 1),
    ("2천에 60만 원", "이천에 육십만 원", "2천에 60만 원", 2),
    ("1만6천", "만 육천", "1만6천", 2),
    ("64.5%에", "육십사쩜오퍼센트에", "64.5%에", 1),
    ("30%", "30 퍼센트", "30%", 1),
    ("20,000원", "2만원", "20,000원", 1),
    ("24시간", "스물 네 시간", "24시간", 1),
    ("010 1234", "공일공 일이삼사", "010 1234", 2),
    ("1대1", "일대일", "1대1", 2),
    ("정답은 2", "정답은 이", "정답은 2", 1),
    ("1 1 1", "일 일 일", "1 1 1", 3),
    # A word like the number stands beside it, and stays.
    ("이 사람 2명", "이 사람 두명", "이 사람 2명", 1),
    ("2번 이번", "이번 이번", "2번 이번", 1),
    ("일 1일", "일 일일", "일 1일", 1),
]


@pytest.mark.parametrize("digits, words, both, n", ALIKE)
def test_written_alike(digits, words, both, n):
    assert merge(digits, words) == (both, both, n)
    assert merge(words, digits) == (both, both, n)


PARTLY = [  # reference, hypothesis, the two after it, numbers
    ("어제 3시에", "어재 세시에", "어제 3시에", "어재 3시에", 1),
    ("사람 2명", "사람이 두명", "사람 2명", "사람이 2명", 1),
    ("약 3시", "약세시", "약 3시", "약3시", 1),
    ("3명 다섯 개", "세 명 5개", "3명 5개", "3명 5개", 2),
]


@pytest.mark.parametrize("reference, hypothesis, ref, hyp, n", PARTLY)
def test_other_errors_stay(reference, hypothesis, ref, hyp, n):
    assert merge(reference, hypothesis) == (ref, hyp, n)


APART = [  # reference, hypothesis: no number is both
    ("", ""),
    ("3", ""),
    ("", "3"),
    ("2명", "세명"),
    ("두세 개", "3개"),
    ("열 시 삼십 분", "열 시 삼십 10:30"),
    ("2월", "십이월"),
    ("2월", "십 이월"),
    ("12월", "이월"),
    ("3시", "스물세시"),
    ("1,000원", "21000원"),
    ("3", "삼만"),
    ("1명", "만 명"),
    ("3 4", "삼 사십"),
    ("이 일은", "그 일은"),
    ("일이 많다", "이일 만다"),
    # A particle that sounds like the number.
    ("사람 2명", "사람이 왔다"),
    ("그 2명", "그 이유는"),
    ("3 3", "3 3"),
    ("10:30", "10시 30분"),
]


@pytest.mark.parametrize("pair", APART)
def test_left_apart(pair):
    assert merge(*pair) == (*pair, 0)
    assert merge(*pair[::-1]) == (*pair[::-1], 0)


mixed = st.text(st.sampled_from("이일삼십만천 명시13205,.%"), max_size=14)


@given(mixed, mixed)
@settings(max_examples=150, deadline=None)
def test_merging_never_adds_an_error(reference, hypothesis):
    pair = text.for_scoring(reference), text.for_scoring(hypothesis)
    *merged, n = merge(*pair)
    assert numbers._distance(*merged) <= numbers._distance(*pair) - n
    assert merge(pair[0], pair[0]) == (pair[0], pair[0], 0)
    assert (tuple(merged) == pair) == (n == 0)


prose = st.text(st.sampled_from("이일삼십만천 명시하나둘"), max_size=14)


@given(prose, prose)
@settings(max_examples=50, deadline=None)
def test_prose_without_digits_is_as_it_was(reference, hypothesis):
    assert merge(reference, hypothesis) == (reference, hypothesis, 0)


HOSTILE = [
    ("1" * 6000, "일" * 6000),
    ("1/" + "9" * 6000, "구" * 6000),
    ("12-" * 400 + "1", "일이" * 400),
    ("9 " * 300, "구 " * 300),
    ("9" * 20 + "개", "구" * 20),
]


@pytest.mark.parametrize("pair", HOSTILE)
def test_what_a_loop_writes_takes_no_time(pair):
    begin = time.monotonic()
    merge(*pair)
    assert time.monotonic() - begin < 2
