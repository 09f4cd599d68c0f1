"""Audio as it lies on disks: formats, rates, cuts and broken files."""

import os

import numpy as np
import pytest
import soundfile
from conftest import duration, write_audio
from local import audio


def tone(seconds=1.0, rate=16000, hertz=440.0):
    time = np.arange(round(seconds * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * hertz * time)


def pitch(samples):
    """Hz of the loudest partial of samples at 16 kHz."""
    spectrum = np.abs(np.fft.rfft(samples))
    return spectrum.argmax() * 16000 / len(samples)


@pytest.mark.parametrize(
    "suffix, rate",
    [
        (suffix, rate)
        for suffix in ("wav", "flac", "mp3", "ogg", "opus")
        for rate in (8000, 16000, 44100, 48000)
        if (suffix, rate) != ("opus", 44100)  # which does not exist
    ],
)
@pytest.mark.parametrize("channels", [1, 2])
def test_formats_rates_and_channels(tmp_path, suffix, rate, channels):
    path = tmp_path / f"clip.{suffix}"
    columns = [tone(rate=rate)] * channels
    options = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
    soundfile.write(path, np.stack(columns, axis=1), rate, **options)
    samples = audio.read(path)
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert len(samples) == pytest.approx(16000, abs=2500)  # mp3 pads
    if suffix in ("wav", "flac"):
        assert len(samples) == 16000
    assert pitch(samples) == pytest.approx(440, abs=5)
    assert np.abs(samples[4000:12000]).max() == pytest.approx(0.5, abs=0.05)
    assert duration(path) == pytest.approx(len(samples) / 16000, abs=1e-4)


def test_channels_are_averaged(tmp_path):
    stereo = np.stack([np.full(100, 0.5), np.full(100, -0.25)], axis=1)
    soundfile.write(tmp_path / "clip.wav", stereo, 16000, subtype="FLOAT")
    assert np.allclose(audio.read(tmp_path / "clip.wav"), 0.125)


def test_the_content_decides_not_the_suffix(tmp_path):
    write_audio(tmp_path / "clip.flac").rename(tmp_path / "clip.wav")
    assert len(audio.read(tmp_path / "clip.wav")) == 16000


# Headerless


@pytest.mark.parametrize("name", ["clip.pcm", "clip.PCM", "clip.raw"])
@pytest.mark.parametrize("odd", [b"", b"\x7f"])
def test_headerless(tmp_path, name, odd):
    values = [0, 1, -1, 32767, -32768]
    data = np.array(values, dtype="<i2").tobytes() + odd
    (tmp_path / name).write_bytes(data)
    samples = audio.read(tmp_path / name)
    assert samples.dtype == np.float32
    assert (samples * 32768).tolist() == values
    assert duration(tmp_path / name) == 5 / 16000


@pytest.mark.parametrize("name", ["clip.wavp", "clip.WAVP"])
def test_wavp_with_and_without_header(tmp_path, name):
    path = tmp_path / name
    values = np.array([0, 1, -1, 32767, -32768], "<i2")
    path.write_bytes(values.tobytes() + b"\x7f")
    assert audio.is_headerless(path)
    assert (audio.read(path) * 32768).tolist() == values.tolist()
    path.write_bytes(b"RI")  # a sample, and no RIFF
    assert audio.is_headerless(path) and duration(path) == 1 / 16000
    write_audio(tmp_path / "clip.wav", 0.5, rate=8000).rename(path)
    assert not audio.is_headerless(path)
    assert duration(path) == 0.5 and len(audio.read(path)) == 8000


def test_wav_without_header_is_an_error(tmp_path):
    path = tmp_path / "clip.wav"
    path.write_bytes(bytes(32000))
    assert not audio.is_headerless(path)
    with pytest.raises(ValueError, match="clip.wav cannot be decoded"):
        audio.read(path)


@pytest.mark.parametrize("data", [b"", b"\x01"])
def test_headerless_without_samples(tmp_path, data):
    path = tmp_path / "clip.pcm"
    path.write_bytes(data)
    assert duration(path) == 0
    with pytest.raises(ValueError, match="clip.pcm holds no audio"):
        audio.read(path)


# Cuts


@pytest.mark.parametrize("suffix", ["wav", "pcm", "flac"])
@pytest.mark.parametrize(
    "start, stop, first, last",
    [
        (None, None, 0, 16000),
        (0.25, None, 4000, 16000),
        (None, 0.5, 0, 8000),
        (0.25, 0.5, 4000, 8000),
        (0.0, 1.0, 0, 16000),
        (0.9, 1.5, 14400, 16000),  # what there is of it
    ],
)
def test_cuts(tmp_path, suffix, start, stop, first, last):
    path = tmp_path / f"clip.{suffix}"
    steps = np.arange(16000).astype("<i2")
    if suffix == "pcm":
        path.write_bytes(steps.tobytes())
    else:
        soundfile.write(path, steps, 16000)
    got = np.rint(audio.read(path, start, stop) * 32768)
    assert np.array_equal(got, steps[first:last])
    assert duration(path, start, stop) == (last - first) / 16000


@pytest.mark.parametrize("suffix", ["wav", "pcm"])
@pytest.mark.parametrize(
    "start, stop, is_told",
    [
        (0.2, 1.5, False),
        (0.2, 1.51, True),
        (None, 3200.0, True),  # milliseconds, taken for seconds
        (0.9, 25.0, True),
        (0.9, None, False),
        (1.0, 25.0, False),  # no sample of it: an empty clip
    ],
)
def test_a_cut_beyond_the_end(tmp_path, suffix, start, stop, is_told):
    path = tmp_path / f"clip.{suffix}"
    write_audio(tmp_path / "clip.wav", rate=8000)
    (tmp_path / "clip.pcm").write_bytes(bytes(32000))
    if not is_told:
        audio.decode(path, start, stop)
        return
    with pytest.raises(ValueError) as error:
        audio.decode(path, start, stop)
    told = f"{path} ends at 1.00 s, within the cut from {start or 0} to {stop}"
    assert told in str(error.value)


def test_what_a_broken_file_lacks_of_a_cut(tmp_path):
    path = write_audio(tmp_path / "clip.wav", seconds=4)
    path.write_bytes(path.read_bytes()[:48000])
    with pytest.raises(ValueError, match=r"clip.wav ends at 1\.50 s"):
        audio.decode(path, 1.0, 3.0)


@pytest.mark.parametrize(
    "start, stop, n_read",
    [(None, None, 16000), (0.25, 0.5, 4000), (0.75, None, 4000), (9, 10, 0)],
)
def test_of_a_headerless_file_only_the_cut_is_read(
    tmp_path, monkeypatch, start, stop, n_read
):
    path, fromfile, bytes_read = tmp_path / "clip.pcm", np.fromfile, []

    def counted(*args, **options):
        found = fromfile(*args, **options)
        bytes_read.append(found.nbytes)
        return found

    path.write_bytes(bytes(32001))
    monkeypatch.setattr(np, "fromfile", counted)
    assert len(audio.decode(path, start, stop)[0]) == n_read
    assert bytes_read == [2 * n_read]


def test_a_cut_is_made_in_the_seconds_of_the_file(tmp_path):
    path = write_audio(tmp_path / "clip.wav", seconds=2, rate=8000)
    assert len(audio.read(path, 0.5, 1.5)) == 16000


@pytest.mark.parametrize("suffix", ["wav", "pcm"])
@pytest.mark.parametrize("start, stop", [(1.0, 2.0), (7.0, None), (0.5, 0.5)])
def test_a_cut_without_samples(tmp_path, suffix, start, stop):
    path = tmp_path / f"clip.{suffix}"
    if suffix == "wav":
        write_audio(path)
    else:
        path.write_bytes(bytes(32000))
    assert duration(path, start, stop) == 0
    with pytest.raises(ValueError, match=f"no audio between {start}"):
        audio.read(path, start, stop)


# Broken


@pytest.mark.parametrize("name", ["none.wav", "none.pcm", "", "."])
def test_no_file(tmp_path, name):
    path = os.path.join(tmp_path, name) if name else ""
    for function in (audio.read, duration):
        with pytest.raises(FileNotFoundError, match="no audio file"):
            function(path)


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg"])
@pytest.mark.parametrize("data", [b"", b"RIFF", b"no audio at all" * 99])
def test_no_audio_in_it(tmp_path, suffix, data):
    path = tmp_path / f"clip.{suffix}"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"clip.{suffix} "):
        audio.read(path)


