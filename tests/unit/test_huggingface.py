"""Data sets of ``datasets``: saved ones, folders of files, and hub names."""

import io
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import duration, write_audio
from local import audio, corpora
from local.corpora import huggingface, row_audio
from test_corpora import read, snapshot
from test_more_corpora import prepared

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module", autouse=True)
def quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Nothing goes to the cache of the one who tests."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def sound(seed=0, kind="WAV", n_samples=1600):
    """The bytes of a file of noise."""
    file = io.BytesIO()
    samples = np.random.default_rng(seed).normal(0, 0.1, n_samples)
    soundfile.write(file, samples, 16000, format=kind)
    return file.getvalue()


def cell(seed=0, path=None, **options):
    return {"bytes": sound(seed, **options), "path": path}


def rows(cells, labels, **columns):
    """A data set with an Audio column."""
    columns = {"audio": cells, "text": labels, **columns}
    found = datasets.Dataset.from_dict(columns)
    return found.cast_column("audio", datasets.Audio(sampling_rate=16000))


def saved(folder, **splits):
    """A folder of several splits, as ``save_to_disk`` writes it."""
    datasets.DatasetDict(splits).save_to_disk(folder)
    return folder


def simple(*labels, **columns):
    return rows([cell(n) for n in range(len(labels))], list(labels), **columns)


def unpacked(folder, out, **settings):
    return read("huggingface", folder, unpack_folder=out, **settings)


def test_splits_text_and_ids(tmp_path):
    folder = saved(
        tmp_path / "saved",
        train=simple("하나  둘", "", None, speaker=["kim", "", None]),
        validation=simple("검증", speaker=["lee"]),
        **{"test.clean": simple("시험", speaker=["lee"])},
    )
    found = unpacked(folder, tmp_path / "out")
    assert [(u.id, u.text, u.split, u.speaker) for u in found] == [
        ("train-0000000", "하나 둘", "train", "kim"),
        ("train-0000001", "", "train", ""),
        ("train-0000002", None, "train", ""),
        ("validation-0000000", "검증", "valid", "lee"),
        ("test.clean-0000000", "시험", "test_clean", "lee"),
    ]
    place = tmp_path / "out/train-0000/train-0000001.wav"
    assert found[1].wav == str(place)
    assert place.read_bytes() == sound(1)
    assert (found[0].start, found[0].stop) == (None, None)
    names = {p.name for p in corpora.transcripts("huggingface", folder)}
    assert names >= {"dataset_dict.json", "state.json", "dataset_info.json"}
    assert "data-00000-of-00001.arrow" in names


def layouts(root):
    """The same rows in each kind of folder."""
    data = simple("하나", "둘")
    data.save_to_disk(root / "saved")
    for name in ("train-00000-of-00001", "validation-00000-of-00001"):
        (root / "parquet/data").mkdir(parents=True, exist_ok=True)
        data.to_parquet(root / f"parquet/data/{name}.parquet")
        (root / "arrow").mkdir(exist_ok=True)
        (arrow,) = (root / "saved").glob("*.arrow")
        shutil.copy(arrow, root / f"arrow/{name}.arrow")
    return root


@pytest.mark.parametrize("kind", ["saved", "parquet", "arrow"])
def test_layouts_are_read_lazily_and_without_a_copy(
    tmp_path, kind, monkeypatch, cache
):
    folder = layouts(tmp_path) / kind
    before = snapshot(folder)
    monkeypatch.chdir(tmp_path)
    utterances = corpora.read(
        "huggingface", Path(kind), unpack_folder=tmp_path / "out"
    )
    assert next(utterances).text == "하나"
    assert len(list((tmp_path / "out").rglob("*.wav"))) == 1
    left = [(u.text, u.split) for u in utterances]
    more = [] if kind == "saved" else [("하나", "valid"), ("둘", "valid")]
    assert left == [("둘", "train"), *more]
    assert snapshot(folder) == before
    assert not list(cache.rglob("*.arrow"))
    paths = corpora.transcripts("huggingface", folder)
    assert all(path.is_absolute() for path in paths)
    assert len(paths) == (3 if kind == "saved" else 2)


