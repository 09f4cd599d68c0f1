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
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
sys.path.insert(0, str(FOLDER))
import entry  # noqa: E402
import layout  # noqa: E402

HOSTS = {"current_host": "algo-2", "hosts": ["algo-2", "algo-1"]}
HOSTS["network_interface_name"] = "eth1"
LEADER = {**HOSTS, "current_host": "algo-1"}
PIPE = {"TrainingInputMode": "Pipe"}
WHOLE = {"S3DistributionType": "FullyReplicated"}
PART = {"S3DistributionType": "ShardedByS3Key"}
CONFIGURATION = ["hyperparameters", "inputdataconfig", "resourceconfig"]
BAD = [(None, "missing"), ("{", "no JSON"), ("[]", "no JSON object")]
ALIKE = "zeroth|two  words|한국어 폴더|a=b|a: b #c|--lr|*.csv|two\nlines"
RUN = "-m torch.distributed.run --nproc_per_node"
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
        if not isinstance(channels, dict):
            channels = dict.fromkeys(channels, {})
        config = tmp_path / "input/config"
        config.mkdir(parents=True, exist_ok=True)
        here = {"current_host": "algo-1", "hosts": ["algo-1"]}
        contents = dict(settings), channels, {**here, **machines}
        for name, content in zip(CONFIGURATION, contents):
            (config / f"{name}.json").write_text(json.dumps(content))
        for name, options in channels.items():
            folder = tmp_path / "input/data" / name / "inner"
            folder.mkdir(parents=True)
            if options is not None:
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
        *((text, text) for text in ALIKE.split("|")),
        ("5", 5),
        ('"5"', 5),
        ("0.00001", 1e-5),
        ('"zeroth"', "zeroth"),
        ("true", True),
        ('"False"', False),
        ("", None),
        ('""', None),
        ("[95, 100]", [95, 100]),
        ('"[95, 100]"', [95, 100]),
        ('{"path": "a=b", "text": "t"}', {"path": "a=b", "text": "t"}),
        ("{path: file, text: t}", {"path": "file", "text": "t"}),
        ('[{"weight":\n 2}]', [{"weight": 2}]),
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


def test_a_hyperparameter_file_is_one_of_the_recipes(tree):
    name = "hparams/quickstart.yaml"
    assert layout.read(tree({"hparams_file": name})).hparams_file == name
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
        ({}, {"train": PIPE}, ["Pipe", "FastFile"]),
        ({}, {"train": {}, "noise": None}, ["noise holds no file"]),
        ({}, {"train": PART}, ["'train': S3", "Sharded", "FullyReplicated"]),
        ({}, {"train": WHOLE, "noise": PART}, ["'noise': S3", "each host"]),
        ({"hparams_file": "my.yaml"}, ["train"], ["my.yaml", "quickstart.y"]),
        ({"test_only": "yes"}, ["train"], ["test_only", "true or false"]),
        ({"lr": 0.1, "seed": {"a": 1}}, ["train"], ["lr=0", "seed={", "text"]),
        ({"a b": "1"}, ["train"], ["'a b'", "no name"]),
        ({"columns": "{a: b=c}"}, ["train"], ["write it as JSON"]),
        ({"lr": 1, "test_only": "2"}, ["x"], ["lr=1", "test_only", "'x'"]),
    ],
)
def test_all_that_is_wrong_is_told_together(tree, settings, channels, told):
    with pytest.raises(ValueError) as error:
        layout.read(tree(settings, channels, **HOSTS))
    for words in told:
        assert words in str(error.value)


def test_a_corpus_on_the_hub_needs_no_channel(tree):
    job = layout.read(tree({"data_folder": "google/fleurs"}, []))
    assert "--data_folder=google/fleurs" in job.arguments


@pytest.mark.parametrize("kind, machines", [(PART, {}), (WHOLE, HOSTS)])
def test_a_host_may_have_the_whole_of_a_channel(tree, kind, machines):
    assert layout.read(tree({}, {"train": kind}, **machines))


@pytest.mark.parametrize("name", CONFIGURATION)
@pytest.mark.parametrize("content, told", BAD)
def test_a_file_of_the_configuration_is_bad(tree, name, content, told):
    root = tree()
    path = root / f"input/config/{name}.json"
    path.write_text(content) if content else path.unlink()
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        layout.read(root)
    assert told in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    "machines",
    [{"current_host": "b"}, {"hosts": None}, {"hosts": "a"}, {"hosts": []}],
)
def test_a_host_knows_its_place(tree, machines):
    with pytest.raises(ValueError, match="give hosts, and current_host"):
        layout.read(tree(**machines))


@pytest.mark.parametrize(
    "gpus, machines, wanted",
    [
        (0, {}, ""),
        (1, {}, ""),
        (4, {}, f"{RUN}=4 --standalone"),
        (8, HOSTS, f"{RUN}=8 --nnodes=2 --node_rank=1 --master_addr"),
        (0, HOSTS, f"{RUN}=1 --nnodes=2 --node_rank=1 --master_addr"),
    ],
)
def test_processes_follow_from_gpus(tree, monkeypatch, gpus, machines, wanted):
    monkeypatch.setattr(layout, "n_gpus", lambda: gpus)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    job = layout.read(tree(**machines))
    command = " ".join(entry.launcher(job)[1:])
    assert command.startswith(wanted) and bool(command) == bool(wanted)
    if machines:
        assert "--master_addr=algo-1 --master_port=29500" in command
        assert ("--distributed_backend=gloo" in job.arguments) == (not gpus)


