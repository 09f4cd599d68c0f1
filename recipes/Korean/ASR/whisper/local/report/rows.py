"""The table of utterances in a report: what its script reads.

In: results, with the utterances of each; the players of their clips.
Out: plain lists for JSON, the worst clips first, and edits to colour.
"""

import math

from rapidfuzz.distance import Levenshtein

from local import text as korean

N_LISTED = 20_000  # clips; a browser searches so many while one types
KEY = ("id", "reference", "wav", "start", "stop")  # what makes a clip


def worst_clips(results):
    """Clips with what each model made of them.

    Each model's worst clips come first in turn, by edits and then by rate:
    where not all are listed, a base model that fails everywhere does not hide
    what is left to mend.

    Arguments
    ---------
    results : list of dict
        As ``page.write`` takes them.

    Returns
    -------
    list of (str, list of (str, dict))
        Test set; model and utterance. At least one utterance each.
    """
    clips, best_ranks = {}, {}
    for model in dict.fromkeys(result["model"] for result in results):
        found = [
            ((result["test_set"], *map(one.get, KEY)), one)
            for result in results
            if result["model"] == model
            for one in result.get("utterances") or []
        ]
        found.sort(key=lambda pair: _badness(pair[1]), reverse=True)
        for rank, (key, one) in enumerate(found):
            clips.setdefault(key, []).append((model, one))
            best_ranks[key] = min(rank, best_ranks.get(key, rank))
    ordered = sorted(clips, key=best_ranks.get)
    return [(key[0], clips[key]) for key in ordered]


def _badness(utterance):
    errors, n = utterance.get("errors") or 0, utterance.get("n_chars") or 0
    return errors, errors / max(n, 1)


def content(clips, players):
    """What the page's script reads.

    Arguments
    ---------
    clips : list
        As ``worst_clips`` gives them.
    players : list of (str or None, str)
        Of the clips: address, or why there is none.

    Returns
    -------
    dict
        ``models``, ``sets``, ``categories`` and ``flags``: names. ``clips``:
        set, id, reference, seconds, category, speaker, address, reason.
        ``rows``: clip, model, edits, characters, hypothesis, flags, and the
        alignment as ``aligned`` gives it. Sets, models, categories and flags
        are places in the lists of names.
    """
    models, sets, categories, flags = {}, {}, {}, {}
    heads, rows = [], []
    for (test_set, made), (address, reason) in zip(clips, players):
        one = made[0][1]
        heads.append(
            [
                _place(sets, test_set),
                str(one.get("id", "")),
                one.get("reference") or "",
                _finite(one.get("duration")),
                _place(categories, one.get("category") or ""),
                str(one.get("speaker") or ""),
                address,
                reason,
            ]
        )
        for model, row in made:
            rows.append(
                [
                    len(heads) - 1,
                    _place(models, model),
                    row.get("errors") or 0,
                    row.get("n_chars") or 0,
                    row.get("hypothesis") or "",
                    [_place(flags, name) for name in row.get("flags") or []],
                    aligned(row.get("reference"), row.get("hypothesis")),
                ]
            )
    names = {"models": models, "sets": sets}
    names |= {"categories": categories, "flags": flags}
    lists = {name: list(places) for name, places in names.items()}
    return {**lists, "clips": heads, "rows": rows}


def _place(places, name):
    return places.setdefault(name, len(places))


def _finite(value):
    """A number that JSON knows."""
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return value if known else None


def aligned(reference, hypothesis):
    """The edits between two texts, as CER counts them.

    =============  ==============  ============================
    reference      hypothesis      aligned
    =============  ==============  ============================
    네, 학교에     네 핵교에       네_, [학, 핵], 교에
    가다           가다가          가다, [none, 가]
    가 다          가다            가, [_, none], 다
    =============  ==============  ============================

    Arguments
    ---------
    reference, hypothesis : str or None
        Raw texts.

    Returns
    -------
    list of (str or list of str)
        What both have after ``text.for_scoring``; or a pair, of which the
        reference has the first and the hypothesis the second.
    """
    expected = korean.for_scoring(reference or "")
    found = korean.for_scoring(hypothesis or "")
    pieces = []
    for step in Levenshtein.opcodes(expected, found):
        wanted = expected[step.src_start : step.src_end]
        given = found[step.dest_start : step.dest_end]
        pieces.append(wanted if step.tag == "equal" else [wanted, given])
    return pieces
