"""What a training step needs of memory, before anything is run.

In: a model's configuration and a batch's shape.
Out: bytes by part; what a device has.
"""

import contextlib
import functools
import json
import os
from pathlib import Path
from typing import FrozenSet, NamedTuple, Optional

import torch

from local import (
    activations,
    dataio,
    lora as adapters,
    loss,
)
from local.activations import BYTES, FP32

BLOCK = 64  # weights of nf4 that have one scale
OF_SCALES = 256  # scales of nf4, and moments of 8 bits, that have one
SMALLEST_8BIT = 4096  # weights of a tensor; below, its moments stay fp32
CODE = FP32 * (16 + OF_SCALES + 1)  # nf4's values and those of its scales
CGROUPS = (  # limits of a container or a batch job on Linux
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


class Mode(NamedTuple):
    """How a model is trained, as far as its memory hangs on it.

    Attributes
    ----------
    adaptation : str
        One of ``local.model.ADAPTATIONS``.
    precision : str
        "fp32", or "bf16" or "fp16" by autocast.
    base_precision : str
        One of ``local.quantized.BASE_PRECISIONS``.
    gradient_checkpointing : bool
    optimizer : str
        One of ``local.optimizers.OPTIMIZERS``.
    device : str
        A mask of dropout takes 4 bytes a number on a CPU, 1 elsewhere.
    lora : local.lora.Lora or None
        Of adaptation "lora" alone.
    adapted : frozenset of str
        Names of the layers that get an adapter.
    """

    adaptation: str
    precision: str
    base_precision: str
    gradient_checkpointing: bool
    optimizer: str
    device: str
    lora: Optional[adapters.Lora] = None
    adapted: FrozenSet[str] = frozenset()

    @property
    def freeze_encoder(self):
        """Whether nothing of the encoder is trained."""
        if not self.lora:
            return self.adaptation == "frozen_encoder"
        return not any(name.startswith("encoder.") for name in self.adapted)

    @property
    def mask(self):
        """Bytes of a number's place in a mask of dropout."""
        return FP32 if torch.device(self.device).type == "cpu" else 1


class Batch(NamedTuple):
    """The shape of a micro-batch of one rank.

    Attributes
    ----------
    n_clips : int
    context_samples : int
        Of each of them with its padding. A frozen encoder takes its full
        context all the same; its decoder hears this one and a second more.
    n_tokens : int
        Of the longest decoder input, prefix included.
    """

    n_clips: int
    context_samples: int
    n_tokens: int


class Weights(NamedTuple):
    """Numbers and bytes of a model's weights, as a mode trains them."""

    n_trained: int
    n_frozen: int
    n_bytes: int
    optimizer_bytes: int
    step_bytes: int  # of the optimizer, while it steps


def mode_of(config, adaptation, lora, **settings):
    """A Mode of a run's settings, which finds the layers with an adapter.

    Arguments
    ---------
    config : transformers.WhisperConfig
    adaptation : str
    lora : local.lora.Lora
        Not used but in adaptation "lora".
    **settings
        The other fields of ``Mode``.

    Returns
    -------
    Mode

    Raises
    ------
    ValueError
        The pattern of ``lora`` names no layer.
    """
    if adaptation != "lora":
        return Mode(adaptation, **settings)
    found = frozenset(adapters.targets(config, lora))
    return Mode(adaptation, **settings, lora=lora, adapted=found)


def weights(config, mode):
    """What a mode trains, what it leaves, and their bytes; loads nothing.

    Arguments
    ---------
    config : transformers.WhisperConfig
    mode : Mode

    Returns
    -------
    Weights
    """
    rank = mode.lora.rank if mode.lora else 0
    plain = json.dumps(config.to_dict(), default=str)
    return _weights(plain, mode._replace(lora=None), rank)


@functools.lru_cache(maxsize=8)
def _weights(config, mode, rank):
    n_trained = n_frozen = n_bytes = moments = largest = 0
    for name, shape in _shapes(config):
        n = torch.Size(shape).numel()
        n_bytes += _stored(name, shape, mode.base_precision)
        if _is_trained(name, mode):
            n_trained += n
            moments += _moments(n, mode.optimizer)
            largest = max(largest, n)
        else:
            n_frozen += n
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer in mode.adapted:
            for width in shape:  # A and B
                n = rank * width
                n_trained += n
                n_bytes += FP32 * n
                moments += _moments(n, mode.optimizer)
                largest = max(largest, n)
    in_step = _in_step(largest, mode)
    return Weights(n_trained, n_frozen, n_bytes, moments, in_step)


def _in_step(largest, mode):
    """Bytes: the 8-bit step has no kernel of its own on a CPU."""
    is_slow = torch.device(mode.device).type == "cpu"
    is_slow &= mode.optimizer == "adamw_8bit" and largest >= SMALLEST_8BIT
    return 20 * largest if is_slow else 0


def _shapes(config):
    """(name, shape) of each weight of a configuration, given as JSON."""
    from transformers import WhisperConfig, WhisperModel

    with torch.device("meta"):
        model = WhisperModel(WhisperConfig(**json.loads(config)))
    return [(name, tuple(p.shape)) for name, p in model.named_parameters()]


def _is_trained(name, mode):
    if mode.adaptation == "full":
        return name != "encoder.embed_positions.weight"  # sinusoids
    return mode.adaptation != "lora" and name.startswith("decoder.")


def _stored(name, shape, base_precision):
    """Bytes of a tensor of the base, with the scales of its quantisation."""
    n = torch.Size(shape).numel()
    is_linear = ".layers." in name and "norm" not in name
    if base_precision == "fp32" or not (is_linear or ".conv" in name):
        return FP32 * n
    if base_precision == "bf16":
        return 2 * n
    if not is_linear or len(shape) == 1:  # convolutions, biases
        return FP32 * n
    if base_precision == "int8":
        return n + FP32 * shape[0]  # a scale a row
    n_scales = -(-n // BLOCK)
    return n // 2 + n_scales + FP32 * -(-n_scales // OF_SCALES) + CODE


def _moments(n, optimizer):
    """Bytes of AdamW's two moments of a tensor."""
    if optimizer == "adamw" or n < SMALLEST_8BIT:
        return 2 * FP32 * n
    return 2 * (n + FP32 * -(-n // OF_SCALES))


def plan(config, mode, batch):
    """Bytes that a training step takes, by part.

    For layers that are not compiled (those keep less) and no dropout but that
    of adapters, as OpenAI's models have none; without what CUDA and its
    allocator take for themselves. Gradients are taken to be there during the
    forward pass, as in DDP and in all but the first micro-batch of a step.

    Arguments
    ---------
    config : transformers.WhisperConfig
    mode : Mode
    batch : Batch

    Returns
    -------
    dict
        Part to bytes. Activations are what the forward pass leaves for the
        backward pass; with checkpointing also what is computed again of one
        layer; of a frozen encoder what passes through. "total" is the
        expected peak: less than the sum, since some parts follow each other.

    Raises
    ------
    KeyError
        No such precision.
    """
    low = BYTES[mode.precision]
    encoder, decoder = activations.of_halves(config, mode, batch)
    n_targets = batch.n_clips * (batch.n_tokens - dataio.N_PREFIX + 1)
    logits = low * n_targets * config.vocab_size
    in_loss = _loss_chunks(config, low, n_targets)
    gradient = 0
    if not mode.lora:
        gradient = FP32 * config.vocab_size * config.d_model
    # Of the logits, of the decoder's input; fp32 adds them in a third place.
    gradients = gradient * (3 if low == FP32 else 2)
    kept = encoder.kept + decoder.kept + logits
    casts = encoder.casts + decoder.casts
    later = encoder.casts_later + decoder.casts_later
    peaks = [
        encoder.passing,  # no decoder yet
        kept + casts + in_loss,
        kept + later + gradient + decoder.again,
        # at the decoder's input
        kept - decoder.kept + encoder.casts_later + gradients,
        kept - decoder.kept + encoder.casts_later + encoder.again,
    ]
    counted = weights(config, mode)
    peaks.append(counted.step_bytes)  # nothing of the passes is left
    always = {
        "weights": counted.n_bytes,
        "gradients": FP32 * counted.n_trained,
        "optimizer": counted.optimizer_bytes,
    }
    return {
        **always,
        "embedding gradients": gradients,
        "autocast weights": casts,
        "encoder activations": encoder.kept + encoder.again + encoder.passing,
        "decoder activations": decoder.kept + decoder.again,
        "logits": logits + in_loss,
        "total": sum(always.values()) + max(peaks),
    }


def scoring(config, mode, n_clips, precision, max_new_tokens):
    """Bytes that validation or test takes at most, greedily, by its batch.

    Beside the weights and the optimizer's moments these are the keys and
    values of the decoder: of the whole context, and of texts as long as may
    be, which a model that loops does write.

    Arguments
    ---------
    config : transformers.WhisperConfig
    mode : Mode
    n_clips : int
    precision : str
        "fp32", "bf16" or "fp16".
    max_new_tokens : int

    Returns
    -------
    int
    """
    low, counted = BYTES[precision], weights(config, mode)
    n_tokens = min(max_new_tokens, config.max_target_positions)
    n_positions = config.max_source_positions + n_tokens
    cached = 2 * low * config.decoder_layers * config.d_model * n_positions
    states = FP32 * config.max_source_positions * config.d_model
    mode = mode._replace(precision=precision)
    passing = activations.passing(config, mode, 1)
    scores = 2 * FP32 * config.vocab_size  # of one step
    a_clip = max(passing, states + cached + scores)
    # Autocast keeps what it casts of weights that are trained.
    casts = low * counted.n_trained if low < FP32 and not mode.lora else 0
    return counted.n_bytes + counted.optimizer_bytes + casts + n_clips * a_clip


def _loss_chunks(config, low, n_targets):
    """Bytes of the loss beside the logits, which their gradient replaces.

    A chunk's gradient and that of the one before; its logits, if not in fp32.
    """
    n_rows = min(n_targets, max(1, loss.CHUNK_ELEMENTS // config.vocab_size))
    n_next = min(n_targets - n_rows, n_rows)
    n_copies = 1 if low == FP32 else 2
    n_rows = max(n_copies * n_rows, n_rows + n_copies * n_next)
    return FP32 * n_rows * config.vocab_size


def readable(n_bytes):
    """Bytes as GB, or as MB where that is less than one; at least 1 MB."""
    if n_bytes < 999.5e6:
        return f"{max(1, n_bytes / 1e6):.0f} MB"
    return f"{n_bytes / 1e9:.1f} GB"


def device_bytes(device):
    """Memory of a device in bytes; of the CPU what this process may take.

    Arguments
    ---------
    device : str or torch.device

    Returns
    -------
    int or None
        None where the system does not tell.
    """
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():  # a plan for elsewhere
            return None
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    limits = []
    for path in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path(path).read_text(encoding="ascii")))
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        limits += [soft] if soft != resource.RLIM_INFINITY else []
        pages = os.sysconf("SC_PHYS_PAGES")
        limits.append(pages * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)
