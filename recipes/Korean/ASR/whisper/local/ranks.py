"""Processes started by torchrun: which one this is, and what they share.

In: nothing but torch.distributed's state; one process needs no torchrun.
Out: rank and number of ranks; objects and sums of all ranks; what the first
one alone does and has; randomness.
"""

import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def here():
    """(rank of this process, number of processes)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(item):
    """A list of every rank's item, on every rank; a collective call."""
    _, n_ranks = here()
    items = [item] * n_ranks
    if n_ranks > 1:
        dist.all_gather_object(items, item)
    return items


def total(tensor):
    """The sum of every rank's tensor, on every rank; a collective call."""
    if here()[1] > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def on_first(function, *arguments):
    """Runs a function on the first rank alone; a collective call.

    Raises
    ------
    Exception
        What the function raises; on the other ranks a RuntimeError that tells
        it, so that none waits for what will not come.
    """
    error = None
    if here()[0] == 0:
        try:
            function(*arguments)
        except Exception as raised:
            error = raised
    told = gather(error and f"{type(error).__name__}: {error}")[0]
    if error:
        raise error
    if told:
        raise RuntimeError(f"the first process failed: {told}")


def from_first(tensors):
    """Writes the first rank's values into every rank's; a collective call.

    Arguments
    ---------
    tensors : iterable of torch.Tensor
        On every rank the same shapes, in the same order.
    """
    if here()[1] > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def require_same(name, value):
    """Stops every rank where a value is not the same on all; collective.

    Raises
    ------
    ValueError
        Tells what each rank has.
    """
    found = gather(value)
    if any(one != found[0] for one in found):
        told = ", ".join(f"rank {n} {one}" for n, one in enumerate(found))
        raise ValueError(f"{name} must be the same everywhere: {told}")


def seed(*numbers):
    """Seeds every generator of this process.

    What is drawn next follows from the numbers and the rank alone: not from
    what was drawn before, so that a run that goes on from a checkpoint, or
    validates in between, augments and drops out as any other.

    Arguments
    ---------
    *numbers : int
        For example a run's seed, the epoch and the micro-batch.
    """
    sequence = np.random.SeedSequence([*numbers, here()[0]])
    drawn = int(sequence.generate_state(1)[0])  # 32 bits, NumPy's limit
    random.seed(drawn)
    np.random.seed(drawn)
    torch.manual_seed(drawn)


def wrap(module, device):
    """A module whose gradients are averaged over the ranks.

    Gradients live in the buckets that are sent, and no search for unused
    parameters delays a step: all that require a gradient get one. What is
    frozen is not sent: it must be equal already.

    Arguments
    ---------
    module : torch.nn.Module
    device : str
        Of its parameters.
    """
    frozen = [k for k, p in module.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, frozen
    )
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.startswith("cuda") else None,
        broadcast_buffers=False,  # constants
        gradient_as_bucket_view=True,
        bucket_cap_mb=100,
    )
