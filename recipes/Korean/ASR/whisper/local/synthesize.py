"""A small Korean corpus, spoken by espeak-ng, for a first run offline.

In: a folder to write into, a number of sentences and a seed.
Out: audio/<speaker>/*.flac at 16 kHz, and manifest.tsv written last.
"""

import argparse
import contextlib
import csv
import ctypes
import hashlib
import io
import multiprocessing
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Set

import numpy as np
import soundfile
from scipy.signal import resample_poly
from tqdm import tqdm

SAMPLE_RATE = 16000  # Hz
ESPEAK_RATE = 22050  # Hz; what espeak-ng renders
MAX_DURATION_S = 4.4  # slowed to 95 % it stays under 5 s
MARGIN_S = 0.1  # silence kept on either side
N_SENTENCES = 1500  # one clip each
MIN_SENTENCES = 12  # fewer leave too few words to hold sentences out
MIN_TEST_SYLLABLES = 120  # distinct
MIN_SYLLABLES, MAX_SYLLABLES = 8, 19  # of a sentence; 1.0 to 4.4 s
SEED = 1986
N_JOBS = 4  # the same everywhere, for what a clip sounds like depends on it
VERSION = 1  # raise it when the same plan would sound different
COLUMNS = ("id", "path", "text", "speaker", "category", "split")

# None of them breathes: espeak's breath is noise with another seed each run.
VOICES = "m1 m2 m3 m4 m5 m7 f1 f4 Annie aunty steph".split()
HELD_OUT_VOICE = "linda"  # heard in the test set only
N_VALID, N_TEST = 60, 190  # of N_SENTENCES
N_HELD_OUT = 60  # of N_TEST, said by the held-out voice

TIMES = "어제 그저께 아까 방금 지난주에 작년에 새벽에".split() + [
    f"{hour} 시에" for hour in "한 두 세 네 다섯 여섯 일곱 여덟 아홉 열".split()
]
SUBJECTS = (
    "동생 친구 선생님 할머니 아버지 누나 삼촌 이모 의사 경찰관 학생 아이 손님 "
    "요리사 가수 민수"
).split()
# Places, and what is done there.
SCENES = {
    "시장에서 가게에서 마트에서": "사과 샀습니다/우유 팔았습니다/모자 골랐습니다",
    "집에서 부엌에서 마당에서": "찌개 끓였습니다/빨래 널었습니다/드라마 봤습니다",
    "도서관에서 교실에서 학교에서": "책 읽었습니다/숙제 끝냈습니다/편지 썼습니다",
    "공원에서 운동장에서 바닷가에서": "자전거 탔습니다/사진 찍었습니다/노래 불렀습니다",
    "회사에서 은행에서 우체국에서": "전화 받았습니다/서류 찾았습니다/소포 보냈습니다",
    "식당에서 찻집에서 빵집에서": "냉면 먹었습니다/커피 시켰습니다/녹차 마셨습니다",
}


@dataclass(frozen=True)
class Clip:
    """One sentence and how it is said."""

    id: str
    text: str
    speaker: str  # a voice variant of espeak
    split: str
    rate: int  # words per minute, as espeak counts them
    pitch: int  # 0 to 100
    peak: float  # the largest sample, of 1
    noise_db: float  # relative to the clip's power
    noise_seed: int

    @property
    def path(self) -> str:
        """Below the corpus folder."""
        return f"audio/{self.speaker}/{self.id}.flac"

    @property
    def category(self) -> str:
        """Whether training has heard the voice."""
        new = self.speaker == HELD_OUT_VOICE
        return "new voice" if new else "known voice"


def _with_particle(word: str, after_consonant: str, after_vowel: str) -> str:
    # a block of 28 syllables shares all but the final; its first has none
    has_final = (ord(word[-1]) - ord("가")) % 28 != 0
    return word + (after_consonant if has_final else after_vowel)


def _draw(rng: random.Random, known: Optional[Set[str]]) -> Optional[str]:
    """A sentence, or None where the known words or the length forbid it."""
    places, actions = rng.choice(list(SCENES.items()))
    particles = rng.choice((("은", "는"), ("이", "가")))
    predicates = map(str.split, actions.split("/"))
    slots = [
        [_with_particle(subject, *particles) for subject in SUBJECTS],
        [f"{_with_particle(o, '을', '를')} {verb}" for o, verb in predicates],
    ]
    if rng.random() < 0.7:
        slots.insert(1, places.split())
    if rng.random() < 0.7:
        slots.insert(0, TIMES)
    if known is not None:
        slots = [[s for s in slot if known >= set(s.split())] for slot in slots]
    if not all(slots):
        return None
    sentence = " ".join(rng.choice(slot) for slot in slots)
    fits = MIN_SYLLABLES <= len(sentence.replace(" ", "")) <= MAX_SYLLABLES
    return sentence if fits else None


