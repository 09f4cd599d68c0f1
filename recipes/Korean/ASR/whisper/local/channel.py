"""Telephone, noise and rooms: what training clips are passed through.

In: a batch of waveforms; shares of the clips, folders of noise and responses.
Out: the waveforms as a call centre might have recorded them, as long as before.
"""

import logging
import os
import random
from pathlib import Path

import soundfile
import torch
from torchaudio.functional import (
    add_noise,
    fftconvolve,
    mu_law_decoding,
    mu_law_encoding,
    resample,
)

from local import audio

logger = logging.getLogger(__name__)

TELEPHONE_RATE = 8000  # Hz
TELEPHONE_BAND = (300, 3400)  # Hz; ITU-T G.712
BAND_TAPS = 255  # at 8 kHz: the band's edges are about 100 Hz wide
LEVELS = 256  # of 8-bit μ-law, as ITU-T G.711 has them
BANK_S = 600  # seconds of a folder that are kept in memory
CROP_S = 30  # of one file of noise, at most: as long as any clip
RESPONSE_S = 3  # of a room's response, from its direct sound on
QUIET = 1e-5  # a file with no sample above it holds nothing
SUFFIXES = {
    f".{name.lower()}" for name in soundfile.available_formats()
} - audio.HEADERLESS | {".opus", ".aif"}


class Channel:
    """Passes some training clips through a room, noise and a telephone.

    Each clip is drawn for itself, by PyTorch's generator of the CPU: a caller
    who seeds that gets the same batch again. What a clip becomes hangs on
    neither the length nor the number of its neighbours, and what lies behind
    its end is left as it is. Files are read at the first call.

    Arguments
    ---------
    telephone_share : float
        Of the clips, 0 to 1: 300-3400 Hz at 8 kHz, 8-bit μ-law.
    noise_folder : str
        Audio at any depth, in what soundfile reads at any rate; empty: no
        noise, whatever its share.
    noise_share : float
        Of the clips, 0 to 1.
    snr_db : list of float
        Lowest and highest ratio of the clip's energy to the noise's.
    reverb_folder : str
        Impulse responses of rooms, as in ``noise_folder``.
    reverb_share : float
        Of the clips, 0 to 1.
    seed : int
        Which files and parts of them are kept, where they are more than ten
        minutes.
    """

    def __init__(
        self,
        telephone_share=0.0,
        noise_folder="",
        noise_share=0.0,
        snr_db=(5, 20),
        reverb_folder="",
        reverb_share=0.0,
        seed=0,
    ):
        self.telephone_share = telephone_share
        self.noise_folder, self.reverb_folder = noise_folder, reverb_folder
        self.noise_share = noise_share if noise_folder else 0.0
        self.reverb_share = reverb_share if reverb_folder else 0.0
        self.snr_db = snr_db
        self.seed = seed
        self.noises, self.responses = [], []

    def __call__(self, wavs, wav_lens):
        """A batch through the channel; the given one stays as it was.

        Arguments
        ---------
        wavs : torch.Tensor
            (batch, samples), 16 kHz, fp32, on any device.
        wav_lens : torch.Tensor
            (batch,), relative to the samples. On the host, or it waits.

        Returns
        -------
        torch.Tensor
            (batch, samples); in [-1, 1] where a clip was changed.

        Raises
        ------
        ValueError
            None of a folder's files can be read.
        """
        if not (self.telephone_share or self.noise_share or self.reverb_share):
            return wavs
        self._load(wavs.device)
        n_samples = torch.round(wav_lens * wavs.shape[1]).int().tolist()
        # As many numbers a clip whatever happens to it: shares and folders
        # change nothing else of what is drawn.
        draws = torch.rand(len(wavs), 7).tolist()
        wavs = wavs.clone()
        # Mixed precision would convolve in bf16.
        with torch.autocast(wavs.device.type, enabled=False):
            for wav, n, draw in zip(wavs, n_samples, draws):
                if n:
                    wav[:n] = self._pass(wav[:n], draw)
        return wavs

    def _pass(self, clip, draw):
        """(samples,) of one clip, by seven numbers of at least 0 below 1."""
        through_room, with_noise, by_telephone, which, *of_noise = draw
        changed = clip
        if through_room < self.reverb_share:
            changed = reverberant(changed, _pick(self.responses, which))
        if with_noise < self.noise_share:
            which, place, loudness = of_noise
            noise = _stretch(_pick(self.noises, which), len(clip), place)
            low, high = self.snr_db
            changed = noisy(changed, noise, low + loudness * (high - low))
        if by_telephone < self.telephone_share:
            changed = telephone(changed)
        if changed is clip:
            return clip
        return changed / changed.abs().amax().clamp(min=1)

    def _load(self, device):
        if self.noise_share and not self.noises:
            self.noises = _bank(
                "noise_folder", self.noise_folder, _crop, self.seed, device
            )
        if self.reverb_share and not self.responses:
            self.responses = _bank(
                "reverb_folder",
                self.reverb_folder,
                _response,
                self.seed,
                device,
            )


