"""Which clip is trained and scored when, beside which others."""

import random
import time

import numpy as np
import pytest
import torch
from hypothesis import (
    example,
    given,
    settings,
    strategies as st,
)
from local import batching
from local.batching import Batches, context_samples, in_order

CONTEXT_S = 30.0
STEP_S = 0.32


def corpus(n_clips, seed=0, longest_s=CONTEXT_S):
    """(n_clips,) seconds, log-normal with a mean of 7.7."""
    rng = np.random.default_rng(seed)
    durations = rng.lognormal(np.log(7.7) - 0.6**2 / 2, 0.6, n_clips)
    return durations.clip(0.5, longest_s).round(3)


def plan(
    durations_s,
    batch_size=64,
    max_batch_length_s=160,
    encoder_context="true_length",
    n_ranks=1,
    epoch=0,
    seed=7,
):
    """The samplers of all ranks."""
    samplers = [
        Batches(
            durations_s,
            batch_size,
            max_batch_length_s,
            encoder_context,
            CONTEXT_S,
            seed,
            rank,
            n_ranks,
        )
        for rank in range(n_ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return samplers


def together(samplers):
    """Batches over all ranks, each a list of clips."""
    return [sum(parts, []) for parts in zip(*samplers)]


# Contexts


@pytest.mark.parametrize(
    "seconds, n_steps",
    [
        (0.0, 1),
        (0.318, 1),
        (0.319, 2),  # with the slack, over 0.32 s
        (0.32, 2),
        (1.0, 4),
        (7.7, 25),
        (29.7, 93),
        (29.9, 93.75),  # capped at the context, 480 000 samples
        (30.0, 93.75),
        (31.0, 93.75),
    ],
)
def test_context_samples(seconds, n_steps):
    assert context_samples(seconds, CONTEXT_S) == n_steps * 5120
    assert context_samples([seconds], CONTEXT_S).dtype == np.int64


@pytest.mark.parametrize("context_s", [5, 30])
def test_a_context_is_never_shorter_than_its_clip(context_s):
    """The manifest rounds to 1 ms, and resampling may add a sample."""
    n_samples = np.arange(1, context_s * 16000 + 1)
    contexts = context_samples((n_samples / 16000).round(3), context_s)
    n_most = context_s * 16000
    assert (contexts >= np.minimum(n_samples + 1, n_most)).all()
    assert (contexts <= np.minimum(n_samples + 5120 + 50, n_most)).all()
    assert (contexts[contexts < n_most] % 5120 == 0).all()


# What a training batch holds


@st.composite
def plans(draw):
    n_clips = draw(st.integers(1, 60))
    choice = st.sampled_from
    return {
        "durations_s": corpus(n_clips, seed=draw(st.integers(0, 9))),
        "batch_size": draw(st.integers(1, 7)),
        "max_batch_length_s": draw(choice([0, 3, 31, 100])),
        "encoder_context": draw(choice(["true_length", "mixed", "full"])),
        "n_ranks": draw(st.integers(1, 8)),
        "epoch": draw(st.integers(0, 3)),
    }


@given(plans())
@example({"durations_s": [1.0], "n_ranks": 8})
@example({"durations_s": [2.0] * 17, "batch_size": 2, "n_ranks": 8})
@settings(max_examples=150, deadline=None)
def test_every_clip_once_an_epoch(arguments):
    ranks = plan(**arguments)
    batches = together(ranks)
    n_clips, n_ranks = len(arguments["durations_s"]), len(ranks)
    counts = np.bincount(sum(batches, []), minlength=n_clips)
    assert (counts >= 1).all()
    # A tail of fewer clips than ranks is repeated, and nothing else.
    again = [b for b in batches if len(set(b)) < len(b)]
    assert len(again) <= 1
    assert counts.sum() == n_clips + sum(len(b) - len(set(b)) for b in batches)
    if again:
        assert len(set(again[0])) < n_ranks == len(again[0])


@given(plans(), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_the_steps_of_a_run(arguments, n_epochs, factor):
    """Counted before it starts, as its epochs then have them."""
    sampler = plan(**arguments)[0]
    foretold = sampler.n_steps(n_epochs, factor)
    n_steps = 0
    for epoch in range(1, n_epochs + 1):
        sampler.set_epoch(epoch)
        n_steps += -(-len(sampler) // factor)
    assert foretold == n_steps


@given(plans())
@settings(max_examples=100, deadline=None)
def test_ranks_run_through_the_same_shapes(arguments):
    ranks = plan(**arguments)
    assert len({len(rank) for rank in ranks}) == 1
    for rank in ranks:
        assert len(rank) == len(list(rank)) == len(rank.contexts)
        assert (rank.contexts == ranks[0].contexts).all()
        assert rank.shares == ranks[0].shares
    for parts in zip(*ranks):
        sizes = list(map(len, parts))
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@given(plans())
@settings(max_examples=100, deadline=None)
def test_batch_size_budget_and_context_are_kept(arguments):
    durations = arguments["durations_s"]
    budget_s = arguments["max_batch_length_s"]
    for rank in plan(**arguments):
        for batch, context in zip(rank, rank.contexts):
            assert len(batch) <= arguments["batch_size"]
            padded_s = len(batch) * context / 16000
            if budget_s and len(batch) > 1:
                assert padded_s <= budget_s
            wanted = context_samples(durations[batch].max(), CONTEXT_S)
            assert context >= wanted
            if arguments["encoder_context"] == "full":
                assert context == CONTEXT_S * 16000


def test_batches_are_as_full_as_the_budget_allows():
    durations = np.full(100, 9.9)  # 32 steps of the context: 10.24 s
    (rank,) = plan(durations, batch_size=64, max_batch_length_s=103)
    assert list(map(len, rank)) == [10] * 10
    (rank,) = plan(durations, batch_size=6, max_batch_length_s=103)
    assert sorted(map(len, rank)) == [4] + [6] * 16
    (rank,) = plan(durations, batch_size=64, max_batch_length_s=5)
    assert list(map(len, rank)) == [1] * 100


@pytest.mark.parametrize(
    "n_clips, n_ranks", [(2000, 1), (20000, 1), (20000, 8)]
)
@pytest.mark.parametrize("encoder_context", ["true_length", "mixed"])
def test_padding_is_little(n_clips, n_ranks, encoder_context):
    durations = corpus(n_clips)
    ranks = plan(durations, encoder_context=encoder_context, n_ranks=n_ranks)
    assert 0 < ranks[0].shares["padding"] <= 10
    unsorted = plan(
        durations, 16, 0, encoder_context=encoder_context, n_ranks=n_ranks
    )
    assert unsorted[0].shares["padding"] > 40


@given(plans())
@settings(max_examples=50, deadline=None)
def test_shares(arguments):
    ranks = plan(**arguments)
    durations = np.asarray(arguments["durations_s"])
    encoded = heard = 0.0
    for rank in ranks:
        for batch, context in zip(rank, rank.contexts):
            encoded += len(batch) * context / 16000
            heard += durations[batch].sum()
    silence = 100 * (1 - heard / encoded)
    assert ranks[0].shares["silence"] == pytest.approx(silence)
    expected = {
        "true_length": silence,
        "full": 0.0,
        "mixed": pytest.approx(silence / 2, abs=silence / 2),
    }[arguments["encoder_context"]]
    assert ranks[0].shares["padding"] == pytest.approx(expected, abs=1e-9)


def test_a_tail_ends_with_the_context():
    (rank,) = plan(np.full(50, 29.9), encoder_context="mixed")
    assert rank.shares["padding"] == pytest.approx(0.0, abs=0.1)
    assert 0 < rank.shares["silence"] < 1


# In which order


@pytest.mark.parametrize("max_batch_length_s", [0, 160])
@pytest.mark.parametrize("encoder_context", ["true_length", "mixed", "full"])
def test_another_order_in_every_epoch_and_the_same_again(
    max_batch_length_s, encoder_context
):
    def orders(**options):
        ranks = plan(
            corpus(300, longest_s=20),
            8,
            max_batch_length_s,
            encoder_context,
            n_ranks=2,
            **options,
        )
        return [list(rank) for rank in ranks]

    first = orders(epoch=1)
    assert first == orders(epoch=1)  # as after a restart
    assert first != orders(epoch=2)
    assert first != orders(epoch=1, seed=8)

    def sets(batches):
        return {frozenset(batch) for batch in batches}

    # Not the same batches in another order.
    assert len(sets(first[0]) & sets(orders(epoch=2)[0])) < len(first[0]) / 4


def test_batches_of_like_length_come_in_random_order():
    durations = corpus(3000)
    (rank,) = plan(durations)
    order = np.array([durations[batch].mean() for batch in rank][1:])
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.3


def test_an_epoch_leaves_none_of_the_one_before():
    (went_on,) = plan(corpus(100), epoch=1)
    went_on.set_epoch(2)
    (fresh,) = plan(corpus(100), epoch=2)
    assert list(went_on) == list(fresh) == list(fresh)
    assert (went_on.contexts == fresh.contexts).all()
    assert went_on.shares == fresh.shares


def test_the_global_random_numbers_are_not_drawn():
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    def seed():
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)

    seed()
    expected = draw()
    seed()
    for rank in plan(corpus(50), 4, 50, "mixed", n_ranks=2):
        list(rank)
    assert draw() == expected


@pytest.mark.parametrize("n_clips", [200, 2000])
@pytest.mark.parametrize("max_batch_length_s", [0, 160])
@pytest.mark.parametrize("encoder_context", ["true_length", "mixed"])
@pytest.mark.parametrize("n_ranks", [1, 8])
def test_the_longest_batch_comes_first(
    n_clips, max_batch_length_s, encoder_context, n_ranks
):
    durations = corpus(n_clips, longest_s=28)
    durations[3] = 29.0
    for epoch in range(4):
        rank = plan(
            durations,
            8,
            max_batch_length_s,
            encoder_context,
            n_ranks=n_ranks,
            epoch=epoch,
        )[0]
        assert rank.contexts[0] == rank.contexts.max()
        if encoder_context == "true_length":
            assert 3 in rank.batches[0]


@pytest.mark.parametrize("n_ranks, batch_size", [(2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("max_batch_length_s", [0, 400])
@pytest.mark.parametrize("encoder_context", ["true_length", "mixed", "full"])
def test_ranks_hold_the_batches_of_one_process(
    n_ranks, batch_size, max_batch_length_s, encoder_context
):
    durations = corpus(203)
    shared = plan(
        durations,
        batch_size,
        max_batch_length_s,
        encoder_context,
        n_ranks=n_ranks,
    )
    (alone,) = plan(durations, 8, max_batch_length_s, encoder_context)
    got, wanted = together(shared), list(alone)
    assert list(map(len, wanted)).count(8) == 25
    for batch, expected in zip(got, wanted):
        if len(expected) >= n_ranks:
            assert sorted(batch) == sorted(expected)
        assert set(batch) == set(expected)
    assert (shared[0].contexts == alone.contexts).all()


# Context of a clip


def asked(durations, epoch):
    """Seconds that each clip asks for: every one is its own batch."""
    (rank,) = plan(durations, 1, 0, "mixed", epoch=epoch)
    contexts = np.empty(len(durations))
    contexts[np.concatenate(list(rank))] = rank.contexts / 16000
    return contexts


def test_mixed_contexts():
    durations = corpus(4000, longest_s=20)
    first, second = asked(durations, 1), asked(durations, 2)
    full = first == CONTEXT_S
    assert 0.04 < full.mean() < 0.06
    tails = (first - durations)[~full]
    assert tails.min() >= 0 and tails.max() <= 2 + STEP_S + 0.002
    quarters = np.quantile(tails - STEP_S / 2, [0.25, 0.5, 0.75])
    np.testing.assert_allclose(quarters, [0.5, 1, 1.5], atol=0.08)
    # Other clips and tails in every epoch, whatever the duration.
    again = full & (second == CONTEXT_S)
    assert 0 < again.sum() < 30  # of 200; 10 by chance
    assert (first != second).mean() > 0.8
    assert abs(np.corrcoef(tails, durations[~full])[0, 1]) < 0.06
    assert abs(durations[full].mean() - durations.mean()) < 1


@pytest.mark.parametrize("max_batch_length_s", [0, 160])
@pytest.mark.parametrize("n_ranks", [1, 4])
def test_clips_at_full_context_have_batches_of_their_own(
    max_batch_length_s, n_ranks
):
    durations = corpus(6000, longest_s=20)
    (rank, *_) = plan(
        durations, 8, max_batch_length_s, "mixed", n_ranks=n_ranks
    )
    full = rank.contexts == CONTEXT_S * 16000
    n_clips = sum(len(b) for b, is_full in zip(rank.batches, full) if is_full)
    # One batch is filled up with others, at most.
    assert 0.04 * 6000 < n_clips < 0.06 * 6000 + 8 * n_ranks


@pytest.mark.parametrize(
    "full_share, like", [(0.0, "true_length"), (1.0, "full")]
)
def test_mixed_lies_between(monkeypatch, full_share, like):
    monkeypatch.setattr(batching, "TAIL_S", 0.0)
    monkeypatch.setattr(batching, "FULL_SHARE", full_share)
    durations = corpus(200)
    (mixed,) = plan(durations, 4, 0, "mixed")
    (other,) = plan(durations, 4, 0, like)
    assert mixed.shares["padding"] == pytest.approx(
        other.shares["padding"], abs=6
    )
    assert sorted(map(len, mixed)) == sorted(map(len, other))
    if like == "full":
        assert (mixed.contexts == CONTEXT_S * 16000).all()
    else:
        for batch, context in zip(mixed, mixed.contexts):
            longest = durations[batch].max()
            assert context == context_samples(longest, CONTEXT_S)


def test_full_contexts():
    (rank,) = plan(corpus(100), 8, 160, "full")
    assert (rank.contexts == 480000).all()
    assert max(map(len, rank)) == 5  # 5 · 30 s
    assert rank.shares["padding"] == pytest.approx(0)
    assert rank.shares["silence"] > 60


def test_600_000_clips_in_seconds():
    durations = corpus(600_000)
    start = time.perf_counter()
    plan(durations, encoder_context="mixed", epoch=1)  # two epochs
    assert time.perf_counter() - start < 5


# Validation and test


@given(
    st.integers(0, 60),
    st.integers(1, 7),
    st.integers(1, 8),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_in_order(n_clips, batch_size, n_ranks, by_context):
    durations = corpus(n_clips)
    shares = [
        in_order(durations, batch_size, CONTEXT_S, by_context, rank, n_ranks)
        for rank in range(n_ranks)
    ]
    clips = sorted(i for share in shares for batch in share for i in batch)
    assert clips == list(range(n_clips))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for share in shares:
        longest = [durations[batch[0]] for batch in share]
        assert longest == sorted(longest, reverse=True)
        for batch in share:
            assert 1 <= len(batch) <= batch_size
            assert (np.diff(durations[batch]) <= 0).all()
            if by_context:
                contexts = context_samples(durations[batch], CONTEXT_S)
                assert len(set(contexts)) == 1


def test_in_order_by_hand():
    durations = [1.0, 5.0, 1.1, 40.0, 5.05, 30.0, 1.0]

    def batches(by_context):
        return in_order(durations, 2, CONTEXT_S, by_context, 0, 1)

    assert batches(False) == [[3, 5], [4, 1], [2, 0], [6]]
    assert batches(True) == [[3, 5], [4, 1], [2, 0], [6]]
    durations[4] = 6.0
    assert batches(False) == [[3, 5], [4, 1], [2, 0], [6]]
    assert batches(True) == [[3, 5], [4], [1], [2, 0], [6]]


def saved(folder, **changed):
    settings = {"batch_size": 4, "max_batch_length_s": 40, "n_ranks": 1}
    settings |= changed
    plan = batching.Batches(
        [3.0] * 20, encoder_context="mixed", context_s=30, seed=1, **settings
    )
    plan.save(folder / "batches.ckpt")


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"n_ranks": 2}, "GPUs=2, this run has 1"),
        ({"batch_size": 8}, "batch_size=8, this run has 4"),
        ({"max_batch_length_s": 0}, "max_batch_length=0, this run has 40"),
    ],
)
def test_another_plan_does_not_go_on_within_an_epoch(changed, named, tmp_path):
    saved(tmp_path, **changed)
    plan = batching.Batches([3.0] * 20, 4, 40, "mixed", 30, 1)
    path = tmp_path / "batches.ckpt"
    with pytest.raises(ValueError, match=named):
        plan.load(path, end_of_epoch=False)
    plan.load(path, end_of_epoch=True)  # the next epoch begins another plan
    saved(tmp_path)
    plan.load(path, end_of_epoch=False)


# Weights


def epochs(weights, n_epochs, **options):
    """How often each epoch holds each clip."""
    durations = np.linspace(1, 9, len(weights))
    arguments = (durations, 4, 0, "true_length", 30.0, 3)
    batches = Batches(*arguments, weights=weights, **options)
    counts = []
    for epoch in range(1, n_epochs + 1):
        batches.set_epoch(epoch)
        drawn = np.concatenate(batches.batches)
        counts.append(np.bincount(drawn, minlength=len(weights)))
    return np.array(counts), batches


def test_a_weight_is_how_often_an_epoch_holds_a_clip():
    counts, _ = epochs([2.0] * 40 + [0.5] * 40 + [1.0] * 40, 50)
    assert (counts[:, :40] == 2).all()
    assert (counts[:, 80:] == 1).all()
    assert set(counts[:, 40:80].ravel()) == {0, 1}
    assert counts.sum(axis=1).tolist() == [140] * 50
    assert (counts[:, 40:80].mean(axis=0) > 0.2).all()  # others in each epoch


def test_weights_of_one_change_nothing():
    ones, batches = epochs([1.0] * 30, 2)
    assert (ones == 1).all()
    assert batches.n_steps(5, 1) == 5 * len(batches)


def test_the_steps_of_weighted_epochs_are_counted_before():
    weights = list(np.linspace(0.1, 2.3, 61))
    _, batches = epochs(weights, 1)
    n_batches = []
    for epoch in range(1, 6):
        batches.set_epoch(epoch)
        n_batches.append(len(batches.batches))
    assert batches.n_steps(5, 1) == sum(n_batches)


def test_weights_without_a_clip_are_refused():
    corpora = [{"corpus": "zeroth", "weight": 0.01}]
    with pytest.raises(ValueError, match="raise the weight"):
        batching.weights([{"corpus": "zeroth"}] * 5, corpora)


def test_a_resume_with_other_weights_of_the_same_sum(tmp_path):
    _, batches = epochs([2.0] * 10 + [1.0] * 10, 1)
    batches.save(tmp_path / "batches.ckpt")
    batches.load(tmp_path / "batches.ckpt", end_of_epoch=False)
    _, other = epochs([1.0] * 10 + [2.0] * 10, 1)
    with pytest.raises(ValueError, match="other batches: weights="):
        other.load(tmp_path / "batches.ckpt", end_of_epoch=False)


CORPORA = [
    {"corpus": "zeroth", "weight": 2},
    {"corpus": "manifest", "name": "calls"},
]


@pytest.mark.parametrize(
    "names, corpora, expected",
    [
        (["zeroth", "calls", "zeroth"], CORPORA, [2.0, 1.0, 2.0]),
        (["zeroth", "calls"], [], None),
        (["calls"], CORPORA[1:], None),
        (["calls"], None, None),
    ],
)
def test_weights_of_rows(names, corpora, expected):
    rows = [{"corpus": name} for name in names]
    assert batching.weights(rows, corpora) == expected


def test_a_clip_of_no_corpus_is_an_error():
    with pytest.raises(ValueError, match="'other'.*zeroth, calls"):
        batching.weights([{"corpus": "other"}], CORPORA)
    with pytest.raises(ValueError, match="'other'.*does not name: calls"):
        batching.weights([{"corpus": "other"}], CORPORA[1:])
