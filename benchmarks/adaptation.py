#!/usr/bin/env python3
"""Ways to adapt a model, side by side: all weights, the decoder, adapters.

In: a pretrained folder and a corpus; or random:SIZE, and no corpus.
Out: a table, and adaptation.json.

> python benchmarks/voices.py results/other_voices
> python benchmarks/adaptation.py --whisper_hub results/base \\
>     --data_folder results/other_voices --out benchmarks/out
> python benchmarks/adaptation.py --whisper_hub random:large-v3 \\
>     --device cuda --steps 20 --out benchmarks/out

Each mode is a run of train.py in a process of its own, on the same clips for
as many steps (adaptation_run.py). On a CPU the runs take turns; on a GPU one
follows the other. Random weights have no scores: they are given clips of noise
of --clip_s seconds, --batch_size at a time. What else is on the command line
goes to train.py: --lora_rank=8 --gradient_checkpointing=True.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median

import clips as clips_module
import numpy as np
import torch
from arms import RECIPE
from speed import ENVIRONMENT

sys.path.insert(0, str(RECIPE))
import report  # noqa: E402
from local import files, memory, random_model, sources  # noqa: E402
from local.lora import Lora  # noqa: E402

HPARAMS = RECIPE / "hparams/quickstart.yaml"
RUN = Path(__file__).with_name("adaptation_run.py")
LORA = {"adaptation": "lora"}
MODES = {
    "full": {"adaptation": "full"},
    "frozen_encoder": {"adaptation": "frozen_encoder"},
    "lora_fp32": {**LORA, "base_precision": "fp32"},
    "lora_bf16": {**LORA, "base_precision": "bf16"},
    "lora_int8": {**LORA, "base_precision": "int8"},
    "lora_int4": {**LORA, "base_precision": "int4"},
}
PACKAGES = (*report.PACKAGES, "peft", "bitsandbytes")
WARM_UP = 2  # steps of adaptation_run.py that are not timed
N_NOISE = 32  # clips of noise, for random weights
OURS = Lora(32, 64, 0.05, ["q_proj", "v_proj"], "both")  # of all hparams files
MB = 10**6


class Run:
    """A process of adaptation_run.py; ``failed`` says why it has ended."""

    def __init__(self, mode, argv, ends, validates, folder):
        self.mode, self.failed, self.rounds = mode, None, []
        self.log = folder / f"{mode}.log"
        given = {"argv": argv, "ends": ends, "validates": validates}
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, RUN, json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=RECIPE,
                env=os.environ | ENVIRONMENT,
            )
        self.answer()

    def round(self):
        """Goes on to the next of ``ends``."""
        if not self.failed:
            self.process.stdin.write("round\n")
            self.process.stdin.flush()
            if found := self.answer():
                self.rounds.append(found)
                seconds = found["seconds"]
                print(f"{self.mode:>16} {seconds:8.2f} s", flush=True)

    def answer(self):
        """The next line; None where there is none."""
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        status = self.process.wait()
        self.failed = last_words(self.log, status)
        print(f"{self.mode:>16} {self.failed}", flush=True)
        return None

    def close(self):
        """Waits for the end; what a run has come to stands in its last line."""
        self.process.stdin.close()
        self.process.wait()

    def result(self):
        """All of a mode's row: figures, or why there are none."""
        if self.failed:
            return {"failed": self.failed}
        rates = [found["n_clips"] / found["seconds"] for found in self.rounds]
        last = dict(self.rounds[-1])
        del last["seconds"], last["n_clips"]
        return {"clips_per_s": median(rates), "of_rounds": rates, **last}


def last_words(log, status):
    """Why a process failed: the end of its log, or the signal."""
    if status < 0:
        return f"killed by signal {-status}"
    lines = log.read_text(encoding="utf-8").splitlines()
    told = [i for i, line in enumerate(lines) if line.startswith("train.py: ")]
    words = " ".join(lines[told[-1] :] if told else lines[-1:]).split()
    return " ".join(words)[:400] or f"exit status {status}"


def noise(folder, seconds, seed):
    """Writes clips of so many seconds each, and their manifests."""
    rng = np.random.default_rng(seed)
    n_words = round(seconds * clips_module.SYLLABLES_PER_S / 3)
    shape = N_NOISE, round(seconds * clips_module.SAMPLE_RATE)
    samples = 0.05 * rng.standard_normal(shape, np.float32)
    clips = [
        clips_module.Clip(
            f"clip_{i:03d}",
            row,
            " ".join(rng.choice(clips_module.WORDS, n_words)),
        )
        for i, row in enumerate(samples)
    ]
    return clips_module.write(clips, folder)


def source(given, folder):
    """Settings of train.py for the model and its data, the same in all modes."""
    if not given.whisper_hub.startswith(sources.RANDOM):
        return {
            "whisper_hub": os.path.abspath(given.whisper_hub),
            "data_folder": os.path.abspath(given.data_folder),
            "score_before_training": True,
        }
    size = given.whisper_hub[len(sources.RANDOM) :]
    manifests = noise(folder / "noise", given.clip_s, given.seed)
    return {
        "whisper_hub": random_model.build_folder(
            size, folder / size, given.seed
        ),
        "data_folder": manifests,
        "manifest_folder": manifests,
    }


