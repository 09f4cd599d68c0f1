"""A list of corpora: what is wrong with it, and the manifests it makes."""

import hashlib
import json
import re
import shutil
import sys

import pytest
from conftest import write_audio
from local import manifest, mixture, prepare, prepare_report


@pytest.fixture
def corpora(tmp_path):
    """Three folders below ``data``, the last without valid and test."""
    rows = {
        "one": [
            ("a.wav", "하나", "train"),
            ("b.wav", "둘", "valid"),
            ("c.wav", "셋", "test"),
            ("gone.wav", "넷", "train"),
        ],
        "two": [
            ("a.wav", "셋.", "train"),
            ("d.wav", "다섯 (", "valid"),
            ("e.wav", "", "test_far"),
        ],
        "three": [(f"{i}.wav", f"문장 {i}", "train") for i in range(4)],
    }
    for folder, lines in rows.items():
        place = tmp_path / "data" / folder
        place.mkdir(parents=True)
        text = "".join(f"{p}\t{t}\t{s}\tkim\n" for p, t, s in lines)
        (place / "manifest.tsv").write_text(
            f"path\ttext\tsplit\tspeaker\n{text}"
        )
        for name, *_ in lines:
            if name != "gone.wav":
                seed = ord(name[0]) if folder != "three" else int(name[0])
                write_audio(place / name, 0.1, seed=seed)
    return tmp_path / "data"


def listed(*names, **more):
    return [
        {"corpus": "manifest", "folder": n, "name": n, **more} for n in names
    ]


def run(corpora, out, entries, **settings):
    """Prepares; the rows of each split, and the report."""
    settings = {"label_fits": lambda text: True, **settings}
    prepare.prepare("", corpora, out, corpora=entries, **settings)
    report = json.loads((out / prepare.REPORT).read_text(encoding="utf-8"))
    splits = {
        path.stem: manifest.read(path, str(corpora))
        for path in sorted(out.glob("*.csv"))
    }
    return splits, report


# What a list may say


@pytest.mark.parametrize(
    "value", [None, [], (), listed("one", weight=0.5), listed("가_1", "b")]
)
def test_nothing_is_wrong(value):
    assert prepare.problems_of_corpora(value) is None


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"wait": 2},
            "entry 1, 'wait' is unknown; choose among corpus, folder",
        ),
        ({"corpus": "zerot"}, "corpus='zerot': choose zeroth, ksponspeech"),
        ({"corpus": ["zeroth"]}, r"corpus=\['zeroth'\]: choose zeroth"),
        ({"folder": ""}, "folder='': give a folder, absolute or below"),
        ({"name": "a-b"}, "name='a-b': give letters, digits and _"),
        ({"name": "../x"}, "name='../x': give letters"),
        ({"weight": 0}, "weight=0: give a number above 0"),
        ({"weight": "2"}, "weight='2': give a number above 0"),
        ({"weight": True}, "weight=True: give a number above 0"),
        ({"weight": float("nan")}, "weight=nan: give a number above 0"),
        ({"weight": float("inf")}, "weight=inf: give a number above 0"),
        ({"columns": {"txt": "x"}}, "columns=.*: txt is none of path, text"),
        ({"columns": "text"}, "columns='text': give a mapping"),
        ({"text_form": "x"}, "text_form='x': choose spelling, pronunciation"),
    ],
)
def test_each_problem_names_value_and_choices(change, message):
    (entry,) = listed("one")
    problems = prepare.problems_of_corpora([{**entry, **change}])
    assert re.search(message, problems), problems


@pytest.mark.parametrize(
    "value, message",
    [
        ("zeroth", "give a list of mappings such as"),
        ({"corpus": "kss"}, "give a list of mappings such as"),
        (["zeroth"], "entry 1, 'zeroth': give a mapping"),
        ([{"folder": "x"}], "entry 1, corpus is missing in"),
        ([{"corpus": "kss"}], "entry 1, folder is missing in"),
        (listed("one") * 2, "name 'one' stands 2 times; give each a name"),
        (
            [{"corpus": "zeroth", "folder": f} for f in "ab"],
            "name 'zeroth' stands 2 times.*{name: zeroth_2}",
        ),
    ],
)
def test_problems_of_the_list(value, message):
    problems = prepare.problems_of_corpora(value)
    assert re.search(message, problems), problems


