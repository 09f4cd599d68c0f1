"""The folders of an AI Hub set: what their names say, and which audio is there.

In: the roots of a set, unpacked.
Out: its label files, and an index of its audio by folder and name.

    01.데이터/1.Training/원천데이터_230316/TS1/D01/S000123/0005.wav
    01.데이터/1.Training/라벨링데이터_230801/TL1/D01/S000123/0005.json

Both are of train, with the key ("1", "D01", "S000123") and the short key
("D01", "S000123"). Where two clips have one key, the full path tells them
apart, but for the words that name audio or labels.
"""

import errno
import os
import re
import unicodedata
from collections import defaultdict
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

from local import unpack
from local.corpora import aihub_labels
from local.manifest import Utterance

AUDIO_SUFFIXES = frozenset(
    ".wav .pcm .raw .wavp .flac .mp3 .m4a .aac .ogg .opus".split()
)
SUFFIXES = AUDIO_SUFFIXES.union(aihub_labels.SUFFIXES)
SPLITS = {
    "train": "training|train|학습|훈련",
    "valid": "validation|valid|val|dev|검증",
    "test": "testing|test|evaluation|eval|평가|시험",
}
ROLES = {"원천": "source", "라벨링": "label", "라벨": "label"}
# Folders that say nothing of what they hold.
GENERIC = frozenset(
    "데이터 개방데이터 음성 텍스트 전사 wav pcm audio json txt label labels "
    "labeling source".split()
)

_LEAD = re.compile(r"^[\W\d_]+")
_SPLIT = re.compile(
    "|".join(f"(?P<{split}>{names})" for split, names in SPLITS.items()),
    re.IGNORECASE,
)
_AFTER_SPLIT = re.compile(r"(?:데이터|용|셋|세트)*(?![A-Za-z가-힣])")
_ROLE = re.compile(r"[\W\d_]*(원천|라벨링|라벨)(?:데이터)?(?![가-힣])(.*)")
_ARCHIVE = re.compile(r"([TV])[SL](?![A-Za-z가-힣])(.*)")
_SIDE = re.compile("원천|라벨링|라벨|^[TV][SL](?![A-Za-z가-힣])")
_DATE = re.compile(r"^\d{6,8}(?!\d)(?:[\W_]*[vV]\d[\d.]*$)?")
_SIGNS = " ._-[]()"
_CODE = re.compile(r"D\d{2}")
_SPEAKER = re.compile(r"S\d+")


class Spot(NamedTuple):
    """What the path of a folder says.

    ``key`` is what is left of it without markers, the same for audio and
    labels; ``short`` the same below the markers, without numbers of archives.
    ``full`` is all of it but for the words that name audio or labels; it
    starts with "", as no key does.
    """

    split: str
    role: str  # "source", "label" or ""
    key: Tuple[str, ...]
    short: Tuple[str, ...]
    full: Tuple[str, ...]


class Root(NamedTuple):
    """A folder to read; what paths say is told from ``top``, at or above it."""

    folder: Path
    top: Path


class _File(NamedTuple):
    place: str
    suffix: str
    name: str  # where it is not the stem (NFC) and the suffix
    is_paired: bool


_SEVERAL = _File("", "", "", True)  # in place of clips that share a key


def walk(root: Root) -> Iterator[Tuple[str, Tuple[str, ...], List[str]]]:
    """Walks through the folders of a root, in the order of their names.

    Arguments
    ---------
    root : Root
        Links are followed; hidden names are not.

    Yields
    ------
    str
        A folder.
    tuple of str
        Its path below the top, NFC.
    list of str
        Its files, sorted, as the disk has them.

    Raises
    ------
    OSError
        A folder cannot be read; it would drop out unseen.
    """
    for place, below, names in os.walk(
        root.folder, onerror=_gone, followlinks=True
    ):
        below[:] = unpack.followed(place, below)
        relative = os.path.relpath(place, root.top)
        parts = unicodedata.normalize("NFC", relative).split(os.sep)
        parts = tuple(part for part in parts if part != ".")
        yield place, parts, sorted(n for n in names if n[0] != ".")


def _gone(error: OSError) -> None:
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        raise error


def suffix_of(name: str) -> str:
    """A file name's suffix, in lower case."""
    return os.path.splitext(name)[1].lower()


