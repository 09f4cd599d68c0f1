#!/usr/bin/env python3
"""New tokens and text without audio, side by side at equal steps.

In: a pretrained folder, a corpus to adapt it to.
Out: a table of validations, and new_tokens.json.

> python benchmarks/voices.py results/other_voices
> python benchmarks/new_tokens.py --whisper_hub results/base \\
>     --data_folder results/other_voices

Each arm is a run of train.py on the same clips. Losses of several vocabularies
compare by the character of the reference, not by the token. An arm with text
makes as many more steps as it has batches of text: all see about the same audio.
What else is on the command line goes to train.py: --lr=0.0003
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import mean

from arms import RECIPE
from speed import ENVIRONMENT
from transformers import WhisperTokenizer

sys.path.insert(0, str(RECIPE))
import report  # noqa: E402
from local import dataio, files, sources, synthesize  # noqa: E402

HPARAMS = RECIPE / "hparams/quickstart.yaml"
ASR_RATIO = 0.5
ARMS = {
    "none": {},
    "extend, mean": {"new_tokens": "extend", "new_rows": "mean"},
    "extend, normal": {"new_tokens": "extend", "new_rows": "normal"},
    "replace, mean": {"new_tokens": "replace", "new_rows": "mean"},
    "replace, normal": {"new_tokens": "replace", "new_rows": "normal"},
    "text": {"asr_ratio": ASR_RATIO},
    "replace, mean, text": {
        "new_tokens": "replace",
        "new_rows": "mean",
        "asr_ratio": ASR_RATIO,
    },
}
TEXT_SEED, N_LINES = 11, 3000


def write_text(path, corpus):
    """Sentences of the quickstart's kind that the corpus does not say."""
    with open(corpus / "manifest.tsv", encoding="utf-8", newline="") as file:
        said = {row["text"] for row in csv.DictReader(file, delimiter="\t")}
    lines = {clip.text for clip in synthesize.plan(N_LINES, TEXT_SEED)} - said
    path.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")


def run(arm, seed, given, folder):
    """The validations of one run of train.py: step to scores."""
    has_text = "asr_ratio" in ARMS[arm]
    factor = round(1 / ASR_RATIO) if has_text else 1
    out = folder / f"{arm.replace(', ', '_')}_{seed}"
    settings = {
        **ARMS[arm],
        "whisper_hub": os.path.abspath(given.whisper_hub),
        "data_folder": os.path.abspath(given.data_folder),
        "manifest_folder": folder / "manifests",
        "output_folder": out,
        "seed": seed,
        "n_new_tokens": given.n_new_tokens,
        "test_csv": "valid.csv",
        "encoder_context": "full",
        "batch_size": 16,
        "max_batch_length": 0,
        "grad_accumulation_factor": 1,
        "number_of_epochs": given.steps,
        "optimizer_step_limit": factor * given.steps,
        "valid_interval_steps": factor * given.every,
        "lr": 1e-3,
        "schedule": "constant",
        "score_before_training": False,
        "collapse_patience": 0,
    }
    if not ARMS[arm].get("new_tokens"):
        del settings["n_new_tokens"]
    if has_text:
        settings["text_file"] = folder / "lines.txt"
    settings |= dict(one[2:].split("=", 1) for one in given.rest)
    command = [f"--{name}={value}" for name, value in settings.items()]
    with open(out.with_suffix(".log"), "w", encoding="utf-8") as log:
        start("train.py", HPARAMS, *command, stdout=log)
    return validations(out, given.whisper_hub, factor, given.every)


def start(*command, **options):
    """Runs a program of the recipe."""
    subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=RECIPE,
        env=os.environ | ENVIRONMENT,
        stderr=subprocess.STDOUT,
        check=True,
        **options,
    )


def prepare(given, folder):
    """Manifests and lines of text, for all runs."""
    corpus = os.path.abspath(given.data_folder)
    hub = "--whisper_hub", os.path.abspath(given.whisper_hub)
    limit = "--max_duration_s", sources.context_seconds(hub[1])
    start(
        *("-m", "local.prepare", "manifest", corpus),
        *("--out", folder / "manifests", *hub, *limit),
    )
    write_text(folder / "lines.txt", Path(corpus))


def validations(out, whisper_hub, factor, every):
    """Audio steps, CER in percent and nats a character of each."""
    own = out / "tokenizer"
    name = str(own if own.is_dir() else Path(whisper_hub).resolve())
    tokenizer = WhisperTokenizer.from_pretrained(name)
    with open(out.parent / "manifests/valid.csv", encoding="utf-8") as file:
        texts = [row["wrd"] for row in csv.DictReader(file)]
    n_tokens = sum(1 + len(dataio.encode(text, tokenizer)) for text in texts)
    n_characters = sum(map(len, texts))
    found = []
    for line in (out / "curves.jsonl").read_text("utf-8").splitlines():
        line = json.loads(line)
        if "valid" in line and line["step"] % (factor * every) == 0:
            loss = line["valid"]["loss"] * n_tokens / n_characters
            scores = {"loss": loss, "CER": line["valid"]["CER"]}
            found.append({"step": line["step"] // factor, **scores})
    return {"tokens_per_character": n_tokens / n_characters, "valid": found}


def table(arms):
    """Markdown: of each arm the means over seeds."""
    steps = [row["step"] for row in next(iter(arms.values()))[0]["valid"]]
    heads = ["arm", "tokens a character", *(f"{n} steps" for n in steps)]
    lines = [heads, ["---"] * len(heads)]
    for arm, runs in arms.items():
        cells = [arm, f"{mean(r['tokens_per_character'] for r in runs):.3f}"]
        for rows in zip(*(r["valid"] for r in runs)):
            loss, cer = (
                mean(r[name] for r in rows) for name in ("loss", "CER")
            )
            cells.append(f"{loss:.3f}; {cer:.2f} %")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--whisper_hub", required=True, help="a Hugging Face folder")
    add("--data_folder", required=True, help="a corpus with manifest.tsv")
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM")
    add("--steps", type=int, default=90, help="of 16 clips")
    add("--every", type=int, default=30, help="steps between validations")
    add("--n_new_tokens", type=int, default=100)
    add("--seeds", type=int, nargs="+", default=[1986, 1987, 1988])
    add("--out", type=Path, default=Path(__file__).parent / "out")
    given, given.rest = parser.parse_known_args()
    return given


def main():
    """Measures, writes, prints."""
    given = arguments()
    arms = {arm: [] for arm in given.arms}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        prepare(given, folder)
        for seed in given.seeds:  # arms take turns
            for arm in given.arms:
                arms[arm].append(run(arm, seed, given, folder))
                print(arm, seed, arms[arm][-1]["valid"][-1], flush=True)
    result = {
        "arms": arms,
        "hardware": report.hardware("cpu"),
        "versions": {name: version(name) for name in report.PACKAGES}
        | {"python": platform.python_version()},
        "settings": vars(given) | {"out": str(given.out)},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    with files.replacing(given.out / "new_tokens.json") as file:
        json.dump(result, file, indent=2)
    print(f"\n{table(arms)}")


if __name__ == "__main__":
    main()
