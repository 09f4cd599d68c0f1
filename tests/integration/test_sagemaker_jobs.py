"""Whole jobs in made-up SageMaker trees: one host, and two without a shared disk."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import killing
import pytest
from outputs import checkpoints, scores

pytestmark = pytest.mark.slow
ENTRY = Path(__file__).parents[2] / "deploy/sagemaker/entry.py"
SETTINGS = {
    "hparams_file": '"quickstart.yaml"',
    "sagemaker_program": '"train.py"',
    "number_of_epochs": "2",
    "batch_size": "4",
    "lr": "0.002",
    "max_new_tokens": "8",
    "log_interval_steps": "1",
    "ckpt_interval_steps": "3",
    "precision": '"fp32"',
    "speeds": "[100]",
}
LIMIT_S = 240


def tree(root, corpus, host="algo-1", hosts=("algo-1",), model=None, **more):
    """Writes the layout of one host."""
    config, data = root / "input/config", root / "input/data"
    config.mkdir(parents=True)
    shutil.copytree(corpus, data / "training")
    channels = {"training": {"TrainingInputMode": "File"}}
    if model:
        shutil.copytree(model, data / "model")
        channels["model"] = {"TrainingInputMode": "File"}
    machines = {"current_host": host, "hosts": hosts}
    machines["network_interface_name"] = "lo"
    for name, content in {
        "hyperparameters": {**SETTINGS, **more},
        "inputdataconfig": channels,
        "resourceconfig": machines,
    }.items():
        (config / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return root


def job(root, **environment):
    """A started job; its output goes to a file beside the root."""
    quiet = {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with open(f"{root}.told", "a", encoding="utf-8") as output:
        return subprocess.Popen(
            [sys.executable, str(ENTRY), "train", "--root", str(root)],
            env={**os.environ, **quiet, **environment},
            cwd="/",
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def ended(process, root):
    """The exit code of a job, and all that it has told."""
    try:
        process.wait(LIMIT_S)
    finally:
        process.kill()
    return process.returncode, Path(f"{root}.told").read_text("utf-8")


def done(root):
    process = job(root)
    code, told = ended(process, root)
    assert code == 0, told[-6000:]


def test_a_job_that_was_interrupted_goes_on_and_gives_a_model(corpus, tmp_path):
    from transformers import WhisperForConditionalGeneration

    whole = tree(tmp_path / "whole", corpus)
    done(whole)
    root = tree(tmp_path / "taken", corpus)
    process = job(root)
    deadline = time.monotonic() + LIMIT_S
    while len(killing.curve(root / "checkpoints")) < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, told = ended(process, root)
    assert code == 143, told[-6000:]
    assert "SIGTERM: saved at step" in told
    assert not (root / "output/failure").exists()
    assert not (root / "model").exists()
    step = killing.meta(killing.newest(root / "checkpoints"))["steps"]
    assert 4 <= step < 18

    done(root)
    assert (
        killing.differences(root / "checkpoints", whole / "checkpoints") == []
    )
    assert scores(root / "model") == scores(root / "checkpoints")
    names = {path.name for path in (root / "model").iterdir()}
    wanted = {"scores", "hyperparams.yaml", "train_log.txt", "curves.jsonl"}
    assert wanted | {"learning_curves.png", "hugging_face"} <= names
    folder = root / "model/hugging_face"
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    assert model.config.d_model == 144

    path = root / "input/config/hyperparameters.json"
    path.write_text(json.dumps({**SETTINGS, "test_only": "true"}), "utf-8")
    done(root)  # over what lies in model/
    assert (
        killing.differences(root / "checkpoints", whole / "checkpoints") == []
    )


def test_two_hosts_without_a_shared_disk(corpus, hub, tmp_path):
    hosts = ["localhost", "127.0.0.1"]  # the second one leads
    roots = [
        tree(tmp_path / name, corpus, name, hosts, hub) for name in hosts[::-1]
    ]
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])

    def both():
        processes = [job(root, MASTER_PORT=port) for root in roots]
        return [ended(*pair) for pair in zip(processes, roots)]

    for code, told in both():
        assert code == 0, told[-6000:]
    first, second = roots
    assert checkpoints(first / "checkpoints")
    assert not checkpoints(second / "checkpoints")
    assert not (second / "checkpoints/scores").exists()
    assert (second / "checkpoints/manifests/train.csv").exists()
    assert (first / "model/hugging_face/model.safetensors").exists()
    assert not (second / "model").exists()
    assert scores(first / "model")["n_utterances"] == 5

    # Nobody has brought the checkpoints to the second host.
    for code, told in both():
        assert code != 0
        assert "the newest checkpoint of rank 0" in told[-8000:]
    for root in roots:
        told = (root / "output/failure").read_text("utf-8")
        assert "rank 1 on" in told and "none" in told, told
