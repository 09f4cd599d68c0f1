"""Clips without speech, and what a model makes of them.

In: an engine that transcribes; how many clips of each kind.
Out: for each kind the share of clips that gave text, and the commonest texts.
"""

import collections
import math

import torch

from local import audio, text

SHORTEST_S, LONGEST_S = 1.0, 30.0
PEAK = 0.3  # of noise and music; of full scale
DITHER = 2**-15  # the last bit of a 16-bit file
SLOPES = {"white": 0.0, "pink": 0.5, "brown": 1.0}  # falls as 1 / f ** slope
MAINS_HZ = 60  # Korea's
N_HARMONICS = 6
BEAT_S = 0.4
# Semitones above a root: I-V-vi-IV of a major scale, and the scale itself.
CHORDS = ((0, 4, 7), (7, 11, 14), (9, 12, 16), (5, 9, 12))
SCALE = (0, 2, 4, 5, 7, 9, 11, 12)
ROOT_HZ = 130.8  # C3
N_TEXTS = 10


def run(engine, n_clips):
    """Gives an engine clips without speech; a good one writes nothing.

    Arguments
    ---------
    engine : object
        With ``name``, ``context_s``, and ``transcribe``, which turns a list of
        (samples,) tensors at 16 kHz into a list of texts.
    n_clips : int
        Of each kind.

    Returns
    -------
    list of dict
        A row a kind: ``model``, ``kind``, ``n_clips``, ``with_text`` (percent
        of the clips that gave text, as ``text.for_scoring`` leaves it), and
        ``texts``, the ten commonest with their counts.
    """
    rows = []
    for kind, waveforms in clips(n_clips, engine.context_s).items():
        heard = map(text.for_scoring, engine.transcribe(waveforms))
        counts = collections.Counter(filter(None, heard))
        rows.append(
            {
                "model": engine.name,
                "kind": kind,
                "n_clips": n_clips,
                "with_text": 100 * counts.total() / n_clips,
                "texts": [list(pair) for pair in counts.most_common(N_TEXTS)],
            }
        )
    return rows


def clips(n_clips, context_s):
    """The same clips at every call: silence, noise, music.

    Arguments
    ---------
    n_clips : int
        Of each kind, 1 or more.
    context_s : float
        Seconds that a model takes in. Clips last from 1 s to these, or to
        30 s where it takes more.

    Returns
    -------
    dict
        Kind to a list of (samples,) fp32 tensors at 16 kHz.

    Raises
    ------
    ValueError
        There are to be none.
    """
    if n_clips < 1:
        raise ValueError(f"{n_clips} probes of each kind: give 1 or more")
    lengths_s = torch.linspace(SHORTEST_S, min(LONGEST_S, context_s), n_clips)
    n_samples = (lengths_s * audio.SAMPLE_RATE).int().tolist()
    return {
        kind: [make(i, n, _seeded(i)) for i, n in enumerate(n_samples)]
        for kind, make in MAKERS.items()
    }


def _silence(index, n_samples, generator):
    """Digital zero, and every second time the faint noise of a converter."""
    noise = torch.randn(n_samples, generator=generator)
    return DITHER * noise * (index % 2)


def _noise(index, n_samples, generator):
    """White, pink, brown, the hum of the mains, and so on."""
    kinds = [*SLOPES, "hum"]
    kind = kinds[index % len(kinds)]
    if kind == "hum":
        time = _seconds(n_samples)
        return _at_peak(_tone(time, MAINS_HZ))
    white = torch.randn(n_samples, generator=generator)
    spectrum = torch.fft.rfft(white)
    bins = torch.arange(len(spectrum)).clamp(min=1)
    coloured = spectrum / bins ** SLOPES[kind]
    return _at_peak(torch.fft.irfft(coloured, n_samples))


def _music(index, n_samples, generator):
    """Struck chords, or a melody over them, in a key of its own."""
    root = ROOT_HZ * _semitones(index % 12)
    n_beat = round(BEAT_S * audio.SAMPLE_RATE)
    time = _seconds(n_beat)
    beats = []
    for beat in range(-(-n_samples // n_beat)):
        chord = CHORDS[beat // 4 % len(CHORDS)]
        notes = [_tone(time, root * _semitones(note)) for note in chord]
        if index % 2:
            step = int(torch.randint(len(SCALE), (), generator=generator))
            tune = 4 * root * _semitones(SCALE[step])  # two octaves higher
            notes.append(2 * _tone(time, tune))
        beats.append(sum(notes) * _struck(time))
    return _at_peak(torch.cat(beats)[:n_samples])


MAKERS = {"silence": _silence, "noise": _noise, "music": _music}


def _seeded(index):
    return torch.Generator().manual_seed(index)


def _seconds(n_samples):
    return torch.arange(n_samples) / audio.SAMPLE_RATE


def _semitones(n):
    return 2 ** (n / 12)


def _tone(time, hertz):
    """A sum of harmonics, each fainter than the one below it."""
    partials = torch.arange(1, N_HARMONICS + 1)[:, None]
    waves = torch.sin(2 * math.pi * hertz * partials * time) / partials
    return waves.sum(0)


def _struck(time):
    """The envelope of a plucked string: up in 10 ms, then down."""
    return (time / 0.01).clamp(max=1) * torch.exp(-4 * time)


def _at_peak(samples):
    return PEAK * samples / samples.abs().max()
