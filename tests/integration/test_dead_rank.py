"""One of two processes fails: all end, soon, and say why."""

import os
import signal
import subprocess
import time
from pathlib import Path

import killing
import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs Linux' /proc"
)
MARK = "A_RANK_DIES"
MOST_S = 60


def of_rank(rank):
    """The process of a rank, by its environment."""
    ranks = set(killing.processes(f"\0RANK={rank}\0"))
    (pid,) = ranks & set(killing.processes(MARK))
    return pid


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_process_that_dies_ends_the_others(
    rank, recipe, small, hub, tmp_path
):
    settings = {"whisper_hub": hub, "distributed_backend": "gloo"}
    settings |= {"number_of_epochs": 99, "log_interval_steps": 1}
    command = killing.python(*killing.TORCHRUN)
    with open(tmp_path / "told", "w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *small(tmp_path, **settings)],
            cwd=recipe,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 120
            while len(killing.curve(tmp_path)) < 2:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            died = time.monotonic()
            os.kill(of_rank(rank), signal.SIGKILL)
            assert process.wait(MOST_S) != 0
            print(f"rank {rank}: {time.monotonic() - died:.1f} s")
        finally:
            killing.kill(process, MARK)
        output.seek(0)
        told = output.read()
    assert "Signal 9 (SIGKILL)" in told
    assert "root cause" in told.lower()
