"""What the corpus readers share: finding a layout, and decoding a file.

In: a folder or a file of a corpus.
Out: the folder that has the layout, or text whatever its encoding.
"""

import glob
import os
import re
from pathlib import Path
from typing import Iterator, Optional, Sequence, Tuple

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
    text = _strictly(data)
    if text is None:
        return "\n".join(map(_decoded_line, data.split(b"\n")))
    return text


def _strictly(data: bytes) -> Optional[str]:
    for encoding in ("utf-8-sig", "cp949"):
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        # Some syllables of cp949 pass for the two-byte characters of UTF-8,
        # where Hangul has three bytes.
        certain = text.isascii() or _THREE_BYTES.search(text)
        if certain or encoding == "cp949":
            return text
    return None


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
    for number, line in enumerate(decoded(path).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")
