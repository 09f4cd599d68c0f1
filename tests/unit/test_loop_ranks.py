"""What ranks without a shared disk find, load and are told."""

import json
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from local import checkpoints, collapse, early_stopping, loop, metrics, ranks

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
    choices = [told(brain(folder[rank])) for folder in folders]
    queue.put((rank, [*choices, judged(rank)]))
    dist.barrier()
    dist.destroy_process_group()


def judged(rank):
    """The first rank's clip loops, the other's does not."""
    text = ("네 네 네 네", "네")[rank]
    record = metrics.Record(str(rank), "네", text, 1.0)
    records = metrics.merged(ranks.gather({record.id: record}))
    return collapse.Guard(49.0, 3).judged(records, 60.0)


CASES = ("none", "shared", "apart", "lost", "damaged", "judged")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Case to what the two ranks were told."""
    root = tmp_path_factory.mktemp("ranks")
    folders = [(root / case / "0", root / case / "1") for case in CASES[:-1]]
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


def test_all_ranks_judge_a_validation_alike(found):
    first, second = found["judged"]
    assert first == second
    assert first["loops"] == 50 and first["collapsed"] is True


LOOPS, SOUND = "가 가 가 가 가", "가 나 다 라"
JUDGED = [  # patience, (hypothesis, CER) of validations; n_worse, the end
    (2, [(SOUND, 9), (LOOPS, 5), (SOUND, 9)], [0, 1, 2], None),
    (2, [(SOUND, 9), (LOOPS, 5), (SOUND, 8)], [0, 1, 0], None),
    (2, [(LOOPS, 5), (SOUND, 90), (LOOPS, 4)], [0, 0, 1], None),
    (9, [(LOOPS, 9), (LOOPS, 8), (LOOPS, 8)], [0, 0, 1], None),
    (2, [(SOUND, 9), (LOOPS, 5), (LOOPS, 5)], [0, 1, 2], "stops"),
    (0, [(LOOPS, 9), (LOOPS, 8), (LOOPS, 7)], [0, 0, 0], None),
]


@pytest.mark.parametrize("patience, validations, n_worse, end", JUDGED)
def test_a_collapsed_validation_is_no_better_one(
    patience, validations, n_worse, end
):
    stopping = early_stopping.EarlyStopping("CER", 0, 0.0)
    one = mock.Mock(early_stopping=stopping, since_sound=[])
    guard = collapse.Guard(10.0, patience)
    found, saved, told = [], [], None
    for n, (text, cer) in enumerate(validations, start=1):
        one.optimizer_step = n
        records = [metrics.Record("a", SOUND, text, 1.0)]
        try:
            scores = {"CER": cer, "WER": 50.0}
            loop.Loop.validated(one, scores, {}, guard, records)
        except ValueError as error:
            told = str(error)
        found.append(stopping.n_worse)
        saved.append(one.save.call_args.kwargs["collapsed"])
    assert found == n_worse
    assert saved == [text == LOOPS for text, _ in validations]
    assert (told is None) == (end is None)
    if end:
        assert "2 validation(s) in a row" in told
        assert "step 2: WER 50.0 %" in told and "step 3: WER" in told


def test_what_has_collapsed_before_a_kill_counts(tmp_path):
    before = mock.Mock(**dict.fromkeys(loop.POSITION, 3))
    before.since_sound = [{"step": 3, "WER": 101.5, "loops": 0.1 + 0.2}]
    loop.Loop._save(before, tmp_path / "brain.ckpt")
    now = SimpleNamespace(since_sound=[])
    loop.Loop._recover(now, tmp_path / "brain.ckpt", False)
    assert now.since_sound == before.since_sound


def test_a_checkpoint_from_before_the_guard_is_taken_for_sound(tmp_path):
    path = tmp_path / "brain.ckpt"
    position = dict.fromkeys(set(loop.POSITION) - {"since_sound"}, 3)
    path.write_text(json.dumps(position), encoding="utf-8")
    now = SimpleNamespace(since_sound=[])
    loop.Loop._recover(now, path, False)
    assert now.since_sound == [] and now.saved_step == 3


def test_a_process_alone_has_one_choice(tmp_path):
    assert ranks.here() == (0, 1)
    one = brain(tmp_path, 4.5)
    assert told(one) == ("", 4.5)
    one.checkpointer.save({"CER": 1.0}, True)
    one.modules["whisper"].weight.zero_()
    assert told(one) == ("", 4.5)
