"""What preparation kept, and what it left out and why.

In: the clips of a preparation, in a ClipStore.
Out: prepare_report.json, which may list more clips than memory holds; a few
lines of it to read.
"""

import json
from collections import Counter
from pathlib import Path

from local import files
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)

NAME = "prepare_report.json"
LISTS = ("leftover_markup_ids", "dropped_clips")  # last, an item a line
INDENT = 1
OF_A_PART = (
    *("kept", "kept_no_speech", "dropped", "dropped_by_split"),
    "leftover_markup",
)


def require_clips(store, splits, data_folder):
    """Stops where no split has a clip: a ValueError, with an example a reason."""
    if any(store.totals(split)["clips"] for split in splits):
        return
    reasons = Counter(reason for reason, _ in store.dropped.elements())
    first = {}
    for identifier, _, reason, wav, detail in store.dropped_clips():
        first.setdefault(reason, f"'{identifier}', {detail or wav}")
    lines = "".join(
        f"\n  - {n} {reason}, such as {first[reason]}"
        for reason, n in reasons.items()
    )
    raise ValueError(
        f"{data_folder}: no clip is left of {sum(reasons.values())} found{lines}"
    )


def empty_tests(splits, data_folder):
    """Tests that get no manifest: a run is scored on the others.

    The only tests of a corpus get empty ones, at which a run stops.

    Arguments
    ---------
    splits : dict
        As for ``write``.
    data_folder : Path
        Of the corpus, for the log.

    Returns
    -------
    list of str
    """
    tests = [name for name in splits if name.startswith("test")]
    empty = [name for name in tests if not splits[name]["clips"]]
    if not empty:
        return []
    is_all = len(empty) == len(tests)
    if not is_all:
        remedy = "no manifest is written, and no run scored on it"
    elif splits[empty[0]]["held_out"]:
        remedy = "train has too few texts to hold some out: add clips"
    else:
        remedy = (
            "a run of this corpus alone needs a test: mend its clips, or take "
            "them out of the corpus, and a test is held out of train"
        )
    logger.warning(
        "%s: no clip is left of %s (%s tells what was dropped); %s",
        *(data_folder, ", ".join(empty), NAME, remedy),
    )
    return [] if is_all else empty


def write(path, settings, splits, store, shared, corpora=None, empty_tests=()):
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
    empty_tests : iterable of str
        Tests that have no manifest, since no clip of them is left.
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
        "empty_tests": list(empty_tests),
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


def data_folder(csv_path):
    """What ``$data_root`` stood for when a manifest was written.

    Arguments
    ---------
    csv_path : str or Path
        A manifest beside its report.

    Returns
    -------
    str
        Empty where no report tells it.
    """
    try:
        return head(Path(csv_path).with_name(NAME))["settings"]["data_folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def summary(path):
    """What a person wants to read of a report file, in a few lines."""
    report = head(path)
    lines = [
        f"{name}: {kept['clips']} clips, {kept['hours']:.2f} h"
        + _held_out(name, kept, report.get("corpora", {}))
        for name, kept in report["kept"].items()
    ]
    for name in report["empty_tests"]:
        lines.append(f"{name}: no clip is left, and no manifest")
    for reason, by_split in report["dropped_by_split"].items():
        splits = ", ".join(f"{split} {n}" for split, n in by_split.items())
        n_clips = report["dropped"][reason]
        lines.append(f"dropped, {reason}: {n_clips} ({splits})")
    if report["kept_no_speech"]:
        lines.append(f"kept without speech: {report['kept_no_speech']}")
    if report["leftover_markup"]:
        lines.append(f"kept with leftover markup: {report['leftover_markup']}")
    return "\n".join(lines + _shared(report["leakage"]))


def _held_out(split, kept, corpora):
    """Whether a split, or the part of which corpora, was held out."""
    if kept["held_out_of_train"]:
        return ", held out of train"
    parts = {name: part["kept"].get(split) for name, part in corpora.items()}
    told = [
        f"{part['clips']} clips of {name}"
        for name, part in parts.items()
        if part and part["held_out_of_train"]
    ]
    return f", of them held out of train: {', '.join(told)}" if told else ""


def _shared(leakage):
    """Lines on what train has in common with the other splits."""
    lines = []
    for split, kinds in leakage["splits"].items():
        told = ", ".join(
            f"{found['shared']} {kind}"
            + (f" ({found['clips']} clips)" if found["shared"] else "")
            for kind, found in kinds.items()
        )
        unknown = leakage["without_speaker"].get(split, 0)
        if unknown:
            told += f"; the speakers of {unknown} clips are not known"
        lines.append(f"{split} shares with train: {told}")
    n_copies = leakage["copies_in_train"]["clips"]
    if n_copies:
        lines.append(f"train has copies of its own audio: {n_copies} clips")
    return lines
