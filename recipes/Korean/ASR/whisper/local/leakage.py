"""What a model may know of a test from training: texts, speakers, sound.

In: the clips of a preparation, in a ClipStore.
Out: what each split has in common with train, as numbers and examples.
"""

import hashlib
from itertools import groupby

import numpy as np

from local import text
from local.clip_store import TRAIN

N_EXAMPLES = 20
N_KEY_BYTES = 16  # two of 10^9 clips meet by chance once in 10^20 corpora
# What two clips may share: the columns that tell it, and which clips have one,
# in the words of an index; it gives the clips of a group one after the other.
SHARED = {
    "texts": ("spoken", "spoken IS NOT NULL"),
    "speakers": ("corpus, speaker", "speaker != ''"),
    "audio": ("audio", "audio IS NOT NULL"),
}


def of_text(label):
    """What two readings of a text have in common.

    Arguments
    ---------
    label : str
        A label.

    Returns
    -------
    bytes or None
        The same for texts that ``text.for_scoring`` makes the same but for
        spaces; None for one of which nothing is left.
    """
    spoken = text.without_spaces(text.for_scoring(label))
    return _digest(spoken.encode()) if spoken else None


def of_audio(samples, rate):
    """What two copies of a recording have in common, in whatever format.

    Arguments
    ---------
    samples : numpy.ndarray
        float32, (n_samples,), as decoded.
    rate : int
        Hz.

    Returns
    -------
    bytes or None
        None where there is no sample.
    """
    if not len(samples):
        return None
    return _digest(np.ascontiguousarray(samples), str(rate).encode())


def _digest(*parts):
    # The fastest one of the standard library where a processor knows it.
    digest = hashlib.sha1()
    for part in parts:
        digest.update(part)
    return digest.digest()[:N_KEY_BYTES]


def between(store, splits):
    """What the other splits have in common with train.

    Arguments
    ---------
    store : ClipStore
        The kept clips, each in its final split.
    splits : iterable of str
        Those to be looked at; train itself does not count.

    Returns
    -------
    dict
        ``splits``: split to "texts", "speakers" and "audio" to ``shared``
        (how many stand in train as well), ``clips`` (of the split, that have
        one of these) and ``examples``, a clip of either: split to ID.
        ``without_speaker``: split to clips of which no speaker is known.
        ``copies_in_train``: ``clips`` whose sound an earlier clip of train
        has, and ``examples``, the ID of either.
    """
    found = {
        split: {kind: _nothing() for kind in SHARED}
        for split in splits
        if split != TRAIN
    }
    copies = {"clips": 0, "examples": []}
    for kind, (columns, told) in SHARED.items():
        for group in _groups(store, columns, told):
            in_train = group.pop(TRAIN, None)
            if in_train is None:
                continue
            n_clips, first, last = in_train
            for split, (n_others, other, _) in group.items():
                shared = found[split][kind]
                shared["shared"] += 1
                clips = {TRAIN: first, split: other}
                _add(shared, n_others, store, clips)
            if kind == "audio" and n_clips > 1:
                clips = {"first": first, "copy": last}
                _add(copies, n_clips - 1, store, clips)
    unknown = store.rows(
        "SELECT split, count(*) FROM clip WHERE speaker = '' GROUP BY split"
    )
    return {
        "splits": found,
        "without_speaker": dict(unknown),
        "copies_in_train": copies,
    }


def _nothing():
    return {"shared": 0, "clips": 0, "examples": []}


def _groups(store, columns, told):
    """What clips share, as split to number, first and last of the clips."""
    rows = store.rows(
        f"SELECT {columns}, split, count(*), min(number), max(number)"
        f" FROM clip WHERE {told} GROUP BY {columns}, split"
    )
    for _, group in groupby(rows, key=lambda row: row[:-4]):
        yield {row[-4]: row[-3:] for row in group}


def _add(entry, n_clips, store, clips):
    entry["clips"] += n_clips
    if len(entry["examples"]) < N_EXAMPLES:
        named = {name: store.identifier(n) for name, n in clips.items()}
        entry["examples"].append(named)
