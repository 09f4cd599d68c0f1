"""The label files of AI Hub's speech sets: one transcript, or a recording's.

In: a .txt file, or a .json file with any of the keys in the tables below.
Out: its segments, and its texts without the tags of their vendors.

Every set has its own JSON. What they share is known by the names of keys,
wherever they stand: {"전사정보": {"LabelText": ...}} as well as {"transcription":
{"sentences": [{"startTime": ..., "endTime": ..., "dialect": ...}]}}.
"""

import json
import re
import unicodedata
from collections import Counter, deque
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from local import text
from local.corpora import layout

SUFFIXES = (".json", ".txt")

# Names of keys, the preferred first; lower-case, without blanks and signs. With
# a dot: only below that key, since elsewhere the name means something else.
TEXT = (
    # As spoken, before what a script or a translation has.
    "dialectform transcription.dialect sentences.dialect segments.dialect "
    "form originalform labeltext translabeltext readinglabeltext "
    "answerlabeltext orglabeltext stt stttext tr transcription transcript "
    "transcriptiontext text sentence utterance 발화내용 전사내용 전사텍스트 전사 "
    "발화 문장 텍스트 standardform script 스크립트 대본"
).split()
START = (
    "start starttime startms startsec begin begintime "
    "발화시작 발화시작시간 발화시작시각 시작시간 시작시각 시작"
).split()
END = (
    "end endtime endms endsec finish "
    "발화종료 발화종료시간 발화종료시각 발화끝 종료시간 종료시각 종료"
).split()
SPEAKER = (
    "speakerid speakername speaker speaker.id recorderid participantid "
    "화자 화자id 화자번호 화자명 발화자 발화자id"
).split()
AUDIO = (
    "filename filenm audiofilename audiofile audioname audiopath audio "
    "wavfile wavname wavpath wav voicefile 음성파일명 음성파일 파일명 file"
).split()
RATE = (
    "samplingrate samplerate samplingfrequency sampling "
    "샘플링레이트 샘플링주파수"
).split()
# Lists of what a segment is made of, with times and texts of their own.
PIECES = (
    "words word eojeol eojeollist tokens syllables phonemes phones morphemes "
    "chars 어절"
).split()

MIN_MEDIAN_MS = 100  # segments of whole numbers: of ms from here, else of s
MIN_RATE, MAX_RATE = 4000, 192000  # Hz; others are taken for a mistake

_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:[.,]\d+)?)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(k?)(?:hz)?", re.IGNORECASE)


class Segment(NamedTuple):
    """What was said in a clip, or from one second of it to another.

    ``text`` is None where it is missing; ``audio`` is a file's name, without
    folder and suffix, or empty; ``start`` and ``stop`` are None for all of
    the clip, both 0 for a cut that is none.
    """

    text: Optional[str]
    audio: str = ""
    speaker: str = ""
    start: Optional[float] = None
    stop: Optional[float] = None


class Label(NamedTuple):
    """A label file: its segments, and the sampling rate that it names, Hz."""

    segments: List[Segment]
    rate: Optional[int] = None


UNKNOWN = Label([Segment(None)])


def read(path: Path) -> Label:
    """Reads a label file.

    Times are seconds, "HH:MM:SS.mmm", or milliseconds: whole numbers between
    which at least MIN_MEDIAN_MS lie, in the median. Segments whose files all
    differ are clips of their own, and are not cut.

    Arguments
    ---------
    path : Path
        UTF-8 or cp949.

    Returns
    -------
    Label
        UNKNOWN for a file that cannot be read, and for a JSON in which no
        text is found.
    """
    try:
        content = layout.decoded(path)
    except OSError:
        return UNKNOWN
    if str(path).lower().endswith(".txt"):
        return Label([Segment(content)])
    try:
        return _label(json.loads(content))
    except (ValueError, RecursionError):
        return UNKNOWN


def _label(tree) -> Label:
    leaves = _leaves(tree, into_lists=True)
    rate = _rate(_first(leaves, RATE))
    rows = [row for some in _lists_of_segments(tree) for row in some]
    if rows:
        return Label(_segments(rows), rate)
    said = _text(leaves)
    if said is None:
        return Label(UNKNOWN.segments, rate)
    names = file_stem(_first(leaves, AUDIO)), _first(leaves, SPEAKER)
    return Label([Segment(said, *names)], rate)


@lru_cache(maxsize=4096)
def _name(key: str) -> str:
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFC", key)).lower()


