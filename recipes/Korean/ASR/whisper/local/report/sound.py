"""Clips for a report: inside it, linked from it, or left out.

In: clips, the worst first, and where the report will stand.
Out: an address for each clip's player, or why it has none.
"""

import base64
import io
import os
import urllib.parse
from pathlib import Path

import soundfile

from local import audio

MODES = ("embed", "link", "none")
MAX_BYTES = 25_000_000  # of all embedded clips: what a browser opens at once
MAX_CLIP_S = 60.0
NOTHING = (None, "")


def players(clips, folder, mode, n_embedded):
    """Where a player finds each clip.

    Arguments
    ---------
    clips : list of dict
        ``wav`` and, in seconds, ``start``, ``stop`` and ``duration``; the
        worst first. Any may be missing.
    folder : Path
        Of the report.
    mode : str
        One of ``MODES``: mono 16 kHz MP3 within the report, a link to the
        corpus, or nothing.
    n_embedded : int
        Clips that are embedded, while they take less than ``MAX_BYTES``.

    Returns
    -------
    list of (str or None, str)
        The address; or None, and why.
    """
    if mode == "embed":
        return list(_embedded(clips, n_embedded))
    if mode == "link":
        return [_linked(clip, folder) for clip in clips]
    return [NOTHING] * len(clips)


def _embedded(clips, n_embedded):
    left = MAX_BYTES
    for number, clip in enumerate(clips):
        if number >= n_embedded:
            yield (
                None,
                f"Not embedded: only the worst {n_embedded:,} clips are.",
            )
            continue
        address, note = _player(clip)
        if len(address or "") > left:
            address, note = None, "Not embedded: the report would be too large."
        left -= len(address or "")
        yield address, note


def _player(clip):
    """A clip as an address that holds it."""
    if not clip.get("wav"):
        return None, "No audio file is named."
    if (clip.get("duration") or 0) > MAX_CLIP_S:
        return None, f"Not embedded: longer than {MAX_CLIP_S:.0f} s."
    try:
        samples = audio.read(clip["wav"], clip.get("start"), clip.get("stop"))
        # Every browser plays MP3, and it is encoded four times as fast as
        # Opus; FLAC takes three times the space.
        file = io.BytesIO()
        soundfile.write(file, samples, audio.SAMPLE_RATE, format="MP3")
    except (OSError, ValueError, RuntimeError) as error:
        return None, f"Cannot be read: {error}"
    return _data("audio/mpeg", file.getvalue()), ""


def _data(kind, content):
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _linked(clip, folder):
    """A clip's address on this machine; relative where it lies below."""
    if not clip.get("wav"):
        return None, "No audio file is named."
    wav = Path(clip["wav"]).absolute()
    if wav.suffix.lower() in audio.HEADERLESS:
        return None, "A headerless file, which no browser plays; embed it."
    if not wav.is_file():
        return None, f"Cannot be read: no audio file '{wav}'"
    folder = folder.absolute()
    inside = folder in wav.parents
    # As bytes: names of old archives are no UTF-8.
    address = (
        urllib.parse.quote(os.fsencode(wav.relative_to(folder).as_posix()))
        if inside
        else wav.as_uri()
    )
    return address + _cut(clip.get("start"), clip.get("stop")), ""


def _cut(start, stop):
    """Of a media address: the seconds that are played."""
    if not start and not stop:
        return ""
    return f"#t={start or 0:g}" + (f",{stop:g}" if stop else "")
