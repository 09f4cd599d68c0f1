"""From manifest rows to tensors, and which rank takes which clip."""

import re
from functools import partial

import pytest
import torch
from conftest import write_audio
from local import dataio, manifest, model
from local.manifest import Utterance

HEADER = "ID,duration,wav,spk_id,wrd\n"


def fits(text, tokenizer, max_tokens=model.MAX_TOKENS):
    return dataio.label_fits(text, tokenizer, max_tokens)


# Labels


def test_token_ids(tokenizer):
    tokens_bos, tokens_eos = dataio.token_ids("안녕하세요", tokenizer)
    text_ids = tokenizer.encode("안녕하세요", add_special_tokens=False)
    assert tokens_bos.tolist() == [50258, 50264, 50359, 50363, *text_ids]
    assert tokens_eos.tolist() == [*text_ids, 50257]
    assert tokens_bos.dtype == tokens_eos.dtype == torch.int64
    # Logits start at the last prefix token, so each has its target.
    assert len(tokens_eos) == len(tokens_bos) - 4 + 1


def test_token_ids_of_a_clip_without_speech(tokenizer):
    tokens_bos, tokens_eos = dataio.token_ids("", tokenizer)
    assert tokens_bos.tolist() == [50258, 50264, 50359, 50363]
    assert tokens_eos.tolist() == [50257]


@pytest.mark.parametrize("unit", ["뷁", " 가", " a", "😀"])
def test_a_label_fits_up_to_the_decoders_last_position(tokenizer, unit):
    n_unit = len(tokenizer.encode(unit * 2, add_special_tokens=False)) / 2
    free = 448 - 4 - 1
    for n in range(int(free / n_unit) - 2, int(free / n_unit) + 3):
        tokens_bos, tokens_eos = dataio.token_ids(unit * n, tokenizer)
        n_with_prefix_and_end = 4 + len(tokens_eos)
        assert n_with_prefix_and_end == len(tokens_bos) + 1
        assert fits(unit * n, tokenizer) == (n_with_prefix_and_end <= 448)
    assert fits(unit, tokenizer) and not fits(unit * 500, tokenizer)


def test_exactly_448(tokenizer):
    label = " a" * 443
    assert len(dataio.token_ids(label, tokenizer)[1]) == 444
    assert fits(label, tokenizer) and not fits(label + " a", tokenizer)
    assert fits("가", tokenizer, 6) and not fits("가나", tokenizer, 6)
    assert fits("", tokenizer, 5) and not fits("", tokenizer, 4)


# Rows


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(*rows, max_duration_s=30.0):
        path = tmp_path / "train.csv"
        for name in "abcde":
            (tmp_path / f"{name}.wav").touch()
        text = HEADER + "".join(f"{row}\n" for row in rows)
        path.write_text(re.sub(r",(\w\.wav)", r",$data_root/\1", text))
        return dataio.load_split(
            path, tmp_path, max_duration_s, partial(fits, tokenizer=tokenizer)
        )

    return load


@pytest.fixture
def warnings(monkeypatch):
    """Texts that the module's logger was given."""
    found = []
    monkeypatch.setattr(
        dataio.logger, "warning", lambda text, *a: found.append(text % a)
    )
    return found


def test_what_the_model_cannot_hold_is_left_out_aloud(load, warnings):
    rows = load(
        "1,30.0,a.wav,,가",
        "2,30.001,b.wav,,나",
        f"3,1.0,c.wav,,{'뷁' * 448}",
        f"4,31.0,d.wav,,{'뷁' * 448}",
        "5,0.5,e.wav,,",
    )
    assert list(rows) == ["1", "5"]
    assert len(warnings) == 2
    assert "2 clips are left out, longer than 30.0 s: 2, 4" in warnings[0]
    assert "2 clips are left out, labels over the" in warnings[1]
    assert "3, 4" in warnings[1]


def test_a_long_list_is_shortened(load, warnings):
    load("ok,1,a.wav,,가", *(f"{n},99,a.wav,,가" for n in range(7)))
    assert warnings[0].endswith("7 clips are left out, longer than 30.0 s: "
                                "0, 1, 2, 3, 4 …")  # fmt: skip


def test_nothing_to_say(load, warnings):
    assert len(load("1,1,a.wav,,가")) == 1
    assert warnings == []


def test_an_empty_split_is_an_error(load):
    for rows in ([], ["1,31,a.wav,,가"]):
        with pytest.raises(ValueError, match="train.csv has no clip"):
            load(*rows)


def test_decomposed_labels_are_not_too_long(load):
    syllables = "\u1112\u1161\u11ab" * 100  # 한, 900 bytes
    assert load(f"1,1,a.wav,,{syllables}")["1"]["wrd"] == "한" * 100


