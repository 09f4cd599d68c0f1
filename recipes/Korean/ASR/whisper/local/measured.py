"""Clips as they are found: decoded once, in threads.

In: Utterances as a corpus reader gives them.
Out: the same with text, duration and keys, or what is wrong with each.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

from tqdm import tqdm

from local import audio, leakage, text

NAMES = ("id", "wav", "speaker", "category", "session")  # which stay as given
N_AT_ONCE = 4096  # clips in flight: bounds memory, not speed
N_TOGETHER = 32  # clips that a thread takes at a time


def clips(utterances):
    """Decodes every clip, and tells what it is.

    Arguments
    ---------
    utterances : iterable of Utterance
        Read a few thousand at a time.

    Yields
    ------
    Utterance
        In the same order; with its text composed and its duration.
    tuple or None
        What else ``ClipStore.keep`` takes; None where something is wrong.
    tuple or None
        What is wrong: the reason in a word, and in detail.
    """
    utterances = iter(utterances)
    bar = tqdm(desc="preparing", unit=" clips", dynamic_ncols=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool, bar:
        while some := list(islice(utterances, N_AT_ONCE)):
            starts = range(0, len(some), N_TOGETHER)
            parts = [some[start : start + N_TOGETHER] for start in starts]
            for results in pool.map(_measure_each, parts):
                bar.update(len(results))
                yield from results


def _measure_each(utterances):
    return [_measure(utterance) for utterance in utterances]


def _measure(utterance):
    label = utterance.text
    if label is not None:
        utterance = replace(utterance, text=text.for_label(label))
    escaped = _escaped(utterance)
    if escaped != utterance:
        return escaped, None, ("name_not_unicode", "in the ID, path or speaker")
    try:
        samples, rate = audio._decode(
            utterance.wav, utterance.start, utterance.stop
        )
    except FileNotFoundError as error:
        return utterance, None, ("missing_audio", str(error))
    except (OSError, ValueError, MemoryError) as error:
        return utterance, None, ("unreadable_audio", str(error))
    label = utterance.text or ""
    keys = (
        leakage.of_text(label),
        leakage.of_audio(samples, rate),
        bool(text.leftovers(label)),
    )
    return replace(utterance, duration=len(samples) / rate), keys, None


def _escaped(utterance):
    """The same, unless a name on the disk or in a list is no Unicode."""
    escaped = {}
    for name in NAMES:
        value = getattr(utterance, name)
        try:
            value.encode()
        except UnicodeEncodeError:
            escaped[name] = value.encode("utf-8", "backslashreplace").decode()
    return replace(utterance, **escaped) if escaped else utterance
