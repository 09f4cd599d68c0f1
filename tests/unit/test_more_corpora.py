"""ClovaCall, KSS and Pansori, on miniature trees in their layouts."""

import json
import unicodedata

import pytest
from conftest import write_audio
from local import corpora, manifest, prepare
from local.corpora import layout
from test_corpora import read, snapshot, write


def prepared(corpus, folder, out, **settings):
    """IDs by split and the report; nothing is written into the corpus."""
    before = snapshot(folder)
    settings = {"label_fits": lambda text: len(text) <= 20, **settings}
    prepare.prepare(corpus, folder, out, **settings)
    assert snapshot(folder) == before
    splits = {
        path.stem: set(manifest.read(path, str(folder)))
        for path in out.glob("*.csv")
    }
    return splits, json.loads((out / prepare.REPORT).read_text())


# ClovaCall


def entry(name, label, speaker="03319"):
    return {"wav": name, "text": label, "speaker_id": speaker}


ENTRIES = {
    "train": [
        entry("1_0.wav", "단체  할인이 되나요?"),
        entry("1_1.wav", unicodedata.normalize("NFD", "네"), 7),
        entry("1_2.wav", ""),
        {"wav": "1_3.wav", "speaker_id": None},
        {"text": "이름 없음"},
        "no entry",
        entry("1_1.wav", "두 번"),
        entry("gone.wav", "소리 없음"),
        entry("\ud800.wav", "반쪽", "\ud800"),
    ],
    "test": [entry("2_0.wav", "시험")],
}
CLOVACALL = [
    ("1_0", "단체 할인이 되나요?", "03319"),
    ("1_1", "네", "7"),
    ("1_2", None, "03319"),  # read speech has no empty text
    ("1_3", None, ""),
    ("train_ClovaCall.json:5", "이름 없음", ""),
    ("train_ClovaCall.json:6", None, ""),
    ("1_1", "두 번", "03319"),
    ("gone", "소리 없음", "03319"),
    ("train_ClovaCall.json:9", "반쪽", ""),
    ("2_0", "시험", "03319"),
    ("1_9", None, ""),
]


def clovacall(root, train, test, entries=ENTRIES, encoding="utf-8"):
    """The lists, and the clips of each split in its place."""
    for split, listed in entries.items():
        # Half a surrogate pair can only be written escaped.
        content = json.dumps(listed, ensure_ascii=encoding == "utf-8")
        write(root / f"{split}_ClovaCall.json", content, encoding)
    for number, name in enumerate(("1_0", "1_1", "1_2", "1_3", "1_9")):
        write_audio(root / train / f"{name}.wav", 0.1, 8000, seed=number)
    write_audio(root / test / "2_0.wav", 0.1, 8000, seed=9)
    return root


@pytest.mark.parametrize(
    "train, test",
    [
        ("wavs_train", "wavs_test"),
        ("clean", "clean"),
        ("raw", "raw"),
        ("audio/wavs_train", "audio/wavs_test"),
        ("", ""),
    ],
)
def test_clovacall(tmp_path, train, test):
    root = clovacall(tmp_path / "ClovaCall", train, test)
    found = read("clovacall", root)
    assert [(u.id, u.text, u.speaker) for u in found] == CLOVACALL
    assert [u.split for u in found] == ["train"] * 9 + ["test", "train"]
    assert found[0].wav == str(root / train / "1_0.wav")
    assert found[9].wav == str(root / test / "2_0.wav")
    assert found[7].wav.endswith("/gone.wav")
    assert found[4].wav == found[5].wav == found[8].wav == ""
    assert read("clovacall", root.parent) == found
    lists = corpora.transcripts("clovacall", root)
    assert [p.name.partition("_")[0] for p in lists] == ["train", "test"]


def test_clovacall_of_two_copies(tmp_path):
    clovacall(tmp_path, "raw", "raw")
    clovacall(tmp_path, "clean", "clean")
    for folder, copy in ((".", "clean"), ("clean", "clean"), ("raw", "raw")):
        found = read("clovacall", tmp_path / folder)
        assert found[0].wav == str(tmp_path / copy / "1_0.wav")
        assert [u.id for u in found] == [row[0] for row in CLOVACALL]


