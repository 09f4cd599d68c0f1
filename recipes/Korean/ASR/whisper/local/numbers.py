"""Numbers in digits against numbers in words: 35 and 삼십오 are one.

In: texts after text.for_scoring.
Out: the ways to say a number; the two texts with such numbers written alike.

For a figure apart: no score of metrics.py is changed by what stands here.
"""

import re
import unicodedata
from itertools import product
from typing import Iterator, Optional, Set, Tuple

from rapidfuzz.distance import Levenshtein

from local.text import without_spaces

DIGITS = "영일이삼사오육칠팔구"
_PLACES = ("", "십", "백", "천")
_MYRIADS = ("", "만", "억", "조", "경")  # powers of 10,000
N_DIGITS = 4 * len(_MYRIADS)  # a longer one is said digit by digit alone
_ONES = ("", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉")
_TENS = ("", "열", "스물", "서른", "마흔", "쉰")
_TENS += ("예순", "일흔", "여든", "아흔")
_MONTHS = {"6": "유", "10": "시"}  # 유월, 시월

# Counted with 한, 두, 세; what begins alike (시간, 번째, 개월) is accepted.
_COUNTERS = (
    "가닥 가지 개 건 곡 곳 군데 권 그루 그릇 끼 달 대 도막 마디 마리 명 모금 "
    "모 묶음 박스 발짝 방울 배 번 벌 병 봉지 분 사람 살 상자 송이 시 쌍 알 입 "
    "자루 자리 잔 장 접시 조각 줄 차례 채 척 켤레 통 팀 판 편 포기 폭 학급 해"
)
_COUNTED = re.compile(f" ?(?:{_COUNTERS.replace(' ', '|')})")
_UNITS = {
    "%": "퍼센트 프로 퍼",
    "kg": "킬로그램 킬로그람 킬로 키로",
    "g": "그램 그람",
    "mg": "밀리그램",
    "km": "킬로미터 킬로 키로",
    "m": "미터",
    "cm": "센티미터 센치미터 쎈티미터 센티 센치",
    "mm": "밀리미터 밀리",
    "l": "리터",
    "ml": "밀리리터 밀리 미리",
    "cc": "씨씨 시시",
    "°": "도",
    "°c": "도",
    "m2": "제곱미터",
    "gb": "기가바이트 기가",
    "mb": "메가바이트 메가",
}
_UNITS = {unit: said.split() for unit, said in _UNITS.items()}
_NUMBER = re.compile(
    r"(?P<number>[0-9]+(?:[.,:/-][0-9]+)*)"
    r"(?P<unit>[만억조천백]| ?(?:[%°℃㎀-㏟]|"
    rf"(?:{'|'.join(_UNITS)})(?![a-z0-9])))?"
)
# Syllables that may belong to the number beside them: before it across a
# space, before it, and after it.
_TENFOLD = frozenset("십백천만억조열물른흔쉰순든")  # … 스물, 서른, 마흔
_NUMERAL = frozenset(DIGITS + "공십백천만억조0123456789")
_BEFORE = _TENFOLD | _NUMERAL | frozenset("한두세네섯곱덟홉")  # 두세 개
_SHORT = {"3": "석", "4": "넉"}  # before 달, 장, 잔, 되, …


def readings(token: str) -> Set[str]:
    """The ways to say a number with what follows it.

    ==========  ==================================  =========================
    token       among its readings                  rule
    ==========  ==================================  =========================
    35          삼십오 삼오                         Sino-Korean; by digit
    10000       만 일만                             a leading 일 may go
    16,000      만육천 1만6000 16000                commas; partly in digits
    010         공일공 영일영                       0 is 공 or 영
    3.5         삼점오 삼쩜오
    3시 20살    세시 스무살                         native, before a counter
    24시간      스물네시간 이십사시간
    3달 4장     석달 넉장                           석, 넉 before some
    10월        시월                                and 유월
    2천 1만     이천 만                             before 만, 억, 조, 천, 백
    30% 15kg    삼십퍼센트 30퍼센트 십오킬로        and the common units
    10:30       열시삼십분
    1/2         이분의일
    02-1234     공이일이삼사 공이에일이삼사         telephone numbers
    삼 셋       none                                only what begins a token
                                                    with a digit
    ==========  ==================================  =========================

    Arguments
    ---------
    token : str
        After ``text.for_scoring``, beginning with an Arabic number.

    Returns
    -------
    set of str
        Without spaces in the number; what follows it is kept.
    """
    found = _NUMBER.match(token)
    if found is None:
        return set()
    rest = token[found.end() :]
    return {said + rest for said in _said(found)}


def merge(reference: str, hypothesis: str) -> Tuple[str, str, int]:
    """Writes numbers alike, where one text has digits and the other words.

    A number's reading on the other side is replaced by the digits if the two
    then align; what it counts is spaced as it is there, for 세 시 and 3시 are
    both right. A word that sounds like a number is left alone elsewhere, and
    where it may be part of a longer number; aligned with digits it is taken
    for the number.

    ==============  ==============  ===========================  =
    reference       hypothesis      both                         n
    ==============  ==============  ===========================  =
    3시에 봐요      세 시에 봐요    3시에 봐요                   1
    이십 명         20명            20명                         1
    이 사람 2명     이 사람 두명    이 사람 2명                  1
    2명             세명            as they are                  0
    2월             십이월          as they are                  0
    이 일은         그 일은         as they are                  0
    두세 개         3개             as they are                  0
    사과            4과             4과                          1
    ==============  ==============  ===========================  =

    Arguments
    ---------
    reference, hypothesis : str
        Texts after ``text.for_scoring``.

    Returns
    -------
    reference, hypothesis : str
        Other spaces stay, and still count.
    n : int
        Numbers that are written alike now.
    """
    hypothesis, n_there = _respelled(reference, hypothesis)
    reference, n_here = _respelled(hypothesis, reference)
    return reference, hypothesis, n_there + n_here


def _respelled(digits: str, words: str) -> Tuple[str, int]:
    """``words``, with the numbers of ``digits`` written as there."""
    n = 0
    found = list(_NUMBER.finditer(digits)) if digits != words else []
    for number in reversed(found):  # what follows a number is alike by then
        if _stands_at(digits, number, words) is None:
            better = _written(digits, number, words)
            words, n = (words, n) if better is None else (better, n + 1)
    return words, n


def _written(digits, number, words) -> Optional[str]:
    """``words`` with one number in digits, or None if it is not said there."""
    best, least = None, _distance(digits, words)
    spaced = Levenshtein.distance(digits, words)
    for begin, end in _places(digits, number, words):
        tail = _spaced(digits[number.end() :], words[end:])
        candidate = words[:begin] + number.group() + tail
        if Levenshtein.distance(digits, candidate) > spaced:
            continue  # it spoils spaces, or a number that is alike
        distance = _distance(digits, candidate)
        place = _stands_at(digits, number, candidate)
        if distance < least and place == len(without_spaces(words[:begin])):
            best, least = candidate, distance
    return best


def _spaced(expected, tail) -> str:
    """``tail``, apart from its number as ``expected`` is from its own."""
    counted, counted_there = tail.lstrip(), expected.lstrip()
    if counted[:1] != counted_there[:1]:
        return tail
    return " " * (len(expected) - len(counted_there)) + counted


def _places(digits, number, words) -> Iterator[Tuple[int, int]]:
    """Where a number's readings stand in ``words``, the longest first."""
    compact = without_spaces(words)
    said = {reading for reading in _said(number) if reading in compact}
    around = digits[: number.start()], digits[number.end() :]
    for reading in sorted(said, key=lambda reading: (-len(reading), reading)):
        for found in re.finditer(" ?".join(map(re.escape, reading)), words):
            beside = words[: found.start()], words[found.end() :]
            if _is_whole(beside, around, len(reading) == 1):
                yield found.span()


def _is_whole(beside, around, is_syllable) -> bool:
    """Whether a reading is a number by itself, by the texts beside it."""
    left, right = without_spaces(beside[0])[-1:], beside[1].lstrip()[:1]
    before, after = without_spaces(around[0])[-1:], around[1].lstrip()[:1]
    if is_syllable and right != after:  # 이, 일, 만: most often no number
        return False
    numerals = _TENFOLD if beside[0].endswith(" ") else _BEFORE
    ends = right == after or right not in _NUMERAL
    begins = left == before or before.isdecimal() or left not in numerals
    return begins and ends and (left == before or right == after)


def _stands_at(digits, number, words) -> Optional[int]:
    """Where a number's digits are aligned in ``words``, spaces aside."""
    begin = len(without_spaces(digits[: number.start()]))
    end = begin + len(without_spaces(number.group()))
    pair = without_spaces(digits), without_spaces(words)
    for step in Levenshtein.opcodes(*pair):
        holds = step.src_start <= begin and end <= step.src_end
        if step.tag == "equal" and holds:
            return step.dest_start + begin - step.src_start
    return None


def _distance(a, b) -> int:
    return Levenshtein.distance(without_spaces(a), without_spaces(b))


def _said(found) -> Set[str]:
    """Readings of a match of _NUMBER, its unit included."""
    number, unit = found["number"], (found["unit"] or "").strip()
    follows = found.string[found.end("number") :]
    said = _number(number, follows)
    if unit in _MYRIADS[1:] + _PLACES[1:]:
        said |= {""} if number == "1" else set()
        return {reading + unit for reading in said}
    if not unit:
        return said
    name = unicodedata.normalize("NFKC", unit).lower()
    names = _UNITS.get(name, []) + [unit]
    return {a + b for a, b in product(said | {number}, names)}


def _number(number: str, follows: str) -> Set[str]:
    """Readings of what _NUMBER calls a number."""
    if re.fullmatch("[0-9]{1,3}(,[0-9]{3})+([.][0-9]+)?", number):
        plain = number.replace(",", "")
        return {plain} | _number(plain, follows)
    if number.isdecimal():
        return _whole(number, follows)
    if re.fullmatch("[0-9]+[.][0-9]+", number):
        whole, digits = number.split(".")
        parts = _sino(whole), "점쩜", _by_digit(digits)
    elif re.fullmatch("[0-9]{1,2}:[0-9]{2}", number):
        hour, minute = number.split(":")
        minutes = _in_places(minute, "") + "분" if int(minute) else ""
        hours = _native(hour) | {_in_places(hour, "")}
        parts = hours, ["시"], [minutes]
    elif re.fullmatch("[0-9]+/[0-9]+", number):
        above, below = number.split("/")
        parts = _sino(below), ["분의"], _sino(above)
    elif re.fullmatch("[0-9]+(-[0-9]+){1,3}", number):
        groups = [_by_digit(group) for group in number.split("-")]
        return {
            joint.join(said)
            for said in product(*groups)
            for joint in ("", "에", "다시")
        }
    else:  # a date with dots, a version: no rule
        return set()
    return {"".join(said) for said in product(*parts)}


def _whole(number: str, follows: str) -> Set[str]:
    said = (_sino(number) | _mixed(number)) - {number}
    if _COUNTED.match(follows):
        said |= _native(number)
    if number in _SHORT and re.match(" ?[달장잔자되섬동]", follows):
        said.add(_SHORT[number])
    if follows.startswith("월") and number in _MONTHS:
        said.add(_MONTHS[number])
    return said


def _sino(number: str) -> Set[str]:
    """만육천, 일만육천, 일육공공공: in places, and digit by digit."""
    if len(number) > N_DIGITS:
        return _by_digit(number)
    said = _by_digit(number)
    if int(number) == 0:
        return said | {"제로"}
    full = _in_places(number, "일")
    short = _in_places(number, "")
    return said | {full, short, re.sub("^일(?=[만억조경])", "", short)}


def _in_places(number: str, one: str) -> str:
    """Sino-Korean; ``one`` is what 1 is before 십, 백 and 천."""
    said = ""
    if int(number) == 0:
        return "영"
    for power, group in _myriads(number):
        for place in (3, 2, 1, 0):
            digit = group // 10**place % 10
            name = one if digit == 1 and place else DIGITS[digit]
            said += name + _PLACES[place] if digit else ""
        said += _MYRIADS[power]
    return said


def _mixed(number: str) -> Set[str]:
    """2만, 1만6000, 1만6천, 2천: digits before 만 and 천."""
    if len(number) > N_DIGITS or int(number) == 0:
        return set()
    groups = list(_myriads(number))
    plain = "".join(f"{group}{_MYRIADS[power]}" for power, group in groups)
    thousands = re.sub("(?<![0-9])([0-9])000$", r"\1천", plain)
    return {plain, thousands}


def _myriads(number: str) -> Iterator[Tuple[int, int]]:
    """Power of 10,000 and what stands before it; none that is 0."""
    for power in reversed(range(len(_MYRIADS))):
        group = int(number) // 10 ** (4 * power) % 10**4
        if group:
            yield power, group


def _by_digit(number: str) -> Set[str]:
    """공일공 and 영일영."""
    said = "".join(DIGITS[int(digit)] for digit in number)
    return {said, said.replace("영", "공")}


def _native(number: str) -> Set[str]:
    """스물네; above 99 백스물네; none for 0 and for hundreds."""
    value = int(number[-2:])
    if not value or len(number) > N_DIGITS:
        return set()
    tens, ones = divmod(value, 10)
    said = "스무" if value == 20 else _TENS[tens] + _ONES[ones]
    hundreds = number[:-2].strip("0") and number[:-2] + "00"
    return {(_in_places(hundreds, "") if hundreds else "") + said}
