"""Every setting, checked before anything costs time.

In: a hyperparameter file, the command line's overrides and run options.
Out: nothing, or one ValueError that lists all problems together.
"""

import difflib
import hashlib
import json
import os
from pathlib import Path

import torch
from hyperpyyaml import resolve_references
from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from local import channel, combinations, files, ranks
from local.corpora.huggingface import HUB_NAME
from local.rules import RULES
from speechbrain.utils.distributed import infer_device

PLACEHOLDER = "!PLACEHOLDER"
OF_SOUND = ("noise_folder", "reverb_folder")
FOLDERS = ("manifest_folder", "features_folder", *OF_SOUND)


def check(hparams_file, overrides, run_opts):
    """Stops with all that is wrong with the settings of a run.

    Arguments
    ---------
    hparams_file : str
        A YAML file of the recipe.
    overrides : str
        YAML, as ``speechbrain.parse_arguments`` returns it.
    run_opts : speechbrain.utils.run_opts.RunOptions
        Those given on the command line go before the file's.

    Returns
    -------
    str
        The overrides with the run options among them, so that what is saved
        of a run's settings tells all of them.

    Raises
    ------
    FileNotFoundError
        There is no such hyperparameter file.
    ValueError
        Values, choices and remedies, a line each.
    """
    if not os.path.isfile(hparams_file):
        found = sorted(map(str, Path("hparams").glob("*.yaml")))
        raise FileNotFoundError(
            f"no hyperparameter file '{hparams_file}'; here are "
            f"{', '.join(found) or 'none: start from the recipe folder'}"
        )
    given = _given(overrides)
    template = plain(_text(hparams_file))
    problems = _mistyped(given, template)
    known = {
        name: value
        for name, value in given.items()
        # HyperPyYAML takes no mapping in place of anything else.
        if name in template
        and (isinstance(template[name], dict) or not isinstance(value, dict))
    }
    options = _options_with_rules(run_opts)
    resolved = {**values(hparams_file, known), **options}
    problems += _unknown_in_file(template)
    wrong = _wrong_values(resolved)
    problems += wrong.values()
    sound = {k: v for k, v in resolved.items() if k not in wrong}
    problems += _contradictions(sound, run_opts)
    problems += combinations.problems(sound, known, device(run_opts))
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(
            f"{len(problems)} problem(s) in the settings:\n{lines}"
        )
    # JSON is YAML; a date may have been a name
    return json.dumps({**given, **options}, ensure_ascii=False, default=str)


def values(hparams_file, overrides):
    """The plain values of a file's settings.

    Arguments
    ---------
    hparams_file : str
    overrides : dict or str
        Of settings that the file has.

    Returns
    -------
    dict
        Name to value; an object is a mapping of its arguments.
    """
    text = _text(hparams_file)
    return plain(resolve_references(text, overrides).getvalue())


def _text(hparams_file):
    text = Path(hparams_file).read_text(encoding="utf-8")
    # As a plain value, since HyperPyYAML stops at the first of its own.
    return text.replace(PLACEHOLDER, f'"{PLACEHOLDER}"')


def _options_with_rules(run_opts):
    """SpeechBrain's run options that are settings of the file as well."""
    options = {
        name: run_opts[name]
        for name in run_opts.overridden_args
        if name in RULES
    }
    if "ckpt_interval_steps" in options:
        options.setdefault("ckpt_interval_minutes", 0)  # it takes one of two
    return options


def _given(overrides):
    """The command line's settings, by name."""
    try:
        given = YAML(typ="safe").load(overrides or "{}")
    except YAMLError as error:
        given = error
    if not isinstance(given, dict):
        raise ValueError(
            f"the command line cannot be read: {given}\n"
            "write --setting=value, each once, and quote what holds brackets"
        )
    return given


def plain(text):
    """A HyperPyYAML text as plain values; an object becomes its arguments.

    Arguments
    ---------
    text : str
        References must be resolved, or stand as they are written.

    Returns
    -------
    dict
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _PlainConstructor
    return yaml.load(text)


class _PlainConstructor(SafeConstructor):
    """Knows HyperPyYAML's tags, and builds nothing."""


