"""The report of an evaluation: one file that a person opens in a browser.

In: an evaluation: scores, their analysis and the utterances of all models.
Out: report.html, which needs no network and, unless linked, no other file.
"""

import base64
import functools
import hashlib
import json
from pathlib import Path

import jinja2
from markupsafe import Markup

from local import files
from local.report import figures, plots, rows, sound, tables, verdicts

HERE = Path(__file__).parent
N_SPEAKERS = 20  # that are shown, the last model's worst
N_CONFUSIONS = 15
N_EMBEDDED = 200
GROUPS = ("category", "duration", "speaker")
EDITS = ("substitutions", "deletions", "insertions")


def write(path, evaluation, audio="embed", n_embedded=N_EMBEDDED):
    """Writes one page of all that is known about some models.

    Arguments
    ---------
    path : Path
        Of the page; its folder is there.
    evaluation : dict
        ``settings``, ``results``, ``paired``, ``probes`` and ``runs``. Any
        may be missing or empty, and so may any part of a result but its
        ``model`` and its ``test_set``.
    audio : str
        "embed" clips within the page, "link" to the corpus, or "none".
    n_embedded : int
        Clips, of the worst, that are embedded.

    Raises
    ------
    ValueError
        ``audio`` is unknown.
    OSError
        It cannot be written; the page that was there is whole.
    """
    if audio not in sound.MODES:
        raise ValueError(
            f"audio='{audio}' is unknown; choose {', '.join(sound.MODES)}"
        )
    results = evaluation.get("results") or []
    clips = rows.worst_clips(results)
    listed = clips[: rows.N_LISTED]
    heads = [made[0][1] for _, made in listed]
    players = sound.players(heads, path.parent, audio, n_embedded)
    data = rows.content(listed, players) | {"preset": _last(results)}
    page = _page(evaluation, data, len(clips))
    # A lone surrogate of a damaged label is no UTF-8.
    with files.replacing(path, binary=True) as file:
        file.write(page.encode("utf-8", "replace"))


def _last(results):
    """The last model of which there are utterances: the one in the making."""
    names = [one["model"] for one in results if one.get("utterances")]
    return list(dict.fromkeys(names))[-1] if names else ""


def _page(evaluation, data, n_clips):
    script = (HERE / "page.js").read_text(encoding="utf-8")
    digest = hashlib.sha256(script.encode()).digest()
    return _template().render(
        **_view(evaluation),
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(digest).decode(),
        data=_json(data),
        n_clips=n_clips,
        n_listed=len(data["clips"]),
        n_rows=len(data["rows"]),
    )


@functools.lru_cache(maxsize=None)
def _template():
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(HERE),
    )
    environment.filters.update(figures.FILTERS)
    environment.globals["mark"] = plots.mark
    return environment.get_template("page.html")


def _json(value):
    """For a script element: nothing in it closes the element."""
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return Markup(text.replace("<", "\\u003c"))


# What stands above the table of utterances


def _view(evaluation):
    """The names that the template reads."""
    results = evaluation.get("results") or []
    models = list(dict.fromkeys(result["model"] for result in results))
    sets = list(dict.fromkeys(result["test_set"] for result in results))
    results = tables.by_set(results)
    return {
        "models": models,
        "sets": sets,
        "settings": _flat(evaluation.get("settings") or {}),
        "policy": tables.policy(evaluation),
        "verdicts": verdicts.verdicts(evaluation),
        "summary": _summary(results, models, sets),
        "differences": _differences(evaluation.get("paired") or []),
        "curves": [
            (run["model"], *plots.learning_curves(run.get("curves")))
            for run in evaluation.get("runs") or []
        ],
        "groups": [(n, _by(n, results, models, sets)) for n in GROUPS],
        "edits": _edits(results),
        "findings": _findings(results),
        "confusions": _confusions(results),
        "probes": evaluation.get("probes") or [],
    }


def _flat(values, prefix=""):
    """(name, text) of each setting; those of a dict after its name."""
    pairs = []
    for name, value in values.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{name} ")
        elif isinstance(value, (list, tuple)):
            pairs.append((prefix + name, ", ".join(map(str, value))))
        else:
            pairs.append(
                (prefix + name, figures.NO_NUMBER if value is None else value)
            )
    return pairs


def _part(result, name):
    return (result.get("analysis") or {}).get(name) or {}