def test_rows_tell_their_split_and_class_names(tmp_path):
    columns = {
        "split": ["TRAIN", "dev", "test far", None],
        "topic": [1, 0, 1, -1],
        "client": [7, 8, 9, None],
    }
    data = simple("하나", "둘", "셋", "넷", **columns).cast_column(
        "topic", datasets.ClassLabel(names=["은행", "병원"])
    )
    data.save_to_disk(tmp_path / "saved")
    names = {"category": "topic", "speaker": "client"}
    found = unpacked(tmp_path / "saved", tmp_path / "out", columns=names)
    assert [(u.id, u.split, u.category, u.speaker) for u in found] == [
        ("train-0000000", "train", "병원", "7"),
        ("valid-0000001", "valid", "은행", "8"),
        ("test_far-0000002", "test_far", "병원", "9"),
        ("train-0000003", "train", "", ""),
    ]
    simple("하나", split=["holdout"]).save_to_disk(tmp_path / "other")
    with pytest.raises(ValueError, match="'holdout' in column split is unkno"):
        unpacked(tmp_path / "other", tmp_path / "out")


def test_other_splits_are_left_out_and_told(tmp_path, caplog):
    folder = saved(tmp_path / "some", train=simple("하나"), other=simple("둘"))
    with caplog.at_level(logging.WARNING):
        assert len(unpacked(folder, tmp_path / "out")) == 1
    assert "split 'other' is left out" in caplog.text
    folder = saved(tmp_path / "none", other=simple("하나"), more=simple("둘"))
    with pytest.raises(ValueError, match="'other', 'more' is unknown; choose"):
        unpacked(folder, tmp_path / "out")


def test_columns(tmp_path):
    columns = {"id": ["a", "b"], "start": [0.5, 9], "end": [1.5, 1]}
    data = simple("하나", "둘", **columns)
    data = data.rename_columns({"audio": "소리", "text": "sentence"})
    data.save_to_disk(tmp_path / "saved")
    folder = tmp_path / "saved"
    found = unpacked(folder, tmp_path / "out", columns={"path": "소리"})
    assert [(u.id, u.text, u.start) for u in found] == [
        ("train-0000000", "하나", None),
        ("train-0000001", "둘", None),
    ]
    own = {"path": "소리", "id": "id", "start": "start", "end": "end"}
    found = unpacked(folder, tmp_path / "out", columns=own)
    assert [(u.id, u.start, u.stop) for u in found] == [
        ("a", 0.5, 1.5),
        ("b", 0.0, 0.0),
    ]
    for wrong, message in (
        ({}, "column audio is missing; the data set has .*소리.* Set columns"),
        ({**own, "speaker": "spk"}, "column spk is missing"),
        ({**own, "wav": "x"}, "columns: wav is unknown; choose among path"),
        ({"path": "sentence", "text": "x"}, "column x is missing"),
        ({"path": "start"}, "column start holds .*; audio is an Audio column"),
    ):
        with pytest.raises(ValueError, match=message):
            unpacked(folder, tmp_path / "out", columns=wrong)
    data.remove_columns("sentence").save_to_disk(tmp_path / "no_text")
    with pytest.raises(ValueError, match="column text is missing; the data se"):
        unpacked(tmp_path / "no_text", tmp_path, columns={"path": "소리"})


# Audio


def test_suffix_fits_the_content(tmp_path):
    cells = [
        cell(0, "a.pcm"),
        cell(0, kind="FLAC"),
        cell(0, "x", kind="OGG"),
        cell(0, "x.wav", kind="MP3"),
        {"bytes": b"\0\1" * 800, "path": "k/x.PCM"},
        {"bytes": b"broken", "path": "x.???"},
    ]
    rows(cells, ["네"] * 6).save_to_disk(tmp_path / "saved")
    found = unpacked(tmp_path / "saved", tmp_path / "out")
    suffixes = [Path(u.wav).suffix for u in found]
    assert suffixes == [".wav", ".flac", ".ogg", ".mp3", ".pcm", ""]
    assert [duration(u.wav) for u in found[:5:2]] == [0.1, 0.1, 0.05]
    with pytest.raises(ValueError, match="cannot be decoded"):
        duration(found[5].wav)


