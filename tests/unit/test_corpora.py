"""The corpus readers, on miniature trees in the layouts of the corpora."""

import json
import tracemalloc
from pathlib import Path

import pytest
from local import corpora
from local.corpora import layout


def write(path, content="", encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode(encoding))
    return path


def read(corpus, folder, **settings):
    return list(corpora.read(corpus, folder, **settings))


def texts(utterances):
    return {u.id: u.text for u in utterances}


def snapshot(folder):
    return {
        path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes())
        for path in sorted(folder.rglob("*"))
    }


def test_unknown_corpus_is_named_with_the_choices(tmp_path):
    for function in (corpora.read, corpora.transcripts):
        with pytest.raises(ValueError, match="corpus='zerot'.*zeroth, kspon"):
            function("zerot", tmp_path)


@pytest.mark.parametrize("corpus", list(corpora.CORPORA))
@pytest.mark.parametrize("exists", [True, False])
def test_missing_layout_states_folder_layout_and_remedy(
    tmp_path, corpus, exists
):
    folder = tmp_path if exists else tmp_path / "none"
    state = "does not have the layout" if exists else "does not exist"
    for function in (read, corpora.transcripts):
        with pytest.raises(FileNotFoundError) as error:
            function(corpus, folder)
        message = str(error.value)
        assert f"data_folder={folder} {state}" in message
        assert corpora.CORPORA[corpus].LAYOUT in message
        assert "Set data_folder to" in message


# Decoding