def _sentences(rng, n_sentences, taken, known=None) -> List[str]:
    """New sentences; they are added to ``taken``."""
    sentences: List[str] = []
    while len(sentences) < n_sentences:
        sentence = _draw(rng, known)
        if sentence and sentence not in taken:
            taken.add(sentence)
            sentences.append(sentence)
    return sentences


def plan(n_sentences: int = N_SENTENCES, seed: int = SEED) -> List[Clip]:
    """Decides what is said, by whom and how, without a sound.

    No sentence stands twice. A sentence held out for validation or test is
    new, but each of its words occurs in training.

    Arguments
    ---------
    n_sentences : int
        Of all splits together; at least ``MIN_SENTENCES``.
    seed : int
        The same seed plans the same corpus.

    Returns
    -------
    list of Clip
        In the order train, valid, test.

    Raises
    ------
    ValueError
        Too few sentences, or fewer than 120 distinct syllables in the test
        text (in a test set smaller than that, fewer than sentences).
    """
    if n_sentences < MIN_SENTENCES:
        raise ValueError(
            f"n_sentences={n_sentences} is under {MIN_SENTENCES}; take more"
        )
    rng = random.Random(seed)
    n_valid, n_test, n_held_out = (
        max(1, n * n_sentences // N_SENTENCES)
        for n in (N_VALID, N_TEST, N_HELD_OUT)
    )
    taken: Set[str] = set()
    train = _sentences(rng, n_sentences - n_valid - n_test, taken)
    known = {word for text in train for word in text.split()}
    held_out = _sentences(rng, n_valid + n_test, taken, known)
    n_syllables = len(set("".join(held_out[n_valid:])) - {" "})
    if n_syllables < min(MIN_TEST_SYLLABLES, n_test):
        raise ValueError(
            f"seed={seed} gives a test text of only {n_syllables} distinct "
            "syllables; take another seed"
        )
    splits = ["train"] * len(train) + ["valid"] * n_valid + ["test"] * n_test
    speakers = [VOICES[i % len(VOICES)] for i in range(n_sentences)]
    speakers[-n_held_out:] = [HELD_OUT_VOICE] * n_held_out
    rows = enumerate(zip(train + held_out, speakers, splits, strict=True))
    return [_clip(rng, index, *row) for index, row in rows]


def _clip(rng, index, text, speaker, split) -> Clip:
    return Clip(
        *(f"{speaker}_{index:05d}", text, speaker, split),
        rate=rng.randint(160, 200),
        pitch=rng.randint(35, 65),
        peak=round(rng.uniform(0.2, 0.8), 3),
        noise_db=round(rng.uniform(-50, -35), 1),
        noise_seed=rng.getrandbits(32),
    )


class _Espeak:
    """espeak-ng, of which a process holds one."""

    SYNCHRONOUS, UTF8, RATE, PITCH = 2, 1, 1, 3  # from its speak_lib.h

    def __init__(self, library: str, data: str):
        self._lib = lib = ctypes.CDLL(library)
        self._variants = Path(data, "voices", "!v")
        rate = lib.espeak_Initialize(self.SYNCHRONOUS, 0, data.encode(), 0)
        if rate != ESPEAK_RATE:
            raise RuntimeError(f"{library} renders at {rate} Hz with {data}")
        self._chunks: List[bytes] = []
        integer, pointer = ctypes.c_int, ctypes.c_void_p
        signature = ctypes.CFUNCTYPE(integer, pointer, integer, pointer)
        # held here, for ctypes frees a callback that nobody holds
        self._callback = signature(self._collect)
        lib.espeak_SetSynthCallback(self._callback)

    def _collect(self, samples, n_samples, _events) -> int:
        if samples:
            self._chunks.append(ctypes.string_at(samples, 2 * n_samples))
        return 0

    def speak(self, clip: Clip) -> np.ndarray:
        """Says one clip: float64, (n_samples,), at ESPEAK_RATE."""
        # espeak takes an unknown variant for its default voice, unsaid
        if not (self._variants / clip.speaker).is_file():
            raise RuntimeError(f"no voice {clip.speaker} in {self._variants}")
        lib, text = self._lib, clip.text.encode() + b"\0"
        size = ctypes.c_size_t(len(text))
        self._chunks.clear()
        statuses = (
            # a voice resets the parameters, so it comes first
            lib.espeak_SetVoiceByName(f"ko+{clip.speaker}".encode()),
            lib.espeak_SetParameter(self.RATE, clip.rate, 0),
            lib.espeak_SetParameter(self.PITCH, clip.pitch, 0),
            lib.espeak_Synth(text, size, 0, 1, 0, self.UTF8, None, None),
            lib.espeak_Synchronize(),
        )
        if any(statuses) or not self._chunks:
            raise RuntimeError(f"espeak-ng cannot say {clip}: {statuses}")
        return np.frombuffer(b"".join(self._chunks), "<i2").astype(float)


def _finish(samples: np.ndarray, clip: Clip) -> np.ndarray:
    """Resamples, trims, sets the level and adds noise; (n_samples,)."""
    samples = resample_poly(samples, 320, 441)  # 22050 to 16000 Hz
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max())
    margin = round(MARGIN_S * SAMPLE_RATE)
    samples = samples[max(0, loud[0] - margin) : loud[-1] + margin]
    samples = samples * (clip.peak / np.abs(samples).max())
    level = np.sqrt(np.mean(samples**2)) * 10 ** (clip.noise_db / 20)
    noise = np.random.default_rng(clip.noise_seed)
    return samples + noise.normal(0, level, samples.size)


