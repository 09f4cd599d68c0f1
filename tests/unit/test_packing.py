"""Packs: every clip once, whole sessions in order, times that are true."""

import time
from functools import partial

import pytest
import soundfile
import torch
from conftest import noise
from hypothesis import (
    given,
    settings,
    strategies as st,
)
from local import dataio, loss, model, packing, text
from local.packing import Clip

NO_TIMES = 50363
ZERO = 50364  # <|0.00|>
PREFIX = [50258, 50264, 50359]
END = 50257


def row(wav="a.wav", duration=1.0, wrd="네", **columns):
    return {
        "duration": duration,
        "wav": wav,
        "spk_id": "",
        "wrd": wrd,
        "start": None,
        "stop": None,
        "category": "",
        "session": "",
        "corpus": "",
        **columns,
    }


def cut(start, duration=1.0, **columns):
    return row(duration=duration, start=start, stop=start + duration, **columns)


def clip(duration, wrd="네", wav="a.wav"):
    return Clip(wav, None, None, duration, wrd)


def always(text, n_more):
    return True


@pytest.fixture
def label_fits(tokenizer):
    return partial(
        dataio.label_fits, tokenizer=tokenizer, max_tokens=model.MAX_TOKENS
    )


def members(rows, longest_s=30.0, label_fits=always, timestamps=True):
    """IDs of the packs, and of each the ID of its clips, by their texts."""
    rows = {name: {**r, "wrd": name} for name, r in rows.items()}
    packs = packing.pack(rows, longest_s, label_fits, timestamps)
    return {k: p["wrd"] for k, p in packs.items()}


# What is packed


@pytest.mark.parametrize(
    "rows, expected",
    [
        # nothing known
        ([row(), row()], ["0", "1"]),
        # one session, in the manifest's order, not adjacent, any speaker
        (
            [row(session="s", spk_id="k"), row(), row(session="s")],
            ["0 2", "1"],
        ),
        # before the file
        ([cut(0, session="s"), cut(1, session="t")], ["0", "1"]),
        # cuts of a file by start, whatever the speaker
        ([cut(9), cut(2, spk_id="k"), cut(5)], ["1 2 0"]),
        ([cut(9), cut(2, wav="b.wav")], ["0", "1"]),
        ([row(start=3.0), row(stop=3.0)], ["1 0"]),  # to the end; from 0
        # two channels of a conversation keep their turns
        (
            [
                cut(4, session="s"),
                cut(2, session="s", wav="b.wav"),
                cut(1, session="s"),
                cut(9, session="s", wav="b.wav"),
            ],
            ["2 1 0 3"],
        ),
        # a speaker of whole files
        ([row(spk_id="k"), row(spk_id="l"), row(spk_id="k")], ["0 2", "1"]),
        # one name of two kinds, or of two corpora
        ([row(spk_id="k"), row(session="k")], ["0", "1"]),
        ([row(spk_id="k", corpus="x"), row(spk_id="k", corpus="y")], ["0", "1"]),
        ([row(session="k", corpus="x"), row(session="k")], ["0", "1"]),
        # the length
        ([cut(0, 20), cut(20, 10), cut(30, 1)], ["0 1", "2"]),
        ([cut(0, 20), cut(20, 10.0001)], ["0", "1"]),
        ([cut(0, 40), cut(40, 1), cut(41, 31)], ["0", "1", "2"]),
        ([cut(0, 10.1), cut(11, 9.9), cut(21, 10)], ["0 1 2"]),  # 30.000…04
    ],
)  # fmt: skip
def test_who_belongs_together(rows, expected):
    rows = {str(i): r for i, r in enumerate(rows)}
    assert list(members(rows).values()) == expected


