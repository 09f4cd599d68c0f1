"""A frozen encoder's outputs, kept on disk from the first epoch on.

In: keys of clips and their encoder states, (frames, width) each.
Out: the same states bit for bit, in every process that opens the folder.
"""

import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import torch

from local import cache_files
from local.cache_files import DTYPES, MARGIN_BYTES, RECORD, gb
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)

VERSION = 1  # of the files and of what is stored; another one starts anew
CHUNK = 2**24  # weights hashed at once; bounds the copy from a GPU


def key(wav, start, stop):
    """Identity of a clip; a file that was changed holds other clips.

    Arguments
    ---------
    wav : str
        Path of an audio file.
    start, stop : float or None
        Seconds into the file.

    Returns
    -------
    str
        32 hexadecimal digits.

    Raises
    ------
    FileNotFoundError
        The file is not there.
    """
    stat = os.stat(wav)
    cut = f"\0{start}\0{stop}\0{stat.st_size}\0{stat.st_mtime_ns}"
    name = os.fsencode(os.path.abspath(wav)) + cut.encode()
    return hashlib.blake2b(name, digest_size=16).hexdigest()


def fingerprint(encoder, dtype, **settings):
    """Identity of what a cache holds, and the name of its folder.

    Arguments
    ---------
    encoder : torch.nn.Module
        Its state counts: names, shapes, dtypes and every byte (about 1 GB/s).
    dtype : torch.dtype
        Of the stored states.
    **settings : str, int, float, bool or None
        All else that the states depend on, such as sample rate, context,
        frames kept and the precision of the computation.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    head = json.dumps([VERSION, str(dtype), settings], sort_keys=True)
    digest.update(head.encode())
    for name, tensor in sorted(encoder.state_dict().items()):
        head = f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n"
        digest.update(head.encode())
        for chunk in tensor.detach().reshape(-1).split(CHUNK):
            digest.update(chunk.cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def bytes_needed(
    durations_s, frames_per_s, extra_frames, max_frames, width, dtype
):
    """Bytes that clips take on disk.

    Arguments
    ---------
    durations_s : iterable of float
        Of the clips, seconds.
    frames_per_s : int
        Encoder frames a second, 50 for Whisper.
    extra_frames : int
        Kept behind the end of each clip.
    max_frames : int
        The encoder's context.
    width : int
        Of the states.
    dtype : torch.dtype
        Of the stored states.

    Returns
    -------
    int
    """
    rounding = 1e-6  # frames; 0.14 s * 50 is 7.000000000000001
    n_clips = n_frames = 0
    for duration_s in durations_s:
        frames = math.ceil(duration_s * frames_per_s - rounding)
        n_frames += min(frames + extra_frames, max_frames)
        n_clips += 1
    return n_frames * width * dtype.itemsize + n_clips * RECORD.itemsize


def require_space(folder, n_bytes, kept_free=MARGIN_BYTES):
    """Refuses a folder that cannot take the cache.

    Arguments
    ---------
    folder : str or Path
        Of the caches; need not exist.
    n_bytes : int
        Still to be written, without what lies there from an earlier run.
    kept_free : int
        Bytes left for checkpoints and others.

    Raises
    ------
    ValueError
        The disk is too full, or the folder cannot be written to.
    """
    parent = existing(folder)
    remedy = (
        "give encoder_cache_folder on another disk, train on fewer clips, or "
        "leave it empty to train without a cache"
    )
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise ValueError(
            f"the encoder cache cannot be written to {folder}: {parent} is no "
            f"folder that may be written to; {remedy}"
        )
    free = max(shutil.disk_usage(parent).free - kept_free, 0)
    if n_bytes > free:
        raise ValueError(
            f"the encoder cache needs {gb(n_bytes)} in {folder}, where "
            f"{gb(free)} are free ({gb(kept_free)} are kept for "
            f"checkpoints); {remedy}"
        )


def existing(folder):
    """The folder itself, or what there is of the way to it."""
    folder = Path(folder).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def other_caches(folder, fingerprint):
    """One line on what other models and settings have left, or "".

    Arguments
    ---------
    folder : str or Path
        Of the caches.
    fingerprint : str
        The cache that is in use.

    Returns
    -------
    str
    """
    indices = Path(folder).glob("*/*.index")
    others = {path.parent for path in indices} - {Path(folder) / fingerprint}
    if not others:
        return ""
    n_bytes = sum(
        path.stat().st_size for other in others for path in other.iterdir()
    )
    names = ", ".join(sorted(other.name for other in others))
    return (
        f"{folder} holds {len(others)} other encoder caches of "
        f"{gb(n_bytes)} in all; they may be removed unless another run "
        f"reads them: {names}"
    )


class EncoderCache:
    """Encoder states on disk, by the keys of their clips.

    Ranks, the workers of a data loader and several runs may read and write
    one folder at the same time; a copy in another process, forked or pickled,
    opens files of its own. Opening writes nothing.

    What is put is found after the next ``refresh``, with what others wrote.
    Writing happens in a thread. When it fails, training goes on: one warning,
    and nothing more is written.

    Arguments
    ---------
    folder : str or Path
        Of all caches; this one takes a folder in it.
    fingerprint : str
        From ``fingerprint``.
    writer : str
        Begins the names of the files written from here, such as "rank0".
    """

    def __init__(self, folder, fingerprint, writer="writer"):
        self.path = Path(folder) / fingerprint
        self.writer = writer
        self._writing = True
        self._warned = False
        self._stems = []  # (file,) paths without suffix
        self._n_read = []  # (file,) bytes of the index that were read
        # Arrays, not a dict: 600 000 entries take 24 MB a process.
        self._records = np.empty(0, RECORD)  # (entry,) sorted by key
        self._keys = np.empty(0, "<u8")  # (entry,)
        self._files = np.empty(0, "<u4")  # (entry,) position in _stems
        self._forget_files()
        self.refresh()
        others = other_caches(folder, fingerprint)
        if others:
            logger.info(others)

    def _forget_files(self):
        self._pid = os.getpid()
        self._open = {}  # position in _stems to a data file
        self._own = None  # Writer

    def __getstate__(self):
        return {**self.__dict__, "_open": {}, "_own": None}

    def __len__(self):
        """Number of clips as of the last ``refresh``."""
        return len(np.unique(self._keys))

    def __contains__(self, key):
        return len(self._entries(key)) > 0

    def _entries(self, key):
        """Where a key lies: a range, since two writers may have had it."""
        number = np.uint64(cache_files.number(key))
        first = np.searchsorted(self._keys, number, "left")
        return range(first, np.searchsorted(self._keys, number, "right"))

    def get(self, key):
        """The states of a clip.

        Arguments
        ---------
        key : str
            From ``key``.

        Returns
        -------
        torch.Tensor or None
            (frames, width), in the dtype that was put; None where there is
            no such entry, or none that can be read and is whole.
        """
        entries = self._entries(key)
        for entry in entries:
            states = self._read(key, entry)
            if states is not None:
                return states
        if entries and not self._warned:
            self._warned = True
            logger.warning(
                "encoder cache %s: an entry cannot be read or does not match "
                "its checksum; such clips are encoded again. Should the disk "
                "be sound, remove that folder to start anew",
                self.path,
                main_process_only=False,
            )
        return None

    def _read(self, key, entry):
        record = self._records[entry]
        _, offset, n_frames, width, dtype, crc = record.item()
        states = torch.empty(n_frames, width, dtype=DTYPES[dtype])
        data = states.view(torch.uint8).numpy()
        try:
            os.preadv(self._descriptor(entry), [data], offset)
        except OSError:  # removed, or a bad sector
            return None
        return (
            states if cache_files.checksum(key, record, data) == crc else None
        )

    def _descriptor(self, entry):
        self._leave_parent()
        file = int(self._files[entry])
        if file not in self._open:
            name = f"{self._stems[file]}.data"
            self._open[file] = open(name, "rb", buffering=0)
        return self._open[file].fileno()

    def _leave_parent(self):
        """A forked process must not write to its parent's files."""
        if self._pid != os.getpid():
            self._forget_files()

    def put(self, key, states):
        """Stores one clip; see ``put_batch``."""
        self.put_batch([key], [states])

    def put_batch(self, keys, states):
        """Stores clips, with one copy from the device for all of them.

        Meant for clips that ``get`` did not have: a key that is there
        already takes its space again.

        Arguments
        ---------
        keys : list of str
        states : list of torch.Tensor
            (frames, width) each, on any device, of one dtype and width.

        Raises
        ------
        ValueError
            The dtype cannot be stored.
        """
        if not (self._writing and keys):
            return
        assert len(keys) == len(states)
        dtypes = {s.dtype for s in states}
        if len(dtypes) > 1 or not dtypes <= set(DTYPES):
            raise ValueError(
                f"states of {dtypes} cannot be stored; convert them all to "
                f"one of {DTYPES}"
            )
        lengths = [len(s) for s in states]
        together = torch.cat([s.detach() for s in states]).cpu()
        self._leave_parent()
        try:
            if self._own is None:
                self._own = cache_files.Writer(self.path, self.writer)
            self._own.submit(list(keys), lengths, together)
        except OSError as error:
            self._stop_writing(error)

    def flush(self):
        """Waits until what was put lies in the files.

        It then outlives this process, and the system writes it to the disk.
        """
        self._leave_parent()
        if self._own is None:
            return
        try:
            self._own.wait()
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error):
        self._writing, self._own = False, None
        logger.warning(
            "encoder cache %s: writing failed (%s). Training goes on, and "
            "encodes in every epoch what is not stored; to store it, free "
            "space or name another folder, and start again",
            self.path,
            error,
            main_process_only=False,
        )

    def refresh(self):
        """Finds what this process and others have written since."""
        self.flush()
        known = set(self._stems)
        for index in sorted(self.path.glob("*.index")):
            if index.with_suffix("") not in known:
                self._stems.append(index.with_suffix(""))
                self._n_read.append(0)
        found = [self._records]
        files = [self._files]
        for file, stem in enumerate(self._stems):
            records, n_bytes = cache_files.read_index(stem, self._n_read[file])
            self._n_read[file] += n_bytes
            found.append(records)
            files.append(np.full(len(records), file, "<u4"))
        records, files = np.concatenate(found), np.concatenate(files)
        order = np.argsort(records["key"], kind="stable")
        self._records, self._files = records[order], files[order]
        # searchsorted would copy a column of the records at every call
        self._keys = np.ascontiguousarray(self._records["key"])