def stem_of(name: str) -> str:
    """A file name without its suffix, NFC."""
    return unicodedata.normalize("NFC", os.path.splitext(name)[0])


def spot_of(parts: Tuple[str, ...]) -> Spot:
    """Reads the path of a folder.

    Arguments
    ---------
    parts : tuple of str
        Its components below the root, NFC.

    Returns
    -------
    Spot
        Of train where nothing names a split, not even an archive (VS1, VL1).
    """
    split = role = of_archive = ""
    key: List[str] = []
    short: List[str] = []
    full = "", *(_SIDE.sub("", part) for part in parts)
    for part in parts:
        named, part = _split(part, split, role, of_archive)
        marker, archive = _ROLE.fullmatch(part), _ARCHIVE.fullmatch(part)
        if (named and not split) or (marker and not role):
            short = []  # it begins below the markers
        split = split or named
        if marker:
            role = role or ROLES[marker[1]]
        elif archive:
            of_archive = "valid" if archive[1] == "V" else "train"
        ours = marker or archive
        part = _content(ours[2] if ours else part, bool(ours or named))
        key += [part] if part else []
        short += [part] if part and not (ours and part.isdecimal()) else []
    split = split or of_archive or "train"
    return Spot(split, role, tuple(key), tuple(short), full)


def _content(part: str, is_rest: bool) -> str:
    """What a folder's name tells of its content; of a marker, its rest."""
    if is_rest:
        # Audio and labels have each their own date, and version.
        part = _DATE.sub("", part.strip(_SIGNS)).strip(_SIGNS)
    return "" if _LEAD.sub("", part).lower() in GENERIC else part


def _split(
    part: str, split: str, role: str, of_archive: str
) -> Tuple[str, str]:
    """The split that a folder is named for, and the rest of its name; ""
    and its name if it is not, as below 원천데이터, where topics have such
    names: 평가, 시험 대비."""
    if of_archive or (split and role):
        return "", part
    core = _LEAD.sub("", part)
    found = _SPLIT.match(core)
    after = found and _AFTER_SPLIT.match(core, found.end())
    if not after or split not in ("", found.lastgroup):
        return "", part
    rest = core[after.end() :]
    if role and not core[0].isascii() and _content(rest, True):
        return "", part
    return found.lastgroup, rest


class Clips:
    """The audio of a split, by folder and stem.

    A folder's files share their values, so that a clip costs little more than
    its stem.
    """

    def __init__(self):
        self._folders: Dict[tuple, Dict[str, _File]] = defaultdict(dict)
        self._keys: Dict[tuple, List[tuple]] = defaultdict(list)
        self._tails: Dict[tuple, List[tuple]] = defaultdict(list)
        self._short: Dict[tuple, tuple] = {}
        self._shared: Dict[_File, _File] = {}
        self._origins: Dict[str, Tuple[Path, tuple]] = {}  # by folder

    def add(self, spot: Spot, top: Path, place: str, names: List[str]) -> None:
        """Adds files of a folder. Of two with one key and copies of each
        other, the first stays; other two get their full paths as keys."""
        self._origins[place] = top, spot.full
        if spot.key not in self._short:
            self._short[spot.key] = spot.short
            self._keys[spot.short].append(spot.key)
            for first in range(1, len(spot.short)):
                self._tails[spot.short[first:]].append(spot.key)
        for name in names:
            stem, suffix = stem_of(name), os.path.splitext(name)[1]
            as_it_is = "" if stem + suffix == name else name
            file = self._once(_File(place, suffix, as_it_is, False))
            self._settle(spot.key, stem, file)

    def _settle(self, key: tuple, stem: str, file: _File) -> None:
        first = self._folders[key].setdefault(stem, file)
        if first is not _SEVERAL and self._are_copies(first, file):
            return
        self._folders[key][stem] = _SEVERAL
        for one in (first, file) if first is not _SEVERAL else (file,):
            _, full = self._origins[one.place]
            self._folders[full].setdefault(stem, one)
            self._short[full] = self._short[key]

    def _are_copies(self, first: _File, second: _File) -> bool:
        """In two formats, beside its archive, or with the labels, too."""
        if first.place == second.place:
            return True
        if first.suffix.lower() != second.suffix.lower():
            return True
        top, full = self._origins[first.place]
        other_top, other_full = self._origins[second.place]
        return top != other_top or full == other_full

    def _once(self, file: _File) -> _File:
        return self._shared.setdefault(file, file)

    def key(self, spot: Spot, stem: str) -> Optional[tuple]:
        """The key of a label's audio; None if it has none, or several."""
        keys = self._keys.get(spot.short, ())
        if stem in self._folders.get(spot.key, ()):
            keys = [spot.key]
        found = [key for key in keys if stem in self._folders[key]]
        return self._only(found, spot, stem)

    def _only(self, found: List[tuple], spot: Spot, stem: str):
        if len(found) != 1:
            return None
        if self._folders[found[0]][stem] is not _SEVERAL:
            return found[0]
        return spot.full if stem in self._folders.get(spot.full, ()) else None

    def key_by_tail(self, spot: Spot, stem: str) -> Optional[tuple]:
        """Likewise, of audio left over, where one path ends with the other."""
        keys = list(self._tails.get(spot.short, ()))
        for first in range(1, len(spot.short)):
            keys += self._keys.get(spot.short[first:], ())
        found = [key for key in keys if self._is_left(key, stem)]
        return self._only(found, spot, stem)

    def _is_left(self, key: tuple, stem: str) -> bool:
        file = self._folders[key].get(stem)
        return file is not None and (file is _SEVERAL or not file.is_paired)

    def pair(self, key: tuple, stem: str) -> None:
        """Notes that a clip has a label."""
        file = self._folders[key][stem]
        self._folders[key][stem] = self._once(file._replace(is_paired=True))

    def is_paired(self, key: tuple, stem: str) -> bool:
        """Whether a clip has a label."""
        return self._folders[key][stem].is_paired

    def unpaired(self) -> Iterator[Tuple[tuple, str]]:
        """Keys and stems of clips without label."""
        for key, files in self._folders.items():
            for stem, file in files.items():
                if not file.is_paired:
                    yield key, stem

    def utterance(self, split: str, key: tuple, stem: str) -> Utterance:
        """A clip as ``clip`` makes it."""
        file = self._folders[key][stem]
        wav = os.path.join(file.place, file.name or stem + file.suffix)
        return clip(split, key, self._short[key], stem, wav)


