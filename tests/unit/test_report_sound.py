"""Clips for a report: embedded, linked, and what cannot be heard."""

import base64
import io
import re

import pytest
import soundfile
from conftest import write_audio
from local.report import sound


def test_the_worst_clips_are_embedded_as_they_sound(tmp_path):
    wav = write_audio(tmp_path / "a.wav", 2.0, rate=8000, channels=2)
    clips = [{"wav": str(wav), "start": 0.5, "stop": 1.75}] * 3
    found = sound.players(clips, tmp_path, "embed", 2)
    assert found[2] == (None, "Not embedded: only the worst 2 clips are.")
    kind, content = found[1][0].split(",")
    assert kind == "data:audio/mpeg;base64"
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(content)))
    assert (rate, samples.ndim) == (16000, 1)
    assert len(samples) / rate == pytest.approx(1.25, abs=0.15)


def test_embedded_clips_stay_below_a_size(tmp_path, monkeypatch):
    long = write_audio(tmp_path / "a.wav", 3.0)
    short = write_audio(tmp_path / "b.wav", 0.2)
    clips = [{"wav": str(path)} for path in (short, long, short)]
    monkeypatch.setattr(sound, "MAX_BYTES", 9000)
    found = sound.players(clips, tmp_path, "embed", 9)
    assert [address is None for address, _ in found] == [False, True, False]
    assert "too large" in found[1][1]
    assert sum(len(address or "") for address, _ in found) <= 9000


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"wav": "{}/gone.wav"}, "Cannot be read: no audio file"),
        ({"wav": "{}/text.wav"}, "Cannot be read: .* cannot be decoded"),
        ({"wav": "{}/a.wav", "start": 9.0, "stop": 9.5}, "holds no audio"),
        ({"wav": "{}/a.wav", "duration": 61.0}, "longer than 60 s"),
        ({"wav": None}, "No audio file is named"),
        ({"wav": "a\0b"}, "Cannot be read"),
        ({}, "No audio file is named"),
    ],
)
def test_why_a_clip_has_no_player_is_told(tmp_path, values, reason):
    write_audio(tmp_path / "a.wav")
    (tmp_path / "text.wav").write_text("no audio")
    wav = values.get("wav")
    values |= {"wav": wav.replace("{}", str(tmp_path))} if wav else {}
    ((address, told),) = sound.players([values], tmp_path, "embed", 1)
    assert address is None and re.search(reason, told)


@pytest.mark.parametrize(
    "name, start, stop, address",
    [
        ("in/가 #1.wav", None, None, "in/%EA%B0%80%20%231.wav"),
        ("in/a.wav", 1.5, 2.25, "in/a.wav#t=1.5,2.25"),
        ("in/a.wav", 0.0, 2.0, "in/a.wav#t=0,2"),
        ("in/a.wav", 2.0, None, "in/a.wav#t=2"),
        ("../a&b.wav", 0.0, None, "file://{}/a%26b.wav"),
        ("in/\udcb0.wav", None, None, "in/%B0.wav"),
    ],
)
def test_links(tmp_path, name, start, stop, address):
    wav = (tmp_path / name).resolve()
    wav.parent.mkdir(exist_ok=True)
    wav.write_bytes(b"")
    clip = {"wav": str(wav), "start": start, "stop": stop}
    expected = address.replace("{}", str(tmp_path.parent))
    found = sound.players([clip], tmp_path, "link", 0)
    assert found == [(expected, "")]


@pytest.mark.parametrize("name", ["a.pcm", "gone.wav", "javascript:alert(1)"])
def test_what_no_browser_plays_is_not_linked(tmp_path, name):
    (tmp_path / "a.pcm").write_bytes(b"\0\0")
    clip = {"wav": str(tmp_path / name)}
    ((address, told),) = sound.players([clip], tmp_path, "link", 0)
    assert address is None and re.search("headerless|no audio file", told)


def test_without_clips_nothing_is_read(tmp_path):
    found = sound.players([{"wav": "gone.wav"}] * 2, tmp_path, "none", 9)
    assert found == [(None, "")] * 2
