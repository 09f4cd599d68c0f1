"""The manifest CSV: what is written is read, whatever a text holds."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import (
    HealthCheck,
    given,
    settings,
    strategies as st,
)
from local import manifest, text
from local.manifest import Utterance

ONE = Utterance("1", "/data/a.wav", "네", "train", duration=1.5)
HEADER = "ID,duration,wav,spk_id,wrd\n"


def round_trip(folder, *utterances, data_root="/data"):
    manifest.write(folder / "x.csv", utterances, "zeroth", Path(data_root))
    return manifest.read(folder / "x.csv", data_root)


def written(path, content, encoding="utf-8"):
    path.write_bytes(content.encode(encoding))
    return path


def test_a_row_as_speechbrain_names_it(tmp_path):
    utterance = Utterance(
        "a-1",
        "/data/a/1.wav",
        "가 나",
        "train",
        speaker="kim",
        category="call",
        start=1.25,
        stop=3.0,
        duration=1.75,
        session="call 7",
    )
    assert round_trip(tmp_path, utterance, replace(ONE, id="2")) == {
        "a-1": {
            "duration": 1.75,
            "wav": "/data/a/1.wav",
            "spk_id": "kim",
            "wrd": "가 나",
            "start": 1.25,
            "stop": 3.0,
            "corpus": "zeroth",
            "category": "call",
            "session": "call 7",
        },
        "2": {
            "duration": 1.5,
            "wav": "/data/a.wav",
            "spk_id": "",
            "wrd": "네",
            "start": None,
            "stop": None,
            "corpus": "zeroth",
            "category": "",
            "session": "",
        },
    }
    with open(tmp_path / "x.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == [*manifest.COLUMNS, "session"]
    assert rows[0][:5] == ["ID", "duration", "wav", "spk_id", "wrd"]
    assert rows[1][2] == "$data_root/a/1.wav"


def test_nine_columns_where_no_clip_has_a_session(tmp_path):
    assert round_trip(tmp_path, ONE)["1"]["session"] == ""
    header, row = (tmp_path / "x.csv").read_text().splitlines()
    assert header == "ID,duration,wav,spk_id,wrd,start,stop,corpus,category"
    assert row.count(",") == 8


def test_rows_are_written_one_by_one(tmp_path):
    """Where it is told beforehand whether there are sessions."""
    path, written_at = tmp_path / "x.csv", []

    def clips():
        for number in range(9999):
            yield replace(ONE, id=str(number), corpus="own" * (number == 0))
            written_at.append(Path(f"{path}.tmp").stat().st_size)

    for has_sessions in (False, True):
        manifest.write(path, clips(), "zeroth", Path("/data"), has_sessions)
        rows = manifest.read(path, "/data")
        assert len(rows) == 9999 and rows["0"]["corpus"] == "own"
        assert rows["1"]["corpus"] == "zeroth"
        assert ("session" in path.read_text().split("\n")[0]) == has_sessions
        assert 0 < written_at[5000] < written_at[9998]


@pytest.mark.parametrize(
    "label",
    [
        "$5에 $data_root 샀어",
        "그는 \"네\"라고, '예'라고",
        '"',
        ",,,",
        "a;b\\n\\t|c",
        "",
        "None",
        "0",
        "#주석",
    ],
)
def test_any_text(tmp_path, label):
    (row,) = round_trip(tmp_path, replace(ONE, text=label)).values()
    assert row["wrd"] == label


@given(label=st.text(st.characters(codec="utf-8")))
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_label_comes_back(tmp_path, label):
    label = text.for_label(label)
    (row,) = round_trip(tmp_path, replace(ONE, text=label)).values()
    assert row["wrd"] == label


@pytest.mark.parametrize(
    "identifier, speaker",
    [
        ('1,"2"', "kim, 'lee'"),
        ("한국어 1", "$spk"),
        ("a\nb", "x"),
        ("a\rb", "\r\n"),
    ],
)
def test_any_id_and_speaker(tmp_path, identifier, speaker):
    rows = round_trip(tmp_path, replace(ONE, id=identifier, speaker=speaker))
    assert rows[identifier]["spk_id"] == speaker


@pytest.mark.parametrize(
    "wav, written_as",
    [
        ("/data/a.wav", "$data_root/a.wav"),
        ("/data/$5/a,b.wav", '"$data_root/$5/a,b.wav"'),
        ("/database/a.wav", "/database/a.wav"),
        ("/mnt/data/a.wav", "/mnt/data/a.wav"),
    ],
)
def test_paths(tmp_path, wav, written_as):
    rows = round_trip(tmp_path, replace(ONE, wav=wav))
    assert rows["1"]["wav"] == wav
    line = (tmp_path / "x.csv").read_text().splitlines()[1]
    assert line.startswith(f"1,1.500,{written_as},")
    moved = manifest.read(tmp_path / "x.csv", "/new/")
    assert moved["1"]["wav"] == wav.replace("/data/", "/new/", 1) or (
        not wav.startswith("/data/") and moved["1"]["wav"] == wav
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_written_by_hand(tmp_path, encoding, end):
    content = (
        HEADER + '1,1.5,$data_root/a.wav,kim,"가, ""나"""\n\n2,2,b.wav,,\n'
    )
    path = written(tmp_path / "x.csv", content.replace("\n", end), encoding)
    rows = manifest.read(path, "/data")
    assert [rows[k]["wrd"] for k in rows] == ['가, "나"', ""]
    assert rows["1"]["wav"] == "/data/a.wav"
    assert [rows["2"][k] for k in ("start", "stop")] == [None, None]
    assert rows["2"]["category"] == rows["2"]["session"] == ""


