"""Where a model fails: groups, edits, confusions, loops, invented text.

In: Records of a test set.
Out: a dictionary that can be written as JSON; the flags of one utterance.
"""

import re
from typing import Dict, Iterable, List, NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein

from local import bootstrap, confusions, numbers
from local.metrics import Record
from local.text import without_spaces

DURATIONS_S = (2, 5, 10, 20, 30)  # each bin holds its upper end
N_IDS = 50  # of a list
N_LOOPS = 4  # a piece so many times in a row is a loop
N_PIECE = 60  # characters
N_INVENTED = 10  # characters inserted
N_SHARED = 0.2  # of the shorter text, at most, that an invented one matches
N_FLUENT = 5  # characters; of a shorter hypothesis nothing can be said
_CER = bootstrap.RATES.index("CER")
_WER = bootstrap.RATES.index("WER")
_LOOP = re.compile(rf"(.{{1,{N_PIECE}}}?)\1{{{N_LOOPS - 1},}}")


class Utterance(NamedTuple):
    """What is asked of one utterance.

    Attributes
    ----------
    pair : (str, str)
        Reference and hypothesis after ``text.for_scoring``.
    merged : (str, str)
        The same with numbers written alike.
    n_numbers : int
        How many of them were written in two ways.
    flags : list of str
        As ``flags`` gives them.
    """

    pair: tuple
    merged: tuple
    n_numbers: int
    flags: List[str]


def analyse(
    records: Iterable[Record],
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    unit: str = "utterance",
) -> dict:
    """All that the report tells of one model on one test set.

    Arguments
    ---------
    records : iterable of Record
        In the order of the lists of IDs.
    n, seed, level, unit
        As for ``bootstrap.intervals``; the groups draw utterances.

    Returns
    -------
    dict
        ``intervals`` of ``bootstrap.intervals``; ``edits`` and
        ``confusions`` of ``confusions``; ``by_category``, ``by_duration``
        and ``by_speaker``, lists of groups, empty where no record has one;
        ``repetition`` and ``hallucination``, each the ``rate`` in percent of
        the utterances and the first 50 ``ids``; ``failed``, all IDs;
        ``numbers``: ``n_mixed`` that are digits on one side and words on the
        other, in how many ``utterances``, their first 50 ``ids``, and
        ``CER_merged`` and ``WER_merged``, had they counted as equal.

        A group has ``name`` (empty for records without one), ``CER``,
        ``WER``, ``low`` and ``high`` of CER's interval, ``n_utterances``,
        ``n_reference_chars`` and ``hours``. Speakers come worst first.

    Raises
    ------
    ValueError
        n, level or unit is none.
    """
    records = list(records)
    heard = [_utterance(record) for record in records]
    pairs = [utterance.pair for utterance in heard]
    table = bootstrap.counts(pairs)
    drawn = bootstrap.by_unit(table, records, unit)
    bounds = bootstrap.interval(drawn, n, seed, level)

    def grouped(name_of):
        names = [name_of(record) for record in records]
        return _groups(names, table, records, (n, seed, level))

    speakers = grouped(lambda record: record.speaker)
    durations = grouped(lambda record: _duration_bin(record.duration))
    return {
        "intervals": dict(zip(bootstrap.RATES, bounds)),
        "edits": confusions.edits(pairs),
        "by_category": grouped(lambda record: record.category),
        "by_duration": sorted(durations, key=_shortest_s),
        "by_speaker": sorted(speakers, key=lambda g: (-g["CER"], g["name"])),
        "confusions": confusions.commonest(pairs),
        "repetition": _flagged("repetition", records, heard),
        "hallucination": _flagged("hallucination", records, heard),
        "failed": [record.id for record in records if record.failed],
        "numbers": _numbers(records, heard, table),
    }


def flags(record: Record) -> List[str]:
    """What is remarkable about one utterance.

    Arguments
    ---------
    record : Record
        Of any set.

    Returns
    -------
    list of str
        Of "failed", "repetition", "hallucination" and "number" (written as
        digits on one side, in words on the other) those that hold.
    """
    return _utterance(record).flags


def is_loop(reference: str, hypothesis: str) -> bool:
    """Whether a hypothesis repeats a piece that its reference does not.

    A piece of 1 to 60 characters, spaces aside, stands at least 4 times in a
    row, and more than twice as often as anywhere in the reference. Equal
    digits of one number are no loop.

    ==================  ==========================  =====  ================
    reference           hypothesis                  loop
    ==================  ==========================  =====  ================
    네                  네 네 네 네                 yes
    네                  네 네 네                    no     three
    네 네               네 네 네 네                 no     twice as often
    ㅋㅋㅋㅋ            ㅋㅋㅋㅋㅋㅋㅋㅋ            no
    ㅋㅋㅋㅋ            ㅋㅋㅋㅋㅋㅋㅋㅋㅋ          yes
    좋아요              좋아 좋아 좋아 좋아요       yes    a longer piece
    백만 원             1000000 원                  no     a number
    (none)              어 어 어 어 어              yes
    ==================  ==========================  =====  ================

    Arguments
    ---------
    reference, hypothesis : str
        After ``text.for_scoring``.

    Returns
    -------
    bool
    """
    said = without_spaces(reference)
    for found in _LOOP.finditer(without_spaces(hypothesis)):
        piece, row = found[1], found[0]
        if row.isdecimal() and row in hypothesis:
            continue
        n_allowed = 2 * _longest_row(piece, said)
        if len(row) // len(piece) > n_allowed:
            return True
    return False


