"""The loss: negative log-likelihood with label smoothing over the vocabulary.

In: logits, target tokens, their lengths.
Out: the sum over tokens and their number, so that any split of a batch over
micro-batches and ranks gives one and the same mean.
"""

import torch

IGNORED = -100
CHUNK_ELEMENTS = 2**22  # logits in fp32 at a time: 16 MiB


def lengths_to_mask(relative_lengths, n_positions):
    """Relative lengths to a mask of the real positions.

    Rounded: SpeechBrain stores ``length / longest`` in fp32, and a floor would
    lose the last token of one pair of lengths in 24.

    Arguments
    ---------
    relative_lengths : torch.Tensor
        (batch,), each in [0, 1].
    n_positions : int
        Length of the longest.

    Returns
    -------
    torch.Tensor
        (batch, n_positions), True where real.
    """
    lengths = (relative_lengths * n_positions).round().long()
    positions = torch.arange(n_positions, device=lengths.device)
    return positions < lengths[:, None]


def nll_sum(logits, targets, mask, label_smoothing=0.0):
    """Summed negative log-likelihood.

    With smoothing e the target distribution is 1 - e on the right token plus
    e spread evenly over the vocabulary (Szegedy et al., 2016).

    Arguments
    ---------
    logits : torch.Tensor
        (batch, tokens, vocabulary), of any precision; used up by the backward
        pass, which writes their gradient in their place.
    targets : torch.Tensor
        (batch, tokens), integer; ``IGNORED`` counts nowhere.
    mask : torch.Tensor
        (batch, tokens), True where the target counts.
    label_smoothing : float
        e, in [0, 1).

    Returns
    -------
    nll : torch.Tensor
        Scalar, fp32, in nats: the sum over the tokens that count.
    n_tokens : torch.Tensor
        Scalar: how many count.
    """
    mask = mask & (targets != IGNORED)
    targets = targets.masked_fill(~mask, IGNORED).flatten()
    nll = _CrossEntropySum.apply(
        logits.flatten(0, 1), targets, float(label_smoothing)
    )
    return nll, mask.sum()


class _CrossEntropySum(torch.autograd.Function):
    """Cross-entropy that holds the logits once, and fp32 of a chunk alone.

    PyTorch's own keeps fp32 logits, fp32 log-probabilities and their fp32
    gradient: at 51866 tokens of vocabulary, the largest tensors of a step.
    """

    @staticmethod
    def forward(ctx, logits, targets, smoothing):
        counts = targets != IGNORED
        safe = targets.clamp(min=0)[:, None]
        log_sums, nlls = [], []
        for rows in _chunks(logits):
            scores = logits[rows].float()
            log_sum = scores.logsumexp(1)
            chosen = scores.gather(1, safe[rows])[:, 0]
            nll = log_sum - (1 - smoothing) * chosen
            if smoothing:
                nll -= smoothing * scores.mean(1)
            log_sums.append(log_sum)
            nlls.append(nll)
        ctx.save_for_backward(logits, safe, counts, torch.cat(log_sums))
        ctx.smoothing = smoothing
        return torch.cat(nlls).where(counts, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        logits, safe, counts, log_sums = ctx.saved_tensors
        right = torch.full_like(log_sums, ctx.smoothing - 1)[:, None]
        for rows in _chunks(logits):
            change = logits[rows].float().sub(log_sums[rows, None]).exp_()
            if ctx.smoothing:
                change -= ctx.smoothing / logits.shape[1]
            change.scatter_add_(1, safe[rows], right[rows])
            change *= gradient
            logits[rows] = change.masked_fill_(~counts[rows, None], 0.0)
        return logits, None, None


def _chunks(logits):
    """Slices of rows, each so small that its fp32 copy weighs little."""
    n_rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, logits.shape[0], n_rows):
        yield slice(start, start + n_rows)
