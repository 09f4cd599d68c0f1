"""The audio of a row that holds it: a path, bytes, or samples.

In: the cell of a data set's row, and where files may be written.
Out: the path of its audio, which is written once if it is in the row.
"""

import io
import os
import re
from pathlib import Path
from typing import NamedTuple, Optional, Tuple

import numpy as np
import soundfile

from local import files

RATE = "sampling_rate"

_SUFFIX = re.compile(r"\.\w{1,5}")
_SUFFIXES = {b"RIFF": ".wav", b"fLaC": ".flac", b"OggS": ".ogg"}
_MP3 = (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")


class Folders(NamedTuple):
    """Where audio is, and where it goes."""

    place: Optional[Path]  # of the data set, None on the hub
    unpack_folder: Optional[Path]


def wav(cell, rate: Optional[int], name: str, folders: Folders) -> str:
    """Finds the audio of a row, or writes it.

    Arguments
    ---------
    cell : object
        A path; the bytes of a file; samples; or a dict with ``path`` and
        ``bytes``, or with ``array`` and ``sampling_rate``. Samples are
        (n,) or (channels, n), within [-1, 1] or 16-bit integers.
    rate : int or None
        Of samples without a dict, Hz.
    name : str
        Of what is written, below its folder and without its suffix.
    folders : Folders
        A relative path begins at the first; files go into the second.

    Returns
    -------
    str
        Without audio, where it should be; samples that are none are an empty
        file.

    Raises
    ------
    ValueError
        There is something to write, and no folder for it.
    OSError
        It cannot be written.
    """
    path, data = _content(cell, rate)
    if data is None and path:
        return os.path.join(folders.place or os.getcwd(), path)
    # The path beside bytes is often a bare name, and may be another's here.
    if path and os.path.isabs(path) and os.path.isfile(path):
        return path
    if data is None:
        return str((folders.unpack_folder or Path()) / name)
    if folders.unpack_folder is None:
        raise ValueError(
            "the data set holds its audio itself: unpack_folder, where the "
            "files go, is missing"
        )
    target = folders.unpack_folder / (name + _suffix(data, path))
    _keep(target, data)
    return str(target)


def _content(cell, rate) -> Tuple[Optional[str], Optional[bytes]]:
    """A path, or the content of a file, or both."""
    if isinstance(cell, str):
        return cell, None
    if isinstance(cell, bytes):
        return None, cell
    if isinstance(cell, list):
        return None, _flac(cell, rate)
    if not isinstance(cell, dict):
        return None, None
    if cell.get("array") is not None:
        return None, _flac(cell["array"], cell[RATE])
    return cell.get("path"), cell.get("bytes")


def _flac(samples: list, rate: Optional[int]) -> bytes:
    """Samples, (n,) or (channels, n), as a file; empty if they are none."""
    file = io.BytesIO()
    try:
        array = np.array(samples)
        if array.dtype.kind == "i":
            array = array / 32768  # as every corpus of integers has it
        if not np.isfinite(array).all():
            raise ValueError("not a number")
        if array.ndim == 2 and len(array) < array.shape[1]:
            array = array.T
        soundfile.write(file, array, int(rate), "PCM_16", format="FLAC")
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return b""
    return file.getvalue()


def _suffix(data: bytes, path: Optional[str]) -> str:
    """Of the content; .pcm and the like are told by their name alone."""
    if data.startswith(tuple(_SUFFIXES)):
        return _SUFFIXES[data[:4]]
    if data.startswith(_MP3):
        return ".mp3"
    suffix = os.path.splitext(path or "")[1].lower()
    return suffix if _SUFFIX.fullmatch(suffix) else ""


def _keep(path: Path, data: bytes) -> None:
    # By content: clips of one length have one size, and rows may have moved.
    if path.is_file() and path.stat().st_size == len(data):
        if path.read_bytes() == data:
            return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot make {path.parent}: {error.strerror}; choose another "
            "folder for unpacked audio",
        ) from error
    with files.replacing(path, binary=True) as file:
        file.write(data)
