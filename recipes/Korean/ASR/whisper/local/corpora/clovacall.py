"""ClovaCall: callers of restaurants, who read given sentences.

In: the unpacked archive, in any of the layouts in use.
Out: Utterances of train and test; the corpus has no development set.

Source: https://github.com/clovaai/ClovaCall
Licence: for research; not commercial, no redistribution or modification
Size: train 59,662 utterances, 80 h; test 1,084, 1.7 h; 50 h and 0.9 h with
silence cut away. The speakers are told.

The two lists hold `{"wav": name, "text": label, "speaker_id": number}`. Clips
lie flat in folders beside them. `raw` and `clean` are the same clips, with
their silence and without it: `clean` is read where both are there, and the
one that is set as data_folder.
"""

import json
import os
import re
from pathlib import Path
from typing import Iterator, List, Tuple

from local import text
from local.corpora import layout
from local.manifest import Utterance

LAYOUT = """\
  train_ClovaCall.json, test_ClovaCall.json
  wavs_train/*.wav, wavs_test/*.wav
  (or clean/*.wav, raw/*.wav, or another folder beside the lists)"""
LISTS = {"train": "train*.json", "test": "test*.json"}
COPIES = ("clean", "raw")  # in order of preference
MAX_DEPTH = 2  # of a folder of clips below the lists

_BLANKS_AND_COMMAS = re.compile(r"[\s,]*")


def transcripts(folder: Path) -> List[Path]:
    """Lists the lists.

    Arguments
    ---------
    folder : Path
        The folder with the lists, one above it, or ``clean`` or ``raw`` in
        it.

    Returns
    -------
    list of Path
        Absolute; train first.

    Raises
    ------
    FileNotFoundError
        There is none.
    ValueError
        Several folders have one.
    """
    folder = Path(folder).absolute()
    place = folder.parent if folder.name in COPIES else folder
    patterns = list(LISTS.values())
    root = layout.find(place, ("", "*"), patterns, LAYOUT)
    return [path for p in patterns for path in sorted(root.glob(p))]


def read(folder: Path) -> Iterator[Utterance]:
    """Reads both lists; recordings that no list names have the text None.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``.

    Yields
    ------
    Utterance
        A clip that is nowhere has the path where it should lie.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    ValueError
        A list is no JSON list, or several folders have one.
    """
    lists = transcripts(folder)
    for path in lists:
        for _ in _entries(path):  # before hours of decoding: is it whole?
            pass
    folders = _audio_folders(Path(folder).absolute(), lists[0].parent)
    named = set()
    for path in lists:
        split = "test" if path.name.startswith("test") else "train"
        places = sorted(folders, key=lambda place: _rank(place, split))
        for number, entry in _entries(path):
            name = _name(entry)
            named.add(name)
            yield _utterance(
                entry,
                name or f"{path.name}:{number}",
                _place(name, places) if name else "",
                split,
            )
    yield from _without_entry(folders, named)


def _entries(path: Path) -> Iterator[Tuple[int, dict]]:
    """Numbers and entries, one at a time; one that is no entry is empty."""
    content = layout.decoded(path)
    decode = json.JSONDecoder().raw_decode
    position = _BLANKS_AND_COMMAS.match(content).end()
    number = 0
    try:
        if not content.startswith("[", position):
            raise ValueError("no list begins")
        position = _BLANKS_AND_COMMAS.match(content, position + 1).end()
        while not content.startswith("]", position):
            entry, position = decode(content, position)
            number += 1
            yield number, entry if isinstance(entry, dict) else {}
            position = _BLANKS_AND_COMMAS.match(content, position).end()
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is no whole JSON list: after {number} entries, at "
            f"character {position}: {error}; unpack or download it again"
        ) from None


def _audio_folders(folder: Path, root: Path) -> List[Path]:
    """Where clips may lie: the copy that was asked for, or all below."""
    if folder.name in COPIES and folder.parent == root:
        return [folder]
    found = []
    for place, below, _ in os.walk(root, followlinks=True):
        found.append(Path(place))
        if len(found[-1].relative_to(root).parts) == MAX_DEPTH:
            below.clear()
    return sorted(found, key=lambda place: (_copy(place, root), place))


def _copy(place: Path, root: Path) -> int:
    """Orders the copies; folders of other names come first."""
    parts = place.relative_to(root).parts
    return max((n for n, c in enumerate(COPIES, 1) if c in parts), default=0)


def _rank(place: Path, split: str) -> int:
    """Orders folders: named for the split, for none, for the other one."""
    if split in place.name:
        return 0
    return 2 if any(name in place.name for name in LISTS) else 1


def _name(entry: dict) -> str:
    wav = entry.get("wav")
    # A name that cannot be printed is none: no file system takes half a
    # surrogate pair, nor does a report.
    named = isinstance(wav, str) and wav.isprintable()
    return os.path.basename(wav) if named else ""


def _place(name: str, places: List[Path]) -> str:
    paths = [str(place / name) for place in places]
    return next(filter(os.path.isfile, paths), paths[0])


def _utterance(entry: dict, name: str, wav: str, split: str) -> Utterance:
    raw, speaker = entry.get("text"), entry.get("speaker_id")
    return Utterance(
        id=os.path.splitext(name)[0] if wav else name,
        wav=wav,
        # All of it is read speech: an empty text is a missing one.
        text=(text.for_label(raw) or None) if isinstance(raw, str) else None,
        split=split,
        speaker="" if speaker is None else text.for_label(str(speaker)),
    )


def _without_entry(folders: List[Path], named: set) -> Iterator[Utterance]:
    for place in folders:
        split = "test" if "test" in place.name else "train"
        for name in sorted(os.listdir(place)):
            stem, suffix = os.path.splitext(name)
            if suffix == ".wav" and name not in named:
                named.add(name)
                yield Utterance(stem, str(place / name), None, split)