def test_a_pack_is_a_row():
    rows = {
        "a-1": cut(3, 2.5, category="call", wrd="네", session="s"),
        "a-2": cut(6, 1.0, category="x", wrd="", session="s"),
        "b-1": row("b.wav", 4.0, session="s", wrd="그래요 예"),
        "c": row("c.wav", 3.0),
    }
    packs = packing.pack(rows, 30.0, always, True)
    assert list(packs) == ["a-1+2", "c"]
    assert packs["a-1+2"] == {
        **rows["a-1"],
        "clips": [
            Clip("a.wav", 3, 5.5, 2.5, "네"),
            Clip("a.wav", 6, 7, 1.0, ""),
            Clip("b.wav", None, None, 4.0, "그래요 예"),
        ],
        "wrd": "네 그래요 예",
        "duration": 7.5,
    }
    lone = [Clip("c.wav", None, None, 3.0, "네")]
    assert packs["c"] == {**rows["c"], "clips": lone}


ROWS = st.lists(
    st.builds(
        row,
        wav=st.sampled_from("ab"),
        duration=st.integers(0, 40000).map(lambda ms: ms / 1000),
        spk_id=st.sampled_from(["", "k", "l"]),
        session=st.sampled_from(["", "", "k", "s"]),
        start=st.sampled_from([None, 0.0, 1.5, 7.0]),
        wrd=st.sampled_from(["", "네", "뷁" * 200]),
    ),
    max_size=30,
)


@given(rows=ROWS, longest_s=st.sampled_from([8.0, 27.0, 30.0]))
@settings(max_examples=200, deadline=None)
def test_every_clip_is_in_one_pack(rows, longest_s):
    rows = {str(i): {**r, "nr": str(i)} for i, r in enumerate(rows)}
    for r in rows.values():  # to tell the clips apart
        r["stop"] = float(r["nr"]) + 100 if r["start"] is not None else None
        r["wav"] += "" if r["start"] is not None else r["nr"]

    def fits(text, n_more):
        return len(text) + n_more <= 450

    packs = packing.pack(rows, longest_s, fits, True)
    of_clip = {(r["wav"], r["start"], r["stop"]): k for k, r in rows.items()}
    found = [[of_clip[c[:3]] for c in p["clips"]] for p in packs.values()]
    assert sorted(sum(found, [])) == sorted(rows)
    for (name, p), ids in zip(packs.items(), found):
        assert name == ids[0] + (f"+{len(ids) - 1}" if len(ids) > 1 else "")
        assert len({packing._session(i, rows[i]) for i in ids}) == 1
        total = sum(rows[i]["duration"] for i in ids)
        assert p["duration"] == pytest.approx(total)
        assert p["duration"] <= longest_s or len(ids) == 1
        assert len(p["wrd"]) <= 450
        for wav in "ab":
            starts = [rows[i]["start"] for i in ids if rows[i]["wav"] == wav]
            assert starts == sorted(starts)
        whole = [int(i) for i in ids if rows[i]["start"] is None]
        assert whole == sorted(whole)


def test_a_taken_id_is_an_error_and_loses_no_clip():
    rows = {"a": cut(0), "b": cut(1), "a+1": row("b.wav")}
    with pytest.raises(ValueError, match=r"begins with 'a'.*'a\+1'.*rename"):
        packing.pack(rows, 30.0, always, True)


@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize("word", ["안녕하세요", "뷁", "네, 예.", "a"])
def test_a_label_never_exceeds_the_decoder(
    tokenizer, label_fits, word, timestamps
):
    rows = {
        str(i): cut(i, wrd=" ".join([word] * (i % 17)))
        for i in range(300)
    }  # fmt: skip
    packs = packing.pack(rows, 60.0, label_fits, timestamps)
    assert len(packs) > 5
    lengths = []
    for p in packs.values():
        plain, _ = packing.token_ids(p["clips"], tokenizer, False)
        timed, _ = packing.token_ids(p["clips"], tokenizer, True)
        lengths.append(max(len(plain), len(timed) if timestamps else 0) + 1)
        assert NO_TIMES not in timed or not timestamps
    assert max(lengths) <= model.MAX_TOKENS
    assert max(lengths) > model.MAX_TOKENS - 80  # and is made use of


