"""Archives, whole or in the parts of a download, unpacked beside a corpus.

In: a folder with name.zip, or name.zip.part0, name.zip.part1073741824, ...
Out: its tree in another folder, each archive as a folder without the suffix.

The number of a part is its offset in the archive, in bytes, as AI Hub's tool
writes them. Parts are read in place; no joined copy is made.
"""

import bisect
import errno
import io
import lzma
import os
import re
import shutil
import struct
import unicodedata
import zipfile
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Collection, Dict, Iterator, List, Optional, Tuple

from tqdm import tqdm

from local import files
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)

DONE = ".unpacked"  # beside the folder of a nested archive that is complete
CHOOSE = (
    "choose another output folder (--output_folder, or --out of local.prepare)"
)
# Of labels, which are corrected: their content is compared, too.
COMPARED = (".json", ".txt")
CHUNK = 1 << 20  # bytes
UTF8_FLAG = 0x800

_PART = re.compile(r"(.+\.zip)\.part(\d+)", re.IGNORECASE)
_ABSOLUTE = re.compile("/|[A-Za-z]:")
_THREE_BYTES = re.compile("[\u0800-\U0010ffff]")  # or four, in UTF-8
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,  # a compression that is not known
    RuntimeError,  # a password
    ValueError,
)
# Of a member's name, or (None) of its compressed data: others may be sound.
_OF_A_MEMBER = (
    None,
    errno.ENAMETOOLONG,
    errno.EINVAL,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
)


def find(folder: Path) -> Dict[Path, List[Path]]:
    """Finds the archives below a folder.

    One that has been unpacked beside itself, into a folder of its name
    without the suffix, is left out, and so are parts beside their archive.

    Arguments
    ---------
    folder : Path
        Searched to any depth, through links, but for hidden folders.

    Returns
    -------
    dict
        Path of the archive (absolute; with parts, the one it would have) to
        the files that hold it, parts by their number.
    """
    found: Dict[Path, List[Path]] = {}
    for place, below, names in os.walk(
        Path(folder).absolute(), followlinks=True
    ):
        below[:] = followed(place, below)
        parts: Dict[Path, Dict[int, Path]] = {}
        for name in sorted(names):
            part = _PART.fullmatch(name)
            path = Path(place, part[1] if part else name)
            if name.startswith(".") or path.stem in below:
                continue
            if part:
                numbered = parts.setdefault(path, {})
                numbered[int(part[2])] = Path(place, name)
            elif path.suffix.lower() == ".zip":
                found[path] = [path]
        for path, numbered in parts.items():
            found.setdefault(path, [numbered[n] for n in sorted(numbered)])
    return found


def followed(place: str, below: List[str]) -> List[str]:
    """The folders in a folder that are walked through, sorted.

    Arguments
    ---------
    place : str
        Path of the folder, as it was reached.
    below : list of str
        Names of those in it.

    Returns
    -------
    list of str
        Not the hidden ones, and no link back to where the walk came through.
    """
    return sorted(
        name
        for name in below
        if name[0] != "." and name != "__MACOSX" and not _loops(place, name)
    )


def _loops(place: str, name: str) -> bool:
    path = Path(place, name)
    if not path.is_symlink():
        return False
    target = os.path.realpath(path)
    return any(
        os.path.commonpath([target, os.path.realpath(above)]) == target
        for above in path.parents
    )


