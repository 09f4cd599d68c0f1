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

from local import corpora, files, model, random_model
from local.corpora.manifest import COLUMNS
from local.metrics import METRICS

PLACEHOLDER = "!PLACEHOLDER"


def _choice(*choices):
    def problem(value):
        if value not in choices:
            return "choose " + ", ".join(map(str, choices))

    return problem


def _number(low, high=float("inf"), whole=False, above=False):
    """Between low and high, both allowed; ``above``: low itself is not."""
    kind = "a whole number" if whole else "a number"
    bound = f"above {low}" if above else f"of at least {low}"
    limit = "" if high == float("inf") else f", at most {high}"

    def problem(value):
        types = (int,) if whole else (int, float)
        if (
            isinstance(value, bool)
            or not isinstance(value, types)
            or not low <= value <= high
            or value == float("inf")
            or (above and value == low)
        ):
            return f"give {kind} {bound}{limit}"

    return problem


def _text(value):
    if not isinstance(value, str) or not value:
        return "give a text"


def _file_name(value):
    if _text(value) or "/" in value:
        return "give a name in the folder of manifests, without a folder"


def _folder_or_empty(value):  # None: --setting= on the command line
    if not isinstance(value, (str, type(None))):
        return "give a folder, or nothing"


def _model_source(value):
    if not isinstance(value, str) or not value:
        return "give a hub name, a local folder, or random:SIZE"
    if value.startswith(model.RANDOM):
        if value[len(model.RANDOM) :] not in random_model.SIZES:
            return f"choose random: with {', '.join(random_model.SIZES)}"
    elif value.startswith((".", "/", "~")) and not Path(value).is_dir():
        return "there is no such folder; give a Hugging Face model folder"


def _speeds(value):
    if not isinstance(value, list) or not value:
        return "give a list of percents such as [95, 100, 105]"
    if any(_number(50, 200, whole=True)(speed) for speed in value):
        return "give whole percents between 50 and 200"


def _columns(value):
    if not isinstance(value, dict):
        return "give a mapping such as {path: file, text: sentence}"
    unknown = sorted(set(value) - set(COLUMNS))
    if unknown:
        return f"{', '.join(unknown)} is none of {', '.join(COLUMNS)}"


_boolean = _choice(True, False)
_precision = _choice("fp32", "bf16", "fp16")
_count = _number(1, whole=True)

RULES = {
    "whisper_hub": _model_source,
    "adaptation": _choice(*model.ADAPTATIONS),
    "encoder_context": _choice(*model.CONTEXTS),
    "gradient_checkpointing": _boolean,
    "compile_layers": _boolean,
    "encoder_cache_folder": _folder_or_empty,
    "corpus": _choice(*sorted(corpora.CORPORA)),
    "data_folder": _text,
    "text_form": _choice("spelling", "pronunciation"),
    "columns": _columns,
    "keep_no_speech": _boolean,
    "packing": _choice("none", "text", "timestamps"),
    "heldout_share": _number(0, 0.5, above=True),
    "manifest_folder": _folder_or_empty,
    "train_csv": _file_name,
    "valid_csv": _file_name,
    "test_csv": _file_name,
    "seed": _number(0, whole=True),
    "output_folder": _text,
    "save_folder": _text,
    "number_of_epochs": _count,
    "batch_size": _count,
    "max_batch_length": _number(0),
    "grad_accumulation_factor": _count,
    "lr": _number(0, above=True),
    "warmup_steps": _count,
    "weight_decay": _number(0),
    "max_grad_norm": _number(0, above=True),
    "label_smoothing": _number(0, 0.99),
    "augment": _boolean,
    "speeds": _speeds,
    "precision": _precision,
    "eval_precision": _precision,
    "best_metric": _choice(*METRICS),
    "score_before_training": _boolean,
    "test_batch_size": _count,
    "test_beam_size": _count,
    "max_new_tokens": _number(1, model.MAX_TOKENS, whole=True),
    "ckpt_interval_minutes": _number(0),
    "num_workers": _number(0, whole=True),
}


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
    text = Path(hparams_file).read_text(encoding="utf-8")
    # As a plain value, since HyperPyYAML stops at the first of its own.
    text = text.replace(PLACEHOLDER, f'"{PLACEHOLDER}"')
    template = _plain(text)
    problems = _mistyped(given, template)
    known = {k: v for k, v in given.items() if k in template}
    plain = _plain(resolve_references(text, known).getvalue())
    for name in run_opts.overridden_args:
        if name in RULES:
            plain[name] = run_opts[name]
    problems += _unknown_in_file(template)
    wrong = _wrong_values(plain)
    problems += wrong.values()
    sound = {k: v for k, v in plain.items() if k not in wrong}
    problems += _contradictions(sound, run_opts)
    problems += _combinations(sound, known)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ValueError(
            f"{len(problems)} problem(s) in the settings:\n{lines}"
        )


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


