"""The loss, by hand and under every split of a batch."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import Calls, host_reads
from local import loss

from speechbrain.dataio.batch import PaddedBatch

VOCABULARY = 11


def example(n_clips=4, n_tokens=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (n_clips, n_tokens)
    logits = 3 * torch.randn(*shape, VOCABULARY, generator=generator)
    targets = torch.randint(0, VOCABULARY, shape, generator=generator)
    lengths = torch.tensor([n_tokens, 1, 3, 4][:n_clips])
    mask = torch.arange(n_tokens) < lengths[:, None]
    return logits, targets, mask


def by_hand(logits, targets, mask, smoothing):
    """The formula, one token at a time, in Python's double precision."""
    total = 0.0
    for row in range(len(logits)):
        for column in range(len(logits[row])):
            if not mask[row][column]:
                continue
            scores = logits[row][column].tolist()
            log_sum = math.log(sum(math.exp(score) for score in scores))
            for token, score in enumerate(scores):
                share = smoothing / VOCABULARY
                if token == targets[row][column]:
                    share += 1 - smoothing
                total -= share * (score - log_sum)
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_against_the_formula(smoothing):
    logits, targets, mask = example()
    nll, n_tokens = loss.nll_sum(logits, targets, mask, smoothing)
    assert nll.item() == pytest.approx(
        by_hand(logits, targets, mask, smoothing), rel=1e-5
    )
    assert n_tokens == 6 + 1 + 3 + 4


def test_a_uniform_model_costs_log_vocabulary_a_token():
    _, targets, mask = example()
    nll, n_tokens = loss.nll_sum(torch.zeros(4, 6, VOCABULARY), targets, mask)
    assert nll.item() == pytest.approx(14 * math.log(VOCABULARY))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rubbish", [0.0, 1e4, math.nan, -math.inf])
def test_padding_changes_nothing(smoothing, rubbish):
    logits, targets, mask = example()
    wanted = loss.nll_sum(logits, targets, mask, smoothing)
    padded = torch.cat([logits, torch.full((4, 3, VOCABULARY), rubbish)], 1)
    padded[~torch.nn.functional.pad(mask, (0, 3))] = rubbish
    padded.requires_grad_()
    got = loss.nll_sum(
        padded,
        torch.nn.functional.pad(targets, (0, 3), value=VOCABULARY + 7),
        torch.nn.functional.pad(mask, (0, 3)),
        smoothing,
    )
    torch.testing.assert_close(got[0], wanted[0])
    assert got[1] == wanted[1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_splits_of_a_batch_add_up(smoothing):
    logits, targets, mask = example()
    whole, parts = logits.clone().requires_grad_(), logits.requires_grad_()
    nll, n_tokens = loss.nll_sum(whole.clone(), targets, mask, smoothing)
    nll.backward()
    sums = [
        loss.nll_sum(parts[rows].clone(), targets[rows], mask[rows], smoothing)
        for rows in (slice(0, 1), slice(1, 4))
    ]
    sum(part for part, _ in sums).backward()
    torch.testing.assert_close(sum(part.detach() for part, _ in sums), nll)
    assert sum(n for _, n in sums) == n_tokens
    torch.testing.assert_close(parts.grad, whole.grad)
    assert (whole.grad[mask].abs().sum(-1) > 0).all()
    assert (whole.grad[~mask] == 0).all()


def test_fp32_whatever_the_logits_are():
    logits, targets, mask = example()
    nll, _ = loss.nll_sum(logits.bfloat16(), targets, mask)
    assert nll.dtype == torch.float32
    assert nll == loss.nll_sum(logits.bfloat16().float(), targets, mask)[0]


def test_no_token_counts():
    logits, targets, mask = example()
    logits.requires_grad_()
    nll, n_tokens = loss.nll_sum(logits.clone(), targets, mask & False)
    assert (nll, n_tokens) == (0, 0)
    nll.backward()
    assert (logits.grad == 0).all()


def test_an_ignored_target_does_not_count():
    """Packs without timestamps begin with one."""
    logits, targets, mask = example()
    mask[0, 0], ignored = False, targets.clone()
    wanted = loss.nll_sum(logits, targets, mask)
    mask[0, 0], ignored[0, 0] = True, loss.IGNORED
    assert loss.nll_sum(logits, ignored, mask) == wanted


# Against PyTorch's own, in what it gives and what it takes


def of_torch(logits, targets, mask, smoothing):
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.masked_fill(~mask, -100).flatten(),
        label_smoothing=smoothing,
        reduction="sum",
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, 5, 23, 24, 100])  # of 24 a chunk
@pytest.mark.parametrize("rubbish", [None, math.nan, math.inf, -math.inf])
def test_equals_cross_entropy(monkeypatch, smoothing, dtype, n_rows, rubbish):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", n_rows * VOCABULARY)
    logits, targets, mask = example()
    logits = logits.to(dtype)
    theirs = logits.clone().requires_grad_()
    expected = of_torch(theirs, targets, mask, smoothing)
    (expected / 7).backward()
    if rubbish is not None:
        logits[~mask] = rubbish
    logits.requires_grad_()
    nll, _ = loss.nll_sum(logits.clone(), targets, mask, smoothing)
    torch.testing.assert_close(nll, expected)
    (nll / 7).backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad, theirs.grad)
    assert (logits.grad[~mask] == 0).all()


