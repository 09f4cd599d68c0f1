"""What a training step needs of memory, before anything is run.

In: a model's configuration and a batch's shape.
Out: bytes by part; what a device has.
"""

import contextlib
import os
from pathlib import Path

import torch

from local import loss, model

FP32 = 4  # bytes a number
BYTES = {"fp32": FP32, "bf16": 2, "fp16": 2}
CGROUPS = (  # limits of a container or a batch job on Linux
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def plan(
    config,
    n_trained,
    n_frozen,
    freeze_encoder,
    precision,
    gradient_checkpointing,
    n_clips,
    context_samples,
    n_tokens,
):
    """Bytes that a training step takes, by part.

    For AdamW, layers that are not compiled (those keep less) and no dropout,
    as OpenAI's models have none; without what CUDA and its allocator take for
    themselves. Gradients are taken to be there during the forward pass, as in
    DDP and in all but the first micro-batch of a step.

    Arguments
    ---------
    config : transformers.WhisperConfig
    n_trained, n_frozen : int
        Weights.
    freeze_encoder : bool
    precision : str
        "fp32", or "bf16" or "fp16" by autocast.
    gradient_checkpointing : bool
    n_clips : int
        Of a micro-batch and rank.
    context_samples : int
        Of each of them with its padding. A frozen encoder takes its full
        context all the same; its decoder hears this one and a second more.
    n_tokens : int
        Of the longest decoder input, prefix included; each is given logits.

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
    low = BYTES[precision]
    shape = n_clips, -(-context_samples // model.SAMPLES_PER_FRAME), n_tokens
    passing, (kept_e, again_e), (kept_d, again_d) = _activations(
        config, low, freeze_encoder, gradient_checkpointing, *shape
    )
    casts = _autocast_weights(config, low, freeze_encoder)
    # Checkpointing drops them with autocast, but for those of one layer.
    cast_e, cast_d = (0, 0) if gradient_checkpointing else casts
    logits = low * n_clips * n_tokens * config.vocab_size
    in_loss = _loss_chunks(config, low, n_clips * n_tokens)
    gradient = FP32 * config.vocab_size * config.d_model
    if FP32 * n_trained < gradient:  # adapters alone are trained
        gradient = 0
    # Of the logits, of the decoder's input; fp32 adds them in a third place.
    gradients = gradient * (3 if low == FP32 else 2)
    peaks = [
        passing,  # no decoder yet
        kept_e + kept_d + sum(casts) + logits + in_loss,
        kept_e + kept_d + cast_e + cast_d + logits + gradient + again_d,
        kept_e + cast_e + logits + gradients,  # at the decoder's input
        kept_e + cast_e + logits + again_e,
    ]
    always = {
        "weights": FP32 * (n_trained + n_frozen),
        "gradients": FP32 * n_trained,
        "optimizer": 2 * FP32 * n_trained,
    }
    return {
        **always,
        "embedding gradients": gradients,
        "autocast weights": sum(casts),
        "encoder activations": kept_e + again_e + passing,
        "decoder activations": kept_d + again_d,
        "logits": logits + in_loss,
        "total": sum(always.values()) + max(peaks),
    }


def _activations(
    config, low, freeze_encoder, checkpointing, n_clips, n_frames, n_tokens
):
    """Bytes that pass through a frozen encoder; then those of both halves."""
    passing, encoder = 0, (0, 0)
    if freeze_encoder:
        passing = n_clips * _frozen_encoder(config, low)
        n_frames += model.TRIM_FRAMES
        n_frames = min(n_frames, config.max_source_positions)
    else:
        clip = _encoder(config, low, n_frames)
        encoder = _kept(n_clips, *clip, checkpointing)
    clip = _decoder(config, low, n_tokens, n_frames)
    kept, again = _kept(n_clips, *clip, checkpointing)
    if checkpointing or low == FP32:  # else each layer has casts of its own
        kept += n_clips * FP32 * n_frames * config.d_model  # encoder states
    return passing, encoder, (kept, again)


def _kept(n_clips, n_layers, layer, layer_input, ends, checkpointing):
    """Bytes that wait for the backward pass, and that it computes again."""
    if checkpointing:
        again = n_clips * (layer - layer_input)
        return n_clips * (ends + n_layers * layer_input), again
    return n_clips * (ends + n_layers * layer), 0


def _encoder(config, low, n_frames):
    """What a clip leaves in the encoder.

    Returns
    -------
    n_layers : int
    layer, layer_input, ends : int
        Bytes: of one layer, of its input alone, before and behind all layers.
    """
    fp32 = FP32 * n_frames * config.d_model  # of one (frames, width)
    frames = low * n_frames * config.d_model
    layer = (
        2 * fp32  # inputs of both layer norms: the residuals
        + _linear_inputs(3, frames, low)  # of q, k and v
        + _attention(frames, frames)
        + _feed_forward(frames, low * n_frames * config.encoder_ffn_dim)
        + _sums(n_frames, 2, config.encoder_attention_heads)
    )
    ends = (
        2 * n_frames * config.num_mel_bins * low  # input of conv1
        + 2 * 2 * frames  # its output, twice the frames, and that of GELU
        + frames  # output of conv2
        + fp32  # input of the last layer norm
    )
    return config.encoder_layers, layer, fp32, ends


def _decoder(config, low, n_tokens, n_frames):
    """What a clip leaves in the decoder; as for ``_encoder``."""
    fp32 = FP32 * n_tokens * config.d_model  # of one (tokens, width)
    tokens = low * n_tokens * config.d_model
    frames = low * n_frames * config.d_model
    layer = (
        3 * fp32
        + _linear_inputs(3, tokens, low)
        + _attention(tokens, tokens)
        + _linear_inputs(1, tokens, low)  # of q; of the encoder's k and v:
        + (2 * frames if low < FP32 else 0)  # cast anew in each layer
        + _attention(tokens, frames)
        + _feed_forward(tokens, low * n_tokens * config.decoder_ffn_dim)
        + _sums(n_tokens, 3, 2 * config.decoder_attention_heads)
    )
    ends = fp32 + tokens  # last layer norm, its input and output
    return config.decoder_layers, layer, fp32, ends


def _linear_inputs(n, one, low):
    """One layer norm's output for n projections; autocast casts it for each."""
    return n * one if low < FP32 else one


def _attention(queries, keys):
    """q, what it attended to by head and by frame; k, v. No matrix of scores."""
    return 3 * queries + 2 * keys


def _feed_forward(one, inner):
    """Input of fc1; its output, and that of GELU."""
    return one + 2 * inner


def _sums(n_positions, n_norms, n_heads):
    """Mean and deviation of each layer norm, sum of each softmax; fp32."""
    return FP32 * n_positions * (2 * n_norms + n_heads)


def _frozen_encoder(config, low):
    """Bytes that a clip has in a layer at once: most at GELU.

    The layer's input, the residual, a layer norm's output; before and after.
    """
    widths = 3 * FP32 * config.d_model + 2 * low * config.encoder_ffn_dim
    return config.max_source_positions * widths


def _autocast_weights(config, low, freeze_encoder):
    """Bytes of the copies of matrices: the encoder's, the decoder's.

    Those of weights without a gradient are dropped at once.
    """
    if low == FP32:
        return 0, 0
    width = config.d_model
    attention = 4 * width**2  # q, k, v, out
    layer = 2 * attention + 2 * width * config.decoder_ffn_dim
    decoder = config.vocab_size * width + config.decoder_layers * layer
    layer = attention + 2 * width * config.encoder_ffn_dim
    encoder = 3 * width * (config.num_mel_bins + width)  # convolutions
    encoder += config.encoder_layers * layer
    return 0 if freeze_encoder else low * encoder, low * decoder


def _loss_chunks(config, low, n_tokens):
    """Bytes of the loss beside the logits, which their gradient replaces.

    A chunk's gradient and that of the one before; its logits, if not in fp32.
    """
    n_rows = min(n_tokens, max(1, loss.CHUNK_ELEMENTS // config.vocab_size))
    n_chunks = 2 if low == FP32 else 3
    return n_chunks * FP32 * n_rows * config.vocab_size


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