def _plain(text):
    """A HyperPyYAML text as plain values; an object becomes its arguments."""
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
        elif isinstance(value, dict) and name != "columns":
            inner = template[name] if isinstance(template[name], dict) else {}
            problems += _mistyped(value, inner, f"{path}.")
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
        "rule in local/settings.py"
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
            problems[name] = "data_folder: missing; give --data_folder=FOLDER"
        elif wrong := rule(value):
            problems[name] = f"{name}={value!r}: {wrong}"
    return problems


def _contradictions(plain, run_opts):
    """What single values cannot show: folders, hardware, older checkpoints.

    Settings whose value is wrong by itself are not in ``plain``.
    """
    problems = []
    manifests = plain.get("manifest_folder")
    folder = "manifest_folder" if manifests else "data_folder"
    if folder in plain and not os.path.exists(plain[folder]):
        remedy = f"--{folder}=FOLDER must exist"
        if plain[folder] == "results/quickstart_corpus":
            remedy = f"first run python -m local.synthesize {plain[folder]}"
        problems.append(f"{folder}={plain[folder]!r}: no such folder; {remedy}")
    device = run_opts["device"] or ""
    if device.split(":")[0] not in ("", "cpu", "cuda", "mps", "xpu"):
        problems.append(f"device={device!r}: choose cpu, cuda or cuda:N")
    on_cpu = device.startswith("cpu") or not torch.cuda.is_available()
    for name in ("precision", "eval_precision"):
        if on_cpu and plain.get(name) == "fp16":
            problems.append(f"{name}='fp16': not on a CPU; choose bf16 or fp32")
    by_torchrun = "RANK" in os.environ
    if by_torchrun and on_cpu and run_opts["distributed_backend"] == "nccl":
        problems.append(
            "distributed_backend='nccl': not on CPUs; give "
            "--distributed_backend=gloo --device=cpu"
        )
    if "save_folder" not in plain:
        return problems
    saved = list(Path(plain["save_folder"]).glob("CKPT+*/CKPT.yaml"))
    if run_opts["test_only"] and not saved:
        problems.append(
            f"test_only: no checkpoint in save_folder={plain['save_folder']!r};"
            " train first, with the same output_folder"
        )
    return problems + _other_checkpoints(plain)


def _combinations(plain, given):
    """Settings that cannot be had together.

    A file's encoder_context does not count beside the command line's
    adaptation; ``given`` are the settings of the command line.
    """
    problems = []
    adaptation = plain.get("adaptation", "")
    context = plain.get("encoder_context", "full")
    asked = "encoder_context" in given or "adaptation" not in given
    if adaptation == "frozen_encoder" and asked and context != "full":
        problems.append(
            f"encoder_context={context!r}: a frozen_encoder knows its full "
            "context alone; choose full, its states are trimmed afterwards"
        )
    cache = plain.get("encoder_cache_folder")
    if cache and adaptation not in ("", "frozen_encoder"):
        problems.append(
            f"encoder_cache_folder={cache!r}: a trained encoder's outputs "
            "change; leave it empty, or choose adaptation=frozen_encoder"
        )
    if cache and plain.get("augment"):
        problems.append(
            f"encoder_cache_folder={cache!r}: augment=True changes every "
            "epoch's waveforms; choose one of the two"
        )
    speeds = plain.get("speeds", [100])
    faster = plain.get("augment") and speeds != [100]
    if faster and plain.get("packing") == "timestamps":
        problems.append(
            f"packing='timestamps': augment=True with speeds={speeds} "
            "moves speech from its times; choose speeds=[100] or packing=text"
        )
    return problems


def _other_checkpoints(plain):
    """A save folder that holds the weights of another model."""
    for path in sorted(Path(plain["save_folder"]).glob("CKPT+*/whisper.ckpt")):
        saved = json.loads(path.read_text(encoding="utf-8"))
        different = [
            f"{name}={saved[name]!r}, this run has {plain[name]!r}"
            for name in saved
            if name in plain and saved[name] != plain[name]
        ]
        if different:
            return [
                f"save_folder={plain['save_folder']!r}: {path.parent.name} "
                f"was trained with {'; '.join(different)}; choose another "
                "output_folder or remove this one"
            ]
    return []


def require_same_data(output_folder, save_folder, rows):
    """Stops a run that would go on from a checkpoint of other training data.

    The clips are compared by ID and label, so that a corpus may move.

    Arguments
    ---------
    output_folder, save_folder : str
        Of the run.
    rows : dict
        ID to row of the training split.

    Raises
    ------
    ValueError
        The folder has a checkpoint, and it was trained on other clips.
    """
    digest = hashlib.sha256()
    for identifier, row in rows.items():
        digest.update(f"{identifier}\0{row['wrd']}\0".encode())
    path = Path(output_folder) / "train_data.sha256"
    started = any(Path(save_folder).glob("CKPT+*/CKPT.yaml"))
    if started and path.is_file() and path.read_text() != digest.hexdigest():
        raise ValueError(
            f"output_folder={output_folder!r} holds a run on other training "
            "clips, labels or packing; choose another output_folder, or remove "
            "it to begin anew"
        )
    with files.replacing(path) as file:
        file.write(digest.hexdigest())
