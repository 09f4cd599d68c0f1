"""What the folders of AI Hub's sets say, and clips that share a key."""

from pathlib import Path

import pytest
from local.corpora import aihub, aihub_tree


@pytest.mark.parametrize(
    "path, marks, key, short",
    [
        (
            "01.데이터/1.Training/원천데이터_230316/TS1/D01",
            "train source",
            "1/D01",
            "D01",
        ),
        (
            "세트/Training/라벨링데이터/TL_01.식당/json",
            "train label",
            "세트/01.식당",
            "01.식당",
        ),
        ("D01/원천/S1", "train source", "D01/S1", "S1"),
        ("VS2", "valid ", "2", ""),
        ("valley", "train ", "valley", "valley"),
        # What is left of a name is content, but for its date.
        ("원천데이터_230316_D01", "train source", "D01", "D01"),
        ("[라벨]20230316", "train label", "", ""),
        ("원천데이터_230316_v1.2", "train source", "", ""),
        ("원천데이터_230316_v1_D01", "train source", "v1_D01", "v1_D01"),
        ("원천데이터_D01_230316", "train source", "D01_230316", "D01_230316"),
        ("2.Validation_D01", "valid ", "D01", "D01"),
        ("Test_220728_add/원천", "test source", "add", ""),
        ("Training_라벨_D02/S1", "train label", "D02/S1", "D02/S1"),
        ("1.Training/Training_원천_D02", "train source", "D02", "D02"),
        # Topics that are named as splits are.
        ("Training/원천데이터/평가", "train source", "평가", "평가"),
        ("학습/라벨/시험_대비", "train label", "시험_대비", "시험_대비"),
        ("원천/학습 상담", "train source", "학습 상담", "학습 상담"),
        ("원천/VS1/평가", "valid source", "1/평가", "평가"),
        ("Training/test/원천", "train source", "test", ""),
        # Splits below the folder of audio or labels.
        ("원천/평가", "test source", "", ""),
        ("원천/2.검증용_230316", "valid source", "", ""),
        ("원천/Validation_D01", "valid source", "D01", "D01"),
    ],
)
def test_what_a_path_says(path, marks, key, short):
    spot = aihub_tree.spot_of(tuple(path.split("/")))
    found = f"{spot.split} {spot.role}", "/".join(spot.key)
    assert (*found, "/".join(spot.short)) == (marks, key, short)


@pytest.mark.parametrize(
    "path, other, is_same",
    [
        ("1.Training/원천_1/TS1", "1.Training/라벨_1/TL1", True),
        ("원천데이터/wav", "라벨링데이터/wav", True),
        ("원천데이터/wav", "라벨링데이터/json", False),
        ("원천데이터_220101", "라벨링데이터_220801", False),
    ],
)
def test_a_full_path_is_one_of_audio_and_labels(path, other, is_same):
    one, two = (aihub_tree.spot_of(tuple(p.split("/"))) for p in (path, other))
    assert (one.full == two.full) is is_same
    assert one.full[0] == "" and "" not in one.key


# Clips that share a key


def texts(folder, *names):
    """Makes the files, each label with its path as its text; gives the texts
    by the audio that got them."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name if path.suffix == ".txt" else "", "utf-8")
    found = list(aihub.read(folder, "spelling", folder.parent / "out"))
    assert len({u.id for u in found}) == len(found)
    heard = [u for u in found if Path(u.wav).exists()]
    assert all(u.category in ("", "D01") for u in heard)
    return {str(Path(u.wav).relative_to(folder)): u.text for u in heard}


@pytest.mark.parametrize(
    "one, two",
    [
        ("Training/{}_220101/D01/1", "Training/{}_220801/D01/1"),
        ("Training/{}/wav/1", "Training/{}/pcm/1"),
        ("Training_220101/{}/1", "Training_220801/{}/1"),
    ],
)
def test_full_paths_tell_clips_apart(tmp_path, one, two):
    audio = [name.format("원천데이터") + ".wav" for name in (one, two)]
    labels = [name.format("라벨링데이터") + ".txt" for name in (one, two)]
    found = texts(tmp_path, *audio, *labels)
    assert found == dict(zip(audio, labels))


@pytest.mark.parametrize("n_clips", [2, 3])
@pytest.mark.parametrize(
    "label", ["라벨/D01/1", "라벨_9/D01/1", "라벨/x/D01/1", "라벨/y/1"]
)
def test_a_label_that_fits_several_is_nobodys(tmp_path, label, n_clips):
    audio = [f"원천_22010{n}/D01/1.wav" for n in range(n_clips)]
    found = texts(tmp_path, *audio, f"{label}.txt")
    assert found == dict.fromkeys(audio)


def test_one_that_shares_a_key_is_in_the_way_of_others(tmp_path):
    audio = ["원천/TS1/D01/1.wav", "원천/TS2_/wav/D01/1.wav"]
    audio += ["원천/TS2_/pcm/D01/1.wav"]
    found = texts(tmp_path, *audio, "라벨/TL/D01/1.txt")
    assert found == dict.fromkeys(audio)


@pytest.mark.parametrize(
    "copies",
    [
        ["원천데이터/D01/1.wav", "원천데이터/D01/1.pcm"],
        ["원천데이터/wav/D01/1.wav", "원천데이터/pcm/D01/1.pcm"],
        ["원천데이터/D01/1.wav", "라벨링데이터/D01/1.wav"],
    ],
)
def test_of_copies_one_is_used(tmp_path, copies):
    label = "라벨링데이터/D01/1.txt"
    assert list(texts(tmp_path, *copies, label).values()) == [label]


def test_of_an_unpacked_copy_the_first_root_is_taken():
    clips = aihub_tree.Clips()
    for top in "ab":
        parts = ("원천", top, "wav") if top == "b" else ("원천", "b")
        spot = aihub_tree.spot_of(parts)
        clips.add(spot, Path(top), f"/{top}/원천", ["1.wav"])
    ((key, stem),) = clips.unpaired()
    assert clips.utterance("train", key, stem).wav == "/a/원천/1.wav"


# Links


def test_links_that_lead_to_each_other(tmp_path):
    for name, other in ("ab", "ba"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.wav").touch()
        (tmp_path / name / "link").symlink_to(tmp_path / other)
    root = aihub_tree.Root(tmp_path / "a", tmp_path)
    found = [parts for _, parts, _ in aihub_tree.walk(root)]
    assert found == [("a",), ("a", "link")]
