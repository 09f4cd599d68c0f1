"""Decoding: encoder states to token ids, a batch at a time.

In: a Whisper and its encoder states.
Out: for each clip the token ids of its text, without prefix and end.
"""

import torch
from transformers import WhisperForConditionalGeneration
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

# Whisper's list of suppressed tokens forbids these, which Korean labels hold.
LABEL_CHARACTERS = set("/:~@#()[]\"'%*+-<>=^_`{|}\\$&;,.!?")
STEPS_BETWEEN_END_CHECKS = 8  # each check makes the host wait for the device


def suppressed_tokens(tokenizer, n_vocabulary, suppressed_by_model):
    """Ids that no transcript holds: special tokens, timestamps, the model's
    own list without what Korean labels contain.

    Arguments
    ---------
    tokenizer : transformers.WhisperTokenizer
        Of the model.
    n_vocabulary : int
        Of the model: older tokenizers do not know the timestamps.
    suppressed_by_model : list of int or None
        ``suppress_tokens`` of its generation config.

    Returns
    -------
    list of int
        Sorted ids. The end token is not among them, nor at the first step:
        a clip without speech is transcribed by nothing.
    """
    end = tokenizer.eos_token_id
    ids = set(range(end + 1, n_vocabulary))
    for token in suppressed_by_model or []:
        text = tokenizer.decode([token]).strip()
        if token != end and not (text and set(text) <= LABEL_CHARACTERS):
            ids.add(token)
    return sorted(ids)


@torch.no_grad()
def greedy(whisper, encoder_states, max_new_tokens, suppressed):
    """The likeliest token at every step, with a key-value cache.

    Arguments
    ---------
    whisper : local.model.Whisper
        In evaluation mode.
    encoder_states : torch.Tensor
        (batch, frames, width)
    max_new_tokens : int
        Upper bound on a transcript, its end token included.
    suppressed : list of int
        Ids never chosen.

    Returns
    -------
    list of list of int
        Token ids a clip.
    """
    device = encoder_states.device
    n_clips = encoder_states.shape[0]
    end = whisper.tokenizer.eos_token_id
    tokens = _prefix(whisper, n_clips, device)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    ended = torch.zeros(n_clips, dtype=torch.bool, device=device)
    chosen = []
    for step in range(_n_steps(whisper, max_new_tokens)):
        hidden = whisper.model.decoder(
            input_ids=tokens,
            encoder_hidden_states=encoder_states,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        scores = whisper.logits(hidden).float()  # (batch, vocabulary)
        scores[:, suppressed] = -torch.inf
        tokens = scores.argmax(-1).masked_fill(ended, end)[:, None]
        chosen.append(tokens)
        ended |= tokens[:, 0] == end
        if step % STEPS_BETWEEN_END_CHECKS == 0 and ended.all():
            break
    return _until_end(torch.cat(chosen, dim=1).tolist(), end)


@torch.no_grad()
def beam(whisper, encoder_states, max_new_tokens, suppressed, beam_size):
    """Beam search, by Transformers' ``generate``.

    Arguments
    ---------
    whisper, encoder_states, max_new_tokens, suppressed
        As for ``greedy``.
    beam_size : int
        Hypotheses kept a clip.

    Returns
    -------
    list of list of int
        Token ids a clip.
    """
    from transformers import GenerationConfig, GenerationMixin
    from transformers.modeling_outputs import BaseModelOutput

    with torch.device("meta"):  # its weights are ours, set below
        model = WhisperForConditionalGeneration(whisper.model.config)
    model.model = whisper.model
    model.proj_out.weight = whisper.model.decoder.embed_tokens.weight
    model.eval()
    end = whisper.tokenizer.eos_token_id
    prefix = _prefix(whisper, encoder_states.shape[0], encoder_states.device)
    sequences = GenerationMixin.generate(
        model,
        encoder_outputs=BaseModelOutput(last_hidden_state=encoder_states),
        decoder_input_ids=prefix,
        generation_config=GenerationConfig(
            num_beams=beam_size,
            max_new_tokens=_n_steps(whisper, max_new_tokens),
            suppress_tokens=suppressed,
            eos_token_id=end,
            pad_token_id=end,
            decoder_start_token_id=whisper.tokenizer.prefix_tokens[0],
        ),
    )
    return _until_end(sequences[:, prefix.shape[1] :].tolist(), end)


def _prefix(whisper, n_clips, device):
    prefix = torch.tensor(whisper.tokenizer.prefix_tokens, device=device)
    return prefix.expand(n_clips, -1)


def _n_steps(whisper, max_new_tokens):
    positions = whisper.model.config.max_target_positions
    return min(max_new_tokens, positions - whisper.n_prefix)


def _until_end(rows, end):
    return [row[: row.index(end)] if end in row else row for row in rows]
