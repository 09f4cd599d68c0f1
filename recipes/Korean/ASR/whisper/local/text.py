"""Korean text rules: what a label is made of, and what scores compare.

In: a transcript, as a corpus or a model wrote it.
Out: the transcript under one rule; every function here is pure, str to str.

``POLICY`` names what scores compare, and stands in each file of scores.
"korean-1" is the table of ``for_scoring``, and numbers as they are written:
digits and words differ. Whatever changes a score's texts takes a new name.
"""

import re
import unicodedata
from functools import lru_cache
from itertools import groupby

POLICY = "korean-1"  # of for_scoring, below
FORMS = ("spelling", "pronunciation")  # of a KsponSpeech pair, in its order

# Blank to the eye, though Unicode calls the fillers letters.
_BLANK = frozenset("\u200b\u3164\uffa0")
_PLAIN = re.compile("[ -~가-힣]*")  # composed and visible, or spaces
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}

_NARROW_MARKUP = str.maketrans("（）／", "()/")
_READ_ALOUD = frozenset("%‰&@#")  # punctuation to Unicode, words to a speaker
_UNSPOKEN = frozenset("~∼ㆍ")  # symbols or letters to Unicode, pauses here
_IN_NUMBERS = frozenset(".,:/-~")
_END_OF_QUOTE = re.compile("[.,?!…]*['\"’”」』》〉]")

_PAIR = re.compile(r"\(([^()]*)\)(?:\s*/\s*)?\(([^()]*)\)")
_TAG = re.compile(r"(?<![^\s(*])(?:[blonuBLONU]/)+(?![^\s).,?!…+*])")
_BEFORE_WORD = re.compile(r"(?<!\w)\*+(?=\w)")
_AFTER_WORD = re.compile(
    r"(?<=[가-힣ㄱ-ㅣ])[+*/]+(?![\w(])"
    # A tag glued to its word keeps its slash, to be counted as a leftover.
    r"|(?<=[\w.,?!%])(?<![^A-Za-z0-9][blonuBLONU])[*/]+(?![\w(])"
)
_BETWEEN_WORDS = re.compile(r"(?<=[가-힣ㄱ-ㅣ])\++(?=\w)")

_MARKUP = re.compile(r"[()/+*\[\]]")
_CONTENT = re.compile(
    r"(?<=[A-Za-z0-9])/(?=[A-Za-z0-9])|(?<=[A-Za-z])\++|(?<=\d)\+(?=\d)"
)


def for_label(text: str) -> str:
    """Composes and spaces a text; no letter and no punctuation is lost.

    =====================  ================  ================================
    in                     out               rule
    =====================  ================  ================================
    한 (six jamo, NFD)     한                NFC
    ``a<tab>b<newline>``   ``a b``           blanks and controls are spaces
    가<U+200B>나           가 나             so is the space without width
    가<U+3164>나           가 나             and the Hangul filler
    가<U+FEFF>나           가나              other marks without width vanish
    ㅋㅋ 3.5% "네"!        ㅋㅋ 3.5% "네"!   all else stays
    =====================  ================  ================================

    Arguments
    ---------
    text : str
        Any text, composed or decomposed.

    Returns
    -------
    str
        NFC, single spaces, none at the ends.
    """
    if _PLAIN.fullmatch(text):  # most texts of a large corpus
        return " ".join(text.split())
    visible = "".join(map(_visible, text))
    return " ".join(unicodedata.normalize("NFC", visible).split())


@lru_cache(maxsize=None)
def _visible(character: str) -> str:
    category = unicodedata.category(character)
    if category in ("Cf", "Cs") and character not in _BLANK:
        return ""
    blank = category in ("Cc", "Zs", "Zl", "Zp") or character in _BLANK
    return " " if blank else character


def for_scoring(text: str) -> str:
    """Takes off what a score should not count: punctuation, case, width.

    Idempotent, and the same for composed and decomposed input.

    =====================  =====================  ===========================
    in                     out                    rule
    =====================  =====================  ===========================
    ３시，ＯＫ             3시 ok                 full-width is ASCII
    ㅋㅋ                   ㅋㅋ                   nothing else of NFKC
    가.나                  가 나                  punctuation is a space
    A/S, e-mail            a s e mail             slash and hyphen as well
    3.5 1,000 10:30        3.5 1,000 10:30        ``. , : / - ~`` stay between
    1/2 3~4 010-12         1/2 3~4 010-12         two digits
    don't                  dont                   an apostrophe vanishes
    "네."라고              네라고                 so does the end of a quote
                                                  that its particle follows
    서울(수도)는           서울 수도 는           a bracket is a space
    3.5% R&B @ #1          3.5% r&b @ #1          ``% ‰ & @ #`` are read aloud
    25℃ $3 1+1 = 2         25℃ $3 1+1 = 2         symbols too (category S),
    네~ ^^ 한ㆍ중          네 한 중               but not ``~ ^ ` ㆍ``
    =====================  =====================  ===========================

    Arguments
    ---------
    text : str
        A reference or a hypothesis.

    Returns
    -------
    str
        What the two are compared as.
    """
    text = for_label(text).translate(_FULL_WIDTH).lower()
    # Lower-casing and narrowing can leave a letter apart from its accent.
    text = for_label(text)
    runs = ["".join(run) for _, run in groupby(text, _is_punctuation)]
    around = ["", *runs, ""]
    kept = (
        _without_punctuation(around[i][-1:], run, around[i + 2][:1])
        for i, run in enumerate(runs)
    )
    return for_label("".join(kept))