def _leaves(tree, parent: str = "", into_lists=False) -> Dict[str, object]:
    """Values by their keys, and by the key above and theirs; the outermost
    wins. Of lists, only those of one thing are opened, if at all."""
    found: Dict[str, object] = {}
    queue = deque([(parent, tree)])
    while queue:
        parent, node = queue.popleft()
        while into_lists and isinstance(node, list) and len(node) == 1:
            node = node[0]
        for key, value in node.items() if isinstance(node, dict) else ():
            name = _name(key)
            if isinstance(value, (dict, list)):
                queue.append((name, value))
            elif value is not None:
                found.setdefault(name, value)
                found.setdefault(f"{parent}.{name}", value)
    return found


def _first(leaves: Dict[str, object], names: Sequence[str]) -> str:
    """The value of the first name that has one."""
    values = (str(leaves[name]).strip() for name in names if name in leaves)
    return next(filter(None, values), "")


def _text(leaves: Dict[str, object]) -> Optional[str]:
    """None where no name of a text stands; empty where nothing was said."""
    texts = {k: leaves[k] for k in TEXT if isinstance(leaves.get(k), str)}
    return _first(texts, TEXT) if texts else None


def _lists_of_segments(tree) -> Iterator[List[Dict[str, object]]]:
    """Lists of which a row has a text, and a start or a file of its own."""
    queue = deque([("", tree)])
    while queue:
        name, node = queue.popleft()
        children = node.items() if isinstance(node, dict) else ()
        if isinstance(node, list):
            rows = [_leaves(row, name) for row in node if isinstance(row, dict)]
            if any(map(_is_segment, rows)):
                yield rows
                continue
            children = ((name, child) for child in node)
        for key, child in children:
            if isinstance(child, (dict, list)) and _name(key) not in PIECES:
                queue.append((_name(key), child))


def _is_segment(row: Dict[str, object]) -> bool:
    placed = _first(row, START) or _first(row, AUDIO)
    return bool(placed) and _text(row) is not None


def _segments(rows: List[Dict[str, object]]) -> List[Segment]:
    audio = [file_stem(_first(row, AUDIO)) for row in rows]
    words = [(_first(row, START), _first(row, END)) for row in rows]
    if all(audio) and len(set(audio)) == len(rows) > 1:
        words = [("", "")] * len(rows)
    n_rows = Counter(audio)
    cuts = (
        # All of a file is one row's, or nobody's.
        cut if any(pair) or n_rows[name] > 1 else (None, None)
        for name, pair, cut in zip(audio, words, _cuts(words))
    )
    return [
        Segment(_text(row), name, _first(row, SPEAKER), *cut)
        for row, name, cut in zip(rows, audio, cuts)
    ]


def _cuts(words: List[Tuple[str, str]]) -> List[Tuple[float, float]]:
    """Seconds; both 0 for a cut that is none."""
    times = [(_seconds(start), _seconds(end)) for start, end in words]
    whole = all(word.isdecimal() for pair in words for word in pair if word)
    lengths = [b - a for a, b in times if a is not None and b is not None]
    is_ms = whole and lengths and median(lengths) >= MIN_MEDIAN_MS
    scale = 1000.0 if is_ms else 1.0
    return [
        (a / scale, b / scale)
        if a is not None and b is not None and a < b < float("inf")
        else (0.0, 0.0)
        for a, b in times
    ]


def _seconds(word: str) -> Optional[float]:
    """Of a number, or a clock's time; None for what is neither."""
    clock = _CLOCK.fullmatch(word)
    try:
        if clock is None:
            seconds = float(word)
        else:
            hours, minutes, rest = clock.groups(default="0")
            seconds = 3600 * int(hours) + 60 * int(minutes)
            seconds += float(rest.replace(",", "."))
    except (ValueError, OverflowError):
        return None
    return seconds if seconds >= 0 else None


def _rate(word: str) -> Optional[int]:
    """Hz of "16000", "16kHz", "44.1 kHz", "48"; None for what is none."""
    found = _RATE.fullmatch(word)
    if found is None:
        return None
    number = float(found[1])
    hertz = number * 1000 if found[2] or number < 1000 else number
    return int(hertz) if MIN_RATE <= hertz <= MAX_RATE else None


def file_stem(name: str) -> str:
    """A file's name without folders and suffix, NFC.

    Arguments
    ---------
    name : str
        As a label or a disk has it; a path of Windows or of Linux.

    Returns
    -------
    str
        "a.b" of "D01\\a.b.wav".
    """
    last = re.split(r"[/\\]", unicodedata.normalize("NFC", name))[-1]
    return re.sub(r"\.[A-Za-z][A-Za-z0-9]{1,4}$", "", last)


