"""What the corpus readers share: finding a layout, and decoding a file.

In: a folder or a file of a corpus.
Out: the folder that has the layout, or text whatever its encoding.
"""

import codecs
import glob
import io
import os
import re
from itertools import chain
from pathlib import Path
from typing import Callable, Iterable, Iterator, Optional, Sequence, Tuple

from local import text as korean

CHUNK_BYTES = 1 << 20  # of a file that is looked through

_THREE_BYTES = re.compile("[\u0800-\U0010ffff]")  # or four, in UTF-8


def find(
    folder: Path, places: Sequence[str], markers: Sequence[str], layout: str
) -> Path:
    """Finds the folder that a corpus begins in.

    Arguments
    ---------
    folder : Path
        As the user gave it.
    places : sequence of str
        Where to look below it, patterns in order of preference; "" is the
        folder itself.
    markers : sequence of str
        Patterns below a place, any of which tells the corpus.
    layout : str
        The expected tree, for the message.

    Returns
    -------
    Path
        Absolute.

    Raises
    ------
    FileNotFoundError
        No place has a marker.
    ValueError
        One pattern fits several places.
    """
    folder = Path(folder).absolute()
    for place in places:
        pattern = os.path.join(glob.escape(str(folder)), place)
        found = [
            root
            for root in sorted(glob.glob(pattern))
            if _has_any(Path(root), markers)
        ]
        if len(found) > 1:
            raise ValueError(
                f"data_folder={folder} holds several copies of the corpus: "
                f"{', '.join(found)}; set data_folder to one of them"
            )
        if found:
            return Path(found[0])
    raise not_found(folder, layout)


def _has_any(root: Path, markers: Sequence[str]) -> bool:
    return any(next(root.glob(marker), None) for marker in markers)


def not_found(folder: Path, layout: str) -> FileNotFoundError:
    """Makes the error for a folder without the layout.

    Arguments
    ---------
    folder : Path
        As the user gave it.
    layout : str
        The expected tree.

    Returns
    -------
    FileNotFoundError
        To be raised.
    """
    state = "does not have the layout" if folder.exists() else "does not exist"
    return FileNotFoundError(
        f"data_folder={folder} {state}; expected below it:\n{layout}\n"
        "Set data_folder to the folder that holds these, and unpack the "
        "archives of the corpus first."
    )


def spoken(folder: Path) -> Iterator[Tuple[str, Optional[str]]]:
    """Reads a folder of FLAC files as LibriSpeech packs them.

    Its ``*.trans.txt`` hold a line a recording: ID, blank, text.

    Arguments
    ---------
    folder : Path
        Of one reader, or one talk.

    Yields
    ------
    str
        ID: the FLAC file's name without its suffix.
    str or None
        The label; None where a recording has no line or a line no text, for
        all of it is speech.
    """
    named = set()
    for path in filter(Path.exists, sorted(folder.glob("*.trans.txt"))):
        for _, line in numbered_lines(path):
            identifier, *raw = line.split(None, 1)
            named.add(identifier)
            label = korean.for_label(raw[0]) if raw else None
            yield identifier, label or None
    for path in sorted(folder.glob("*.flac")):
        if path.stem not in named:
            yield path.stem, None


def decoded(path: Path) -> str:
    """Reads a text file that may be UTF-8 or cp949.

    Arguments
    ---------
    path : Path
        The file; it may open with a byte-order mark.

    Returns
    -------
    str
        The file as UTF-8 if all of it is, else as cp949 if all of it is,
        else each line by itself, with U+FFFD for what is neither.
    """
    data = Path(path).read_bytes()
    encoding = _encoding(lambda: [data])
    if encoding:
        return data.decode(encoding)
    return "\n".join(map(_decoded_line, data.split(b"\n")))


def lines(path: Path, newline: str) -> Iterator[str]:
    """Reads the lines of a text file as ``decoded`` would, one at a time.

    Arguments
    ---------
    path : Path
        UTF-8 or cp949.
    newline : str
        As for ``open``: what ends a line, which keeps its end.

    Yields
    ------
    str
        A line with its end.
    """
    encoding = _encoding(lambda: _chunks(path))
    if encoding:
        with open(path, encoding=encoding, newline=newline) as file:
            yield from file
        return
    with open(path, "rb") as file:
        for line in file:
            yield from io.StringIO(_decoded_line(line), newline=newline)


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _encoding(chunks: Callable[[], Iterable[bytes]]) -> str:
    """The encoding of a whole file, given in pieces; empty if it has none."""
    for encoding in ("utf-8-sig", "cp949"):
        decoder = codecs.getincrementaldecoder(encoding)()
        is_ascii, is_certain = True, False
        try:
            for chunk in chain(chunks(), [b""]):
                text = decoder.decode(chunk, final=not chunk)
                is_ascii = is_ascii and text.isascii()
                is_certain = is_certain or bool(_THREE_BYTES.search(text))
        except UnicodeDecodeError:
            continue
        # Some syllables of cp949 pass for the two-byte characters of UTF-8,
        # where Hangul has three bytes.
        if is_ascii or is_certain or encoding == "cp949":
            return encoding
    return ""


def _decoded_line(line: bytes) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError:
        return line.decode("cp949", errors="replace")


def numbered_lines(path: Path) -> Iterator[Tuple[int, str]]:
    """Reads the lines of a text file, without the blank ones.

    Arguments
    ---------
    path : Path
        UTF-8 or cp949.

    Yields
    ------
    int
        The line's number, from 1.
    str
        The line without its end.
    """
    # str.splitlines would also split at U+2028 and others within a text.
    for number, line in enumerate(lines(path, newline="\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r\n")