def command_line(mode, given, common, folder):
    """train.py's, of one mode."""
    is_lora = mode.startswith("lora")
    trains_encoder = mode != "frozen_encoder"
    is_random = given.data_folder is None
    short = is_random and trains_encoder
    settings = {
        **common,
        **MODES[mode],
        "encoder_context": "true_length" if short else "full",
        "test_csv": "valid.csv",
        "output_folder": folder / mode,
        "number_of_epochs": given.steps,
        "batch_size": given.batch_size,
        "max_batch_length": 0,
        "grad_accumulation_factor": 1,
        "lr": given.lora_lr if is_lora else given.lr,
        "warmup_steps": max(1, given.steps // 10),
        "precision": given.precision,
        "eval_precision": given.precision,
        "device": given.device,
        "seed": given.seed,
    }
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    return ["train.py", str(HPARAMS), *overrides, *given.rest]


def ends_of(steps, rounds):
    """Steps after which each round ends: as many in each, or nearly."""
    timed = steps - WARM_UP
    return [WARM_UP + timed * (i + 1) // rounds for i in range(rounds)]


def measure(given, folder):
    """Mode to its row."""
    common = source(given, folder)
    ends = ends_of(given.steps, given.rounds)
    # On a GPU a mode has the memory for itself.
    at_once = given.device == "cpu"
    groups = [given.modes] if at_once else [[mode] for mode in given.modes]
    rows = {}
    for group in groups:
        runs = []
        for mode in group:
            argv = command_line(mode, given, common, folder)
            is_scored = given.data_folder is not None
            runs.append(Run(mode, argv, ends, is_scored, folder))
        for _ in ends:
            for run in runs:
                run.round()
        for run in runs:
            run.close()
            rows[run.mode] = run.result() | before(folder / run.mode)
            shutil.rmtree(folder / run.mode, ignore_errors=True)
    return rows


def before(output_folder):
    """Scores of the base, as a mode loads it, before its first step."""
    path = output_folder / "scores/valid.untouched.json"
    if not path.is_file():
        return {}
    scores = json.loads(path.read_text(encoding="utf-8"))
    return {f"{name}_before": scores[name] for name in ("loss", "CER")}


def add_ratios(rows):
    """Memory and weights of each mode, as shares of full fine-tuning's."""
    full = rows.get("full", {})
    for name in ("peak_mib", "weights_bytes", "checkpoint_bytes"):
        for row in rows.values():
            if name in full and name in row:
                row[f"{name}_vs_full"] = row[name] / full[name]


def by_computation(size):
    """Bytes of weights in a checkpoint of a size, from its shapes alone."""
    config = sources.load_config(f"random:{size}")
    options = {
        "precision": "bf16",
        "base_precision": "fp32",
        "gradient_checkpointing": False,
        "optimizer": "adamw",
        "device": "cpu",
    }
    n_full, n_lora = (
        memory.weights(
            config, memory.mode_of(config, adaptation, OURS, **options)
        ).n_trained
        for adaptation in ("full", "lora")
    )
    return {
        "full_bytes": 4 * n_full,
        "adapter_bytes": 4 * n_lora,
        "ratio": n_lora / n_full,
    }


def table(rows):
    """The rows as Markdown."""
    heads = ["mode", "trained weights", "peak memory", "clips/s"]
    heads += ["weights", "checkpoint", "loss (before)", "CER (before)"]
    lines = [heads, ["---"] * len(heads)]
    for mode, row in rows.items():
        if "failed" in row:
            why = row["failed"].replace("|", "/")
            lines.append([f"`{mode}`", why, *[""] * (len(heads) - 2)])
            continue
        rates = row["of_rounds"]
        spread = f"({min(rates):.3g}–{max(rates):.3g})"
        cells = [f"`{mode}`", f"{row['n_trained']:,}"]
        cells += [f"{row['peak_mib']:.0f} MiB"]
        cells += [f"{row['clips_per_s']:.3g} {spread}"]
        cells += [f"{row['weights_bytes'] / MB:.1f} MB"]
        cells += [f"{row['checkpoint_bytes'] / MB:.1f} MB"]
        if "CER" in row:
            cells += [f"{row['loss']:.3f} ({row['loss_before']:.3f})"]
            cells += [f"{row['CER']:.2f} % ({row['CER_before']:.2f})"]
        else:
            cells += ["", ""]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--whisper_hub", required=True, help="a folder, or random:SIZE")
    add("--data_folder", help="a corpus with manifest.tsv; not for random:SIZE")
    add("--modes", nargs="+", choices=MODES, default=[*MODES], metavar="MODE")
    add("--steps", type=int, default=60, help=f"{WARM_UP} are not timed")
    add("--rounds", type=int, default=3, help="in which modes take turns")
    add("--batch_size", type=int, help="16; 1 for random:SIZE")
    add("--clip_s", type=float, default=8.0, help="for random:SIZE")
    add("--lr", type=float, default=1e-3, help="of full and frozen_encoder")
    add("--lora_lr", type=float, default=5e-3)
    add("--precision", default="bf16", choices=("fp32", "bf16"))
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--seed", type=int, default=1986)
    add("--out", type=Path, default=Path(__file__).parent / "out")
    given, given.rest = parser.parse_known_args()
    is_random = given.whisper_hub.startswith(sources.RANDOM)
    if is_random == (given.data_folder is not None):
        parser.error("--data_folder belongs to a model that is not random:SIZE")
    if given.rounds < 1 or given.steps < WARM_UP + given.rounds:
        parser.error(f"--steps must be {WARM_UP} + --rounds or more")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no such device here")
    given.batch_size = given.batch_size or (1 if is_random else 16)
    return given


def main():
    """Measures, writes, prints."""
    given = arguments()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given, Path(folder))
    add_ratios(rows)
    result = {
        "modes": rows,
        "large_v3_by_computation": by_computation("large-v3"),
        "hardware": report.hardware(given.device),
        "load_before": load,
        "versions": {name: version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "settings": vars(given) | {"out": str(given.out)},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "adaptation.json"
    with files.replacing(path) as file:
        json.dump(result, file, indent=2)
    print(f"\n{table(rows)}\n\n{path}")


if __name__ == "__main__":
    main()
