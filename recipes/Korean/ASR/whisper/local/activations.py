"""What a forward pass leaves for the backward pass, and what passes through.

In: a model's configuration, how it is trained, the shape of a batch.
Out: bytes of the encoder and of the decoder.
"""

from typing import NamedTuple, Optional

from local.model import SAMPLES_PER_FRAME, TRIM_FRAMES

FP32 = 4  # bytes a number
BYTES = {"fp32": FP32, "bf16": 2, "fp16": 2}


class Half(NamedTuple):
    """Bytes of the encoder or the decoder.

    Attributes
    ----------
    kept : int
        Wait for the backward pass.
    again : int
        Of one layer, made again in the backward pass.
    casts, casts_later : int
        Autocast's copies of weights, at the end of the forward pass and in
        the backward pass.
    passing : int
        The most that a half without a graph has at once.
    """

    kept: int = 0
    again: int = 0
    casts: int = 0
    casts_later: int = 0
    passing: int = 0


class Linear(NamedTuple):
    """A linear layer within a layer of the encoder or the decoder.

    Attributes
    ----------
    name : str
    n : int
        Positions of a clip.
    width, out : int
        Of its input and its output.
    source : str or None
        Name of the fp32 tensor that it reads with others; None: a tensor of
        its own, in the precision of the training.
    has_graph : bool
        Whether its input has a gradient.
    """

    name: str
    n: int
    width: int
    out: int
    source: Optional[str]
    has_graph: bool = True


class Layer(NamedTuple):
    """Bytes of a layer: two of a clip, then of its matrices' copies."""

    kept: int
    states: int  # encoder states, which all layers have in common
    casts: int  # made in each pass through the layer
    cached: int  # made once in a forward pass


