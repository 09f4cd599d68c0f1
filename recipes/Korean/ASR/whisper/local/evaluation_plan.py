"""What an evaluation is asked for, checked before it costs time.

In: the arguments of evaluate.py.
Out: a Plan, or one ValueError that lists all problems together.
"""

import csv
import os
import re
from functools import partial
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from local import dataio, engines, model, prepare_report, trained
from local.report import sound
from local.rules import RULES as SETTINGS

DECODING = {"precision": "bf16", "beam_size": 1, "max_new_tokens": 444}
ENGLISH = "english_"  # before the name of the set that shows forgetting


def _audio(value):
    if value not in sound.MODES:
        return f"choose {', '.join(sound.MODES)}"


RULES = {  # as for a setting of the same kind in a YAML
    "precision": SETTINGS["eval_precision"],
    "beam_size": SETTINGS["test_beam_size"],
    "max_new_tokens": SETTINGS["max_new_tokens"],
    "batch_size": SETTINGS["test_batch_size"],
    "num_workers": SETTINGS["num_workers"],
    "probes": SETTINGS["num_workers"],  # 0 or more
    "resamples": SETTINGS["batch_size"],  # 1 or more
    "audio": _audio,
}


class Plan(NamedTuple):
    """What is to be done; nothing of it needs a second look.

    Attributes
    ----------
    sources : list of local.trained.Source
        Their names are unique.
    sets : dict
        Name of a test set to its rows.
    english : str or None
        Which of them is heard as English.
    decoding : dict
        ``precision``, ``beam_size`` and ``max_new_tokens``.
    device : str
        Of this process.
    """

    sources: List[trained.Source]
    sets: Dict[str, dict]
    english: Optional[str]
    decoding: dict
    device: str


def make(
    models,
    manifests,
    english,
    data_folder,
    out,
    device=None,
    base=False,
    **options,
):
    """Looks at all that is asked for, the audio and the weights aside.

    Arguments
    ---------
    models : list of str
        Each what ``trained.resolve`` takes, or NAME=… of it.
    manifests : list of str
        Paths of manifest CSVs.
    english : str or None
        Path of one more, of English speech.
    data_folder : str
        What ``$data_root`` stands for.
    out : Path
    device : str or None
        None: a GPU where there is one.
    base : bool
        Whether what the first model was trained from comes before it.
    **options
        Those of RULES. What is None of DECODING is as it was in the run of
        the first model that tells it, or else as in DECODING.

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        Values, choices and remedies, a line each.
    """
    problems = []
    tried = partial(_tried, problems)
    found = [tried(_source, given) for given in models]
    decoding = dict(DECODING)
    for source, _ in filter(None, found[::-1]):  # the first one's last
        decoding |= tried(trained.run_settings, source) or {}
    if base and found[:1] != [None]:
        found = [tried(_base, source) for source, _ in found[:1]] + found
    sources = [source for source, _ in filter(None, found)]
    decoding |= {n: options[n] for n in DECODING if options[n] is not None}
    device = tried(_device, device) or "cpu"
    problems += _wrong_values({**options, **decoding}, device)
    lacking = [tried(trained.problem, source, device) for source in sources]
    problems += filter(None, lacking)
    tokenizers = [tried(engines.load_tokenizer, source) for source in sources]
    fits = _label_fits(next(filter(None, tokenizers), None))
    wanted = [(path, "") for path in manifests]
    wanted += [(english, ENGLISH)] if english else []
    rows = [tried(_rows, path, data_folder, fits) for path, _ in wanted]
    problems += _missing(models, wanted)
    problems += _in_the_way(out, data_folder, sources)
    names = tried(_apart, [place for _, place in filter(None, found)])
    set_names = tried(_apart, [_place(*one) for one in wanted])
    problems = list(dict.fromkeys(problems))  # --base meets some again
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(f"{len(problems)} problem(s):{lines}")
    sources = [s._replace(name=name) for s, name in zip(sources, names)]
    sets = dict(zip(set_names, rows))
    return Plan(
        sources, sets, set_names[-1] if english else None, decoding, device
    )


def _tried(problems, function, *arguments):
    """What a function gives; None, and what it told, where it could not."""
    try:
        return function(*arguments)
    except (OSError, ValueError) as error:
        problems.append(str(error))