# Texts

_SOUNDS = (
    "웃음|웃음소리|박수|박수소리|기침|기침소리|한숨|숨소리|들숨|날숨|목청|"
    "울음|노래|음악|배경음악|배경음|효과음|소음|잡음|침묵|묵음|무음|환호|하품|"
    "재채기|헛기침|비프음|laughing|laughter|laugh|clearing|singing|applause|"
    "applausing|noise|music|bgm|silence|cough|coughing|sniffing|breath"
)
_UNCLEAR = r"\(\(\s*[xX]*\s*\)\)"
_UNSAID = re.compile(
    rf"{_UNCLEAR}"
    r"|\{[^{}]*\}"
    rf"|[\[<]\s*(?:{_SOUNDS})\s*[\]>]"
    # Not half of a pair.
    rf"|(?<![)/])\(\s*(?:{_SOUNDS})\s*\)(?!\s*[/(])"
    r"|(?<!\))(?<!\)\s)/\(\s*[A-Za-z]+\s*\)"
    rf"|(?<!\S)@(?:{_SOUNDS})(?![^\s.,?!])",
    re.IGNORECASE,
)
_TAGGED = re.compile(r"\(\s*(?:[A-Za-z]{1,3}|노)\s*:([^():]*)\)")
_GUESSED = re.compile(r"\(\(([^()]+)\)\)")
_BROKEN_OFF = re.compile(r"(?<!\S)-([가-힣][가-힣 ]*)-(?=[\s.,?!]|$)")
_MASKED = re.compile(
    r"(?<![\w.])[@&#]("
    "전화번호|계좌번호|카드번호|주민번호|차량번호|개인정보|생년월일|이메일|이름|성명|"
    "사람|주소|지역|장소|전화|번호|계좌|카드|주민|소속|회사|상호|단체|학교|상표|기타|"
    "social-security-number|telephone-number|online-account|bank-account|"
    "company-name|brand-name|card-num|tel-num|affiliation|location|account|"
    "address|company|number|others|other|brand|place|name|num"
    r")(\d*)[&#]?(?![A-Za-z])"
)
_STARS = re.compile(r"\*{2,}|[○◯●]+|(?<!\S)[xX]{2,}(?!\S)")


def is_unclear(raw: str) -> bool:
    """Whether a transcript notes speech that nobody understood, "(())"."""
    return re.search(_UNCLEAR, text.for_label(raw)) is not None


def without_tags(raw: str) -> str:
    """Takes the tags of the vendors out of a transcript.

    ``text.ksponspeech`` comes after it: ``b/``, pairs and marks are left to
    it here.

    ========================  ==================  ============================
    in                        out                 rule
    ========================  ==================  ============================
    네 (NO:) 그 (SN:)         네 그               a tag without words
    (FP:어) 그게 (SP:스톱)    어 그게 스톱        the words of a tag were said
    (NO:(FP:어))              어                  in one another as well
    네 /(noise) 그 /(bgm)     네 그               a name after a slash
    (비지엠)/(bgm)            (비지엠)/(bgm)      but no half of a pair
    @웃음 네 @박수.           네 .                sounds, as whole words
    {laughing} [음악] (웃음)  none                in brackets
    네 (()) 그 ((xx))         네 그               not understood
    ((아마))                  아마                a guess stays
    -못- 못 갔어              못 못 갔어          broken off: was said
    @이름1 씨 &name2&         [이름1] 씨 [name2]  what is masked is marked by
    #지역# 홍** ○○           [지역] 홍[**] [○○] brackets, as a leftover
    a@b.kr R&B #1             a@b.kr R&B #1       all else stays
    ========================  ==================  ============================

    A masked word is silence or a beep in the audio. No rule can tell what
    the label should be, so that it stays in brackets, and
    ``text.leftovers`` counts it.

    Arguments
    ---------
    raw : str
        As a label file has it.

    Returns
    -------
    str
        NFC, single spaces.
    """
    said = text.for_label(raw)
    for _ in range(2):  # a tag in a tag
        said = _TAGGED.sub(r" \1 ", said)
    said = _UNSAID.sub(" ", said)
    said = _GUESSED.sub(r"\1", said)
    said = _BROKEN_OFF.sub(r"\1", said)
    said = _MASKED.sub(r"[\1\2]", said)
    return text.for_label(_STARS.sub(r"[\g<0>]", said))