@contextlib.contextmanager
def _writing(folder: Path):
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write the corpus into {folder}: {error.strerror}; "
            "free space there or choose another folder",
        ) from error


def _speak_all(job) -> int:
    """Says and writes the clips of one job; returns their number."""
    library, data, clips, out = job
    espeak = _Espeak(library, data)
    for clip in clips:
        samples = _finish(espeak.speak(clip), clip)
        assert samples.size <= MAX_DURATION_S * SAMPLE_RATE, f"{clip} is long"
        encoded = io.BytesIO()
        soundfile.write(encoded, samples, SAMPLE_RATE, "PCM_16", format="FLAC")
        with _writing(out):
            (out / clip.path).write_bytes(encoded.getvalue())
    return len(clips)


def _speak_in_parallel(clips: List[Clip], out: Path) -> None:
    # A fresh process a job: espeak's flutter runs on from clip to clip, so
    # only the same clips in the same order always sound the same.
    try:
        import espeakng_loader as espeak
    except ImportError:
        raise ModuleNotFoundError(
            "the corpus is spoken by espeak-ng: pip install espeakng-loader"
        ) from None
    paths = espeak.get_library_path(), espeak.get_data_path()
    jobs = [(*paths, clips[first::N_JOBS], out) for first in range(N_JOBS)]
    n_processes = min(os.cpu_count() or 1, N_JOBS)
    context = multiprocessing.get_context("spawn")
    progress = tqdm(total=len(clips), desc="speaking", unit="clip")
    with context.Pool(n_processes, maxtasksperchild=1) as pool, progress:
        for n_clips in pool.imap_unordered(_speak_all, jobs):
            progress.update(n_clips)


def _write_manifest(path: Path, clips: List[Clip]) -> None:
    temporary = path.with_suffix(".tsv.tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, "excel-tab", lineterminator="\n")
        writer.writerow(COLUMNS)
        for clip in clips:
            writer.writerow(getattr(clip, column) for column in COLUMNS)
    os.replace(temporary, path)


def synthesize(
    out: Path, n_sentences: int = N_SENTENCES, seed: int = SEED
) -> None:
    """Builds the corpus, unless it stands there already.

    Arguments
    ---------
    out : Path
        The folder; a corpus built here with other settings is replaced.
    n_sentences, seed : int
        As in `plan`.

    Raises
    ------
    ValueError
        As in `plan`.
    ModuleNotFoundError
        espeakng_loader is not installed.
    OSError
        The folder cannot be written, its disk is full, or it holds a
        manifest from elsewhere.
    """
    clips = plan(n_sentences, seed)
    manifest, settings = out / "manifest.tsv", out / "corpus.sha256"
    fingerprint = hashlib.sha256(repr((VERSION, clips)).encode()).hexdigest()
    if manifest.is_file():
        if not settings.is_file():
            raise FileExistsError(
                f"{manifest} was not built here; choose another folder"
            )
        if settings.read_text() == fingerprint:
            return
    with _writing(out):
        manifest.unlink(missing_ok=True)
        for folder in {(out / clip.path).parent for clip in clips}:
            folder.mkdir(parents=True, exist_ok=True)
        settings.write_text(fingerprint)
    _speak_in_parallel(clips, out)
    with _writing(out):
        _write_manifest(manifest, clips)


def main() -> None:
    """Reads the command line and builds the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--n_sentences", type=int, default=N_SENTENCES)
    parser.add_argument("--seed", type=int, default=SEED)
    synthesize(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
