"""Lines of a text file of any size, by number; memory holds positions alone.

In: a UTF-8 file, a text a line; how many of them at most.
Out: texts by number; counts of the lines that are left out, and why.
"""

import hashlib
import math
import os
import sys
from array import array
from collections import Counter
from pathlib import Path

import numpy as np

from local import text
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
MAX_BYTES = 1000  # of a line: over 300 Hangul syllables, a minute of speech
# A text of so few bytes fits any decoder: composing it triples it at most
# (UAX 15), and a token is at least one byte.
FEW_BYTES = 140
GZIP = b"\x1f\x8b"
REASONS = ("empty", "not_utf8", "too_long", "held_out")
BEGINNING = 2**16  # bytes, by which a file is judged before a run begins
LINE_ENDS = b"\r\n"
REST_BYTES = 2**20  # of a line that is too long, at a time


class TextLines:
    """Lines of a text file, of which only positions are in memory.

    One pass over the file finds them: 12 bytes each that is kept. They are
    read when they are asked for, by any number of processes.

    Arguments
    ---------
    path : str or Path
        UTF-8, with or without a byte order mark; any line ends but a lone CR.
    max_lines : int
        Of more lines than these so many are drawn, each alike, and kept in
        the order of the file; 0: all are kept.
    seed : int
        Of that draw.
    fits : callable
        str to bool: whether the decoder can hold a text.
    held_out : iterable of str
        Texts that scores are made of; lines of them are left out.

    Attributes
    ----------
    counts : dict
        ``lines`` of the file; of them ``kept``, ``empty``, ``not_utf8``,
        ``too_long`` (over ``MAX_BYTES``, or over the decoder's length),
        ``held_out``, and ``not_drawn``, of which nothing more is known.
    sizes : numpy.ndarray
        (kept,) int32, bytes without the line's end.
    digest : str
        Of the file's lines, and which of them are kept.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        It is a folder or compressed, or no line of it can be used.
    """

    def __init__(self, path, max_lines, seed, fits, held_out=()):
        self.path = Path(path)
        _require_text(self.path)
        held_out = frozenset(map(text.for_scoring, held_out))
        self._file = open(self.path, "rb")
        digest = hashlib.sha1()
        draw = _Draw(max_lines or sys.maxsize, seed)
        self._keep(*self._found(draw, fits, held_out, digest))
        self._tell()
        digest.update(self.starts.tobytes())
        self.digest = digest.hexdigest()

    def _found(self, draw, fits, held_out, digest):
        """Starts and sizes of the lines that are kept, and counts of all."""
        counts = Counter()
        starts, sizes = array("q"), array("i")
        for start, line in _lines(self._file):
            counts["lines"] += 1
            digest.update(line + b"\n")
            reason = _cheap_reason(line)
            if not reason and not draw.wants():
                continue
            if reason := reason or _reason(line, fits, held_out):
                counts[reason] += 1
                continue
            place = draw.take()
            if place == len(starts):
                starts.append(start)
                sizes.append(len(line))
            else:
                starts[place], sizes[place] = start, len(line)
        return starts, sizes, counts

    def _keep(self, starts, sizes, counts):
        # Drawn lines lie where they took another's place.
        self.starts = np.frombuffer(starts, np.int64)
        self.sizes = np.frombuffer(sizes, np.int32)
        if (np.diff(self.starts) < 0).any():
            order = self.starts.argsort()
            self.starts, self.sizes = self.starts[order], self.sizes[order]
        left_out = {reason: counts[reason] for reason in REASONS}
        rest = counts["lines"] - len(starts) - sum(left_out.values())
        self.counts = {"lines": counts["lines"], "kept": len(starts)}
        self.counts |= {**left_out, "not_drawn": rest}

    def _tell(self):
        told = ", ".join(f"{v} {k}" for k, v in self.counts.items())
        told = f"text_file='{self.path}': {told.replace('_', ' ')}"
        if not len(self):
            raise ValueError(
                f"{told}; give a UTF-8 file with a sentence a line, each of "
                f"at most {MAX_BYTES} bytes"
            )
        # What is dropped by its encoding may be most of a corpus.
        log = logger.warning if self.counts["not_utf8"] else logger.info
        log("%s", told)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        """The text of a line, as ``text.for_label`` makes it.

        Raises
        ------
        ValueError
            The file has changed: there is no such line any more.
        OSError
            It cannot be read.
        """
        if self._file is None:
            self._file = open(self.path, "rb")
        start, size = int(self.starts[index]), int(self.sizes[index])
        before = min(start, 1)  # the end of the line before
        found = os.pread(self._file.fileno(), before + size + 1, start - before)
        line, after = found[before : before + size], found[before + size :]
        is_line = found[:before] in (b"", b"\n")
        is_line &= after in (b"", b"\r", b"\n")
        if len(line) == size and is_line and not _cheap_reason(line):
            if label := text.for_label(line.decode()):
                return label
        raise ValueError(
            f"text_file='{self.path}' was changed: where line {index} was, at "
            f"byte {start}, is another; leave it as it is while a run reads it"
        )

    def __getstate__(self):
        # An open file means nothing to a process that was not forked.
        return {**vars(self), "_file": None}


