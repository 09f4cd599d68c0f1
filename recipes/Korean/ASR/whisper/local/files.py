"""Files that are written whole or not at all, and run no code when read.

In: a path.
Out: a text file that takes the path's place when it is closed; a lock; numbers
and tensors, as JSON and safetensors.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import socket
import time
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = "run.lock"
HELD = (errno.EACCES, errno.EAGAIN)  # what POSIX allows for a lock that is held
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
TENSOR = "$tensor"  # its value in JSON: the name in the safetensors file


@contextlib.contextmanager
def replacing(path: Path, binary=False):
    """Opens a temporary file that replaces ``path`` at the end of the block.

    Arguments
    ---------
    path : Path
        What stood there stays until then, and stays if writing fails.
    binary : bool
        Bytes instead of text.

    Yields
    ------
    file
        UTF-8 text, line ends as written; or bytes.

    Raises
    ------
    OSError
        It cannot be written, for example on a full disk; names the path.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    options = {} if binary else {"encoding": "utf-8", "newline": ""}
    try:
        with open(temporary, "wb" if binary else "w", **options) as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror or error}; free space there "
            "or choose another folder",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def lock(folder):
    """Claims an output folder for this process; once a process and folder.

    The lock goes with the process, however that ends. Nothing else in it may
    open the lock's file: to close any descriptor of it ends a POSIX lock.

    Arguments
    ---------
    folder : str or Path
        Made if it is missing.

    Returns
    -------
    file
        Holds the lock until it is closed, or not referred to any more. It
        tells ``pid``, ``host`` and ``since``, as JSON.

    Raises
    ------
    ValueError
        Another process has it; tells which.
    OSError
        The folder cannot be written.
    """
    import fcntl  # not on Windows, where manifests are prepared, too

    path = Path(folder) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b", buffering=0)  # another's words are kept
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}; choose another folder",
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise ValueError(
                f"'{folder}' is in use by {_holder(file)}; stop that run, or "
                "choose another folder"
            ) from None
        logger.warning(
            "output_folder='%s' cannot be locked (%s): start no second run "
            "there",
            folder,
            error.strerror,
        )
    _sign(file)
    return file


def _holder(file):
    """Who has signed a lock's file; it may be about to."""
    file.seek(0)
    try:
        told = json.loads(file.read())
        return "process {pid} on {host} since {since}".format(**told)
    except (ValueError, KeyError, TypeError):
        return "another process"


def _sign(file):
    me = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    with contextlib.suppress(OSError):  # a full disk: locked without a name
        file.truncate(0)
        file.write(json.dumps(me).encode())


def sync(path):
    """Waits until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no such thing for folders.
        if error.errno not in CANNOT_SYNC or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def error_number(error):
    """The system's number of an exception; None where it has none."""
    from safetensors import SafetensorError

    if isinstance(error, SafetensorError):  # tells it in words alone
        found = re.search(r"(?:os error|code:) (\d+)", str(error))
        return int(found[1]) if found else None
    return error.errno if isinstance(error, OSError) else None


# Below, libraries are imported that take longer than `python -m local.prepare`
# should to start.


def save_state(state, path):
    """Writes what a ``state_dict`` holds, exact to the bit.

    Arguments
    ---------
    state : dict
        Tensors of any type, numbers, texts, None; lists and dicts of them.
        Keys are texts. Tuples are read back as lists.
    path : Path
        Of the JSON; any tensors go to ``.safetensors`` beside it.
    """
    from safetensors.torch import save_file

    tensors = {}
    text = json.dumps(_split(state, "", tensors))
    path.write_text(text, encoding="utf-8")
    if tensors:
        beside = path.with_suffix(".safetensors")
        save_file(_apart(tensors), beside)
        shutil.copymode(path, beside)  # not for its owner alone


def load_state(path):
    """What ``save_state`` was given; its tensors are on the CPU.

    Arguments
    ---------
    path : Path
        Of the JSON.

    Returns
    -------
    dict

    Raises
    ------
    ValueError
        A file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    beside, tensors = path.with_suffix(".safetensors"), {}
    try:
        if beside.exists():
            with safe_open(beside, "pt") as file:
                # Copies: what is mapped would keep a removed file on the disk.
                names = list(file.keys())
                tensors = {n: file.get_tensor(n).clone() for n in names}
        return dict(_join(json.loads(path.read_bytes()), tensors))
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}); remove {path.parent} to go on "
            "from an earlier checkpoint"
        ) from error


def _split(value, name, tensors):
    """A value for JSON; its tensors go into a dict, by where they were."""
    import torch

    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {TENSOR: name}
    name = f"{name}." if name else ""
    if isinstance(value, dict):
        return {k: _split(v, f"{name}{k}", tensors) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(v, f"{name}{n}", tensors) for n, v in enumerate(value)]
    return value


def _join(value, tensors):
    """What ``_split`` was given."""
    if isinstance(value, dict):
        if TENSOR in value:
            return tensors[value[TENSOR]]
        return {k: _join(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_join(v, tensors) for v in value]
    return value


def _apart(tensors):
    """The same tensors on the CPU, none in another's memory."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found
