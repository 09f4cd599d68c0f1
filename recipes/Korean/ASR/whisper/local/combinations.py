"""Settings that cannot be had together, or not on this machine.

In: the values of a run's settings, each right by itself.
Out: what is wrong with them, and what to choose.
"""

import importlib.util

from local import lora, optimizers, quantized, sources

WAVEFORMS_CHANGE = {  # from epoch to epoch, unless so
    "augment": False,
    "telephone_share": 0.0,
    "noise_folder": "",
    "reverb_folder": "",
}
OF_NEW_TOKENS = {
    "n_new_tokens",
    "new_tokens_text",
    "new_rows",
    "new_rows_lr_multiplier",
}
# Of text they see a state of zeros.
DEAF = tuple(f".encoder_attn.{name}_proj" for name in "qkv")
FREEZING = {"adaptation", "lora_part", "lora_target_modules"}
NEED_WAVEFORMS = {
    **WAVEFORMS_CHANGE,
    "packing": "none",
    "encoder_cache_folder": "",
}


def problems(plain, given, device):
    """What is wrong with some settings together.

    Arguments
    ---------
    plain : dict
        Of a run; settings whose value is wrong by itself are missing.
    given : dict
        Those of the command line: a file's encoder_context does not count
        beside its adaptation.
    device : str or None
        Of the run; None where there is no such device.

    Returns
    -------
    list of str
    """
    return [
        *_of_adaptation(plain, given),
        *_of_base(plain, device),
        *_of_waveforms(plain),
        *_of_new_tokens(plain, given),
        *_of_text(plain, given),
        *_of_optimizer(plain, device),
    ]


def _of_adaptation(plain, given):
    adaptation = plain.get("adaptation", "")
    is_lora = adaptation == "lora"
    is_frozen = adaptation == "frozen_encoder"
    names, wrong = _targets(plain) if is_lora else ([], "")
    is_frozen |= bool(names) and not any(
        n.startswith("encoder.") for n in names
    )
    context = plain.get("encoder_context", "full")
    asked = "encoder_context" in given or not FREEZING & {*given}
    if is_frozen and asked and context != "full":
        yield (
            f"encoder_context={context!r}: a frozen encoder knows its full "
            "context alone; choose full, its states are trimmed afterwards"
        )
    cache = plain.get("encoder_cache_folder")
    if cache and adaptation and not is_frozen:
        yield (
            f"encoder_cache_folder={cache!r}: a trained encoder's outputs "
            "change; leave it empty, or choose adaptation=frozen_encoder, or "
            "adaptation=lora with lora_part=decoder"
        )
    if wrong:
        yield wrong
    idle = sorted(name for name in {*given} & {*plain} if name[:5] == "lora_")
    if adaptation and not is_lora and idle:
        yield (
            f"{', '.join(idle)}: adaptation={adaptation!r} has no adapters; "
            "choose adaptation=lora, or leave them out"
        )


def _targets(plain):
    """Names of the layers with adapters; what is wrong with them, or ""."""
    fields = [f"lora_{name}" for name in lora.Lora._fields]
    if lacking := lora.problem():
        return [], f"adaptation='lora': {lacking}"
    if not {"whisper_hub", *fields} <= plain.keys():
        return [], ""  # told elsewhere
    asked = lora.Lora(*(plain[field] for field in fields))
    try:
        config = sources.load_config(plain["whisper_hub"])
        return lora.targets(config, asked), ""
    except (OSError, ValueError) as error:
        return [], str(error)


