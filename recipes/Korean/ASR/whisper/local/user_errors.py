"""An error of the user's ends a program by what it tells, without a traceback.

In: the program's name, and what may be the user's.
Out: exit status 1, and one message.
"""

import contextlib
import sys

import torch


@contextlib.contextmanager
def told(program, kinds=(ValueError, OSError), out_of_memory=""):
    """Ends the program where an error of these kinds is raised.

    Arguments
    ---------
    program : str
        Stands before the message.
    kinds : type or tuple of type
        Which errors may be the user's.
    out_of_memory : str
        What to do where a GPU's memory was too little; else it is raised.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not out_of_memory:
            raise
        sys.exit(f"{program}: {out_of_memory}: {error}")
    except kinds as error:
        sys.exit(f"{program}: {error}")
