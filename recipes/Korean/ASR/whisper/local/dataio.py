"""Manifests to tensors: rows, waveforms, token ids.

In: a manifest CSV, a tokenizer.
Out: rows that fit the model; samples and tokens of one row.
"""

import os
import random
from pathlib import Path

import torch

from local import audio, manifest, model
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
ROUNDING = 16  # samples; resampling and cuts may add one or two
N_PREFIX = 4  # tokens; the tokenizer takes 4 µs to count them
N_SHOWN = 5  # IDs named in a warning
N_LOOKED_FOR = 1000  # audio files of a split; each is seen when it is read


def load_splits(longest_s, data_root, label_fits):
    """Reads the splits of a run; all that is wrong comes in one error.

    Arguments
    ---------
    longest_s : dict
        Path of a manifest CSV to its longest clip, seconds.
    data_root, label_fits
        As for ``load_split``.

    Returns
    -------
    dict
        Path to its rows.

    Raises
    ------
    ValueError
        A CSV file is missing or cannot be used.
    """
    splits, problems = {}, []
    for path, seconds in longest_s.items():
        try:
            splits[path] = load_split(path, data_root, seconds, label_fits)
        except (FileNotFoundError, ValueError) as error:
            problems.append(str(error))
    if problems:
        hint = "no data for a run (a test alone needs --test_only):"
        raise ValueError("\n  - ".join([hint, *problems]))
    return splits


def draw(rows, n_most):
    """A fixed part of a split, in its order; all of it where n_most is 0.

    The same in every run, whatever its seed, so that their scores compare.
    """
    if not 0 < n_most < len(rows):
        return rows
    drawn = set(random.Random(0).sample(sorted(rows), n_most))
    return {key: row for key, row in rows.items() if key in drawn}


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
    if not Path(csv_path).is_file():
        raise FileNotFoundError(
            f"no manifest '{csv_path}'; is manifest_folder right, or "
            "train_csv, valid_csv, test_csv?"
        )
    rows = manifest.read(csv_path, data_root)
    too_long = [k for k, r in rows.items() if r["duration"] > max_duration_s]
    too_many = [k for k, r in rows.items() if not label_fits(r["wrd"])]
    empty = [k for k, r in rows.items() if r["duration"] <= 0]
    if max_duration_s == float("inf"):  # a test leaves no clip out
        told = "have long labels, of which the loss counts the beginning"
        _warn(csv_path, told, too_many)
        empty, too_many = [], []
    for reason, ids in (
        ("without a duration", empty),
        (f"longer than {max_duration_s:.1f} s", too_long),
        ("labels over the decoder's length", too_many),
    ):
        _warn(csv_path, f"are left out, {reason}", ids)
    for identifier in {*empty, *too_long, *too_many}:
        del rows[identifier]
    if not rows:
        raise ValueError(
            f"{csv_path} has no clip that can be used; the prepare_report.json "
            "beside it tells what was dropped and why"
        )
    _require_audio(rows, csv_path, data_root)
    return rows


def _warn(csv_path, told, ids):
    if ids:
        shown = ", ".join(ids[:N_SHOWN]) + " …" * (len(ids) > N_SHOWN)
        logger.warning("%s: %d clips %s: %s", csv_path, len(ids), told, shown)


def _require_audio(rows, csv_path, data_root):
    """Looks for a sample of the files: a stat of each would delay a start."""
    sample = list(rows)[:: -(-len(rows) // N_LOOKED_FOR)]
    missing = [k for k in sample if not os.path.isfile(rows[k]["wav"])]
    if len(missing) == len(sample):
        raise ValueError(
            f"{csv_path}: none of its audio is there, such as "
            f"{rows[missing[0]]['wav']}; $data_root is "
            f"data_folder={str(data_root)!r}, is that right?"
        )
    if missing:
        logger.warning(
            "%s: %d of %d audio files looked for are missing; such clips count "
            "as failed: %s …",
            csv_path,
            len(missing),
            len(sample),
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


def label_fits(text, n_more=0, *, tokenizer, max_tokens):
    """Whether prefix, text, end token and so many more fit into the decoder.

    A token is at least one byte of UTF-8, so that most texts need no
    tokenizer to be known short enough.
    """
    n_free = max_tokens - N_PREFIX - 1 - n_more
    if len(text.encode()) <= n_free:
        return True
    return len(encode(text, tokenizer)) <= n_free


def encode(text, tokenizer):
    """Token ids of a text; a token's name in it is text like any other."""
    # "<|0.00|>", "<|endoftext|>": cut in two, no name is found.
    pieces = text.replace("<|", "<\0|").split("\0")
    return [
        i
        for piece in pieces
        for i in tokenizer.encode(piece, add_special_tokens=False)
    ]


def labels(text_ids, tokenizer):
    """Prefix, text and end token; the end stays where the text is cut.

    Arguments
    ---------
    text_ids : list of int
    tokenizer : transformers.WhisperTokenizer

    Returns
    -------
    ids : list of int
        As many as the decoder has positions, at most.
    is_cut : bool
    """
    n_free = model.MAX_TOKENS - len(tokenizer.prefix_tokens) - 1
    kept = [*tokenizer.prefix_tokens, *text_ids[:n_free]]
    return [*kept, tokenizer.eos_token_id], len(text_ids) > n_free


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
    ids, _ = labels(encode(text, tokenizer), tokenizer)
    ids = torch.tensor(ids)
    return ids[:-1], ids[len(tokenizer.prefix_tokens) :]
