"""Manifests to tensors: rows, waveforms, token ids.

In: a manifest CSV, a tokenizer.
Out: rows that fit the model; samples and tokens of one row.
"""

import os
from itertools import cycle, islice

import torch

from local import audio, manifest
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
ROUNDING = 16  # samples; resampling and cuts may add one or two
N_SHOWN = 5  # IDs named in a warning


def load_split(csv_path, data_root, max_duration_s, label_fits):
    """Reads one split and takes out, aloud, what the model cannot hold.

    Arguments
    ---------
    csv_path : Path
        A manifest CSV.
    data_root : str
        What ``$data_root`` stands for.
    max_duration_s : float
        Longest clip, seconds.
    label_fits : callable
        str to bool.

    Returns
    -------
    dict
        ID to row.

    Raises
    ------
    FileNotFoundError
        There is no such CSV file.
    ValueError
        No row is left, or none of their audio files is there.
    """
    rows = manifest.read(csv_path, data_root)
    too_long = [k for k, r in rows.items() if r["duration"] > max_duration_s]
    too_many = [k for k, r in rows.items() if not label_fits(r["wrd"])]
    for reason, ids in (
        (f"longer than {max_duration_s:.1f} s", too_long),
        ("labels over the decoder's length", too_many),
    ):
        if ids:
            logger.warning(
                "%s: %d clips are left out, %s: %s%s",
                csv_path,
                len(ids),
                reason,
                ", ".join(ids[:N_SHOWN]),
                " …" if len(ids) > N_SHOWN else "",
            )
    for identifier in {*too_long, *too_many}:
        del rows[identifier]
    if not rows:
        raise ValueError(f"{csv_path} has no clip that can be used")
    _require_audio(rows, csv_path, data_root)
    return rows


def _require_audio(rows, csv_path, data_root):
    missing = [k for k, r in rows.items() if not os.path.isfile(r["wav"])]
    if len(missing) == len(rows):
        raise ValueError(
            f"{csv_path}: none of its audio is there, such as "
            f"{rows[missing[0]]['wav']}; $data_root is "
            f"data_folder={str(data_root)!r}, is that right?"
        )
    if missing:
        logger.warning(
            "%s: %d audio files are missing and count as failed: %s …",
            csv_path,
            len(missing),
            ", ".join(missing[:N_SHOWN]),
        )


def read_or_silence(wav, start, stop, max_samples):
    """Samples of a clip; a clip that fails now does not stop a long run.

    Arguments
    ---------
    wav : str
        Path.
    start, stop : float or None
        Seconds into the file.
    max_samples : int
        Longest clip.

    Returns
    -------
    samples : torch.Tensor
        (n_samples,); 0.1 s of silence for a failed clip.
    failed : bool
        It left the disk, broke, or is longer than its manifest said. It
        counts nothing in the loss and is scored as empty.
    """
    try:
        samples = torch.from_numpy(audio.read(wav, start, stop))
    except (OSError, ValueError) as error:
        logger.warning("clip failed: %s", error)
        return torch.zeros(audio.SAMPLE_RATE // 10), True
    if len(samples) > max_samples + ROUNDING:
        logger.warning(
            "clip failed: %s has %.1f s, over the model's context",
            wav,
            len(samples) / audio.SAMPLE_RATE,
        )
        return torch.zeros(audio.SAMPLE_RATE // 10), True
    return samples[:max_samples], False


def label_fits(text, tokenizer, max_tokens):
    """Whether prefix, text and end token fit into the decoder.

    A token is at least one byte of UTF-8, so that most texts need no
    tokenizer to be known short enough.
    """
    n_free = max_tokens - len(tokenizer.prefix_tokens) - 1
    if len(text.encode()) <= n_free:
        return True
    return len(_encode(text, tokenizer)) <= n_free


def _encode(text, tokenizer):
    # An end token spelt out in a transcript is text like any other.
    return tokenizer.encode(
        text, add_special_tokens=False, split_special_tokens=True
    )


def token_ids(text, tokenizer):
    """Decoder input and target of a label.

    Returns
    -------
    tokens_bos : torch.Tensor
        Prefix and text.
    tokens_eos : torch.Tensor
        Text and end token. The prefix is given at every decoding and not
        learned, so the target of its last token comes first.
    """
    text_ids = _encode(text, tokenizer)
    prefix, end = tokenizer.prefix_tokens, tokenizer.eos_token_id
    return torch.tensor([*prefix, *text_ids]), torch.tensor([*text_ids, end])


class EpochSampler(torch.utils.data.Sampler):
    """Shuffled indices of one rank, other ones in every epoch.

    All ranks draw the same order and take every n-th of it, so that a step of
    n ranks holds the clips that one process with n times the batch would take.

    Arguments
    ---------
    n_items : int
        Size of the dataset; the first few are taken twice where the ranks do
        not divide it.
    seed, rank, n_ranks : int
    """

    def __init__(self, n_items, seed, rank, n_ranks):
        self.n_items, self.seed = n_items, seed
        self.rank, self.n_ranks = rank, n_ranks
        self.epoch = 0

    def set_epoch(self, epoch):
        """Tells the epoch, from which the order follows."""
        self.epoch = epoch

    def __len__(self):
        return -(-self.n_items // self.n_ranks)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.n_items, generator=generator).tolist()
        n_taken = len(self) * self.n_ranks
        return islice(cycle(order), self.rank, n_taken, self.n_ranks)


def shard(n_items, rank, n_ranks):
    """Indices of one rank; every item belongs to exactly one."""
    return range(rank, n_items, n_ranks)