def test_chunks_of_fewer_elements_than_a_row(monkeypatch):
    logits, targets, mask = example()
    wanted = loss.nll_sum(logits, targets, mask)
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(loss.nll_sum(logits, targets, mask), wanted)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_are_held_once(monkeypatch, smoothing):
    """No copy of all of them, and fp32 of a chunk alone."""
    n_clips, n_tokens, vocabulary = 4, 8, 1000
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 4 * vocabulary)
    weight = torch.randn(vocabulary, 16).bfloat16().requires_grad_()
    logits = F.linear(torch.ones(n_clips, n_tokens, 16).bfloat16(), weight)
    targets = torch.ones(n_clips, n_tokens, dtype=torch.long)
    before = logits.untyped_storage().data_ptr()
    grads = []
    logits.register_hook(lambda grad: grads.append(grad.data_ptr()))
    with Calls() as calls:
        nll, _ = loss.nll_sum(logits, targets, targets > 0, smoothing)
        nll.backward()
    as_large = {
        (tensor.dtype, tensor.untyped_storage().data_ptr())
        for tensor in calls.outputs
        if tensor.numel() >= logits.numel()
    }
    assert as_large == {(torch.bfloat16, before)}
    assert grads == [before]  # in the place of the logits
    assert 4 * vocabulary == max(
        t.numel() for t in calls.outputs if t.dtype == torch.float32
    )


def test_logits_that_are_used_up_give_no_second_gradient():
    logits, targets, mask = example()
    nll, _ = loss.nll_sum(logits.requires_grad_().clone(), targets, mask)
    nll.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nll.backward()


def test_the_host_never_waits():
    logits, targets, mask = example()
    logits.requires_grad_()
    lengths = torch.tensor([1.0, 1 / 6, 0.5, 4 / 6])
    with host_reads() as found:
        mask = loss.lengths_to_mask(lengths, 6)
        loss.nll_sum(logits.clone(), targets, mask, 0.1)[0].backward()
    assert found == []


# Lengths


def test_every_pair_of_lengths_a_decoder_can_hold():
    for longest in range(1, 449):
        lengths = torch.arange(longest + 1)
        relative = torch.tensor([n / longest for n in range(longest + 1)])
        mask = loss.lengths_to_mask(relative, longest)
        assert torch.equal(mask, torch.arange(longest) < lengths[:, None])


def test_lengths_as_speechbrain_gives_them():
    lengths = [13, 22, 1, 21]
    batch = PaddedBatch([{"tokens": torch.ones(n)} for n in lengths])
    mask = loss.lengths_to_mask(batch.tokens.lengths, 22)
    assert torch.equal(mask, batch.tokens.data.bool())
    assert mask.sum(1).tolist() == lengths
