"""Pansori-TEDxKR: TEDx talks, cut at their subtitles.

In: the unpacked archive, or a clone of the repository.
Out: Utterances of train; the corpus has no other split.

Source: https://www.openslr.org/58/ (pansori-tedxkr-corpus-1.0.tar.gz)
Licence: CC BY-NC-ND 4.0
Size: about 3 h, 2,989 utterances, 41 speakers. 16 kHz FLAC.

The folder of a speaker has a coded name, that of a talk its video's.
"""

from pathlib import Path
from typing import Iterator, List, Optional

from local.corpora import layout
from local.manifest import Utterance

LAYOUT = """\
  <speaker>/<video>/<speaker>-<video>-<number>.flac
  <speaker>/<video>/<speaker>-<video>.trans.txt
  (all may lie in data/ or pansori-tedxkr-corpus-1.0/)"""
PLACES = ("", "data", "*", "*/data")
MARKER = "*/*/*-*.trans.txt"  # Zeroth's have no hyphen


def transcripts(folder: Path) -> List[Path]:
    """Lists the transcript files, one for each talk.

    Arguments
    ---------
    folder : Path
        The folder of the speakers, or one above it.

    Returns
    -------
    list of Path
        Absolute, sorted.

    Raises
    ------
    FileNotFoundError
        There are none.
    ValueError
        The folder holds several copies.
    """
    return sorted(_root(folder).glob(MARKER))


def read(folder: Path) -> Iterator[Utterance]:
    """Reads every talk; recordings without a line have the text None.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``.

    Yields
    ------
    Utterance
        The talk is its session.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    ValueError
        The folder holds several copies.
    """
    for talk in sorted(_root(folder).glob("*/*")):
        if talk.is_dir():
            for identifier, label in layout.spoken(talk):
                yield _utterance(talk, identifier, label)


def _root(folder: Path) -> Path:
    return layout.find(folder, PLACES, [MARKER], LAYOUT)


def _utterance(talk: Path, identifier: str, label: Optional[str]) -> Utterance:
    return Utterance(
        id=identifier,
        wav=str(talk / f"{identifier}.flac"),
        text=label,
        split="train",
        speaker=talk.parent.name,
        session=talk.name,
    )
