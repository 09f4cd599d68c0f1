"""Files that are written whole or not at all.

In: a path.
Out: a text file to write into; it takes the path's place when it is closed.
"""

import contextlib
import os
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path):
    """Opens a temporary file that replaces ``path`` at the end of the block.

    Arguments
    ---------
    path : Path
        What stood there stays until then, and stays if writing fails.

    Yields
    ------
    file
        UTF-8 text, line ends as written.

    Raises
    ------
    OSError
        It cannot be written, for example on a full disk; names the path.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror}; free space there or "
            "choose another folder",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
