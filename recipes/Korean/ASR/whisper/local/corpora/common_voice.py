"""Common Voice, Korean: sentences read by volunteers.

In: an unpacked release.
Out: Utterances of train, valid (its dev) and test.

Source: https://commonvoice.mozilla.org/ko/datasets
Licence: CC0
Size: small. Train, dev, test: 279, 213, 228 clips in release 15; 376, 330,
339 in 17; 658, 504, 523 in 24 (2.46 h validated). MP3.
"""

from pathlib import Path
from typing import Dict, Iterator, List, Tuple

from local import text
from local.corpora import layout
from local.manifest import Utterance

LAYOUT = """\
  train.tsv, dev.tsv, test.tsv   with client_id, path, sentence, ...
  clips/*.mp3
  (all may lie in ko/ or cv-corpus-<release>/ko/)"""
PLACES = ("", "ko", "cv-corpus-*", "cv-corpus-*/ko")
TABLES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}


def transcripts(folder: Path) -> List[Path]:
    """Lists the tables.

    Arguments
    ---------
    folder : Path
        The folder with the tables, or one above it.

    Returns
    -------
    list of Path
        Absolute; those of the three that are there.

    Raises
    ------
    FileNotFoundError
        None is there.
    ValueError
        The folder holds several releases.
    """
    root = layout.find(folder, PLACES, list(TABLES.values()), LAYOUT)
    paths = (root / table for table in TABLES.values())
    return [path for path in paths if path.exists()]


def read(folder: Path) -> Iterator[Utterance]:
    """Reads the tables; a row that is too short has the text None.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``.

    Yields
    ------
    Utterance
        The client is its speaker.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    ValueError
        A table has no column ``path`` or ``sentence``, or the folder holds
        several releases.
    """
    splits = {table: split for split, table in TABLES.items()}
    for path in transcripts(folder):
        for number, row in _rows(path):
            name, sentence = row.get("path"), row.get("sentence")
            yield Utterance(
                id=Path(name).stem if name else f"{path.name}:{number}",
                wav=str(path.parent / "clips" / name) if name else "",
                text=None if sentence is None else text.for_label(sentence),
                split=splits[path.name],
                speaker=row.get("client_id", ""),
            )


def _rows(path: Path) -> Iterator[Tuple[int, Dict[str, str]]]:
    lines = layout.numbered_lines(path)
    _, first = next(lines, (0, ""))
    header = first.split("\t")
    missing = [name for name in ("path", "sentence") if name not in header]
    if missing:
        raise ValueError(
            f"{path}: column {', '.join(missing)} is missing; the file has "
            f"{', '.join(header)}. Take the tables of the release as they are"
        )
    for number, line in lines:
        # Quotes belong to the sentence, so that no CSV reader is used.
        cells = line.split("\t")
        ragged = len(cells) > len(header)  # a tab has cut the sentence
        yield number, {} if ragged else dict(zip(header, cells))