@pytest.mark.parametrize(
    "script, n",
    [("echo GPU 0: H; echo '  MIG 1g'; echo GPU 1: H", 2), ("exit 9", None)],
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
    yaml_file = f"hparams/{layout.DEFAULT_FILE}"
    for name in ("train.py", "export.py", "here/prepare_host.py", yaml_file):
        path = recipe / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STUB)
    monkeypatch.setattr(entry, "HERE", recipe / "here")
    monkeypatch.setattr(entry, "launcher", lambda job: [sys.executable, "-u"])
    monkeypatch.setattr(layout, "RECIPE", recipe)
    monkeypatch.setenv("STUB_ROOT", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments, **options):
        root = tree(*arguments, **options)
        argv = ["entry.py", "train", f"--root={root}"]
        monkeypatch.setattr(sys, "argv", argv)
        code = entry.main()
        lines = (root / "calls.jsonl").read_text().splitlines()
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
    folder = str(model / "hugging_face")
    assert calls[1][1:] == [str(run), folder, "--format", "hf"]
    assert {path.name for path in model.iterdir()} == {
        *("scores", "hyperparams.yaml", "learning_curves.png", "hugging_face")
    }
    assert not (tmp_path / "output/failure").exists()
    assert b"train runs\n" in capfdbinary.readouterr().out


@pytest.mark.parametrize(
    "settings",
    [{}, *({"manifest_folder": text} for text in ("", '""', "Null", " "))],
)
def test_hosts_prepare_each_for_itself(start, tmp_path, monkeypatch, settings):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    code, calls = start(settings, **HOSTS)
    assert code == 0 and names(calls) == ["prepare_host.py", "train.py"]
    prepared, trained = (call[1:] for call in calls)
    manifests = f"--manifest_folder={tmp_path / 'checkpoints/manifests'}"
    plain = [word for word in prepared if "--manifest_folder=" not in word]
    assert trained == [*plain, manifests]
    seen = json.loads((tmp_path / "env.json").read_text())
    assert seen["NCCL_SOCKET_IFNAME"] == "chosen"
    assert seen["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert not (tmp_path / "model").exists()  # the first host's to write


@pytest.mark.parametrize(
    "settings, channels, machines, code, ran",
    [
        ({}, ["train", "manifests"], LEADER, 0, ["train.py", "export.py"]),
        ({"manifest_folder": "/m"}, ["train"], HOSTS, 0, ["train.py"]),
        ({"dry_run": "True"}, ["train"], {}, 0, ["train.py"]),
        ({"test_only": "true"}, ["train"], {}, 7, ["train.py"]),
    ],
)
def test_only_what_is_needed_runs(
    start, tmp_path, settings, channels, machines, code, ran
):
    """Nothing is prepared twice, nor exported without a checkpoint."""
    found, calls = start(settings, channels, **machines)
    assert found == code and names(calls) == ran
    path = tmp_path / "output/failure"
    told = path.read_text() if path.exists() else ""
    assert told == "train.py ended with exit code 7\ntrain runs" * (code == 7)


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
    told = entry.failure("why", tail.encode())
    assert told.startswith("why\n") and told.endswith("\ntrain.py: 오류")
    assert len(told) == 1024
    assert entry.failure("why", b"1\r2\r\n\xff") == "why\n2\n\ufffd"
    assert entry.failure("w" * 2000, b"last") == "w" * 2000


PLACE = "1121 20:10:59.024000 8468 torch/distributed/elastic/multiprocessing"
STOPS = f"W{PLACE}/api.py:1012] Sending process 8483 closing signal SIGTERM\n"
FAILED = f"E{PLACE}/api.py:986] failed (exitcode: -9) local_rank: 1 (pid: 8484)"
TRACE = """Traceback (most recent call last):
  File "/lib/torch/distributed/elastic/agent/server/api.py", line 514
    rdzv_info = spec.rdzv_handler.next_rendezvous()
torch.distributed.DistNetworkError: The client socket has timed out"""


@pytest.mark.parametrize(
    "tail, shown",
    [
        (f"오류\n{STOPS * 7}{FAILED}\n{TRACE}", f"오류\n{FAILED}"),
        (f"{TRACE}\n{FAILED}\n{TRACE}", f"{TRACE}\n{FAILED}"),
        (f" 9%|bar{FAILED}\n{TRACE}", f"9%|bar{FAILED}"),
        (TRACE, TRACE),
    ],
)
def test_torchruns_own_traceback_hides_no_error(tail, shown):
    assert entry.failure("why", tail.encode()) == f"why\n{shown}"


@pytest.mark.parametrize("launched", [False, True])
def test_sigterm_is_passed_on_to_what_saves(tmp_path, monkeypatch, launched):
    """Of torchrun: to its children, which it would kill too soon."""
    (tmp_path / "train.py").write_text(STUB)
    monkeypatch.setenv("STUB_ROOT", str(tmp_path))
    monkeypatch.setattr(layout, "RECIPE", tmp_path)
    command = [sys.executable, "train.py", "--seed=143"]
    if launched:
        head = "import subprocess as s, sys; exit(s.call(sys.argv[1:]) - 42)"
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
    tag = r"^FROM pytorch/pytorch:([\d.]+)-cuda(\d+)"
    image = re.search(tag, DOCKERFILE, re.M)
    lock = (ROOT / "requirements.lock").read_text()
    assert f"\ntorch=={image[1]}\n" in lock
    assert re.search(rf"^cuda-toolkit=={image[2]}\.", lock, re.M)


def test_the_image_gets_what_it_copies_and_no_results():
    copied = re.findall(r"^COPY (\S+)", DOCKERFILE, re.M)
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    rules = rules[rules.index("*") + 1 :]  # the last one that fits holds
    left_out = ["**/results", "**/__pycache__"]
    assert rules == [*(f"!{name}" for name in copied), *left_out]
