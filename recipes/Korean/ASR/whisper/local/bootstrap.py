"""How sure a score is: bootstrap intervals, of one model and between two.

In: Records of a test set; for a comparison, of the same one by two models.
Out: plain dictionaries of percentages.

Utterances are drawn anew, with replacement, as many as there are, and the
rates taken each time: M. Bisani and H. Ney, Bootstrap estimates for confidence
intervals in ASR performance evaluation, ICASSP 2004. Intervals are percentiles
of these rates. Utterances of one speaker are more alike than those of two; for
speakers that no test set has heard, draw whole speakers (``unit``).
"""

from typing import Dict, Iterable, List

import numpy as np
from rapidfuzz.distance import Levenshtein

from local import metrics, text
from local.metrics import Pairs, Record

RATES = ("CER", "CER_no_space", "WER", "sWER")
UNITS = ("utterance", "speaker")  # what is drawn
N_DRAWS = 2**20  # at once: 8 MB an array


def intervals(
    records: Iterable[Record],
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    unit: str = "utterance",
) -> Dict[str, List[float]]:
    """The percentile interval of each rate.

    One utterance alone, or none, has an interval without width.

    Arguments
    ---------
    records : iterable of Record
        Of one test set.
    n : int
        Resamples.
    seed : int
        The same seed and records give the same interval.
    level : float
        Share of the resamples within the interval.
    unit : str
        "utterance" or "speaker": what is drawn. An utterance without a
        speaker is drawn by itself.

    Returns
    -------
    dict
        "CER", "CER_no_space", "WER" and "sWER" to [low, high] in percent.

    Raises
    ------
    ValueError
        n, level or unit is none.
    """
    records = list(records)
    drawn = by_unit(counts(scored(records)), records, unit)
    low, high = _bounds(resampled(drawn, n, seed), level)
    return {r: [low[i], high[i]] for i, r in enumerate(RATES)}


def interval(
    table: np.ndarray, n: int = 1000, seed: int = 0, level: float = 0.95
) -> List[List[float]]:
    """The intervals of ``intervals``, from counts.

    Arguments
    ---------
    table : np.ndarray
        (drawn, rates, 2), as ``counts`` gives it, of any rates.
    n, seed, level
        As for ``intervals``.

    Returns
    -------
    list of list of float
        [low, high] of each rate, in percent.
    """
    low, high = _bounds(resampled(table, n, seed), level)
    return [list(bounds) for bounds in zip(low, high)]


def paired(
    a: Iterable[Record],
    b: Iterable[Record],
    n: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    unit: str = "utterance",
) -> Dict[str, Dict[str, float]]:
    """What b changes against a, on the same utterances.

    Both are drawn together, so what makes an utterance hard for both does
    not widen the interval.

    Arguments
    ---------
    a, b : iterable of Record
        Of two models on one test set, in any order.
    n, seed, level, unit
        As for ``intervals``.

    Returns
    -------
    dict
        "CER", "CER_no_space", "WER" and "sWER", each to ``difference`` (of
        b less a, in percent points: below 0 where b is better), ``low`` and
        ``high`` of its interval, and ``probability_better``, the share of
        resamples in which b's rate is lower; a tie is none.

    Raises
    ------
    ValueError
        The two hold other utterances, or other references, or one twice; or
        n, level or unit is none.
    """
    a, b = _same_utterances(list(a), list(b))
    both = np.concatenate([counts(scored(a)), counts(scored(b))], axis=1)
    both = by_unit(both, a, unit)
    found = _differences(rates(both.sum(0)))
    drawn = _differences(resampled(both, n, seed))
    low, high = _bounds(drawn, level)
    better = (drawn < 0).mean(0).tolist()
    names = "difference", "low", "high", "probability_better"
    values = zip(found.tolist(), low, high, better)
    return {r: dict(zip(names, v)) for r, v in zip(RATES, values)}


def scored(records: Iterable[Record]) -> Pairs:
    """The texts that are compared: both after ``text.for_scoring``."""
    rule = text.for_scoring
    return [(rule(r.reference), rule(r.hypothesis)) for r in records]


def counts(pairs: Pairs) -> np.ndarray:
    """What each utterance adds to the rates.

    Arguments
    ---------
    pairs : list of (str, str)
        As ``scored`` gives them.

    Returns
    -------
    np.ndarray
        (utterances, rates, 2): edits and reference units of each of RATES.
    """
    rows = [_utterance_counts(*pair) for pair in pairs]
    return np.array(rows, dtype=np.int64).reshape(-1, len(RATES), 2)