def _without_tag(constructor, suffix, node):
    del suffix
    if node.id == "mapping":
        return constructor.construct_mapping(node, deep=True)
    if node.id == "sequence":
        return constructor.construct_sequence(node, deep=True)
    return constructor.construct_scalar(node)


_PlainConstructor.add_multi_constructor("!", _without_tag)


def _mistyped(given, template, above=""):
    """Overrides that name nothing in the file, nested ones too."""
    problems = []
    for name, value in given.items():
        path = f"{above}{name}"
        if name not in template:
            near = difflib.get_close_matches(str(name), map(str, template), 3)
            remedy = (
                f"did you mean {' or '.join(near)}?"
                if near
                else (f"there are {', '.join(map(str, template))}")
            )
            problems.append(f"{path}: no such setting; {remedy}")
        elif isinstance(value, dict) and not isinstance(template[name], dict):
            problems.append(f"{path}={value!r}: give no mapping")
        elif isinstance(value, dict) and name != "columns":
            problems += _mistyped(value, template[name], f"{path}.")
        elif isinstance(template[name], dict) and name != "columns":
            problems.append(f"{path}={value!r}: give a mapping of its settings")
    return problems


def _unknown_in_file(template):
    """Scalars of the file, above its objects, that no rule knows."""
    scalars = [
        name
        for name, value in template.items()
        if not isinstance(value, dict) and not name.startswith("__")
    ]
    return [
        f"{name}: no such setting; remove it from the file, or give it a "
        "rule in local/rules.py"
        for name in scalars
        if name not in RULES
    ] + [
        f"{name}: missing in the file" for name in RULES if name not in template
    ]


def _wrong_values(plain):
    """Setting to what is wrong with its value."""
    problems = {}
    for name, rule in RULES.items():
        if name not in plain:
            continue
        value = plain[name]
        if name == "data_folder" and value == PLACEHOLDER:
            if plain.get("plan_memory") is True:
                continue
            problems[name] = "data_folder: missing; give --data_folder=FOLDER"
        elif wrong := rule(value):
            problems[name] = f"{name}={value!r}: {wrong}"
    return problems


def _contradictions(plain, run_opts):
    """What single values cannot show: folders, hardware, older checkpoints.

    Settings whose value is wrong by itself are not in ``plain``.
    """
    problems = []
    there = device(run_opts)
    if there is None:
        problems.append(
            f"device={run_opts['device']!r}: choose cpu, cuda or cuda:N"
        )
    if plain.get("plan_memory"):  # maybe for another machine; reads no run
        return problems
    if there and not _is_there(torch.device(there)):
        problems.append(
            f"device={there!r}: PyTorch finds {torch.cuda.device_count()} "
            "GPU(s) here; choose cpu, or cuda:N below that"
        )
    on_cpu = there == "cpu" or not torch.cuda.is_available()
    for name in ("precision", "eval_precision"):
        if on_cpu and plain.get(name) == "fp16":
            problems.append(f"{name}='fp16': not on a CPU; choose bf16 or fp32")
    by_torchrun = "RANK" in os.environ
    if by_torchrun and on_cpu and run_opts["distributed_backend"] == "nccl":
        problems.append(
            "distributed_backend='nccl': not on CPUs; give "
            "--distributed_backend=gloo --device=cpu"
        )
    limit = run_opts["optimizer_step_limit"]  # a text, as it was typed
    if limit is not None and not str(limit).isdecimal():
        problems.append(
            f"optimizer_step_limit={limit!r}: give a whole number of steps"
        )
    problems += _missing_folders(plain)
    if "save_folder" not in plain:
        return problems
    saved = list(Path(plain["save_folder"]).glob("CKPT+*/CKPT.yaml"))
    if run_opts["test_only"] and not saved:
        problems.append(
            f"test_only: no checkpoint in save_folder={plain['save_folder']!r};"
            " train first, with the same output_folder"
        )
    return problems + _other_checkpoints(plain)


def device(run_opts):
    """Where a run computes, a str; None where PyTorch knows no such device."""
    try:
        return str(torch.device(run_opts["device"] or infer_device()))
    except RuntimeError:
        return None


def _is_there(device):
    if device.type != "cuda":
        return True
    if device.index is None:
        return torch.cuda.is_available()
    return device.index < torch.cuda.device_count()


