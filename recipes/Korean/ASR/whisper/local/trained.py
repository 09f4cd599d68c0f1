"""What a user names as a model: a Whisper that is ready to decode.

In: a run's output folder, a CKPT+… folder, a Hugging Face or CTranslate2
folder, the folder of a PEFT adapter, a hub name, or random:SIZE.
Out: which of them it is, how it was scored, its base, its weights.
"""

import contextlib
import json
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from ruamel.yaml.error import YAMLError
from safetensors import SafetensorError

from local import (
    adapter_folder,
    checkpoints,
    lora,
    model,
    quantized,
    saved_weights,
    settings,
    sources,
)

# Ours to those of a run's hyperparams.yaml
SETTINGS = {
    "precision": "eval_precision",
    "beam_size": "test_beam_size",
    "max_new_tokens": "max_new_tokens",
}
PROVENANCE = "provenance.json"  # beside an exported model
RANDOM_FOLDER = "random_whisper"  # of a run, where it builds random:SIZE
SEED = 1986  # of random:SIZE, where no run names another


class Source(NamedTuple):
    """Where weights come from.

    Attributes
    ----------
    kind : str
        "checkpoint" (one of ours), "adapter" (PEFT's), "hub" (a name, a
        Hugging Face folder or random:SIZE) or "ctranslate2".
    path : str
        The CKPT+… folder, the folder, or the name.
    name : str
        To show to people.
    run : Path or None
        The run's output folder, where the checkpoint lies in one.
    """

    kind: str
    path: str
    name: str
    run: Optional[Path] = None


def resolve(source):
    """Finds out what a name stands for; loads nothing.

    Arguments
    ---------
    source : str
        As the user gave it. Of a run the best checkpoint is taken.

    Returns
    -------
    Source

    Raises
    ------
    FileNotFoundError
        A path that is not there.
    ValueError
        A folder that holds no model, or no whole checkpoint.
    """
    folder = Path(source)
    if source.startswith(sources.RANDOM):
        sources.context_seconds(source)  # an unknown size is told here
        return Source("hub", source, source)
    if not folder.exists():
        is_path = source.startswith((".", "/", "~")) or source.count("/") != 1
        if is_path or folder.parent.is_dir():  # results/misspelt
            raise FileNotFoundError(
                f"model '{source}': no such folder; give a run's output "
                "folder, a CKPT+… folder, a Hugging Face, CTranslate2 or PEFT "
                "adapter folder, a hub name such as openai/whisper-large-v3, "
                "or random:SIZE"
            )
        _require_on_hub(source)
        return Source("hub", source, folder.name)
    folder = folder.resolve()
    if (folder / "model.bin").is_file():
        return Source("ctranslate2", str(folder), folder.name)
    if (folder / "CKPT.yaml").is_file():
        is_in_run = (folder.parents[1] / "hyperparams.yaml").is_file()
        run = folder.parents[1] if is_in_run else None
        _one_checkpoint(folder)
        return Source("checkpoint", str(folder), folder.name, run)
    if (folder / "hyperparams.yaml").is_file() and _save_folder(folder):
        best = _best(folder)
        return Source("checkpoint", str(best), _name_of_run(folder), folder)
    if (folder / adapter_folder.CONFIG_FILE).is_file():
        adapter_folder.base_name(folder)  # tells what is wrong with it
        return Source("adapter", str(folder), folder.name)
    if (folder / "config.json").is_file():
        _require_whole(folder)
        return Source("hub", str(folder), folder.name)
    raise ValueError(
        f"model '{source}': the folder holds no save/CKPT+…, CKPT.yaml, "
        "config.json (Hugging Face), adapter_config.json (PEFT) or model.bin "
        "(CTranslate2)"
    )


def run_settings(source):
    """How a model was scored in its run; empty where nothing tells it.

    Arguments
    ---------
    source : Source

    Returns
    -------
    dict
        ``precision``, ``beam_size`` and ``max_new_tokens``.
    """
    if source.run is not None:
        present = _plain(source.run)
        return {ours: present[theirs] for ours, theirs in SETTINGS.items()}
    present = _provenance(source)
    return {name: present[name] for name in SETTINGS if name in present}


def curves(source):
    """The curves.jsonl of a model's run; None where there is none."""
    if source.run is None:
        return None
    path = source.run / "curves.jsonl"
    return path if path.is_file() else None


def identity(source):
    """What a model's weights belong to.

    Arguments
    ---------
    source : Source
        Not of the kind "ctranslate2".

    Returns
    -------
    dict
        ``whisper_hub``, the weights before, and ``adaptation``; of one of our
        checkpoints all of ``model.Whisper.identity``, of one of our exported
        adapters its ``base_sha256``.

    Raises
    ------
    ValueError
        The file that tells it is damaged.
    """
    path = Path(source.path)
    if source.kind == "checkpoint":
        return _json(path / "whisper.ckpt")
    if source.kind == "adapter":
        hub = adapter_folder.base_name(path)
        told = {"whisper_hub": hub, "adaptation": "lora"}
        digest = _provenance(source).get("base_sha256")
        return {**told, "base_sha256": digest} if digest else told
    return {"whisper_hub": source.path, "adaptation": "full"}


