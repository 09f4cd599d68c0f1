"""The folder of manifests: its fingerprint, who writes it, and how to."""

import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from conftest import write_audio
from local import files, manifest_folder, prepare

RECIPE = Path(prepare.__file__).parents[1]
HOLD = "import sys; from local import files; x = files.lock(sys.argv[1]); "
HOLD += "print(flush=True); input()"


@contextmanager
def held(folder):
    """Another process has the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        cwd=RECIPE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline()  # nothing, if it has none
        yield process.pid
    finally:
        process.communicate(b"\n")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "a corpus"
    lines = ["path\ttext\tsplit"]
    for name, split in (("a", "train"), ("b", "valid"), ("c", "test")):
        write_audio(folder / f"{name}.wav", 0.1)
        lines.append(f"{name}.wav\t문장 {name}\t{split}")
    (folder / "manifest.tsv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_link_to_nothing_is_a_file_that_is_gone(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    link.symlink_to(target)
    gone = manifest_folder.fingerprint([link])
    target.write_text("a")
    there = manifest_folder.fingerprint([link])
    target.unlink()
    assert manifest_folder.fingerprint([link]) == gone != there
    assert manifest_folder.fingerprint([]) != gone


def test_a_name_that_is_no_unicode(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xb0.txt")
    Path(path).write_text("a")
    assert manifest_folder.fingerprint([path])


@pytest.mark.parametrize("name", ["train.csv", "test.csv", prepare.REPORT])
def test_content(corpus, tmp_path, name):
    out = tmp_path / "out"
    prepare.prepare("manifest", corpus, out, lambda text: True)
    before = manifest_folder.content(out)
    assert manifest_folder.content(out) == before
    with open(out / name, "a") as file:
        file.write(" ")
    assert manifest_folder.content(out) != before


def test_two_do_not_prepare_into_one_folder(corpus, tmp_path):
    out, fits = tmp_path / "out", lambda text: True
    with held(out) as pid:
        with pytest.raises(ValueError) as error:
            prepare.prepare("manifest", corpus, out, fits)
        assert f"being prepared in {out} already" in str(error.value)
        assert f"process {pid} on" in str(error.value)
        assert not (out / "train.csv").exists()
    prepare.prepare("manifest", corpus, out, fits)
    with held(out):  # what is finished can be read by many
        prepare.prepare("manifest", corpus, out, fits)
    entries = [{"corpus": "manifest", "folder": str(corpus)}]
    mixed = tmp_path / "mixed"
    with held(mixed), pytest.raises(ValueError, match="mixed already"):
        prepare.prepare_all(entries, "", mixed, label_fits=fits)


def test_without_locks(corpus, tmp_path, monkeypatch):
    """As on Windows."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    prepare.prepare("manifest", corpus, tmp_path / "out", lambda text: True)
    assert not (tmp_path / "out" / files.LOCK).exists()


ONE = {"corpus": "manifest", "corpora": [], "columns": {"text": "text"}}
SEVERAL = {
    "corpus": "zeroth",
    "corpora": [
        {"corpus": "manifest", "folder": "a corpus", "name": "가", "weight": 2}
    ],
}


@pytest.mark.parametrize("keep_no_speech", [True, False])
@pytest.mark.parametrize("of_run, root", [(ONE, "a corpus"), (SEVERAL, ".")])
def test_the_command_for_a_run_of_several_processes(
    corpus, tmp_path, monkeypatch, caplog, of_run, root, keep_no_speech
):
    """What it prepares is what the run finds finished."""
    of_run = {
        **of_run,
        "keep_no_speech": keep_no_speech,
        "text_form": "spelling",
    }
    monkeypatch.chdir(tmp_path)
    prepared = partial(prepare.prepare, data_folder=root, **of_run)
    limits = {"max_duration_s": 30.0, "slowest_speed": 0.95}
    limits["label_fits"] = lambda text: True
    monkeypatch.setattr(prepare, "run_on_main", lambda *_, **__: None)
    monkeypatch.setattr(prepare.ranks, "here", lambda: (0, 2))
    with pytest.raises(FileNotFoundError):  # nobody has prepared
        prepare.for_run("", "run", prepared, **limits)
    words = shlex.split(caplog.messages[-1].partition("recipe folder: ")[2])
    assert words[:3] == ["python", "-m", "local.prepare"]
    words += ["--whisper_hub", "random:quickstart"]
    monkeypatch.setattr(sys, "argv", words[2:])
    monkeypatch.chdir("/")
    prepare.main()
    monkeypatch.chdir(tmp_path)
    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setattr(prepare.measured, "clips", None)
        prepared(out="run/manifests", **limits)
        prepare.for_run("", "run", prepared, **limits)
    assert "the other processes wait" not in caplog.text


def test_one_process_waits_for_nobody(corpus, tmp_path, caplog):
    prepared = partial(prepare.prepare, data_folder=corpus, corpus="manifest")
    prepare.for_run("", tmp_path / "run", prepared, label_fits=lambda _: True)
    assert "the other processes wait" not in caplog.text
