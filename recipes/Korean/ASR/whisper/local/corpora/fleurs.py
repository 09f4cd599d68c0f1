"""FLEURS, Korean: sentences of Wikipedia, each read by several people.

In: the ko_kr folder of the data set, its audio archives unpacked.
Out: Utterances of train, valid (its dev) and test.

Source: https://huggingface.co/datasets/google/fleurs (data/ko_kr)
Licence: CC BY 4.0
Size: about 10 h of training data, 16 kHz WAV.

The tables have no header: sentence number, file name, raw transcription,
transcription, characters, samples, gender. The raw one has its punctuation
and capitals, and is the label. A sentence number stands for every reading of
the sentence, hence the file name is the ID.
"""

from pathlib import Path
from typing import Iterator, List

from local import text
from local.corpora import layout
from local.manifest import Utterance

LAYOUT = """\
  train.tsv, dev.tsv, test.tsv
  audio/train/*.wav, audio/dev/*.wav, audio/test/*.wav
  (or train/*.wav, dev/*.wav, test/*.wav; all may lie in ko_kr/ or
  data/ko_kr/)"""
PLACES = ("", "ko_kr", "data/ko_kr")
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
        Without a speaker; the data set names none.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    """
    splits = {table: split for split, table in TABLES.items()}
    for path in transcripts(folder):
        audio = _audio_folder(path)
        for number, line in layout.numbered_lines(path):
            # Quotes belong to the sentence, so that no CSV reader is used.
            cells = line.split("\t")
            split = splits[path.name]
            if len(cells) < 3:
                yield Utterance(f"{path.name}:{number}", "", None, split)
                continue
            label = text.for_label(cells[2])
            identifier = Path(cells[1]).stem
            yield Utterance(identifier, str(audio / cells[1]), label, split)


def _audio_folder(table: Path) -> Path:
    beside = table.parent / table.stem
    return beside if beside.is_dir() else table.parent / "audio" / table.stem
