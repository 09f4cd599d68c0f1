"""Audio files: bytes on disk to 16 kHz mono.

In: a path (what soundfile reads, headerless .pcm, .wavp) and an optional cut.
Out: float32 samples in [-1, 1]; ValueError for what cannot be heard.
"""

import os
from pathlib import Path

import numpy as np
import soundfile

SAMPLE_RATE = 16000  # Hz; the rate Whisper was trained at
HEADERLESS = {".pcm", ".raw"}  # signed 16-bit little-endian, 16 kHz, mono
BYTES_PER_SAMPLE = 2
MAYBE_HEADERLESS = {".wavp"}  # so if no header is there
CUT_SLACK_S = 0.5  # labels are timed by hand, and formats pad


def read(path, start=None, stop=None, sample_rate=SAMPLE_RATE):
    """Reads a clip.

    Arguments
    ---------
    path : str or Path
        wav, flac, ogg, opus, mp3, … by their content; .pcm and .raw are
        headerless 16-bit, and so is .wavp that does not begin as a RIFF
        file. Their odd last byte, as KsponSpeech's evaluation files have it,
        is dropped.
    start, stop : float or None
        Seconds into the file; None is its beginning or end.
    sample_rate : int
        Hz of the result.

    Returns
    -------
    numpy.ndarray
        float32, (n_samples,), channels averaged.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        It cannot be decoded, or holds no samples; or it ends more than
        CUT_SLACK_S before the cut does, whose text then says more.
    """
    samples, rate = decode(path, start, stop)
    if samples.size == 0:
        raise ValueError(f"{path} holds no audio between {start} and {stop} s")
    if rate != sample_rate:
        samples = _resample(samples, rate, sample_rate)
    return samples


def is_headerless(path):
    """Whether a file is taken for samples and nothing else.

    Arguments
    ---------
    path : str or Path
        Its suffix decides, and for .wavp its first bytes.

    Returns
    -------
    bool

    Raises
    ------
    OSError
        It is .wavp and cannot be read.
    """
    suffix = Path(path).suffix.lower()
    if suffix in MAYBE_HEADERLESS:
        with open(path, "rb") as file:
            return file.read(4) not in (b"RIFF", b"RIFX", b"RF64")
    return suffix in HEADERLESS


def decode(path, start, stop):
    """Samples at the rate of the file, none if the cut holds none.

    Arguments and errors are those of ``read``.

    Returns
    -------
    samples : numpy.ndarray
        float32, (n_samples,), channels averaged.
    rate : int
        Hz
    """
    samples, rate = _decode(path, start, stop)
    end = (start or 0.0) + len(samples) / rate
    if len(samples) and stop is not None and stop - end > CUT_SLACK_S:
        raise ValueError(
            f"{path} ends at {end:.2f} s, within the cut from {start or 0} to "
            f"{stop} s"
        )
    return samples, rate


def _decode(path, start, stop):
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no audio file '{path}'")
    if is_headerless(path):
        return _read_headerless(path, start, stop)
    samples, rate = _read_container(path, start, stop)
    if not np.isfinite(samples).all():
        raise ValueError(f"{path} holds samples that are not numbers")
    return samples, rate


def _read_headerless(path, start, stop):
    first = round((start or 0.0) * SAMPLE_RATE)
    n_samples = os.path.getsize(path) // BYTES_PER_SAMPLE
    last = n_samples if stop is None else round(stop * SAMPLE_RATE)
    samples = np.fromfile(
        path,
        dtype="<i2",
        count=max(0, min(last, n_samples) - first),
        offset=BYTES_PER_SAMPLE * min(first, n_samples),
    )
    return samples.astype(np.float32) / 32768, SAMPLE_RATE


def _read_container(path, start, stop):
    try:
        with soundfile.SoundFile(path) as file:
            rate = file.samplerate
            first = round((start or 0.0) * rate)
            last = file.frames if stop is None else round(stop * rate)
            last = min(last, file.frames)
            if first:
                file.seek(min(first, file.frames))
            samples = file.read(
                max(0, last - first), dtype="float32", always_2d=True
            )
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be decoded: {error}") from None
    if samples.shape[1] == 1:  # the mean of one channel costs a copy
        return samples[:, 0], rate
    return samples.mean(axis=1), rate


def _resample(samples, rate, sample_rate):
    import torch
    from torchaudio.functional import resample

    return resample(torch.from_numpy(samples), rate, sample_rate).numpy()


def slowest(augment, speeds):
    """What speed perturbation may lengthen a training clip by, inverted.

    Arguments
    ---------
    augment : bool
        Without it every clip keeps its speed.
    speeds : list of int
        Percents.

    Returns
    -------
    float
        1, or less.
    """
    return min(100, *speeds) / 100 if augment else 1.0