def test_files_are_read_where_they_are(tmp_path):
    place = tmp_path / "a.wav"
    place.write_bytes(sound(1))
    cells = [
        {"bytes": sound(2), "path": str(place)},
        {"bytes": sound(2), "path": "a.wav"},
        {"bytes": None, "path": str(place)},
        {"bytes": None, "path": "b.wav"},
        {"bytes": None, "path": None},
        None,
    ]
    data = datasets.Dataset.from_dict({"audio": cells, "text": ["네"] * 6})
    data.save_to_disk(tmp_path / "saved")
    out = tmp_path / "out"
    wavs = [u.wav for u in unpacked(tmp_path / "saved", out)]
    assert wavs == [
        str(place),
        str(out / "train-0000/train-0000001.wav"),
        str(place),
        str(tmp_path / "saved/b.wav"),
        str(out / "train-0000/train-0000004"),
        str(out / "train-0000/train-0000005"),
    ]
    assert len(list(out.rglob("*.wav"))) == 1
    paths = datasets.Dataset.from_dict({"audio": [str(place)], "text": ["네"]})
    paths.save_to_disk(tmp_path / "paths")
    (found,) = read("huggingface", tmp_path / "paths")  # nothing to unpack
    assert found.wav == str(place)


@pytest.mark.parametrize(
    "samples, expected",
    [
        ([0.0, 0.5, -0.5], [0, 0.5, -0.5]),
        ([2.0, -2.0], [1, -1]),
        ([[0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]], [0.25] * 4),
        ([0, 16384, -32768], [0, 0.5, -1]),
        ([], None),
        ([float("nan")], None),
        ([None], None),
        ([[1.0], [1.0, 2.0]], None),
    ],
)
def test_samples_become_flac(tmp_path, samples, expected):
    folders = row_audio.Folders(None, tmp_path)
    for cell, rate in (
        ({"array": samples, "sampling_rate": 8000, "path": "x"}, None),
        (samples, 8000),
    ):
        wav = row_audio.wav(cell, rate, "a", folders)
        if expected is None:
            with pytest.raises(ValueError, match="decoded|no audio"):
                audio.read(wav)
            continue
        assert wav == str(tmp_path / "a.flac")
        assert soundfile.info(wav).samplerate == 8000
        found = audio.read(wav, sample_rate=8000)
        assert found == pytest.approx(expected, abs=1e-4)


def test_samples_beside_a_rate(tmp_path):
    columns = {"audio": [[0.1] * 800], "text": ["네"]}
    data = datasets.Dataset.from_dict(columns)
    data.save_to_disk(tmp_path / "no_rate")
    with pytest.raises(ValueError, match="column audio holds .*sampling_rate"):
        unpacked(tmp_path / "no_rate", tmp_path / "out")
    data.add_column("sampling_rate", [8000]).save_to_disk(tmp_path / "rate")
    (found,) = unpacked(tmp_path / "rate", tmp_path / "out")
    assert duration(found.wav) == 0.1


def test_a_file_is_written_once_and_again_if_it_has_changed(tmp_path):
    simple("하나", "둘").save_to_disk(tmp_path / "saved")
    first, second = unpacked(tmp_path / "saved", tmp_path / "out")
    Path(second.wav).write_bytes(sound(9))  # of the same size
    times = [Path(u.wav).stat().st_mtime_ns for u in (first, second)]
    unpacked(tmp_path / "saved", tmp_path / "out")
    assert Path(first.wav).stat().st_mtime_ns == times[0]
    assert Path(second.wav).read_bytes() == sound(1)
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_unpack_folder_is_needed_outside_and_writable(tmp_path):
    folder = tmp_path / "saved"
    simple("하나").save_to_disk(folder)
    with pytest.raises(ValueError, match="unpack_folder.* is missing"):
        read("huggingface", folder)
    for inside in (folder, folder / "below"):
        with pytest.raises(ValueError, match="inside the corpus folder"):
            unpacked(folder, inside)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="cannot make .*choose another folder"):
        unpacked(folder, tmp_path / "file")


# What cannot be loaded


def test_hub_name(monkeypatch, tmp_path):
    asked = []

    def load(name, config):
        asked.append((name, config))
        return datasets.DatasetDict(train=simple("하나"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("org/name", "org/name:ko_kr"):
        (found,) = unpacked(Path(name), tmp_path)
        assert found.text == "하나"
        assert corpora.transcripts("huggingface", Path(name)) == []
    assert asked == [("org/name", None), ("org/name", "ko_kr")]


def test_hub_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="data_folder=no/such: .*save_to_disk"):
        unpacked(Path("no/such"), tmp_path)


def test_damaged_folders(tmp_path):
    layouts(tmp_path)
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:300])
    parquet = tmp_path / "parquet/data/validation-00000-of-00001.parquet"
    parquet.write_bytes(parquet.read_bytes()[:-50])
    for kind in ("saved", "parquet"):
        with pytest.raises(ValueError, match=f"data_folder=.*{kind}"):
            unpacked(tmp_path / kind, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="does not have the layout"):
        huggingface.transcripts(tmp_path / "out")


