#!/usr/bin/env python3
"""Runs train.py in a container that follows SageMaker's training layout.

In: /opt/ml/input, as SageMaker fills it, and the argument ``train``: it starts
an image that is not its own by ``docker run IMAGE train``.
Out: the run in /opt/ml/checkpoints, its best model in /opt/ml/model, why it
failed in /opt/ml/output/failure; the exit code of what was run.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import layout

HERE = Path(__file__).resolve().parent
RESULTS = (
    "scores",
    "hyperparams.yaml",
    "train_log.txt",
    "curves.jsonl",
    "*.png",
)
MODEL = "hugging_face"  # in /opt/ml/model
RENDEZVOUS_S = 7200  # hosts may need more or less for the same corpus
SHOWN = 1024  # characters of the failure that SageMaker shows
KEPT = 65536  # bytes of what was printed last
ENDED = 128 + signal.SIGTERM
# Of torchrun, after a process's own error: which one, and how it ended; its
# traceback follows. Before it, a line for each process that it then stops.
FAILED = re.compile(r"E\d{4} .*torch/distributed/elastic.*failed \(exitcode")
STOPS = re.compile(r"W\d{4} .*torch/distributed/elastic.*Sending process")


class Commands:
    """Runs commands one after the other, and passes SIGTERM on to them.

    Attributes
    ----------
    asked : bool
        SIGTERM came.
    tail : bytes
        What the last command printed last.
    environment : dict
        Of the commands.
    """

    def __init__(self):
        self.process, self.launches = None, False
        self.asked = self.passed_on = False
        self.tail = b""
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1"}

    def run(self, command, launches=False):
        """The exit code of a command, started in the recipe folder.

        Arguments
        ---------
        command : list of str
        launches : bool
            It is torchrun, which would kill its processes 30 s after the
            signal; SageMaker gives 120 s to save.
        """
        if self.asked:
            return ENDED
        self.passed_on, self.launches, self.tail = False, launches, b""
        print("$", *command, flush=True)
        self.process = subprocess.Popen(
            command,
            cwd=layout.RECIPE,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if self.asked:
            self._pass_on()
        reader = threading.Thread(
            target=self._tell, args=[self.process.stdout], daemon=True
        )
        reader.start()
        code = self.process.wait()
        reader.join(10)  # what a dead process has started may hold the pipe
        self.process = None
        return code if code >= 0 else 128 - code

    def _tell(self, stream):
        while chunk := stream.read1(KEPT):
            self.tail = (self.tail + chunk)[-KEPT:]
            with contextlib.suppress(OSError):  # nobody listens
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()

    def hear(self, signal_number, frame):
        """For ``signal.signal``."""
        self.asked = True
        if self.process:
            self._pass_on()

    def _pass_on(self):
        if self.passed_on:  # torchrun's answer to a second one is to give up
            return
        self.passed_on = True
        pid = self.process.pid
        for one in (self.launches and _children(pid)) or [pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGTERM)


def _children(pid):
    with contextlib.suppress(OSError):
        told = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return list(map(int, told.split()))
    return []


def launcher(job):
    """The head of a training's command: Python, or torchrun."""
    n_processes = max(1, job.n_gpus)
    if len(job.hosts) == 1 and n_processes == 1:
        return [sys.executable]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += [f"--nproc_per_node={n_processes}"]
    if len(job.hosts) == 1:
        return [*torchrun, "--standalone"]
    return [
        *torchrun,
        f"--nnodes={len(job.hosts)}",
        f"--node_rank={job.rank}",
        f"--master_addr={job.hosts[0]}",
        f"--master_port={os.environ.get('MASTER_PORT', '29500')}",
        f"--rdzv_conf=timeout={RENDEZVOUS_S}",
    ]


def train(job, root, commands):
    """Prepares where hosts share no disk, trains, and collects.

    Returns
    -------
    str, int
        What was run last; its exit code.
    """
    arguments = [job.hparams_file, *job.arguments]
    if len(job.hosts) > 1:
        if job.network:
            for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
                commands.environment.setdefault(name, job.network)
        if not job.has_manifests:
            commands.environment["PYTHONPATH"] = str(layout.RECIPE)
            script = str(HERE / "prepare_host.py")
            code = commands.run([sys.executable, script, *arguments])
            if code:
                return "the preparation of the corpus", code
            manifests = root / "checkpoints/manifests"
            given = "--manifest_folder="  # nothing, where it is
            arguments = [a for a in arguments if not a.startswith(given)]
            arguments += layout.argument("manifest_folder", str(manifests))
    head = launcher(job)
    code = commands.run([*head, "train.py", *arguments], len(head) > 1)
    if code or job.rank:
        return "train.py", code
    return "export.py", collect(root, commands)


def collect(root, commands):
    """Puts what a run has come to into the model's folder; an exit code.

    Raises
    ------
    OSError
        It cannot be written; the checkpoints are whole.
    """
    run, model = root / "checkpoints", root / "model"
    try:
        model.mkdir(parents=True, exist_ok=True)
        for path in (p for name in RESULTS for p in run.glob(name)):
            if path.is_dir():
                shutil.copytree(path, model / path.name, dirs_exist_ok=True)
            else:
                shutil.copy(path, model)
        shutil.rmtree(model / MODEL, ignore_errors=True)  # an earlier job's
    except OSError as error:
        raise OSError(
            f"the training ended well, but {model} cannot be written: {error}; "
            "give the instance a larger volume, and start the job again with "
            "the same checkpoints"
        ) from error
    if not any(run.glob("save/CKPT+*")):
        print(f"no checkpoint in {run / 'save'}: no model to export")
        return 0
    command = ["export.py", str(run), str(model / MODEL), "--format", "hf"]
    return commands.run([sys.executable, *command])


def failure(reason, tail):
    """The reason, and as many of the last lines as SageMaker will show."""
    text = tail.decode("utf-8", errors="replace").replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    ends = [n for n, line in enumerate(lines, 1) if FAILED.search(line)]
    lines = [line for line in lines[: ends[0] if ends else None] if line]
    room = SHOWN - len(reason) - 1
    last = "\n".join(line for line in lines if not STOPS.search(line)).strip()
    return f"{reason}\n{last[-room:] if room > 0 else ''}".strip()


def main():
    """The command line; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["train"])
    parser.add_argument(
        "--root",
        type=Path,
        default=os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"),
    )
    root = parser.parse_args().root.resolve()
    commands = Commands()
    signal.signal(signal.SIGTERM, commands.hear)
    reason = ""
    try:
        job = layout.read(root)
        what, code = train(job, root, commands)
        if code and not commands.asked:
            reason = f"{what} ended with exit code {code}"
    except (ValueError, OSError) as error:
        reason, code = str(error), 1
        print(f"entry.py: {error}", file=sys.stderr, flush=True)
    if reason:
        with contextlib.suppress(OSError):  # the exit code tells it, too
            (root / "output").mkdir(parents=True, exist_ok=True)
            text = failure(reason, commands.tail)
            (root / "output/failure").write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
