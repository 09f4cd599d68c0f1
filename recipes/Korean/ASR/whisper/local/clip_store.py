"""The clips of a preparation on disk, so that memory holds none of them.

In: Utterances with their keys, as they are kept, and what was left out.
Out: a SQLite file; the clips of a split in the order of their corpus.
"""

import hashlib
import sqlite3
from collections import Counter
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

from local.manifest import Utterance

NAME = "clips.sqlite"
TRAIN = "train"

_NAMES = tuple(field.name for field in fields(Utterance))
_FIELDS = ", ".join(_NAMES)
_VALUES = ", ".join("?" * (len(_NAMES) + 4))
_values = attrgetter(*_NAMES)
_KEYS = "label, spoken, audio, is_marked"
_DROPPED = "id, split, reason, wav, detail"
# Indexes are filled row by row: one that is made at the end is sorted in the
# folder for temporary files, which may be small, or memory.
_SCHEMA = """
PRAGMA journal_mode = OFF;  -- what is unfinished is thrown away
PRAGMA synchronous = OFF;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA temp_store = FILE;
PRAGMA cache_size = -16384;  -- KiB
CREATE TABLE clip (
    number INTEGER PRIMARY KEY,
    id TEXT UNIQUE, wav TEXT, text TEXT, split TEXT, speaker TEXT,
    category TEXT, start REAL, stop REAL, duration REAL, session TEXT,
    corpus TEXT, label BLOB, spoken BLOB, audio BLOB, is_marked INTEGER
);
CREATE INDEX by_label ON clip (split, label);
CREATE INDEX by_spoken ON clip (spoken, split) WHERE spoken IS NOT NULL;
CREATE INDEX by_audio ON clip (audio, split) WHERE audio IS NOT NULL;
CREATE INDEX by_speaker ON clip (corpus, speaker, split) WHERE speaker != '';
CREATE TABLE dropped (
    number INTEGER PRIMARY KEY,
    id TEXT, split TEXT, reason TEXT, wav TEXT, detail TEXT
);
BEGIN;
"""


