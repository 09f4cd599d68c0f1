"""The loss: negative log-likelihood with label smoothing over the vocabulary.

In: logits, target tokens, their lengths.
Out: the sum over tokens and their number, so that any split of a batch over
micro-batches and ranks gives one and the same mean.
"""

import torch
import torch.nn.functional as F

IGNORED = -100


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
        (batch, tokens, vocabulary)
    targets : torch.Tensor
        (batch, tokens), integer.
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
    targets = targets.masked_fill(~mask, IGNORED)
    nll = F.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return nll, mask.sum()
