"""Zeroth-Korean: read news sentences.

In: the unpacked archive.
Out: Utterances of train and test; the corpus has no development set.

Source: https://www.openslr.org/40/ (zeroth_korean.tar.gz)
Licence: CC BY 4.0
Size: train 51.6 h, 22,263 utterances, 105 readers, 3,000 sentences;
test 1.2 h, 457 utterances, 10 readers. 16 kHz FLAC.
"""

from pathlib import Path
from typing import Iterator, List

from local.corpora import layout
from local.manifest import Utterance

LAYOUT = """\
  train_data_01/<script>/<reader>/<reader>_<script>_<number>.flac
  train_data_01/<script>/<reader>/<reader>_<script>.trans.txt
  test_data_01/   (likewise)"""
PARTS = {"train": "train_data_01", "test": "test_data_01"}
MARKERS = [f"{part}/*/*/*.trans.txt" for part in PARTS.values()]


def transcripts(folder: Path) -> List[Path]:
    """Lists the transcript files, one for each reader and script.

    Arguments
    ---------
    folder : Path
        The folder with ``train_data_01``, or the one above it.

    Returns
    -------
    list of Path
        Absolute, sorted.

    Raises
    ------
    FileNotFoundError
        There are none.
    """
    root = _root(folder)
    return sorted(path for marker in MARKERS for path in root.glob(marker))


def read(folder: Path) -> Iterator[Utterance]:
    """Reads both parts; recordings without a line have the text None.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``.

    Yields
    ------
    Utterance
        The reader is its speaker.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    """
    root = _root(folder)
    for split, part in PARTS.items():
        for reader in sorted(root.glob(f"{part}/*/*")):
            if reader.is_dir():
                for identifier, label in layout.spoken(reader):
                    wav = str(reader / f"{identifier}.flac")
                    yield Utterance(identifier, wav, label, split, reader.name)


def _root(folder: Path) -> Path:
    return layout.find(folder, ("", "*"), MARKERS, LAYOUT)
