"""Clips of one session in a row, as one long training example.

In: the rows of a manifest; then the clips of one pack.
Out: packs, each a row; their samples, and their labels with or without times.

Short clips alone would teach Whisper to stop early and to forget its
timestamps; packs keep long inputs and both forms of label alive.
"""

import hashlib
from collections import defaultdict
from functools import partial
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from local import audio, dataio, loss, model
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
SAMPLES_PER_TIMESTAMP = 320  # Whisper's times are multiples of 20 ms
LAST_TIMESTAMP = 1500  # 30.00 s
TOLERANCE_S = 0.1  # of a duration, which a hand may have rounded


class Clip(NamedTuple):
    """A member of a pack: the columns of its row of the same names."""

    wav: str
    start: Optional[float]  # seconds
    stop: Optional[float]  # seconds
    duration: float  # seconds
    wrd: str

    @property
    def n_samples(self):
        """What it takes of a pack, at 16 kHz."""
        return round(self.duration * audio.SAMPLE_RATE)


def pack(rows, longest_s, label_fits, timestamps):
    """Joins consecutive clips of a session as long as they fit.

    A clip's session is its ``session``; or else its file, where it is a cut;
    or else its speaker. A clip of which nothing is known stays alone. Cuts of
    one file follow each other by their start, other clips as in the manifest.

    Arguments
    ---------
    rows : dict
        ID to row, as ``manifest.read`` gives them.
    longest_s : float
        Seconds a pack may last; a longer clip stays alone.
    label_fits : callable
        (str, int) to bool: whether the decoder holds the text, the prefix of
        four, the end and so many tokens more.
    timestamps : bool
        Leave room for the timestamps of a label.

    Returns
    -------
    dict
        ID to pack: the row of its first clip, with the ``duration`` and the
        ``wrd`` of all, and ``clips``, a list of Clip. The ID is that of the
        first clip, and the number of further ones: "a-1+3".

    Raises
    ------
    ValueError
        The ID of a pack is that of a clip too.
    """
    max_samples = int(longest_s * audio.SAMPLE_RATE)
    holds = partial(_holds, label_fits=label_fits, timestamps=timestamps)
    packs = {}
    for session in _sessions(rows):
        for members in _filled(_consecutive(session), max_samples, holds):
            first, n_more = members[0][0], len(members) - 1
            identifier = f"{first}+{n_more}" if n_more else first
            if n_more and identifier in rows:
                raise ValueError(
                    f"the pack of {n_more + 1} clips that begins with '{first}'"
                    f" would be called '{identifier}', as a clip is; rename "
                    "that clip"
                )
            packs[identifier] = _row(rows[first], [clip for _, clip in members])
    logger.info("packing: %d clips in %d packs", len(rows), len(packs))
    return packs


def _sessions(rows):
    """Lists of (ID, Clip), one list a session, in manifest order."""
    sessions = defaultdict(list)
    for identifier, row in rows.items():
        clip = Clip(*(row[column] for column in Clip._fields))
        sessions[_session(identifier, row)].append((identifier, clip))
    return sessions.values()


def _session(identifier, row):
    """What tells sessions apart; numbers of two corpora may be the same."""
    corpus = row.get("corpus")
    if row["session"]:
        return "session", corpus, row["session"]
    if row["start"] is not None or row["stop"] is not None:
        return "file", row["wav"]
    if row["spk_id"]:
        return "speaker", corpus, row["spk_id"]
    return "clip", identifier


def _consecutive(members):
    """Cuts of one file by their start, in the places where they stood."""
    cuts = defaultdict(list)
    for member in members:
        cuts[member[1].wav].append(member)
    ordered = {
        wav: iter(sorted(of_file, key=lambda member: member[1].start or 0.0))
        for wav, of_file in cuts.items()
    }
    return [next(ordered[clip.wav]) for _, clip in members]


def _filled(members, max_samples, holds):
    """Splits consecutive members where the next one does not fit.

    Labels are looked at a pack at a time, not a clip at a time: most fit, and
    a tokenizer is slow.
    """
    clips = [clip for _, clip in members]
    begin = 0
    while begin < len(clips):
        end = _end(clips, begin, max_samples)
        while end - begin > 1 and not holds(clips[begin:end]):
            end -= 1
        yield members[begin:end]
        begin = end


def _end(clips, begin, max_samples):
    """End of the longest run from ``begin``, of one clip at least."""
    end, n_samples = begin + 1, clips[begin].n_samples
    while end < len(clips):
        n_samples += clips[end].n_samples
        if n_samples > max_samples:
            break
        end += 1
    return end


