"""From manifest rows to tensors, and what is left out on the way."""

import math
import re
from functools import partial

import pytest
import torch
from conftest import logged, write_audio
from local import dataio, manifest, model
from local.manifest import Utterance

HEADER = "ID,duration,wav,spk_id,wrd\n"


def fits(text, tokenizer, max_tokens=model.MAX_TOKENS, n_more=0):
    return dataio.label_fits(
        text, n_more, tokenizer=tokenizer, max_tokens=max_tokens
    )


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
        n_with_prefix_and_end = 5 + len(dataio.encode(unit * n, tokenizer))
        assert 4 + len(tokens_eos) == len(tokens_bos) + 1
        assert 4 + len(tokens_eos) == min(n_with_prefix_and_end, 448)
        assert fits(unit * n, tokenizer) == (n_with_prefix_and_end <= 448)
    assert fits(unit, tokenizer) and not fits(unit * 500, tokenizer)


def test_exactly_448(tokenizer):
    label = " a" * 443
    assert len(dataio.token_ids(label, tokenizer)[1]) == 444
    assert fits(label, tokenizer) and not fits(label + " a", tokenizer)
    assert fits("가", tokenizer, 6) and not fits("가나", tokenizer, 6)
    assert fits("", tokenizer, 5) and not fits("", tokenizer, 4)


@pytest.mark.parametrize("n_more", [1, 7, 442])
def test_a_label_that_leaves_room_for_more(tokenizer, n_more):
    """For the timestamps of a pack."""
    n_free = 443 - n_more
    assert fits(" a" * n_free, tokenizer, n_more=n_more)
    assert not fits(" a" * (n_free + 1), tokenizer, n_more=n_more)
    assert fits(" a" * (n_free + 1), tokenizer, n_more=n_more - 1)


def test_a_short_label_needs_no_tokenizer(tokenizer):
    """A token is a byte at least; a corpus has hundreds of thousands."""

    class Counting:
        prefix_tokens, n_calls = tokenizer.prefix_tokens, 0

        def encode(self, *args, **kwargs):
            self.n_calls += 1
            return tokenizer.encode(*args, **kwargs)

    counting = Counting()
    assert fits("가" * 147 + "ab", counting)  # 443 bytes
    assert counting.n_calls == 0
    assert fits("가" * 148, counting)
    assert counting.n_calls == 1


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
    return logged(monkeypatch, dataio.logger, "warning")


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


def test_a_clip_without_a_duration_is_left_out_but_of_a_test(load, warnings):
    rows = "1,0,a.wav,,가", "2,-1,b.wav,,나", "3,1,c.wav,,다"
    assert list(load(*rows)) == ["3"]
    assert "2 clips are left out, without a duration: 1, 2" in warnings[0]
    assert len(load(*rows, max_duration_s=float("inf"))) == 3


def test_a_test_keeps_a_clip_whose_label_is_too_long(load, warnings, tokenizer):
    label = "뷁" * 448
    rows = load(f"1,1,a.wav,,{label}", "2,1,b.wav,,가", max_duration_s=math.inf)
    assert list(rows) == ["1", "2"]
    assert "1 clips have long labels, of which the loss" in warnings[0]
    tokens_bos, tokens_eos = dataio.token_ids(label, tokenizer)
    assert len(tokens_bos) == 447 and len(tokens_eos) == 444
    assert tokens_eos[-1] == tokenizer.eos_token_id


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
    assert len(load("1,1,x.wav,,가", "2,1,a.wav,,나")) == 2
    assert "1 of 2 audio files looked for are missing" in warnings[0]
    assert warnings[0].endswith("count as failed: 1 …")


@pytest.mark.parametrize(
    "n_rows, n_most, n_seen",
    [(3, 10, 3), (10, 10, 10), (11, 10, 6), (100, 10, 10), (101, 10, 10)],
)
def test_some_files_are_looked_for(
    load, monkeypatch, warnings, n_rows, n_most, n_seen
):
    """From all parts of the split; a stat of each would delay a start."""
    seen = []

    def isfile(path):
        seen.append(int(re.search(r"(\d+)\.wav", path)[1]))
        return seen[-1] != 0

    monkeypatch.setattr(dataio, "N_LOOKED_FOR", n_most)
    monkeypatch.setattr(dataio.os.path, "isfile", isfile)
    rows = load(*(f"{i},1,$data_root/{i}.wav,,가" for i in range(n_rows)))
    assert len(rows) == n_rows
    assert len(seen) == len(set(seen)) == n_seen
    assert min(seen) == 0 and max(seen) >= 0.8 * (n_rows - 1)
    assert f"1 of {n_seen} audio files looked for are missing" in warnings[0]


def split(tmp_path, name, *rows):
    write_audio(tmp_path / "a.wav", seconds=0.1)
    (tmp_path / name).write_text(HEADER + "".join(f"{r}\n" for r in rows))
    return tmp_path / name


def load_splits(tmp_path, longest_s, tokenizer):
    label_fits = partial(fits, tokenizer=tokenizer)
    return dataio.load_splits(longest_s, tmp_path, label_fits)


def test_splits_have_limits_of_their_own(tmp_path, tokenizer, warnings):
    rows = [f"{n},{n},$data_root/a.wav,,가" for n in (5, 29, 40)]
    paths = [split(tmp_path, f"{name}.csv", *rows) for name in "abc"]
    limits = dict(zip(paths, (28.5, 30.0, float("inf"))))
    splits = load_splits(tmp_path, limits, tokenizer)
    assert list(splits) == paths
    assert [list(splits[path]) for path in paths] == [
        ["5"],
        ["5", "29"],
        ["5", "29", "40"],
    ]
    assert len(warnings) == 2


def test_what_is_wrong_with_all_splits_comes_in_one_error(tmp_path, tokenizer):
    sound = split(tmp_path, "sound.csv", "1,1,$data_root/a.wav,,가")
    wrong = {
        split(tmp_path, "empty.csv"): "empty.csv has no clip that can be used",
        split(tmp_path, "long.csv", "1,99,a.wav,,가"): "long.csv has no clip",
        split(tmp_path, "gone.csv", "1,1,x.wav,,가"): "none of its audio",
        split(tmp_path, "number.csv", "1,one,a.wav,,가"): "number.csv, line 2",
        tmp_path / "missing.csv": "missing.csv'; is manifest_folder right",
    }
    with pytest.raises(ValueError) as error:
        load_splits(tmp_path, dict.fromkeys([*wrong, sound], 30.0), tokenizer)
    head, *lines = str(error.value).split("\n  - ")
    assert "--test_only" in head
    assert len(lines) == len(wrong)
    for line, message in zip(lines, wrong.values()):
        assert message in line
    assert "sound.csv" not in str(error.value)


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


def test_a_part_of_a_split_is_the_same_in_every_run():
    rows = {f"clip{n}": {"wrd": str(n)} for n in range(100)}
    part = dataio.draw(rows, 10)
    assert len(part) == 10 and part.items() <= rows.items()
    assert list(part) == [key for key in rows if key in part]
    shuffled = dict(reversed(rows.items()))
    assert dataio.draw(shuffled, 10) == part
    assert list(part) != list(rows)[:10]
    for n_most in (0, 100, 1000):
        assert dataio.draw(rows, n_most) is rows
