"""Arithmetic of Whisper: what a clip costs, and what a GPU could do.

In: a model's dimensions, a clip's seconds and tokens; a GPU's name.
Out: floating-point operations; a share of the peak (MFU).
"""

FRAMES_PER_S = 50  # of the encoder; the mel has twice as many

# Dense bf16, FLOP/s, from NVIDIA's data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def forward(config, seconds, n_tokens):
    """Operations of one clip, forward, at its true length.

    Matrix products alone, two operations for a multiplication and addition.
    With width d, t frames and u tokens, a layer takes: projections 2 t d² for
    each of query, key, value and output; attention 4 t² d; the two products
    of the MLP 16 t d². The decoder's cross-attention projects keys and values
    of t frames, queries and output of u tokens.

    Arguments
    ---------
    config : transformers.WhisperConfig
    seconds : float
        Of audio, without padding.
    n_tokens : int
        The decoder's input, prefix included.

    Returns
    -------
    float
    """
    d, t, u = config.d_model, FRAMES_PER_S * seconds, n_tokens
    convolutions = 2 * 3 * d * (2 * t * config.num_mel_bins + t * d)
    encoder_mlp = 4 * t * d * config.encoder_ffn_dim
    encoder_layer = 8 * t * d**2 + 4 * t**2 * d + encoder_mlp
    self_attention = 8 * u * d**2 + 4 * u**2 * d
    cross_attention = 4 * (u + t) * d**2 + 4 * u * t * d
    decoder_mlp = 4 * u * d * config.decoder_ffn_dim
    decoder_layer = self_attention + cross_attention + decoder_mlp
    return (
        convolutions
        + config.encoder_layers * encoder_layer
        + config.decoder_layers * decoder_layer
        + 2 * u * d * config.vocab_size
    )


def training(config, seconds, n_tokens):
    """A training step's: backward is twice forward; nothing is recomputed."""
    return 3 * forward(config, seconds, n_tokens)


def peak(device_name):
    """FLOP/s of a GPU in bf16; None for one that is not listed, or for none."""
    for name, flops in PEAKS.items():
        if name in (device_name or ""):
            return flops
    return None