class ClipStore:
    """What a preparation has kept, and what it has dropped.

    Arguments
    ---------
    path : Path
        The SQLite file, which must not be there yet.

    Attributes
    ----------
    dropped : collections.Counter
        (reason, split) to the number of clips.
    """

    def __init__(self, path):
        self._database = sqlite3.connect(
            _uri(path, "rwc"), uri=True, isolation_level=None
        )
        self._database.executescript(_SCHEMA)
        self.dropped = Counter()
        self._splits = {TRAIN: None}
        self._splits_of_dropped = {}

    def close(self):
        """Ends with a whole file."""
        try:
            if self._database.in_transaction:
                self._database.execute("COMMIT")
        finally:
            self._database.close()

    def rows(self, query, *values):
        """An iterator over the rows of a query; none is held in memory."""
        return self._database.execute(query, values)

    def __contains__(self, identifier):
        found = self.rows("SELECT 1 FROM clip WHERE id = ?", identifier)
        return found.fetchone() is not None

    def identifier(self, number):
        """The ID of a clip by its place among the kept ones."""
        query = "SELECT id FROM clip WHERE number = ?"
        return self.rows(query, number).fetchone()[0]

    def keep(self, utterance, spoken, audio, is_marked):
        """Adds a clip.

        Arguments
        ---------
        utterance : Utterance
            Its ID is new; its texts are encodable.
        spoken, audio : bytes or None
            What tells its text and its sound from others; None: nothing does.
        is_marked : bool
            Whether markup is left in its text.
        """
        label = hashlib.sha1(utterance.text.encode()).digest()
        self._database.execute(
            f"INSERT INTO clip ({_FIELDS}, {_KEYS}) VALUES ({_VALUES})",
            (*_values(utterance), label, spoken, audio, is_marked),
        )
        self._splits[utterance.split] = None

    def drop(self, utterance, reason, detail):
        """Notes a clip that is left out."""
        self._database.execute(
            f"INSERT INTO dropped ({_DROPPED}) VALUES (?, ?, ?, ?, ?)",
            (utterance.id, utterance.split, reason, utterance.wav, detail),
        )
        self.dropped[reason, utterance.split] += 1
        self._splits_of_dropped[utterance.split] = None

    def splits(self):
        """Names of the corpus' splits: train, then as clips told them."""
        return [*dict.fromkeys([*self._splits, *self._splits_of_dropped])]

    def hold_out(self, name, share):
        """Moves every reading of some texts from train to a new split.

        By text, since corpora such as Zeroth have each sentence read by many:
        a random clip's sentence would be known from training. Texts are
        ordered by a hash, so that the choice hangs on nothing but the text.

        Arguments
        ---------
        name : str
            Of the new split.
        share : float
            Of the distinct texts; one at least.
        """
        texts = "SELECT label FROM clip WHERE split = 'train' GROUP BY label"
        (n_texts,) = self.rows(f"SELECT count(*) FROM ({texts})").fetchone()
        n_chosen = max(1, round(share * n_texts))
        last = self.rows(
            f"{texts} ORDER BY label LIMIT 1 OFFSET ?", n_chosen - 1
        ).fetchone()
        if last:
            self._database.execute(
                "UPDATE clip SET split = ?"
                " WHERE split = 'train' AND label <= ?",
                (name, *last),
            )

    def hold_out_missing(self, share):
        """Holds out valid and test where the corpus has none.

        A split of the corpus that has no clip left stays, and stays empty: a
        test on clips of train would pass for the test of the corpus.

        Arguments
        ---------
        share : float
            As for ``hold_out``.

        Returns
        -------
        dict
            Every split to whether it was held out.
        """
        held_out = dict.fromkeys(self.splits(), False)
        missing = [] if "valid" in held_out else ["valid"]
        if not any(name.startswith("test") for name in held_out):
            missing.append("test")
        for name in missing:
            self.hold_out(name, share)
            held_out[name] = True
        return held_out

    def leftovers(self):
        """Yields the IDs of clips with markup left in their text."""
        rows = self.rows("SELECT id FROM clip WHERE is_marked ORDER BY number")
        return (identifier for (identifier,) in rows)

    def dropped_clips(self):
        """Yields what was left out, as ID, split, reason, path, detail."""
        return self.rows(f"SELECT {_DROPPED} FROM dropped ORDER BY number")

    def clips(self, split):
        """Yields the Utterances of a split in the order they came in."""
        for row in self.rows(
            f"SELECT {_FIELDS} FROM clip NOT INDEXED WHERE split = ?"
            " ORDER BY number",
            split,
        ):
            yield Utterance(*row)

    def totals(self, split):
        """What a split amounts to.

        Returns
        -------
        dict
            ``clips``, ``seconds``, ``no_speech`` (clips with an empty text),
            ``marked``, and ``sessions`` (clips that have one).
        """
        names = ("clips", "seconds", "no_speech", "marked", "sessions")
        row = self.rows(
            "SELECT count(*), total(duration), total(text = ''),"
            " total(is_marked), total(session != '')"
            " FROM clip NOT INDEXED WHERE split = ?",
            split,
        ).fetchone()
        kinds = (int, float, int, int, int)
        return {n: kind(v) for n, kind, v in zip(names, kinds, row)}

    def add(self, path, corpus, splits, dropped):
        """Takes over the clips of another store; their IDs get its name.

        Arguments
        ---------
        path : Path
            The other store.
        corpus : str
            Its name here.
        splits : dict
            Its splits to their names here.
        dropped : dict
            Reason to split to number, as the report of the other has it.
        """
        kept = f"{_FIELDS}, {_KEYS}"
        changed = {"id": "? || '-' || id", "split": "?", "corpus": "?"}
        chosen = ", ".join(changed.get(n, n) for n in kept.split(", "))
        self._database.execute("COMMIT")  # which an ATTACH needs
        self._database.execute("ATTACH ? AS other", (_uri(path, "ro"),))
        self._database.execute("BEGIN")
        for split, name in splits.items():
            self._database.execute(
                f"INSERT INTO main.clip ({kept}) SELECT {chosen}"
                " FROM other.clip NOT INDEXED WHERE split = ? ORDER BY number",
                (corpus, name, corpus, split),
            )
            self._database.execute(
                f"INSERT INTO main.dropped ({_DROPPED})"
                " SELECT ? || '-' || id, ?, reason, wav, detail"
                " FROM other.dropped WHERE split = ? ORDER BY number",
                (corpus, name, split),
            )
            self._splits[name] = None
        for reason, n_of_split in dropped.items():
            for split, n_clips in n_of_split.items():
                self.dropped[reason, splits[split]] += n_clips
        self._database.execute("COMMIT")
        self._database.execute("DETACH other")
        self._database.execute("BEGIN")


def _uri(path, mode):
    # A file of this process alone: some network folders know no locks.
    return f"{Path(path).absolute().as_uri()}?nolock=1&mode={mode}"