def test_prepared(tmp_path):
    cells = [cell(n) for n in range(4)]
    cells += [cell(0), None, {"bytes": b"broken", "path": "x.wav"}]
    labels = ["하나", "둘", "", None, "하나", "셋", "넷"]
    ids = list("abcdeff")
    folder = saved(
        tmp_path / "corpus",
        train=rows(cells, labels, id=ids),
        test=rows([cell(9)], ["시험"], id=["t"]),
    )
    out = tmp_path / "out"
    splits, report = prepared("huggingface", folder, out, columns={"id": "id"})
    assert splits["test"] == {"t"}
    assert splits["train"] | splits["valid"] == set("abce")
    assert sum(report["dropped"].values()) == 3
    assert report["dropped"]["missing_transcript"] == 1
    assert report["dropped"]["missing_audio"] == 1


# Several data sets in a folder, and a disk that is too small for its audio


def write_parquet(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        simple("하나").to_parquet(path)


@pytest.mark.parametrize("below", ["", "data"])
def test_several_data_sets_in_a_folder(tmp_path, below):
    place = tmp_path / below
    names = [place / name / "train-0.parquet" for name in ("ko", "en")]
    write_parquet(*names, place / ".cache/train-0.parquet")
    for function in (corpora.transcripts, unpacked_all):
        with pytest.raises(ValueError) as error:
            function("huggingface", tmp_path)
        assert f"choose {place}/en, {place}/ko, or" in str(error.value)
    assert len(unpacked(place / "ko", tmp_path / "out")) == 1


def unpacked_all(_, folder):
    return unpacked(folder, folder / "../out")


@pytest.mark.parametrize(
    "names",
    [
        ("train/0.parquet", "test/0.parquet"),
        ("data/train-0.parquet", "data/validation-0.parquet"),
        ("ko/train/0.parquet", "ko/test/0.parquet"),
    ],
)
def test_one_data_set_in_several_folders(tmp_path, names):
    write_parquet(*(tmp_path / "set" / name for name in names))
    found = unpacked(tmp_path / "set", tmp_path / "out")
    assert [u.text for u in found] == ["하나", "하나"]


def free_bytes(monkeypatch, n_bytes):
    usage = shutil._ntuple_diskusage(0, 0, n_bytes)
    monkeypatch.setattr(huggingface.shutil, "disk_usage", lambda _: usage)


def test_free_space_is_asked_before_audio_is_written(tmp_path, monkeypatch):
    kept = simple(*"가나다라마바").select([0, 3])  # two of six are written
    folder = saved(tmp_path / "saved", train=kept, test=simple("사"))
    free_bytes(monkeypatch, 3 * len(sound()) - 1)
    with pytest.raises(ValueError) as error:
        unpacked(folder, tmp_path / "out/unpacked")
    assert "takes about 0.0 GB as files in" in str(error.value)
    assert "where 0.0 GB are free" in str(error.value)
    assert not (tmp_path / "out").exists()
    free_bytes(monkeypatch, 4 * len(sound()))
    assert len(unpacked(folder, tmp_path / "out/unpacked")) == 3
    free_bytes(monkeypatch, 1000)  # all is there already
    assert len(unpacked(folder, tmp_path / "out/unpacked")) == 3


def test_free_space_for_a_stream_that_tells_its_size(tmp_path, monkeypatch):
    write_parquet(tmp_path / "set/train-0.parquet")
    free_bytes(monkeypatch, 1000)
    assert len(unpacked(tmp_path / "set", tmp_path / "out")) == 1
    (tmp_path / "set/README.md").write_text(
        "---\ndataset_info:\n  splits:\n  - name: train\n"
        "    num_bytes: 50000000000\n    num_examples: 1\n---\n"
    )
    with pytest.raises(ValueError, match="takes about 50.0 GB as files in"):
        unpacked(tmp_path / "set", tmp_path / "out")


def test_samples_and_paths_ask_for_no_space(tmp_path, monkeypatch):
    free_bytes(monkeypatch, 0)
    wav = str(write_audio(tmp_path / "a.wav", 0.1))
    for name, cells in (("paths", [wav]), ("arrays", [[0.5] * 1600])):
        columns = {"audio": cells, "text": ["가"], "sampling_rate": [16000]}
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / name)
        assert len(unpacked(tmp_path / name, tmp_path / "out")) == 1
