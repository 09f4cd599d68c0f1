"""What SageMaker asks of a training container, as arguments of train.py.

In: the root of its layout: hyperparameters, hosts, channels.
Out: a Job; or one ValueError that lists all that is wrong.
"""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

RECIPE = Path(__file__).resolve().parents[2] / "recipes/Korean/ASR/whisper"
DEFAULT_FILE = "train_large_v3.yaml"
CHANNELS = {  # to the setting that each gives a folder to
    "training": "data_folder",
    "train": "data_folder",
    "manifests": "manifest_folder",
    "model": "whisper_hub",
    "features": "features_folder",
    "noise": "noise_folder",
    "reverb": "reverb_folder",
}
FLAGS = (  # SpeechBrain's run options that take no value
    "test_only",
    "debug",
    "debug_persistently",
    "data_parallel_backend",
    "find_unused_parameters",
    "jit",
    "compile",
    "compile_using_fullgraph",
    "compile_using_dynamic_shape_tracing",
    "auto_mix_prec",
    "bfloat16_mix_prec",
    "skip_nonfinite_grads",
    "noprogressbar",
    "tqdm_colored_bar",
    "remove_vector_weight_decay",
    "profile_training",
)
FLAG_VALUES = {"true": True, "false": False}
NOTHING = ("", "~", "null")  # for a folder, in YAML
SDK = ("sagemaker_", "_tuning_")  # begin names of its own hyperparameters
# What YAML, or SpeechBrain's reading of a command line, takes for a sign.
SIGNS = re.compile(r"[=\n]|:(\s|$)|\s#|^(--|[&*!|>%@`#])")


class Job(NamedTuple):
    """What is asked for.

    hparams_file : str
        Path from the recipe folder.
    arguments : list of str
        Of train.py, behind that file.
    has_manifests : bool
        They are given, and not to be prepared.
    hosts : list of str
        Sorted alike on each of them: the first one leads.
    rank : int
        Of this host among them.
    network : str
        Name of the interface between them, or "".
    n_gpus : int
        Of this host.
    """

    hparams_file: str
    arguments: list
    has_manifests: bool
    hosts: list
    rank: int
    network: str
    n_gpus: int


def read(root):
    """The job below a root.

    Arguments
    ---------
    root : Path
        ``/opt/ml`` in a container.

    Returns
    -------
    Job

    Raises
    ------
    ValueError
        All that is wrong with settings, channels and hosts, a line each.
    FileNotFoundError
        A file of ``input/config`` is not there.
    OSError
        There is a GPU driver that does not answer.
    """
    config = root / "input/config"
    given = _object(config / "hyperparameters.json")
    channels = _object(config / "inputdataconfig.json")
    machines = _object(config / "resourceconfig.json")
    problems = []
    hosts, rank = _hosts(machines, config, problems)
    settings = _settings(given, problems)
    hparams_file = _hparams_file(settings.pop("hparams_file", DEFAULT_FILE))
    problems += [] if hparams_file else [_no_such_file(given)]
    folders = _folders(channels, root / "input/data", len(hosts), problems)
    if "data_folder" not in {*folders, *settings} and not problems:
        problems.append(
            f"no channel 'training'; there are {', '.join(channels) or 'none'},"
            f" choose {', '.join(CHANNELS)}"
        )
    folders["output_folder"] = "SageMaker's layout", root / "checkpoints"
    folders["save_folder"] = "output_folder", None
    settings = _joined(settings, folders, problems)
    gpus = n_gpus()
    if len(hosts) > 1 and not gpus:
        on_cpus = {"distributed_backend": "gloo", "device": "cpu"}
        settings = {**on_cpus, **settings}
    arguments = _arguments(settings, problems)
    if problems:
        raise ValueError("\n".join(problems))
    network = machines.get("network_interface_name") or ""
    manifests = settings.get("manifest_folder", "").strip().lower()
    has_manifests = manifests not in NOTHING
    return Job(
        hparams_file, arguments, has_manifests, hosts, rank, network, gpus
    )