def test_clovacall_finds_a_clip_in_the_folder_of_the_other_split(tmp_path):
    clovacall(tmp_path, "wavs_train", "wavs_train")
    (tmp_path / "wavs_test").mkdir()
    assert read("clovacall", tmp_path)[9].wav.endswith("wavs_train/2_0.wav")


def test_clovacall_cp949(tmp_path):
    entries = {"train": [entry("1_0.wav", "뷁"), entry("1_1.wav", "첫")]}
    clovacall(tmp_path, "wav", "wav", entries, encoding="cp949")
    assert [u.text for u in read("clovacall", tmp_path)[:2]] == ["뷁", "첫"]


@pytest.mark.parametrize(
    "content, count",
    [
        ('[{"wav": "1.wav", "text": "네"}, {"wav": "2', 1),
        ('[{"wav": "1.wav"}', 1),
        ('{"wav": "1.wav"}', 0),
        ("[" * 100_000, 0),
        ("", 0),
    ],
)
def test_clovacall_list_that_is_cut_is_told_before_a_clip(
    tmp_path, content, count
):
    write(tmp_path / "train_ClovaCall.json", '[{"wav": "1.wav"}]')
    write(tmp_path / "test_ClovaCall.json", content)
    with pytest.raises(ValueError, match=f"test_Clo.*after {count} entries"):
        next(corpora.read("clovacall", tmp_path))


def test_clovacall_prepared(tmp_path):
    root = clovacall(tmp_path / "ClovaCall", "wavs_train", "wavs_test")
    splits, report = prepared("clovacall", root, tmp_path / "out")
    assert splits["test"] == {"2_0"}
    assert splits["train"] | splits["valid"] == {"1_0", "1_1"}
    assert report["dropped"] == {
        "missing_transcript": 4,
        "missing_audio": 3,
        "duplicate_id": 1,
    }


# KSS

KSS = (
    "1/1_0000.wav|나는 20분 잤다.|나는 이십 분 잤다.|나는|4.1|I took a nap.\n"
    "1/1_0001.wav|뷁  네.|뷁 네.|네|1.0\r\n"
    "\n"
    "2/2_0000.wav|||x|1.0|empty\n"
    "2/2_0001.wav|짧은 줄\n"
    "2/2_0002.wav|막대|가|있는|글|1.0|more\n"
    "|길 없음|길 없음|x|1.0|no path\n"
    "1/1_0001.wav|두 번|두 번|x|1.0|twice\n"
    "3/3_0000.wav|소리 없음|소리 없음|x|1.0|no audio\n"
)
SPELLING = [
    ("1_0000", "나는 20분 잤다."),
    ("1_0001", "뷁 네."),
    ("2_0000", None),  # read speech has no empty text
    ("2_0001", None),
    ("2_0002", None),  # a bar has cut a text
    ("transcript.v.1.4.txt:7", "길 없음"),
    ("1_0001", "두 번"),
    ("3_0000", "소리 없음"),
    ("2_0009", None),
]


def kss(root, place, encoding="utf-8"):
    write(root / "transcript.v.1.4.txt", KSS, encoding)
    write(root / "transcript.v.1.3.txt", "older\n")
    for number, name in enumerate(("1/1_0000", "1/1_0001", "2/2_0009")):
        name = name[2:] if place == "flat" else name
        folder = root / place.replace("flat", "wavs")
        write_audio(folder / f"{name}.wav", 0.1, 44100, seed=number)
    return root


