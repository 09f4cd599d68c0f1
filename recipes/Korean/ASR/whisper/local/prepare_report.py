"""What preparation kept, and what it left out and why.

In: the clips of a preparation, in a ClipStore.
Out: prepare_report.json, which may list more clips than memory holds; a few
lines of it to read.
"""

import json

from local import files

NAME = "prepare_report.json"
LISTS = ("leftover_markup_ids", "dropped_clips")  # last, an item a line
INDENT = 1
OF_A_PART = (
    *("kept", "kept_no_speech", "dropped", "dropped_by_split"),
    "leftover_markup",
)


def write(path, settings, splits, store, shared, corpora=None):
    """Writes the file, clip by clip.

    Arguments
    ---------
    path : Path
        The JSON file.
    settings : dict
        What the manifests follow from.
    splits : dict
        Every split, in order, to what ``ClipStore.totals`` tells, and
        ``held_out``: whether it was held out of train.
    store : ClipStore
        The clips.
    shared : dict
        What ``leakage.between`` has found.
    corpora : dict or None
        Where several are mixed: name to the head of its own report.
    """
    head = {
        "settings": settings,
        "kept": {
            name: {
                "clips": split["clips"],
                "hours": split["seconds"] / 3600,
                "held_out_of_train": split["held_out"],
            }
            for name, split in splits.items()
        },
        "kept_no_speech": sum(s["no_speech"] for s in splits.values()),
        "dropped": {},
        "dropped_by_split": {},
        "leakage": shared,
        "leftover_markup": sum(s["marked"] for s in splits.values()),
    }
    for (reason, split), n_clips in store.dropped.items():
        head["dropped_by_split"].setdefault(reason, {})[split] = n_clips
    for reason, by_split in head["dropped_by_split"].items():
        head["dropped"][reason] = sum(by_split.values())
    if corpora:
        head["corpora"] = {
            name: {key: part[key] for key in OF_A_PART}
            for name, part in corpora.items()
        }
    fields = ("id", "split", "reason", "wav", "detail")
    dropped = (dict(zip(fields, row)) for row in store.dropped_clips())
    with files.replacing(path) as file:
        file.write(_json(head, indent=INDENT)[: -len("\n}")])
        for name, items in zip(LISTS, (store.leftovers(), dropped)):
            file.write(f",\n{_opening(name)}")
            for number, item in enumerate(items):
                file.write(f"{',' if number else ''}\n  {_json(item)}")
            file.write("\n ]")
        file.write("\n}\n")


def _json(value, **options):
    return json.dumps(value, ensure_ascii=False, **options)


def _opening(name):
    return f'{" " * INDENT}"{name}": ['


def head(path):
    """Reads a report file but for its lists of clips.

    Arguments
    ---------
    path : Path
        As ``write`` wrote it.

    Returns
    -------
    dict

    Raises
    ------
    FileNotFoundError
        There is none.
    ValueError
        It holds something else.
    """
    lines = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.startswith(_opening(LISTS[0])):
                lines = ["".join(lines).rstrip().rstrip(","), "}"]
                break
            lines.append(line)
    report = json.loads("".join(lines))
    if not isinstance(report, dict):
        raise ValueError(f"{path} is no report of a preparation")
    return report


def summary(path):
    """What a person wants to read of a report file, in a few lines."""
    report = head(path)
    lines = [
        f"{name}: {kept['clips']} clips, {kept['hours']:.2f} h"
        + (", held out of train" if kept["held_out_of_train"] else "")
        for name, kept in report["kept"].items()
    ]
    for reason, by_split in report["dropped_by_split"].items():
        splits = ", ".join(f"{split} {n}" for split, n in by_split.items())
        n_clips = report["dropped"][reason]
        lines.append(f"dropped, {reason}: {n_clips} ({splits})")
    if report["kept_no_speech"]:
        lines.append(f"kept without speech: {report['kept_no_speech']}")
    if report["leftover_markup"]:
        lines.append(f"kept with leftover markup: {report['leftover_markup']}")
    return "\n".join(lines + _shared(report["leakage"]))


def _shared(leakage):
    """Lines on what train has in common with the other splits."""
    lines = []
    for split, kinds in leakage["splits"].items():
        words = [
            f"{found['shared']} {kind} ({found['clips']} clips)"
            for kind, found in kinds.items()
            if found["shared"]
        ]
        told = ", ".join(words) or "no text, speaker or audio"
        lines.append(f"{split} shares with train: {told}")
    n_copies = leakage["copies_in_train"]["clips"]
    if n_copies:
        lines.append(f"train has copies of its own audio: {n_copies} clips")
    return lines
