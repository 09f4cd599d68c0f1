"""What ranks without a shared disk find, load and are told."""

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from local import checkpoints, loop, ranks

from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)


@register_checkpoint_hooks
class Weight:
    """A module of one trained number."""

    def __init__(self, value):
        self.weight = torch.tensor([value])

    def trained_state(self):
        return {"weight": self.weight}

    @mark_as_saver
    def save(self, path):
        Path(path).write_text(str(self.weight.item()))

    @mark_as_loader
    def load(self, path, end_of_epoch):
        self.weight.fill_(float(Path(path).read_text()))


def brain(folder, value=0.0):
    """What Loop's methods ask for; its checkpoints lie in a folder."""
    weight = Weight(value)
    checkpointer = checkpoints.Checkpointer(folder, {"whisper": weight})
    return SimpleNamespace(
        modules={"whisper": weight}, checkpointer=checkpointer
    )


def told(one):
    """The choice and what is loaded of it: or what was told instead."""
    try:
        loop.Loop.require_one_choice(one)
        choice = ""
    except ValueError as error:
        choice = str(error)
    try:
        loop.Loop.on_evaluate_start(one)
        return choice, one.modules["whisper"].weight.item()
    except (ValueError, RuntimeError) as error:
        return choice, f"{type(error).__name__}: {error}"


def process(rank, file, folders, queue):
    os.environ["RANK"] = str(rank)  # that is where SpeechBrain looks
    store = dist.FileStore(file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    queue.put((rank, [told(brain(folder[rank])) for folder in folders]))
    dist.barrier()
    dist.destroy_process_group()


CASES = ("none", "shared", "apart", "lost", "damaged")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Case to what the two ranks were told."""
    root = tmp_path_factory.mktemp("ranks")
    folders = [(root / case / "0", root / case / "1") for case in CASES]
    folders[1] = folders[1][:1] * 2
    for first, _ in folders[1:3]:
        brain(first, 1.5).checkpointer.save({"CER": 3.0}, True)
    brain(folders[2][1], 2.5).checkpointer.save({"CER": 2.0}, True)
    brain(folders[3][1], 2.5).checkpointer.save({"CER": 2.0}, True)
    folders[4] = folders[4][:1] * 2
    brain(folders[4][0], 1.5).checkpointer.save({"CER": 3.0}, True)
    (path,) = folders[4][0].glob("CKPT+*/whisper.ckpt")
    path.write_text("?.?")  # as long as it was
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    args = str(root / "store"), folders, queue
    processes = [fork.Process(target=process, args=(r, *args)) for r in (0, 1)]
    for one in processes:
        one.start()
    by_rank = dict(queue.get(timeout=60) for _ in processes)
    for one in processes:
        one.join(timeout=60)
    return dict(zip(CASES, zip(by_rank[0], by_rank[1])))


@pytest.mark.parametrize("case, weight", [("none", 0.0), ("shared", 1.5)])
def test_one_choice_is_everyones(found, case, weight):
    assert found[case] == (("", weight), ("", weight))


def test_disks_that_differ_stop_a_run_that_would_go_on(found):
    (choice, _), (other, _) = found["apart"]
    assert choice == other
    assert "apart/0/CKPT+" in choice and "rank 1 on" in choice
    assert "apart/1/CKPT+" in choice and "Copy rank 0's" in choice
    (choice, _), (other, _) = found["lost"]
    assert choice == other
    assert "rank 0" in choice and "none; but" in choice
    assert "lost/1/CKPT+" in choice


def test_the_first_ranks_best_is_loaded_on_all_disks(found):
    assert [weight for _, weight in found["apart"]] == [1.5, 1.5]
    assert [weight for _, weight in found["lost"]] == [0.0, 0.0]


def test_what_the_first_rank_cannot_load_ends_all(found):
    reason = "ValueError: could not convert string to float: '?.?'"
    told = f"RuntimeError: the first process failed: {reason}"
    assert [weight for _, weight in found["damaged"]] == [reason, told]


def test_a_process_alone_has_one_choice(tmp_path):
    assert ranks.here() == (0, 1)
    one = brain(tmp_path, 4.5)
    assert told(one) == ("", 4.5)
    one.checkpointer.save({"CER": 1.0}, True)
    one.modules["whisper"].weight.zero_()
    assert told(one) == ("", 4.5)
