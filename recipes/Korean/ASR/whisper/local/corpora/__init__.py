"""The corpora by name; a new one is a new file here and a line in CORPORA.

In: a corpus name, its folder, and the settings some corpora need.
Out: its transcript files, and its Utterances.

A corpus is a module with two functions: ``transcripts(folder)``, the files
whose change calls for a new preparation, and ``read(folder)``, which yields
Utterances. Either may also name ``text_form``, ``columns`` or
``unpack_folder`` among its parameters, and then gets it.
"""

import inspect
from pathlib import Path
from types import ModuleType
from typing import Callable, Dict, Iterable, Iterator, Optional

from local.corpora import (
    aihub,
    clovacall,
    common_voice,
    fleurs,
    huggingface,
    ksponspeech,
    kss,
    manifest,
    pansori,
    zeroth,
)
from local.manifest import Utterance

CORPORA: Dict[str, ModuleType] = {
    "zeroth": zeroth,
    "ksponspeech": ksponspeech,
    "fleurs": fleurs,
    "common_voice": common_voice,
    "clovacall": clovacall,
    "kss": kss,
    "pansori": pansori,
    "huggingface": huggingface,
    "aihub": aihub,
    "manifest": manifest,
}


def transcripts(
    corpus: str, folder: Path, columns: Optional[Dict[str, str]] = None
) -> Iterable[Path]:
    """Lists the files whose change calls for a new preparation.

    Arguments
    ---------
    corpus : str
        A name in CORPORA.
    folder : Path
        Where the corpus lies.
    columns : dict or None
        Our column names to the user's, for ``manifest`` and ``huggingface``.

    Returns
    -------
    iterable of Path
        Absolute.

    Raises
    ------
    ValueError
        The corpus is unknown.
    FileNotFoundError
        The folder does not have the layout of the corpus.
    """
    return _call(_module(corpus).transcripts, folder, columns=columns)


def read(
    corpus: str,
    folder: Path,
    text_form: str = "spelling",
    columns: Optional[Dict[str, str]] = None,
    unpack_folder: Optional[Path] = None,
) -> Iterator[Utterance]:
    """Reads a corpus, one Utterance at a time.

    Arguments
    ---------
    corpus : str
        A name in CORPORA.
    folder : Path
        Where the corpus lies; nothing is written there.
    text_form : str
        "spelling" or "pronunciation", for ``ksponspeech``, ``aihub`` and
        ``kss``.
    columns : dict or None
        Our column names to the user's, for ``manifest`` and ``huggingface``.
    unpack_folder : Path or None
        Where audio goes that a corpus does not hold as files; outside of it.

    Returns
    -------
    iterator of Utterance
        With labels; audio is not opened.

    Raises
    ------
    ValueError
        The corpus, or a setting of it, is unknown.
    FileNotFoundError
        The folder does not have the layout of the corpus.
    """
    module = _module(corpus)
    return _call(
        module.read,
        folder,
        text_form=text_form,
        columns=columns,
        unpack_folder=unpack_folder,
    )


def _module(corpus: str) -> ModuleType:
    if corpus not in CORPORA:
        raise ValueError(
            f"corpus='{corpus}' is unknown; choose {', '.join(CORPORA)}"
        )
    return CORPORA[corpus]


def _call(function: Callable, folder: Path, **settings):
    wanted = inspect.signature(function).parameters
    chosen = {name: settings[name] for name in settings if name in wanted}
    return function(Path(folder), **chosen)