def test_text_by_hand_is_composed(tmp_path):
    decomposed = "\u1112\u1161\u11ab\u1100\u116e\u11a8"
    path = written(tmp_path / "x.csv", f"{HEADER}1,1,a.wav,,{decomposed}\n")
    assert manifest.read(path, "/data")["1"]["wrd"] == "한국"


def test_columns_beyond_ours_are_no_harm(tmp_path):
    header = HEADER.replace("\n", ",mood\n")
    path = written(tmp_path / "x.csv", f"{header}1,1,a.wav,,가,glad\n")
    assert manifest.read(path, "/data")["1"]["wrd"] == "가"


@pytest.mark.parametrize(
    "content, message",
    [
        ("ID,wav,wrd\n", "column duration, spk_id is missing; .* ID, wav, wrd"),
        ("", "ID, duration.* is missing; the file has no header"),
        (HEADER + "1,1,a,,가\n1,1,b,,나\n", "line 3: the ID '1' stands twice"),
        (HEADER + "1,long,a,,가\n", "line 2: duration.*seconds.*'long'"),
        (HEADER + "1,,a,,가\n", "line 2: duration"),
        (HEADER + "1\n", "line 2: fewer cells than columns"),
        (HEADER + "1,1,a,,네, 예\n", "line 2: more cells.*double quotes"),
        (HEADER + "1,nan,a,,가\n", "line 2: duration.*nan"),
        (HEADER[:-1] + ",start\n1,1,a,,가,soon\n", "line 2: .*start.*'soon'"),
    ],
)
def test_errors_name_file_line_and_value(tmp_path, content, message):
    path = written(tmp_path / "x.csv", content)
    with pytest.raises(ValueError, match=message) as error:
        manifest.read(path, "/data")
    assert str(path) in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        manifest.read(tmp_path / "x.csv", "/data")


def test_a_broken_write_leaves_the_older_file(tmp_path):
    def failing():
        yield ONE
        raise OSError(28, "No space left on device")

    round_trip(tmp_path, ONE)
    before = (tmp_path / "x.csv").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        manifest.write(tmp_path / "x.csv", failing(), "zeroth", Path("/data"))
    assert (tmp_path / "x.csv").read_bytes() == before
