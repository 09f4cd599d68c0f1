"""AI Hub's speech sets, in the layout that most of them share.

In: a set as its downloader leaves it, packed or not.
Out: Utterances of train, valid, and of test where there is one.

Source: https://aihub.or.kr (for example dataSetSn=571, 464, 109, 96, 131)
Licence: that of AI Hub, on application, for Korean nationals
Size: some 100 to 10,000 h a set; WAV of 8 to 48 kHz, or headerless PCM.

Audio and label have one path below 원천데이터 and 라벨링데이터, but for dates,
archives (TS1, TL1) and folders named for a format; these count where two clips
had one path without them. Where they have not, one path may end with the
other; else a stem that stands once among the audio and once among the labels
left over pairs them. aihub_tree.py reads the paths, aihub_labels.py the labels.
Labels in tables (xlsx, csv) and archives other than zip are not read: their
clips count as missing.

Pairing holds the names of the audio, about 100 bytes a clip, and the paths of
labels without audio at theirs; labels are read one at a time.
"""

import hashlib
import os
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional

import numpy as np
import soundfile

from local import audio, files, text, unpack
from local.corpora import (
    aihub_labels,
    aihub_tree as tree,
    layout,
)
from local.corpora.aihub_labels import Label, Segment
from local.manifest import Utterance

LAYOUT = """\
  1.Training/원천데이터*/D01/.../0001.wav     or .pcm, .wavp, .flac, ...
  1.Training/라벨링데이터*/D01/.../0001.json  or .txt
  2.Validation/  (likewise; also Training, 학습, Validation, 검증, Test, 평가)
  or archives of these: TS1.zip, TL1.zip, or their parts TS1.zip.part0, ..."""

_LOCAL_NAME = re.compile(r"\w{1,2}")  # "1" or "A" names nobody elsewhere


def transcripts(folder: Path) -> Iterator[Path]:
    """Lists the label files, and the archives or their parts.

    Arguments
    ---------
    folder : Path
        The set, or a folder above it.

    Returns
    -------
    iterator of Path
        Absolute; a set may have a million, so that they are not held.

    Raises
    ------
    FileNotFoundError
        Neither audio nor labels nor archives are there.
    """
    folder = Path(folder).absolute()
    _require_layout(folder)
    return _transcripts(folder)


def _transcripts(folder: Path) -> Iterator[Path]:
    for place, _, names in tree.walk(tree.Root(folder, folder)):
        for name in names:
            if tree.suffix_of(name) in aihub_labels.SUFFIXES:
                yield Path(place, name)
    for held in unpack.find(folder).values():
        yield from held


def read(
    folder: Path, text_form: str, unpack_folder: Optional[Path] = None
) -> Iterator[Utterance]:
    """Reads the set; archives are unpacked first, what they hold is paired
    with the other files.

    Arguments
    ---------
    folder : Path
        As for ``transcripts``.
    text_form : str
        "spelling" or "pronunciation", see ``text.ksponspeech``.
    unpack_folder : Path or None
        Gets the content of archives, and headerless audio whose label names
        another rate than 16 kHz, as WAV of that rate; in a folder for this
        set. What lies there already is used.

    Yields
    ------
    Utterance
        Its category is the set's own code, such as D01, or the first folder
        below 원천데이터. A cut of a recording has the recording as its
        session, and speakers numbered in it bear its name. Labels without
        audio and audio without label are there, too. Speech that nobody
        understood has no text.

    Raises
    ------
    FileNotFoundError
        The folder does not have the layout.
    ValueError
        The form is unknown, or ``unpack_folder`` is needed and not given.
    OSError
        ``unpack_folder`` has no room.
    """
    text.ksponspeech("", text_form)  # before hours of unpacking
    folder = Path(folder).absolute()
    _require_layout(folder)
    out = _own_folder(folder, unpack_folder)
    roots = [tree.Root(folder, folder), *_unpacked(folder, out)]
    clips = tree.indexed(roots)
    for found in _paired(roots, clips):
        yield from _utterances(*found, clips, text_form, out)
    for split, of_split in clips.items():
        for key, stem in of_split.unpaired():
            yield of_split.utterance(split, key, stem)


def _require_layout(folder: Path) -> None:
    suffixes = (
        tree.suffix_of(name)
        for *_, names in tree.walk(tree.Root(folder, folder))
        for name in names
    )
    if not any(s in tree.SUFFIXES for s in suffixes) and not unpack.find(
        folder
    ):
        raise layout.not_found(folder, LAYOUT)


def _own_folder(folder: Path, unpack_folder) -> Optional[Path]:
    """Sets in folders of one name are kept apart."""
    digest = hashlib.sha1(str(folder).encode()).hexdigest()[:8]
    name = f"{folder.name}-{digest}"
    return Path(unpack_folder).absolute() / name if unpack_folder else None


def _unpacked(folder: Path, out: Optional[Path]) -> List[tree.Root]:
    """Not what archives left there that are gone."""
    archives = unpack.find(folder)
    if not archives:
        return []
    if out is None:
        raise ValueError(
            f"data_folder={folder} holds {len(archives)} archives, such as "
            f"{next(iter(archives))}; {unpack.CHOOSE} with room for their "
            "content, or unpack each beside itself, into a folder of its name"
        )
    top = out / "archives"
    unpack.unpack(folder, top, tree.SUFFIXES)
    targets = {unpack.target(archive, folder, top) for archive in archives}
    return [tree.Root(target, top) for target in sorted(targets)]


# Pairing