def test_all_problems_are_told_together(corpora, tmp_path):
    entries = [{"corpus": "x", "folder": "one", "weight": -1}, 7]
    with pytest.raises(ValueError) as error:
        run(corpora, tmp_path / "out", entries)
    for word in ("corpora: entry 1, corpus='x'", "weight=-1", "entry 2, 7"):
        assert word in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_the_hub_is_no_path(tmp_path):
    (tmp_path / "org/own").mkdir(parents=True)
    entries = [
        {"corpus": "huggingface", "folder": f"org/{n}", "name": n}
        for n in ("own", "name")
    ]
    found = mixture.complete(entries, tmp_path, columns={}, text_form="x")
    assert found["own"]["data_folder"] == tmp_path / "org/own"
    assert found["name"]["data_folder"] == "org/name"


@pytest.mark.parametrize(
    "splits, expected",
    [
        (["train", "valid"], ["train", "valid"]),
        (["test"], ["test_own"]),
        (["test_clean"], ["test_own_clean"]),
        (["test2"], ["test_own_2"]),
    ],
)
def test_new_names(splits, expected):
    found = mixture.new_names({"own": {"kept": splits, "empty_tests": []}})
    assert list(found["own"].values()) == expected


def test_two_tests_of_one_name():
    heads = {
        "a": {"kept": ["test_b_x"], "empty_tests": []},
        "a_b": {"kept": [], "empty_tests": ["test_x"]},
    }
    with pytest.raises(ValueError, match="test_x of a_b would both be test_a"):
        mixture.new_names(heads)


def test_two_tests_of_one_name_are_told_before_more_is_decoded(
    corpora, tmp_path
):
    rename(corpora / "one", "\ttest\t", "\ttest_b_far\t")
    entries = listed("one", "two", "three")
    entries[0]["name"], entries[1]["name"] = "a", "a_b"
    with pytest.raises(ValueError, match="would both be test_a_b_far"):
        run(corpora, tmp_path / "out", entries)
    assert not (tmp_path / "out/three").exists()


def rename(folder, old, new):
    path = folder / "manifest.tsv"
    changed = path.read_text().replace(old, new)
    assert changed != path.read_text()
    path.write_text(changed)


# What it makes


def test_corpora_are_put_together(corpora, tmp_path):
    out = tmp_path / "out"
    splits, report = run(corpora, out, listed("one", "two", "three"))
    three = splits["test_three"]
    assert {name: list(rows) for name, rows in splits.items()} == {
        "train": ["one-a", "two-a", *(f"three-{i}" for i in _train(three))],
        "valid": ["one-b", "two-d", *_held_out(splits)],
        "test_one": ["one-c"],
        "test_two_far": ["two-e"],
        "test_three": list(three),
    }
    assert splits["train"]["two-a"]["corpus"] == "two"
    assert splits["train"]["two-a"]["wav"] == str(corpora / "two/a.wav")
    header, row = (out / "test_one.csv").read_text().splitlines()
    assert row.startswith("one-c,0.100,$data_root/one/c.wav,kim,셋,")
    assert report["dropped_by_split"] == {"missing_audio": {"train": 1}}
    assert report["dropped_clips"][0]["id"] == "one-gone"
    assert report["leftover_markup_ids"] == ["two-d"]
    assert report["kept"]["test_three"]["held_out_of_train"]
    assert not report["kept"]["test_one"]["held_out_of_train"]
    parts = report["corpora"]
    assert parts["one"]["dropped"] == {"missing_audio": 1}
    assert parts["two"]["kept"]["test_far"]["clips"] == 1
    totals = {k: v["clips"] for k, v in report["kept"].items()}
    assert totals == {name: len(rows) for name, rows in splits.items()}


def _held_out(splits):
    return [name for name in splits["valid"] if name.startswith("three-")]


