"""The user's own corpus, listed in a TSV, CSV or JSONL file.

In: the file, or the folder that holds it (LAYOUT); columns as in COLUMNS.
Out: Utterances of the splits that the files name, train where none is named.

    path<TAB>text<TAB>speaker<TAB>start<TAB>end
    calls/0001.wav<TAB>네, 안녕하세요.<TAB>agent7<TAB>3.2<TAB>5.0

Paths are absolute, or relative to the folder of the file. UTF-8 or cp949. A
TSV file knows no quotes; a CSV file does. `start` and `end` are seconds. The
ID is the path without its suffix, and the start of a cut, unless `id` says
otherwise. `session` is the recording or conversation whose clips follow each
other, and stands in for a missing `speaker`.
"""

import csv
import json
import math
import os
import re
from itertools import islice
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

from local import text
from local.corpora import layout
from local.manifest import Utterance

LAYOUT = """\
  manifest.tsv                     or .csv or .jsonl
  or train.tsv, valid.tsv (or dev.tsv), test*.tsv   or .csv or .jsonl"""
SUFFIXES = (".tsv", ".csv", ".jsonl")
REQUIRED = ("path", "text")
OPTIONAL = ("id", "speaker", "session", "category", "split", "start", "end")
COLUMNS = REQUIRED + OPTIONAL
SPLITS = "train; valid, dev or validation; test… or eval…"

_TEST = re.compile(r"(?:test|evaluation|eval)(.*)")


def transcripts(folder: Path) -> List[Path]:
    """Lists the files of the manifest.

    Arguments
    ---------
    folder : Path
        The file itself, or the folder that holds it.

    Returns
    -------
    list of Path
        Absolute.

    Raises
    ------
    FileNotFoundError
        There is none.
    ValueError
        The file is of another kind, or one name has two suffixes.
    """
    folder = Path(folder).absolute()
    if folder.is_file():
        if folder.suffix.lower() not in SUFFIXES:
            raise ValueError(
                f"data_folder={folder}: '{folder.suffix}' is not read; "
                f"choose {', '.join(SUFFIXES)}"
            )
        return [folder]
    files = [p for p in sorted(folder.glob("*")) if p.suffix in SUFFIXES]
    chosen = [p for p in files if p.stem == "manifest"]
    chosen = chosen or [p for p in files if _split(p.stem)]
    if not chosen:
        raise layout.not_found(folder, LAYOUT)
    if len({p.stem for p in chosen}) < len(chosen):
        raise ValueError(
            f"data_folder={folder} holds one list in two formats: "
            f"{', '.join(p.name for p in chosen)}; keep one of each"
        )
    return chosen


def read(
    folder: Path, columns: Optional[Dict[str, str]] = None
) -> Iterator[Utterance]:
    """Reads the manifest; a row that cannot be read has the text None.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``.
    columns : dict or None
        Names in COLUMNS to those in the file, where they differ.

    Yields
    ------
    Utterance
        A cut that is none (no numbers, or an end before its start) has no
        length: ``start`` and ``stop`` are 0.

    Raises
    ------
    FileNotFoundError
        There is no manifest.
    ValueError
        A column is missing or unknown, or a value of `split` is unknown.
    """
    columns = _complete(columns or {})
    is_one_file = Path(folder).is_file()
    splits = {
        path: "" if is_one_file or path.stem == "manifest" else path.stem
        for path in transcripts(folder)
    }
    for path, split in splits.items():
        _check_columns(path, columns)
        if not split:
            _check_splits(path, columns["split"])
    for path, split in splits.items():
        for number, row in _rows(path):
            cells = {name: _cell(row.get(columns[name])) for name in COLUMNS}
            cells["split"] = split or cells["split"] or "train"
            yield _utterance(cells, path, number)


def _complete(columns: Dict[str, str]) -> Dict[str, str]:
    unknown = sorted(set(columns) - set(COLUMNS))
    if unknown:
        raise ValueError(
            f"columns: {', '.join(unknown)} is unknown; "
            f"choose among {', '.join(COLUMNS)}"
        )
    return {name: columns.get(name, name) for name in COLUMNS}


