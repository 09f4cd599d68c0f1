"""What each setting may be: one rule a scalar of the YAML files.

In: the value of one setting.
Out: None, or what to give instead.
"""

import re
from pathlib import Path

from local import (
    corpora,
    lora,
    mixture,
    model,
    new_rows,
    optimizers,
    quantized,
    random_model,
    schedules,
    sources,
    text_lines,
    vocabulary,
)
from local.corpora.manifest import COLUMNS
from local.metrics import METRICS


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


def _file_or_empty(value):
    if not isinstance(value, (str, type(None))):
        return "give a file, or nothing"
    if value:
        return text_lines.problem(value)


def _model_source(value):
    if not isinstance(value, str) or not value:
        return "give a hub name, a local folder, or random:SIZE"
    if value.startswith(sources.RANDOM):
        if value[len(sources.RANDOM) :] not in random_model.SIZES:
            return f"choose random: with {', '.join(random_model.SIZES)}"
    elif value.startswith((".", "/", "~")) and not Path(value).is_dir():
        return "there is no such folder; give a Hugging Face model folder"


def _target_modules(value):
    names = value if isinstance(value, list) else [value]
    if not names or any(map(_text, names)):
        return (
            "give a list of names such as [q_proj, v_proj], a regular "
            "expression, or all-linear"
        )
    if isinstance(value, str):
        try:
            re.compile(value)
        except re.error as error:
            return f"no regular expression: {error}"


def _speeds(value):
    if not isinstance(value, list) or not value:
        return "give a list of percents such as [95, 100, 105]"
    if any(_number(50, 200, whole=True)(speed) for speed in value):
        return "give whole percents between 50 and 200"


def _snr_db(value):
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or any(_number(-30, 100)(decibel) for decibel in value):
        return "give two numbers of decibels such as [5, 20]"
    if value[0] > value[1]:
        return "give the lower number first"


def _columns(value):
    if not isinstance(value, dict):
        return "give a mapping such as {path: file, text: sentence}"
    unknown = sorted(set(value) - set(COLUMNS))
    if unknown:
        return f"{', '.join(unknown)} is none of {', '.join(COLUMNS)}"


def _steps_or_share(value):
    is_share = isinstance(value, float) and 0 < value < 1
    if not is_share and _number(0, whole=True)(value):
        return "give a whole number of steps, or a share of the run below 1"


_boolean = _choice(True, False)
_precision = _choice("fp32", "bf16", "fp16")
_count = _number(1, whole=True)

RULES = {
    "whisper_hub": _model_source,
    "adaptation": _choice(*model.ADAPTATIONS),
    "base_precision": _choice(*quantized.BASE_PRECISIONS),
    "lora_rank": _count,
    "lora_alpha": _number(0, above=True),
    "lora_dropout": _number(0, 0.99),
    "lora_target_modules": _target_modules,
    "lora_part": _choice(*lora.PARTS),
    "new_tokens": _choice(*vocabulary.NEW_TOKENS),
    "n_new_tokens": _count,
    "new_tokens_text": _file_or_empty,
    "new_rows": _choice(*new_rows.STARTS),
    "new_rows_lr_multiplier": _number(0),
    "encoder_context": _choice(*model.CONTEXTS),
    "gradient_checkpointing": _boolean,
    "compile_layers": _boolean,
    "encoder_cache_folder": _folder_or_empty,
    "corpus": _choice(*sorted(corpora.CORPORA)),
    "data_folder": _text,
    "text_form": _choice("spelling", "pronunciation"),
    "columns": _columns,
    "corpora": mixture.problems_of_corpora,
    "keep_no_speech": _boolean,
    "packing": _choice("none", "text", "timestamps"),
    "asr_ratio": _number(0.01, 1),
    "text_file": _file_or_empty,
    "max_text_lines": _number(0, whole=True),
    "heldout_share": _number(0, 0.5, above=True),
    "manifest_folder": _folder_or_empty,
    "features_folder": _folder_or_empty,
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
    "optimizer_name": _choice(*optimizers.OPTIMIZERS),
    "schedule": _choice(*schedules.SCHEDULES),
    "lr": _number(0, above=True),
    "warmup_steps": _steps_or_share,
    "embedding_lr_multiplier": _number(0),
    "weight_decay": _number(0),
    "max_grad_norm": _number(0, above=True),
    "nonfinite_patience": _count,
    "label_smoothing": _number(0, 0.99),
    "augment": _boolean,
    "speeds": _speeds,
    "telephone_share": _number(0, 1),
    "noise_folder": _folder_or_empty,
    "noise_share": _number(0, 1),
    "snr_db": _snr_db,
    "reverb_folder": _folder_or_empty,
    "reverb_share": _number(0, 1),
    "precision": _precision,
    "eval_precision": _precision,
    "best_metric": _choice(*METRICS),
    "valid_interval_steps": _number(0, whole=True),
    "valid_max_utterances": _number(0, whole=True),
    "early_stopping_patience": _number(0, whole=True),
    "early_stopping_min_delta": _number(0),
    "collapse_share": _number(0, 100),
    "collapse_patience": _number(0, whole=True),
    "score_before_training": _boolean,
    "test_batch_size": _count,
    "test_beam_size": _count,
    "max_new_tokens": _number(1, model.MAX_TOKENS, whole=True),
    "ckpt_interval_steps": _number(0, whole=True),
    "ckpt_interval_minutes": _number(0),
    "keep_last": _count,
    "log_interval_steps": _count,
    "tensorboard": _boolean,
    "dry_run": _boolean,
    "plan_memory": _boolean,
    "num_workers": _number(0, whole=True),
}
