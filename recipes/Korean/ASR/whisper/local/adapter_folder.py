"""A PEFT adapter's folder, whoever wrote it: what it holds, and its merging.

In: a folder with adapter_config.json and adapter_model.safetensors.
Out: the base that it names; a Whisper with the adapter added.
"""

import json
from pathlib import Path

import torch

from local import lora
from local.model import ADAPTER_FILE

CONFIG_FILE = "adapter_config.json"  # PEFT's name
KIND = "LORA"  # of PEFT's, the one that is added to weights here


def base_name(folder):
    """The base that an adapter was trained beside; loads no weights.

    Arguments
    ---------
    folder : str or Path

    Returns
    -------
    str
        A hub name or a local folder.

    Raises
    ------
    ValueError
        Its configuration is damaged, or it is not read here.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        told = dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    base, kind = told.get("base_model_name_or_path"), told.get("peft_type")
    problems = []
    if not (Path(folder) / ADAPTER_FILE).is_file():
        problems.append(f"it has no {ADAPTER_FILE}")
    if kind != KIND:
        problems.append(f"peft_type={kind!r} is not {KIND}")
    if not (base and isinstance(base, str)):
        problems.append("base_model_name_or_path names no base")
    if told.get("trainable_token_indices"):
        problems.append("trainable_token_indices is not read")
    if problems:
        raise ValueError(
            f"model '{folder}' is a PEFT adapter that cannot be used here: "
            f"{'; '.join(problems)}; merge it in PEFT, and give that folder"
        )
    return base


def merge(model, folder):
    """Adds an adapter to its base, for good.

    Arguments
    ---------
    model : transformers.WhisperModel
        Its base, not quantised; changed in place.
    folder : str or Path

    Raises
    ------
    ValueError
        The adapter is another model's: not all of its weights are used, or
        not all that its configuration asks for are there. Or it changes the
        embedding, and leaves the output matrix, which is the same here.
    RuntimeError
        They have another shape.
    """
    from peft import PeftConfig, PeftModel
    from transformers import WhisperForConditionalGeneration

    embedding = model.decoder.embed_tokens
    with torch.device("meta"):
        outer = WhisperForConditionalGeneration(model.config)
    outer.model = model
    outer.proj_out = torch.nn.Identity()  # the embedding is not to be changed
    adapted = PeftModel(outer, PeftConfig.from_pretrained(folder))
    if model.decoder.embed_tokens is not embedding:
        raise ValueError(
            f"model '{folder}': the adapter changes decoder.embed_tokens, which "
            "is the output matrix too; train one without (target_modules, "
            "modules_to_save)"
        )
    found = adapted.load_adapter(folder, lora.ADAPTER)
    if wrong := [*found.missing_keys, *found.unexpected_keys]:
        raise ValueError(
            f"model '{folder}': the adapter is of another model than its "
            f"{CONFIG_FILE} tells, {len(wrong)} of its weights do not fit, "
            f"such as {wrong[0]}; give a folder as PEFT saved it"
        )
    adapted.merge_and_unload(safe_merge=True)