def _paired(
    roots: List[tree.Root], clips: Dict[str, tree.Clips]
) -> Iterator[tuple]:
    """(spot, path, label, {file that a segment names: (its key, its stem)});
    the key is None where there is no such file."""
    waiting = []
    for spot, path in tree.labels(roots, False):
        label = aihub_labels.read(path)
        homes = _homes(label, path, partial(clips[spot.split].key, spot))
        if any(key is None for key, _ in homes.values()):
            stems = {stem for _, stem in homes.values()} | {_own_stem(path)}
            waiting.append((spot, path, stems))
        else:
            yield spot, path, label, homes
    yield from _paired_in_part(waiting, clips)
    for spot, path in tree.labels(roots, True):
        stem = _own_stem(path)
        key = clips[spot.split].key(spot, stem)
        if key is not None and not clips[spot.split].is_paired(key, stem):
            label = aihub_labels.read(path)
            homes = {s.audio: (key, stem) for s in label.segments}
            yield spot, path, label, homes


def _paired_in_part(
    waiting: List[tuple], clips: Dict[str, tree.Clips]
) -> Iterator[tuple]:
    """Labels without audio at their path, so far: a clip goes to the one that
    claims it, by the end of the path or else by the stem."""
    claims: Counter = Counter()
    for spot, _, stems in waiting:
        for stem in stems:
            key = clips[spot.split].key_by_tail(spot, stem)
            claims.update([(spot.split, stem), (spot.split, stem, key)])
    left = _alone(clips) if waiting else {}

    def key_of(spot, stem):
        of_split = clips[spot.split]
        key = of_split.key(spot, stem)
        if key is None:
            key = of_split.key_by_tail(spot, stem)
            if claims[spot.split, stem, key] > 1:
                return None
        if key is None and claims[spot.split, stem] == 1:
            key = left.get((spot.split, stem))
        return key

    for spot, path, _ in waiting:
        label = aihub_labels.read(path)
        yield spot, path, label, _homes(label, path, partial(key_of, spot))


def _alone(clips: Dict[str, tree.Clips]) -> Dict[tuple, Optional[tuple]]:
    """Keys by split and stem of the audio left over; None of several."""
    left: Dict[tuple, Optional[tuple]] = {}
    for split, of_split in clips.items():
        for key, stem in of_split.unpaired():
            several = (split, stem) in left
            left[split, stem] = None if several else key
    return left


def _homes(label: Label, path: str, key_of: Callable) -> Dict[str, tuple]:
    own = _own_stem(path)
    names = {segment.audio for segment in label.segments}
    homes = {}
    for name in names:
        # The file that a label names may be the one before its conversion.
        choices = (name or own, own) if len(names) == 1 else (name or own,)
        found = [(key_of(stem), stem) for stem in choices]
        sound = [home for home in found if home[0] is not None]
        homes[name] = (sound or found)[0]
    return homes


def _own_stem(path: str) -> str:
    return tree.stem_of(os.path.basename(path))


# Utterances


def _utterances(
    spot: tree.Spot,
    path: str,
    label: Label,
    homes: Dict[str, tuple],
    clips: Dict[str, tree.Clips],
    text_form: str,
    out: Optional[Path],
) -> Iterator[Utterance]:
    for number, segment in enumerate(label.segments, start=1):
        key, stem = homes[segment.audio]
        if key is not None:
            clips[spot.split].pair(key, stem)
            clip = clips[spot.split].utterance(spot.split, key, stem)
            goal = out and out.joinpath("wav", spot.split, *key, f"{stem}.wav")
            clip = replace(clip, wav=_at_rate(clip.wav, label.rate, goal))
        elif spot.role == "label" and segment.text is not None:
            wav = os.path.join(os.path.dirname(path), stem + ".wav")
            clip = tree.clip(spot.split, spot.key, spot.short, stem, wav)
        else:
            continue  # a note on the set
        yield _of_segment(clip, segment, number, text_form)


def _of_segment(
    clip: Utterance, segment: Segment, number: int, text_form: str
) -> Utterance:
    said, speaker = segment.text, segment.speaker
    if said is not None:
        said = aihub_labels.without_tags(said)
        said = text.ksponspeech(said, text_form)
        if not text.for_scoring(said) and aihub_labels.is_unclear(segment.text):
            said = None  # empty would be for a clip without speech
    is_cut = segment.start is not None
    if _LOCAL_NAME.fullmatch(speaker):
        speaker = f"{clip.id}-{speaker}" if is_cut else ""
    return replace(
        clip,
        id=f"{clip.id}-{number}" if is_cut else clip.id,
        text=said,
        speaker=speaker or clip.speaker,
        start=segment.start,
        stop=segment.stop,
        session=clip.id if is_cut else "",
    )


def _at_rate(wav: str, rate: Optional[int], goal: Optional[Path]) -> str:
    """The clip's path; the goal if it is headerless and not of 16 kHz."""
    if rate in (None, audio.SAMPLE_RATE) or not _is_headerless(wav):
        return wav
    if goal is None:
        raise ValueError(
            f"{wav} has no header, and {rate} Hz by its label: "
            f"{unpack.CHOOSE} with room for a WAV of each such file"
        )
    if not goal.exists():
        goal.parent.mkdir(parents=True, exist_ok=True)
        samples = np.fromfile(wav, dtype="<i2")  # an odd last byte is dropped
        with files.replacing(goal, binary=True) as file:
            soundfile.write(file, samples, rate, "PCM_16", format="WAV")
    return str(goal)


def _is_headerless(path: str) -> bool:
    try:
        return os.path.isfile(path) and audio.is_headerless(path)
    except OSError:  # preparation will find that too, and count it
        return False