def telephone(clip):
    """Narrow band and μ-law, at 8 kHz and back.

    Arguments
    ---------
    clip : torch.Tensor
        (samples,), 16 kHz.

    Returns
    -------
    torch.Tensor
        (samples,), 16 kHz, not delayed.
    """
    narrow = resample(clip, audio.SAMPLE_RATE, TELEPHONE_RATE)
    band = _band().to(clip.device, non_blocking=True)
    n_before = BAND_TAPS // 2
    narrow = fftconvolve(narrow, band)[n_before:][: len(narrow)]
    narrow = mu_law(narrow)
    return resample(narrow, TELEPHONE_RATE, audio.SAMPLE_RATE)[: len(clip)]


def mu_law(samples):
    """The nearest of the 256 levels of μ-law; what exceeds [-1, 1] is cut."""
    codes = mu_law_encoding(samples.clamp(-1, 1), LEVELS)
    return mu_law_decoding(codes, LEVELS)


def noisy(clip, noise, snr_db):
    """A clip with noise of the same length; silence stays silent.

    Arguments
    ---------
    clip, noise : torch.Tensor
        (samples,)
    snr_db : float
        Ratio of their energies.

    Returns
    -------
    torch.Tensor
        (samples,)
    """
    snr_db = torch.full((), snr_db, device=clip.device)
    mixed = add_noise(clip, noise, snr_db)
    return torch.where(mixed.isfinite().all(), mixed, clip)


def reverberant(clip, response):
    """A clip in a room, as loud as before; its tail ends with the clip.

    Arguments
    ---------
    clip : torch.Tensor
        (samples,)
    response : torch.Tensor
        (response samples,), direct sound first.

    Returns
    -------
    torch.Tensor
        (samples,)
    """
    # Not speechbrain's reverberate: it wraps the tail round to the start.
    wet = fftconvolve(clip, response)[: len(clip)]
    smallest = torch.finfo(clip.dtype).tiny
    return wet * (clip.norm() / wet.norm().clamp(min=smallest))


def _band():
    """(taps,) of a windowed-sinc filter for the telephone's band at 8 kHz.

    Biquads would run sample by sample, for which a GPU is slow.
    """
    place = torch.arange(BAND_TAPS) - BAND_TAPS // 2
    low, high = (2 * edge / TELEPHONE_RATE for edge in TELEPHONE_BAND)
    ideal = high * torch.sinc(high * place) - low * torch.sinc(low * place)
    return ideal * torch.hamming_window(BAND_TAPS, periodic=False)


def _pick(bank, draw):
    return bank[int(draw * len(bank))]


def _stretch(noise, n_samples, place):
    """So many samples of noise from a place in [0, 1) on, repeated if short."""
    spare = len(noise) - n_samples
    start = int(place * (spare + 1 if spare >= 0 else len(noise)))
    n_times = -(-(start + n_samples) // len(noise))
    return noise.repeat(n_times)[start : start + n_samples]


def _bank(name, folder, read, seed, device):
    """Waveforms of a folder, up to ten minutes in all, on a device."""
    paths = audio_files(folder)
    draws = random.Random(seed)
    draws.shuffle(paths)
    bank, bad, n_samples = [], [], 0
    for path in paths:
        if n_samples >= BANK_S * audio.SAMPLE_RATE:
            break
        try:
            bank.append(torch.from_numpy(read(path, draws.random())).to(device))
            n_samples += len(bank[-1])
        except (OSError, ValueError, soundfile.LibsndfileError) as error:
            bad.append(str(error))
    if bad:
        logger.warning(
            "%s='%s': %d files cannot be used, such as: %s",
            *(name, folder, len(bad), bad[0]),
        )
    if not bank:
        raise ValueError(
            f"{name}='{folder}': none of its {len(paths)} audio files can be "
            f"used; give a folder of {', '.join(sorted(SUFFIXES)[:3])} … files"
        )
    logger.info(
        "%s='%s': %.1f min of %d of %d files",
        *(name, folder, n_samples / 60 / audio.SAMPLE_RATE),
        *(len(bank), len(paths)),
    )
    return bank


def audio_files(folder):
    """Paths of audio at any depth of a folder, sorted."""
    found = [
        Path(where) / name
        for where, _, names in os.walk(folder, followlinks=True)
        for name in names
    ]
    return sorted(path for path in found if path.suffix.lower() in SUFFIXES)


def _crop(path, place):
    """Up to 30 s of a file, from a place in [0, 1) of what it can spare."""
    spare_s = max(0.0, soundfile.info(path).duration - CROP_S)
    start = place * spare_s
    stop = start + CROP_S if spare_s else None
    samples = audio.read(path, start, stop)
    if abs(samples).max() < QUIET:
        raise ValueError(f"{path} is silent")
    return samples


def _response(path, _):
    """A room's response, from its direct sound on, which is its loudest."""
    samples = _crop(path, 0.0)
    first = abs(samples).argmax()
    return samples[first : first + RESPONSE_S * audio.SAMPLE_RATE].copy()