@pytest.mark.parametrize("place", ["", "kss", "wavs", "flat"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp949"])
def test_kss(tmp_path, place, encoding):
    root = kss(tmp_path / "corpus", place, encoding)
    found = read("kss", root)
    assert [(u.id, u.text) for u in found] == SPELLING
    assert {(u.split, u.speaker) for u in found} == {("train", "kss")}
    audio = root / place.replace("flat", "wavs")
    name = "1_0000.wav" if place == "flat" else "1/1_0000.wav"
    assert found[0].wav == str(audio / name)
    assert found[-1].wav.endswith("2_0009.wav")
    assert read("kss", root.parent) == found
    assert corpora.transcripts("kss", root) == [root / "transcript.v.1.4.txt"]


def test_kss_pronunciation(tmp_path):
    found = read("kss", kss(tmp_path, ""), text_form="pronunciation")
    assert found[0].text == "나는 이십 분 잤다."
    with pytest.raises(ValueError, match="text_form='jamo' is unknown; choose"):
        read("kss", tmp_path, text_form="jamo")


def test_kss_prepared(tmp_path):
    splits, report = prepared("kss", kss(tmp_path / "c", ""), tmp_path / "out")
    assert set.union(*splits.values()) == {"1_0000", "1_0001"}
    assert report["dropped"] == {
        "missing_transcript": 4,
        "missing_audio": 2,
        "duplicate_id": 1,
    }


# Pansori


def pansori(root, encoding="utf-8"):
    talk = root / "6rmA/WRd7-f_o"
    lines = "A-1 뷁  하나\n\nA-2\nA-3\t소리 없음\nA-1 두 번\n"
    write(talk / "6rmA-WRd7-f_o.trans.txt", lines, encoding)
    for number, name in enumerate(("A-1", "A-2", "A-4")):
        write_audio(talk / f"{name}.flac", 0.1, seed=number)
    write(root / "67CV/abc/67CV-abc.trans.txt", "B-1 둘\n", encoding)
    write_audio(root / "67CV/abc/B-1.flac", 0.1, seed=9)
    write(root / "README/LICENSE", "x")
    return root


@pytest.mark.parametrize(
    "below", ["", "data", "pansori-tedxkr-corpus-1.0", "repository/data"]
)
@pytest.mark.parametrize("encoding", ["utf-8", "cp949"])
def test_pansori(tmp_path, below, encoding):
    root = pansori(tmp_path / below, encoding)
    found = read("pansori", tmp_path)
    assert [(u.id, u.text, u.speaker, u.session) for u in found] == [
        ("B-1", "둘", "67CV", "abc"),
        ("A-1", "뷁 하나", "6rmA", "WRd7-f_o"),
        ("A-2", None, "6rmA", "WRd7-f_o"),
        ("A-3", "소리 없음", "6rmA", "WRd7-f_o"),
        ("A-1", "두 번", "6rmA", "WRd7-f_o"),
        ("A-4", None, "6rmA", "WRd7-f_o"),
    ]
    assert {u.split for u in found} == {"train"}
    assert found[1].wav == str(root / "6rmA/WRd7-f_o/A-1.flac")
    assert len(corpora.transcripts("pansori", tmp_path)) == 2


def test_pansori_does_not_take_zeroth_for_itself(tmp_path):
    reader = tmp_path / "train_data_01/003/106"
    write(reader / "106_003.trans.txt", "106_003_0001 네\n")
    with pytest.raises(FileNotFoundError, match="does not have the layout"):
        read("pansori", tmp_path)


def test_pansori_prepared(tmp_path):
    folder = pansori(tmp_path / "corpus")
    splits, report = prepared("pansori", folder, tmp_path / "out")
    assert set.union(*splits.values()) == {"A-1", "B-1"}
    assert report["dropped"] == {
        "missing_transcript": 2,
        "missing_audio": 1,
        "duplicate_id": 1,
    }


def test_a_dangling_transcript_ends_no_preparation(tmp_path):
    folder = tmp_path / "one/two"
    folder.mkdir(parents=True)
    (folder / "a.flac").touch()
    (folder / "b.trans.txt").write_text("b 네\nc\n", encoding="utf-8")
    (folder / "gone.trans.txt").symlink_to(tmp_path / "nowhere")
    assert list(layout.spoken(folder)) == [
        ("b", "네"),
        ("c", None),
        ("a", None),
    ]
