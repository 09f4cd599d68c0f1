"""What preparation kept, and what it left out and why.

In: the splits and the dropped clips of a corpus.
Out: the content of prepare_report.json; a few lines of it to read.
"""

import json
from collections import Counter
from pathlib import Path

from local import text

NAME = "prepare_report.json"


def content(settings, splits, of_corpus, dropped):
    """What stands in the file, as plain values.

    Arguments
    ---------
    settings : dict
        What the manifests follow from.
    splits : dict
        Name to kept Utterances.
    of_corpus : collection of str
        Splits that the corpus itself has; the others were held out.
    dropped : list
        (Utterance, reason, detail).
    """
    marked = [
        u.id
        for split in splits.values()
        for u in split
        if text.leftovers(u.text)
    ]
    return {
        "settings": settings,
        "kept": {
            name: {
                "clips": len(split),
                "hours": sum(u.duration for u in split) / 3600,
                "held_out_of_train": name not in of_corpus,
            }
            for name, split in splits.items()
        },
        "kept_no_speech": sum(
            not u.text for split in splits.values() for u in split
        ),
        "dropped": dict(Counter(reason for _, reason, _ in dropped)),
        "leftover_markup": len(marked),
        "leftover_markup_ids": marked,
        "dropped_clips": [
            {
                "id": u.id,
                "split": u.split,
                "reason": reason,
                "wav": u.wav,
                "detail": detail[1] if detail else "",
            }
            for u, reason, detail in dropped
        ],
    }


def summary(path):
    """What a person wants to read of a report file, in a few lines."""
    report = json.loads(Path(path).read_text(encoding="utf-8"))
    lines = [
        f"{name}: {kept['clips']} clips, {kept['hours']:.2f} h"
        + (", held out of train" if kept["held_out_of_train"] else "")
        for name, kept in report["kept"].items()
    ]
    for reason, n in report["dropped"].items():
        where = Counter(
            clip["split"]
            for clip in report["dropped_clips"]
            if clip["reason"] == reason
        )
        splits = ", ".join(f"{split} {k}" for split, k in where.items())
        lines.append(f"dropped, {reason}: {n} ({splits})")
    if report["kept_no_speech"]:
        lines.append(f"kept without speech: {report['kept_no_speech']}")
    if report["leftover_markup"]:
        lines.append(f"kept with leftover markup: {report['leftover_markup']}")
    return "\n".join(lines)