def test_the_last_token_counts(tokenizer, label_fits):
    def rows(n_tokens):
        return {"a": cut(0, wrd="a"), "b": cut(1, wrd="a" + " a" * n_tokens)}

    # 4 of prefix and end, 4 times, " a" once more and " a" at the beginning
    full = 448 - 4 - 4 - 2
    assert list(packing.pack(rows(full), 30.0, label_fits, True)) == ["a+1"]
    over = packing.pack(rows(full + 1), 30.0, label_fits, True)
    assert list(over) == ["a", "b"]
    without = packing.pack(rows(full + 1), 30.0, label_fits, False)
    assert list(without) == ["a+1"]


@pytest.mark.parametrize("timestamps", [True, False])
def test_100_000_clips_in_seconds(label_fits, timestamps):
    rows = {
        str(i): cut(
            3.0 * (i % 700), 2.9, wav=f"{i // 700}.wav", wrd="네 그래요"
        )
        for i in range(100_000)
    }
    begin = time.process_time()
    packs = packing.pack(rows, 30.0, label_fits, timestamps)
    assert time.process_time() - begin < 10
    assert len(packs) == 142 * 70 + 60


# Labels


def labelled(*clips, tokenizer, timestamps=True):
    return packing.token_ids(list(clips), tokenizer, timestamps)


def test_the_format_of_whisper(tokenizer):
    encode = partial(dataio.encode, tokenizer=tokenizer)
    tokens_bos, tokens_eos = labelled(
        clip(2.4, "안녕하세요"), clip(2.72, "네 그래요"), tokenizer=tokenizer
    )
    learned = [ZERO, *encode(" 안녕하세요"), ZERO + 120]
    learned += [ZERO + 120, *encode(" 네 그래요"), ZERO + 256]
    assert tokens_bos.tolist() == [*PREFIX, *learned]
    assert tokens_eos.tolist() == [*learned, END]
    assert tokens_bos.dtype == tokens_eos.dtype == torch.int64


def test_the_times_are_those_of_the_tokenizer(tokenizer):
    ids = labelled(clip(1.0), clip(29.0), tokenizer=tokenizer)[0][3:].tolist()
    shown = tokenizer.decode(ids, decode_with_timestamps=True)
    assert shown == "<|0.00|> 네<|1.00|><|1.00|> 네<|30.00|>"


LABELS = st.text(st.characters(codec="utf-8"), max_size=8).map(text.for_label)


