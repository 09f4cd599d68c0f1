"""One chunk of feature shards: some rows of a manifest, as one folder.

In: the rows, a model source.
Out: a folder that ``datasets.load_from_disk`` opens, whole or not at all.
"""

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from local import audio, batching, dataio, features, files, sources

BYTES_PER_CLIP = 1024  # of a chunk, beside mel and label
UNFINISHED = "making_"  # begins the name of a chunk that is written


@dataclass(frozen=True)
class Chunk:
    """What one folder is made of; travels to another process."""

    path: Path
    number: int
    n_chunks: int  # of its split
    rows: dict
    data_folder: str
    whisper_hub: str
    made_by: dict  # features.identity

    @property
    def rows_fingerprint(self):
        """Changes with any cell, and with the size of any audio file.

        Not with the corpus' own place, nor with the time of a file: each node
        of a cluster may have a copy.
        """
        digest = hashlib.sha256()
        for identifier, row in self.rows.items():
            wav = os.path.relpath(row["wav"], self.data_folder or "/")
            cells = [identifier, wav, _size(row["wav"])]
            cells += [v for k, v in sorted(row.items()) if k != "wav"]
            digest.update(json.dumps(cells).encode())
        return digest.hexdigest()[:16]

    @property
    def origin(self):
        """What must be the same for a chunk to be the same."""
        return {
            "chunk": self.number,
            "n_chunks": self.n_chunks,
            "made_by": self.made_by,
            "rows": self.rows_fingerprint,
        }

    @property
    def n_bytes(self):
        """What it takes on the disk, to some percent."""
        n_most = self.made_by["context_samples"]
        n_frames = n_text = 0
        for row in self.rows.values():
            n_samples = int(max(row["duration"], 0) * audio.SAMPLE_RATE)
            n_frames += features.n_frames(min(n_samples, n_most))
            n_text += len(row["wrd"].encode())  # twice: the text, its tokens
        n_values = n_frames * self.made_by["n_mels"]
        return 2 * n_values + 2 * n_text + BYTES_PER_CLIP * len(self.rows)


def _size(path):
    try:
        return os.path.getsize(path)
    except OSError:
        return None


@lru_cache(maxsize=1)
def source(whisper_hub):
    """Tokenizer, feature extractor and filters, once a process."""
    tokenizer = sources.load_tokenizer(whisper_hub)
    extractor = sources.load_extractor(whisper_hub)
    return tokenizer, extractor, features.filters(extractor)


def make(chunk):
    """Writes one chunk.

    Clips that fail, or do not fit into the model, are left out and told.

    Returns
    -------
    int
        Clips looked at.

    Raises
    ------
    OSError
        It cannot be written; nothing of it is left.
    """
    about, kept = {**chunk.origin, "seconds": 0.0, "left_out": []}, []
    for identifier, row in chunk.rows.items():
        samples, ids, reason, detail = _heard(row, chunk.whisper_hub)
        if reason:
            clip = {"id": identifier, "reason": reason, "wav": row["wav"]}
            about["left_out"].append({**clip, "detail": detail})
            continue
        seconds = len(samples) / audio.SAMPLE_RATE
        about["seconds"] += seconds
        kept.append(_record(identifier, row, samples, ids, chunk))
    about["clips"] = len(kept)
    _write(kept, about, chunk.path)
    return len(chunk.rows)


def _heard(row, whisper_hub):
    """Samples and token ids of a clip; or why not: a reason, a detail."""
    tokenizer, extractor, _ = source(whisper_hub)
    n_most = extractor.n_samples
    text_ids = dataio.encode(row["wrd"], tokenizer)
    ids, is_cut = dataio.labels(text_ids, tokenizer)
    try:
        samples = audio.read(row["wav"], row["start"], row["stop"])
    except FileNotFoundError as error:
        return None, None, "missing_audio", str(error)
    except (OSError, ValueError) as error:
        return None, None, "unreadable_audio", str(error)
    if len(samples) > n_most + dataio.ROUNDING:
        detail = f"{len(samples)} samples, the model takes {n_most}"
        return None, None, "too_long", detail
    if is_cut:
        return None, None, "label_too_long", f"{len(text_ids)} tokens of text"
    return torch.from_numpy(samples[:n_most]), ids, "", ""


def _record(identifier, row, samples, ids, chunk):
    """One row of Arrow; the mel keeps its numpy memory."""
    import pyarrow as pa

    _, extractor, filters = source(chunk.whisper_hub)
    mel = features.of_clip(samples, filters, extractor.n_samples)
    n_mels, n_frames = mel.shape
    values = pa.array(mel.half().numpy().ravel())
    ends = range(0, n_mels * n_frames + 1, n_frames)
    bins = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)
    cells = {name: row.get(name) or "" for name in features.COLUMNS}
    seconds = len(samples) / audio.SAMPLE_RATE
    # A manifest's rounding is kept: its batches are those of a run on audio.
    slack_s = batching.SLACK_SAMPLES / audio.SAMPLE_RATE
    is_close = abs(row["duration"] - seconds) <= slack_s
    cells |= {
        "id": identifier,
        "duration": row["duration"] if is_close else seconds,
        "labels": ids,
    }
    schema = _columns().arrow_schema
    arrays = [
        pa.ListArray.from_arrays([0, n_mels], bins)
        if field.name == "input_features"
        else pa.array([cells[field.name]], field.type)
        for field in schema
    ]
    return pa.record_batch(arrays, schema=schema)


@lru_cache(maxsize=1)
def _columns():
    from datasets import Features, List, Value

    columns = {name: Value("string") for name in features.COLUMNS}
    return Features(
        {
            **columns,
            "duration": Value("float64"),  # seconds
            "input_features": List(List(Value("float16"))),  # (mels, frames)
            "labels": List(Value("int32")),  # prefix, text, end
        }
    )


def _write(records, about, path):
    """Under another name first; what is called ``path`` is whole."""
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    unfinished = f"{UNFINISHED}{path.name}"
    for left in path.parent.glob(f"{unfinished}_*"):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    temporary = path.with_name(f"{unfinished}_{uuid.uuid4().hex[:8]}")
    table = pa.Table.from_batches(records, _columns().arrow_schema)
    # A fingerprint, lest all of it is hashed for one.
    dataset = Dataset(table, fingerprint=about["rows"])
    try:
        temporary.mkdir(parents=True)
        if records:  # `datasets` cannot read back what is empty
            dataset.save_to_disk(str(temporary))
        with files.replacing(temporary / features.TOLD) as file:
            json.dump(about, file, ensure_ascii=False)
        for written in temporary.iterdir():  # before the name that tells so
            files.sync(written)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror or error}; free space "
            "there, or remove what is in the way, and run the same command "
            "again: finished chunks stay",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
