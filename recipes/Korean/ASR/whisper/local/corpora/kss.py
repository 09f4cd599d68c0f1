"""KSS: a voice actress reads sentences of textbooks.

In: the unpacked archive.
Out: Utterances of train; the corpus has no other split.

Source: https://www.kaggle.com/bryanpark/korean-single-speaker-speech-dataset
Licence: CC BY-NC-SA 4.0
Size: 12 h, 12,853 utterances, one speaker. 44.1 kHz WAV.

A line is `path|original|expanded|decomposed|seconds|English`, the last since
version 1.3. Numbers are digits in the original and words in the expanded
text, which makes them the spelling and the pronunciation. The decomposed text
is jamo and no label.
"""

import os
from pathlib import Path
from typing import Iterator, List, Tuple

from local import text
from local.corpora import layout
from local.manifest import Utterance

LAYOUT = """\
  transcript.v.1.<x>.txt
  1/1_<number>.wav ... 4/4_<number>.wav
  (the folders may lie in kss/ or wavs/, or the files alone in wavs/)"""
MARKER = "transcript.v*.txt"
PLACES = ("", "kss", "wavs")  # of the four folders
N_COLUMNS = (5, 6)
SPEAKER = "kss"


def transcripts(folder: Path) -> List[Path]:
    """Lists the transcript; of several versions, the newest.

    Arguments
    ---------
    folder : Path
        The folder with the transcript, or the one above it.

    Returns
    -------
    list of Path
        Absolute; one.

    Raises
    ------
    FileNotFoundError
        There is none.
    ValueError
        Several folders have one.
    """
    root = layout.find(folder, ("", "*"), [MARKER], LAYOUT)
    return [max(root.glob(MARKER))]


def read(folder: Path, text_form: str) -> Iterator[Utterance]:
    """Reads the transcript; recordings without a line have the text None.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``.
    text_form : str
        "spelling" is the original text, "pronunciation" the expanded one.

    Yields
    ------
    Utterance
        A line that has not its five or six cells has the text None.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    ValueError
        The form is unknown, or several folders have a transcript.
    """
    if text_form not in text.FORMS:
        raise ValueError(
            f"text_form='{text_form}' is unknown; "
            f"choose {' or '.join(text.FORMS)}"
        )
    column = 1 + text.FORMS.index(text_form)
    (transcript,) = transcripts(folder)
    audio, is_flat = _audio(transcript.parent)
    named = set()
    for number, line in layout.numbered_lines(transcript):
        cells = line.split("|")
        path = Path(cells[0].strip())
        named.add(path.name)
        whole = len(cells) in N_COLUMNS
        yield Utterance(
            id=path.stem or f"{transcript.name}:{number}",
            wav=str(audio / (path.name if is_flat else path)),
            # All of it is read speech: an empty text is a missing one.
            text=text.for_label(cells[column]) or None if whole else None,
            split="train",
            speaker=SPEAKER,
        )
    yield from _without_line(audio, is_flat, named)


def _audio(root: Path) -> Tuple[Path, bool]:
    """Where the paths of the transcript begin; whether folders are left out."""
    for place in PLACES:
        if any(root.glob(os.path.join(place, "[1-4]"))):
            return root / place, False
    flat = root / "wavs"
    return (flat, True) if flat.is_dir() else (root, False)


def _without_line(audio: Path, is_flat: bool, named: set):
    for path in sorted(audio.glob("*.wav" if is_flat else "[1-4]/*.wav")):
        if path.name not in named:
            yield Utterance(path.stem, str(path), None, "train", SPEAKER)
