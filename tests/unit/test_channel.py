"""Telephone, noise and rooms, measured as they leave the channel."""

import logging
import math

import numpy as np
import pytest
import soundfile
import torch
from conftest import host_reads, noise, write_audio
from local import channel
from local.channel import Channel

RATE = 16000


@pytest.fixture
def noises(tmp_path):
    return write_audio(tmp_path / "noises/deep/noise.wav", 3).parents[1]


@pytest.fixture
def rooms(tmp_path):
    """A folder with one response: 10 ms of nothing, the sound, a decay."""
    time = np.arange(RATE // 2) / RATE
    decay = np.random.default_rng(0).normal(0, 0.1, len(time))
    decay *= np.exp(-10 * time)
    decay[:160], decay[160] = 0, 1
    (tmp_path / "rooms").mkdir()
    soundfile.write(tmp_path / "rooms/hall.wav", decay, RATE, "FLOAT")
    return tmp_path / "rooms"


def through(made, clips, seed=0):
    """A batch of clips, padded with zeros, through a seeded channel."""
    lengths = torch.tensor([len(clip) for clip in clips])
    batch = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
    torch.manual_seed(seed)
    return made(batch, lengths / batch.shape[1])


def decibels(part, whole):
    return 10 * math.log10(part.square().sum() / whole.square().sum())


def band(samples, low, high):
    """Their spectrum between two frequencies in Hz."""
    spectrum = torch.fft.rfft(samples)
    hertz = torch.linspace(0, RATE / 2, len(spectrum))
    return spectrum[(hertz >= low) & (hertz < high)].abs()


def everything(noises, rooms, **others):
    settings = {
        "telephone_share": 0.5,
        "noise_folder": str(noises),
        "noise_share": 0.5,
        "reverb_folder": str(rooms),
        "reverb_share": 0.5,
        **others,
    }
    return Channel(**settings)


# Telephone


@pytest.mark.parametrize(
    "low, high, least, most",
    [
        (0, 300, -99, -15),
        (400, 3300, -1, 1),
        (3500, 8000, -99, -25),
    ],
)
def test_the_band_of_a_telephone(low, high, least, most):
    clip = 0.1 * torch.randn(3 * RATE)
    heard = channel.telephone(clip)
    level = decibels(band(heard, low, high), band(clip, low, high))
    assert least < level < most


def test_a_telephone_does_not_delay():
    time = torch.arange(RATE) / RATE
    clip = 0.3 * torch.sin(2 * math.pi * 1000 * time)
    middle = slice(2000, -2000)
    error = channel.telephone(clip)[middle] - clip[middle]
    assert decibels(error, clip[middle]) < -25


def test_mu_law_has_256_levels_close_together_near_zero():
    ramp = torch.linspace(-2, 2, 100001)
    levels = channel.mu_law(ramp).unique()
    assert len(levels) == 256
    assert levels.min() == -1 and levels.max() == 1
    steps = levels.diff()
    assert steps.min() < 2e-4 and steps.max() > 0.03
    quiet = 0.01 * torch.randn(RATE)
    assert decibels(channel.mu_law(quiet) - quiet, quiet) < -25


def test_a_telephone_quantises(monkeypatch):
    clip, coarse = noise(1), channel.telephone(noise(1))
    monkeypatch.setattr(channel, "mu_law", lambda samples: samples)
    fine = channel.telephone(clip)
    assert -45 < decibels(coarse - fine, fine) < -25


# Noise


@pytest.mark.parametrize("snr_db", [-5, 0, 20])
def test_noise_is_as_loud_as_asked(noises, snr_db):
    made = Channel(
        noise_folder=str(noises), noise_share=1, snr_db=[snr_db, snr_db]
    )
    clip = noise(1, loudness=0.01)
    mixed = through(made, [clip])[0]
    assert decibels(clip, mixed - clip) == pytest.approx(snr_db, abs=0.1)


def test_the_ratio_lies_between_its_bounds(noises):
    made = Channel(noise_folder=str(noises), noise_share=1, snr_db=[5, 20])
    clips = [noise(0.5, seed, 0.01) for seed in range(100)]
    mixed = through(made, clips)
    ratios = [decibels(c, m - c) for c, m in zip(clips, mixed, strict=True)]
    assert 4.9 < min(ratios) < 6 and 19 < max(ratios) < 20.1


@pytest.mark.parametrize("seconds", [0.01, 0.5, 2.0])
def test_short_noise_is_repeated(tmp_path, seconds):
    write_audio(tmp_path / "noise.wav", seconds)
    made = Channel(noise_folder=str(tmp_path), noise_share=1, snr_db=[0, 0])
    clip = noise(2, loudness=0.01)
    added = through(made, [clip])[0] - clip
    quarters = added.reshape(4, -1).square().sum(1)
    assert quarters.min() > 0.5 * quarters.max()


def test_noise_begins_anywhere(noises):
    made = Channel(noise_folder=str(noises), noise_share=1, snr_db=[0, 0])
    clip = noise(0.5, loudness=0.01)
    first, second = (m - clip for m in through(made, [clip, clip]))
    assert not torch.allclose(first, second, atol=1e-3)


@pytest.mark.parametrize("rate, channels", [(8000, 1), (44100, 2), (16000, 2)])
def test_any_rate_and_channels(tmp_path, rate, channels):
    write_audio(tmp_path / "NOISE.FLAC", 1, rate, channels, format="FLAC")
    made = Channel(noise_folder=str(tmp_path), noise_share=1, snr_db=[0, 0])
    clip = noise(0.5, loudness=0.01)
    assert decibels(through(made, [clip])[0] - clip, clip) == pytest.approx(
        0, abs=0.1
    )
    assert [len(one) for one in made.noises] == [RATE]


# Rooms


def test_a_room_lengthens_the_decay_and_keeps_time_and_loudness(rooms):
    clip = torch.zeros(RATE)
    clip[4000:5000] = 0.1 * torch.randn(1000)
    made = Channel(reverb_folder=str(rooms), reverb_share=1)
    heard = through(made, [clip])[0]
    assert heard[:3990].abs().max() < 1e-6  # no tail came round to the start
    assert decibels(heard[5000:7000], heard) > -20
    assert decibels(heard, clip) == pytest.approx(0, abs=1e-3)
    lag = torch.nn.functional.conv1d(heard[None], clip[None, None, 4000:5000])
    assert lag.argmax() == 4000


def test_a_response_longer_than_the_clip(rooms):
    made = Channel(reverb_folder=str(rooms), reverb_share=1)
    clip = noise(0.02, seed=1)
    heard = through(made, [clip])[0]
    assert heard.shape == clip.shape
    assert decibels(heard, clip) == pytest.approx(0, abs=1e-3)


# The batch


def test_without_shares_or_folders_nothing_is_done():
    wavs = torch.randn(2, 100)
    state = torch.get_rng_state()
    for settings in (
        {"noise_folder": "/none", "reverb_folder": "/none"},
        {"noise_share": 0.5, "reverb_share": 0.5},
        {"noise_folder": None, "noise_share": 0.5},  # --noise_folder=
    ):
        assert Channel(**settings)(wavs, torch.ones(2)) is wavs
    assert torch.equal(torch.get_rng_state(), state)


def test_the_seed_repeats_it_and_the_batch_stays(noises, rooms):
    clips = [noise(1, seed) for seed in range(8)]
    batch = torch.stack(clips)
    before = batch.clone()
    first, second = everything(noises, rooms), everything(noises, rooms)
    torch.manual_seed(5)
    once, later = (first(batch, torch.ones(8)) for _ in range(2))
    assert torch.equal(batch, before)
    assert not torch.equal(once, later)
    torch.manual_seed(5)
    assert torch.equal(second(batch, torch.ones(8)), once)


@pytest.mark.parametrize(
    "shares",
    [
        {"telephone_share": 0.3, "noise_share": 0.0, "reverb_share": 0.0},
        {"telephone_share": 0.0, "noise_share": 0.8, "reverb_share": 0.0},
        {"telephone_share": 0.0, "noise_share": 0.0, "reverb_share": 0.1},
        {"telephone_share": 0.5, "noise_share": 0.5, "reverb_share": 0.5},
    ],
)
def test_shares_hold(noises, rooms, shares):
    clips = [noise(0.05, seed=1)] * 400
    changed = through(everything(noises, rooms, **shares), clips) != clips[0]
    expected = 1 - math.prod(1 - share for share in shares.values())
    assert changed.any(1).float().mean() == pytest.approx(expected, abs=0.07)


def test_neighbours_change_nothing(noises, rooms):
    made = everything(
        noises, rooms, telephone_share=1, noise_share=1, reverb_share=1
    )
    clip = noise(0.777)
    alone = through(made, [clip])
    beside = through(made, [clip, noise(2, 1), noise(0.1, 2)])
    assert torch.equal(beside[0, : len(clip)], alone[0])
    assert (beside[0, len(clip) :] == 0).all()
    assert (beside[2, 1600:] == 0).all()


def test_mixed_precision_does_not_reach_it(noises, rooms):
    made = everything(
        noises, rooms, telephone_share=1, noise_share=1, reverb_share=1
    )
    expected = through(made, [noise(0.5)])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(through(made, [noise(0.5)]), expected)


@pytest.mark.parametrize(
    "clip",
    [
        torch.zeros(8000),
        torch.zeros(0),
        torch.zeros(1),
        torch.ones(1),
        torch.ones(2),
        torch.ones(8001),
        torch.randn(8000),  # over full scale
    ],
    ids=lambda clip: f"{len(clip)} samples",
)
def test_hostile_clips(noises, rooms, clip):
    shares = {"noise_share": 1, "reverb_share": 1}
    for telephone_share in (0, 1):
        shares["telephone_share"] = telephone_share
        made = everything(noises, rooms, **shares)
        heard = through(made, [clip, noise(1)])
        assert heard.isfinite().all()
        assert heard.abs().max() <= 1
        if not clip.any():
            assert heard[0].abs().max() < 2e-4 * telephone_share + 1e-9


def test_noise_that_is_silent_in_places_gives_no_nan(tmp_path):
    samples = np.zeros(20 * RATE)
    samples[-100:] = 0.5
    soundfile.write(tmp_path / "noise.wav", samples, RATE)
    made = Channel(noise_folder=str(tmp_path), noise_share=1)
    clips = [noise(0.1, seed) for seed in range(8)]
    assert torch.equal(through(made, clips), torch.stack(clips))


def test_no_device_waits_for_it(noises, rooms):
    made = everything(
        noises, rooms, telephone_share=1, noise_share=1, reverb_share=1
    )
    through(made, [noise(0.1)])
    with host_reads() as found:
        made(noise(0.1)[None], torch.ones(1))
    # torchaudio's resample, there and back, of a number on the host.
    assert found == ["_local_scalar_dense"] * 2


# Folders


def test_what_cannot_be_read_is_counted(noises, caplog):
    (noises / "bad.wav").write_bytes(b"RIFF of nothing")
    (noises / "._noise.wav").write_bytes(b"")
    soundfile.write(noises / "silent.wav", np.zeros(RATE), RATE)
    (noises / "README.txt").write_text("no audio")
    made = Channel(noise_folder=str(noises), noise_share=1)
    caplog.set_level(logging.INFO)
    through(made, [noise(0.1)])
    assert "3 files cannot be used, such as: " in caplog.text
    assert "0.1 min of 1 of 4 files" in caplog.text
    caplog.clear()
    through(made, [noise(0.1)])  # read once
    assert not caplog.text


@pytest.mark.parametrize("name", ["noise", "reverb"])
@pytest.mark.parametrize("files", [{}, {"a.wav": b"no"}, {"a.txt": b"no"}])
def test_none_can_be_read(tmp_path, name, files):
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    settings = {f"{name}_folder": str(tmp_path), f"{name}_share": 0.1}
    with pytest.raises(ValueError, match=f"{name}_folder='.*': none of its"):
        through(Channel(**settings), [noise(0.1)])


def test_memory_is_bounded_and_the_seed_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "BANK_S", 2)
    monkeypatch.setattr(channel, "CROP_S", 0.5)
    for n in range(9):
        write_audio(tmp_path / f"{n}.wav", 3, seed=n)
    kept = []
    for seed in (1, 1, 2):
        made = Channel(noise_folder=str(tmp_path), noise_share=1, seed=seed)
        through(made, [noise(0.1)])
        kept.append(torch.cat(made.noises))
        assert kept[-1].shape == (2 * RATE,)
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])