def _train(test):
    """Of ``three``, the four texts but for one in test and one in valid."""
    ordered = sorted(
        range(4), key=lambda i: hashlib.sha1(f"문장 {i}".encode()).digest()
    )
    assert list(test) == [f"three-{ordered[1]}"]
    return sorted(ordered[2:])


def test_leakage_across_corpora(corpora, tmp_path):
    out = tmp_path / "out"
    _, report = run(corpora, out, listed("one", "two"))
    test = report["leakage"]["splits"]["test_one"]
    assert test["texts"]["examples"] == [
        {"train": "two-a", "test_one": "one-c"}
    ]
    assert test["audio"]["shared"] == 0
    assert test["speakers"]["shared"] == 1  # kim of one, not of two
    copies = report["leakage"]["copies_in_train"]
    example = {"first": "one-a", "copy": "two-a"}
    assert copies == {"clips": 1, "examples": [example]}
    lines = prepare_report.summary(out / prepare.REPORT).splitlines()
    told = "1 texts (1 clips), 1 speakers (1 clips), 0 audio"
    assert f"test_one shares with train: {told}" in lines
    assert "train has copies of its own audio: 1 clips" in lines


def test_audio_elsewhere_is_absolute(corpora, tmp_path):
    (one,) = listed(str(corpora / "one"), name="one")
    below = tmp_path / "elsewhere"
    below.mkdir()
    splits, _ = run(below, tmp_path / "out", [one])
    wav = str(corpora / "one/a.wav")
    assert splits["train"]["one-a"]["wav"] == wav
    assert f",{wav}," in (tmp_path / "out/train.csv").read_text()


def test_what_the_list_leaves_open(corpora, tmp_path):
    out = tmp_path / "out"
    (entry,) = listed("one", columns={"speaker": "split"})
    prepare.prepare_all([entry], corpora, out, label_fits=lambda text: True)
    report = json.loads((out / prepare.REPORT).read_text())
    used = report["settings"]["corpora"]["one"]
    assert (used["text_form"], used["columns"]) == (
        "spelling",
        {"speaker": "split"},
    )
    (row,) = manifest.read(out / "test_one.csv", str(corpora)).values()
    assert row["spk_id"] == "test"


def times(out):
    names = [*out.glob("*.csv"), *out.glob("*/*.csv")]
    return {path.relative_to(out): path.stat().st_mtime_ns for path in names}


def changed(before, after):
    return {str(p.parent) for p in after if after[p] != before.get(p)}


def test_one_change_prepares_one_corpus(corpora, tmp_path):
    out, entries = tmp_path / "out", listed("one", "two", weight=2)
    first = run(corpora, out, entries)
    before = times(out)
    assert run(corpora, out, listed("one", "two", weight=3)) == first
    assert times(out) == before
    with open(corpora / "two/manifest.tsv", "a") as file:
        file.write("d.wav\t여섯\ttrain\t\n")
    splits, _ = run(corpora, out, entries)
    assert "two-d" in splits["train"] or "two-d" in splits["valid"]
    assert changed(before, times(out)) == {".", "two"}
    before = times(out)
    run(corpora, out, listed("one"))
    assert changed(before, times(out)) == {"."}
    assert not (out / "test_two_far.csv").exists()


def test_a_part_that_is_prepared_anew_is_put_in_anew(corpora, tmp_path):
    """Its settings are the same: the audio came, or went, meanwhile."""
    out, entries = tmp_path / "out", listed("one", "two")
    run(corpora, out, entries)
    write_audio(corpora / "one/gone.wav", 0.1, seed=7)
    shutil.rmtree(out / "one")
    splits, report = run(corpora, out, entries)
    assert "one-gone" in splits["train"] and not report["dropped"]
    before = times(out)
    shutil.rmtree(out / "one")
    run(corpora, out, entries)
    assert changed(before, times(out)) == {"one"}  # to the same content