def clip(
    split: str, key: tuple, short: tuple, stem: str, wav: str
) -> Utterance:
    """What the path of a clip says of it.

    Arguments
    ---------
    split, stem, wav : str
        Of the audio.
    key, short : tuple of str
        Of its folder, see ``Spot``.

    Returns
    -------
    Utterance
        Without text; its category is the first folder that is a code such as
        D01, or the first of the short key, its speaker one that is named S
        and a number.
    """
    speaker = next(filter(_SPEAKER.fullmatch, short), "")
    first = short[0] if short and not _SPEAKER.fullmatch(short[0]) else ""
    category = next(filter(_CODE.fullmatch, (*short, *key)), first)
    identifier = "-".join((split, *key, stem))
    return Utterance(identifier, wav, None, split, speaker, category)


def indexed(roots: List[Root]) -> Dict[str, Clips]:
    """Finds the audio.

    Arguments
    ---------
    roots : list of Root
        Folders that make up the set; of two files with one key and different
        tops, that of the first is taken.

    Returns
    -------
    dict
        Split to Clips; a split without audio gets empty ones on demand.
    """
    clips: Dict[str, Clips] = defaultdict(Clips)
    for root in roots:
        for place, parts, names in walk(root):
            heard = [n for n in names if suffix_of(n) in AUDIO_SUFFIXES]
            if heard:
                spot = spot_of(parts)
                clips[spot.split].add(spot, root.top, place, heard)
    return clips


def labels(roots: List[Root], beside_audio: bool) -> Iterator[tuple]:
    """Finds the label files; of a .json and a .txt of one name, the .json.

    Arguments
    ---------
    roots : list of Root
        As for ``indexed``.
    beside_audio : bool
        Those below 원천데이터, or all others.

    Yields
    ------
    tuple
        (Spot, path as str).
    """
    for root in roots:
        for place, parts, names in walk(root):
            spot = spot_of(parts)
            if (spot.role == "source") != beside_audio:
                continue
            stems = {stem_of(n) for n in names if suffix_of(n) == ".json"}
            for name in names:
                suffix = suffix_of(name)
                second = suffix == ".txt" and stem_of(name) not in stems
                if suffix == ".json" or second:
                    yield spot, os.path.join(place, name)
