"""What is taken for what: edits, and the commonest confusions.

In: pairs of reference and hypothesis, after text.for_scoring.
Out: counts of a test set.
"""

from collections import Counter
from typing import Dict, List

from rapidfuzz.distance import Levenshtein

from local import metrics, text
from local.metrics import Pairs

N_MOST = 30  # of a list
# What jiwer calls the operations of an alignment.
NAMES = {
    "equal": "hits",
    "replace": "substitutions",
    "delete": "deletions",
    "insert": "insertions",
}


def edits(pairs: Pairs) -> Dict[str, Dict[str, int]]:
    """Counts hits and edits, by the alignments of CER and of WER.

    Arguments
    ---------
    pairs : list of (str, str)
        Reference and hypothesis, after ``text.for_scoring``.

    Returns
    -------
    dict
        "characters" (a space is one) and "words", each to ``hits``,
        ``substitutions``, ``deletions`` and ``insertions``, as jiwer counts.
    """
    words = ((ref.split(), hyp.split()) for ref, hyp in pairs)
    return {"characters": _edits(pairs), "words": _edits(words)}


def _edits(pairs) -> Dict[str, int]:
    total = dict.fromkeys(NAMES.values(), 0)
    for reference, hypothesis in pairs:
        for step in Levenshtein.opcodes(reference, hypothesis):
            n_here = step.src_end - step.src_start
            total[NAMES[step.tag]] += n_here or step.dest_end - step.dest_start
    return total


def commonest(pairs: Pairs) -> Dict[str, List[list]]:
    """The confusions that are met most often.

    Spacing is no confusion: syllables are aligned without spaces, as for
    CER_no_space, and words after ``metrics.space_normalized``, as for sWER.

    ====================  ====================  ============================
    reference             hypothesis            counted
    ====================  ====================  ============================
    날씨가                날시가                syllables 씨 시,
                                                words 날씨가 날시가
    나는 집에 가          나는 집에             deleted 가
    네                    네 음 네              inserted 음, 네
    가고 싶어             가고싶어              nothing
    ====================  ====================  ============================

    Arguments
    ---------
    pairs : list of (str, str)
        Reference and hypothesis, after ``text.for_scoring``.

    Returns
    -------
    dict
        "syllables", "words", "inserted" and "deleted" (words, both), each up
        to 30 of [reference, hypothesis, n], "" where there is none; most
        frequent first, and of equals in the order of the alphabet.
    """
    syllables, words = Counter(), Counter()
    rule = text.without_spaces
    for reference, hypothesis in pairs:
        if reference == hypothesis:  # most of a good model's
            continue
        spaced = metrics.space_normalized(reference, hypothesis)
        syllables.update(_changes(rule(reference), rule(hypothesis)))
        words.update(_changes(reference.split(), spaced.split()))
    return {
        "syllables": _most(syllables, lambda ref, hyp: ref and hyp),
        "words": _most(words, lambda ref, hyp: ref and hyp),
        "inserted": _most(words, lambda ref, hyp: not ref),
        "deleted": _most(words, lambda ref, hyp: not hyp),
    }


def _changes(reference, hypothesis):
    """Each edit as what was said and what was written."""
    for tag, i, j in Levenshtein.editops(reference, hypothesis).as_list():
        yield (
            "" if tag == "insert" else reference[i],
            "" if tag == "delete" else hypothesis[j],
        )


def _most(counter, is_asked):
    asked = [(n, pair) for pair, n in counter.items() if is_asked(*pair)]
    asked.sort(key=lambda found: (-found[0], found[1]))
    return [[*pair, n] for n, pair in asked[:N_MOST]]
