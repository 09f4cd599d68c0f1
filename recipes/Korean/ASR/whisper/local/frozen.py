"""A frozen encoder in training: encoded at full context, trimmed, kept.

In: waveforms of a batch, or clips whose states lie on disk.
Out: encoder states of a batch, and where they are real.
"""

import hashlib
import os

import torch

from local import audio, encoder_cache, features, model, packing, ranks
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
FRAMES_PER_S = audio.SAMPLE_RATE // model.SAMPLES_PER_FRAME
PROVIDED = ("sig", "failed", "states", "n_frames", "key")  # by ``read``
PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class FrozenEncoder:
    """What the decoder hears of an encoder that is not trained.

    Such an encoder knows its full context alone, so each clip is encoded
    there, and trimmed to its own length and one second. By a folder the
    states are kept on disk: the first epoch writes them, later ones read
    them, in the precision in which the decoder would take them.

    Arguments
    ---------
    folder : str
        Of the caches; empty: nothing is kept.
    """

    def __init__(self, folder):
        self.folder = os.path.expanduser(folder or "")
        self.cache = self.dtype = self.width = None
        self.put = set()  # keys of this epoch

    def open(self, whisper, precision, rows, output_folder):
        """Finds what earlier runs kept, and whether the rest has room.

        Arguments
        ---------
        whisper : local.model.Whisper
        precision : str
            Of the training: "fp32", "bf16" or "fp16".
        rows : dict
            ID to row or pack of the training split.
        output_folder : str
            Of the run; where it shares a disk with the cache, room is left
            for checkpoints.

        Raises
        ------
        ValueError
            The disk cannot take the states.
        """
        if not self.folder:
            return
        dtype = self.dtype = PRECISIONS[precision]
        self.width = whisper.config.d_model
        fingerprint = encoder_cache.fingerprint(
            whisper.model.encoder,
            dtype,
            context_samples=whisper.context_samples,
            trim_frames=model.TRIM_FRAMES,
        )
        rank, _ = ranks.here()
        self.cache = encoder_cache.EncoderCache(
            self.folder, fingerprint, f"rank{rank}"
        )
        missing = [
            row["duration"]
            for row in rows.values()
            if _key(_clips(row)) not in self.cache
        ]
        n_bytes = encoder_cache.bytes_needed(
            missing,
            FRAMES_PER_S,
            model.TRIM_FRAMES,
            whisper.n_frames(whisper.context_samples),
            self.width,
            dtype,
        )
        kept_free = encoder_cache.MARGIN_BYTES
        cache_disk, output_disk = (
            os.stat(encoder_cache.existing(folder)).st_dev
            for folder in (self.folder, output_folder)
        )
        if cache_disk == output_disk:
            kept_free += _checkpoints(whisper)
        encoder_cache.require_space(self.folder, n_bytes, kept_free)
        logger.info(
            "encoder states of %d clips are in encoder_cache_folder=%s; those "
            "of %d more will take %.2f GB",
            len(rows) - len(missing),
            self.folder,
            len(missing),
            n_bytes / 1e9,
        )

    def refresh(self):
        """Finds what all ranks have kept; before an epoch's workers start."""
        self.put.clear()
        if self.cache is not None:
            self.cache.refresh()

    def read(self, clips, max_samples):
        """In a worker: a pack's states if they are kept, else its samples.

        Arguments
        ---------
        clips : list of packing.Clip
        max_samples : int

        Returns
        -------
        samples : torch.Tensor
            (n_samples,); one where there are states.
        failed : bool
        states : torch.Tensor
            (frames, width); one frame where there are none.
        n_frames : int
            0 where there are none.
        key : str
            Of the pack; empty where it failed.
        """
        key = _key(clips)
        states = self.cache.get(key) if key else None
        if states is not None:
            return torch.zeros(1), False, states, len(states), key
        samples, failed = packing.read(clips, max_samples)
        states = torch.zeros(1, self.width, dtype=self.dtype)
        return samples, failed, states, 0, "" if failed else key

    def hear(self, whisper, batch, signals, relative_lengths):
        """States of a batch, from disk where they are; keeps the others.

        Arguments
        ---------
        whisper : local.model.Whisper
        batch : PaddedBatch
            With what ``read`` provides, where a folder is given.
        signals : dict
            From ``features.heard``; a mel only where no folder is given.
        relative_lengths : torch.Tensor
            (batch,), on the host, so that nobody waits for the device.

        Returns
        -------
        dict
            ``encoder_states`` (batch, frames, width) and ``encoder_mask``
            (batch, frames), for ``Whisper.forward``.
        """
        (data,) = signals.values()
        lengths = (relative_lengths * data.shape[1]).round().long().tolist()
        if "mel" in signals:
            lengths = [features.least_samples(n) for n in lengths]
        if self.cache is None:
            return _padded(_encode(whisper, lengths, **signals))
        n_frames = batch.n_frames.tolist()
        missing = [i for i, n in enumerate(n_frames) if n == 0]
        if not missing:  # every later epoch: padded already, by a worker
            return _masked(batch.states.data, n_frames)
        new = _encode(whisper, [lengths[i] for i in missing], data[missing])
        new = {i: s.to(self.dtype) for i, s in zip(missing, new)}
        # A clip of weight 2 stands twice in an epoch.
        fresh = {batch.key[i]: new[i] for i in missing if batch.key[i]}
        fresh = {k: s for k, s in fresh.items() if k not in self.put}
        self.put.update(fresh)
        self.cache.put_batch(list(fresh), list(fresh.values()))
        kept = [s[:n] for s, n in zip(batch.states.data, n_frames)]
        return _padded([new.get(i, s) for i, s in enumerate(kept)])


def _clips(row):
    """The clips of a pack, or the one of a plain row."""
    fields = packing.Clip._fields
    return row.get("clips") or [packing.Clip(*(row[f] for f in fields))]


def _key(clips):
    """Identity of a pack; empty where a file is not there."""
    try:
        # Clips of a pack are cut to their durations.
        keys = [
            f"{encoder_cache.key(c.wav, c.start, c.stop)} {c.duration}"
            for c in clips
        ]
    except OSError:
        return ""
    return hashlib.sha256("".join(keys).encode()).hexdigest()


def _checkpoints(whisper):
    """Bytes of three: the best, the newest, the one that is written."""
    trained = sum(t.numel() for t in whisper.trained_state().values())
    weights_and_moments = 12  # bytes a weight, fp32
    return 3 * weights_and_moments * trained


def _encode(whisper, lengths, wav=None, mel=None):
    """(frames, width) of each clip: its own and ``TRIM_FRAMES`` more."""
    states = whisper.encode(wav, mel=mel)
    n_frames = [whisper.n_frames(n) + model.TRIM_FRAMES for n in lengths]
    return [clip[:n] for clip, n in zip(states, n_frames)]


def _padded(states):
    together = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    return _masked(together, [len(clip) for clip in states])


def _masked(states, n_frames):
    mask = torch.arange(states.shape[1]) < torch.tensor(n_frames)[:, None]
    return {
        "encoder_states": states,  # (batch, frames, width)
        "encoder_mask": mask.to(states.device, non_blocking=True),
    }