@given(labels=st.lists(LABELS, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_texts_do_not_fuse(tokenizer, labels):
    clips = [clip(1.0, label) for label in labels]
    said = " ".join(filter(None, labels))
    ids = labelled(*clips, tokenizer=tokenizer)[1][:-1]
    words = ids[(ids < NO_TIMES) & (ids >= 0)].tolist()
    assert tokenizer.decode(words).strip() == said
    # Pieces have the tokens of the whole, by which packs are measured.
    assert words == dataio.encode(f" {said}" if said else "", tokenizer) or (
        NO_TIMES in labelled(*clips, tokenizer=tokenizer)[0]
    )


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_times_are_the_summed_durations(tokenizer, milliseconds):
    clips = [clip(ms / 1000) for ms in milliseconds]
    ids = labelled(*clips, tokenizer=tokenizer)[1]
    times = [(i - ZERO) * 0.02 for i in ids.tolist() if i >= ZERO]
    ends = [sum(milliseconds[: n + 1]) / 1000 for n in range(len(clips))]
    assert times[1::2] == pytest.approx([min(t, 30) for t in ends], abs=0.0101)
    assert times[2::2] == times[1:-1:2] and times[0] == 0


@pytest.mark.parametrize(
    "texts, shown",
    [
        (["", "네", ""], "<|1.00|> 네<|2.00|>"),
        (["네", "", "예"], "<|0.00|> 네<|1.00|><|2.00|> 예<|3.00|>"),
    ],
)
def test_silence_is_a_gap(tokenizer, texts, shown):
    clips = [clip(1.0, label) for label in texts]
    ids = labelled(*clips, tokenizer=tokenizer)[0][3:].tolist()
    assert tokenizer.decode(ids, decode_with_timestamps=True) == shown


@pytest.mark.parametrize(
    "texts, timestamps, has_times",
    [
        (["네", "예"], True, True),
        (["네", "예"], False, False),
        (["네"], True, True),
        ([""], True, False),
        (["", ""], True, False),
        (["a" + " a" * 441], True, True),
        (["a" + " a" * 442], True, False),  # fits without times alone
    ],
)
def test_rows_of_a_batch_align(tokenizer, texts, timestamps, has_times):
    clips = [clip(1.0, label) for label in texts]
    tokens_bos, tokens_eos = labelled(
        *clips, tokenizer=tokenizer, timestamps=timestamps
    )
    assert len(tokens_bos) - len(tokens_eos) == 2
    assert len(tokens_bos) + 1 <= model.MAX_TOKENS
    assert (tokens_bos[3] == ZERO) == has_times
    # What is learned is what comes next in the input.
    assert tokens_eos[1:-1].tolist() == tokens_bos[4:].tolist()
    if not has_times:
        plain_bos, plain_eos = dataio.token_ids(
            " ".join(filter(None, texts)), tokenizer
        )
        assert torch.equal(tokens_bos, plain_bos)
        assert tokens_eos.tolist() == [loss.IGNORED, *plain_eos.tolist()]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_share_with_timestamps(share):
    chosen = [packing.with_timestamps(f"c-{i}+3", share) for i in range(2000)]
    assert sum(chosen) / 2000 == pytest.approx(share, abs=0.04)
    assert packing.with_timestamps("a") == packing.with_timestamps("a", 0.5)


# Sound


@pytest.fixture
def file(tmp_path):
    def write(name, seconds, seed):
        path, samples = str(tmp_path / name), noise(seconds, seed)
        soundfile.write(path, samples.numpy(), 16000, subtype="FLOAT")
        return path, samples

    return write


@pytest.mark.parametrize("off_s", [0.0, 0.0101, 0.09, -0.03])
def test_samples_lie_where_the_times_say(file, off_s):
    """Also where the manifest is a little off."""
    first, of_first = file("a.wav", 1.0 + off_s, 0)
    second, of_second = file("b.wav", 3.0, 1)
    clips = [Clip(first, None, None, 1.0, ""), Clip(second, 0.5, 2.0, 1.5, "")]
    samples, failed = packing.read(clips, 480_000)
    assert not failed and samples.shape == (40_000,)
    assert torch.equal(samples[16_000:], of_second[8_000:32_000])
    n_heard = min(16_000, len(of_first))
    assert torch.equal(samples[:n_heard], of_first[:n_heard])
    assert not samples[n_heard:16_000].any()


@pytest.mark.parametrize(
    "seconds, listed_s", [(2.0, 1.0), (0.5, 1.0), (None, 1.0), (None, 0.1)]
)
def test_a_member_that_fails_fails_the_pack(file, seconds, listed_s):
    good = clip(1.0, "네", file("a.wav", 1.0, 0)[0])
    wav = file("b.wav", seconds, 1)[0] if seconds else "gone.wav"
    bad = clip(listed_s, "네", wav)
    for clips in ([good, bad], [bad, good]):
        samples, failed = packing.read(clips, 480_000)
        assert failed and torch.equal(samples, torch.zeros(1600))


def test_a_lone_clip_is_read_as_ever(file):
    wav, samples = file("a.wav", 1.5, 0)
    read, failed = packing.read([clip(1.0, "네", wav)], 480_000)
    assert torch.equal(read, samples) and not failed
    assert packing.read([clip(1.0, "네", wav)], 16_000)[1]