class _Place(NamedTuple):
    """What may become a name, and the path that lengthens it."""

    name: str
    parts: Tuple[str, ...] = ()  # of a path; none: the name is the user's
    prefix: str = ""


def _source(given):
    """(Source, _Place) of a model."""
    name, sign, path = given.partition("=")
    if not sign or "/" in name or os.path.exists(given):
        name, path = "", given
    path = os.path.expanduser(path)
    source = trained.resolve(path)
    if name:
        return source, _Place(name)
    parts = Path(path).resolve() if os.path.exists(path) else Path(path)
    return source, _Place(source.name, parts.parts)


def _base(source):
    """(Source, _Place) of the weights before, as they were published."""
    before = trained.base(source)
    if before is None:
        raise ValueError(
            f"--base: model '{source.path}' tells of no base; name it instead "
            "(--model base=M), or give a run, a CKPT+…, an adapter folder or "
            "what export.py made of them"
        )
    return before, _Place("base")


def _place(manifest, prefix):
    path = Path(manifest).resolve()
    return _Place(prefix + path.stem, (*path.parts[:-1], path.stem), prefix)


def _apart(places):
    """A name each, with as much of its path as none of the others shares."""
    names = [_as_file(place.name) for place in places]
    longest = max((len(place.parts) for place in places), default=0)
    for n_parts in range(2, longest + 1):
        doubled = {name for name in names if names.count(name) > 1}
        for i, place in enumerate(places):
            if names[i] in doubled and place.parts:
                longer = "-".join(place.parts[-n_parts:])
                names[i] = _as_file(place.prefix + longer)
    doubled = [p.name for p, n in zip(places, names) if names.count(n) > 1]
    if doubled:
        raise ValueError(
            f"{' and '.join(map(repr, doubled))} are one name; give each model "
            "another (--model NAME=…), and each manifest once"
        )
    return names


def _as_file(name):
    """A name that files may bear."""
    found = re.sub(r"[^\w.+=@ -]+", "-", name).strip(" .-")
    if not found:
        raise ValueError(f"'{name}' is no name; give letters or digits")
    return found


def _device(name):
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    choices = "choose cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device='{name}': {choices}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device='{name}': {choices}")
    n_found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= n_found:
        raise ValueError(f"device='{name}': {n_found} GPUs here; {choices}")
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        return f"cuda:{os.environ['LOCAL_RANK']}"  # by torchrun, one each
    return name


def _wrong_values(values, device):
    problems = [
        f"{name}={values[name]!r}: {wrong}"
        for name, rule in RULES.items()
        if (wrong := rule(values[name]))
    ]
    if values["precision"] == "fp16" and device.startswith("cpu"):
        problems.append("precision='fp16': not on a CPU; choose bf16 or fp32")
    return problems


def _label_fits(tokenizer):
    """What warns of long labels; without a model they are not what is wrong."""
    if tokenizer is None:
        return lambda label: True
    return partial(
        dataio.label_fits, tokenizer=tokenizer, max_tokens=model.MAX_TOKENS
    )


def _rows(path, data_folder, label_fits):
    """A test set; what is too long to be heard counts as failed later."""
    if os.path.isdir(path):
        raise ValueError(f"manifest '{path}' is a folder; name a CSV in it")
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"manifest '{path}': no such file; python -m local.prepare writes "
            "manifests, and train.py does into <output_folder>/manifests"
        )
    try:
        data_root = data_folder or prepare_report.data_folder(path)
        return dataio.load_split(path, data_root, float("inf"), label_fits)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(
            f"manifest '{path}' is no CSV in UTF-8: {error}"
        ) from None


def _missing(models, wanted):
    needed = {"--model M": models, "--manifest X.csv": wanted}
    return [f"none asked for: give {n}" for n, v in needed.items() if not v]


def _in_the_way(out, data_folder, sources):
    """Why nothing should be written there."""
    folder = out.resolve()
    taken = {folder, *folder.parents}
    problems = []
    if out.exists() and not out.is_dir():
        problems.append(f"out='{out}' is a file; choose a folder")
    if data_folder and Path(data_folder).resolve() in taken:
        problems.append(
            f"out='{out}' is inside the corpus folder, into which nothing is "
            "written; choose another folder"
        )
    problems += [
        f"out='{out}' is inside the model '{source.path}'; choose another "
        "folder"
        for source in sources
        if os.path.isdir(source.path) and Path(source.path).resolve() in taken
    ]
    return problems
