"""KsponSpeech: spontaneous talk of two people.

In: the unpacked archives, in any of the layouts in use.
Out: Utterances of train, valid (its dev), test_clean and test_other.

Source: https://aihub.or.kr/aihubdata/data/view.do?dataSetSn=123
Licence: that of AI Hub, on application, for Korean nationals
Size: 969 h, about 2,000 speakers, who are not named. Train 620,000
utterances (965.2 h), dev 2,545, eval_clean 3,000, eval_other 3,000.
Headerless 16-bit PCM, 16 kHz, mono.

Folders of 1,000 clips: 0001 to 0620 are train, 0621 to 0623 dev. Clip n lies
in folder (n - 1) // 1000 + 1, whatever path its script gives, since scripts
and unpacked archives seldom agree on the folders above it.
"""

import os
import re
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

from local import text
from local.corpora import layout
from local.manifest import Utterance

LAYOUT = """\
  KsponSpeech_01/KsponSpeech_0001/KsponSpeech_000001.pcm (and .txt)
  ...
  KsponSpeech_05/KsponSpeech_0623/KsponSpeech_622545.pcm
  KsponSpeech_eval/eval_clean/*.pcm, KsponSpeech_eval/eval_other/*.pcm
  scripts/train.trn, dev.trn, eval_clean.trn, eval_other.trn
  (the first may lie in train/, the evaluation sets in test/ or at the top,
  the scripts at the top or in another folder)"""
SCRIPTS = {
    "train": "train.trn",
    "valid": "dev.trn",
    "test_clean": "eval_clean.trn",
    "test_other": "eval_other.trn",
}
N_TRAIN_FOLDERS = 620
CLIPS_PER_FOLDER = 1000
MAX_DEPTH = 3  # of a clip folder or a script below data_folder

_CLIP_FOLDER = re.compile(r"KsponSpeech_(\d{4})|eval_clean|eval_other")
_CLIP = re.compile(r"KsponSpeech_(\d{6})")


def transcripts(folder: Path) -> List[Path]:
    """Lists the scripts; where a split has none, its text files.

    Arguments
    ---------
    folder : Path
        The folder that holds the unpacked archives.

    Returns
    -------
    list of Path
        Absolute.

    Raises
    ------
    FileNotFoundError
        There is neither a script nor a folder of clips.
    """
    folders, scripts = _survey(folder)
    paths = [scripts[name] for name in SCRIPTS.values() if name in scripts]
    for split, script in SCRIPTS.items():
        if script not in scripts:
            for place in _folders_of(split, folders):
                names = sorted(os.listdir(place))
                paths += [place / n for n in names if n.endswith(".txt")]
    return paths


def read(folder: Path, text_form: str) -> Iterator[Utterance]:
    """Reads all four splits, from the script of each or its text files.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``.
    text_form : str
        "spelling" or "pronunciation", see ``text.ksponspeech``.

    Yields
    ------
    Utterance
        Without a speaker. A line without audio has the path where its clip
        should lie, a clip without line or text file the text None.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    ValueError
        The form is unknown.
    """
    folders, scripts = _survey(folder)
    for split, script in SCRIPTS.items():
        places = _folders_of(split, folders)
        if script in scripts:
            root = Path(folder).absolute()
            clips = _from_script(scripts[script], split, folders, root)
            clips = _and_without_line(clips, places)
        else:
            clips = _from_text_files(places)
        for identifier, wav, raw in clips:
            label = None if raw is None else text.ksponspeech(raw, text_form)
            yield Utterance(identifier, wav, label, split)


def _survey(folder: Path) -> Tuple[Dict[str, Path], Dict[str, Path]]:
    """Finds clip folders and scripts without looking into clip folders."""
    folder = Path(folder).absolute()
    folders: Dict[str, Path] = {}
    scripts: Dict[str, Path] = {}
    for place, below, files in os.walk(folder, followlinks=True):
        for name in sorted(files):
            if name in SCRIPTS.values():
                scripts.setdefault(name, Path(place, name))
        others = []
        for name in sorted(below):
            if _CLIP_FOLDER.fullmatch(name):
                folders.setdefault(name, Path(place, name))
            else:
                others.append(name)
        depth = len(Path(place).relative_to(folder).parts)
        below[:] = others if depth + 1 < MAX_DEPTH else []
    if not folders and not scripts:
        raise layout.not_found(folder, LAYOUT)
    return folders, scripts


def _folders_of(split: str, folders: Dict[str, Path]) -> List[Path]:
    return [folders[name] for name in sorted(folders) if _split(name) == split]


def _split(clip_folder: str) -> str:
    number = _CLIP_FOLDER.fullmatch(clip_folder).group(1)
    if number is None:
        return clip_folder.replace("eval", "test")
    return "train" if int(number) <= N_TRAIN_FOLDERS else "valid"


def _from_script(
    script: Path, split: str, folders: Dict[str, Path], root: Path
) -> Iterator[tuple]:
    for number, line in layout.numbered_lines(script):
        path, separator, raw = line.partition("::")
        path = Path(path.strip())
        identifier = path.stem or f"{script.name}:{number}"
        clip_folder = _clip_folder(identifier, split)
        place = folders.get(clip_folder, root / path.parent)
        wav = str(place / path.name) if path.name else ""
        yield identifier, wav, raw if separator else None


def _and_without_line(clips: Iterator[tuple], places: List[Path]):
    """The clips of a script, then those on disk that it does not name."""
    named = set()
    for clip in clips:
        named.add(clip[0])
        yield clip
    for place in places:
        for name in sorted(os.listdir(place)):
            identifier, suffix = os.path.splitext(name)
            if suffix == ".pcm" and identifier not in named:
                yield identifier, str(place / name), None


def _clip_folder(identifier: str, split: str) -> str:
    clip = _CLIP.fullmatch(identifier)
    if clip is None:
        return split.replace("test", "eval")
    number = (int(clip.group(1)) - 1) // CLIPS_PER_FOLDER + 1
    return f"KsponSpeech_{number:04d}"


def _from_text_files(places: List[Path]) -> Iterator[tuple]:
    for place in places:
        names = set(os.listdir(place))
        clips = {Path(n).stem for n in names if n.endswith((".pcm", ".txt"))}
        for clip in sorted(clips):
            has_text = f"{clip}.txt" in names
            raw = layout.decoded(place / f"{clip}.txt") if has_text else None
            yield clip, str(place / f"{clip}.pcm"), raw
