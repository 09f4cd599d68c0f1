"""Feature shards: made, made again, damaged, read; against the waveform."""

import errno
import json
import math
import pickle
import shutil

import pytest
import soundfile
import torch
from conftest import logged, noise, write_audio
from datasets import load_from_disk
from local import (
    audio,
    dataio,
    feature_chunk,
    feature_shards,
    features,
    model,
    sources,
)
from torch.nn import functional as F

import speechbrain as sb

HUB = "random:quickstart"  # 80 mels, a context of 5 s
EXTRACTOR = sources.load_extractor(HUB)
FILTERS = features.filters(EXTRACTOR)
FULL = 80000  # samples


# Log-mels


@pytest.mark.parametrize("n_samples", [1, 160, 7999, 16000, 16040, 79700, FULL])
@pytest.mark.parametrize("context", ["true_length", "full"])
@pytest.mark.parametrize("loudness", [0.0, 1e-4, 0.5])
def test_the_last_frame_stands_for_all_silence(n_samples, context, loudness):
    wav = noise(5, loudness=loudness)[:n_samples]
    steps = math.ceil((n_samples + 42) / 5120)
    n_wanted = min(5120 * steps, FULL) if context == "true_length" else FULL
    padded = F.pad(wav, (0, n_wanted - n_samples))
    wanted = features.log_mel(padded[None], FILTERS)
    mel = features.of_clip(wav, FILTERS, FULL)
    assert mel.shape == (80, min(-(-(n_samples + 200) // 160) + 1, 500))
    got = features.at_length(mel.T[None], n_wanted)
    assert got.shape == wanted.shape
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=0)
    half = features.at_length(mel.half().T[None], n_wanted)
    torch.testing.assert_close(half, wanted, atol=1e-3, rtol=0)


def test_a_batch_is_padded_with_each_last_frame():
    mels = [torch.randn(n, 3).half() for n in (2, 5, 1)]
    batch = sb.dataio.batch.PaddedBatch([{"mel": mel} for mel in mels])
    got = features.repeat_last(*batch.mel)
    assert got.shape == (3, 5, 3) and got.dtype == torch.float16
    for padded, mel in zip(got, mels):
        assert torch.equal(padded[: len(mel)], mel)
        assert (padded[len(mel) :] == mel[-1]).all()


def test_what_a_mel_needs_is_no_more_than_its_clip_is_given():
    for n_samples in range(4000, 4400):
        context = -(-(n_samples + 32) // 160) * 160  # the shortest there is
        n_frames = features.n_frames(n_samples)
        assert n_samples - 160 <= features.least_samples(n_frames) <= context


@pytest.mark.parametrize("hub, n_mels", [(HUB, 80), ("random:large-v3", 128)])
def test_mels_of_a_random_source(hub, n_mels):
    extractor = sources.load_extractor(hub)
    mel = features.of_clip(noise(1), features.filters(extractor), FULL)
    assert mel.shape == (n_mels, 103)


@pytest.mark.parametrize("n_text, is_cut", [(443, False), (444, True)])
def test_labels_end_with_the_end_token(tokenizer, n_text, is_cut):
    ids, cut = dataio.labels([7] * n_text, tokenizer)
    assert cut == is_cut and len(ids) == 448
    assert ids == [*tokenizer.prefix_tokens, *[7] * 443, 50257]


# Shards


def row(path, seconds, text="안녕하세요", **more):
    cells = {"ID": path.stem, "duration": seconds, "wav": path}
    return {**cells, "spk_id": "s1", "wrd": text, "category": "D01", **more}


def write_manifests(folder, **splits):
    folder.mkdir(exist_ok=True)
    for name, rows in splits.items():
        lines = [",".join(map(str, r.values())) for r in rows]
        text = "\n".join([",".join(rows[0]), *lines])
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Rows of five short clips; the second is of 8 kHz, the last a cut."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [
        row(
            write_audio(folder / f"c{i}.wav", 0.3 + i / 7, 8000 * (2 - i % 2)),
            round(0.3 + i / 7, 3),
            f"문장 {i}",
            start="",
            stop="",
        )
        for i in range(5)
    ]
    rows[4] |= {"start": 0.1, "stop": 0.5, "duration": 0.4}
    return rows


def make(tmp_path, rows, **options):
    manifests = write_manifests(
        tmp_path / "manifests", train=rows, valid=rows[:1]
    )
    options = {"clips_per_chunk": 2, **options}
    return feature_shards.make(manifests, tmp_path / "out", HUB, **options)


def load(tmp_path, split="train", extractor=EXTRACTOR, manifests="manifests"):
    tokenizer, _, _ = feature_chunk.source(HUB)
    path = tmp_path / manifests / f"{split}.csv"
    return features.load(
        tmp_path / "out", split, path, "", tokenizer, extractor
    )


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A folder of shards, to be copied."""
    tmp_path = tmp_path_factory.mktemp("finished")
    make(tmp_path, corpus)
    return tmp_path


def test_shards_of_other_manifests_are_refused(copied, corpus):
    assert len(load(copied).rows) == 5
    write_manifests(copied / "held_out", train=corpus[1:], valid=corpus[:1])
    with pytest.raises(ValueError, match="1 clips or labels are not those"):
        load(copied, manifests="held_out")
    relabelled = [corpus[0] | {"wrd": "다른 문장"}, *corpus[1:]]
    write_manifests(copied / "changed", train=relabelled, valid=corpus[:1])
    with pytest.raises(ValueError, match="1 clips or .*from this run's man"):
        load(copied, manifests="changed")


def test_clips_that_shards_lack_are_told(copied, corpus, monkeypatch):
    told = logged(monkeypatch, features.logger, "warning")
    more = [*corpus, corpus[0] | {"ID": "one more"}]
    write_manifests(copied / "more", train=more, valid=corpus[:1])
    assert len(load(copied, manifests="more").rows) == 5
    assert "1 clips of the run's manifests are not in it" in told[0]


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copy")


def files_of(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("chunk_*/*")}


def test_shards_hold_what_a_run_reads(finished, corpus, tokenizer):
    shards = load(finished)
    assert list(shards.rows) == [f"c{i}" for i in range(5)]
    for i, told in enumerate(shards.rows.values()):
        assert told == {
            "duration": corpus[i]["duration"],
            "wrd": f"문장 {i}",
            "spk_id": "s1",
            "category": "D01",
            "corpus": "",
            "index": i,
        }
        cut = (0.1, 0.5) if i == 4 else (None, None)
        samples = torch.from_numpy(audio.read(corpus[i]["wav"], *cut))
        wanted = features.of_clip(samples, FILTERS, FULL).half().T
        assert torch.equal(shards.mel(i), wanted)
        bos, eos = dataio.token_ids(told["wrd"], tokenizer)
        got = shards.token_ids(i)
        assert torch.equal(got[0], bos) and torch.equal(got[1], eos)
        assert got[0].dtype == bos.dtype
    assert list(load(finished, "valid").rows) == ["c0"]


def test_a_chunk_is_a_folder_of_datasets(finished):
    chunk = load_from_disk(str(finished / "out/train/chunk_00001"))
    assert chunk["id"] == ["c2", "c3"]
    assert chunk.features["input_features"].feature.feature.dtype == "float16"
    mel = torch.tensor(chunk[1]["input_features"])
    assert mel.shape == (80, features.n_frames(round(16000 * (0.3 + 3 / 7))))
    assert chunk[0]["labels"][-1] == 50257


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_read_shards(finished, method):
    shards = load(finished)
    assert len(pickle.dumps(shards.read)) < 10_000  # no mel travels
    data = sb.dataio.dataset.DynamicItemDataset(
        shards.rows,
        [shards.read, shards.tokenize],
        ["id", "sig", "failed", "tokens_bos", "tokens_eos"],
    )
    if method == "spawn":  # without starting one, which takes seconds
        data = pickle.loads(pickle.dumps(data))
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=5,
        num_workers=1 if method == "fork" else 0,
        multiprocessing_context="fork" if method == "fork" else None,
        collate_fn=sb.dataio.batch.PaddedBatch,
    )
    (batch,) = loader
    mels = features.heard(*batch.sig)["mel"]
    for i in range(5):
        mel = shards.mel(i)
        assert torch.equal(mels[i, : len(mel)], mel)
        assert (mels[i, len(mel) :] == mel[-1]).all()
    assert not any(batch.failed)


@pytest.mark.parametrize("adaptation", model.ADAPTATIONS)
@pytest.mark.parametrize("n_samples", [15360, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_loss_is_that_of_the_waveform(build, adaptation, n_samples, dtype):
    whisper = build(adaptation).eval()
    wavs = [noise(0.9), noise(0.5, seed=1, loudness=0.02)]
    mels = [features.of_clip(w, FILTERS, FULL).T.to(dtype) for w in wavs]
    batch = sb.dataio.batch.PaddedBatch([{"sig": mel} for mel in mels])
    heard = {**features.heard(*batch.sig), "n_samples": n_samples}
    batch = sb.dataio.batch.PaddedBatch([{"sig": wav} for wav in wavs])
    tokens = torch.tensor([[50258, 50264, 50359, 50363, 1, 20]] * 2)

    def loss(**options):
        states, logits = whisper(tokens, 3, **options)
        targets = torch.tensor([[1, 20, 50257]] * 2)
        return states, F.cross_entropy(logits.transpose(1, 2), targets)

    with torch.no_grad():
        options = {**features.heard(*batch.sig), "n_samples": n_samples}
        states, wanted = loss(**options)
        got_states, got = loss(**heard)
    assert states.shape == got_states.shape
    bound = 1e-3 if dtype == torch.float16 else 1e-5
    assert abs(got - wanted) / wanted < bound
    torch.testing.assert_close(got_states, states, atol=30 * bound, rtol=0)


# Clips that are left out


def test_what_cannot_be_used_is_told(tmp_path, corpus):
    def damaged(name, seconds=0.0):
        path = write_audio(tmp_path / f"{name}.wav", 1.0)
        if seconds:
            soundfile.write(path, [0.1] * round(16000 * seconds), 16000)
        return row(path, 1.0, start="", stop="")

    rows = [
        corpus[0],
        {**damaged("gone"), "wav": tmp_path / "nowhere.wav"},
        damaged("torn"),
        damaged("long", 5.01),  # though its manifest says 1 s
        {**damaged("wordy"), "wrd": "뷁" * 200},
        damaged("full", 5.0),
    ]
    (tmp_path / "torn.wav").write_bytes(b"RIFF")
    report = make(tmp_path, rows)
    reasons = {c["id"]: c["reason"] for c in report["left_out_clips"]}
    assert reasons == {
        "gone": "missing_audio",
        "torn": "unreadable_audio",
        "long": "too_long",
        "wordy": "label_too_long",
    }
    path = tmp_path / "out/features_report.json"
    assert json.loads(path.read_text()) == report
    assert set(report["left_out"].values()) == {1}
    assert report["splits"]["train"]["clips"] == 2
    shards = load(tmp_path)
    assert list(shards.rows) == ["c0", "full"]
    assert shards.mel(1).shape == (500, 80)
    # As it is, not as its manifest says: a context would cut it.
    assert shards.rows["full"]["duration"] == 5.0
    assert "left out, too_long: 1" in feature_shards.summary(report)


def test_a_split_of_which_no_clip_is_left(tmp_path, corpus):
    make(tmp_path, [{**corpus[0], "wrd": "뷁" * 200}])
    with pytest.raises(ValueError, match="no clip is left"):
        load(tmp_path)


# A second start


def test_finished_chunks_are_not_made_again(copied, corpus):
    before = files_of(copied)
    shutil.rmtree(copied / "out/train/chunk_00001")
    (copied / "out/train/making_chunk_00001_0000").mkdir()
    make(copied, corpus)
    after = files_of(copied)
    assert after.keys() == before.keys()
    changed = {p.parent.name for p in before if after[p] != before[p]}
    assert changed == {"chunk_00001"}
    assert not list(copied.glob("out/train/making_*"))


@pytest.mark.parametrize(
    "change, options, told",
    [
        ({"wrd": "다른"}, {}, "chunk_00001: other rows"),
        ({"category": "D02"}, {}, "chunk_00001: other rows"),
        ({}, {"clips_per_chunk": 1}, "chunk_00000: other n_chunks, rows"),
    ],
)
def test_chunks_of_other_data_are_refused(
    copied, corpus, change, options, told
):
    before = files_of(copied)
    rows = [*corpus[:2], {**corpus[2], **change}, *corpus[3:]]
    with pytest.raises(ValueError, match=f"remove those.*\n.*{told}"):
        make(copied, rows, **options)
    assert files_of(copied) == before


def test_a_file_of_another_size_is_other_data(tmp_path, corpus):
    path = write_audio(tmp_path / "grown.wav", 0.5)
    rows = [row(path, 0.5, start="", stop="")]
    make(tmp_path, rows)
    write_audio(path, 0.6)
    with pytest.raises(ValueError, match="chunk_00000: other rows"):
        make(tmp_path, rows)


def test_a_corpus_may_move(tmp_path):
    for place in ("a", "b"):
        write_audio(tmp_path / place / "c.wav", 0.5)
    path = tmp_path / "c.wav"
    rows = [row(path, 0.5, start="", stop="") | {"wav": "$data_root/c.wav"}]
    make(tmp_path, rows, data_folder=tmp_path / "a")
    before = files_of(tmp_path)
    make(tmp_path, rows, data_folder=tmp_path / "b")
    assert files_of(tmp_path) == before


def test_jobs_of_an_array_share_a_folder(tmp_path, finished, corpus):
    for i in (2, 3):
        report = make(tmp_path, corpus, shard=(i, 3))
    assert report["splits"]["train"]["finished_chunks"] == 2
    with pytest.raises(ValueError, match="1 of 3 chunks are missing: 0"):
        load(tmp_path)
    make(tmp_path, corpus, shard=(1, 3))
    together, alone = load(tmp_path), load(finished)
    assert together.rows == alone.rows
    assert all(torch.equal(together.mel(i), alone.mel(i)) for i in range(5))


@pytest.mark.parametrize("word", ["0/3", "4/3", "1", "a/b", "-1/3", "1/0"])
def test_a_shard_that_is_none(word, capsys, monkeypatch):
    command = ["x", "m", "--out", "o", "--whisper_hub", HUB, "--shard", word]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit):
        feature_shards.main()
    assert "--shard" in capsys.readouterr().err


# A disk that is full, a folder that is wrong


def test_a_disk_too_small_is_told_before(tmp_path, corpus, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=40_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match="take about .* are free; give --out"):
        make(tmp_path, corpus)
    assert not (tmp_path / "out").exists()


def test_the_estimate_is_near(finished, corpus):
    tokenizer, extractor, _ = feature_chunk.source(HUB)
    rows = {c["ID"]: {**c, "wav": str(c["wav"])} for c in corpus[:2]}
    made_by = features.identity(tokenizer, extractor)
    folder = finished / "out/train/chunk_00000"
    chunk = feature_chunk.Chunk(folder, 0, 3, rows, "", HUB, made_by)
    n_bytes = sum(p.stat().st_size for p in folder.glob("*.arrow"))
    assert 0.7 * n_bytes < chunk.n_bytes < 1.3 * n_bytes


def test_a_disk_that_fills_up_leaves_no_half_chunk(
    tmp_path, corpus, monkeypatch
):
    sync, n_left = feature_chunk.files.sync, [5]  # into the second chunk

    def full(path):
        n_left[0] -= 1
        if n_left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(path)

    monkeypatch.setattr(feature_chunk.files, "sync", full)
    with pytest.raises(OSError, match="chunk_00001: No space.*same command"):
        make(tmp_path, corpus)
    chunks = [p.name for p in (tmp_path / "out/train").iterdir()]
    assert chunks == ["chunk_00000"]
    monkeypatch.undo()
    make(tmp_path, corpus)
    assert len(load(tmp_path).rows) == 5


def test_nothing_goes_into_the_corpus(tmp_path, corpus):
    with pytest.raises(ValueError, match="inside the corpus folder"):
        make(tmp_path, corpus, data_folder=tmp_path)


def told_as(copied, number, **change):
    path = copied / f"out/train/chunk_0000{number}" / features.TOLD
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    "harm, told",
    [
        (lambda c: shutil.rmtree(c / "out/train/chunk_00000"), "missing: 0"),
        (lambda c: shutil.rmtree(c / "out/train/chunk_00002"), "missing: 2"),
        (lambda c: (c / "out/train/chunk_9").mkdir(), "chunk_9 is damaged"),
        (
            lambda c: shutil.copytree(
                c / "out/train/chunk_00000", c / "out/train/chunk_00003"
            ),
            "chunks .0. stand twice",
        ),
        (lambda c: told_as(c, 1, n_chunks=9), r"sets of .3, 9. chunks"),
        (lambda c: told_as(c, 1, clips=1), "holds 2 clips, made were 1"),
        (
            lambda c: next(c.glob("out/train/chunk_00001/*.arrow")).write_bytes(
                b"x" * 99
            ),
            "chunk_00001 is damaged",
        ),
    ],
)
def test_a_set_that_is_not_whole_is_refused(copied, harm, told):
    harm(copied)
    with pytest.raises(ValueError, match=f"same python.*\n.*{told}"):
        load(copied)


def test_a_split_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no valid/chunk_00000; make"):
        load(tmp_path, "valid")


def test_shards_of_another_model_are_refused(finished):
    with pytest.raises(ValueError, match="n_mels=80, this model has 128"):
        load(finished, extractor=sources.load_extractor("random:large-v3"))


@pytest.mark.slow
def test_the_command_in_processes(tmp_path, corpus, finished, monkeypatch):
    manifests = write_manifests(
        tmp_path / "manifests", train=corpus, valid=corpus[:1]
    )
    command = f"x {manifests} --out {tmp_path / 'out'} --whisper_hub {HUB}"
    command += " --processes 2 --clips_per_chunk 2"
    monkeypatch.setattr("sys.argv", command.split())
    feature_shards.main()
    assert load(tmp_path).rows == load(finished).rows
