"""When a model has collapsed: it repeats itself, falls silent, never ends.

In: Records of each validation; how many bad texts are too many, how often.
Out: their shares and a verdict; the worst loops in the log; a run that stops.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Iterable, List, NamedTuple, Optional, Tuple

from local import analysis
from local.metrics import Record
from local.text import for_scoring
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
KINDS = ("loops", "empty", "too_long")
# Of Whisper's decoding: its compression_ratio_threshold.
# https://github.com/openai/whisper/blob/main/whisper/transcribe.py
MAX_COMPRESSION = 2.4
MAX_WER = 100.0  # percent; above it, silence would be the better text
N_MORE = 10  # characters over twice the reference's
N_WORST = 3  # loops in the log, and validations in the error
N_SHOWN = 80  # characters of a text in the log
_ROW = re.compile(r"(.+?)\1+")


class Fault(NamedTuple):
    """A hypothesis that no sound model writes.

    Attributes
    ----------
    kind : str
        One of ``KINDS``.
    id : str
        Of the manifest.
    hypothesis : str
        After ``text.for_scoring``.
    """

    kind: str
    id: str
    hypothesis: str


@dataclass(frozen=True)
class Guard:
    """Tells a collapsed validation from a sound one, and when to stop.

    Attributes
    ----------
    share : float
        Percent of texts with a fault; a validation with more has collapsed.
    patience : int
        Collapsed validations in a row, then the run stops; 0: never.
    """

    share: float
    patience: int

    def judged(self, records: Iterable[Record], wer: float) -> dict:
        """Judges a validation, and logs its worst loops.

        Arguments
        ---------
        records : iterable of Record
            Of all ranks.
        wer : float
            Percent.

        Returns
        -------
        dict
            Each of ``KINDS`` in percent of the clips that could be read, no
            text counted twice; ``collapsed``, a bool: more faults than
            ``share`` in all, or a WER above 100 %.
        """
        heard = [record for record in records if not record.failed]
        found = faults(heard)
        percent = 100 / max(len(heard), 1)
        kinds = [fault.kind for fault in found]
        told = {kind: percent * kinds.count(kind) for kind in KINDS}
        for text in worst_loops(found):
            logger.warning("a loop in the validation: %s", text)
        collapsed = percent * len(found) > self.share or wer > MAX_WER
        return {**told, "collapsed": collapsed}

    def require_sound(self, since_sound: List[dict]) -> None:
        """Stops a run whose patience has run out.

        Arguments
        ---------
        since_sound : list of dict
            Of each validation since the last sound one ``step``, ``WER`` and
            the shares.

        Raises
        ------
        ValueError
            Tells the last validations, and what to lower.
        """
        n = len(since_sound)
        if not 0 < self.patience <= n:
            return
        told = "; ".join(
            f"step {one['step']}: WER {one['WER']:.1f} %, "
            + ", ".join(f"{kind} {one[kind]:.1f} %" for kind in KINDS)
            for one in since_sound[-N_WORST:]
        )
        raise ValueError(
            f"the model has collapsed: {n} validation(s) in a row have a WER "
            f"above {MAX_WER:.0f} %, or more loops, empty or too long texts "
            f"together than collapse_share={self.share} percent, and "
            f"collapse_patience={self.patience} ({told}). Train anew, in "
            "another output_folder, with a lower lr, longer warmup_steps, a "
            "lower embedding_lr_multiplier or a lower label_smoothing; look "
            "in log.txt for the worst loops, and in the training data for "
            "labels that repeat. A model of random weights begins like that: "
            "collapse_patience=0. --test_only scores the best checkpoint"
        )


def faults(records: Iterable[Record]) -> List[Fault]:
    """The hypotheses that no sound model writes.

    Arguments
    ---------
    records : iterable of Record
        Of any set.

    Returns
    -------
    list of Fault
        In the order of the records, at most one each.
    """
    found = []
    for record in records:
        hypothesis = for_scoring(record.hypothesis)
        kind = fault(for_scoring(record.reference), hypothesis)
        if kind:
            found.append(Fault(kind, record.id, hypothesis))
    return found


def fault(reference: str, hypothesis: str) -> Optional[str]:
    """What is wrong with a hypothesis beyond mere errors.

    A loop is one of ``analysis.is_loop``, or a text that compresses better
    than Whisper's decoding accepts while its reference does not. What is far
    too long has over twice the reference's characters and 10 more.

    ==================  ==========================  ============
    reference           hypothesis                  fault
    ==================  ==========================  ============
    네                  네 네 네 네                 loops
    네                  (none)                      empty
    (none)              (none)                      None
    네                  시청해 주셔서 감사합니다    too_long
    네                  네 네 … (200 times)         loops
    오늘 날씨 좋네요    구독 부탁드립니다           None
    ==================  ==========================  ============

    Arguments
    ---------
    reference, hypothesis : str
        After ``text.for_scoring``.

    Returns
    -------
    str or None
        One of ``KINDS``.
    """
    if not hypothesis:
        return "empty" if reference else None
    if analysis.is_loop(reference, hypothesis):
        return "loops"
    if compression(hypothesis) > MAX_COMPRESSION >= compression(reference):
        return "loops"
    if len(hypothesis) > 2 * len(reference) + N_MORE:
        return "too_long"
    return None


def compression(text: str) -> float:
    """How many times fewer bytes a text has when zlib has packed it.

    Whisper's measure: https://github.com/openai/whisper, whisper/utils.py.

    Arguments
    ---------
    text : str

    Returns
    -------
    float
        Of the UTF-8 text; 0 of an empty one.
    """
    data = text.encode("utf-8", "replace")
    return len(data) / len(zlib.compress(data))


def worst_loops(found: Iterable[Fault]) -> List[str]:
    """The loops that compress best, each text once, for the log.

    Arguments
    ---------
    found : iterable of Fault
        As ``faults`` gives them.

    Returns
    -------
    list of str
        Three at most, worst first: ID, piece and how often it stands in a
        row, text; the last two cut to 80 characters.
    """
    # By text: a collapsed model may write the same of every clip.
    loops = {one.hypothesis: one for one in found if one.kind == "loops"}
    worst = sorted(loops, key=compression, reverse=True)[:N_WORST]
    told = []
    for one in map(loops.get, worst):
        piece, n = repeated(one.hypothesis)
        told.append(
            f"{one.id}: '{_cut(piece)}' {n} times in a row: "
            f"{_cut(one.hypothesis)}"
        )
    return told


def repeated(text: str) -> Tuple[str, int]:
    """The piece of the longest row in a text, and how often it stands there.

    Arguments
    ---------
    text : str
        For example ``가 나 나 나``.

    Returns
    -------
    piece : str
        Spaces at its ends aside: ``나``. Without any row: the text.
    n : int
        ``3``.
    """
    # A space at the end, too, so that the last piece counts as the others.
    rows = list(_ROW.finditer(f"{text} "))
    if not rows:
        return text, 1
    row = max(rows, key=lambda found: len(found[0]))
    return row[1].strip(), len(row[0]) // len(row[1])


def _cut(text):
    return text if len(text) <= N_SHOWN else f"{text[: N_SHOWN - 1]}…"
