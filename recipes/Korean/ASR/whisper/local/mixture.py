"""Several corpora as one: what a list of them may say, and new names.

In: the setting ``corpora``, a list of mappings; what is prepared of each.
Out: what is wrong with it; the corpora with all that the list leaves open;
their clips together.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from local import clip_store, corpora, text
from local.corpora.manifest import COLUMNS

REQUIRED = ("corpus", "folder")
OPTIONAL = ("name", "weight", "columns", "text_form")
KEYS = REQUIRED + OPTIONAL
EXAMPLE = "[{corpus: zeroth, folder: zeroth_korean, weight: 2}, ...]"


def problems_of_corpora(value):
    """Tells what is wrong with a list of corpora.

    Arguments
    ---------
    value : object
        Mappings with ``corpus`` and ``folder``; optional ``name``,
        ``weight``, ``columns`` and ``text_form``. None and an empty list
        stand for the one corpus of a run.

    Returns
    -------
    str or None
        All that is wrong, with the choices and what to give instead.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return f"give a list of mappings such as {EXAMPLE}"
    problems = [
        f"entry {number}, {problem}"
        for number, entry in enumerate(value, start=1)
        for problem in _problems(entry)
    ]
    named = [e for e in value if isinstance(e, Mapping) and "corpus" in e]
    for name, n_uses in Counter(str(_name(e)) for e in named).items():
        if n_uses > 1:
            problems.append(
                f"name '{name}' stands {n_uses} times; give each a name of "
                "its own, such as {name: " + f"{name}_2" + "}"
            )
    return "; ".join(problems) or None


def _name(entry):
    return entry.get("name") or entry["corpus"]


def _problems(entry):
    """What is wrong with one corpus of the list."""
    if not isinstance(entry, Mapping):
        yield f"{entry!r}: give a mapping, as in {EXAMPLE}"
        return
    for key in entry:
        if key not in KEYS:
            yield f"{key!r} is unknown; choose among {', '.join(KEYS)}"
    for key in REQUIRED:
        if key not in entry:
            yield f"{key} is missing in {dict(entry)}; give corpus and folder"
    for key, rule in _RULES.items():
        wrong = key in entry and rule(entry[key])
        if wrong:
            yield f"{key}={entry[key]!r}: {wrong}"


def _corpus(value):
    if value not in list(corpora.CORPORA):  # it may be no key
        return f"choose {', '.join(corpora.CORPORA)}"


def _folder(value):
    if not isinstance(value, (str, Path)) or not str(value):
        return "give a folder, absolute or below data_folder"


def _word(value):
    if not isinstance(value, str) or not re.fullmatch(r"\w+", value):
        return "give letters, digits and _"


def _weight(value):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        return "give a number above 0"


def _columns(value):
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "give a mapping such as {path: file, text: sentence}"
    unknown = sorted(map(str, set(value) - set(COLUMNS)))
    if unknown:
        return f"{', '.join(unknown)} is none of {', '.join(COLUMNS)}"


def _text_form(value):
    if value not in text.FORMS:
        return f"choose {', '.join(text.FORMS)}"


_RULES = {
    "corpus": _corpus,
    "folder": _folder,
    "name": _word,
    "weight": _weight,
    "columns": _columns,
    "text_form": _text_form,
}


def complete(listed, data_folder, **defaults):
    """The corpora of a list, with all that it leaves open.

    Arguments
    ---------
    listed : list of dict
        As ``problems_of_corpora`` takes it.
    data_folder : Path
        What a relative folder lies below.
    **defaults
        ``columns`` and ``text_form`` of a corpus that does not say.

    Returns
    -------
    dict
        Name to ``corpus``, ``data_folder``, ``columns`` and ``text_form``.

    Raises
    ------
    ValueError
        Something is wrong with the list.
    """
    problems = problems_of_corpora(listed)
    if problems:
        raise ValueError(f"corpora: {problems}")
    return {
        _name(entry): {
            "corpus": entry["corpus"],
            "data_folder": _place(entry, data_folder),
            **{key: entry.get(key) or defaults[key] for key in defaults},
        }
        for entry in listed
    }


def _place(entry, data_folder):
    folder = Path(data_folder) / entry["folder"]
    # A name on the Hugging Face hub looks like a folder.
    is_hub = entry["corpus"] == "huggingface" and not folder.exists()
    return entry["folder"] if is_hub else folder


def join(store, out, heads):
    """Takes the clips of prepared corpora into one store.

    Arguments
    ---------
    store : ClipStore
        Empty.
    out : Path
        Each corpus is prepared in the folder of its name in it.
    heads : dict
        Name of a corpus to the head of its report.

    Returns
    -------
    dict
        Every split to whether all of it was held out of train.

    Raises
    ------
    ValueError
        Two tests would have one name.
    """
    held_out = {}
    for name, names in new_names(heads).items():
        kept, dropped = (heads[name][k] for k in ("kept", "dropped_by_split"))
        store.add(out / name / clip_store.NAME, name, names, dropped)
        for split, new in names.items():
            told = kept.get(split, {}).get("held_out_of_train", False)
            held_out[new] = held_out.get(new, True) and told
    return held_out


def new_names(heads):
    """Names of the splits of all corpora together.

    Train and valid are one each; a test stays by itself, so that each corpus
    has its score: ``test_clean`` of ``kspon`` is ``test_kspon_clean``.

    Arguments
    ---------
    heads : dict
        Name of a corpus to the head of its report, whose splits count even
        where no clip is left of one.

    Returns
    -------
    dict
        Name of a corpus to its splits' names to the new ones.

    Raises
    ------
    ValueError
        Two tests would have one name.
    """
    taken, found = {}, {}
    for name, head in heads.items():
        splits = [*head["kept"], *head["empty_tests"]]
        found[name] = {split: _new_name(name, split) for split in splits}
        for split, new in found[name].items():
            owner = taken.setdefault(new, f"{split} of {name}")
            if new.startswith("test") and owner != f"{split} of {name}":
                raise ValueError(
                    f"corpora: {owner} and {split} of {name} would both be "
                    f"{new}.csv; give one of the corpora another name"
                )
    return found


def _new_name(name, split):
    if not split.startswith("test"):
        return split
    rest = split[len("test") :].lstrip("_")
    return f"test_{name}_{rest}" if rest else f"test_{name}"
