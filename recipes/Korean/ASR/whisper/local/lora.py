"""Low-rank adapters beside a frozen Whisper, by PEFT.

In: a model, and which of its linear layers get an adapter.
Out: the model with adapters, or with them merged; PEFT's names and files.
"""

import importlib.util
from pathlib import Path
from typing import List, NamedTuple, Union

import torch
from transformers import WhisperModel

PARTS = ("both", "encoder", "decoder")
ALL_LINEAR = "all-linear"
ADAPTER = "default"  # the name that PEFT gives to a model's first one
# PEFT adapts WhisperForConditionalGeneration, whose `model` ours is.
OUTER = "model."
PEFT_PREFIX = "base_model.model." + OUTER


class Lora(NamedTuple):
    """LoRA (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    An adapted layer gives W·x + alpha / rank · B·A·x; B begins at zero.

    Attributes
    ----------
    rank : int
        Rows of A, columns of B.
    alpha : float
    dropout : float
        Share of an adapter's inputs.
    target_modules : list of str, or str
        As PEFT takes it: names or ends of names of linear layers, a regular
        expression for whole names of WhisperForConditionalGeneration's
        modules, or "all-linear".
    part : str
        One of ``PARTS``: where the layers must lie.
    """

    rank: int
    alpha: float
    dropout: float
    target_modules: Union[List[str], str]
    part: str


def as_settings(lora):
    """A Lora as the settings of a run: "lora_rank" and so on."""
    return {f"lora_{name}": value for name, value in lora._asdict().items()}


def targets(config, lora):
    """Names of the linear layers that get an adapter; loads no weights.

    Arguments
    ---------
    config : transformers.WhisperConfig
    lora : Lora

    Returns
    -------
    list of str
        As in WhisperModel: "decoder.layers.0.self_attn.q_proj".

    Raises
    ------
    ValueError
        A pattern names no layer of that part, or one that is not linear.
    """
    with torch.device("meta"):
        modules = dict(WhisperModel(config).named_modules())
    linear = {k for k, m in modules.items() if isinstance(m, torch.nn.Linear)}
    parts = PARTS[1:] if lora.part == PARTS[0] else (lora.part,)
    within = [name for name in modules if name.split(".")[0] in parts]
    given = lora.target_modules
    found = set()
    # A list is taken name by name: PEFT passes over a mistyped one.
    for pattern in [[n] for n in given] if isinstance(given, list) else [given]:
        named = _named(pattern, within, linear)
        if others := [name for name in named if name not in linear]:
            raise ValueError(
                f"lora_target_modules={given!r} names {others[0]}, which is "
                f"no linear layer; choose among {_choices(linear)}"
            )
        if not named:
            raise ValueError(
                f"lora_target_modules={given!r}: {pattern!r} names no layer "
                f"in lora_part={lora.part!r}; give a list of some of "
                f"{_choices(linear)}, a regular expression for names such as "
                f"{OUTER}{min(linear)} as a whole, or {ALL_LINEAR}"
            )
        found.update(named)
    return [name for name in within if name in found]


def _named(pattern, names, linear):
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    if pattern == ALL_LINEAR:
        return [name for name in names if name in linear]
    config = LoraConfig(target_modules=pattern)
    return [n for n in names if check_target_module_exists(config, OUTER + n)]


def _choices(linear):
    return ", ".join(sorted({name.rpartition(".")[2] for name in linear}))


def inject(model, lora, seed):
    """Freezes a model, and puts adapters beside some of its linear layers.

    Arguments
    ---------
    model : transformers.WhisperModel
        Changed in place; its linear layers may be quantised.
    lora : Lora
    seed : int
        Of the adapters' first weights, which are fp32.

    Returns
    -------
    list of str
        ``targets``.
    """
    from peft import inject_adapter_in_model

    names = targets(model.config, lora)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(_config(lora, names), model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return names


def merge(model):
    """Adds the adapters to the weights of their layers, and removes them.

    W + alpha / rank · B·A is computed in fp32, and rounded once to what W is.

    Arguments
    ---------
    model : transformers.WhisperModel
        Changed in place; not quantised.

    Raises
    ------
    ValueError
        An adapter holds what is not finite.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            base = layer.get_base_layer()
            dtype = base.weight.dtype
            base.weight.data = base.weight.data.float()
            layer.merge(safe_merge=True)
            base.weight.data = base.weight.data.to(dtype)
            model.set_submodule(name, base)


def name_in_file(name):
    """A parameter's name in a PEFT adapter's file.

    "decoder.….q_proj.lora_A.default.weight" becomes
    "base_model.model.model.decoder.….q_proj.lora_A.weight".
    """
    return PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")


def write_config(folder, lora, names, source):
    """Writes PEFT's adapter_config.json.

    Arguments
    ---------
    folder : Path
    lora : Lora
    names : list of str
        ``targets``; written where a list of names would not tell the part, or
        a regular expression might name the outer model's ``proj_out`` too.
    source : str
        Of the base model.
    """
    given = lora.target_modules
    if not isinstance(given, list) or lora.part != PARTS[0]:
        given = names
    config = _config(lora, given, base_model_name_or_path=source)
    config.inference_mode = True
    config.save_pretrained(Path(folder))


def _config(lora, target_modules, **options):
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=target_modules,
        **options,
    )


def problem():
    """What to say where PEFT is not installed; None where it is."""
    if importlib.util.find_spec("peft") is None:
        return "PEFT is not installed: pip install peft"
    return None
