"""SageMaker's layout to commands; stubs stand for what the commands run."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import speechbrain as sb
from speechbrain.utils.run_opts import HELP_TEXTS, RunOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/sagemaker"
sys.path.insert(0, str(FOLDER))
import entry  # noqa: E402
import layout  # noqa: E402

STUB = """
import json, os, pathlib, signal, sys, time
root = pathlib.Path(os.environ["STUB_ROOT"])
name = pathlib.Path(sys.argv[0]).stem
with open(root / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
(root / "env.json").write_text(json.dumps(dict(os.environ)))
print(name, "runs", flush=True)
if name == "train":
    run = root / "checkpoints"
    (run / "scores").mkdir(parents=True, exist_ok=True)
    (run / "scores/test.json").write_text("{}")
    for file in ("hyperparams.yaml", "learning_curves.png", "env.log"):
        (run / file).write_text(file)
    if "--test_only" in sys.argv:
        sys.exit(7)
    if "--seed=143" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        (root / "ready").touch()
        time.sleep(30)
    if "--dry_run=True" not in sys.argv:
        (run / "save/CKPT+1").mkdir(parents=True, exist_ok=True)
if name == "export":
    os.makedirs(sys.argv[2])
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Writes a layout; returns its root."""
    monkeypatch.setattr(layout, "n_gpus", lambda: 0)

    def write(settings=(), channels=("training",), **machines):
        config = tmp_path / "input/config"
        config.mkdir(parents=True, exist_ok=True)
        here = {"current_host": "algo-1", "hosts": ["algo-1"]}
        for name, content in {
            "hyperparameters": dict(settings),
            "inputdataconfig": {name: {} for name in channels},
            "resourceconfig": {**here, **machines},
        }.items():
            (config / f"{name}.json").write_text(json.dumps(content))
        for name in channels:
            folder = tmp_path / "input/data" / name / "inner"
            folder.mkdir(parents=True)
            (folder / "file").touch()
        return tmp_path

    return write


def given(job):
    """The settings that train.py would see."""
    command = [job.hparams_file, *job.arguments]
    _, options, overrides = sb.parse_arguments(command)
    return yaml.safe_load(overrides), options


@pytest.mark.parametrize(
    "text, value",
    [
        ("5", 5),
        ('"5"', 5),
        ("0.00001", 1e-5),
        ("zeroth", "zeroth"),
        ('"zeroth"', "zeroth"),
        ("true", True),
        ('"False"', False),
        ("", None),
        ('""', None),
        ("two  words", "two  words"),
        ("한국어 폴더", "한국어 폴더"),
        ("a=b", "a=b"),
        ("a: b #c", "a: b #c"),
        ("--lr", "--lr"),
        ("*.csv", "*.csv"),
        ("two\nlines", "two\nlines"),
        ("[95, 100]", [95, 100]),
        ('"[95, 100]"', [95, 100]),
        ('{"path": "a=b", "text": "t"}', {"path": "a=b", "text": "t"}),
        ("{path: file, text: t}", {"path": "file", "text": "t"}),
        (
            '[{"corpus": "kss",\n "weight": 2}]',
            [{"corpus": "kss", "weight": 2}],
        ),
    ],
)
def test_a_value_arrives_as_it_was_meant(tree, text, value):
    found, _ = given(layout.read(tree({"columns": text})))
    assert found["columns"] == value


def test_flags_take_no_value(tree):
    settings = {"test_only": '"True"', "debug": "false", "device": "cpu"}
    job = layout.read(tree(settings))
    assert {"--test_only", "--device=cpu"} <= set(job.arguments)
    _, options = given(job)
    assert options.test_only and not options.debug
    defaults = RunOptions().as_dict()
    known = {name for name in HELP_TEXTS if defaults.get(name) is False}
    assert set(layout.FLAGS) == known


def test_channels_give_folders_and_the_sdks_keys_are_passed_over(tree):
    channels = [name for name in layout.CHANNELS if name != "training"]
    settings = {"sagemaker_program": '"x.py"', "_tuning_objective_metric": "x"}
    root = tree({**settings, "hparams_file": "train_turbo.yaml"}, channels)
    job = layout.read(root)
    found, _ = given(job)
    data = root / "input/data"
    assert found == {
        "data_folder": str(data / "train"),
        "manifest_folder": str(data / "manifests"),
        "whisper_hub": str(data / "model"),
        "features_folder": str(data / "features"),
        "noise_folder": str(data / "noise"),
        "reverb_folder": str(data / "reverb"),
        "output_folder": str(root / "checkpoints"),
    }
    assert job.hparams_file == "hparams/train_turbo.yaml"
    assert job.has_manifests


@pytest.mark.parametrize("name", ["train_large_v3.yaml", "quickstart.yaml"])
def test_a_hyperparameter_file_is_one_of_the_recipes(tree, name):
    job = layout.read(tree({"hparams_file": f"hparams/{name}"}))
    assert (layout.RECIPE / job.hparams_file).name == name
    assert (layout.RECIPE / "hparams" / layout.DEFAULT_FILE).is_file()


@pytest.mark.parametrize(
    "settings, channels, told",
    [
        ({"data_folder": "/d"}, ["training"], ["data_folder", "'training'"]),
        ({"whisper_hub": "a/b"}, ["train", "model"], ["whisper_hub='a/b'"]),
        ({"output_folder": "/o"}, ["train"], ["output_folder='/o'", "layout"]),
        ({"save_folder": "/o"}, ["train"], ["save_folder"]),
        ({}, ["train", "training"], ["'train' gives", "one of the two"]),
        ({}, ["train", "valid"], ["'valid': unknown", "manifests"]),
        ({}, [], ["no channel 'training'", "there are none", "reverb"]),
        ({}, ["model"], ["no channel 'training'", "there are model"]),
        (
            {"hparams_file": "my.yaml"},
            ["train"],
            ["my.yaml", "quickstart.yaml"],
        ),
        ({"test_only": "yes"}, ["train"], ["test_only", "true or false"]),
        (
            {"lr": 0.1, "seed": {"a": [1]}},
            ["train"],
            ["lr=0.1", "seed={", "texts"],
        ),
        ({"a b": "1"}, ["train"], ["'a b'", "no name"]),
        ({"columns": "{a: b=c}"}, ["train"], ["write it as JSON"]),
        ({"lr": 1, "test_only": "2"}, ["x"], ["lr=1", "test_only", "'x'"]),
    ],
)
def test_all_that_is_wrong_is_told_together(tree, settings, channels, told):
    with pytest.raises(ValueError) as error:
        layout.read(tree(settings, channels))
    for words in told:
        assert words in str(error.value)


def test_a_corpus_on_the_hub_needs_no_channel(tree):
    job = layout.read(tree({"data_folder": "google/fleurs"}, []))
    assert "--data_folder=google/fleurs" in job.arguments


def test_an_empty_channel_and_a_pipe_are_told(tree):
    root = tree(channels=["train", "noise", "model"])
    (root / "input/data/noise/inner/file").unlink()
    modes = {"train": {}, "noise": {}, "model": {"TrainingInputMode": "Pipe"}}
    path = root / "input/config/inputdataconfig.json"
    path.write_text(json.dumps(modes))
    with pytest.raises(ValueError, match="(?s)noise holds no file.*FastFile"):
        layout.read(root)


@pytest.mark.parametrize(
    "name", ["hyperparameters", "inputdataconfig", "resourceconfig"]
)
@pytest.mark.parametrize(
    "content, told",
    [(None, "missing"), ("{", "no JSON"), ("[]", "no JSON object")],
)
def test_a_file_of_the_configuration_is_bad(tree, name, content, told):
    root = tree()
    path = root / f"input/config/{name}.json"
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        layout.read(root)
    assert told in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    "machines",
    [
        {"current_host": "b"},
        {"hosts": None},
        {"hosts": "algo-1"},
        {"hosts": []},
    ],
)
def test_a_host_knows_its_place(tree, machines):
    with pytest.raises(ValueError, match="give hosts, and current_host"):
        layout.read(tree(**machines))


HOSTS = {"current_host": "algo-2", "hosts": ["algo-2", "algo-1"]}
HOSTS["network_interface_name"] = "eth1"


@pytest.mark.parametrize(
    "gpus, machines, wanted",
    [
        (0, {}, ""),
        (1, {}, ""),
        (4, {}, "--nproc_per_node=4 --standalone"),
        (8, HOSTS, "--nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr"),
        (0, HOSTS, "--nproc_per_node=1 --nnodes=2 --node_rank=1 --master_addr"),
    ],
)
def test_processes_follow_from_gpus_and_hosts(
    tree, monkeypatch, gpus, machines, wanted
):
    monkeypatch.setattr(layout, "n_gpus", lambda: gpus)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    job = layout.read(tree(**machines))
    command = " ".join(entry.launcher(job)[1:])
    if not wanted:
        assert not command
    assert command.startswith("-m torch.distributed.run " * bool(wanted))
    assert wanted in command
    if machines:
        assert "--master_addr=algo-1 --master_port=29500" in command
        assert ("--distributed_backend=gloo" in job.arguments) == (not gpus)


@pytest.mark.parametrize(
    "script, n",
    [
        ("echo GPU 0: H100; echo '  MIG 1g'; echo GPU 1: H100", 2),
        ("exit 9", None),
    ],
)
def test_gpus_are_counted_by_their_driver(tmp_path, monkeypatch, script, n):
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if n is None:
        with pytest.raises(OSError, match="nvidia-smi"):
            layout.n_gpus()
    else:
        assert layout.n_gpus() == n
    path.unlink()
    assert layout.n_gpus() == 0


@pytest.fixture
def start(tree, monkeypatch, tmp_path):
    """Runs the script in this process, with stubs; (exit code, calls)."""
    recipe = tmp_path / "recipe"
    for name in ("train.py", "export.py", "here/prepare_host.py"):
        path = recipe / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB)
    monkeypatch.setattr(entry, "HERE", recipe / "here")
    monkeypatch.setenv("STUB_ROOT", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments, **options):
        root = tree(*arguments, **options)
        monkeypatch.setattr(
            sys, "argv", ["entry.py", "train", f"--root={root}"]
        )
        with monkeypatch.context() as patched:
            job = layout.read(root)
            patched.setattr(layout, "read", lambda root: job)
            patched.setattr(layout, "RECIPE", recipe)
            code = entry.main()
        path = root / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else ()
        return code, [json.loads(line) for line in lines]

    return run


def names(calls):
    return [Path(call[0]).name for call in calls]


def test_what_a_run_has_come_to_is_collected(start, tmp_path, capfdbinary):
    (tmp_path / "model/hugging_face").mkdir(parents=True)  # of an earlier try
    code, calls = start({"lr": "0.1"})
    assert code == 0 and names(calls) == ["train.py", "export.py"]
    assert "--lr=0.1" in calls[0]
    run, model = tmp_path / "checkpoints", tmp_path / "model"
    assert calls[1][1:] == [
        str(run),
        str(model / "hugging_face"),
        *("--format", "hf"),
    ]
    assert {path.name for path in model.iterdir()} == {
        *("scores", "hyperparams.yaml", "learning_curves.png", "hugging_face")
    }
    assert not (tmp_path / "output/failure").exists()
    assert b"train runs\n" in capfdbinary.readouterr().out


def test_hosts_without_a_shared_disk_prepare_first(
    start, tmp_path, monkeypatch
):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(entry, "launcher", lambda job: [sys.executable, "-u"])
    code, calls = start(**HOSTS)
    assert code == 0 and names(calls) == ["prepare_host.py", "train.py"]
    prepared, trained = (call[1:] for call in calls)
    manifests = f"--manifest_folder={tmp_path / 'checkpoints/manifests'}"
    assert trained == [*prepared, manifests]
    seen = json.loads((tmp_path / "env.json").read_text())
    assert seen["NCCL_SOCKET_IFNAME"] == "chosen"
    assert seen["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert not (tmp_path / "model").exists()  # the first host's to write


def test_ready_manifests_are_not_prepared(start, monkeypatch):
    monkeypatch.setattr(entry, "launcher", lambda job: [sys.executable])
    hosts = {**HOSTS, "current_host": "algo-1"}
    _, calls = start({}, ["training", "manifests"], **hosts)
    assert names(calls) == ["train.py", "export.py"]


def test_the_childs_exit_code_and_last_words_are_told(start, tmp_path):
    code, calls = start({"test_only": "true"})
    assert code == 7 and names(calls) == ["train.py"]
    told = (tmp_path / "output/failure").read_text()
    assert told == "train.py ended with exit code 7\ntrain runs"


def test_a_run_without_a_checkpoint_exports_nothing(start):
    code, calls = start({"dry_run": "True"})
    assert code == 0 and names(calls) == ["train.py"]


def test_a_full_disk_loses_no_checkpoint(start, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(entry.shutil, "copy", full)
    code, calls = start()
    assert code == 1 and names(calls) == ["train.py"]
    told = (tmp_path / "output/failure").read_text()
    for words in ("ended well", "No space left", "larger volume"):
        assert words in told
    assert (tmp_path / "checkpoints/save/CKPT+1").is_dir()


def test_the_reason_comes_first_and_fits():
    tail = "bar 1\rbar 2\n" + "x" * 3000 + "\ntrain.py: 오류\n"
    tail += "E1121 torch/distributed/elastic/api.py failed\n" + "y" * 3000
    told = entry.failure("why", tail.encode())
    assert told.startswith("why\n") and told.endswith("\ntrain.py: 오류")
    assert len(told) == 1024
    assert entry.failure("why", b"1\r2\r\n\xff") == "why\n2\n\ufffd"
    assert entry.failure("w" * 2000, b"last") == "w" * 2000


@pytest.mark.parametrize("launched", [False, True])
def test_sigterm_is_passed_on_to_the_process_that_saves(
    tmp_path, monkeypatch, launched
):
    """Of torchrun: to its children, which it would kill too soon."""
    (tmp_path / "train.py").write_text(STUB)
    monkeypatch.setenv("STUB_ROOT", str(tmp_path))
    monkeypatch.setattr(layout, "RECIPE", tmp_path)
    command = [sys.executable, "train.py", "--seed=143"]
    if launched:
        head = (
            "import subprocess as s, sys; sys.exit(s.call(sys.argv[1:]) - 42)"
        )
        command = [sys.executable, "-c", head, *command]
    commands = entry.Commands()
    wait = subprocess.Popen.wait

    def signalled(process):
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        commands.hear(signal.SIGTERM, None)
        commands.hear(signal.SIGTERM, None)
        return wait(process, 20)

    monkeypatch.setattr(subprocess.Popen, "wait", signalled)
    assert commands.run(command, launched) == (101 if launched else 143)
    assert commands.run(command) == 143  # nothing is begun any more
    assert len((tmp_path / "calls.jsonl").read_text().splitlines()) == 1


def test_a_process_that_a_signal_ends_has_a_shells_exit_code():
    code = "import os; os.kill(os.getpid(), 9)"
    assert entry.Commands().run([sys.executable, "-c", code]) == 137


def test_the_image_has_the_torch_of_the_lock():
    image = re.search(
        r"^FROM pytorch/pytorch:([\d.]+)-cuda(\d+)",
        (FOLDER / "Dockerfile").read_text(),
        re.M,
    )
    lock = (ROOT / "requirements.lock").read_text()
    assert f"\ntorch=={image[1]}\n" in lock
    assert re.search(rf"^cuda-toolkit=={image[2]}\.", lock, re.M)