def test_a_test_that_is_empty_does_not_stop_the_others(corpora, tmp_path):
    (corpora / "one/c.wav").unlink()
    out = tmp_path / "out"
    splits, report = run(corpora, out, listed("one", "two"))
    assert set(splits) == {"train", "valid", "test_two_far"}
    assert report["empty_tests"] == ["test_one"]
    assert report["dropped_by_split"]["missing_audio"]["test_one"] == 1
    # One that has another test of its own tells of the empty one, too.
    (corpora / "two/e.wav").unlink()
    write_audio(corpora / "two/f.wav", 0.1)
    with open(corpora / "two/manifest.tsv", "a") as file:
        file.write("f.wav\t여섯\ttest_near\t\n")
    splits, report = run(corpora, out, listed("one", "two"))
    assert set(splits) == {"train", "valid", "test_two_near"}
    assert report["empty_tests"] == ["test_one", "test_two_far"]
    assert report["dropped_by_split"]["missing_audio"]["test_two_far"] == 1


def test_what_is_held_out_is_told_by_corpus(corpora, tmp_path):
    out = tmp_path / "out"
    _, report = run(corpora, out, listed("one", "three"))
    assert not report["kept"]["valid"]["held_out_of_train"]
    lines = prepare_report.summary(out / prepare.REPORT).splitlines()
    assert (
        "valid: 2 clips, 0.00 h, of them held out of train: 1 clips of three"
        in lines
    )
    assert "test_three: 1 clips, 0.00 h, held out of train" in lines
    _, report = run(corpora, out, listed("three"))
    assert report["kept"]["valid"]["held_out_of_train"]


@pytest.mark.parametrize("lost", ["train.csv", "one/clips.sqlite"])
def test_a_lost_file_is_made_again(corpora, tmp_path, lost):
    out = tmp_path / "out"
    first = run(corpora, out, listed("one", "two"))
    (out / lost).unlink()
    assert run(corpora, out, listed("one", "two")) == first
    assert (out / lost).exists()


def test_a_corpus_prepared_alone_meanwhile_is_read_anew(corpora, tmp_path):
    """Its store would tell of other settings."""
    out, fits = tmp_path / "out", {"label_fits": lambda text: True}
    run(corpora, out, listed("one"), max_duration_s=0.01 + 0.1)
    prepare.prepare("manifest", corpora / "one", out / "one", **fits)
    assert not (out / "one/clips.sqlite").exists()
    splits, _ = run(corpora, out, listed("one"))
    assert list(splits["train"]) == ["one-a"]


def test_the_list_of_the_command(corpora, tmp_path, monkeypatch, capsys):
    entries = json.dumps(listed(*(str(corpora / n) for n in ("one", "two"))))
    entries = entries.replace(f'"name": "{corpora}/', '"name": "')
    words = ["prepare", "--corpora", entries, "--out", str(tmp_path / "out")]
    words += ["--whisper_hub", "random:quickstart"]
    monkeypatch.setattr(sys, "argv", words)
    prepare.main()
    assert "test_two_far: 1 clips" in capsys.readouterr().out


def test_relative_folders_of_the_command(corpora, tmp_path, monkeypatch):
    entries = "[{corpus: manifest, folder: one, name: one}]"
    words = ["prepare", "--corpora", entries, "--data_folder", str(corpora)]
    words += ["--out", str(tmp_path / "out")]
    words += ["--whisper_hub", "random:quickstart"]
    monkeypatch.setattr(sys, "argv", words)
    prepare.main()
    written = (tmp_path / "out/train.csv").read_text()
    assert ",$data_root/one/a.wav," in written


@pytest.mark.parametrize(
    "words, message",
    [
        (["kss", "x", "--data_folder", "y"], "--data_folder goes with --corp"),
        ([], "give either CORPUS FOLDER or --corpora"),
        (["kss", "x", "--corpora", "[{corpus: kss}]"], "give either CORPUS"),
        (["--corpora", "[{corpus: kss}]"], "folder is missing"),
    ],
)
def test_wrong_words_of_the_command(
    tmp_path, monkeypatch, capsys, words, message
):
    out = str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["prepare", "--out", out, *words])
    with pytest.raises(SystemExit):
        prepare.main()
    assert message in capsys.readouterr().err
