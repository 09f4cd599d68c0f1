"""The files of an encoder cache: states, and where each clip's lie.

In: keys of clips with their states, (frames, width); or paths of files.
Out: a data and an index file of one writer; the whole entries of any.
"""

# A cache is one folder for each fingerprint. Every writer has two files of
# its own there, which it alone appends to and everybody reads:
#
#   <writer>-<random>.data    states, one clip after another, without gaps
#   <writer>-<random>.index   one RECORD for each clip
#
# A record follows its data, so that a process that dies leaves whole entries
# and perhaps a tail that no record points to. Whatever else a power cut or a
# bad disk leaves behind does not pass the checksum.

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPE_BYTES = np.array([dtype.itemsize for dtype in DTYPES], dtype="<u8")
RECORD = np.dtype(
    [
        ("key", "<u8"),  # number of the clip's key
        ("offset", "<u8"),  # bytes into the data file
        ("n_frames", "<u4"),
        ("width", "<u2"),
        ("dtype", "<u2"),  # position in DTYPES
        ("crc", "<u4"),  # of the key, the fields above and the data
    ]
)  # 28 bytes
MARGIN_BYTES = 2 * 10**9  # left free on the disk, for checkpoints and others
MAX_PENDING = 2  # batches waiting to be written; bounds the memory they take


class Writer:
    """Appends to two files that nobody else writes to, in a thread."""

    def __init__(self, folder, name):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        stem = folder / f"{name}-{uuid.uuid4().hex}"
        self.data = open(f"{stem}.data", "xb", buffering=0)
        self.index = open(f"{stem}.index", "xb", buffering=0)
        self.n_data = self.n_index = 0  # bytes of whole entries
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.pending = deque()

    def submit(self, keys, lengths, states):
        """Queues clips, (all frames, width); raises what earlier ones met."""
        self.wait(MAX_PENDING - 1)
        job = self.thread.submit(self.append, keys, lengths, states)
        self.pending.append(job)

    def wait(self, n_left=0):
        """Until no more than so many batches wait; raises their OSError."""
        while len(self.pending) > n_left:
            self.pending.popleft().result()

    def append(self, keys, lengths, states):
        """Data first, then the records that point to them."""
        data = states.view(torch.uint8).numpy()  # (all frames, bytes)
        records = _records(keys, lengths, states, data, self.n_data)
        try:
            if shutil.disk_usage(self.folder).free < MARGIN_BYTES + data.nbytes:
                raise OSError(
                    errno.ENOSPC,
                    f"No space left beyond {gb(MARGIN_BYTES)} for checkpoints",
                )
            _write(self.data.fileno(), data, self.n_data)
            _write(self.index.fileno(), records, self.n_index)
        except OSError:
            # A full disk gets back what no record points to.
            with contextlib.suppress(OSError):
                self.data.truncate(self.n_data)
            raise
        self.n_data += data.nbytes
        self.n_index += records.nbytes


def _records(keys, lengths, states, data, offset):
    """(entry,) RECORD of clips that lie one after another from an offset."""
    records = np.zeros(len(keys), RECORD)
    records["key"] = [number(key) for key in keys]
    records["n_frames"] = lengths
    records["width"] = states.shape[1]
    records["dtype"] = DTYPES.index(states.dtype)
    starts = np.cumsum([0, *lengths])
    records["offset"] = offset + starts[:-1] * data.shape[1]
    for i, key in enumerate(keys):
        clip = data[starts[i] : starts[i + 1]]
        records["crc"][i] = checksum(key, records[i], clip)
    return records


def read_index(stem, start):
    """Records from a byte of an index file on.

    Returns
    -------
    records : numpy.ndarray
        (entry,) RECORD whose data are there.
    n_bytes : int
        Of the index that need not be read again; a record that is written
        just now, or was torn, is left.
    """
    try:
        with open(f"{stem}.index", "rb") as file:
            file.seek(start)
            content = file.read()
        # After the index: no smaller. Opened, since a network's file system
        # may remember an older size.
        with open(f"{stem}.data", "rb") as file:
            n_data = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return np.empty(0, RECORD), 0
    records = np.frombuffer(content, RECORD, len(content) // RECORD.itemsize)
    n_bytes = records["n_frames"] * records["width"].astype("<u8")
    n_bytes *= DTYPE_BYTES.take(records["dtype"], mode="clip")
    whole = (
        (records["dtype"] < len(DTYPES))
        & (n_bytes > 0)
        & (n_bytes <= n_data)
        & (records["offset"] <= n_data - np.minimum(n_bytes, n_data))
    )
    return records[whole], records.nbytes


def _write(descriptor, array, offset):
    """All bytes of an array at an offset; the system may take fewer a call."""
    rest = memoryview(array.reshape(-1).view(np.uint8))
    while rest:
        n_written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[n_written:], offset + n_written


def checksum(key, record, data):
    fields = record.tobytes()[: -RECORD["crc"].itemsize]
    return zlib.crc32(data, zlib.crc32(fields, zlib.crc32(key.encode())))


def number(key):
    """64 bits of a key; two keys that share them differ in the checksum."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def gb(n_bytes):
    return f"{n_bytes / 1e9:.1f} GB"
