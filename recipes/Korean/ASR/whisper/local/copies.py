"""An exported copy beside its model: whether it hears and writes the same.

In: a Whisper, and a folder that was written of it.
Out: the largest difference, or a ValueError where that is no rounding.
"""

import torch
import torch.nn.functional as F
from transformers import (
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from local import decode, probes

CLIP_S = 5  # of music, at which copy and model are compared
N_TOKENS = 32  # of its text
MOST_LOGITS = 1e-4  # difference that rounding makes, of the largest logit
MOST_STATES = {"float32": 1e-3}  # the same of CTranslate2's encoder states
MOST_STATES_QUANTIZED = 0.3


@torch.no_grad()
def compare_hugging_face(whisper, folder):
    """The logits and the text of a Hugging Face folder.

    Arguments
    ---------
    whisper : local.model.Whisper
        On the CPU, in evaluation mode.
    folder : Path

    Returns
    -------
    float
        Largest difference of the logits, as a part of the largest one.

    Raises
    ------
    ValueError
        It is more than rounding, or the text is another.
    """
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = WhisperTokenizer.from_pretrained(folder)
    found, tokens = _compare_logits(whisper, model, folder)
    features = extractor(
        _clip(whisper).numpy(),
        sampling_rate=extractor.sampling_rate,
        return_tensors="pt",
    )
    ids = model.generate(**features, max_new_tokens=N_TOKENS)[0]
    copied, wanted = (
        one.decode(row, skip_special_tokens=True)
        for one, row in ((tokenizer, ids), (whisper.tokenizer, tokens[0]))
    )
    _require(folder, copied == wanted, f"text: {copied!r}, not {wanted!r}")
    return found


@torch.no_grad()
def compare_adapter(whisper, folder):
    """As ``compare_hugging_face``: the logits of PEFT beside the base."""
    from peft import PeftModel

    base = WhisperForConditionalGeneration.from_pretrained(
        whisper.source, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, folder).eval()
    return _compare_logits(whisper, model, folder)[0]


@torch.no_grad()
def compare_ctranslate2(whisper, folder, quantization):
    """The encoder states of a CTranslate2 folder; in float32 also its tokens.

    Arguments
    ---------
    whisper, folder
        As for ``compare_hugging_face``.
    quantization : str
        Of the folder's weights.

    Returns
    -------
    float
        Largest difference of the states, as a part of the largest one.

    Raises
    ------
    ValueError
        It is more than rounding, or the tokens are others.
    """
    import ctranslate2
    import numpy

    model = ctranslate2.models.Whisper(
        str(folder), device="cpu", compute_type="float32"
    )
    mel = ctranslate2.StorageView.from_array(_mel(whisper).numpy())
    heard = model.encode(mel, to_cpu=True)
    states = whisper.encode(_clip(whisper)[None])
    found = difference(torch.from_numpy(numpy.array(heard)), states)
    most = MOST_STATES.get(quantization, MOST_STATES_QUANTIZED)
    _require(folder, found <= most, f"encoder states by {found:.2g}")
    if quantization != "float32":
        return found
    prompts = [whisper.tokenizer.prefix_tokens]
    most = 2 * N_TOKENS  # of which it writes half
    written = model.generate(mel, prompts, beam_size=1, max_length=most)
    ids, wanted = written[0].sequences_ids[0], _greedy(whisper, states)
    _require(folder, ids == wanted, f"tokens: {ids}, not {wanted}")
    return found


@torch.no_grad()
def logits(whisper, tokens=None):
    """Of the clip at which models are compared.

    Arguments
    ---------
    whisper : local.model.Whisper
        In evaluation mode.
    tokens : torch.Tensor or None
        (1, tokens), prefix included; None: those that it writes.

    Returns
    -------
    tokens : torch.Tensor
    logits : torch.Tensor
        (1, tokens, vocabulary)
    """
    states = whisper.encode(_clip(whisper)[None])
    if tokens is None:
        prefix = whisper.tokenizer.prefix_tokens
        tokens = torch.tensor([[*prefix, *_greedy(whisper, states)]])
    return tokens, whisper.logits(whisper.decode(tokens, states))


def difference(copied, original):
    """The largest, as a part of the largest value."""
    largest = original.abs().max().clamp(min=1)
    return ((copied - original).abs().max() / largest).item()


def suppressed(whisper):
    """Ids that no text holds, without timestamps and what is above them.

    Long audio is cut by timestamps; where they are not asked for, a model
    writes none.
    """
    last = whisper.tokenizer.convert_tokens_to_ids("<|notimestamps|>")
    ids = decode.suppressed_tokens(
        whisper.tokenizer,
        whisper.config.vocab_size,
        whisper.suppressed_by_source,
    )
    return [token for token in ids if token <= last]


def _compare_logits(whisper, model, folder):
    """The difference, and (1, tokens) of the text that it was found at."""
    tokens, ours = logits(whisper)
    mel = _mel(whisper)
    theirs = model(input_features=mel, decoder_input_ids=tokens).logits
    found = difference(theirs, ours)
    _require(folder, found <= MOST_LOGITS, f"logits by {found:.2g}")
    return found, tokens


def _greedy(whisper, states):
    return decode.greedy(whisper, states, N_TOKENS, suppressed(whisper))[0]


def _clip(whisper):
    """(samples,) of music: it sounds in every model's context."""
    context_s = min(CLIP_S, whisper.context_s)
    return probes.clips(2, context_s)["music"][1]


def _mel(whisper):
    """(1, mels, frames) of the clip at the full context."""
    clip = _clip(whisper)
    n_spare = whisper.context_samples - len(clip)
    return whisper.log_mel_spectrogram(F.pad(clip[None], (0, n_spare)))


def _require(folder, is_equal, told):
    if not is_equal:
        raise ValueError(
            f"'{folder}' was written and removed: loaded again, it differs "
            f"from the model in {told}; report it with the versions of torch, "
            "transformers, peft and ctranslate2"
        )
