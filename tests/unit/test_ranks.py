"""One process alone, and several that share something."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from local import ranks
from torch import nn

N_RANKS = 3


def test_a_process_without_torchrun_is_alone():
    assert not dist.is_initialized()
    assert ranks.here() == (0, 1)
    item, tensor = {"a": [1]}, torch.ones(2)
    assert ranks.gather(item) == [item]
    assert ranks.total(tensor) is tensor


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_what_is_drawn_follows_from_the_seed_and_nothing_before():
    ranks.seed(1986, 1, 5)
    first = drawn()
    drawn()
    ranks.seed(1986, 1, 5)
    assert drawn() == first
    found = {first}
    for numbers in [(1986, 1, 6), (1986, 2, 5), (1987, 1, 5), (1986, 5, 1)]:
        ranks.seed(*numbers)
        found.add(drawn())
    assert len(found) == 5


def test_ranks_draw_differently(monkeypatch):
    found = set()
    for rank in range(3):
        monkeypatch.setattr(ranks, "here", lambda rank=rank: (rank, 3))
        ranks.seed(1986, 1, 5)
        found.add(drawn())
    assert len({one for numbers in found for one in numbers}) == 9


def process(rank, file, queue):
    """What one of several processes sees."""
    store = dist.FileStore(file, N_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=N_RANKS)
    mine = torch.tensor([1.5, 10.0**rank], dtype=torch.double)
    called, given = [], torch.full((2, 2), float(rank))
    ranks.on_first(called.append, "once")
    ranks.from_first([given[0]])
    try:
        ranks.on_first(int, "no number")
    except (ValueError, RuntimeError) as error:
        failed = f"{type(error).__name__}: {error}"
    seen = {
        "called": called,
        "given": given.tolist(),
        "failed": failed,
        "here": ranks.here(),
        "gathered": ranks.gather({"clip": rank, "text": "가" * rank}),
        "total": ranks.total(mine).tolist(),
        "mine": mine.tolist(),
    }
    queue.put((rank, seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Rank to what it saw."""
    fork = multiprocessing.get_context("fork")
    file, queue = str(tmp_path_factory.mktemp("ranks") / "store"), fork.Queue()
    processes = [
        fork.Process(target=process, args=(rank, file, queue))
        for rank in range(N_RANKS)
    ]
    for one in processes:
        one.start()
    found = dict(queue.get(timeout=60) for _ in processes)
    for one in processes:
        one.join(timeout=60)
    return found


def test_every_rank_knows_its_place(seen):
    assert {r: s["here"] for r, s in seen.items()} == {
        rank: (rank, N_RANKS) for rank in range(N_RANKS)
    }


def test_every_rank_gathers_all_in_order(seen):
    wanted = [{"clip": r, "text": "가" * r} for r in range(N_RANKS)]
    assert all(s["gathered"] == wanted for s in seen.values())


def test_a_total_leaves_each_ranks_own(seen):
    for rank, found in seen.items():
        assert found["total"] == [4.5, 111.0]
        assert found["mine"] == [1.5, 10.0**rank]


def test_the_first_rank_alone_does_it_and_all_get_what_it_has(seen):
    for rank, found in seen.items():
        assert found["called"] == ["once"] * (rank == 0)
        assert found["given"] == [[0, 0], [rank, rank]]


def test_what_fails_on_the_first_rank_ends_all(seen):
    reason = "ValueError: invalid literal for int() with base 10: 'no number'"
    assert seen[0]["failed"] == reason
    for rank in range(1, N_RANKS):
        told = f"RuntimeError: the first process failed: {reason}"
        assert seen[rank]["failed"] == told


def test_alone_the_first_rank_is_this_one():
    called, tensor = [], torch.ones(2)
    ranks.on_first(called.append, "once")
    ranks.from_first([tensor])
    assert called == ["once"] and tensor.tolist() == [1, 1]
    with pytest.raises(ValueError, match="no number"):
        ranks.on_first(int, "no number")


def test_gradients_of_a_wrapped_module_lie_where_they_are_sent():
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        module[0].bias.requires_grad_(False)
        inputs = torch.randn(5, 3)
        weights = [p for p in module.parameters() if p.requires_grad]
        wanted = torch.autograd.grad(module(inputs).exp().sum(), weights)
        wrapped = ranks.wrap(module, "cpu")
        assert wrapped.gradient_as_bucket_view
        assert not wrapped.find_unused_parameters
        assert not wrapped.broadcast_buffers
        assert wrapped.parameters_to_ignore == {"0.bias"}
        wrapped(inputs).exp().sum().backward()
        for weight, gradient in zip(weights, wanted):
            torch.testing.assert_close(weight.grad, gradient)
        storages = {w.grad.untyped_storage().data_ptr() for w in weights}
        assert len(storages) == 1  # no second copy of the gradients
        assert module[0].bias.grad is None
    finally:
        dist.destroy_process_group()


def test_a_value_that_ranks_do_not_share_is_told(monkeypatch):
    ranks.require_same("seed", 3)
    monkeypatch.setattr(ranks, "gather", lambda value: [value, 4])
    with pytest.raises(ValueError, match="seed must be.*rank 0 3, rank 1 4"):
        ranks.require_same("seed", 3)
