"""Which clips go into one batch, in which order, at which encoder context.

In: durations of a split; a budget; this process among how many.
Out: lists of indices, for a DataLoader's ``batch_sampler``.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from local.audio import SAMPLE_RATE
from speechbrain.utils.checkpoints import (
    mark_as_loader,
    mark_as_saver,
    register_checkpoint_hooks,
)
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)
STEP_SAMPLES = 5120  # contexts are multiples of 0.32 s, so that shapes repeat
SLACK_SAMPLES = 32  # durations are rounded to 1 ms; resampling adds a sample
N_BUCKETS = 100  # as many quantiles of the durations
TAIL_S = 2.0  # mixed: silence behind a clip, drawn from 0 up to this
FULL_SHARE = 0.05  # mixed: clips at the model's full context


def context_samples(seconds, context_s):
    """Samples that the encoder is given for a clip: its length rounded up.

    Arguments
    ---------
    seconds : float or numpy.ndarray
        Duration by the manifest.
    context_s : float
        The model's full context, never exceeded.

    Returns
    -------
    numpy.ndarray
        int64
    """
    samples = np.asarray(seconds) * SAMPLE_RATE + SLACK_SAMPLES
    rounded = np.ceil(samples / STEP_SAMPLES) * STEP_SAMPLES
    return np.minimum(rounded, context_s * SAMPLE_RATE).astype(np.int64)


def weights(rows, corpora):
    """How often an epoch holds each clip, by the corpus it is of.

    Arguments
    ---------
    rows : iterable of dict
        With the name of their ``corpus``.
    corpora : list of dict or None
        With ``corpus``, and maybe ``name`` and ``weight``.

    Returns
    -------
    list of float or None
        None where every clip counts once.

    Raises
    ------
    ValueError
        A row is of none of the corpora, or an epoch would hold no clip.
    """
    if not corpora:
        return None
    by_name = {c.get("name", c["corpus"]): c.get("weight", 1) for c in corpora}
    names = [row.get("corpus", "") for row in rows]
    if unknown := sorted(set(names) - set(by_name)):
        raise ValueError(
            f"the manifest has clips of {', '.join(map(repr, unknown))}, which "
            f"corpora does not name: {', '.join(by_name)}"
        )
    found = [float(by_name[name]) for name in names]
    if sum(found) < 1:
        raise ValueError(
            f"the weights of {len(found)} clips add up to less than one clip "
            "an epoch; raise the weight of a corpus in corpora"
        )
    for name, n_clips in Counter(names).items():
        told = "an epoch has each of the %d clips of %s %s times"
        logger.info(told, n_clips, name, by_name[name])
    return None if set(found) == {1.0} else found


@register_checkpoint_hooks
class Batches(torch.utils.data.Sampler):
    """Training batches of one rank: clips of like length, in random order.

    All ranks draw one plan and take every n-th clip of each of its batches, so
    that they run through the same shapes and none waits for another; and so
    that two ranks of ``batch_size`` 4 train on the batches of one with 8. The
    plan follows from seed and epoch alone. The batch of the longest clips comes
    first: what does not fit into memory fails at once.

    ``epoch_s`` are the durations of the current epoch's clips, of all ranks.
    ``shares`` tell of it, in percent of the audio that the
    encoder takes: ``padding``, for which no clip asked, and ``silence``, all
    that is no clip.

    Arguments
    ---------
    durations_s : sequence of float
        Of each clip.
    batch_size : int
        Clips of a batch and rank, at most.
    max_batch_length_s : float
        Seconds of a batch and rank with its padding, at most, unless one clip
        alone is longer; batches hold clips of like length, sorted into
        quantiles of the durations. 0: no budget, no sorting.
    encoder_context : str
        "true_length": a clip asks for its own duration; "full": for the
        model's; "mixed": for its own and up to ``TAIL_S`` more, and a share
        ``FULL_SHARE`` of the clips, other ones in every epoch, for the full
        context, in batches of their own.
    context_s : float
        The model's full context.
    seed, rank, n_ranks : int
    weights : sequence of float or None
        How often an epoch holds each clip, on average over epochs: 2 is
        twice; of the clips at 0.5 each epoch draws another half. None: once.
    """

    def __init__(
        self,
        durations_s,
        batch_size,
        max_batch_length_s,
        encoder_context,
        context_s,
        seed,
        rank=0,
        n_ranks=1,
        weights=None,
    ):
        self.weights = None if weights is None else np.asarray(weights)
        self.durations_s = np.asarray(durations_s, dtype=np.float64)
        self.batch_size, self.max_batch_length_s = (
            batch_size,
            max_batch_length_s,
        )
        self.encoder_context, self.context_s = encoder_context, context_s
        self.seed, self.rank, self.n_ranks = seed, rank, n_ranks
        self.edges = [context_s]  # mixed: what is at full context stays apart
        if max_batch_length_s:
            shares = np.linspace(0, 1, N_BUCKETS + 1)[1:-1]
            quantiles = np.quantile(self.durations_s, shares)
            self.edges = np.unique([*quantiles, context_s])
        self.set_epoch(0)

    @mark_as_saver
    def save(self, path):
        """Writes what the plan follows from."""
        Path(path).write_text(json.dumps(self._origin()), encoding="utf-8")

    @mark_as_loader
    def load(self, path, end_of_epoch):
        """Stops a run that would go on within an epoch of another plan."""
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
        own = self._origin()
        different = [
            f"{name}={saved.get(name)}, this run has {own.get(name)}"
            for name in {**own, **saved}
            if saved.get(name) != own.get(name)
        ]
        if different and not end_of_epoch:
            raise ValueError(
                f"{Path(path).parent} was saved within an epoch of other "
                f"batches: {'; '.join(different)}. Go on with the same "
                "settings and as many GPUs, or remove that checkpoint to go on "
                "from an earlier one"
            )

    def _origin(self):
        weights = None
        if self.weights is not None:
            weights = hashlib.sha1(self.weights.tobytes()).hexdigest()
        return {
            "weights": weights,
            "encoder_context": self.encoder_context,
            "batch_size": self.batch_size,
            "max_batch_length": self.max_batch_length_s,
            "seed": self.seed,
            "GPUs": self.n_ranks,
        }

    def set_epoch(self, epoch):
        """Draws the plan of an epoch."""
        rng = np.random.default_rng([self.seed, epoch])
        asked = self._asked(rng)
        batches = self._cut(asked, rng)
        longest = np.array([asked[batch].max() for batch in batches])
        first = longest.argmax()  # any batch of the longest bucket may hold it
        batches[0], batches[first] = batches[first], batches[0]
        longest[[0, first]] = longest[[first, 0]]
        self.batches = batches
        self.contexts = context_samples(longest, self.context_s)
        self.n_clips = np.array([len(batch) for batch in batches])
        encoded = (self.n_clips * self.contexts).sum() / SAMPLE_RATE
        everything = np.concatenate(batches)
        self.epoch_s = self.durations_s[everything]
        self.shares = {
            "padding": 100 * (1 - asked[everything].sum() / encoded),
            "silence": 100 * (1 - self.durations_s[everything].sum() / encoded),
        }

    def n_steps(self, n_epochs, grad_accumulation_factor):
        """Optimizer steps of a run; of each epoch a tail still makes one."""
        n_batches = [len(self)] * n_epochs
        drawn = self.weights is not None or self.encoder_context == "mixed"
        if drawn:  # each epoch has its own
            n_batches = [self._n_batches(e) for e in range(1, n_epochs + 1)]
        return sum(-(-n // grad_accumulation_factor) for n in n_batches)

    def _n_batches(self, epoch):
        rng = np.random.default_rng([self.seed, epoch])
        return len(self._cut(self._asked(rng), rng))

    def _asked(self, rng):
        """Seconds of encoder context that each clip asks for."""
        asked = self.durations_s
        if self.encoder_context == "mixed":
            asked = asked + rng.uniform(0, TAIL_S, len(asked))
            asked[rng.random(len(asked)) < FULL_SHARE] = self.context_s
        elif self.encoder_context == "full":
            asked = np.full_like(asked, self.context_s)
        return np.minimum(asked, self.context_s)

    def _drawn(self, rng):
        """The clips of an epoch, in random order."""
        order = rng.permutation(len(self.durations_s))
        if self.weights is None:
            return order
        # Systematic sampling: so many in all, each by its own weight.
        ends = np.cumsum(self.weights[order]) + rng.random()
        repeats = np.diff(np.floor(ends), prepend=0).astype(int)
        return rng.permutation(np.repeat(order, repeats))

    def _cut(self, asked, rng):
        """The clips of each batch over all ranks.

        In the order of the buckets, then shuffled but for the longest.
        """
        buckets = np.digitize(asked, self.edges)
        order = self._drawn(rng)
        order = order[np.argsort(-buckets[order], kind="stable")]
        tops = np.zeros(len(self.edges) + 1)
        np.maximum.at(tops, buckets, asked)
        batches = []
        start = 0
        while start < len(order):
            size = self.n_ranks * self._clips(tops[buckets[order[start]]])
            batches.append(order[start : start + size])
            start += size
        # No rank goes without: a tail of too few clips is repeated.
        if len(batches[-1]) < self.n_ranks:
            batches[-1] = np.resize(batches[-1], self.n_ranks)
        if buckets.min() < buckets.max():  # else they are in random order
            rest = 1 + rng.permutation(len(batches) - 1)
            batches[1:] = [batches[i] for i in rest]
        return batches

    def _clips(self, seconds):
        """Clips of a batch and rank whose longest asks for so many seconds."""
        if not self.max_batch_length_s:
            return self.batch_size
        padded_s = context_samples(seconds, self.context_s) / SAMPLE_RATE
        n_clips = int(self.max_batch_length_s / padded_s)
        return max(1, min(self.batch_size, n_clips))

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            yield batch[self.rank :: self.n_ranks].tolist()


def in_order(durations_s, batch_size, context_s, by_context, rank, n_ranks):
    """Validation and test batches of one rank, the longest clips first.

    Clips of like length end their texts at like steps. Each clip belongs to
    one rank.

    Arguments
    ---------
    durations_s : sequence of float
        Of each clip.
    batch_size : int
        Clips of a batch.
    context_s : float
        The model's full context.
    by_context : bool
        Clips of one batch have one ``context_samples``, so that a clip's
        context hangs on nothing but itself.
    rank, n_ranks : int

    Returns
    -------
    list of list of int
    """
    durations_s = np.asarray(durations_s)
    order = np.argsort(-durations_s, kind="stable")
    ends = [len(order)]
    if by_context:
        contexts = context_samples(durations_s[order], context_s)
        ends = [*(np.flatnonzero(np.diff(contexts)) + 1), len(order)]
    batches = []
    start = 0
    for end in ends:
        for first in range(start, end, batch_size):
            batches.append(order[first : min(first + batch_size, end)].tolist())
        start = end
    return batches[rank::n_ranks]