def _object(path):
    """The JSON object in a file."""
    remedy = "SageMaker writes it; elsewhere, write it as the README shows"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}; {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; {remedy}")
    return content


def _settings(given, problems):
    """Hyperparameters as texts, without the SDK's own."""
    settings = {}
    for name, value in given.items():
        if name.startswith(SDK):
            continue
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            problems.append(f"{name!r}: no name of a setting")
        elif not isinstance(value, str):
            as_text = json.dumps(json.dumps(value, ensure_ascii=False))
            problems.append(
                f"{name}={value!r}: SageMaker hands on texts alone; write it "
                f"as one: {as_text}"
            )
        else:
            settings[name] = _unquoted(value)
    return settings


def _unquoted(value):
    # The SDK encodes what it is given as JSON: a text gets quotes.
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(text := json.loads(value), str):
            return text
    return value


def _hparams_file(name):
    """A YAML by its name in hparams/, or its path; "" where there is none."""
    path = Path(name) if "/" in name else Path("hparams") / name
    return str(path) if (RECIPE / path).is_file() else ""


def _no_such_file(given):
    found = sorted(p.name for p in (RECIPE / "hparams").glob("*.yaml"))
    return f"hparams_file={given['hparams_file']}: choose {', '.join(found)}"


def _folders(channels, data, n_hosts, problems):
    """Setting to (who gives it, folder)."""
    folders = {}
    for channel, options in channels.items():
        folder, setting = data / channel, CHANNELS.get(channel)
        options = options if isinstance(options, dict) else {}
        shares = options.get("S3DistributionType") == "ShardedByS3Key"
        wrong = ""
        if setting is None:
            wrong = f"unknown; choose {', '.join(CHANNELS)}"
        elif setting in folders:
            by = folders[setting][0]
            wrong = f"{by} gives {setting} already; choose one of the two"
        elif options.get("TrainingInputMode") == "Pipe":
            wrong = "TrainingInputMode=Pipe: choose File or FastFile"
        elif shares and n_hosts > 1:
            wrong = (
                f"S3DistributionType=ShardedByS3Key gives each of {n_hosts} "
                "hosts a part; each host needs all of it; choose "
                "FullyReplicated"
            )
        elif not any(path.is_file() for path in folder.rglob("*")):
            wrong = f"{folder} holds no file"
        if wrong:
            problems.append(f"channel '{channel}': {wrong}")
        else:
            folders[setting] = f"channel '{channel}'", folder
    return folders


def _joined(settings, folders, problems):
    """The settings, and those that folders are given for."""
    problems += [
        f"hyperparameter {name}={settings[name]!r}: {folders[name][0]} gives "
        f"{name}; remove one of the two"
        for name in sorted(settings.keys() & folders.keys())
    ]
    given = {k: str(folder) for k, (_, folder) in folders.items() if folder}
    return {**settings, **given}


def _hosts(machines, config, problems):
    """All hosts, and the place of this one."""
    try:
        hosts = sorted(machines["hosts"])
        return hosts, hosts.index(machines["current_host"])
    except (KeyError, TypeError, ValueError):
        problems.append(
            f"{config / 'resourceconfig.json'}: give hosts, and current_host "
            f"among them, not {machines}"
        )
        return [], 0


def n_gpus():
    """GPUs of this host, as its driver tells."""
    if not shutil.which("nvidia-smi"):
        return 0
    command = ["nvidia-smi", "--list-gpus"]
    told = subprocess.run(command, capture_output=True, text=True)
    if told.returncode:
        words = (told.stdout + told.stderr).strip()
        raise OSError(f"{' '.join(command)} failed, the GPUs are out: {words}")
    return sum(line.startswith("GPU ") for line in told.stdout.splitlines())


def _arguments(settings, problems):
    arguments = []
    for name, text in settings.items():
        try:
            arguments += argument(name, text)
        except ValueError as error:
            problems.append(str(error))
    return arguments


def argument(name, text):
    """A setting as train.py takes it.

    Arguments
    ---------
    name, text : str

    Returns
    -------
    list of str
        One; none for a flag that is off.

    Raises
    ------
    ValueError
        The text has no form that SpeechBrain would read.
    """
    if name in FLAGS:
        if text.lower() not in FLAG_VALUES:
            raise ValueError(f"{name}={text!r}: choose true or false")
        return [f"--{name}"] * FLAG_VALUES[text.lower()]
    if not text.startswith(("[", "{", '"', "'")):
        return [f"--{name}={_quoted(text) if SIGNS.search(text) else text}"]
    if set("=\n") & set(text):
        try:
            text = _quoted(json.loads(text))
        except ValueError:
            raise ValueError(
                f"{name}={text!r}: holds '=' or a line's end; write it as JSON"
            ) from None
    return [f"--{name}={text}"]


def _quoted(value):
    # SpeechBrain splits its command line at each "=".
    return json.dumps(value, ensure_ascii=False).replace("=", r"\u003d")
