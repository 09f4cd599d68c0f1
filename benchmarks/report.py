"""What the rounds say: ratios, medians, quartiles, machine and versions.

In: the answers of arms.py's processes, round by round.
Out: the content of speed.json, and the table of it.
"""

import dataclasses
import os
import platform
import re
from importlib.metadata import version
from statistics import mean, median, quantiles

import clips as clips_module
import flops
import numpy as np
import torch
from arms import MIB, RECIPE
from local import batching
from transformers import WhisperConfig, WhisperTokenizer

# Name of a ratio: the slower arm, the faster one, what is compared.
RATIOS = {
    "train_ratio_vs_hf": ("hf", "true_length", "seconds"),
    "train_ratio_vs_hf_checkpointing": (
        "hf_checkpointing",
        "true_length",
        "seconds",
    ),
    "train_ratio_vs_speechbrain": ("speechbrain", "true_length", "seconds"),
    "mixed_ratio_vs_hf": ("hf", "mixed", "seconds"),
    "frozen_cache_ratio": ("frozen", "frozen_cached", "seconds"),
    "decode_ratio_vs_speechbrain": ("decode_speechbrain", "decode", "seconds"),
    "decode_ratio_by_length": (
        "decode_speechbrain_by_length",
        "decode_by_length",
        "seconds",
    ),
}
# Of these MFU is not told: they do less than training all weights.
DO_LESS = {"frozen", "frozen_cached"}
CORPUS_CLIPS = 20_000  # of which padding_waste is told
PACKAGES = ("torch", "torchaudio", "transformers", "speechbrain", "accelerate")


def content(groups, settings, clips):
    """All of speed.json.

    Arguments
    ---------
    groups : list of dict
        Of arms that took turns: name to a list of answers, one a round.
    settings : arms.Settings
    clips : list of clips.Clip

    Returns
    -------
    dict
    """
    arms = {}
    for answers in groups:
        for name, rounds in answers.items():
            arms[name] = arms.get(name, []) + rounds
    result = {
        name: found
        for name, (slower, faster, key) in RATIOS.items()
        if (found := ratio(groups, slower, faster, key)) is not None
    }
    result["padding_waste"] = corpus_padding(settings.seed)
    if "e2e" in arms:
        result["data_wait"] = median(a["data_wait"] for a in arms["e2e"])
    if {"decode", "decode_speechbrain"} <= arms.keys():
        both = arms["decode"][0], arms["decode_speechbrain"][0]
        pairs = zip(*(answer["texts"] for answer in both))
        result["decode_equal_texts"] = sum(a == b for a, b in pairs)
    result["hardware"] = hardware(settings.device)
    result["versions"] = {name: version(name) for name in PACKAGES}
    result["versions"]["python"] = platform.python_version()
    result["settings"] = dataclasses.asdict(settings)
    del result["settings"]["work_folder"]
    work = training_work(settings, clips)
    peak = flops.peak(result["hardware"]["gpu"])
    audio_s = sum(clip.duration for clip in clips)
    result["arms"] = {
        name: summary(rounds, len(clips), audio_s)
        for name, rounds in arms.items()
    }
    training = [n for n in arms if n not in DO_LESS and "decode" not in n]
    for name in training if peak else ():
        arm = result["arms"][name]
        arm["mfu"] = 100 * arm["clips_per_s"] * work / len(clips) / peak
    return result


def ratio(groups, slower, faster, key):
    """How many times faster an arm is: the median over pairs of rounds.

    Only rounds of arms that took turns are compared; None where there are
    none.
    """
    for answers in groups:
        if {slower, faster} <= answers.keys():
            pairs = zip(answers[slower], answers[faster])
            return median(a[key] / b[key] for a, b in pairs)
    return None


def summary(rounds, n_clips, audio_s):
    """One arm: medians, quartiles, memory.

    Arguments
    ---------
    rounds : list of dict
        Answers.
    n_clips, audio_s : int, float
        Of one round.

    Returns
    -------
    dict
    """
    rates = [n_clips / answer["seconds"] for answer in rounds]
    result = {
        "rounds": len(rates),
        "clips_per_s": median(rates),
        "clips_per_s_quartiles": quartiles(rates),
        "audio_s_per_s": median(rates) * audio_s / n_clips,
        "peak_mib": max(answer["peak_mib"] for answer in rounds),
    }
    for key in ("loss", "padding", "silence", "clips_per_step", "data_wait"):
        if key in rounds[0]:
            result[key] = mean(answer[key] for answer in rounds)
    return result


def quartiles(values):
    """First and third quartile; a single value is both."""
    if len(values) == 1:
        return values * 2
    first, _, third = quantiles(values, n=4, method="inclusive")
    return [first, third]


def training_work(settings, clips):
    """Operations of one round of training at true length."""
    config = WhisperConfig.from_pretrained(settings.model_folder)
    tokenizer = WhisperTokenizer.from_pretrained(settings.model_folder)
    tokenizer.set_prefix_tokens(language="ko", task="transcribe")
    return sum(
        flops.training(
            # All but the end token go in.
            config,
            clip.duration,
            len(tokenizer.encode(clip.text)) - 1,
        )
        for clip in clips
    )


def corpus_padding(seed):
    """Percent of padding in a run by train_large_v3.yaml on a large corpus.

    The few clips of a round are padded more: see ``padding`` of their arms.
    """
    path = RECIPE / "hparams/train_large_v3.yaml"
    text = path.read_text(encoding="utf-8")

    def setting(name):
        return float(re.search(rf"^{name}: ([\d.]+)", text, re.M)[1])

    rng = np.random.default_rng(seed)
    batches = batching.Batches(
        clips_module.durations(CORPUS_CLIPS, rng),
        int(setting("batch_size")),
        setting("max_batch_length"),
        "true_length",
        clips_module.LONGEST_S,
        seed,
    )
    return float(batches.shares["padding"])


def hardware(device):
    """The machine, by what its system tells."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / MIB / 1024, 1),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
    }


def cpu_name():
    """The processor's name; Linux tells it in /proc alone."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        found = re.search(r"^model name\s*: (.*)", file.read(), re.M)
    return found[1] if found else platform.machine()


def table(result):
    """The result as text."""
    heads = ["arm", "clips/s", "quartiles", "audio s/s", "peak MiB", "MFU %"]
    rows = [heads]
    for name, arm in result["arms"].items():
        first, third = arm["clips_per_s_quartiles"]
        cells = [name, f"{arm['clips_per_s']:.3g}", f"{first:.3g}-{third:.3g}"]
        cells += [f"{arm['audio_s_per_s']:.1f}", f"{arm['peak_mib']:.0f}"]
        cells += [f"{arm['mfu']:.1f}" if "mfu" in arm else ""]
        rows.append(cells)
    lines = ["".join(f"{cell:>20}" for cell in row) for row in rows]
    lines.append("")
    for name, value in result.items():
        if isinstance(value, (int, float)):
            lines.append(f"{name:>34} {value:.3g}")
    return "\n".join(lines)