def is_invented(reference: str, hypothesis: str) -> bool:
    """Whether a hypothesis tells what nobody said.

    One of three, spaces aside: the reference is empty; the insertions alone
    are 10 characters or more, and as many as the reference has; or of at
    least 5 characters, half as many as the reference has, a fifth or fewer
    match of what could. The second and the third do not hold for a loop.

    ==================  ==========================  ========  =============
    reference           hypothesis                  invented
    ==================  ==========================  ========  =============
    (none)              네                          yes       no speech
    (none)              (none)                      no
    네                  시청해 주셔서 감사합니다    yes       insertions
    네                  네 알겠습니다               no        five of them
    오늘 날씨 좋네요    구독 부탁드립니다           yes       none matches
    오늘 날씨 좋네요    오늘은 날시가 좋내요        no
    오늘 날씨 좋네요    감사                        no        too short
    네                  네 네 네 네 … (20 times)    no        a loop
    ==================  ==========================  ========  =============

    What is right, but in another script (스타벅스, starbucks), is not told
    from what is invented.

    Arguments
    ---------
    reference, hypothesis : str
        After ``text.for_scoring``; with their numbers written alike, or
        digits for words count as invented.

    Returns
    -------
    bool
    """
    said, written = without_spaces(reference), without_spaces(hypothesis)
    if not said or not written:
        return bool(written)
    if is_loop(reference, hypothesis):
        return False
    n_inserted = n_matched = 0
    for step in Levenshtein.opcodes(said, written):
        length = step.dest_end - step.dest_start
        n_inserted += length if step.tag == "insert" else 0
        n_matched += length if step.tag == "equal" else 0
    is_fluent = len(written) >= max(N_FLUENT, len(said) / 2)
    other = is_fluent and n_matched <= N_SHARED * min(len(said), len(written))
    return n_inserted >= max(N_INVENTED, len(said)) or other


def _utterance(record: Record) -> Utterance:
    ((reference, hypothesis),) = bootstrap.scored([record])
    *merged, n = numbers.merge(reference, hypothesis)
    holds = {
        "failed": record.failed,
        "repetition": is_loop(reference, hypothesis),
        "hallucination": is_invented(*merged),
        "number": n > 0,
    }
    found = [name for name, is_so in holds.items() if is_so]
    return Utterance((reference, hypothesis), tuple(merged), n, found)


def _longest_row(piece, said) -> int:
    """How often a piece stands in a row, at most."""
    rows = re.findall(f"(?:{re.escape(piece)})+", said)
    return max(map(len, rows), default=0) // len(piece)


def _groups(
    names: List[str], table: np.ndarray, records: List[Record], resampling
) -> List[Dict]:
    """The groups of one kind, by name."""
    rows = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    if list(rows) == [""]:
        return []
    return [
        _group(n, rows[n], table, records, resampling) for n in sorted(rows)
    ]


def _group(name, rows, table, records, resampling) -> Dict:
    here = table[rows][:, [_CER, _WER]]
    cer, wer = bootstrap.rates(here.sum(0)).tolist()
    ((low, high),) = bootstrap.interval(here[:, :1], *resampling)
    return {
        "name": name,
        **{"CER": cer, "WER": wer, "low": low, "high": high},
        "n_utterances": len(rows),
        "n_reference_chars": int(here[:, 0, 1].sum()),
        "hours": sum(records[row].duration for row in rows) / 3600,
    }


def _duration_bin(duration_s: float) -> str:
    """0-2 s, 2-5 s, …, 30 s-; a clip of 2 s is in the first."""
    place = int(np.searchsorted(DURATIONS_S, duration_s))
    if place == len(DURATIONS_S):
        return f"{DURATIONS_S[-1]} s-"
    return f"{(0, *DURATIONS_S)[place]}-{DURATIONS_S[place]} s"


def _shortest_s(group: Dict) -> int:
    return int(re.match("[0-9]+", group["name"])[0])


def _flagged(name, records, heard) -> Dict:
    pairs = zip(records, heard)
    ids = [record.id for record, found in pairs if name in found.flags]
    rate = 100.0 * len(ids) / max(len(records), 1)
    return {"rate": rate, "ids": ids[:N_IDS]}


def _numbers(records, heard, table) -> Dict:
    rows = [row for row, found in enumerate(heard) if found.n_numbers]
    merged = table.copy()
    merged[rows] = bootstrap.counts([heard[row].merged for row in rows])
    rates = bootstrap.rates(merged.sum(0)).tolist()
    return {
        "n_mixed": sum(found.n_numbers for found in heard),
        "utterances": len(rows),
        "ids": [records[row].id for row in rows[:N_IDS]],
        "CER_merged": rates[_CER],
        "WER_merged": rates[_WER],
    }