def _holds(clips, label_fits, timestamps):
    """Whether the decoder holds the label in each form it may take."""
    label = _label(clips)
    if not label_fits(label, 0):
        return False
    # Two times a text, and <|notimestamps|> less. Not implied by the former:
    # " 안녕하세요" is one token, "안녕하세요" three.
    n_times = 2 * sum(bool(clip.wrd) for clip in clips)
    return not timestamps or label_fits(f" {label}", n_times - 1)


def _label(clips):
    return " ".join(clip.wrd for clip in clips if clip.wrd)


def _row(first, clips):
    # Of samples, since a sum of seconds may come out above the longest.
    n_samples = sum(clip.n_samples for clip in clips)
    return {
        **first,
        "clips": clips,
        "wrd": _label(clips),
        "duration": n_samples / audio.SAMPLE_RATE,
    }


def with_timestamps(identifier, share=0.5):
    """Whether a pack is labelled with timestamps; its ID decides.

    Arguments
    ---------
    identifier : str
        ID of the pack.
    share : float
        Of the packs that are, in [0, 1].
    """
    digest = hashlib.sha1(identifier.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def token_ids(clips, tokenizer, timestamps):
    """Decoder input and target of a pack, in a run with timestamps.

    Labels with and without times share batches, so both have two tokens more
    of input than of target::

        given                                   learned
        <|startoftranscript|><|ko|><|transcribe|>
                <|0.00|> 네<|2.40|><|2.40|> 그래요<|5.12|><|endoftext|>
        <|startoftranscript|><|ko|><|transcribe|><|notimestamps|>
                                                네 그래요<|endoftext|>

    Arguments
    ---------
    clips : list of Clip
        Of one pack. A clip without text leaves a gap between two times.
    tokenizer : transformers.WhisperTokenizer
        Prefixed as ``sources.load_tokenizer`` does.
    timestamps : bool
        Label with times; not done where nothing is said, nor where the label
        of a lone clip leaves no room for them.

    Returns
    -------
    tokens_bos : torch.Tensor
        Prefix and label.
    tokens_eos : torch.Tensor
        Label and end token. Without times it begins with ``loss.IGNORED``,
        the target of <|transcribe|>.
    """
    prefix, end = tokenizer.prefix_tokens, tokenizer.eos_token_id
    if timestamps:
        given, ids = prefix[:-1], _timed_ids(clips, tokenizer)
        if ids and len(given) + len(ids) + 1 <= model.MAX_TOKENS:
            return torch.tensor([*given, *ids]), torch.tensor([*ids, end])
    tokens_bos, tokens_eos = dataio.token_ids(_label(clips), tokenizer)
    return tokens_bos, F.pad(tokens_eos, (1, 0), value=loss.IGNORED)


def _timed_ids(clips, tokenizer):
    """Each text between its times; empty where nothing is said."""
    # Older tokenizers have no names for the times, which follow this token.
    zero = tokenizer.prefix_tokens[-1] + 1
    ids, begin = [], 0
    for clip in clips:
        end = begin + clip.n_samples
        if clip.wrd:
            # With a blank, as OpenAI's models begin a segment: texts of two
            # do not fuse where the times are taken out.
            text_ids = dataio.encode(f" {clip.wrd}", tokenizer)
            ids += [zero + _timestamp(begin), *text_ids, zero + _timestamp(end)]
        begin = end
    return ids


def _timestamp(n_samples):
    return min(round(n_samples / SAMPLES_PER_TIMESTAMP), LAST_TIMESTAMP)


def read(clips, max_samples):
    """Samples of a pack; one clip that fails, fails it.

    Clips of a pack are padded with silence or cut to the duration that the
    manifest gives, by which their times are labelled. One that differs by
    more than TOLERANCE_S fails: its speech would be missing, or silence
    labelled as speech. A lone clip is heard as it is.

    Arguments
    ---------
    clips : list of Clip
        Of one pack.
    max_samples : int
        Longest pack, at 16 kHz.

    Returns
    -------
    samples : torch.Tensor
        (n_samples,); 0.1 s of silence for a failed pack.
    failed : bool
        As for ``dataio.read_or_silence``.
    """
    parts = []
    for clip in clips:
        samples, failed = dataio.read_or_silence(
            clip.wav, clip.start, clip.stop, max_samples
        )
        if failed or len(clips) == 1:
            return samples, failed
        n_missing = clip.n_samples - len(samples)
        if abs(n_missing) > TOLERANCE_S * audio.SAMPLE_RATE:
            logger.warning(
                "clip failed: %s has %.2f s, in its manifest %.2f s; correct "
                "the manifest",
                clip.wav,
                len(samples) / audio.SAMPLE_RATE,
                clip.duration,
            )
            return torch.zeros(audio.SAMPLE_RATE // 10), True
        parts.append(F.pad(samples, (0, n_missing)))
    return torch.cat(parts), False
