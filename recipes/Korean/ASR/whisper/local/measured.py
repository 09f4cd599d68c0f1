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
    escaped = _escaped(utterance)
    if escaped:
        wrong = ("name_not_unicode", f"in {', '.join(escaped)}")
        return replace(utterance, **escaped), None, wrong
    label = utterance.text
    if label is not None:
        label = text.for_label(label)
    try:
        samples, rate = audio.decode(
            utterance.wav, utterance.start, utterance.stop
        )
    except FileNotFoundError as error:
        wrong = ("missing_audio", str(error))
    except (OSError, ValueError, MemoryError) as error:
        wrong = ("unreadable_audio", str(error))
    else:
        seconds = len(samples) / rate
        keys = (
            leakage.of_text(label or ""),
            leakage.of_audio(samples, rate),
            bool(text.leftovers(label or "")),
        )
        return replace(utterance, text=label, duration=seconds), keys, None
    return replace(utterance, text=label), None, wrong


def _escaped(utterance):
    """Names on the disk or in a list that are no Unicode, made readable."""
    values = {name: getattr(utterance, name) for name in NAMES}
    try:
        "".join(values.values()).encode()
    except UnicodeEncodeError:
        return {
            name: escaped
            for name, value in values.items()
            if (escaped := _readable(value)) != value
        }
    return {}


def _readable(value):
    return value.encode("utf-8", "backslashreplace").decode()