def unpack(
    folder: Path, out: Path, suffixes: Optional[Collection[str]] = None
) -> List[str]:
    """Unpacks every archive below a folder, nested ones too.

    A member that lies there in its full size is not written again, so that a
    second start goes on where the first was stopped; a label must have its
    checksum, too. Names are UTF-8 or cp949, whatever the archive says, and
    are composed (NFC).

    Arguments
    ---------
    folder : Path
        Only read.
    out : Path
        Gets the tree of the archives below ``folder``.
    suffixes : collection of str or None
        Lower-case; other members stay packed. None: all are unpacked.

    Returns
    -------
    list of str
        What could not be unpacked, and why; each is logged as a warning.

    Raises
    ------
    ValueError
        ``out`` lies in ``folder``.
    OSError
        The disk is full, would be, or cannot be written.
    """
    folder, out = Path(folder).absolute(), Path(out).absolute()
    if folder.resolve() in [out.resolve(), *out.resolve().parents]:
        raise ValueError(
            f"{out} lies inside {folder}, into which nothing is written; "
            f"{CHOOSE}"
        )
    archives = find(folder)
    targets = {p: target(p, folder, out) for p in archives}
    _require_space(_missing_bytes(archives, targets, suffixes), folder, out)
    problems: List[str] = []
    bar = tqdm(desc="unpacking", unit="B", unit_scale=True, dynamic_ncols=True)
    with bar:
        for path, held in archives.items():
            found = _unpack(path, held, targets[path], suffixes, bar)
            for problem in found:
                logger.warning("not unpacked: %s", problem)
                problems.append(problem)
    return problems


def target(archive: Path, folder: Path, out: Path) -> Path:
    """The folder below ``out`` that gets what an archive below ``folder``
    holds."""
    relative = archive.relative_to(folder).with_suffix("")
    return out / unicodedata.normalize("NFC", str(relative))


def _missing_bytes(archives, targets, suffixes) -> int:
    """What the members that are still packed will take; damage is found
    later. One archive is open at a time: its list may take 100 MB."""
    total = 0
    for path, held in archives.items():
        try:
            with _opened(held) as archive:
                for info, target in _members(archive, targets[path], suffixes):
                    if not _is_there(info, target):
                        total += info.file_size
        except (*_DAMAGE, OSError):
            continue
    return total


def _require_space(needed: int, source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"unpacking {source} takes {needed / 1e9:.1f} GB in {out}, where "
            f"{free / 1e9:.1f} GB are free; {CHOOSE} on a larger disk",
        )


def _unpack(path, held, target, suffixes, bar) -> Iterator[str]:
    """Unpacks one archive; yields what is wrong with it."""
    try:
        with _opened(held) as archive:
            for info, goal in _members(archive, target, suffixes):
                if goal is None:
                    yield f"{path}: {info.filename} leaves the folder"
                elif goal.suffix.lower() == ".zip":
                    yield from _nested(path, archive, info, goal, suffixes, bar)
                else:
                    yield from _written(path, archive, info, goal, bar)
    except _DAMAGE as error:
        yield f"{path}: {error or type(error).__name__}"
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        yield f"{path}: {error}"


def _nested(path, archive, info, goal, suffixes, bar) -> Iterator[str]:
    """Unpacks an archive in an archive, by way of a copy."""
    if _is_there(info, goal):
        return
    problems = list(_written(path, archive, info, goal, bar))
    if not problems:
        folder = goal.with_suffix("")
        needed = _missing_bytes({goal: [goal]}, {goal: folder}, suffixes)
        _require_space(needed, path / info.filename, folder)
        problems = list(_unpack(goal, [goal], folder, suffixes, bar))
    goal.unlink(missing_ok=True)
    if not problems:
        goal.with_suffix(DONE).write_text(_stamp(info))
    yield from problems


def _written(path, archive, info, goal, bar) -> Iterator[str]:
    """Writes a member; yields why it cannot be."""
    if _is_there(info, goal) and _is_same(info, goal):
        return
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(info) as packed, files.replacing(goal, True) as file:
            shutil.copyfileobj(packed, file, CHUNK)
        bar.update(info.file_size)
    except _DAMAGE as error:
        yield f"{path}: {info.filename}: {error or type(error).__name__}"
    except OSError as error:
        if error.errno not in _OF_A_MEMBER:
            raise
        yield f"{path}: {info.filename}: {error}"