def test_a_file_without_samples(tmp_path):
    path = write_audio(tmp_path / "clip.wav", seconds=0)
    assert duration(path) == 0
    with pytest.raises(ValueError, match="holds no audio"):
        audio.read(path)


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg", "opus"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("cut", [(None, None), (0.5, 1.5), (1.9, None)])
def test_truncated(tmp_path, suffix, share, cut):
    """What is left is given, or a ValueError; never another error."""
    path = tmp_path / f"clip.{suffix}"
    options = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
    write_audio(path, seconds=2, **options)
    data = path.read_bytes()
    path.write_bytes(data[: round(share * len(data))])
    try:
        samples = audio.read(path, *cut)
    except ValueError as error:
        assert path.name in str(error)
    else:
        assert 0 < len(samples) <= 2.1 * 16000
        assert np.isfinite(samples).all()


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3", "ogg", "opus"])
@pytest.mark.parametrize("seed", range(8))
def test_corrupted(tmp_path, suffix, seed):
    path = tmp_path / f"clip.{suffix}"
    options = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
    write_audio(path, seconds=0.5, **options)
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    generator = np.random.default_rng(seed)
    # Heads are hit more often than chance would.
    places = generator.integers(0, [64, len(data)], size=(10, 2)).ravel()
    data[places] = generator.integers(0, 256, len(places))
    path.write_bytes(data.tobytes())
    try:
        assert np.isfinite(audio.read(path)).all()
    except ValueError as error:
        assert path.name in str(error)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_numbers(tmp_path, value):
    samples = tone(0.1)
    samples[7] = value
    soundfile.write(tmp_path / "clip.wav", samples, 16000, subtype="FLOAT")
    for function in (audio.read, duration):
        with pytest.raises(ValueError, match="samples that are not numbers"):
            function(tmp_path / "clip.wav")