def _missing_folders(plain):
    """Folders that are named and not there."""
    named = [(name, plain[name]) for name in FOLDERS if plain.get(name)]
    problems = []
    if not plain.get("manifest_folder") and "data_folder" in plain:
        root = plain["data_folder"]
        for one in plain.get("corpora") or []:
            folder = os.path.join(root, one["folder"])
            if not _is_on_hub(one) and not os.path.exists(folder):
                problems.append(f"corpora: no such folder {folder!r}")
        if plain.get("corpora") or not _is_on_hub({**plain, "folder": root}):
            named.append(("data_folder", root))
    for name, folder in named:
        if not os.path.exists(folder):
            remedy = f"--{name}=FOLDER must exist"
            if folder == "results/quickstart_corpus":
                remedy = f"first run python -m local.synthesize {folder}"
            problems.append(f"{name}={folder!r}: no such folder; {remedy}")
        elif name in OF_SOUND and not channel.audio_files(folder):
            problems.append(f"{name}={folder!r}: holds no audio file")
    return problems


def _is_on_hub(corpus):
    is_name = HUB_NAME.fullmatch(corpus["folder"]) is not None
    return is_name and corpus.get("corpus") == "huggingface"


def _other_checkpoints(plain):
    """A save folder that holds the weights of another model."""
    for path in sorted(Path(plain["save_folder"]).glob("CKPT+*/whisper.ckpt")):
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            saved |= _optimizer(path.with_name("optimizer.ckpt"))
            new = saved.get("new_tokens", {"mode": "none"})
            saved["new_tokens"] = new["mode"]
        except (KeyError, TypeError, ValueError):
            continue  # a damaged one is passed over
        different = [
            f"{name}={saved[name]!r}, this run has {plain[name]!r}"
            for name in saved
            if name in plain
            and saved[name] != plain[name]
            # A folder may have moved: its weights tell, when they are loaded.
            and not (name == "whisper_hub" and "base_sha256" in saved)
        ]
        if different:
            return [
                f"save_folder={plain['save_folder']!r}: {path.parent.name} "
                f"was trained with {'; '.join(different)}; give what it was "
                "trained with, or another output_folder"
            ]
    return []


def _optimizer(path):
    """The name of a checkpoint's optimizer, where it has one."""
    if not path.is_file():
        return {}
    told = json.loads(path.read_text(encoding="utf-8")).get("optimizer")
    names = {"AdamW": "adamw", "AdamW8bit": "adamw_8bit"}
    return {"optimizer_name": names[told]} if told in names else {}


def require_same_data(output_folder, save_folder, splits):
    """Stops a run that would go on from a checkpoint of other training data.

    Or one whose processes hold other clips, as hosts without a shared disk may:
    each takes its part of a plan that all must make alike. A collective call.

    Arguments
    ---------
    output_folder, save_folder : str
        Of the run.
    splits : dict
        Name to DynamicItemDataset, or None. Those of "train" are compared with
        the checkpoint's clips by ID and label, so that a corpus may move.

    Raises
    ------
    ValueError
        The folder has a checkpoint, and it was trained on other clips; or
        ranks differ.
    """
    there = {name: one.data for name, one in splits.items() if one is not None}
    for name, rows in there.items() if ranks.here()[1] > 1 else ():
        told = f"SHA-256 of the clips of {name}"
        ranks.require_same(told, _digest(rows, "wrd", "duration"))
    if "train" in there:
        own = _digest(there["train"], "wrd")
        ranks.on_first(_require_as_before, output_folder, save_folder, own)


def _digest(rows, *fields):
    digest = hashlib.sha256()
    for identifier, row in rows.items():
        parts = identifier, *(str(row[field]) for field in fields)
        digest.update("".join(f"{part}\0" for part in parts).encode())
    return digest.hexdigest()


def _require_as_before(output_folder, save_folder, digest):
    path = Path(output_folder) / "train_data.sha256"
    started = any(Path(save_folder).glob("CKPT+*/CKPT.yaml"))
    if started and path.is_file() and path.read_text() != digest:
        raise ValueError(
            f"output_folder={output_folder!r} holds a run on other training "
            "clips, labels or packing; choose another output_folder, or remove "
            "it to begin anew"
        )
    with files.replacing(path) as file:
        file.write(digest)
