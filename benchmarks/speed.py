#!/usr/bin/env python3
"""Speed, side by side: this recipe, SpeechBrain's, Transformers' trainer.

In: a model's size, a device, a number of clips.
Out: a table, and benchmarks/out/speed.json.

> make bench
> python benchmarks/speed.py --only hf true_length --minutes 4 \\
>     --model random:large-v3 --precision bf16 --device cuda \\
>     --clips 640 --clips_per_step 128 --micro_batch 32

The first runs every arm on this machine's CPU; the second some arms, under any
Python that has the packages. Each arm is a process of its own, that takes the
same clips in every round; arms that are compared take turns.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import clips as clips_module
import endings
from arms import RECIPE, Settings

sys.path.insert(0, str(RECIPE))
import report  # noqa: E402
from local import files, random_model  # noqa: E402

# Arms of a group take turns; each keeps its memory between its rounds.
GROUPS = [
    ["hf", "hf_checkpointing", "speechbrain", "true_length", "mixed"],
    ["full", "true_length_random", "true_length"],
    ["frozen", "frozen_cached"],
    ["decode_speechbrain", "decode"],
    ["decode_speechbrain_by_length", "decode_by_length"],
    ["e2e"],
]
# Slow to build on a CPU, and no faster there; or a lever of memory alone.
ON_A_GPU = ["compile", "checkpointing"]
ARMS = dict.fromkeys(sum([*GROUPS, ON_A_GPU], []))
# As in the Makefile: idle threads sleep, freed memory is kept. For all alike.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "500000000",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Arm:
    """A process of arms.py, built and warm."""

    def __init__(self, name, settings):
        self.name = name
        self.log = settings.folder / f"{name}.log"
        program = Path(__file__).with_name("arms.py")
        given = json.dumps(dataclasses.asdict(settings))
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, program, name, given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
        self._answer()

    def round(self):
        """The answer to one round; see arms.py."""
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        answer = self._answer()
        print(f"{self.name:>20} {answer['seconds']:8.2f} s", flush=True)
        return answer

    def close(self):
        """Ends the process, and with it its memory."""
        self.process.stdin.close()
        self.process.wait()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            end = self.log.read_text(encoding="utf-8").splitlines()[-20:]
            sys.exit("\n".join([*end, f"speed.py: the arm {self.name} failed"]))
        return json.loads(line)


def take_turns(names, settings, rounds, minutes):
    """Rounds of arms in turn.

    Arguments
    ---------
    names : list of str
    settings : arms.Settings
    rounds : int
    minutes : float or None
        Instead of so many rounds, as many as begin in this time.

    Returns
    -------
    dict
        Name to a list of answers, one a round.
    """
    arms = [Arm(name, settings) for name in names]
    answers = {name: [] for name in names}
    began = time.monotonic()
    n_done = 0
    while n_done < rounds or minutes:
        if minutes and time.monotonic() - began > 60 * minutes:
            break
        for arm in arms:
            answers[arm.name].append(arm.round())
        n_done += 1
    for arm in arms:
        arm.close()
    return answers


def measure(names, settings, rounds, minutes):
    """As ``take_turns``; on a GPU one after another, as its memory asks."""
    if settings.device == "cpu":
        return take_turns(names, settings, rounds, minutes)
    answers = {}
    for name in names:
        answers |= take_turns([name], settings, rounds, minutes)
    return answers


def prepare(settings, needs_endings):
    """Weights and clips of all arms, on disk; and the clips."""
    settings.folder.mkdir(parents=True, exist_ok=True)
    size = settings.model.removeprefix("random:")
    random_model.build_folder(size, settings.model_folder, settings.seed)
    clips = clips_module.make(settings.n_clips, settings.seed)
    clips_module.write(clips, settings.clips_folder)
    if needs_endings:
        endings.write(settings.model_folder, clips, settings.ending_folder)
    return clips


def arguments():
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=ARMS, metavar="ARM", help=", ".join(ARMS))
    add("--minutes", type=float, help="of an arm's rounds, with --only")
    add("--rounds", type=int, default=2)
    add("--model", default="random:tiny", help="random:SIZE")
    add("--precision", default="fp32", choices=("fp32", "bf16"))
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--clips", type=int, default=80, help="of a round")
    add("--clips_per_step", type=int, default=16, help="of an optimizer step")
    add("--micro_batch", type=int, default=4, help="clips of 30 s at once")
    add("--decode_batch", type=int, default=16)
    add("--max_new_tokens", type=int, default=200)
    add("--workers", type=int, default=1, help="that read audio, for e2e")
    add("--seed", type=int, default=1986)
    add("--out", default=Path(__file__).parent / "out", type=Path)
    given = parser.parse_args()
    if given.clips_per_step % given.micro_batch:
        parser.error("--clips_per_step must be a multiple of --micro_batch")
    if given.clips % given.clips_per_step:
        parser.error("--clips must be a multiple of --clips_per_step")
    return given


def main():
    """Prepares, measures, reports."""
    given = arguments()
    groups = [given.only] if given.only else GROUPS
    if given.device == "cuda" and not given.only:
        groups = [*GROUPS, ON_A_GPU]
    with tempfile.TemporaryDirectory() as folder:
        names = {field.name for field in dataclasses.fields(Settings)}
        values = {k: v for k, v in vars(given).items() if k in names}
        settings = Settings(
            **values, n_clips=given.clips, work_folder=str(folder)
        )
        decodes = any("decode" in name for name in sum(groups, []))
        clips = prepare(settings, decodes)
        answers = [
            measure(group, settings, given.rounds, given.minutes)
            for group in groups
        ]
        result = report.content(answers, settings, clips)
    name = "_".join(["speed", *(given.only or [])])
    path = given.out / f"{name}.json"
    given.out.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        json.dump(result, file, indent=2)
    print(f"\n{report.table(result)}\n\n{path}")


if __name__ == "__main__":
    main()
