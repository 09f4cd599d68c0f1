"""Scores of a test set: CER, WER and sWER, and one record an utterance.

In: Records, each a reference and a hypothesis as label and model gave them.
Out: a flat dictionary of rates in percent, and the files under scores/.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Tuple

import jiwer
from rapidfuzz.distance import Levenshtein

from local import (
    files,
    text as korean,
)
from speechbrain.utils.metric_stats import ErrorRateStats

METRICS = ("CER", "WER")  # what the best checkpoint can be chosen by
RATES = ("CER", "CER_no_space", "WER", "sWER", "CER_raw", "WER_raw")
Pairs = List[Tuple[str, str]]  # reference, hypothesis


@dataclass(frozen=True)
class Record:
    """One utterance, as the label and the model wrote it.

    Attributes
    ----------
    id : str
        Of the manifest.
    reference, hypothesis : str
        Raw texts.
    duration : float
        Seconds of audio.
    category : str
        Of the manifest; empty where it has none.
    speaker : str
        Of the manifest; empty where it has none.
    failed : bool
        The clip could not be decoded. It is counted, and scored by the
        hypothesis it has.
    """

    id: str
    reference: str
    hypothesis: str
    duration: float
    category: str = ""
    speaker: str = ""
    failed: bool = False


def score(records: Iterable[Record], loss: Optional[float] = None) -> dict:
    """Scores a set: the edits of all utterances over all reference units.

    A rate passes 100 where a model inserts more than was said. A set whose
    references hold no unit at all has the rate 0 without insertions, and 100
    with any.

    Arguments
    ---------
    records : iterable of Record
        In any order.
    loss : float or None
        Handed through.

    Returns
    -------
    dict
        In percent ``CER`` (a space is a character), ``CER_no_space``,
        ``WER``, ``sWER``, and ``CER_raw`` and ``WER_raw`` of the raw texts,
        spaces at their ends aside; then ``loss``, ``n_utterances``,
        ``n_reference_chars`` (what CER divides by), ``n_failed``, and
        ``text_policy``, a str: how all but the raw texts were compared.
    """
    records = list(records)
    raw = [(record.reference, record.hypothesis) for record in records]
    pairs = _map(korean.for_scoring, raw)
    spaced = [(ref, space_normalized(ref, hyp)) for ref, hyp in pairs]
    return {
        "CER": _rate(jiwer.process_characters, pairs),
        "CER_no_space": _rate(
            jiwer.process_characters, _map(korean.without_spaces, pairs)
        ),
        "WER": _rate(jiwer.process_words, pairs),
        "sWER": _rate(jiwer.process_words, spaced),
        "CER_raw": _rate(jiwer.process_characters, raw),
        "WER_raw": _rate(jiwer.process_words, raw),
        "loss": loss,
        "n_utterances": len(records),
        "n_reference_chars": sum(len(reference) for reference, _ in pairs),
        "n_failed": sum(record.failed for record in records),
        "text_policy": korean.POLICY,
    }


def records(batch, hypotheses: List[str]) -> dict:
    """What the scores need of a batch's clips.

    Arguments
    ---------
    batch : speechbrain.dataio.batch.PaddedBatch
        With ``id``, ``wrd``, ``duration``, ``category`` and ``failed``.
    hypotheses : list of str
        Of its clips; a failed one is scored as empty.

    Returns
    -------
    dict
        ID to Record.
    """
    return {
        identifier: Record(
            id=identifier,
            reference=batch.wrd[i],
            hypothesis="" if batch.failed[i] else hypotheses[i],
            duration=float(batch.duration[i]),
            category=batch.category[i],
            failed=bool(batch.failed[i]),
        )
        for i, identifier in enumerate(batch.id)
    }


def table(scores_by_set: dict) -> str:
    """A line for each test set, for people.

    Arguments
    ---------
    scores_by_set : dict
        Name to what ``score`` gives.

    Returns
    -------
    str
    """
    rates = ["CER", "CER_no_space", "WER", "sWER"]
    counts = ["n_utterances", "n_failed"]
    rows = [["test set", *rates, *counts]]
    for name, scores in scores_by_set.items():
        cells = [f"{scores[rate]:.2f}" for rate in rates]
        rows.append([name, *cells, *(str(scores[n]) for n in counts)])
    width = 2 + max(len(cell) for row in rows for cell in row)
    return "\n".join("".join(f"{c:>{width}}" for c in row) for row in rows)


def _map(rule: Callable[[str], str], pairs: Pairs) -> Pairs:
    return [(rule(ref), rule(hyp)) for ref, hyp in pairs]


def _rate(align: Callable, pairs: Pairs) -> float:
    # jiwer's own rate is a plain number of insertions without reference units
    counts = align([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    n_units = counts.hits + counts.substitutions + counts.deletions
    n_edits = counts.substitutions + counts.deletions + counts.insertions
    if n_units == 0:
        return 100.0 if n_edits else 0.0
    return 100.0 * n_edits / n_units


def space_normalized(reference: str, hypothesis: str) -> str:
    """Gives a hypothesis the spacing of its reference; sWER is WER after it.

    The two are aligned character by character without their spaces. A
    character that matches takes over whether a word begins with it in the
    reference; one that was inserted or substituted keeps what it had. So
    spacing alone costs nothing, and a wrong syllable costs its word. Where
    the first syllable of a word is missed, the rest joins the word before.

    The measure is the space-normalised WER of ETRI's KsponSpeech baseline
    (Bang et al., Applied Sciences 10(19):6936, 2020).

    Arguments
    ---------
    reference, hypothesis : str
        Texts after ``text.for_scoring``.

    Returns
    -------
    str
        The hypothesis' characters, spaced anew.
    """
    expected, begins_expected = _spacing(reference)
    characters, begins = _spacing(hypothesis)
    for step in Levenshtein.opcodes(expected, characters):
        if step.tag == "equal":
            source = begins_expected[step.src_start : step.src_end]
            begins[step.dest_start : step.dest_end] = source
    pieces = zip(begins, characters, strict=True)
    return "".join(" " * begin + char for begin, char in pieces).strip()


def _spacing(text: str) -> Tuple[str, List[bool]]:
    """The characters without spaces, and whether each begins a word."""
    words = text.split()
    begins = [place == 0 for word in words for place in range(len(word))]
    return "".join(words), begins


def merged(parts: Iterable[Dict[str, Record]]) -> List[Record]:
    """The records of all ranks, each utterance once, in the order of IDs."""
    found = {key: record for part in parts for key, record in part.items()}
    return [found[key] for key in sorted(found)]


def record_row(record: Record) -> dict:
    """What is kept of one utterance.

    Arguments
    ---------
    record : Record
        Of any set.

    Returns
    -------
    dict
        ``id``, the raw ``reference`` and ``hypothesis``, ``errors`` (edited
        characters after ``text.for_scoring``, with spaces), ``duration`` in
        seconds and ``category``.
    """
    reference = korean.for_scoring(record.reference)
    hypothesis = korean.for_scoring(record.hypothesis)
    return {
        "id": record.id,
        "reference": record.reference,
        "hypothesis": record.hypothesis,
        "errors": Levenshtein.distance(reference, hypothesis),
        "duration": record.duration,
        "category": record.category,
    }


def write_scores(
    folder: Path, name: str, records: Iterable[Record], scores: dict
) -> None:
    """Writes ``<name>.json`` and ``<name>.jsonl``.

    Arguments
    ---------
    folder : Path
        Made if it is missing.
    name : str
        Of the set.
    records : iterable of Record
        In the order of the lines.
    scores : dict
        As `score` gives it.

    Raises
    ------
    OSError
        A file cannot be written; the one that was there is whole.
    """
    rows = (
        json.dumps(record_row(record), ensure_ascii=False) + "\n"
        for record in records
    )
    folder.mkdir(parents=True, exist_ok=True)
    with files.replacing(folder / f"{name}.jsonl") as file:
        file.writelines(rows)
    with files.replacing(folder / f"{name}.json") as file:
        file.write(json.dumps(scores, indent=2) + "\n")


def write_alignments(path: Path, records: Iterable[Record]) -> None:
    """Writes SpeechBrain's alignment file, of the words as WER counts them.

    SpeechBrain's head line reads 0.00 where no reference has a word; the
    insertions beside it are counted all the same.

    Arguments
    ---------
    path : Path
        For example ``wer_test.txt``.
    records : iterable of Record
        In the order of the file; at least one.

    Raises
    ------
    OSError
        It cannot be written; the file that was there is whole.
    """
    stats = ErrorRateStats()
    for record in records:
        stats.append(
            ids=[record.id],
            predict=[korean.for_scoring(record.hypothesis).split()],
            target=[korean.for_scoring(record.reference).split()],
        )
    with files.replacing(path) as file:
        stats.write_stats(file)