def _of_base(plain, device):
    """A base of less precision, and who computes with it."""
    base = plain.get("base_precision", "fp32")
    adaptation = plain.get("adaptation", "lora")
    if base != "fp32" and adaptation != "lora":
        yield (
            f"base_precision={base!r}: adaptation={adaptation!r} trains the "
            "base itself, in fp32; choose adaptation=lora, or "
            "base_precision=fp32"
        )
    elif lacking := quantized.problem(base, device):
        yield f"base_precision={base!r}: {lacking}"
    for name in ("precision", "eval_precision"):
        if base == "bf16" and plain.get(name) == "fp32":
            yield (
                f"{name}='fp32': base_precision='bf16' is multiplied in bf16; "
                f"choose {name}=bf16, or base_precision=fp32"
            )
    if base in quantized.QUANTIZED and plain.get("compile_layers"):
        yield (
            f"compile_layers=True: base_precision={base!r} has kernels of its "
            "own; leave it False, or choose bf16"
        )


def _of_waveforms(plain):
    """What must stay the same from epoch to epoch, or be there at all."""
    cache = plain.get("encoder_cache_folder")
    for name, off in WAVEFORMS_CHANGE.items():
        if cache and (plain.get(name) or off) != off:
            yield (
                f"encoder_cache_folder={cache!r}: {name}={plain[name]!r} "
                "changes every epoch's waveforms; choose one of the two"
            )
    shards = plain.get("features_folder")
    for name, off in NEED_WAVEFORMS.items():
        if shards and (plain.get(name) or off) != off:
            yield (
                f"features_folder={shards!r}: {name}={plain[name]!r} needs "
                f"waveforms; set {name}={off!r}, or leave features_folder empty"
            )
    speeds = plain.get("speeds", [100])
    faster = plain.get("augment") and speeds != [100]
    if faster and plain.get("packing") == "timestamps":
        yield (
            f"packing='timestamps': augment=True with speeds={speeds} "
            "moves speech from its times; choose speeds=[100] or packing=text"
        )


def _of_new_tokens(plain, given):
    mode = plain.get("new_tokens", "none")
    if mode == "none":
        idle = sorted({*given} & {*plain} & OF_NEW_TOKENS)
        if idle and "new_tokens" in plain:
            yield (
                f"{', '.join(idle)}: new_tokens='none' adds none; choose "
                "new_tokens=extend or replace, or leave them out"
            )
        return
    if plain.get("adaptation") == "lora":
        yield (
            f"new_tokens={mode!r}: adaptation='lora' trains no embeddings; "
            "choose adaptation=full or frozen_encoder, or new_tokens=none"
        )
    if shards := plain.get("features_folder"):
        yield (
            f"new_tokens={mode!r}: features_folder={shards!r} holds token ids "
            "without them; leave features_folder empty, or new_tokens=none"
        )


def _of_text(plain, given):
    if not {"asr_ratio", "text_file"} <= plain.keys():
        return
    ratio, file = plain["asr_ratio"], plain["text_file"]
    if ratio < 1 and not file:
        yield (
            f"asr_ratio={ratio}: there is no text_file for the other batches; "
            "give a text of a sentence a line, or asr_ratio=1"
        )
    if ratio == 1 and file:
        yield (
            f"text_file={file!r}: asr_ratio={ratio} leaves no batch for it; "
            "choose asr_ratio below 1, or leave text_file empty"
        )
    names = _targets(plain)[0] if plain.get("adaptation") == "lora" else []
    reads = [n for n in names if n[:8] == "decoder." and not n.endswith(DEAF)]
    if ratio < 1 and names and not reads:
        yield (
            f"asr_ratio={ratio}: adapters in the encoder, or in the attention to "
            "it, train nothing that reads text; choose lora_part=both with "
            "lora_target_modules=[q_proj, v_proj], or asr_ratio=1"
        )


def _of_optimizer(plain, device):
    if wrong := optimizers.problem(
        plain.get("optimizer_name", "adamw"), device or ""
    ):
        yield wrong
    if plain.get("schedule") == "noam" and plain.get("warmup_steps") == 0:
        yield (
            "warmup_steps=0: noam falls from its warm-up; give at least 1, or "
            "choose schedule=cosine, linear or constant"
        )
    if plain.get("tensorboard") and not importlib.util.find_spec("tensorboard"):
        yield (
            "tensorboard=True: not installed; pip install tensorboard, or "
            "leave it False"
        )
