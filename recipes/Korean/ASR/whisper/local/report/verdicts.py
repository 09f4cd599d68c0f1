"""What a report says first: how good each model is, and what to look at.

In: an evaluation, as page.write takes it.
Out: for each model sentences, and warnings with the part that shows more.
"""

import collections

from local.report import figures, rows, tables

N_TOLD = 3  # test sets of a sentence, the first; more stand in the table
MANY_TEXTS = 10.0  # percent of the clips without speech that gave text
MANY_CLIPS = 5.0  # percent of a test set's
FAULTS = {
    "repetition": "repeats itself in",
    "hallucination": "writes what nobody said in",
}


def verdicts(evaluation):
    """Each model's score and doubts in plain words.

    Arguments
    ---------
    evaluation : dict
        As ``page.write`` takes it.

    Returns
    -------
    list of dict
        ``model``; ``sentences``; ``warnings``, pairs of a text and the
        section of the page that tells more. A model of which there is
        nothing to say is left out.
    """
    results = evaluation.get("results") or []
    probes = evaluation.get("probes") or []
    twins = _twins(results)
    names = [one["model"] for one in [*results, *probes]]
    found, warners = [], {}
    for model in dict.fromkeys(names):
        own = [one for one in results if one["model"] == model]
        heard = [one for one in probes if one["model"] == model]
        told = _scored(own, evaluation.get("paired") or [])
        sentences = [*told, *_copied(own, twins.get(model, {}))]
        warnings = [*_faults(own), *_invented(heard)]
        other = warners.setdefault(tuple(warnings), model)
        if warnings and other != model:
            warnings = [(f"has the same warnings as {other}.", warnings[-1][1])]
        if sentences or warnings:
            named = {"model": model, "sentences": sentences}
            found.append({**named, "warnings": warnings})
    return found


def _scored(results, paired):
    """One sentence of the test sets, where there is a score."""
    told = []
    for result in results:
        if figures.known((result.get("scores") or {}).get("CER")) is None:
            continue
        names = result["test_set"], result["model"]
        pairs = [p for p in paired if (p["test_set"], p["model_b"]) == names]
        told.append(_score(result) + (_difference(pairs[0]) if pairs else ""))
    if not told:
        return []
    more = len(told) - N_TOLD
    rest = [f"{more} more test set{'s' * (more > 1)} below"] * (more > 0)
    return [f"CER {'; '.join([*told[:N_TOLD], *rest])}."]


def _score(result):
    scores = result["scores"]
    few = tables.is_few(scores.get("n_utterances"))
    intervals = (result.get("analysis") or {}).get("intervals") or {}
    limits = None if few else intervals.get("CER")
    within = f" [{', '.join(map(figures.rate, limits))}]" if limits else ""
    rate = figures.rate(scores["CER"])
    return f"{rate} %{within} on {result['test_set']}"


def _difference(pair):
    """How far a model stands from the one that it was compared with."""
    found = pair.get("CER")
    if not found:
        return ""
    change, other = found["difference"], pair["model_a"]
    points = figures.rate(abs(change))
    told = f"{points} points {'below' if change < 0 else 'above'} {other}"
    if change == 0:
        told = f"as {other}"
    if tables.is_few(pair.get("n_utterances")):
        return f", {told} (too few clips to tell)"
    if found["low"] <= 0 <= found["high"]:
        return f", {told} (not told apart: the interval includes 0)"
    return f", {told} (the interval excludes 0)"


def _twins(results):
    """Of a model: the earlier ones with the same texts, and on which sets."""
    first = {}
    found = collections.defaultdict(dict)
    for result in results:
        texts = {
            tuple(map(one.get, rows.KEY)): one.get("hypothesis") or ""
            for one in result.get("utterances") or []
        }
        if not any(texts.values()):  # where all failed, nothing was written
            continue
        seen = first.setdefault(result["test_set"], [])
        other = next((name for name, made in seen if made == texts), None)
        if other is None:
            seen.append((result["model"], texts))
        else:
            sets = found[result["model"]].setdefault(other, [])
            sets.append(result["test_set"])
    return found


def _copied(results, twins):
    sentences = []
    for other, sets in twins.items():
        where = f" on {', '.join(sets)}" if len(sets) < len(results) else ""
        sentences.append(f"It writes the same texts as {other}{where}.")
    return sentences


def _faults(results):
    """One warning of all test sets in which a fault is frequent."""
    told = []
    for result in results:
        for name, words in FAULTS.items():
            part = (result.get("analysis") or {}).get(name) or {}
            rate = figures.known(part.get("rate"))
            if rate is not None and rate > MANY_CLIPS:
                share = f"{words} {figures.rate(rate, 1)} % of the clips"
                told.append(f"{share} of {result['test_set']}")
    return [(f"{', '.join(told)}.", "edits")] if told else []


def _invented(probes):
    """One warning of all kinds of sound that gave text."""
    loud = [
        probe
        for probe in probes
        if (figures.known(probe.get("with_text")) or 0) > MANY_TEXTS
    ]
    if not loud:
        return []
    counts = collections.Counter()
    for probe in loud:
        for text, n in probe.get("texts") or []:
            counts[text] += n
    often = [figures.short(text) for text, _ in counts.most_common(1)]
    most = f", most often “{often[0]}”" if often else ""
    shares = ", ".join(map(_share, loud))
    return [(f"writes text for {shares}{most}.", "probes")]


def _share(probe):
    """So many clips of a kind."""
    n_clips = probe.get("n_clips") or 0
    n = round(probe["with_text"] * n_clips / 100)
    return f"{n} of {figures.clips(n_clips)} of {probe.get('kind', 'sound')}"