def _check_columns(path: Path, columns: Dict[str, str]) -> None:
    present = _header(path)
    renamed = [name for name in COLUMNS if columns[name] != name]
    missing = [
        columns[name]
        for name in dict.fromkeys(REQUIRED + tuple(renamed))
        if columns[name] not in present
    ]
    if missing:
        raise ValueError(
            f"{path}: column {', '.join(missing)} is missing; the file has "
            f"{', '.join(present) or 'none'}. Set columns to map our names "
            "to yours, for example columns: {path: file, text: sentence}"
        )


def _check_splits(path: Path, column: str) -> None:
    values = {_cell(row.get(column)) for _, row in _rows(path)}
    unknown = sorted(v for v in values if v and not _split(v))
    if unknown:
        raise ValueError(
            f"{path}: split {', '.join(map(repr, unknown))} is unknown; "
            f"choose {SPLITS}"
        )


def _split(value: str) -> str:
    """Our name of a split; empty if the value names none."""
    value = value.strip().lower()
    test = _TEST.fullmatch(value)
    if test:
        # The name becomes that of a file.
        return "test" + re.sub(r"\W+", "_", test.group(1))
    if value in ("valid", "dev", "validation"):
        return "valid"
    return "train" if value == "train" else ""


def _header(path: Path) -> List[str]:
    if path.suffix.lower() == ".jsonl":
        return list(dict.fromkeys(k for _, row in _rows(path) for k in row))
    _, header = next(_table(path), (0, []))
    return [name.strip() for name in header]


def _rows(path: Path) -> Iterator[Tuple[int, dict]]:
    """Line numbers and rows; a line that cannot be read is an empty row."""
    if path.suffix.lower() == ".jsonl":
        for number, line in layout.numbered_lines(path):
            yield number, _object(line)
        return
    header = _header(path)
    for number, cells in islice(_table(path), 1, None):
        # A cell too many: an unquoted comma has cut the text.
        ragged = len(cells) > len(header)
        yield number, {} if ragged else dict(zip(header, cells))


def _table(path: Path) -> Iterator[Tuple[int, List[str]]]:
    if path.suffix.lower() == ".tsv":
        for number, line in layout.numbered_lines(path):
            yield number, line.split("\t")
        return
    reader = csv.reader(layout.lines(path, newline=""))
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield reader.line_num, []
            continue
        if cells:
            yield reader.line_num, cells


def _object(line: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _cell(value) -> Optional[str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value.strip() if isinstance(value, str) else None


def _utterance(
    cells: Dict[str, Optional[str]], path: Path, number: int
) -> Utterance:
    audio, raw = cells["path"], cells["text"]
    start, stop = _cut(cells["start"], cells["end"])
    default = _identifier(audio, cells["start"]) if audio else ""
    return Utterance(
        id=cells["id"] or default or f"{path.name}:{number}",
        wav=str(path.parent / audio) if audio else "",
        text=None if raw is None else text.for_label(raw),
        split=_split(cells["split"]),
        speaker=cells["speaker"] or cells["session"] or "",
        session=cells["session"] or "",
        category=cells["category"] or "",
        start=start,
        stop=stop,
    )


def _identifier(audio: str, start: Optional[str]) -> str:
    stem = os.path.splitext(os.path.normpath(audio))[0]
    name = stem.strip("/").replace("/", "-")
    return f"{name}-{start}" if start else name


def _cut(start: Optional[str], end: Optional[str]) -> tuple:
    """Seconds; None where nothing is said, both 0 for a cut that is none."""
    try:
        first = float(start) if start else None
        last = float(end) if end else None
    except ValueError:
        return 0.0, 0.0
    until = math.inf if last is None else last
    if not 0.0 <= (first or 0.0) < until or last == math.inf:
        return 0.0, 0.0
    return first, last