def base(source):
    """The pretrained model that a run, an adapter or an exported copy is of.

    Arguments
    ---------
    source : Source

    Returns
    -------
    Source or None
        None: nothing tells it.

    Raises
    ------
    FileNotFoundError
        It is not there.
    """
    is_beside = source.kind in ("checkpoint", "adapter")
    told = identity(source) if is_beside else _provenance(source)
    if "whisper_hub" not in told:
        return None
    name = told["whisper_hub"]
    if name.startswith(sources.RANDOM) and source.run is not None:
        size = name[len(sources.RANDOM) :]
        built = source.run / RANDOM_FOLDER / f"{size}_{told['seed']}"
        name = str(built) if built.is_dir() else name
    try:
        return resolve(name)
    except (FileNotFoundError, ValueError) as error:
        raise FileNotFoundError(
            f"model '{source.path}' was trained from '{name}', without which "
            f"it cannot be loaded; bring it back, or put a link there: {error}"
        ) from None


def problem(source, device, base_precision=None):
    """What keeps this machine from running a model; None where nothing does.

    Arguments
    ---------
    source : Source
    device : str
    base_precision : str or None
        As for ``load``.

    Returns
    -------
    str or None
        What to install, or where it runs.
    """
    if source.kind not in ("checkpoint", "adapter"):
        return None
    told = identity(source)
    precision = base_precision or told.get("base_precision", "fp32")
    needs = f"model '{source.path}' is LoRA"
    if told["adaptation"] == "lora" and (lacking := lora.problem()):
        return f"{needs}: {lacking}"
    if lacking := quantized.problem(precision, device):
        return f"{needs} beside a base in {precision}: {lacking}"
    return None


def load(source, device, random_folder, base_precision=None):
    """The model with its weights, in evaluation mode.

    Beside its base as in training it is what its run has scored, to the bit.
    An adapter of PEFT's own is added to its base, in fp32.

    Arguments
    ---------
    source : Source
        Not of the kind "ctranslate2".
    device : str
    random_folder : str or Path
        Where random:SIZE is built, unless its run has it.
    base_precision : str or None
        Of the base of a LoRA run; None: as in training.

    Returns
    -------
    local.model.Whisper

    Raises
    ------
    FileNotFoundError, ValueError, OSError
        The source of the weights is not there, is damaged, or does not fit.
    """
    if lacking := problem(source, device, base_precision):
        raise ValueError(lacking)
    told = identity(source)
    if source.kind != "hub":
        base(source)  # without it, Transformers tells of the hub
    if source.run is not None and (source.run / RANDOM_FOLDER).is_dir():
        random_folder = source.run / RANDOM_FOLDER
    is_lora = source.kind == "checkpoint" and told["adaptation"] == "lora"
    with told_if_damaged(source):
        whisper = model.Whisper(
            told["whisper_hub"],
            told["adaptation"],
            gradient_checkpointing=False,
            compile_layers=False,
            random_folder=random_folder,
            seed=told.get("seed", SEED),
            base_precision=base_precision or told.get("base_precision", "fp32"),
            lora=_lora(told) if is_lora else None,
            device=device,
            new_tokens=saved_weights.new_tokens(source.path, told),
        )
        if source.kind == "checkpoint":
            whisper.load(Path(source.path) / "whisper.ckpt", end_of_epoch=True)
        elif source.kind == "adapter":
            saved_weights.require_base(source.path, told, whisper.identity)
            adapter_folder.merge(whisper.model, source.path)
    return whisper.to(device).eval()


@contextlib.contextmanager
def told_if_damaged(source):
    """Tells as a ValueError what libraries say of weights that do not load."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"model '{source.path}' cannot be loaded, is it whole? {error}"
        ) from error


def _json(path):
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _provenance(source):
    """What export.py has told of a copy; empty where it is none."""
    path = Path(source.path) / PROVENANCE
    return _json(path) if path.is_file() else {}


def _lora(told):
    return lora.Lora(*(told[f"lora_{name}"] for name in lora.Lora._fields))


def _require_on_hub(name):
    try:
        sources.context_seconds(name)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model '{name}': there is no such folder, and as a hub name it "
            f"cannot be reached or is no Whisper: {str(error).splitlines()[0]}"
        ) from None


def _plain(run):
    path = run / "hyperparams.yaml"
    try:
        present = settings.plain(path.read_text(encoding="utf-8")) or {}
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if missing := {"best_metric", *SETTINGS.values()} - set(present):
        raise ValueError(
            f"{path} does not tell {', '.join(sorted(missing))}: it is the run "
            "of another recipe; give a model that local/trained.py names"
        )
    return present


def _require_whole(folder):
    """A folder that lacks something is told before another model has worked."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*")]
    lacking = [] if weights else ["weights (model.safetensors)"]
    # Transformers 5 has the second where a processor was saved.
    extractors = "preprocessor_config.json", "processor_config.json"
    if not any((folder / name).is_file() for name in extractors):
        lacking.append(extractors[0])
    if lacking:
        raise ValueError(
            f"model '{folder}' has a config.json, but no {' and no '.join(lacking)}"
        )


def _save_folder(run):
    """Of a run, which may have moved since; None where there is none."""
    folders = [run / "save", Path(_plain(run).get("save_folder", ""))]
    found = [folder for folder in folders if any(folder.glob("CKPT+*"))]
    return found[0] if found else None


def _best(run):
    present = _plain(run)
    checkpointer = checkpoints.Checkpointer(
        _save_folder(run), best_metric=present["best_metric"]
    )
    best = checkpointer.best() or checkpointer.newest()
    if best is None:
        raise ValueError(f"model '{run}': none of its checkpoints is whole")
    return best.path


def _one_checkpoint(folder):
    found = checkpoints.Checkpointer(folder.parent).list_checkpoints()
    if folder not in [one.path.resolve() for one in found]:
        raise ValueError(
            f"model '{folder}': the checkpoint is not whole; take another of "
            f"{', '.join(one.path.name for one in found) or 'none'}"
        )


def _name_of_run(folder):
    """results/train_large_v3/1986: the last part is a mere seed."""
    parts = folder.parts
    return "-".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]
