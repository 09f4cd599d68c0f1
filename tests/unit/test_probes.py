"""Probes: they hold no speech, are always the same, and are counted right."""

from types import SimpleNamespace

import pytest
import torch
from local import probes

RATE = 16000


@pytest.fixture(scope="module")
def made():
    return probes.clips(8, 30)


def hertz(samples):
    """Of the loudest partial."""
    spectrum = torch.fft.rfft(samples).abs()
    return spectrum.argmax().item() * RATE / len(samples)


def level_by_octave(samples):
    """Decibels that the power of a hertz falls by, from one octave to the
    next, between 125 Hz and 4 kHz."""
    power = torch.fft.rfft(samples).abs().square()
    frequency = torch.linspace(0, RATE / 2, len(power))
    octaves = torch.stack(
        [
            power[(frequency >= low) & (frequency < 2 * low)].mean()
            for low in (125, 250, 500, 1000, 2000)
        ]
    )
    return (10 * octaves.log10()).diff().mean().item()


# The clips


def test_kinds_lengths_and_loudness(made):
    assert list(made) == ["silence", "noise", "music"]
    for clips in made.values():
        lengths = [len(clip) for clip in clips]
        assert lengths[0] == RATE and lengths[-1] == 30 * RATE
        assert lengths == sorted(set(lengths)) and len(lengths) == 8
    for clip in sum(made.values(), []):
        assert clip.dtype == torch.float32 and clip.ndim == 1
        assert clip.isfinite().all() and clip.abs().max() <= 0.5
    for clip in made["noise"] + made["music"]:
        assert clip.abs().max() == pytest.approx(probes.PEAK)


def test_they_are_the_same_at_every_call(made):
    torch.rand(1)
    state = torch.get_rng_state()
    again = probes.clips(8, 30)
    assert torch.equal(torch.get_rng_state(), state)
    for kind, clips in made.items():
        for clip, other in zip(clips, again[kind], strict=True):
            assert torch.equal(clip, other)


def test_silence_is_zero_or_faint(made):
    zero, dither = made["silence"][:2]
    assert not zero.any()
    assert 1e-5 < dither.std() < 1e-4


@pytest.mark.parametrize("index, slope", [(0, 0), (1, -3), (2, -6)])
def test_colours_of_noise(made, index, slope):
    for clip in (made["noise"][index], made["noise"][index + 4]):
        assert level_by_octave(clip) == pytest.approx(slope, abs=1)


def test_the_hum_is_the_mains(made):
    assert hertz(made["noise"][3]) == pytest.approx(60, abs=1)


def test_music_is_of_notes_that_change(made):
    clip = made["music"][3]
    beats = clip[: len(clip) // 25600 * 25600].reshape(-1, 25600)[:, :6400]
    roots = {round(hertz(beat)) for beat in beats}
    assert len(roots) >= 3
    spectrum = torch.fft.rfft(beats[0]).abs().square()
    assert spectrum.topk(64).values.sum() > 0.9 * spectrum.sum()
    assert not torch.equal(made["music"][1][:RATE], made["music"][3][:RATE])


@pytest.mark.parametrize(
    "n, context_s, longest_s", [(1, 30, 1), (2, 5, 5), (3, 90, 30)]
)
def test_they_fit_the_context(n, context_s, longest_s):
    for clips in probes.clips(n, context_s).values():
        assert len(clips) == n
        assert max(map(len, clips)) == longest_s * RATE


@pytest.mark.parametrize("n", [0, -1])
def test_none_at_all(n):
    with pytest.raises(ValueError, match=f"{n} probes of each kind: give 1"):
        probes.clips(n, 30)


# The answers


def engine(answers):
    """Says the same of each kind's clips, which it is given at once."""

    def transcribe(waveforms):
        assert all(len(waveform) <= 2 * RATE for waveform in waveforms)
        return answers[: len(waveforms)]

    return SimpleNamespace(name="M", context_s=2, transcribe=transcribe)


@pytest.mark.parametrize(
    "answers, with_text, texts",
    [
        (["", " ", "...", "♪"], 25, [["♪", 1]]),
        (["", "", "", ""], 0, []),
        (
            ["감사합니다.", "네", "감사합니다", "MBC 뉴스"],
            100,
            [["감사합니다", 2], ["네", 1], ["mbc 뉴스", 1]],
        ),
    ],
)
def test_what_counts_as_text(answers, with_text, texts):
    rows = probes.run(engine(answers), 4)
    assert [row["kind"] for row in rows] == ["silence", "noise", "music"]
    for row in rows:
        assert row["model"] == "M" and row["n_clips"] == 4
        assert row["with_text"] == with_text
        assert row["texts"] == texts


def test_ten_texts_are_kept():
    rows = probes.run(engine([str(n) for n in range(20)]), 20)
    assert [len(row["texts"]) for row in rows] == [10] * 3
