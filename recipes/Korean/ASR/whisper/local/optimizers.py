"""The optimizers of a run, by their name.

In: parameters, some of them frozen; a name, a rate, a weight decay.
Out: an optimizer of those that are trained; what keeps one from running here.
"""

import functools

import torch

from local import quantized

OPTIMIZERS = ("adamw", "adamw_8bit")
DEVICES_8BIT = ("cpu", "cuda")  # others are untried


def build(parameters, optimizer, lr, weight_decay):
    """AdamW (https://arxiv.org/abs/1711.05101) with moments of 32 or 8 bits.

    Beside weights and gradients ``adamw`` takes 8 bytes a weight;
    ``adamw_8bit`` 2 bytes and 1/32 (https://arxiv.org/abs/2110.02861: blocks
    of 256 with a scale each), but the same 8 for tensors of fewer than 4096
    weights, whose moments stay in 32 bits. On a CPU, where it is for trials,
    its step takes 20 bytes a weight of the largest tensor in passing.

    Both read ``found_inf``, a tensor that the caller may set: where it is not
    0, the step changes nothing, and counts for nothing.

    Arguments
    ---------
    parameters : iterable of torch.nn.Parameter, or of groups
        In this order, without those that require no gradient. Groups, as
        SpeechBrain makes them for ``remove_vector_weight_decay``, hold none.
    optimizer : str
        One of ``OPTIMIZERS``.
    lr : float
        Until a schedule sets another.
    weight_decay : float

    Returns
    -------
    torch.optim.Optimizer

    Raises
    ------
    ValueError
        There is no such optimizer, or it needs bitsandbytes.
    """
    wrong = problem(optimizer, "")
    if wrong:
        raise ValueError(wrong)
    trained = [p for p in parameters if isinstance(p, dict) or p.requires_grad]
    options = {"lr": lr, "weight_decay": weight_decay}
    if optimizer == "adamw":
        return torch.optim.AdamW(trained, fused=True, **options)
    return _adamw_8bit()(trained, **options)


def problem(optimizer, device):
    """What to say where a device cannot run an optimizer.

    Arguments
    ---------
    optimizer : str
    device : str or torch.device
        "" for the one that SpeechBrain takes by itself, cuda or cpu.

    Returns
    -------
    str or None
        The value, and what would work.
    """
    if optimizer not in OPTIMIZERS:
        return f"optimizer_name={optimizer!r}: choose {', '.join(OPTIMIZERS)}"
    if optimizer == "adamw":
        return None
    kind = str(device).split(":")[0]
    if kind and kind not in DEVICES_8BIT:
        return (
            f"optimizer_name={optimizer!r}: not on device={str(device)!r}; choose "
            f"{' or '.join(DEVICES_8BIT)}, or optimizer_name=adamw"
        )
    if lacking := quantized.no_bitsandbytes():
        told = f"optimizer_name={optimizer!r}: {lacking}"
        return f"{told}, or choose optimizer_name=adamw"
    return None


@functools.cache
def _adamw_8bit():
    """The class; bitsandbytes takes seconds to import, and may be missing."""
    from bitsandbytes import optim

    class AdamW8bit(optim.AdamW8bit):
        """Passes a step over as the fused kernel of torch does."""

        found_inf = None  # as GradScaler leaves it, which skips by itself

        def step(self, closure=None):
            """One step, or none; the host waits for ``found_inf``.

            That wait costs little beside bitsandbytes' own: it has the host
            wait for the device after every parameter.
            """
            if self.found_inf is not None and self.found_inf.item():
                return None
            return super().step(closure)

    return AdamW8bit
