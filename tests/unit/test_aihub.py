"""AI Hub's layout: pairing, archives, rates and cuts, on miniature trees."""

import io
import json
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import duration, write_audio
from local import corpora
from local.corpora import aihub

CLIP = "D01/J18/S000123/0005"


def write(path, content=b"", encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    is_text = isinstance(content, str)
    path.write_bytes(content.encode(encoding) if is_text else content)
    return path


def write_label(path, content, encoding="utf-8"):
    return write(path, json.dumps(content, ensure_ascii=False), encoding)


def read(folder, text_form="spelling", **settings):
    return list(aihub.read(folder, text_form, **settings))


def row(utterance):
    return utterance.id, utterance.split, utterance.text


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


# Folders


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(
    "source, label, split",
    [
        ("1.Training/원천데이터", "1.Training/라벨링데이터", "train"),
        (
            "2.Validation/원천데이터_230316",
            "2.Validation/라벨링데이터_230801",
            "valid",
        ),
        (
            "01.데이터/검증/원천데이터/VS1",
            "01.데이터/검증/라벨링데이터/VL1",
            "valid",
        ),
        ("3.Test/01.원천데이터", "3.Test/02.라벨링데이터", "test"),
        ("평가용 데이터/원천", "평가용 데이터/라벨", "test"),
        ("학습/[원천]1.AI챗봇", "학습/[라벨]1.AI챗봇", "train"),
        ("원천데이터/Validation", "라벨링데이터/Validation", "valid"),
        (
            "Training_220728_add/원천데이터/TS1",
            "Training/라벨링데이터",
            "train",
        ),
        ("원천데이터/VS_가", "라벨링데이터/VL_가", "valid"),
        ("Training/원천데이터/wav", "Training/라벨링데이터/json", "train"),
        ("Training", "Training", "train"),
        ("", "", "train"),
    ],
)
def test_layouts(tmp_path, source, label, split, form):
    source, label = (unicodedata.normalize(form, s) for s in (source, label))
    wav = write_audio(tmp_path / source / f"{CLIP}.wav", 0.1)
    write(tmp_path / label / f"{CLIP}.txt", "네")
    (clip,) = read(tmp_path)
    assert (clip.split, clip.text, clip.wav) == (split, "네", str(wav))
    assert clip.speaker == "S000123" and clip.session == ""


def test_ids_categories_and_splits(tmp_path):
    for place, category, clip in [
        ("1.Training", "D01", "J18/S000001/0001"),
        ("1.Training", "D02", "J18/S000001/0001"),
        ("2.Validation", "D01", "J18/S000001/0001"),
        ("1.Training", "S000009", "0001"),
    ]:
        path = f"{category}/{clip}"
        write(tmp_path / place / "원천데이터" / f"{path}.WAV")
        write(tmp_path / place / "라벨링데이터" / f"{path}.TXT", path)
    found = {u.id: (u.category, u.speaker, u.text) for u in read(tmp_path)}
    assert found == {
        "train-D01-J18-S000001-0001": (
            "D01",
            "S000001",
            "D01/J18/S000001/0001",
        ),
        "train-D02-J18-S000001-0001": (
            "D02",
            "S000001",
            "D02/J18/S000001/0001",
        ),
        "train-S000009-0001": ("", "S000009", "S000009/0001"),
        "valid-D01-J18-S000001-0001": (
            "D01",
            "S000001",
            "D01/J18/S000001/0001",
        ),
    }


# Pairing


def test_numbered_archives_keep_their_clips_apart(tmp_path):
    for number in "12":
        write(tmp_path / f"원천데이터/TS{number}/0001.wav")
        write(tmp_path / f"라벨링데이터/TL{number}/0001.txt", number)
    found = [(u.wav[-10], u.text) for u in read(tmp_path)]
    assert found == [("1", "1"), ("2", "2")]


def test_labels_of_one_archive_for_audio_of_several(tmp_path):
    write(tmp_path / "원천데이터/TS1/D01/0001.wav")
    write(tmp_path / "원천데이터/TS2/D02/0001.wav")
    write(tmp_path / "라벨링데이터/TL/D01/0001.txt", "하나")
    write(tmp_path / "라벨링데이터/TL/D02/0001.txt", "둘")
    found = {u.category: u.text for u in read(tmp_path)}
    assert found == {"D01": "하나", "D02": "둘"}


def test_a_stem_pairs_only_where_it_stands_once(tmp_path):
    for name in ("a/one", "a/two", "b/two", "a/three", "a/own"):
        write(tmp_path / f"원천데이터/{name}.wav")
    for name in ("x/one", "x/two", "x/three", "y/three", "a/own", "x/own"):
        write(tmp_path / f"라벨링데이터/{name}.txt", name)
    write(tmp_path / "2.Validation/라벨링데이터/x/one.txt", "of another split")
    found = {u.id: u.text for u in read(tmp_path)}
    assert found == {
        "train-a-one": "x/one",
        "train-a-own": "a/own",  # and is not the label's of x
        "train-a-two": None,
        "train-b-two": None,
        "train-a-three": None,
        # Labels without audio.
        "train-x-two": "x/two",
        "train-x-three": "x/three",
        "train-y-three": "y/three",
        "train-x-own": "x/own",
        "valid-x-one": "of another split",
    }


def test_a_path_may_end_with_the_other(tmp_path):
    for name in ("z/D01/S1/1", "z/D02/S1/1", "D03/S1/1", "D04/S1/1", "D05/2"):
        write(tmp_path / f"원천데이터/{name}.wav")
    for name in ("D01/S1/1", "z/D03/S1/1", "D07/S1/1", "x/D04/S1/1"):
        write(tmp_path / f"라벨링데이터/{name}.txt", name)
    for name in ("y/D04/S1/1", "D06/2", "D08/2"):
        write(tmp_path / f"라벨링데이터/{name}.txt", name)
    found = {u.id: u.text for u in read(tmp_path) if "라벨" not in u.wav}
    assert "z" not in {u.category for u in read(tmp_path)}
    assert found == {
        "train-z-D01-S1-1": "D01/S1/1",
        "train-z-D02-S1-1": None,  # not the label of D07
        "train-D03-S1-1": "z/D03/S1/1",
        "train-D04-S1-1": None,  # two claim it
        "train-D05-2": None,
    }


def test_missing_halves_are_given_and_notes_are_not(tmp_path):
    write(tmp_path / "원천데이터/a/1.wav")
    write(tmp_path / "라벨링데이터/a/2.json", '{"text": "네"}')
    write(tmp_path / "라벨링데이터/a/info.json", '{"title": "x"}')
    write(tmp_path / "readme.txt", "no label")
    write(tmp_path / "원천데이터/a/.1.txt", "hidden")
    missing_audio, missing_text = sorted(read(tmp_path), key=lambda u: u.id)[
        ::-1
    ]
    assert row(missing_audio) == ("train-a-2", "train", "네")
    with pytest.raises(FileNotFoundError):
        duration(missing_audio.wav)
    assert row(missing_text) == ("train-a-1", "train", None)


def test_labels_beside_the_audio_come_last(tmp_path):
    for name in "12":
        write(tmp_path / f"원천데이터/{name}.pcm")
        write(tmp_path / f"원천데이터/{name}.txt", f"beside {name}")
    write(tmp_path / "라벨링데이터/1.txt", "text")
    write_label(tmp_path / "라벨링데이터/1.json", {"text": "json"})
    assert [u.text for u in read(tmp_path)] == ["json", "beside 2"]


def test_links_that_lead_back_are_not_followed(tmp_path):
    write(tmp_path / "원천데이터/1.wav")
    (tmp_path / "원천데이터/loop").symlink_to(tmp_path)
    assert len(read(tmp_path)) == 1


def test_transcripts(tmp_path):
    write(tmp_path / "원천데이터/TS1.zip", zipped({"1.wav": b""}))
    for number in (0, 9, 10):
        write(tmp_path / f"원천데이터/TS2.zip.part{number}")
    label = write(tmp_path / "라벨링데이터/TL1/1.json")
    write(tmp_path / "라벨링데이터/TL1/table.xlsx")
    names = [p.name for p in aihub.transcripts(tmp_path)]
    assert names == [label.name, "TS1.zip"] + [
        f"TS2.zip.part{number}" for number in (0, 9, 10)
    ]


# Archives


def test_archives_pair_with_folders(tmp_path):
    corpus, out = tmp_path / "set", tmp_path / "out"
    wav = write_audio(tmp_path / "1.wav", 0.1).read_bytes()
    data = zipped({f"{CLIP}.wav": wav, "D02/x.wav": wav, "film.mp4": b""})
    for start, end in ((0, 100), (100, 1000), (1000, None)):
        part = f"1.Training/원천데이터_1/TS1.zip.part{start}"
        write(corpus / part, data[start:end])
    write(corpus / f"1.Training/라벨링데이터/TL1/{CLIP}.txt", "네", "cp949")
    labels = zipped({"D02/x.json": '{"text": "둘"}'})
    write(corpus / "1.Training/라벨링데이터/TL1b.zip", labels)
    before = sorted(corpus.rglob("*"))
    first, second = read(corpus, unpack_folder=out)
    assert (first.text, first.category) == ("네", "D01")
    assert (second.text, second.category) == ("둘", "D02")
    for clip in (first, second):
        assert duration(clip.wav) == 0.1
        assert clip.wav.startswith(f"{out}/set-")
    assert sorted(corpus.rglob("*")) == before
    assert not list(out.rglob("*.mp4"))
    assert read(corpus, unpack_folder=out) == [first, second]


def test_archives_that_are_replaced_or_gone(tmp_path):
    corpus, out = tmp_path / "set", tmp_path / "out"
    for number in "12":
        wav, label = zipped({"1.wav": b""}), zipped({"1.txt": number})
        write(corpus / f"원천데이터/TS_D0{number}.zip", wav)
        write(corpus / f"라벨링데이터/TL_D0{number}.zip", label)
    found = [u.text for u in read(corpus, unpack_folder=out)]
    assert found == ["1", "2"]
    write(corpus / "라벨링데이터/TL_D01.zip", zipped({"1.txt": "3"}))
    for gone in corpus.rglob("*_D02.zip"):
        gone.unlink()
    assert [u.text for u in read(corpus, unpack_folder=out)] == ["3"]


def test_archives_behind_a_link(tmp_path):
    corpus, disk = tmp_path / "set", tmp_path / "disk"
    write(disk / "TS_D01.zip", zipped({"1.wav": b""}))
    write(corpus / "라벨링데이터/TL_D01/1.txt", "네")
    (corpus / "원천데이터").symlink_to(disk)
    (clip,) = read(corpus, unpack_folder=tmp_path / "out")
    assert clip.text == "네" and Path(clip.wav).exists()


def test_archives_need_a_folder(tmp_path):
    write(tmp_path / "TS1.zip", zipped({"1.wav": b""}))
    with pytest.raises(ValueError, match="1 archives, .*--output_folder"):
        read(tmp_path)


def test_the_form_is_checked_before_unpacking(tmp_path):
    corpus, out = tmp_path / "set", tmp_path / "out"
    write(corpus / "TS1.zip", zipped({"1.wav": b""}))
    with pytest.raises(ValueError, match="text_form='x'"):
        read(corpus, "x", unpack_folder=out)
    assert not out.exists()


# Rates


def test_headerless_audio_of_another_rate(tmp_path):
    corpus, out = tmp_path / "set", tmp_path / "out"
    samples = np.arange(-4000, 4000, dtype="<i2")
    for name, rate in (("a", 8000), ("b", "16kHz"), ("c", None)):
        data = samples.tobytes() + b"\1"
        write(corpus / f"원천데이터/D01/{name}.wavp", data)
        content = {"text": name, "info": {"samplingRate": rate}}
        write_label(corpus / f"라벨링데이터/D01/{name}.json", content)
    write_audio(corpus / "원천데이터/D01/d.wav", 0.5, 8000)
    content = {"text": "d", "SampleRate": "8000"}
    write_label(corpus / "라벨링데이터/D01/d.json", content)
    with pytest.raises(ValueError, match="a.wavp has no .* 8000 Hz.*--out "):
        read(corpus)
    first, *others = read(corpus, unpack_folder=out)
    copied, rate = soundfile.read(first.wav, dtype="int16")
    assert rate == 8000 and np.array_equal(copied, samples)
    assert first.id == "train-D01-a" and first.wav.startswith(str(out))
    assert all(u.wav.startswith(str(corpus)) for u in others)
    written = first.wav, Path(first.wav).stat().st_ino
    first, *_ = read(corpus, unpack_folder=out)
    assert (first.wav, Path(first.wav).stat().st_ino) == written


# Recordings


def test_a_recording_is_cut(tmp_path):
    write(tmp_path / "원천데이터/D03/call.wav")
    rows = [
        {"start": 0.5, "end": 2.25, "speaker_id": "1", "form": "b/ 네"},
        {"start": 9, "end": 8, "speaker_id": "SPK0042", "form": "(3)/(삼)"},
        {"start": 9, "end": 9.5, "speaker_id": "1"},
    ]
    content = {"metadata": {"sampling": "16kHz"}, "utterance": rows}
    write_label(tmp_path / "라벨링데이터/D03/call.json", content)
    first, second, third = read(tmp_path)
    assert row(first) == ("train-D03-call-1", "train", "네")
    assert (first.start, first.stop) == (0.5, 2.25)
    assert first.session == "train-D03-call" and first.category == "D03"
    assert first.speaker == third.speaker == "train-D03-call-1"
    assert second.speaker == "SPK0042" and second.text == "3"
    assert (second.start, second.stop) == (0, 0)  # told as empty audio
    assert third.text is None and third.id == "train-D03-call-3"
    assert read(tmp_path, "pronunciation")[1].text == "삼"


@pytest.mark.parametrize(
    "said, expected",
    [
        ("(())", None),
        ("{laughing} ((xx)).", None),
        ("(( x ))", None),
        ("{laughing}", ""),
        ("", ""),
        ("(()) 네", "네"),
        ("((네))", "네"),
    ],
)
def test_speech_that_nobody_understood(tmp_path, said, expected):
    write(tmp_path / "원천데이터/1.wav")
    write(tmp_path / "라벨링데이터/1.txt", said)
    (clip,) = read(tmp_path)
    assert clip.text == expected


def test_one_label_of_many_files(tmp_path):
    for name in "abc":
        write(tmp_path / f"원천데이터/{name}.wav")
    rows = [{"filename": f"{n}.wav", "tr": n.upper()} for n in "abd"]
    write_label(tmp_path / "라벨링데이터/list.json", [{"sentences": rows}])
    found = {u.id: (u.text, u.start) for u in read(tmp_path)}
    assert found == {
        "train-a": ("A", None),
        "train-b": ("B", None),
        "train-d": ("D", None),
        "train-c": (None, None),
    }


def test_it_is_a_corpus(tmp_path):
    write(tmp_path / "원천데이터/1.wav")
    write(tmp_path / "라벨링데이터/1.txt", "네")
    (clip,) = corpora.read("aihub", tmp_path)
    assert row(clip) == ("train-1", "train", "네")
    assert [p.name for p in corpora.transcripts("aihub", tmp_path)] == ["1.txt"]