def _is_there(info: zipfile.ZipInfo, goal: Optional[Path]) -> bool:
    if goal is None:
        return True  # nothing will be written
    try:
        if goal.suffix.lower() == ".zip":
            done = goal.with_suffix(DONE).read_text("utf-8", "replace")
            return done == _stamp(info)
        return goal.stat().st_size == info.file_size
    except OSError:
        return False


def _stamp(info: zipfile.ZipInfo) -> str:
    return f"{info.file_size} {info.CRC:08x}"


def _is_same(info: zipfile.ZipInfo, goal: Path) -> bool:
    if goal.suffix.lower() not in COMPARED:
        return True  # to read all audio at each start would take hours
    checksum = 0
    try:
        with open(goal, "rb") as file:
            for chunk in iter(lambda: file.read(CHUNK), b""):
                checksum = zlib.crc32(chunk, checksum)
    except OSError:
        return False
    return checksum == info.CRC


def _members(
    archive: zipfile.ZipFile, target: Path, suffixes
) -> Iterator[Tuple[zipfile.ZipInfo, Optional[Path]]]:
    """Members that are wanted, and where each goes: None for nowhere."""
    for info in archive.infolist():
        name = _name(info)
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.endswith("/") or not parts or parts[-1].startswith("."):
            continue  # a folder, or macOS's notes on a file
        suffix = os.path.splitext(parts[-1])[1].lower()
        if suffixes is None or suffix in suffixes or suffix == ".zip":
            leaves = ".." in parts or _ABSOLUTE.match(name)
            yield info, None if leaves else target.joinpath(*parts)


def _name(info: zipfile.ZipInfo) -> str:
    """A member's name; zipfile takes what has no flag for cp437."""
    name = info.orig_filename.split("\0")[0]
    if not info.flag_bits & UTF8_FLAG:
        data = name.encode("cp437")
        for encoding in ("cp949", "utf-8"):  # the last that fits is taken
            try:
                decoded = data.decode(encoding)
            except UnicodeDecodeError:
                continue
            # Some syllables of cp949 pass for two-byte characters of UTF-8.
            if encoding == "cp949" or _THREE_BYTES.search(decoded):
                name = decoded
    return unicodedata.normalize("NFC", name.replace("\\", "/"))


def _opened(held: List[Path]) -> zipfile.ZipFile:
    """Opens an archive.

    Raises
    ------
    zipfile.BadZipFile
        It is damaged, or a part of it is missing.
    """
    if len(held) == 1 and not _PART.fullmatch(held[0].name):
        return zipfile.ZipFile(held[0])
    end = 0
    for part in held:
        offset = int(_PART.fullmatch(part.name)[2])
        if offset != end:
            wrong = "is missing" if offset > end else "are there twice"
            raise zipfile.BadZipFile(
                f"what lies between bytes {min(end, offset)} and "
                f"{max(end, offset)} {wrong}; download the parts again"
            )
        end += part.stat().st_size
    return zipfile.ZipFile(io.BufferedReader(_Joined(held), CHUNK))


class _Joined(io.RawIOBase):
    """Files read as one, with one of them open at a time."""

    def __init__(self, paths: List[Path]):
        self._paths = paths
        sizes = [path.stat().st_size for path in paths]
        *self._starts, self._size = accumulate(sizes, initial=0)
        self._position = 0
        self._number, self._file = -1, io.BytesIO()

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        base = {os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        position = base.get(whence, 0) + offset
        if position < 0:
            raise ValueError(f"no byte {position} in {self._paths[0]}")
        self._position = position
        return position

    def tell(self):
        return self._position

    def readinto(self, buffer):
        if self._position >= self._size:
            return 0
        number = bisect.bisect_right(self._starts, self._position) - 1
        if number != self._number:
            self._file.close()
            self._file = open(self._paths[number], "rb")
            self._number = number
        self._file.seek(self._position - self._starts[number])
        n_read = self._file.readinto(buffer)
        self._position += n_read
        return n_read

    def close(self):
        self._file.close()
        super().close()
