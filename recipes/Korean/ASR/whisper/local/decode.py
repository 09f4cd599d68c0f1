"""Decoding: encoder states to token ids, a batch at a time.

In: a Whisper and its encoder states.
Out: for each clip the token ids of its text, without prefix and end.
"""

from functools import partial

import torch
import torch.nn.functional as F
from transformers import WhisperForConditionalGeneration
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from local.random_model import N_TIMESTAMPS

# Whisper's list of suppressed tokens forbids these, which Korean labels hold.
LABEL_CHARACTERS = set("/:~@#()[]\"'%*+-<>=^_`{|}\\$&;,.!?")
STEPS_BETWEEN_END_CHECKS = 8  # each check makes the host wait for the device
CACHE_BLOCK = 64  # tokens; by so many a self-attention cache grows


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
    ids -= set(above_timestamps(tokenizer, n_vocabulary))
    for token in suppressed_by_model or []:
        text = tokenizer.decode([token]).strip()
        if token != end and not (text and set(text) <= LABEL_CHARACTERS):
            ids.add(token)
    return sorted(ids)


def above_timestamps(tokenizer, n_vocabulary):
    """Ids of text that other engines take for timestamps.

    Arguments
    ---------
    tokenizer, n_vocabulary
        As for ``suppressed_tokens``.

    Returns
    -------
    list of int
        Sorted ids behind the last timestamp; without special tokens, and
        without rows that no token has, which fill a matrix up.
    """
    first = tokenizer.convert_tokens_to_ids("<|notimestamps|>") + 1
    above = range(first + N_TIMESTAMPS, n_vocabulary)
    if not above:  # asking for all tokens takes time
        return []
    known = set(tokenizer.get_vocab().values())
    added = tokenizer.added_tokens_decoder.items()
    special = {i for i, token in added if token.special}
    return sorted(known.intersection(above) - special)


def search(beam_size):
    """``greedy`` for a beam of 1, else ``beam`` of that size."""
    return greedy if beam_size == 1 else partial(beam, beam_size=beam_size)


@torch.no_grad()
def greedy(whisper, encoder_states, max_new_tokens, suppressed):
    """The likeliest token at every step, as of Transformers' ``generate``.

    Scores are kept for one step only, and clips that have ended leave the
    batch, so that a long one does not pay for the short ones beside it.

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
    n_clips, n_steps = len(encoder_states), _n_steps(whisper, max_new_tokens)
    end = whisper.tokenizer.eos_token_id
    forbidden = torch.zeros(whisper.model.config.vocab_size, device=device)
    forbidden[suppressed] = -torch.inf
    texts = torch.full((n_clips, n_steps), end, device=device)
    clips = torch.arange(n_clips, device=device)  # whose the rows are
    ended = torch.zeros(n_clips, dtype=torch.bool, device=device)
    cache = EncoderDecoderCache(
        *(Cache(layer_class_to_replicate=_CacheLayer) for _ in range(2))
    )
    tokens = _prefix(whisper, n_clips, device)
    # A CPU is its own host.
    checked_every = 1 if device.type == "cpu" else STEPS_BETWEEN_END_CHECKS
    for step in range(n_steps):
        hidden = _next(whisper.model.decoder, tokens, encoder_states, cache)
        scores = whisper.logits(hidden).add_(forbidden)  # (rows, vocab)
        tokens = scores.max(-1, keepdim=True).indices  # argmax: slow on a CPU
        texts[clips, step] = tokens[:, 0]
        ended |= tokens[:, 0] == end
        if step % checked_every == 0 and ended.any():
            if ended.all():
                break
            tokens, clips, ended = _drop(ended, cache, tokens, clips)
    return _until_end(texts.tolist(), end)


@torch.no_grad()
def beam(whisper, encoder_states, max_new_tokens, suppressed, beam_size):
    """Beam search, by Transformers' ``generate``.

    SpeechBrain's ``S2SWhisperBeamSearcher`` searches otherwise: there an ended
    hypothesis keeps its place among the beams, a clip goes on until
    ``beam_size`` hypotheses have ended, and an end token counts only where
    its log-probability is above 1.5 times the best one. Texts may differ.

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


class _CacheLayer(DynamicLayer):
    """Keys and values of one layer: a step is written in place, where the
    parent copies all that it has.

    What comes first is kept as it is: all that cross-attention ever gets.
    """

    def update(self, keys, values, *_, **__):
        start = self.get_seq_length()
        stop = start + keys.shape[2]
        if start == 0:
            self.is_initialized = True
            return self._hold([keys, values], stop)
        if stop > self.room[0].shape[2]:
            self.room = [F.pad(t, (0, 0, 0, CACHE_BLOCK)) for t in self.room]
        for whole, new in zip(self.room, (keys, values)):
            whole[:, :, start:stop] = new
        return self._hold(self.room, stop)

    def move_rows(self, sources, targets, n_rows):
        room = [_moved(t, sources, targets, n_rows) for t in self.room]
        self._hold(room, self.get_seq_length())

    def _hold(self, room, n_tokens):
        self.room = room  # each (rows, heads, tokens and more, head width)
        self.keys, self.values = (t[:, :, :n_tokens] for t in room)
        return self.keys, self.values


def _next(decoder, tokens, encoder_states, cache):
    """(rows, tokens) ids to the (rows, width) state after the last one."""
    hidden = decoder.embed_tokens(tokens) + decoder.embed_positions(
        tokens, past_key_values_length=cache.get_seq_length()
    )
    for layer in decoder.layers:
        # Not layer(…): it may be compiled for training, or checkpointed. The
        # states are read at the first step alone, before a row is dropped.
        hidden = layer.forward(
            hidden, None, encoder_states, past_key_values=cache
        )
    return decoder.layer_norm(hidden[:, -1])


def _drop(ended, cache, *per_row):
    """Puts the last living rows in the places of ended ones, and cuts.

    In place, so that a row costs nothing but where it moves.
    """
    alive = (~ended).nonzero()[:, 0]
    n_rows = len(alive)
    sources, targets = alive[alive >= n_rows], ended[:n_rows].nonzero()[:, 0]
    for half in (cache.self_attention_cache, cache.cross_attention_cache):
        for layer in half.layers:
            layer.move_rows(sources, targets, n_rows)
    per_row = *per_row, ended
    return [_moved(rows, sources, targets, n_rows) for rows in per_row]


def _moved(rows, sources, targets, n_rows):
    rows[targets] = rows[sources]
    return rows[:n_rows]


def _prefix(whisper, n_clips, device):
    prefix = torch.tensor(whisper.tokenizer.prefix_tokens, device=device)
    return prefix.expand(n_clips, -1)


def _n_steps(whisper, max_new_tokens):
    positions = whisper.model.config.max_target_positions
    return min(max_new_tokens, positions - whisper.n_prefix)


def _until_end(rows, end):
    return [row[: row.index(end)] if end in row else row for row in rows]
