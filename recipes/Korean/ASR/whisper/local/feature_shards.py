"""Manifests to shards of log-mels and token ids, in parallel processes.

In: a folder with train.csv and valid.csv; a model source.
Out: DIR/train/chunk_00000 …, DIR/valid/chunk_00000 …, each a folder that
``datasets.load_from_disk`` opens; DIR/features_report.json.
"""

# A chunk tells what it was made of, so that a second start knows what is done,
# and the jobs of an array need no other word between them.

import argparse
import errno
import json
import os
import re
import shutil
import threading
import uuid
from collections import Counter
from concurrent.futures import (
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
)
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path

import torch
from tqdm import tqdm

from local import (
    dataio,
    feature_chunk,
    features,
    files,
    prepare_report,
    user_errors,
)
from local.cache_files import gb
from local.encoder_cache import existing

SPLITS = ("train", "valid")
REPORT = "features_report.json"
LOCKS = "locks"
CLIPS_PER_CHUNK = 1000


def make(
    manifest_folder,
    out,
    whisper_hub,
    data_folder="",
    processes=1,
    shard=(1, 1),
    clips_per_chunk=CLIPS_PER_CHUNK,
):
    """Makes what is missing of a folder of shards.

    Arguments
    ---------
    manifest_folder : str or Path
        Of train.csv and valid.csv.
    out : str or Path
        Of the shards.
    whisper_hub : str
        Whose mels and tokens they are; its weights are not needed.
    data_folder : str
        What ``$data_root`` stands for in the manifests.
    processes : int
        Each holds a chunk in memory, about twice.
    shard : tuple of int
        (i, n): the i-th of n jobs that share the folder, from 1 on.
    clips_per_chunk : int

    Returns
    -------
    dict
        The report, of all jobs so far.

    Raises
    ------
    FileNotFoundError, ValueError
        A manifest cannot be used; a chunk is there and of other data; the
        disk is too small; another process makes the same shard.
    OSError
        A chunk cannot be written; finished ones stay, and count next time.
    """
    out = Path(out)
    _require_outside(out, data_folder)
    chunks = _planned(
        manifest_folder, out, whisper_hub, data_folder, clips_per_chunk
    )
    _require_space(out, [c for c in chunks if not c.path.exists()])
    i, n = shard
    own = [chunk for chunk in chunks if chunk.number % n == i - 1]
    with _claimed(out, i, n):
        _require_alone(out, n)
        _require_same([chunk for chunk in own if chunk.path.exists()])
        missing = [chunk for chunk in own if not chunk.path.exists()]
        _make_all(missing, processes)
    return _report(out, whisper_hub, chunks)


def _claimed(out, i, n):
    """The lock of a shard; goes with the process, or when it is closed."""
    try:
        return files.lock(out / LOCKS / f"{i}_of_{n}")
    except ValueError as error:
        raise ValueError(
            f"--shard {i}/{n} of {out} is being made already: {error}"
        ) from None


def _require_alone(out, n):
    """Jobs of another number would make some of the same chunks.

    Asked after this job has its own lock: of two that start together, one
    sees the other at least.
    """
    for folder in sorted((out / LOCKS).glob("*_of_*")):
        i, others = folder.name.split("_of_")
        if others != str(n):
            try:
                _claimed(out, i, others).close()
            except ValueError as error:
                raise ValueError(
                    f"{error}; a job of --shard …/{n} would make some of the "
                    "same chunks: let those end first, or keep their number"
                ) from None