def _utterance_counts(reference, hypothesis):
    words = reference.split()
    spaced = metrics.space_normalized(reference, hypothesis)
    compared = (
        (reference, hypothesis),
        (text.without_spaces(reference), text.without_spaces(hypothesis)),
        (words, hypothesis.split()),
        (words, spaced.split()),
    )
    return [(Levenshtein.distance(*pair), len(pair[0])) for pair in compared]


def rates(totals: np.ndarray) -> np.ndarray:
    """Edits over reference units.

    Arguments
    ---------
    totals : np.ndarray
        (..., 2), sums of ``counts``.

    Returns
    -------
    np.ndarray
        (...) in percent; as in ``metrics.score``, without a unit 0, or 100
        with any edit.
    """
    edits, n_units = totals[..., 0], totals[..., 1]
    without = np.where(edits > 0, 100.0, 0.0)
    return np.where(n_units, 100.0 * edits / np.maximum(n_units, 1), without)


def by_unit(table: np.ndarray, records: List[Record], unit: str) -> np.ndarray:
    """Sums counts over what is drawn together.

    Arguments
    ---------
    table : np.ndarray
        (utterances, rates, 2)
    records : list of Record
        Of its rows.
    unit : str
        One of UNITS.

    Returns
    -------
    np.ndarray
        (drawn, rates, 2)

    Raises
    ------
    ValueError
        The unit is none.
    """
    if unit not in UNITS:
        choices = " or ".join(UNITS)
        raise ValueError(f"unit='{unit}' is unknown; choose {choices}")
    if unit == "utterance":
        return table
    places = {}
    speakers = [r.speaker or ("", i) for i, r in enumerate(records)]
    rows = [places.setdefault(s, len(places)) for s in speakers]
    sums = np.zeros((len(places), *table.shape[1:]), table.dtype)
    np.add.at(sums, rows, table)
    return sums


def resampled(table: np.ndarray, n: int = 1000, seed: int = 0) -> np.ndarray:
    """The rates of n resamples.

    Arguments
    ---------
    table : np.ndarray
        (drawn, rates, 2)
    n, seed : int
        As for ``intervals``.

    Returns
    -------
    np.ndarray
        (n, rates) in percent.

    Raises
    ------
    ValueError
        n is below 1.
    """
    if n < 1:
        raise ValueError(f"n={n} resamples give no interval; take 1000")
    generator = np.random.default_rng(seed)
    n_rows, n_counts = len(table), 2 * table.shape[1]
    flat = table.reshape(n_rows, n_counts).astype(float)
    n_at_once = max(1, N_DRAWS // max(n_rows, 1))
    sums = []
    for start in range(0, n if n_rows else 0, n_at_once):
        times = _times_drawn(generator, min(n_at_once, n - start), n_rows)
        sums.append(times @ flat)  # counts are whole: sums are exact
    totals = np.concatenate(sums) if sums else np.zeros((n, n_counts))
    return rates(totals.reshape(n, *table.shape[1:]))


def _times_drawn(generator, n, n_rows):
    """(n, n_rows): how often each row is in each resample."""
    drawn = generator.integers(0, n_rows, (n, n_rows))
    drawn += n_rows * np.arange(n)[:, None]
    times = np.bincount(drawn.ravel(), minlength=n * n_rows)
    return times.reshape(n, n_rows).astype(float)


def _bounds(values, level):
    """Low and high of each column, as lists."""
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, as 0.95")
    tail = 50.0 * (1 - level)
    return np.percentile(values, [tail, 100 - tail], axis=0).tolist()


def _differences(both):
    """b's rates less a's, of (..., 2 x rates)."""
    return both[..., len(RATES) :] - both[..., : len(RATES)]


def _same_utterances(a, b):
    """Both in the order of their IDs."""
    found_a, found_b = _by_id(a), _by_id(b)
    others = sorted(set(found_a) ^ set(found_b))
    _none_of(others, "are scored in one of the two alone")
    ids = sorted(found_a)
    a, b = [found_a[i] for i in ids], [found_b[i] for i in ids]
    rule = text.for_scoring
    pairs = ((rule(x.reference), rule(y.reference)) for x, y in zip(a, b))
    others = [i for i, (x, y) in zip(ids, pairs) if x != y]
    _none_of(others, "have two references")
    return a, b


def _by_id(records):
    found = {record.id: record for record in records}
    if len(found) < len(records):
        seen = set()
        twice = [r.id for r in records if r.id in seen or seen.add(r.id)]
        _none_of(twice, "stand twice in one of the two")
    return found


def _none_of(ids, fault):
    if ids:
        shown = ", ".join(ids[:5]) + ", …" * (len(ids) > 5)
        raise ValueError(
            f"{len(ids)} utterances {fault}: {shown}; compare two models on "
            "the same manifest"
        )
