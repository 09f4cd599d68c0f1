"""A run that is killed and started again is the run that never was killed.

To the bit: losses, rates and norms of every step, weights and the optimizer's
state of the newest and the best checkpoint, texts and scores. With dropout,
augmentation, accumulation and contexts drawn by chance. ``pytest -s`` tells
each kill, and what the next start said.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import killing
import pytest
from killing import Moment
from outputs import checkpoints

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs Linux' /proc"
)
INTERVAL = 3  # steps between validations
KINDS = ["line", "validation", "checkpoint"]
SETTINGS = {
    "number_of_epochs": 3,
    "batch_size": 4,
    "max_batch_length": 20,
    "grad_accumulation_factor": 2,
    "schedule": "cosine",
    "warmup_steps": 0.2,
    "lr": 0.01,  # so high that the best checkpoint is not the last
    "valid_csv": "test.csv",  # five clips, not one
    "valid_interval_steps": INTERVAL,
    "early_stopping_patience": 99,
    "ckpt_interval_steps": 2,
    "keep_last": 2,
    "log_interval_steps": 1,
}
FULL = {**SETTINGS, "augment": True, "encoder_context": "mixed"}
FROZEN = {**SETTINGS, "adaptation": "frozen_encoder"}


class Recipe(NamedTuple):
    """How the runs to be compared are started."""

    folder: Path
    command: callable  # (output folder, **settings)

    def end(self, output_folder, moments=(), due=(), **settings):
        """All starts of a run that is killed at those moments."""
        command = self.command(output_folder, **settings)
        at = self.folder, output_folder
        starts = killing.run_to_the_end(command, *at, moments, due)
        if moments:
            print(f"\n{killing.table(starts)}")
        assert len(starts) == len(moments) + 1, "it ended before all kills"
        return starts

    def once(self, output_folder, moment, due, gently=False, **settings):
        """The start of a run that is ended at a moment."""
        command = self.command(output_folder, **settings)
        at = self.folder, output_folder
        return killing.start(command, *at, moment, due, gently)


class Whole(NamedTuple):
    """A run that was never killed.

    ``due``: steps that it validated after; ``ends``: last one of each epoch.
    """

    folder: Path
    due: list
    ends: list

    def draw(self, seed, kinds, **options):
        """Moments to kill the like of it at."""
        return killing.draw(seed, kinds, self.ends[-1], **options)

    def equals(self, folder):
        """Tells what differs; a run that agrees leaves no checkpoints."""
        assert killing.differences(folder, self.folder) == []
        shutil.rmtree(folder / "save")  # 0.3 GB


def whole(recipe, folder, **settings):
    """The run that others are compared to; its checkpoints go with the test."""
    recipe.end(folder, **settings)
    rows = killing.curve(folder)
    due = [row["step"] for row in rows if "valid" in row]
    ends = {row["epoch"]: row["step"] for row in rows}
    yield Whole(folder, due, [*ends.values()])
    shutil.rmtree(folder / "save")


@pytest.fixture(scope="module")
def starter(recipe, small, hub, tmp_path_factory):
    """Makes a Recipe of the arguments that a launcher takes."""
    model = tmp_path_factory.mktemp("dropping") / "quickstart"
    killing.with_dropout(hub, model)

    def make(*launcher, **options):
        def command(folder, **settings):
            settings = {"whisper_hub": model, **options, **settings}
            return [*killing.python(*launcher), *small(folder, **settings)]

        return Recipe(recipe, command)

    return make


@pytest.fixture(scope="module")
def one(starter):
    """One process that trains all of the model."""
    return starter(**FULL)


@pytest.fixture(scope="module")
def unkilled(one, tmp_path_factory):
    """That run, without a kill."""
    yield from whole(one, tmp_path_factory.mktemp("unkilled"))


def test_the_runs_are_hard_enough(unkilled):
    """Validations inside epochs and at their ends; what is kept is told."""
    rows = killing.curve(unkilled.folder)
    steps = [row["step"] for row in rows if "valid" not in row]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 12
    assert set(unkilled.due) > set(unkilled.ends)
    assert any(step % INTERVAL for step in unkilled.ends)
    kept = killing.newest(unkilled.folder), killing.best(unkilled.folder)
    newest, best = (killing.meta(path)["steps"] for path in kept)
    assert steps[-1] == newest > best
    assert len(checkpoints(unkilled.folder)) == 3


@pytest.mark.parametrize(
    "kinds",
    [["checkpoint"], pytest.param(KINDS, marks=pytest.mark.slow)],
    ids=len,
)
def test_killed(kinds, one, unkilled, tmp_path):
    """In the writing of a checkpoint; in a validation and between steps, too."""
    folder = tmp_path / "killed"
    moments = unkilled.draw(1986, kinds)
    kills = one.end(folder, moments, unkilled.due)[:-1]
    assert sorted(kill.moment.kind for kill in kills) == sorted(kinds)
    inside = {kill.moment.kind: kill.inside for kill in kills}
    assert all(inside[kind] for kind in kinds if kind != "line")
    assert not killing.temporary(folder)
    unkilled.equals(folder)


@pytest.mark.slow
def test_a_checkpoint_that_is_cut_in_half_is_passed_over(
    one, unkilled, tmp_path
):
    """The one before it serves, and the run ends as it did."""
    folder = tmp_path / "cut"
    shutil.copytree(unkilled.folder, folder)
    damaged = killing.newest(folder)
    weights = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    before = checkpoints(folder)[-2]
    (start,) = one.end(folder)
    told = start.printed
    assert f"half-written or damaged checkpoint {damaged}" in told
    assert f"Loading a checkpoint from {before}" in told
    assert killing.newest(folder) != damaged
    unkilled.equals(folder)


@pytest.mark.slow
def test_sigterm_saves_and_ends_with_143(one, unkilled, tmp_path):
    """Where nothing else would save: what is compared hangs on no interval."""
    folder, never = tmp_path / "terminated", {"ckpt_interval_steps": 0}
    moment = Moment("line", 2 * INTERVAL + 1)  # or one more, until it is heard
    start = one.once(folder, moment, unkilled.due, gently=True, **never)
    assert start.reached and start.code == 143, start.printed[-4000:]
    assert killing.meta(killing.newest(folder))["steps"] == start.step
    one.end(folder, **never)
    unkilled.equals(folder)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in an epoch", "at its end", "last of all"])
def test_sigterm_in_a_validation(where, one, unkilled, tmp_path):
    """Saves before it, so that the next start has it to do."""
    folder, ends = tmp_path / "terminated", unkilled.ends
    step = {
        "in an epoch": max(set(unkilled.due) - set(ends)),
        "at its end": ends[1],
        "last of all": ends[-1],
    }[where]
    moment = Moment("validation", step)
    start = one.once(folder, moment, unkilled.due, gently=True)
    assert start.code == 143 and start.inside, start.printed[-4000:]
    newest = killing.newest(folder)
    assert killing.meta(newest)["steps"] == start.step == step
    one.end(folder)
    unkilled.equals(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_twenty_times(seed, one, unkilled, tmp_path):
    """Six times a run; where a process reads the audio, and in the test too."""
    folder = tmp_path / "killed"
    moments = unkilled.draw(seed, (*killing.KINDS, "checkpoint"))
    moments.append(Moment("scores"))
    one.end(folder, moments, unkilled.due, num_workers=seed % 2)
    unkilled.equals(folder)


@pytest.fixture(scope="module")
def two(starter):
    """Two processes that train all of the model."""
    launcher = killing.TORCHRUN
    return starter(*launcher, distributed_backend="gloo", **FULL)


@pytest.fixture(scope="module")
def unkilled_two(two, tmp_path_factory):
    """That run, without a kill."""
    yield from whole(two, tmp_path_factory.mktemp("unkilled_two"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_two_processes_are_killed(seed, two, unkilled_two, tmp_path):
    folder = tmp_path / "killed"
    moments = unkilled_two.draw(seed, killing.KINDS, longest_s=15)
    two.end(folder, moments, unkilled_two.due)
    unkilled_two.equals(folder)


@pytest.mark.slow
def test_two_processes_get_sigterm(two, unkilled_two, tmp_path):
    """From torchrun, whose own return code it is then."""
    folder = tmp_path / "terminated"
    moment = Moment("line", 3)
    start = two.once(folder, moment, unkilled_two.due, gently=True)
    assert start.reached and start.code
    newest = killing.newest(folder)
    assert killing.meta(newest)["steps"] == start.step
    two.end(folder)
    unkilled_two.equals(folder)


@pytest.mark.slow
def test_a_frozen_encoder_that_keeps_its_states(starter, tmp_path):
    """Killed while it writes them, and later."""
    frozen = starter(**FROZEN)
    caches = tmp_path / "states", tmp_path / "other_states"
    run = whole(frozen, tmp_path / "a", encoder_cache_folder=caches[0])
    unkilled = next(run)
    moments = [Moment("line", 1), Moment("line", 3, seconds=0.03)]
    moments += unkilled.draw(7, ("delay", "checkpoint", "validation"))
    cache = {"encoder_cache_folder": caches[1]}
    frozen.end(tmp_path / "b", moments, unkilled.due, **cache)
    unkilled.equals(tmp_path / "b")
    next(run, None)
