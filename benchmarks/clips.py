"""The clips that every arm is given: the same ones, on any machine.

In: how many, and a seed.
Out: durations, waveforms and texts; a folder of FLAC files with a manifest.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import soundfile

SAMPLE_RATE = 16000
MEAN_S = 7.7  # of the durations
SIGMA = 0.6  # of their logarithms
SHORTEST_S, LONGEST_S = 1.0, 30.0
TONE_S = 0.1
SYLLABLES_PER_S = 8.0  # of the words below: 5 of Whisper's tokens
WORDS = (
    "오늘 날씨가 정말 좋네요 그래서 우리는 내일 서울에서 친구를 만나기로 했습니다 "
    "회의 시간은 아직 정하지 않았지만 점심을 먹고 나서 천천히 이야기하면 됩니다"
).split()


@dataclass(frozen=True)
class Clip:
    """One utterance; ``samples`` is (n_samples,) float32 at 16 kHz."""

    id: str
    samples: np.ndarray
    text: str

    @property
    def duration(self):
        """Seconds."""
        return len(self.samples) / SAMPLE_RATE


def durations(n_clips, rng):
    """Log-normal durations, one from each of ``n_clips`` equal shares.

    Stratified, so that a few clips have the mean and the tails of many.

    Returns
    -------
    numpy.ndarray
        (n_clips,), seconds, in random order.
    """
    mu = math.log(MEAN_S) - SIGMA**2 / 2
    shares = (np.arange(n_clips) + rng.random(n_clips)) / n_clips
    seconds = [math.exp(NormalDist(mu, SIGMA).inv_cdf(p)) for p in shares]
    return rng.permutation(np.clip(seconds, SHORTEST_S, LONGEST_S))


def make(n_clips, seed):
    """A list of ``Clip``: noise under a tone, and random words."""
    rng = np.random.default_rng(seed)
    return [
        Clip(f"clip_{i:05d}", _samples(seconds, rng), _text(seconds, rng))
        for i, seconds in enumerate(durations(n_clips, rng))
    ]


def _samples(seconds, rng):
    samples = 0.05 * rng.standard_normal(int(seconds * SAMPLE_RATE), np.float32)
    # SpeechBrain takes the loudest log-mel cell of a batch, this recipe that
    # of a clip: all clips share theirs, so that all arms hear the same.
    time = np.arange(int(TONE_S * SAMPLE_RATE), dtype=np.float32) / SAMPLE_RATE
    samples[: len(time)] = 0.9 * np.sin(2 * np.pi * 1000 * time)
    return samples.clip(-1, 1)


def _text(seconds, rng):
    words, n_syllables = [], 0
    while n_syllables < seconds * SYLLABLES_PER_S:
        words.append(str(rng.choice(WORDS)))
        n_syllables += len(words[-1])
    return " ".join(words)


def write(clips, folder):
    """Writes FLAC files, and one manifest for training, validation and test.

    Returns
    -------
    pathlib.Path
        The folder of ``train.csv``, ``valid.csv`` and ``test.csv``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [["ID", "duration", "wav", "spk_id", "wrd"]]
    for clip in clips:
        path = folder / f"{clip.id}.flac"
        soundfile.write(path, clip.samples, SAMPLE_RATE)
        rows.append([clip.id, f"{clip.duration:.3f}", path, "", clip.text])
    for name in ("train.csv", "valid.csv", "test.csv"):
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)
    return folder
