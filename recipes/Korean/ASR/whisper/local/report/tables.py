"""The scores of all models on all test sets, as tables for other programs.

In: an evaluation, as page.write takes it.
Out: scores.csv, a line for each model and test set; a Markdown table.
"""

import csv
import re

from local import files, metrics

NAMES = ("model", "test_set")
LIMITS = ("low", "high")  # of a rate's interval
FIRST = [*NAMES, "text_policy"]
RESULTS = ("repetition", "hallucination", "numbers", "CER_merged", "WER_merged")
SHOWN = ("CER", "CER_no_space", "WER", "sWER")
COMPARED = ("CER", "WER")  # whose differences are told
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet computes
MARKUP = re.compile(r"([\\|*`<\[\]])")  # what Markdown reads in a name
N_CLIPS = 5  # of fewer, resampling tells no interval


def write_csv(path, evaluation):
    """Writes a line for each model and test set.

    Arguments
    ---------
    path : Path
        UTF-8, comma-separated.
    evaluation : dict
        As ``page.write`` takes it. The columns are every flat score, the
        limits of its interval beside it, ``real_time_factor``, the rates of
        ``repetition`` and ``hallucination``, and of digits against words the
        ``numbers`` and ``CER_merged``, ``WER_merged``. What a result does not
        have is empty. A name that a spreadsheet would compute begins with an
        apostrophe.

    Raises
    ------
    OSError
        It cannot be written; the file that was there is whole.
    """
    rows = [_row(result) for result in evaluation.get("results", [])]
    found = dict.fromkeys(name for row in rows for name in row)
    columns = [*FIRST, *(name for name in found if name not in FIRST)]
    with files.replacing(path) as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _safe(row[name]) for name in row})


def _row(result):
    """One line, in the order of its columns."""
    analysis = result.get("analysis") or {}
    intervals = analysis.get("intervals") or {}
    row = {name: result[name] for name in NAMES}
    scores = result.get("scores") or {}
    names = [name for name in metrics.RATES if name in scores]
    for name in [*names, *(name for name in scores if name not in names)]:
        row[name] = scores[name]
        if name in intervals:
            limits = [f"{name}_{limit}" for limit in LIMITS]
            row.update(zip(limits, intervals[name]))
    numbers = analysis.get("numbers") or {}
    rest = [
        result.get("real_time_factor"),
        *((analysis.get(name) or {}).get("rate") for name in RESULTS[:2]),
        *(numbers.get(name) for name in ("n_mixed", *RESULTS[3:])),
    ]
    return {**row, **dict(zip(["real_time_factor", *RESULTS], rest))}


def _safe(value):
    """A cell that no spreadsheet takes for a formula."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return value


def is_few(n_utterances):
    """Whether resampling tells nothing: of one clip no interval has width."""
    return n_utterances is not None and n_utterances < N_CLIPS


def markdown(evaluation):
    """A table to paste: a line for each test set and model.

    Arguments
    ---------
    evaluation : dict
        As ``page.write`` takes it.

    Returns
    -------
    str
        Percents with their 95 % intervals, and the differences from the
        model that it was compared with; the failed clips, where any clip
        failed; the text policy stands below.
    """
    head = ["Test set", "Model", *SHOWN]
    head += [f"{rate} difference" for rate in COMPARED]
    rules = ["---", "---", *["---:"] * (len(head) - 2)]
    results = by_set(evaluation.get("results", []))
    rows = [_cells(r, evaluation.get("paired", [])) for r in results]
    n_failed = [(r.get("scores") or {}).get("n_failed") or 0 for r in results]
    if any(n_failed):
        head, rules = [*head, "Failed"], [*rules, "---:"]
        rows = [[*row, f"{n}"] for row, n in zip(rows, n_failed)]
    lines = [f"| {' | '.join(row)} |" for row in [head, rules, *rows]]
    note = "In percent, with 95 % intervals in brackets."
    for name, value in (evaluation.get("settings") or {}).items():
        if name.startswith("base of "):
            note += f" {_name(name.capitalize())}: {value}."
    return "\n".join([*lines, "", f"{note} {policy(evaluation)}"]) + "\n"


def by_set(results):
    """The same results, those of a test set beside each other.

    Arguments
    ---------
    results : list of dict
        As ``page.write`` takes them.

    Returns
    -------
    list of dict
        Sets as they came first; within a set, as they came.
    """
    sets = list(dict.fromkeys(result["test_set"] for result in results))
    return sorted(results, key=lambda result: sets.index(result["test_set"]))


def policy(evaluation):
    """Which text rules the scores follow, as a sentence.

    Arguments
    ---------
    evaluation : dict
        As ``page.write`` takes it.

    Returns
    -------
    str
    """
    scores = [r.get("scores") or {} for r in evaluation.get("results", [])]
    found = [one.get("text_policy") for one in scores]
    named = [name for name in dict.fromkeys(found) if name]
    names = named or [
        (evaluation.get("settings") or {}).get("text_policy", "not named")
    ]
    if len(names) > 1:
        return f"Text policies differ: {', '.join(names)}; do not compare."
    return f"Text policy: {names[0]}."


def _cells(result, paired):
    model, test_set = result["model"], result["test_set"]
    analysis = result.get("analysis") or {}
    intervals = analysis.get("intervals") or {}
    scores = result.get("scores") or {}
    if is_few(scores.get("n_utterances")):
        intervals = {}
    rates = [
        _number(scores.get(name)) + _limits(intervals.get(name))
        for name in SHOWN
    ]
    pairs = [
        pair
        for pair in paired
        if pair["test_set"] == test_set and pair["model_b"] == model
    ]
    compared = [
        "; ".join(_difference(pair, rate) for pair in pairs)
        for rate in COMPARED
    ]
    return [_name(test_set), _name(model), *rates, *compared]


def _difference(pair, rate):
    """How far a rate moved, told whether the interval holds 0."""
    found = pair.get(rate)
    if not found:
        return ""
    moved = f"{found['difference']:+.2f}"
    if is_few(pair.get("n_utterances")):
        return f"{moved} (too few clips) from {_name(pair['model_a'])}"
    limits = [found["low"], found["high"]]
    holds = " (holds 0)" if limits[0] <= 0 <= limits[1] else ""
    within = f"[{limits[0]:+.2f}, {limits[1]:+.2f}]"
    return f"{moved} {within}{holds} from {_name(pair['model_a'])}"


def _number(value):
    return "" if value is None else f"{value:.2f}"


def _limits(limits):
    return f" [{limits[0]:.2f}, {limits[1]:.2f}]" if limits else ""


def _name(text):
    """A name on one line, that stays in its cell."""
    return MARKUP.sub(r"\\\1", " ".join(str(text).split()))
