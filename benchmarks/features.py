"""Feature shards against log-mels on the fly: speed, and space on the disk.

In: a number of clips, a model source.
Out: ``out/features.json``: clips/s of making shards, and of reading batches.

    python benchmarks/features.py --clips 200 --model random:large-v3
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import clips
import torch

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes/Korean/ASR/whisper"
BATCH_SIZE = 16
SEED = 1986


def make(folder, whisper_hub):
    """Seconds of making shards in this process, on one core."""
    from local import feature_chunk, feature_shards

    feature_chunk.source(whisper_hub)  # once a process, however many clips
    manifests = folder / "flac"
    began = time.perf_counter()
    feature_shards.make(manifests, folder / "shards", whisper_hub)
    return time.perf_counter() - began


def read_shard(row, shards):
    return shards.mel(row["index"])


def decode(row):
    from local import audio

    return torch.from_numpy(audio.read(row["wav"]))


def decode_and_mel(row, filters, max_samples):
    from local import features

    return features.of_clip(decode(row), filters, max_samples).T.half()


def seconds_an_epoch(rows, read, n_workers):
    """A data loader's batches of the same clips; the second of two passes."""
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.utils.data_pipeline import DynamicItem

    rows = {key: {"row": row} for key, row in rows.items()}
    items = [DynamicItem(["row"], read, ["sig"])]
    loader = torch.utils.data.DataLoader(
        DynamicItemDataset(rows, items, ["id", "sig"]),
        batch_size=BATCH_SIZE,
        num_workers=n_workers,
        collate_fn=PaddedBatch,
    )
    for _ in range(2):
        began = time.perf_counter()
        assert sum(len(batch.id) for batch in loader) == len(rows)
    return time.perf_counter() - began


def figures(folder, whisper_hub, n_clips):
    """All of them, as plain values."""
    from local import feature_chunk, features, manifest

    made = clips.make(n_clips, SEED)
    seconds = sum(clip.duration for clip in made)
    clips.write(made, folder / "flac")
    made_s = make(folder, whisper_hub)
    tokenizer, extractor, filters = feature_chunk.source(whisper_hub)
    shards = features.load(
        folder / "shards",
        "train",
        folder / "flac/train.csv",
        "",
        tokenizer,
        extractor,
    )
    rows = manifest.read(folder / "flac/train.csv", "")
    on_the_fly = partial(
        decode_and_mel, filters=filters, max_samples=extractor.n_samples
    )
    arms = {
        "shards": (shards.rows, partial(read_shard, shards=shards)),
        "decode": (rows, decode),
        "decode_and_mel": (rows, on_the_fly),
    }
    clips_per_s = {
        f"{name}_{n}_workers": n_clips / seconds_an_epoch(*arm, n)
        for n in (0, 1)
        for name, arm in arms.items()
    }
    found = {"mean_s": seconds / n_clips, "n_mels": extractor.feature_size}
    found["made_clips_per_s_and_core"] = 2 * n_clips / made_s  # both splits
    found["read_clips_per_s"] = clips_per_s
    found["bytes_per_s_of_audio"] = {
        "shards": _n_bytes(folder / "shards/train") / seconds,
        "flac": sum(p.stat().st_size for p in folder.glob("flac/*.flac"))
        / seconds,
    }
    return found


def _n_bytes(folder):
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--model", default="random:large-v3")
    arguments = parser.parse_args()
    sys.path.insert(0, str(RECIPE))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = figures(Path(folder), arguments.model, arguments.clips)
    text = json.dumps({**vars(arguments), **found}, indent=1)
    path = HERE / "out/features.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