def of_halves(config, mode, batch):
    """Bytes of both halves of a model.

    Arguments
    ---------
    config : transformers.WhisperConfig
    mode : local.memory.Mode
    batch : local.memory.Batch

    Returns
    -------
    encoder, decoder : Half

    Raises
    ------
    KeyError
        No such precision.
    """
    n_frames = -(-batch.context_samples // SAMPLES_PER_FRAME)
    if mode.freeze_encoder:
        encoder = Half(passing=passing(config, mode, batch.n_clips))
        n_frames += TRIM_FRAMES
    n_frames = min(n_frames, config.max_source_positions)
    if not mode.freeze_encoder:
        encoder = _encoder(config, mode, batch.n_clips, n_frames)
    return encoder, _decoder(config, mode, batch, n_frames)


def _encoder(config, mode, n_clips, n_frames):
    width, inner = config.d_model, config.encoder_ffn_dim
    low = BYTES[mode.precision]
    norm = FP32 * n_frames * width  # input of a layer norm: the residual
    linears = [
        *_attention("self_attn", width, n_frames, n_frames, "self_attn"),
        *_feed_forward(width, inner, n_frames),
    ]
    own = (
        2 * norm
        + _attended(low, width, n_frames, n_frames)
        + low * n_frames * inner  # input of GELU
        + _sums(n_frames, 2, config.encoder_attention_heads)
    )
    prefixes = [f"encoder.layers.{i}." for i in range(config.encoder_layers)]
    layers = [
        _layer(prefix, linears, mode, own)
        for prefix in _with_graph(prefixes, mode)
    ]
    ends, convolutions = norm, 0
    if not mode.lora:
        # Input of conv1; its output, twice the frames, and that of GELU;
        # output of conv2.
        ends += low * n_frames * (2 * config.num_mel_bins + 5 * width)
        convolutions = 3 * width * (config.num_mel_bins + width)
    return _half(config, mode, n_clips, layers, norm, ends, convolutions)


def _decoder(config, mode, batch, n_frames):
    width, inner = config.d_model, config.decoder_ffn_dim
    low, n_tokens = BYTES[mode.precision], batch.n_tokens
    norm = FP32 * n_tokens * width
    linears = [
        *_attention("self_attn", width, n_tokens, n_tokens, "self_attn"),
        *_attention(
            "encoder_attn",
            width,
            n_tokens,
            n_frames,
            "states",
            has_graph=not mode.freeze_encoder,
        ),
        *_feed_forward(width, inner, n_tokens),
    ]
    own = (
        3 * norm
        + _attended(low, width, n_tokens, n_tokens)
        + _attended(low, width, n_tokens, n_frames)
        + low * n_tokens * inner
        + _sums(n_tokens, 3, 2 * config.decoder_attention_heads)
    )
    prefixes = [f"decoder.layers.{i}." for i in range(config.decoder_layers)]
    if mode.freeze_encoder:
        prefixes = _with_graph(prefixes, mode)
    layers = [_layer(prefix, linears, mode, own) for prefix in prefixes]
    ends = norm + (0 if mode.lora else low * n_tokens * width)
    if mode.gradient_checkpointing or any(layer.states for layer in layers):
        ends += FP32 * n_frames * width
    embedding = config.vocab_size * width
    return _half(config, mode, batch.n_clips, layers, norm, ends, embedding)


def _with_graph(prefixes, mode):
    """Layers from the first one with an adapter on; others keep nothing."""
    for i, prefix in enumerate(prefixes):
        if not mode.lora or any(n.startswith(prefix) for n in mode.adapted):
            return prefixes[i:]
    return []


def _attention(name, width, n_queries, n_keys, keys, has_graph=True):
    """Its four linear layers; ``keys`` is the source of two of them."""
    return [
        Linear(f"{name}.q_proj", n_queries, width, width, name),
        Linear(f"{name}.k_proj", n_keys, width, width, keys, has_graph),
        Linear(f"{name}.v_proj", n_keys, width, width, keys, has_graph),
        Linear(f"{name}.out_proj", n_queries, width, width, None),
    ]


def _feed_forward(width, inner, n):
    return [
        Linear("fc1", n, width, inner, "fc1"),
        Linear("fc2", n, inner, width, None),
    ]


def _attended(low, width, n_queries, n_keys):
    """q and what it attended to; k, v. No matrix of scores."""
    return low * width * (2 * n_queries + 2 * n_keys)


def _sums(n_positions, n_norms, n_heads):
    """Mean and deviation of each layer norm, sum of each softmax; fp32."""
    return FP32 * n_positions * (2 * n_norms + n_heads)


def _layer(prefix, linears, mode, own):
    """Bytes of one layer, whose linear layers keep more than its ``own``."""
    shared, kept, casts, cached = {}, own, 0, 0
    for linear in linears:
        is_adapted = prefix + linear.name in mode.adapted
        n_bytes, keeps_source = _inputs(linear, mode, is_adapted)
        kept += n_bytes
        if keeps_source:
            shared[linear.source] = FP32 * linear.n * linear.width
        once, again = _casts(linear, mode, is_adapted)
        cached += once
        casts += again
    states = shared.pop("states", 0)
    return Layer(kept + sum(shared.values()), states, casts, cached)


def _inputs(linear, mode, is_adapted):
    """Bytes that a linear layer and its adapter keep of its input.

    And whether they keep its source, of which autocast would make a copy for
    each. A frozen matrix keeps nothing.
    """
    low = BYTES[mode.precision]
    copy = low * linear.n * linear.width
    is_source = low == FP32 and linear.source is not None
    if not mode.lora:
        return (0, True) if is_source else (copy, False)
    if not is_adapted:
        return 0, False
    between = low * linear.n * mode.lora.rank
    if mode.lora.dropout:
        mask = mode.mask * linear.n * linear.width
        return between + mask + copy, False
    return (between, True) if is_source else (between + copy, False)


def _casts(linear, mode, is_adapted):
    """Bytes of autocast's copies that are cached; that each pass makes anew.

    It caches those of trained weights. That of a frozen matrix is kept for
    the gradient of the layer's input.
    """
    low = BYTES[mode.precision]
    if low == FP32:
        return 0, 0
    matrix = low * linear.width * linear.out
    if not mode.lora:
        return matrix, 0
    adapter = low * mode.lora.rank * (linear.width + linear.out)
    is_cast = mode.base_precision == "fp32"
    is_cast |= (mode.base_precision, mode.precision) == ("bf16", "fp16")
    return adapter * is_adapted, matrix * (is_cast and linear.has_graph)


def _half(config, mode, n_clips, layers, layer_input, ends, end_weights):
    """A Half of layers, and of what lies before and behind them."""
    if not layers:
        return Half()
    low = BYTES[mode.precision]
    end_casts = low * end_weights if low < FP32 else 0
    cached = sum(layer.cached for layer in layers) + end_casts
    # Of a frozen embedding the copy goes with the gradient of the logits.
    later = cached - end_casts if mode.lora else cached
    again = _matrices(config, mode)
    if mode.gradient_checkpointing:
        layer = max(layers)
        kept = ends + len(layers) * layer_input
        again += n_clips * (layer.kept - layer_input)
        of_layer = layer.casts + layer.cached
        return Half(n_clips * kept, again, cached, of_layer)
    casts = sum(layer.casts for layer in layers)
    kept = ends + sum(layer.kept for layer in layers)
    return Half(n_clips * kept, again, cached + casts, later + casts)


def _matrices(config, mode):
    """Bytes of the largest quantised matrix as it is multiplied."""
    largest = config.d_model * config.encoder_ffn_dim
    low = BYTES[mode.precision]
    copies = {"int8": low, "int4": FP32 + low}
    return largest * copies.get(mode.base_precision, 0)


def passing(config, mode, n_clips):
    """Bytes that a layer without a graph has at once: most at GELU.

    The layer's input, the residual, a layer norm's output; before and after.
    """
    low = BYTES[mode.precision]
    widths = 3 * FP32 * config.d_model + 2 * low * config.encoder_ffn_dim
    clip = config.max_source_positions * widths
    return n_clips * clip + _matrices(config, mode)