def test_a_wrong_data_folder_is_told(load, tmp_path, warnings):
    with pytest.raises(ValueError, match="none of its audio.*data_folder="):
        load("1,1,x.wav,,가", "2,1,y.wav,,나")
    load("1,1,x.wav,,가", "2,1,a.wav,,나")
    assert "1 audio files are missing and count as failed: 1" in warnings[0]


def test_special_tokens_in_a_text_are_text(tokenizer):
    text = "<|endoftext|> 안녕"
    ids = dataio.token_ids(text, tokenizer)[1][:-1].tolist()
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == text


# Waveforms


def test_a_clip_and_its_cut(tmp_path):
    path = str(write_audio(tmp_path / "a.wav", seconds=2))
    samples, failed = dataio.read_or_silence(path, None, None, 32000)
    assert (samples.shape, samples.dtype) == ((32000,), torch.float32)
    assert not failed
    cut, failed = dataio.read_or_silence(path, 0.5, 1.0, 8000)
    assert torch.equal(cut, samples[8000:16000]) and not failed


@pytest.mark.parametrize(
    "name, cut",
    [
        ("gone.wav", (None, None)),
        ("broken.wav", (None, None)),
        ("a.wav", (5.0, 6.0)),
        ("a.wav", (None, None)),  # longer than may be
        (".", (None, None)),
    ],
)
def test_a_clip_that_fails_is_silence_and_marked(tmp_path, name, cut, warnings):
    write_audio(tmp_path / "a.wav", seconds=1.01)
    (tmp_path / "broken.wav").write_bytes(b"RIFF no more")
    path = str(tmp_path / name)
    samples, failed = dataio.read_or_silence(path, *cut, 16000)
    assert failed and samples.shape == (1600,)
    assert samples.abs().sum() == 0 and samples.dtype == torch.float32
    assert len(warnings) == 1 and path in warnings[0]


def test_a_prepared_clip_of_the_whole_context_is_heard(tmp_path):
    """Durations are rounded in the CSV; the limit counts samples."""
    wav = write_audio(tmp_path / "a.wav", seconds=5, rate=44100)
    utterance = Utterance("1", str(wav), "가", "train", duration=5.0)
    manifest.write(tmp_path / "x.csv", [utterance], "manifest", tmp_path)
    (row,) = manifest.read(tmp_path / "x.csv", str(tmp_path)).values()
    assert row["duration"] == 5.0
    samples, failed = dataio.read_or_silence(row["wav"], None, None, 80000)
    assert len(samples) == 80000 and not failed


# Ranks


def orders(n_items, n_ranks, epoch=1, seed=7):
    samplers = [
        dataio.EpochSampler(n_items, seed, rank, n_ranks)
        for rank in range(n_ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


SIZES = [(1, 1), (1, 4), (2, 8), (5, 2), (10, 3), (16, 4), (3, 8), (101, 8)]


@pytest.mark.parametrize("n_items, n_ranks", SIZES)
def test_ranks_share_the_clips_out(n_items, n_ranks):
    shares = orders(n_items, n_ranks)
    n_each = -(-n_items // n_ranks)
    for rank, share in enumerate(shares):
        sampler = dataio.EpochSampler(n_items, 7, rank, n_ranks)
        assert len(share) == len(sampler) == n_each
    together = sum(shares, [])
    assert set(together) == set(range(n_items))
    if n_items % n_ranks == 0:
        assert len(together) == n_items  # disjoint


def test_another_order_in_every_epoch_and_the_same_again():
    first, second = orders(100, 2, epoch=1), orders(100, 2, epoch=2)
    assert first != second
    assert first == orders(100, 2, epoch=1)
    assert first != orders(100, 2, epoch=1, seed=8)
    assert first[0] != sorted(first[0])


def test_the_global_random_numbers_are_not_drawn():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    orders(10, 2)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("n_ranks, batch_size", [(2, 3), (4, 2), (3, 1)])
def test_ranks_make_the_batches_of_one_process(n_ranks, batch_size):
    def batches(order, size):
        return [order[i : i + size] for i in range(0, len(order), size)]

    n_items = 5 * n_ranks * batch_size
    (alone,) = orders(n_items, 1)
    shares = [batches(share, batch_size) for share in orders(n_items, n_ranks)]
    wanted = batches(alone, n_ranks * batch_size)
    got = [sum(parts, []) for parts in zip(*shares, strict=True)]
    assert list(map(sorted, got)) == list(map(sorted, wanted))


@pytest.mark.parametrize("n_items, n_ranks", [*SIZES, (0, 2)])
def test_shards_hold_every_clip_once(n_items, n_ranks):
    shards = [dataio.shard(n_items, r, n_ranks) for r in range(n_ranks)]
    assert sorted(i for s in shards for i in s) == list(range(n_items))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
