"""The folder of manifests: finished or not, and changed as a whole.

In: the folder, and the settings that its files would follow from.
Out: new files in the place of the earlier ones, or the earlier ones whole.
"""

import contextlib
import errno
import hashlib
import json
import os
import shlex
import shutil
import sqlite3
from pathlib import Path

from local import clip_store, files, prepare_report
from local.prepare_report import NAME as REPORT

STAGE = ".preparing"  # a folder for what is unfinished
PATTERNS = ("train.csv", "valid.csv", "test*.csv")


def resolved(folder):
    """Absolute; a name on the Hugging Face hub stays as it is."""
    folder = Path(folder)
    return folder.resolve() if folder.exists() else folder


def require_apart(data_folder, out):
    """A corpus may have a train.csv of its own, which stays.

    Arguments
    ---------
    data_folder, out : Path
        The corpus, and the folder of its manifests.

    Raises
    ------
    ValueError
        ``out`` lies in the corpus.
    """
    taken = [out.resolve(), *out.resolve().parents]
    if data_folder.is_file():  # a list may lie beside anything
        inside = data_folder.parent == taken[0]
    else:
        inside = data_folder in taken
    if inside:
        raise ValueError(
            f"the manifests would go to {out}, inside the corpus folder, into "
            "which nothing is written; choose another output folder"
        )


def require_own(out):
    """Manifests of somebody else are not written over.

    Arguments
    ---------
    out : Path
        The folder.

    Raises
    ------
    ValueError
        It has manifests, and no report that they follow from.
    """
    present = _present(out)
    if present and not (out / REPORT).exists():
        raise ValueError(
            f"{present[0]} was not written by this preparation; choose another "
            "folder, or move the file"
        )


def _present(out):
    return [path for pattern in PATTERNS for path in out.glob(pattern)]


def fingerprint(transcripts):
    """A change of any transcript file changes it; audio is not looked at.

    A link to nothing is as a file that is gone: no reason to stop.

    Arguments
    ---------
    transcripts : iterable of Path
        The files.

    Returns
    -------
    str
    """
    digest = hashlib.sha256()
    for path in transcripts:
        digest.update(os.fsencode(f"{path} {_state(path)}\n"))
    return digest.hexdigest()


def _state(path):
    try:
        status = os.stat(path)
    except OSError:
        return "gone"
    return f"{status.st_size} {status.st_mtime_ns}"


def content(out):
    """A change of any manifest, or of what its report tells, changes it.

    Arguments
    ---------
    out : Path
        The folder of a finished preparation.

    Returns
    -------
    str
    """
    digest = hashlib.sha256()
    for path in [out / REPORT, *sorted(_present(out))]:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@contextlib.contextmanager
def claimed(out):
    """No other process prepares into a folder meanwhile.

    Arguments
    ---------
    out : Path
        Made if it is missing.

    Raises
    ------
    ValueError
        Another process does; tells which.
    """
    try:
        held = files.lock(out)
    except ModuleNotFoundError:  # Windows has no such locks
        held = contextlib.nullcontext()
    except ValueError as error:
        raise ValueError(
            f"manifests are being prepared in {out} already: {error}"
        ) from None
    with held:
        yield


def finished(out, settings, keeps_store=False):
    """Whether an earlier preparation with the same settings is complete.

    Arguments
    ---------
    out : Path
        The folder.
    settings : dict
        What the manifests follow from.
    keeps_store : bool
        Whether the clips are to lie there as a store, too.
    """
    report = _earlier(out)
    names = [f"{name}.csv" for name in report.get("kept", {})]
    same = report.get("settings") == json.loads(json.dumps(settings))
    names += [clip_store.NAME] * keeps_store
    return same and all((out / name).is_file() for name in names)


def _earlier(out):
    """The report of an earlier preparation; empty if there is none."""
    try:
        return prepare_report.head(out / REPORT)
    except (FileNotFoundError, ValueError):
        return {}


@contextlib.contextmanager
def staged(out):
    """A folder in ``out`` whose files replace the earlier ones at the end.

    Arguments
    ---------
    out : Path
        Made if it is missing.

    Yields
    ------
    Path
        Empty. What a killed preparation has left there is gone.

    Raises
    ------
    OSError
        The disk is full; tells the folder and its free bytes. The earlier
        files are whole.
    """
    stage = out / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        stage.mkdir(parents=True)
        yield stage
        _commit(stage, out)
    except (OSError, sqlite3.OperationalError) as error:
        if not _is_full(error):
            raise
        words = (
            error.strerror
            if isinstance(error, OSError)
            else (
                f"cannot write {stage / clip_store.NAME}: {error}; free space "
                "there or choose another folder"
            )
        )
        free = shutil.disk_usage(out).free
        raise OSError(
            errno.ENOSPC, f"{words} ({free} bytes are free in {out})"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _is_full(error):
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # SQLite tells it in words alone; a quota is an error of its writing.
    return "full" in str(error) or "I/O" in str(error)


def _commit(stage, out):
    """Renames what is staged; foreign files stay where they are.

    From here on the report names the coming files, without the settings that
    would call them finished.
    """
    coming = [path.name for path in stage.iterdir() if path.name != REPORT]
    present = [path.stem for path in _present(out)]
    earlier = [*_earlier(out).get("kept", present)]
    names = [Path(name).stem for name in coming if name.endswith(".csv")]
    with files.replacing(out / REPORT) as file:
        json.dump({"kept": {name: {} for name in [*earlier, *names]}}, file)
    for name in earlier:
        (out / f"{name}.csv").unlink(missing_ok=True)
    (out / clip_store.NAME).unlink(missing_ok=True)
    for name in [*coming, REPORT]:
        os.replace(stage / name, out / name)


def command(corpus, data_folder, out, label_fits, corpora=(), **settings):
    """The words for a shell that do what ``prepare`` would do.

    Arguments
    ---------
    corpus, data_folder, out, label_fits, corpora, **settings
        As ``prepare`` takes them. The tokenizer of ``label_fits`` is taken
        for Whisper's own.

    Returns
    -------
    str
    """
    del label_fits
    data_folder = str(resolved(data_folder))
    words = ["python", "-m", "local.prepare"]
    if corpora:
        listed = json.dumps(corpora, ensure_ascii=False)
        words += ["--corpora", listed, "--data_folder", data_folder]
    else:
        words += [corpus, data_folder]
    words += ["--out", str(Path(out).resolve())]
    if not settings.pop("keep_no_speech", True):
        words.append("--drop_no_speech")
    for name, value in settings.items():
        word = json.dumps(value) if name == "columns" else str(value)
        words += [f"--{name}", word]
    return shlex.join(words)