def _planned(manifest_folder, out, whisper_hub, data_folder, n_clips):
    """All chunks of both splits, whoever makes them."""
    tokenizer, extractor, _ = feature_chunk.source(whisper_hub)
    made_by = features.identity(tokenizer, extractor)
    planned = []
    for split in SPLITS:
        path = Path(manifest_folder) / f"{split}.csv"
        if not path.is_file():
            raise FileNotFoundError(
                f"no {path}; give the folder of manifests that python -m "
                "local.prepare wrote, or <output_folder>/manifests of a run"
            )
        # Durations and labels are looked at clip by clip, and reported.
        data_root = data_folder or prepare_report.data_folder(path)
        rows = dataio.load_split(path, data_root, float("inf"), _fits)
        n_chunks = -(-len(rows) // n_clips)
        items = iter(rows.items())
        planned += [
            feature_chunk.Chunk(
                out / split / f"chunk_{number:05d}",
                number,
                n_chunks,
                dict(islice(items, n_clips)),
                str(data_root),
                whisper_hub,
                made_by,
            )
            for number in range(n_chunks)
        ]
    return planned


def _fits(text):
    del text
    return True


def _require_outside(out, data_folder):
    if data_folder and out.resolve().is_relative_to(
        Path(data_folder).resolve()
    ):
        raise ValueError(
            f"the shards would go to {out}, inside the corpus folder "
            f"{data_folder}, into which nothing is written; choose another "
            "--out"
        )


def _require_space(out, chunks):
    """Of all jobs: an array that shares a disk fills it together."""
    n_bytes = sum(chunk.n_bytes for chunk in chunks)
    free = shutil.disk_usage(existing(out)).free
    tqdm.write(
        f"{len(chunks)} chunks still to be made take about {gb(n_bytes)} in "
        f"{out}, where {gb(free)} are free"
    )
    if n_bytes > free:
        raise ValueError(
            f"the chunks still to be made take about {gb(n_bytes)} in {out}, "
            f"where {gb(free)} are free; give --out on another disk, or fewer "
            "clips"
        )


def _require_same(chunks):
    """Finished chunks of other data are no work of ours to throw away."""
    with ThreadPoolExecutor() as pool:  # a stat for each audio file
        problems = [p for p in pool.map(_difference, chunks) if p]
    if problems:
        raise ValueError(
            "chunks are there that were made of other data; remove those to "
            "have them made again, or give another --out:\n  - "
            + "\n  - ".join(problems)
        )


def _difference(chunk):
    about = features.told(chunk.path) or {}
    wanted = chunk.origin
    different = [name for name in wanted if about.get(name) != wanted[name]]
    return f"{chunk.path}: other {', '.join(different)}" if different else ""


def _make_all(chunks, processes):
    n_clips = sum(len(chunk.rows) for chunk in chunks)
    with tqdm(total=n_clips, unit=" clips", dynamic_ncols=True) as bar:
        for made in _made(chunks, processes):
            bar.update(made)


def _made(chunks, processes):
    """Clips looked at, chunk by chunk, in the order they are finished."""
    if processes == 1:
        yield from map(feature_chunk.make, chunks)
        return
    pool = ProcessPoolExecutor(
        min(processes, max(len(chunks), 1)),
        mp_context=get_context("spawn"),
        initializer=_start_process,
    )
    try:
        with pool:
            jobs = [pool.submit(feature_chunk.make, chunk) for chunk in chunks]
            try:
                for job in as_completed(jobs):
                    yield job.result()
            finally:  # after a full disk, nothing more is begun
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool as error:
        raise OSError(
            errno.ENOMEM,
            "a process died, most likely for want of memory; lower "
            "--processes or --clips_per_chunk. Finished chunks stay",
        ) from error


def _start_process():
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    """One that is killed would leave processes that wait for ever."""
    parent_process().join()
    os._exit(1)


def _report(out, whisper_hub, chunks):
    """Of all that is there so far, whichever job has made it."""
    report = {"whisper_hub": whisper_hub, "splits": {}, "left_out": {}}
    report["left_out_clips"] = left_out = []
    for split in SPLITS:
        paths = [c.path for c in chunks if c.path.parent.name == split]
        done = [told for told in map(features.told, paths) if told]
        report["splits"][split] = {
            "chunks": len(paths),
            "finished_chunks": len(done),
            "clips": sum(told["clips"] for told in done),
            "hours": sum(told["seconds"] for told in done) / 3600,
        }
        left_out += [
            {"split": split, **clip}
            for told in done
            for clip in told["left_out"]
        ]
    report["left_out"] = dict(Counter(clip["reason"] for clip in left_out))
    # Two jobs may come to their end together: each has a name of its own.
    own = out / f"{REPORT}.{uuid.uuid4().hex[:8]}"
    with files.replacing(own) as file:
        json.dump(report, file, ensure_ascii=False, indent=1)
    own.replace(out / REPORT)
    return report


def summary(report):
    """What a person wants to read of a report, in a few lines."""
    lines = [
        "{}: {clips} clips, {hours:.2f} h, {finished_chunks} of {chunks} "
        "chunks".format(split, **told)
        for split, told in report["splits"].items()
    ]
    for reason, n in report["left_out"].items():
        lines.append(f"left out, {reason}: {n}")
    return "\n".join(lines)


def _shard(word):
    """ "3/8" to (3, 8)."""
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", word)
    i, n = (int(part) for part in found.groups()) if found else (0, 0)
    if not 1 <= i <= n:
        raise argparse.ArgumentTypeError(
            f"{word} is no shard; give 1/8, 2/8, … 8/8"
        )
    return i, n


def _count(word):
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is below 1")
    return number


def main():
    """The command line of ``python -m local.features``."""
    parser = argparse.ArgumentParser(
        prog="python -m local.features", description=__doc__
    )
    parser.add_argument("manifest_folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--whisper_hub",
        required=True,
        help="whose mels and tokens: a hub name, a local folder, random:SIZE",
    )
    parser.add_argument(
        "--data_folder",
        default="",
        help="what $data_root stands for; else as prepared",
    )
    parser.add_argument("--processes", type=_count, default=os.cpu_count())
    parser.add_argument(
        "--shard",
        type=_shard,
        default=(1, 1),
        help="i/n: the i-th of n jobs that share the folder, from 1 on",
    )
    parser.add_argument(
        "--clips_per_chunk",
        type=_count,
        default=CLIPS_PER_CHUNK,
        help="fewer take less memory: a process holds a chunk twice",
    )
    with user_errors.told("local.features"):
        report = make(**vars(parser.parse_args()))
    print(summary(report))