@lru_cache(maxsize=None)
def _is_punctuation(character: str) -> bool:
    if character in _READ_ALOUD:
        return False
    category = unicodedata.category(character)
    unspoken = category == "Sk" or character in _UNSPOKEN
    return category[0] == "P" or unspoken


def _without_punctuation(before: str, run: str, after: str) -> str:
    if not _is_punctuation(run[0]):
        return run
    if run in _IN_NUMBERS and before.isdecimal() and after.isdecimal():
        return run
    in_word = before.isalnum() and after.isalpha()
    return "" if in_word and _END_OF_QUOTE.fullmatch(run) else " "


def without_spaces(text: str) -> str:
    """Takes off every space.

    ==============  ============
    in              out
    ==============  ============
    가고 싶어       가고싶어
    ==============  ============

    Arguments
    ---------
    text : str
        Any text.

    Returns
    -------
    str
        The text without blanks of any kind.
    """
    return "".join(text.split())


def ksponspeech(raw: str, form: str) -> str:
    """Turns a KsponSpeech transcript into a label.

    Pairs are read first, tags and marks after them. Here with the spelling:

    ==========================  =============  ==============================
    in                          out            rule
    ==========================  =============  ==============================
    (70%)/(칠 십 퍼센트)        70%            of a pair, one side stays
    (3시) / (세 시)에           3시에          spaces around the slash
    (100%)(백 프로)가           100%가         the slash may be missing
    ()/(뭐)                     뭐             an empty side yields
    (웃음) (네)                 (웃음) (네)    apart, without slash: no pair
    그거 (진짜 좋아             그거 (진짜     a lone parenthesis deletes
                                좋아           nothing
    ((가)/(나))                 (가)           an inner pair is read
    b/ 네 O/ n/.                네 .           tags go, in either case,
    email/ N/A u/네             email N/A      but only as whole tokens
                                u/네
    그래n/                      그래n/         a glued tag stays, to be seen
    아/ 음/,                    아 음,         filler mark
    A/S 1/2                     A/S 1/2        a slash in a word is content
    (tv/)                       (tv)           filler in lone parentheses
    뭐+ 뭔                      뭐 뭔          mark of a repeated word
    그+그거                     그 그거        it also parts words
    1+1 A+                      1+1 A+         after Latin or digits: content
    ``*저기 그거*``             저기 그거      mark of noisy speech
    ``2*3``                     ``2*3``        within a word it stays
    3.5 왜? 네,                 3.5 왜? 네,    punctuation stays
    ==========================  =============  ==============================

    Arguments
    ---------
    raw : str
        A line of a ``.trn`` file after `` :: ``, or a ``.txt`` file.
    form : str
        "spelling" (digits and Latin letters) or "pronunciation" (Hangul):
        which side of a pair stays.

    Returns
    -------
    str
        The label; what could not be read is left in it, see ``leftovers``.

    Raises
    ------
    ValueError
        The form is neither.
    """
    if form not in FORMS:
        raise ValueError(
            f"text_form='{form}' is unknown; choose {' or '.join(FORMS)}"
        )
    side = FORMS.index(form)

    def choose(pair):
        chosen, other = pair.groups()[:: -1 if side else 1]
        return chosen.strip() or other.strip()

    text = _PAIR.sub(choose, for_label(raw).translate(_NARROW_MARKUP))
    text = _TAG.sub("", text)
    text = _BEFORE_WORD.sub("", text)
    text = _AFTER_WORD.sub("", text)
    return for_label(_BETWEEN_WORDS.sub(" ", text))


def leftovers(text: str) -> str:
    """Lists the markup that a rule has left in a label.

    ==================  =======  ==========================================
    in                  out      rule
    ==================  =======  ==========================================
    그거 (진짜 좋아     ``(``    any of ``( ) / + * [ ]``
    b/네 그래n/         ``//``
    A/S 1/2             none     a slash between Latin letters or digits
    A+ C++ 1+1          none     a plus after a Latin letter, or between
                                 digits
    3+ 4                ``+``
    ==================  =======  ==========================================

    Arguments
    ---------
    text : str
        A label.

    Returns
    -------
    str
        The characters in their order; empty for a clean label.
    """
    return "".join(_MARKUP.findall(_CONTENT.sub("", text)))
