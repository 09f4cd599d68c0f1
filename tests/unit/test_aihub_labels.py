"""What AI Hub's label files look like, and the tags of their vendors."""

import json
import unicodedata

import pytest
from local import text
from local.corpora import aihub_labels
from local.corpora.aihub_labels import Segment


@pytest.mark.parametrize(
    "content, expected, rate",
    [
        (
            {
                "전사정보": {"LabelText": "네"},
                "화자정보": {"SpeakerName": "LSY"},
                "음성정보": {"SamplingRate": "48000"},
                "파일정보": {"FileName": "PA_1.wav"},
            },
            [Segment("네", "PA_1", "LSY")],
            48000,
        ),
        (
            {
                "발화정보": {"stt": "네", "fileNm": "a.1.wav"},
                "녹음자정보": {"recorderId": "r12"},
            },
            [Segment("네", "a.1", "r12")],
            None,
        ),
        (
            {
                "fileName": "D:\\x\\y.wav",
                "transcription": {
                    "ReadingLabelText": "",
                    "AnswerLabelText": "답",
                },
            },
            [Segment("답", "y")],
            None,
        ),
        (
            {
                "speaker": [{"id": "1"}, {"id": "2"}],
                "utterance": [
                    {
                        "form": "a",
                        "standard_form": "b",
                        "dialect_form": "c",
                        "speaker_id": "2",
                        "start": 1,
                        "end": 2.5,
                        "eojeolList": [{"form": "x", "start": 1}],
                    }
                ],
            },
            [Segment("c", "", "2", 1.0, 2.5)],
            None,
        ),
        (
            {
                "speaker": {"dialect": "경상"},
                "transcription": {
                    "dialect": "가 나",
                    "sentences": [
                        {
                            "speakerId": "S1",
                            "startTime": "00:00:01.180",
                            "endTime": "01:02,5",
                            "dialect": "가",
                            "standard": "나",
                        }
                    ],
                },
            },
            [Segment("가", "", "S1", 1.18, 62.5)],
            None,
        ),
        (
            {
                "발화": [
                    {"발화시작": 0, "발화종료": 1500, "발화내용": "가"},
                    {"발화시작": "1600", "발화종료": 4000, "발화내용": "나"},
                ]
            },
            [Segment("가", "", "", 0, 1.5), Segment("나", "", "", 1.6, 4)],
            None,
        ),
        (
            {"s": [{"start": 0, "end": 9, "text": "a"}]},
            [Segment("a", "", "", 0, 9)],
            None,
        ),
        (  # files of their own, with times in what they were cut from
            [
                {"file": "a.wav", "start": 7, "end": 8, "text": "a"},
                {"file": "b.wav", "start": 8, "end": 9, "text": "b"},
            ],
            [Segment("a", "a"), Segment("b", "b")],
            None,
        ),
        (  # rows of one file without times: whose is the audio?
            [{"file": "a.wav", "text": "a"}, {"file": "a.wav", "text": "b"}],
            [Segment("a", "a", "", 0, 0), Segment("b", "a", "", 0, 0)],
            None,
        ),
        (  # the words of a clip
            {
                "text": "한 말",
                "words": [{"text": "한", "start": 0, "end": 1}] * 2,
                "sampling_rate": "44.1kHz",
            },
            [Segment("한 말")],
            44100,
        ),
        ({"dialogs": [{"text": "a"}]}, [Segment("a")], None),
        ({"text": ""}, [Segment("")], None),
        ({"text": 3, "sampleRate": "16"}, [Segment(None)], 16000),
        ({"text": None, "sampleRate": 7}, [Segment(None)], 7000),
        ({"sampleRate": 1e300}, [Segment(None)], None),
        ({"dialogs": [{"text": "a"}, {"text": "b"}]}, [Segment(None)], None),
        ({"title": "x"}, [Segment(None)], None),
        ([], [Segment(None)], None),
        ("text", [Segment(None)], None),
        (None, [Segment(None)], None),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp949"])
def test_json(tmp_path, content, expected, rate, encoding):
    path = tmp_path / "x.json"
    data = json.dumps(content, ensure_ascii=False)
    path.write_bytes(data.encode(encoding))
    label = aihub_labels.read(path)
    assert label.segments == expected
    assert label.rate == rate


@pytest.mark.parametrize(
    "start, end, expected",
    [
        ("0.5", "1.5", (0.5, 1.5)),
        (" 1 ", "99", (1, 99)),
        ("1", "101", (0.001, 0.101)),
        ("100.0", "250.0", (100, 250)),  # not whole: seconds
        ("1:02:03.5", "1:02:04", (3723.5, 3724)),
        ("", "3", (0, 0)),
        ("3", "", (0, 0)),
        ("-1", "3", (0, 0)),
        ("nan", "3", (0, 0)),
        ("1", "inf", (0, 0)),
        ("1", "1", (0, 0)),
        ("x", "y", (0, 0)),
    ],
)
def test_times(tmp_path, start, end, expected):
    rows = [{"file": "a", "text": "a", "start": start, "end": end}] * 2
    path = tmp_path / "x.json"
    path.write_text(json.dumps(rows))
    (first, second) = aihub_labels.read(path).segments
    assert (first.start, first.stop) == pytest.approx(expected)


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.txt", "가\r\n나\n".encode(), "가\r\n나\n"),
        ("a.TXT", "똠방".encode("cp949"), "똠방"),
        ("a.txt", b"", ""),
        ("a.json", b"", None),
        ("a.json", b'{"text": ', None),
        ("a.json", b"\xff\xfe\x00", None),
        ("a.json", b"[" * 100000, None),
    ],
)
def test_what_a_file_may_hold(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    (segment,) = aihub_labels.read(tmp_path / name).segments
    assert segment.text == expected


def test_a_label_that_has_gone(tmp_path):
    assert aihub_labels.read(tmp_path / "a.json") == aihub_labels.UNKNOWN


@pytest.mark.parametrize(
    "raw, expected, left",
    [
        ("네 (NO:) 그 (SN:)", "네 그", ""),
        ("(FP:어) 그게 (SP:스톱) (노:)", "어 그게 스톱", ""),
        ("(NO:(FP:어))", "어", ""),
        ("네 /(noise) 그 /(bgm)", "네 그", ""),
        ("(비지엠)/(bgm) (웃음)/(우슴)", "비지엠 웃음", ""),
        ("@웃음 네 @박수", "네", ""),
        ("{laughing} [음악] (웃음)", "", ""),
        ("네 (()) 그 ((xx)) ((아마))", "네 그 아마", ""),
        ("-못- 못 갔어, 1-2", "못 못 갔어, 1-2", ""),
        ("@이름1 씨 &name2&", "[이름1] 씨 [name2]", "[][]"),
        ("#전화번호# 홍**", "[전화번호] 홍[**]", "[][**]"),
        ("a@b.kr R&B #1 3.5%", "a@b.kr R&B #1 3.5%", ""),
        ("b/ (70%)/(칠십 퍼센트) 뭐+ *저기", "70% 뭐 저기", ""),
    ],
)
def test_tags_of_the_vendors(raw, expected, left):
    for form in ("NFC", "NFD"):
        said = aihub_labels.without_tags(unicodedata.normalize(form, raw))
        label = text.ksponspeech(said, "spelling")
        assert (label, text.leftovers(label)) == (expected, left)
