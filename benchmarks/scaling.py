#!/usr/bin/env python3
"""Cost against size: preparation, and start-up with a finished manifest.

In: numbers of rows.
Out: a table, benchmarks/out/scaling.json and scaling.png.

> python benchmarks/scaling.py
> python benchmarks/scaling.py --rows 1000 10000

Each size is a user's corpus of that many rows, made in a temporary folder. The
rows share a few hundred short audio files, which therefore lie in the page
cache: what is measured is the work on a row, not a disk. Both programs run as a
user runs them, each in a process of its own (cold.py).
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import soundfile
from cold import RECIPE
from matplotlib.figure import Figure

sys.path.insert(0, str(RECIPE))
import report  # noqa: E402
from local import files, random_model  # noqa: E402

HPARAMS = RECIPE / "hparams/train_large_v3.yaml"
MODEL = "tiny"  # random weights, built beforehand
PROGRAMS = {"prepare": "preparation", "start": "start-up, manifest finished"}
PARTS = ("imports", "manifest", "model", "first_batch")  # of start, seconds
COLD = Path(__file__).with_name("cold.py")

SAMPLE_RATE = 16000  # Hz
N_AUDIO = 300
SHORTEST_S, LONGEST_S = 0.5, 3.0
N_SPEAKERS = 2000
N_HELD_OUT = 100  # rows of valid, and of test
N_JOINED = 4  # sentences of a text: of 600 k texts nine in ten differ
SENTENCES = """
네, 안녕하세요./무엇을 도와드릴까요?/오늘 날씨가 참 좋네요./주문한 게 아직 안 왔어요.
성함이 어떻게 되세요?/잠시만 기다려 주세요./내일 오후 3시까지요./그건 좀 어렵겠는데요.
아, 정말요?/저도 그렇게 생각해요./버스를 놓쳐서 늦었어요./점심은 뭐 먹을까?
회의는 10분 뒤에 시작합니다./비밀번호를 다시 입력해 주세요./어, 잘 안 들리는데요.
주말에 시간 있어?/할머니 댁에 다녀왔어요./배송비는 2,500원입니다./그럼 그렇게 할게요.
영화가 생각보다 길더라고요./지하철이 더 빠르지 않을까?/문의해 주셔서 감사합니다.
카드로 결제하셨나요?/저희 쪽에서 확인해 볼게요./음, 글쎄요./아이가 벌써 학교에 가요.
창문 좀 닫아 줄래?/이 근처에 약국이 있나요?/환불은 3일쯤 걸립니다./너무 맵지 않게 해 주세요.
다음 달에 이사해요./책을 두 권 빌렸습니다./전화번호가 바뀌었어요./커피 한 잔 하실래요?
길이 많이 막히네요./사진이 아주 잘 나왔다./예약을 취소하고 싶어요./그 얘기는 처음 들어요.
감기 조심하세요./열쇠를 어디 뒀더라?
"""


def make_audio(corpus, seed):
    """Writes ``N_AUDIO`` files of noise, FLAC and WAV in turn; their paths."""
    rng = np.random.default_rng(seed)
    (corpus / "audio").mkdir(parents=True)
    paths = []
    for i in range(N_AUDIO):
        n_samples = int(rng.uniform(SHORTEST_S, LONGEST_S) * SAMPLE_RATE)
        noise = 0.1 * rng.standard_normal(n_samples, np.float32)
        paths.append(f"audio/{i:03d}.{('flac', 'wav')[i % 2]}")
        soundfile.write(corpus / paths[-1], noise, SAMPLE_RATE)
    return paths


def make_list(corpus, audio, n_rows):
    """Writes ``manifest.tsv``: so many rows, all to be kept."""
    rng = random.Random(n_rows)
    sentences = SENTENCES.strip().replace("\n", "/").split("/")
    with open(corpus / "manifest.tsv", "w", encoding="utf-8") as file:
        file.write("id\tpath\ttext\tspeaker\tsplit\n")
        for i in range(n_rows):
            split = ("valid", "test", "train")[min(i // N_HELD_OUT, 2)]
            label = " ".join(rng.choices(sentences, k=N_JOINED))
            speaker = f"speaker{rng.randrange(N_SPEAKERS)}"
            path = rng.choice(audio)
            cells = (f"clip_{i:07d}", path, label, speaker, split)
            file.write("\t".join(cells) + "\n")


def cold_start(program, *arguments):
    """What cold.py answers; ends with what it printed where it fails."""
    process = subprocess.run(
        [sys.executable, COLD, program, str(time.monotonic()), *arguments],
        cwd=RECIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        sys.exit(f"{process.stderr}\nscaling.py: {program} failed")
    return json.loads(process.stdout.splitlines()[-1])


def measure(folder, audio, model, n_rows):
    """Preparation and start-up of one size.

    Returns
    -------
    dict
        Of ``prepare`` and ``start``: seconds, peak memory of the process in
        MiB, and what else cold.py tells.
    """
    corpus = folder / "corpus"
    make_list(corpus, audio, n_rows)
    manifests = folder / f"manifests_{n_rows}"
    prepared = cold_start(
        *("prepare", "manifest", corpus),
        *("--out", manifests, "--whisper_hub", model),
    )
    prepared["clips_per_s"] = n_rows / prepared["seconds"]
    n_cores = len(os.sched_getaffinity(0))
    prepared["clips_per_s_and_core"] = prepared["clips_per_s"] / n_cores
    settings = {
        "whisper_hub": model,
        "data_folder": corpus,
        "manifest_folder": manifests,
        "output_folder": folder / f"run_{n_rows}",
        "score_before_training": False,
        "precision": "fp32",
        "device": "cpu",
    }
    overrides = [f"--{name}={value}" for name, value in settings.items()]
    return {
        "prepare": prepared,
        "start": cold_start("train", HPARAMS, *overrides),
    }


def growth(sizes, program):
    """Seconds for each thousand rows more, from size to size.

    They are alike where cost grows linearly; what a program costs without any
    row does not count.
    """
    points = [(n, size[program]["seconds"]) for n, size in sizes.items()]
    return [
        1000 * (seconds - before) / (n_rows - n_before)
        for (n_before, before), (n_rows, seconds) in pairwise(points)
    ]


def table(result):
    """The result as text: a line for each size, then each growth."""
    heads = ["rows", "prepare s", "clips/s", "a core", "peak MiB"]
    heads += ["start s", *PARTS, "peak MiB", "all MiB"]
    lines = [heads]
    for n_rows, size in result["sizes"].items():
        prepared, start = size["prepare"], size["start"]
        figures = [prepared["seconds"], prepared["clips_per_s"]]
        figures += [prepared["clips_per_s_and_core"], prepared["peak_mib"]]
        figures += [start["seconds"]]
        figures += [start["parts_s"][part] for part in PARTS]
        figures += [start["peak_mib"], start["with_workers_mib"]]
        cells = (f"{f:.1f}" if f < 100 else f"{f:.0f}" for f in figures)
        lines.append([str(n_rows), *cells])
    text = ["".join(f"{cell:>12}" for cell in line) for line in lines]
    for program in PROGRAMS:
        added = ", ".join(f"{s:.4f}" for s in result["growth"][program])
        text.append(f"{program}: {added} s for each 1000 rows more")
    return "\n".join(text)


def plot(sizes, path):
    """Seconds against rows, on logarithmic axes; a slope of 1 is linear."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    n_rows = list(sizes)
    for program, marker in zip(PROGRAMS, "os"):
        seconds = [size[program]["seconds"] for size in sizes.values()]
        axes.loglog(n_rows, seconds, marker=marker, label=PROGRAMS[program])
    most = sizes[n_rows[-1]]["prepare"]["seconds"]
    slope = [most * n / n_rows[-1] for n in n_rows]
    axes.loglog(n_rows, slope, "--", color="gray", label="slope 1")
    axes.set(xlabel="rows", ylabel="seconds")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    temporary = path.with_name(f"{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=150)
    os.replace(temporary, path)


def main():
    """Measures each size, then writes and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[10_000, 100_000, 600_000])
    add("--seed", type=int, default=1986)
    add("--out", type=Path, default=Path(__file__).parent / "out")
    given = parser.parse_args()
    if min(given.rows) <= 2 * N_HELD_OUT:
        parser.error(f"--rows must be above {2 * N_HELD_OUT}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        audio = make_audio(folder / "corpus", given.seed)
        model = random_model.build_folder(MODEL, folder / MODEL, given.seed)
        sizes = {}
        for n_rows in sorted(set(given.rows)):
            sizes[n_rows] = measure(folder, audio, model, n_rows)
            print(f"{n_rows} rows: {json.dumps(sizes[n_rows])}", flush=True)
    result = {
        "sizes": sizes,
        "growth": {program: growth(sizes, program) for program in PROGRAMS},
        "hardware": report.hardware("cpu"),
        "versions": {name: version(name) for name in report.PACKAGES}
        | {"python": platform.python_version()},
    }
    given.out.mkdir(parents=True, exist_ok=True)
    with files.replacing(given.out / "scaling.json") as file:
        json.dump(result, file, indent=2)
    plot(sizes, given.out / "scaling.png")
    print(f"\n{table(result)}\n\n{given.out / 'scaling.json'}")


if __name__ == "__main__":
    main()
