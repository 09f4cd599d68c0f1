"""The utterance, and the CSV file that holds a split of them.

In: Utterances, or a CSV file written here (or by hand with the same columns).
Out: a CSV file, or a dictionary of rows for SpeechBrain's datasets.
"""

import csv
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, Optional

from local import files, text

COLUMNS = (
    "ID",
    "duration",  # seconds
    "wav",  # absolute, or below $data_root
    "spk_id",
    "wrd",  # NFC
    "start",  # seconds into the file; empty: from its beginning
    "stop",  # seconds into the file; empty: to its end
    "corpus",
    "category",
)
SESSION = "session"  # a tenth column, where a clip has one
DATA_ROOT = "$data_root"


@dataclass(frozen=True)
class Utterance:
    """One clip and what was said in it, as a corpus reader found it.

    Attributes
    ----------
    id : str
        Unique within the corpus.
    wav : str
        Absolute path of the audio file.
    text : str or None
        The label; "" is a clip without speech, None a missing transcript.
    split : str
        "train", "valid", or a name that begins with "test".
    speaker, category : str
        Empty where the corpus does not say.
    session : str
        Which recording or conversation a clip belongs to; the clips of one
        follow each other. Empty where the corpus does not say.
    start, stop : float or None
        Seconds into the file, for a cut of a long recording.
    duration : float
        Seconds; measured by the preparation, 0 before.
    corpus : str
        Its name where several are mixed; empty where there is one.
    """

    id: str
    wav: str
    text: Optional[str]
    split: str
    speaker: str = ""
    category: str = ""
    start: Optional[float] = None
    stop: Optional[float] = None
    duration: float = 0.0
    session: str = ""
    corpus: str = ""


def write(
    path: Path,
    utterances: Iterable[Utterance],
    corpus: str,
    data_root: Path,
    has_sessions: Optional[bool] = None,
) -> None:
    """Writes one split, under a temporary name first.

    The column ``session`` follows ours where an utterance has one.

    Arguments
    ---------
    path : Path
        The CSV file.
    utterances : iterable of Utterance
        In the order of the rows.
    corpus : str
        The corpus column of an utterance that names none.
    data_root : Path
        Audio below this folder is written as ``$data_root/...``.
    has_sessions : bool or None
        Whether any utterance has a session, told beforehand so that they can
        be read one by one; None: all are held in memory to see.
    """
    if has_sessions is None:
        utterances = list(utterances)
        has_sessions = any(u.session for u in utterances)
    with files.replacing(path) as file:
        # A lone carriage return is quoted only where line ends have one.
        writer = csv.writer(_UnixLines(file), lineterminator="\r\n")
        writer.writerow(COLUMNS + (SESSION,) * has_sessions)
        for u in utterances:
            cells = _cells(u, corpus, str(data_root).rstrip(os.sep) + os.sep)
            writer.writerow(cells + (u.session,) * has_sessions)


class _UnixLines:
    """A file whose rows end with a line feed alone."""

    def __init__(self, file):
        self.file = file

    def write(self, row: str) -> None:
        self.file.write(row[:-2] + "\n")


def _cells(u: Utterance, corpus: str, root: str) -> tuple:
    wav = u.wav
    if wav.startswith(root):
        wav = f"{DATA_ROOT}/{wav[len(root) :]}"
    # A microsecond is under one sample at any rate.
    start = "" if u.start is None else f"{u.start:.6f}"
    stop = "" if u.stop is None else f"{u.stop:.6f}"
    return (
        *(u.id, f"{u.duration:.3f}", wav, u.speaker, u.text),
        *(start, stop, u.corpus or corpus, u.category),
    )


def read(path: Path, data_root: str) -> Dict[str, dict]:
    """Reads one split.

    SpeechBrain's own CSV reader takes a ``$`` in a transcript for a variable
    and stops; here only the beginning of ``wav`` is replaced.

    Arguments
    ---------
    path : Path
        A CSV file with at least SpeechBrain's columns.
    data_root : str
        What ``$data_root`` stands for.

    Returns
    -------
    dict
        ID to row, durations and cuts as float seconds (cuts may be None),
        ``category`` and ``session`` empty where the file has none.

    Raises
    ------
    ValueError
        A column is missing, a row is longer or shorter than the header, an
        ID stands twice, or a number is none.
    """
    rows = {}
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        missing = set(COLUMNS[:5]) - set(reader.fieldnames or ())
        if missing:
            raise ValueError(
                f"{path}: column {', '.join(sorted(missing))} is missing; "
                f"the file has {', '.join(reader.fieldnames or ['no header'])}"
                "; python -m local.prepare makes one with all of them"
            )
        for row in reader:
            identifier = row.pop("ID")
            if identifier in rows:
                raise ValueError(
                    f"{path}, line {reader.line_num}: the ID '{identifier}' "
                    "stands twice; make the IDs unique"
                )
            rows[identifier] = _typed(row, path, reader.line_num, data_root)
    return rows


def _typed(row: dict, path: Path, line: int, data_root: str) -> dict:
    if None in row:  # cutting a label at its comma would go unseen
        raise ValueError(
            f"{path}, line {line}: more cells than columns; put a text with a "
            "comma in double quotes"
        )
    if None in (row[column] for column in COLUMNS[1:5]):
        raise ValueError(
            f"{path}, line {line}: fewer cells than columns; an empty text "
            "needs its comma too"
        )
    try:
        row["duration"] = _seconds(row["duration"])
        for cut in ("start", "stop"):
            row[cut] = _seconds(row[cut]) if row.get(cut) else None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}, line {line}: duration, start and stop are seconds: "
            f"{error}"
        ) from None
    if row["wav"].startswith(DATA_ROOT):
        row["wav"] = str(data_root).rstrip("/") + row["wav"][len(DATA_ROOT) :]
    row["wrd"] = text.for_label(row["wrd"])
    for column in ("category", SESSION):
        row[column] = row.get(column) or ""
    return row


def _seconds(cell: str) -> float:
    seconds = float(cell)
    if not math.isfinite(seconds):
        raise ValueError(f"'{cell}' is no time")
    return seconds