def _line(result, models):
    """A model's scores on a set, as a line of a plot."""
    scores = result.get("scores") or {}
    few = tables.is_few(scores.get("n_utterances"))
    intervals = {} if few else _part(result, "intervals")
    return {
        "model": result["model"],
        "place": models.index(result["model"]),
        "scores": scores,
        "CER": figures.known(scores.get("CER")),
        "limits": intervals.get("CER"),
        "few": few,
        "intervals": intervals,
        "real_time_factor": result.get("real_time_factor"),
    }


def _summary(results, models, sets):
    """An axis, and (test set, lines)."""
    parts = [
        (name, [_line(r, models) for r in results if r["test_set"] == name])
        for name in sets
    ]
    return {"axis": _axis(line for _, lines in parts for line in lines)} | {
        "parts": parts
    }


def _axis(lines):
    """Of lines with a ``CER`` and its ``limits``.

    One model that fails everywhere does not squeeze the others.
    """
    drawn = [line for line in lines if line["CER"] is not None]
    fair = [line for line in drawn if line["CER"] < plots.FULL]
    values = [
        value
        for line in fair or drawn
        for value in (line["CER"], *(line["limits"] or ()))
    ]
    return plots.Axis(v for v in values if figures.known(v) is not None)


def _by(name, results, models, sets):
    """Plots of CER by a property of the clips: of each set, with an axis."""
    found = []
    for test_set in sets:
        groups = {}
        for result in results:
            if result["test_set"] != test_set:
                continue
            for group in _part(result, f"by_{name}"):
                lines = groups.setdefault(str(group["name"]), [])
                lines.append(_group_line(group, result["model"], models))
        if name == "speaker":
            groups, n_groups = _worst(groups), len(groups)
        else:
            n_groups = len(groups)
        if any(groups):  # not where all are without a name
            lines = [one for lines in groups.values() for one in lines]
            part = {"test_set": test_set, "groups": list(groups.items())}
            found.append({**part, "axis": _axis(lines), "n": n_groups})
    return found


def _group_line(group, model, models):
    limits = [figures.known(group.get("low")), figures.known(group.get("high"))]
    few = tables.is_few(group.get("n_utterances"))
    return {
        **group,
        "model": model,
        "place": models.index(model),
        "CER": figures.known(group.get("CER")),
        "limits": None if few or None in limits else limits,
        "few": few,
    }


def _worst(groups):
    """The speakers of whom the last model gets most wrong."""
    names = sorted(groups, key=lambda n: groups[n][-1]["CER"] or 0)
    return {name: groups[name] for name in reversed(names[-N_SPEAKERS:])}


def _differences(paired):
    """(pair, a line for each rate that its models were compared by)."""
    return [
        (
            pair,
            [
                {
                    **found,
                    "rate": rate,
                    "told": _told(found, pair.get("n_utterances")),
                }
                for rate, found in pair.items()
                if isinstance(found, dict)
            ],
        )
        for pair in paired
    ]


def _told(difference, n_utterances):
    """What a paired difference says: class, words, and why."""
    if tables.is_few(n_utterances):
        return "open", "Too few clips to tell", ""
    low, high = difference["low"], difference["high"]
    if high < 0:
        return "better", "Better", "the interval excludes 0"
    if low > 0:
        return "worse", "Worse", "the interval excludes 0"
    return "open", "Not told apart", "the interval includes 0"


def _edits(results):
    """A line for each result and unit, shares in percent of the reference."""
    lines = []
    for result in results:
        for unit, counts in _part(result, "edits").items():
            n = counts["hits"] + counts["substitutions"] + counts["deletions"]
            shares = [100 * counts[name] / max(n, 1) for name in EDITS]
            edits = list(zip((counts[name] for name in EDITS), shares))
            named = {"result": result, "unit": unit, "n": n}
            lines.append({**named, "edits": edits, "total": sum(shares)})
    return lines


def _findings(results):
    """What else was counted, of results that were analysed."""
    names = "repetition", "hallucination", "failed", "numbers"
    return [
        {"result": result, **{name: _part(result, name) for name in names}}
        for result in results
        if result.get("analysis")
    ]


def _confusions(results):
    """(result, (kind, pairs)) of the most frequent confusions."""
    return [
        (result, [(kind, pairs[:N_CONFUSIONS]) for kind, pairs in found])
        for result in results
        for found in [list(_part(result, "confusions").items())]
        if any(pairs for _, pairs in found)
    ]