class _Draw:
    """Which of the items that come one by one are drawn, each alike.

    Algorithm L (Li, 1994, https://doi.org/10.1145/198429.198435): it tells
    how many to pass over, so that most items need no random number. One that
    is wanted but not taken is as if it had never come.
    """

    def __init__(self, n_most, seed):
        self.n_most, self.n_taken = n_most, 0
        self.rng = np.random.default_rng(seed)
        self.log_share = 0.0  # of the items to come, those that are wanted
        self.n_passed_over = 0

    def wants(self):
        """Whether the next item is drawn, if it is fit."""
        if self.n_passed_over:
            self.n_passed_over -= 1
            return False
        self._pass_over()
        return True

    def take(self):
        """The place of an item: a new one, or that of one before it."""
        place = self.n_taken
        if place == self.n_most:
            place = int(self.rng.integers(self.n_most))
        self.n_taken = min(self.n_taken + 1, self.n_most)
        if self.n_taken == self.n_most:
            self.log_share -= self.rng.standard_exponential() / self.n_most
        self._pass_over()
        return place

    def _pass_over(self):
        if self.n_taken == self.n_most:
            share = math.exp(self.log_share)
            self.n_passed_over = int(self.rng.geometric(share)) - 1


def problem(path):
    """What is wrong with a text file by its beginning; None if nothing is.

    Arguments
    ---------
    path : str or Path

    Returns
    -------
    str or None
        What to do about it.
    """
    if Path(path).is_dir():
        return "is a folder; give a UTF-8 file with a sentence a line"
    if not Path(path).exists():
        return "there is no such file; give a UTF-8 one, a sentence a line"
    with open(path, "rb") as file:
        found = file.read(BEGINNING)
    if found.startswith(GZIP):
        return (
            "is compressed, and lines are read from anywhere in it; unpack it "
            f"first: gunzip -k '{path}'"
        )
    lines = [line for line in found.split(b"\n") if line.strip()]
    if not lines:
        return "is empty, or begins with 64 KiB of blanks; give sentences"
    n_bad = sum(_cheap_reason(line) == "not_utf8" for line in lines)
    if n_bad > max(1, len(lines) / 10):  # the last line may be cut
        return (
            f"{n_bad} of its first {len(lines)} lines are not UTF-8; maybe: "
            f"iconv -f CP949 -t UTF-8 '{path}' > text.txt"
        )


def _require_text(path):
    if not path.exists():
        raise FileNotFoundError(f"text_file='{path}': {problem(path)}")
    if told := problem(path):
        raise ValueError(f"text_file='{path}': {told}")


def _lines(file):
    """Start and bytes of each line, without its end.

    Of one that is too long comes the beginning: a file may be one line.
    """
    start = 0
    while line := file.readline(MAX_BYTES + len(LINE_ENDS) + 1):
        yield start, line.rstrip(LINE_ENDS)
        start += len(line)
        while line and not line.endswith(b"\n"):
            line = file.readline(REST_BYTES)
            start += len(line)


def _cheap_reason(line):
    """Why a line is left out, of what every line is asked."""
    if len(line) > MAX_BYTES:
        return "too_long"
    if not line or line.isspace():
        return "empty"
    try:
        line.decode()
    except UnicodeDecodeError:
        return "not_utf8"
    return ""


def _reason(line, fits, held_out):
    """Why a line is left out, of what takes longer to know."""
    label = text.for_label(line.decode())
    if not label:
        return "empty"
    if held_out and text.for_scoring(label) in held_out:
        return "held_out"
    return "" if len(line) <= FEW_BYTES or fits(label) else "too_long"