@pytest.mark.parametrize(
    "data, expected",
    [
        ("가\n나".encode(), "가\n나"),
        ("\ufeff가".encode(), "가"),
        ("뷁 가\n나".encode("cp949"), "뷁 가\n나"),
        ("첫".encode("cp949"), "첫"),
        ("café 가".encode(), "café 가"),
        (b"abc", "abc"),
        ("가 나\n".encode() + "다 라".encode("cp949"), "가 나\n다 라"),
        ("가 나\n".encode() + b"\xff\n", "가 나\n\ufffd\n"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_decoded(tmp_path, monkeypatch, data, expected, chunk_bytes):
    monkeypatch.setattr(layout, "CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "text"
    path.write_bytes(data)
    assert layout.decoded(path) == expected
    assert "".join(layout.lines(path, "\n")) == expected


@pytest.mark.parametrize("end", [b"", b"\xff"])
def test_lines_end_as_asked_for(tmp_path, end):
    path = tmp_path / "text"
    path.write_bytes("가\r나\r\n다\n".encode() + end)
    for newline, n_lines in (("", 3), ("\n", 2)):
        lines = list(layout.lines(path, newline))
        assert len(lines) == n_lines + bool(end)
        assert lines[-1 - bool(end)] == "다\n"


@pytest.mark.parametrize("encoding, end", [("utf-8", b""), ("cp949", b"\xff")])
def test_a_long_file_is_not_held(tmp_path, monkeypatch, encoding, end):
    monkeypatch.setattr(layout, "CHUNK_BYTES", 1 << 12)
    path = tmp_path / "text"
    path.write_bytes("가나다\n".encode(encoding) * 20_000 + end)
    tracemalloc.start()
    n_lines = sum(1 for _ in layout.numbered_lines(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_lines == 20_000 + len(end)
    assert peak < 100_000  # bytes, of 140,000 and more


def test_lines_split_at_newlines_alone(tmp_path):
    path = write(tmp_path / "text", "가\u2028나\r\n\n \n다\x85라")
    assert list(layout.numbered_lines(path)) == [
        (1, "가\u2028나"),
        (4, "다\x85라"),
    ]


# Zeroth


@pytest.fixture
def zeroth(tmp_path):
    tmp_path = tmp_path / "corpus"
    train = tmp_path / "train_data_01/003/106"
    write(
        train / "106_003.trans.txt",
        "106_003_0001 한국어  문장\n\n106_003_0002\n106_003_0003 소리 없음\n",
    )
    for number in (1, 2, 4):
        write(train / f"106_003_000{number}.flac")
    write(train / "notes.md", "x")
    test = tmp_path / "test_data_01/003/104"
    write(test / "104_003.trans.txt", "104_003_0001 시험\n")
    write(tmp_path / "AUDIO_INFO", "SPEAKERID|NAME|SEX|SCRIPTID\n")
    return tmp_path


def test_zeroth(zeroth):
    found = read("zeroth", zeroth)
    assert texts(found) == {
        "106_003_0001": "한국어 문장",
        "106_003_0002": None,  # read speech has no empty text
        "106_003_0003": "소리 없음",
        "106_003_0004": None,
        "104_003_0001": "시험",
    }
    assert [u.split for u in found] == ["train"] * 4 + ["test"]
    assert {u.speaker for u in found} == {"106", "104"}
    folder = zeroth / "train_data_01/003/106"
    assert found[2].wav == str(folder / "106_003_0003.flac")


def test_zeroth_one_folder_down_and_its_transcripts(zeroth):
    assert read("zeroth", zeroth.parent) == read("zeroth", zeroth)
    assert [p.name for p in corpora.transcripts("zeroth", zeroth)] == [
        "104_003.trans.txt",
        "106_003.trans.txt",
    ]


# KsponSpeech

SCRIPTS = {
    "train.trn": (
        "\ufeffKsponSpeech_01/KsponSpeech_0001/KsponSpeech_000001.pcm"
        " :: b/ (3시)(세 시)에 O/\n"
        "KsponSpeech_05/KsponSpeech_0620/KsponSpeech_619001.pcm :: 그거 (진짜\n"
        "KsponSpeech_01/KsponSpeech_0009/KsponSpeech_008001.pcm :: 3.5\r\n"
        "no separator\n"
        " :: no path\n"
        "\n"
    ),
    "dev.trn": (
        "KsponSpeech_05/KsponSpeech_0621/KsponSpeech_620001.pcm :: n/\n"
    ),
    "eval_clean.trn": (
        "KsponSpeech_eval/eval_clean/KsponSpeech_E00001.pcm :: 네.\n"
    ),
    "eval_other.trn": (
        "KsponSpeech_eval/eval_other/KsponSpeech_E03001.pcm :: 예?\n"
    ),
}
LABELS = {
    "KsponSpeech_000001": "3시에",
    "KsponSpeech_619001": "그거 (진짜",
    "KsponSpeech_008001": "3.5",
    "no separator": None,
    "train.trn:5": "no path",
    "KsponSpeech_620001": "",
    "KsponSpeech_E00001": "네.",
    "KsponSpeech_E03001": "예?",
}


@pytest.mark.parametrize("train", ["", "train/", "한국어_음성_분야/"])
@pytest.mark.parametrize("evaluation", ["test/", "KsponSpeech_eval/", ""])
@pytest.mark.parametrize("scripts", ["", "scripts/", "전시문_통합_스크립트/"])
def test_ksponspeech_layouts(tmp_path, train, evaluation, scripts):
    places = {
        "KsponSpeech_000001": train + "KsponSpeech_01/KsponSpeech_0001",
        "KsponSpeech_619001": train + "KsponSpeech_05/KsponSpeech_0620",
        "KsponSpeech_620001": train + "KsponSpeech_05/KsponSpeech_0621",
        "KsponSpeech_E00001": evaluation + "eval_clean",
        "KsponSpeech_E03001": evaluation + "eval_other",
    }
    for clip, place in places.items():
        write(tmp_path / place / f"{clip}.pcm")
    for name, lines in SCRIPTS.items():
        write(tmp_path / scripts / name, lines)
    found = read("ksponspeech", tmp_path)
    assert texts(found) == LABELS
    wavs = {u.id: u.wav for u in found}
    for clip, place in places.items():
        assert wavs[clip] == str(tmp_path / place / f"{clip}.pcm")
    missing = "KsponSpeech_01/KsponSpeech_0009/KsponSpeech_008001.pcm"
    assert wavs["KsponSpeech_008001"] == str(tmp_path / missing)
    assert [u.split for u in found][-4:] == [
        "train",
        "valid",
        "test_clean",
        "test_other",
    ]
    assert [
        str(path.relative_to(tmp_path))
        for path in corpora.transcripts("ksponspeech", tmp_path)
    ] == [scripts + name for name in SCRIPTS]


def test_ksponspeech_from_text_files(tmp_path):
    for number, clip, raw, encoding in (
        (1, "000001", "뷁 아/ (2개)/(두 개)", "cp949"),
        (1, "000002", "그+ 그", "utf-8"),
        (620, "619001", "끝", "cp949"),
        (621, "620001", "첫", "cp949"),
    ):
        place = tmp_path / f"KsponSpeech_01/KsponSpeech_{number:04d}"
        write(place / f"KsponSpeech_{clip}.txt", raw, encoding)
        write(place / f"KsponSpeech_{clip}.pcm")
    write(tmp_path / "KsponSpeech_01/KsponSpeech_0001/KsponSpeech_000003.pcm")
    (
        tmp_path / "KsponSpeech_01/KsponSpeech_0620/KsponSpeech_619001.pcm"
    ).unlink()
    write(tmp_path / "KsponSpeech_eval/eval_clean/KsponSpeech_E00001.pcm")
    found = read("ksponspeech", tmp_path, text_form="pronunciation")
    assert [(u.id[12:], u.text, u.split) for u in found] == [
        ("000001", "뷁 아 두 개", "train"),
        ("000002", "그 그", "train"),
        ("000003", None, "train"),
        ("619001", "끝", "train"),
        ("620001", "첫", "valid"),
        ("E00001", None, "test_clean"),
    ]
    assert found[3].wav.endswith("KsponSpeech_0620/KsponSpeech_619001.pcm")
    paths = corpora.transcripts("ksponspeech", tmp_path)
    assert [path.name[12:] for path in paths] == [
        "000001.txt",
        "000002.txt",
        "619001.txt",
        "620001.txt",
    ]


def test_ksponspeech_clips_without_a_line_are_not_lost(tmp_path):
    place = tmp_path / "KsponSpeech_01/KsponSpeech_0001"
    for number in (1, 900):
        write(place / f"KsponSpeech_{number:06d}.pcm")
    write(tmp_path / "train.trn", "x/KsponSpeech_000001.pcm :: 네\n")
    found = read("ksponspeech", tmp_path)
    assert [(u.id, u.text, u.split) for u in found] == [
        ("KsponSpeech_000001", "네", "train"),
        ("KsponSpeech_000900", None, "train"),
    ]


def test_ksponspeech_unknown_form(tmp_path):
    write(tmp_path / "train.trn", SCRIPTS["train.trn"])
    with pytest.raises(ValueError, match="text_form='phonetic'"):
        read("ksponspeech", tmp_path, text_form="phonetic")


# FLEURS and Common Voice


def fleurs_row(number, name, raw):
    return f"{number}\t{name}\t{raw}\tlowered\tl o w\t16000\tMALE\n"


@pytest.mark.parametrize("below", ["", "ko_kr/", "data/ko_kr/"])
@pytest.mark.parametrize("audio", ["", "audio/"])
def test_fleurs(tmp_path, below, audio):
    root = tmp_path / below
    write(
        root / "train.tsv",
        fleurs_row(7, "11.wav", '그는 "네"라고, 했다.')
        + fleurs_row(7, "12.wav", '그는 "네"라고, 했다.')
        + fleurs_row(8, "13.wav", '"따옴표 하나')
        + "9\t14.wav\n"
        + fleurs_row(10, "15.wav", ""),
    )
    write(root / "dev.tsv", fleurs_row(1, "21.wav", "개발"))
    for split in ("train", "dev"):
        (root / audio / split).mkdir(parents=True)
    found = read("fleurs", tmp_path)
    assert texts(found) == {
        "11": '그는 "네"라고, 했다.',
        "12": '그는 "네"라고, 했다.',
        "13": '"따옴표 하나',
        "train.tsv:4": None,
        "15": "",
        "21": "개발",
    }
    assert found[0].wav == str(root / audio / "train/11.wav")
    assert (found[-1].split, found[-1].wav) == (
        "valid",
        str(root / audio / "dev/21.wav"),
    )
    assert [p.name for p in corpora.transcripts("fleurs", tmp_path)] == [
        "train.tsv",
        "dev.tsv",
    ]


HEADER = "client_id\tpath\tsentence_id\tsentence\tup_votes\n"


@pytest.mark.parametrize("below", ["", "ko/", "cv-corpus-17.0-2024-03-15/ko/"])
def test_common_voice(tmp_path, below):
    root = tmp_path / below
    write(
        root / "train.tsv",
        HEADER
        + 'abc\tcommon_voice_ko_1.mp3\ts1\t"네 라고\t2\n'
        + "abc\tcommon_voice_ko_2.mp3\n"
        + "\n"
        + "def\n",
    )
    write(root / "test.tsv", HEADER + "x\tcommon_voice_ko_3.mp3\ts\t끝\t2\n")
    found = read("common_voice", tmp_path)
    assert texts(found) == {
        "common_voice_ko_1": '"네 라고',
        "common_voice_ko_2": None,
        "train.tsv:5": None,
        "common_voice_ko_3": "끝",
    }
    assert [u.speaker for u in found] == ["abc", "abc", "def", "x"]
    assert [u.split for u in found] == ["train"] * 3 + ["test"]
    assert found[0].wav == str(root / "clips/common_voice_ko_1.mp3")
    assert found[2].wav == ""


def test_common_voice_errors(tmp_path):
    for release in ("cv-corpus-9", "cv-corpus-17"):
        write(tmp_path / release / "ko/train.tsv", "path\ttext\n")
    with pytest.raises(ValueError, match="several copies.*cv-corpus-17"):
        read("common_voice", tmp_path)
    with pytest.raises(ValueError, match="column sentence is missing"):
        read("common_voice", tmp_path / "cv-corpus-9")


# The user's own manifest


def table(path, *rows, encoding="utf-8", end="\n"):
    separator = "\t" if path.suffix == ".tsv" else ","
    return write(path, end.join(map(separator.join, rows)) + end, encoding)


@pytest.mark.parametrize("name", ["manifest.tsv", "manifest.csv", "own.tsv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp949"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_manifest_tables(tmp_path, name, encoding, end):
    path = table(
        tmp_path / name,
        ("path", "text", "speaker", "split", "category"),
        ("a/1.wav", "네  뷁", "kim", "Train", "call"),
        ("/data/2.wav", "", "lee", "DEV", ""),
        ("3.wav",),
        ("4.wav", "넷", "lee", "evaluation", "", "too", "many"),
        ("5.wav", "다섯", "", "test_Far field", ""),
        ("6.wav", "여섯", "", "", ""),
        encoding=encoding,
        end=end,
    )
    folder = path if path.stem == "own" else tmp_path
    found = read("manifest", folder)
    assert [(u.id, u.text, u.split) for u in found] == [
        ("a-1", "네 뷁", "train"),
        ("data-2", "", "valid"),
        ("3", None, "train"),
        (f"{name}:5", None, "train"),  # cells too many: a text was cut
        ("5", "다섯", "test_far_field"),
        ("6", "여섯", "train"),
    ]
    assert found[0].wav == str(tmp_path / "a/1.wav")
    assert found[1].wav == "/data/2.wav"
    assert (found[0].speaker, found[0].category) == ("kim", "call")
    assert corpora.transcripts("manifest", folder) == [path]


def test_manifest_quotes(tmp_path):
    row = ("1.wav", '"그는, ""네"" 라고"')
    table(tmp_path / "c/manifest.csv", ("path", "text"), row, ("2.wav", "x"))
    table(tmp_path / "t/manifest.tsv", ("path", "text"), row, ("2.wav", '"x'))
    assert texts(read("manifest", tmp_path / "c")) == {
        "1": '그는, "네" 라고',
        "2": "x",
    }
    assert texts(read("manifest", tmp_path / "t")) == {"1": row[1], "2": '"x'}


def test_manifest_csv_field_over_the_limit(tmp_path):
    rows = ("path", "text"), ("1.wav", "x" * 200_000), ("2.wav", "둘")
    table(tmp_path / "manifest.csv", *rows)
    assert texts(read("manifest", tmp_path)) == {
        "manifest.csv:2": None,
        "2": "둘",
    }


def test_manifest_jsonl(tmp_path):
    lines = [
        json.dumps({"path": "1.wav", "text": "하나", "id": 7, "session": "s"}),
        "",
        "{broken",
        '["a", "list"]',
        json.dumps(
            {"path": "2.wav", "text": ["no"], "speaker": "kim", "session": "t"}
        ),
        json.dumps({"path": "3.wav", "text": "\ud800셋", "start": 1, "end": 2}),
        json.dumps({"text": "길 없음"}),
    ]
    write(tmp_path / "manifest.jsonl", "\n".join(lines))
    found = read("manifest", tmp_path)
    assert [(u.id, u.text, u.speaker, u.session) for u in found] == [
        ("7", "하나", "s", "s"),
        ("manifest.jsonl:3", None, "", ""),
        ("manifest.jsonl:4", None, "", ""),
        ("2", None, "kim", "t"),
        ("3-1", "셋", "", ""),
        ("manifest.jsonl:7", "길 없음", "", ""),
    ]
    assert (found[4].start, found[4].stop) == (1.0, 2.0)
    assert found[1].wav == found[5].wav == ""


def test_manifest_splits_by_file(tmp_path):
    for name in ("train", "dev", "test_clean", "test_other", "notes"):
        table(tmp_path / f"{name}.csv", ("path", "text"), (f"{name}.wav", "네"))
    table(
        tmp_path / "test_other.csv", ("path", "text", "split"), ("x", "", "?")
    )
    found = read("manifest", tmp_path)
    assert {(u.id, u.split) for u in found} == {
        ("train", "train"),
        ("dev", "valid"),
        ("test_clean", "test_clean"),
        ("x", "test_other"),
    }
    alone = read("manifest", tmp_path / "dev.csv")
    assert [u.split for u in alone] == ["train"]


@pytest.mark.parametrize(
    "start, end, expected",
    [
        ("", "", (None, None)),
        ("0", "1.5", (0.0, 1.5)),
        ("2", "", (2.0, None)),
        ("", "3", (None, 3.0)),
        ("2", "2", (0.0, 0.0)),
        ("2", "1", (0.0, 0.0)),
        ("-1", "1", (0.0, 0.0)),
        ("a", "1", (0.0, 0.0)),
        ("nan", "1", (0.0, 0.0)),
        ("0", "inf", (0.0, 0.0)),
        ("inf", "", (0.0, 0.0)),
    ],
)
def test_manifest_cuts(tmp_path, start, end, expected):
    header = ("path", "text", "start", "end")
    table(tmp_path / "manifest.tsv", header, ("./1.wav", "네", start, end))
    (found,) = read("manifest", tmp_path)
    assert (found.start, found.stop) == expected
    assert found.id == (f"1-{start}" if start else "1")


def test_manifest_columns(tmp_path):
    row = ("1.wav", "하나", "kim")
    table(tmp_path / "manifest.tsv", ("file", "문장", "who"), row)
    columns = {"path": "file", "text": "문장", "speaker": "who"}
    (found,) = read("manifest", tmp_path, columns=columns)
    assert (found.id, found.text, found.speaker) == ("1", "하나", "kim")
    for wrong, message in (
        (None, "column path, text is missing; .* file, 문장, who. Set columns"),
        ({**columns, "speaker": "spk"}, "column spk is missing"),
        ({**columns, "wav": "file"}, "columns: wav is unknown; choose.*path"),
    ):
        with pytest.raises(ValueError, match=message):
            read("manifest", tmp_path, columns=wrong)


def test_manifest_errors(tmp_path):
    header = ("path", "text", "split")
    rows = ("1", "", "trian"), ("2", "", "holdout"), ("3", "", "test")
    table(tmp_path / "a/manifest.tsv", header, *rows)
    with pytest.raises(ValueError, match="'holdout', 'trian' is unknown"):
        read("manifest", tmp_path / "a")
    table(tmp_path / "b/train.tsv", header)
    table(tmp_path / "b/train.csv", header)
    with pytest.raises(ValueError, match="in two formats: train.csv, train.t"):
        read("manifest", tmp_path / "b")
    with pytest.raises(ValueError, match="'.xlsx' is not read; choose .tsv"):
        read("manifest", write(tmp_path / "c.xlsx"))
    with pytest.raises(ValueError, match="missing; the file has none"):
        read("manifest", write(tmp_path / "empty.csv"))
    header_only = table(tmp_path / "d/manifest.csv", header)
    assert read("manifest", header_only) == []


# All of them


def test_nothing_is_written_and_reading_is_lazy(zeroth, monkeypatch):
    table(zeroth / "manifest.tsv", ("path", "text"), ("1.wav", "네"))
    write(zeroth / "train.tsv", HEADER + "abc\t1.mp3\ts1\t네\t2\n")
    write(zeroth / "train.trn", SCRIPTS["train.trn"])
    before = snapshot(zeroth)
    monkeypatch.chdir(zeroth.parent)
    here = "zeroth fleurs common_voice ksponspeech manifest"
    for corpus in here.split():
        assert corpora.transcripts(corpus, Path(zeroth.name))
        utterances = corpora.read(corpus, Path(zeroth.name))
        assert iter(utterances) is utterances
        assert all(
            u.wav.startswith(f"{zeroth}/") or not u.wav for u in utterances
        )
    assert snapshot(zeroth) == before
