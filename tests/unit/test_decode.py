"""Decoding against Transformers' generate, and by a script of logits."""

import copy
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from conftest import noise
from local import decode
from transformers import AddedToken, WhisperForConditionalGeneration
from whisper.tokenizer import get_tokenizer

END = 50257
N_NEW = 24
SEEDS = [0, 1, 2, 3]


def lively(whisper, seed):
    """Weights large enough that texts hang on the audio, and end at times."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in whisper.model.named_parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                std = 0.1 if "embed" in name else 0.16
                parameter.normal_(0, std, generator=generator)
        whisper.eval()
        rows = decode.greedy(whisper, states(whisper), N_NEW, [END])
        common = max(sum(rows, []), key=sum(rows, []).count)
        embeddings = whisper.model.decoder.embed_tokens.weight
        embeddings[END] = 1.05 * embeddings[common]
    return whisper


def clips():
    """Four clips of other lengths, the last as long as the context."""
    wavs = [noise(seconds, i) for i, seconds in enumerate((0.5, 2, 3.3, 5))]
    return torch.nn.utils.rnn.pad_sequence(wavs, batch_first=True)


def states(whisper, rows=...):
    with torch.no_grad():
        return whisper.encode(clips()[rows])


@pytest.fixture(scope="module")
def suppressed(tokenizer):
    return decode.suppressed_tokens(tokenizer, 51865, non_speech())


def non_speech():
    """OpenAI's own list, as its models' generation configs hold it."""
    return list(get_tokenizer(True, num_languages=99).non_speech_tokens)


def generate(quickstart, whisper, suppressed, **settings):
    """Transformers' own way from audio to ids, without prefix and end."""
    model = WhisperForConditionalGeneration.from_pretrained(quickstart)
    model.model.load_state_dict(whisper.model.state_dict())
    model.tie_weights()
    model.generation_config.begin_suppress_tokens = None
    sequences = model.eval().generate(
        whisper.log_mel_spectrogram(clips()),
        language="ko",
        task="transcribe",
        return_timestamps=False,
        suppress_tokens=suppressed,
        max_new_tokens=N_NEW,
        force_unique_generate_call=True,
        **settings,
    )
    rows = sequences[:, 4:].tolist()
    return [row[: row.index(END)] if END in row else row for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_is_that_of_transformers(build, quickstart, suppressed, seed):
    whisper = lively(build(), seed)
    got = decode.greedy(whisper, states(whisper), N_NEW, suppressed)
    assert got == generate(quickstart, whisper, suppressed)
    lengths = {len(row) for row in got}
    assert len(lengths) > 1 and min(lengths) < N_NEW
    assert not set(sum(got, [])) & {*suppressed, END}


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_a_clip_alone_and_in_a_batch(build, suppressed, seed):
    whisper = lively(build(), seed)
    together = decode.greedy(whisper, states(whisper), N_NEW, suppressed)
    alone = [
        decode.greedy(whisper, states(whisper, [i]), N_NEW, suppressed)[0]
        for i in range(4)
    ]
    assert alone == together
    assert len({tuple(row) for row in together}) > 1


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_beam_of_one_is_greedy(build, suppressed, seed):
    whisper = lively(build(), seed)
    arguments = whisper, states(whisper), N_NEW, suppressed
    assert decode.beam(*arguments, beam_size=1) == decode.greedy(*arguments)


@pytest.fixture
def of_twelve(build, suppressed):
    """What a search takes, of clips that end at many steps; their frames."""

    def arguments(n_frames=37):
        generator = torch.Generator().manual_seed(0)
        encoder_states = torch.randn(12, n_frames, 144, generator=generator)
        return lively(build(), 1), encoder_states, 40, suppressed

    return arguments


def spread(rows):
    """At how many different steps the rows end."""
    return len({len(row) for row in rows})


@pytest.mark.parametrize("n_frames", [1, 37, 90])
@pytest.mark.parametrize("cache_block", [3, 64])
def test_any_number_of_frames(of_twelve, n_frames, cache_block, monkeypatch):
    monkeypatch.setattr(decode, "CACHE_BLOCK", cache_block)
    arguments = of_twelve(n_frames)
    given = arguments[1].clone()
    got = decode.greedy(*arguments)
    assert got == decode.beam(*arguments, beam_size=1)
    assert torch.equal(arguments[1], given)
    assert spread(got) > 1


def test_under_autocast(of_twelve):
    arguments = of_twelve()
    with torch.autocast("cpu", torch.bfloat16):
        got = decode.greedy(*arguments)
        assert got == decode.beam(*arguments, beam_size=1)
    assert got != decode.greedy(*arguments) and spread(got) > 1


def test_layers_that_are_compiled_or_checkpointed_for_training(of_twelve):
    def compiled(*_, **__):
        raise AssertionError("compiled for training, and called")

    arguments = of_twelve()
    expected = decode.greedy(*arguments)
    model = arguments[0].model
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.decoder.layers:
        layer._compiled_call_impl = compiled
    assert decode.greedy(*arguments) == expected


class Adapter(torch.nn.Module):
    """A projection with something beside it, as LoRA has."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.n_calls = linear, 0

    def forward(self, hidden):
        self.n_calls += 1
        return self.linear(hidden) + 0.5 * hidden


def test_through_wrapped_projections(of_twelve):
    arguments = of_twelve()
    plain = decode.greedy(*arguments)
    layers = arguments[0].model.decoder.layers
    for layer in layers:
        for attention in (layer.self_attn, layer.encoder_attn):
            attention.q_proj = Adapter(attention.q_proj)
            attention.v_proj = Adapter(attention.v_proj)
    got = decode.greedy(*arguments)
    of_clips = {layer.encoder_attn.v_proj.n_calls for layer in layers}
    of_steps = {layer.self_attn.v_proj.n_calls for layer in layers}
    assert of_clips == {1} and of_steps.pop() >= max(map(len, got))
    assert got == decode.beam(*arguments, beam_size=1) != plain


def peak_bytes(search, *arguments):
    """The most bytes of tensors alive at once, beyond those alive before."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(
        activities=[activity], profile_memory=True
    ) as profiler:
        search(*arguments)
    events = profiler.profiler.kineto_results.events()
    changes = [e for e in events if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


def test_memory_does_not_grow_with_the_steps(build, suppressed):
    n_clips = 4
    whisper = build().eval()
    encoder_states = torch.zeros(n_clips, 10, 144)
    few, many = (
        peak_bytes(
            decode.greedy, whisper, encoder_states, n, [*suppressed, END]
        )
        for n in (20, 120)
    )
    scores = n_clips * 51865 * 4  # bytes of one step
    cached = 2 * 2 * n_clips * 144 * 4  # bytes of a token: layers, keys, values
    assert scores < few < 4 * scores  # no room for tokens that may never come
    assert many - few < 2 * cached * 100  # not a hundred times the scores


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_beam_is_that_of_transformers(build, quickstart, suppressed, seed):
    whisper = lively(build(), seed)
    arguments = whisper, states(whisper), N_NEW, suppressed
    got = decode.beam(*arguments, beam_size=3)
    assert got == generate(quickstart, whisper, suppressed, num_beams=3)
    assert got != decode.greedy(*arguments)


def test_beam_leaves_the_model_as_it_was(build, suppressed):
    whisper = lively(build(), 0)
    before = {k: v.clone() for k, v in whisper.model.state_dict().items()}
    trained = whisper.trained_state().keys()
    for _ in range(2):
        decode.beam(whisper, states(whisper), 3, suppressed, beam_size=2)
    after = whisper.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert whisper.trained_state().keys() == trained


# By a script


class Scripted:
    """Stands in for a Whisper: step n of clip i favours script[i][n].

    Which clip a row is and which tokens it was given, its one layer knows
    from the cache alone.
    """

    vocabulary = 10

    def __init__(self, script, n_positions=448):
        self.script, self.calls, self.given = script, [], {}
        self.n_prefix = 2
        self.tokenizer = SimpleNamespace(prefix_tokens=[7, 8], eos_token_id=9)
        self.model = SimpleNamespace(
            config=SimpleNamespace(
                max_target_positions=n_positions, vocab_size=self.vocabulary
            ),
            decoder=SimpleNamespace(
                embed_tokens=self.embed,
                embed_positions=lambda ids, past_key_values_length: 0.0,
                layers=[SimpleNamespace(forward=self.layer)],
                layer_norm=lambda hidden: hidden,
            ),
        )

    def embed(self, ids):
        self.calls.append(ids.tolist())
        return ids[..., None].float()

    def layer(self, hidden, _, encoder_states, past_key_values):
        cross = past_key_values.cross_attention_cache
        if not past_key_values.is_updated.get(0):
            past_key_values.is_updated[0] = True
            cross.update(*encoder_states[:, None].repeat(2, 1, 1, 1, 1), 0)
        clips = cross.layers[0].values[:, 0, 0]  # (rows, 1)
        tokens, _ = past_key_values.self_attention_cache.update(
            *hidden[:, None].repeat(2, 1, 1, 1, 1), 0
        )
        given = tokens[:, 0, :, 0]  # (rows, tokens)
        self.given |= zip(clips[:, 0].tolist(), given.tolist())
        steps = torch.full_like(clips, given.shape[1] - self.n_prefix)
        return torch.cat([clips, steps], dim=-1)[:, None]

    def logits(self, hidden):
        scores = torch.zeros(len(hidden), self.vocabulary)
        for row, (clip, step) in enumerate(hidden.long().tolist()):
            script = self.script[clip]
            for place, token in enumerate(script[min(step, len(script) - 1)]):
                scores[row, token] = 9.0 - place
        return scores


def run(script, max_new_tokens=20, suppressed=(), **settings):
    scripted = Scripted(script, **settings)
    rows = decode.greedy(
        scripted,
        torch.arange(len(script)).float()[:, None, None],
        max_new_tokens,
        list(suppressed),
    )
    for clip, row in enumerate(rows):
        told = [7, 8, *row]  # but not the last, where the limit ends a text
        assert scripted.given[clip][: len(told)] in (told, told[:-1])
    return rows, scripted.calls


def test_ends_at_the_end_token_and_says_nothing_after_it():
    rows, calls = run([[[9]], [[1], [2], [3], [9]]])
    assert rows == [[], [1, 2, 3]]
    assert calls[:3] == [[[7, 8], [7, 8]], [[1]], [[2]]]
    assert len(calls) == 4


def says(n_tokens):
    """A script: so many tokens, and the end."""
    return [[1 + n % 6] for n in range(n_tokens)] + [[9]]


@pytest.mark.parametrize(
    "lengths",
    [
        (20, 0, 3, 30, 1),
        (0, 0, 0, 17),
        (17, 0, 0, 0),
        (7, 8, 9, 15, 16, 17),
        (40, 40, 40),
        (9, 1, 50, 2, 8, 0, 50, 23, 16, 4, 7, 31),
    ],
)
@pytest.mark.parametrize("cache_block", [1, 5, 64])
def test_ended_clips_leave_the_batch(lengths, cache_block, monkeypatch):
    monkeypatch.setattr(decode, "CACHE_BLOCK", cache_block)
    rows, calls = run([says(n) for n in lengths], max_new_tokens=40)
    assert rows == [[1 + i % 6 for i in range(min(n, 40))] for n in lengths]
    for step, call in enumerate(calls[1:]):
        assert len(call) == sum(n > step for n in lengths)


def test_stops_at_once_where_all_are_silent():
    rows, calls = run([[[9]], [[9]]])
    assert rows == [[], []] and len(calls) == 1


@pytest.mark.parametrize(
    "max_new_tokens, n_positions, expected",
    [(5, 448, 5), (1, 448, 1), (444, 12, 10), (10, 12, 10), (9, 12, 9)],
)
def test_never_more_than_may_be(max_new_tokens, n_positions, expected):
    rows, calls = run([[[1]]], max_new_tokens, n_positions=n_positions)
    assert rows == [[1] * expected]
    assert len(calls) == expected


def test_the_next_best_where_the_best_is_suppressed():
    rows, _ = run([[[1, 2], [3, 4], [9]]], suppressed=[1, 3])
    assert rows == [[2, 4]]


# Suppressed


@pytest.mark.parametrize("special", ["<|ko|>", "<|0.00|>", "<|nospeech|>"])
def test_special_tokens_are_suppressed(tokenizer, suppressed, special):
    assert tokenizer.convert_tokens_to_ids(special) in suppressed


def test_all_special_tokens_but_the_end(tokenizer):
    everything = list(range(END + 1, 51865))
    assert decode.suppressed_tokens(tokenizer, 51865, None) == everything
    assert decode.suppressed_tokens(tokenizer, 51865, [END]) == everything


@pytest.mark.parametrize(
    "text",
    [
        '(철자)/(발음) "네" 3:30~4:00 @집 #1 50% A/S',
        "R&B [음악] 1+1=2 <b> {x} a_b ^^ -- ((네)) `c` | \\ $5 * ; '가'",
        "e-mail: a@b.kr (/) ~~ :)",
        " ( ) / : ~ @ # \" % '",
    ],
)
def test_what_labels_hold_is_not_suppressed(tokenizer, suppressed, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert set(ids) & set(non_speech())  # the model's own list would not do
    assert not set(ids) & set(suppressed)


@pytest.mark.parametrize("text", [" ♪♪♪", "♪♪", "「", "』"])
def test_what_else_the_model_suppresses_stays_so(tokenizer, suppressed, text):
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    assert token in non_speech() and token in suppressed


def test_text_above_the_timestamps_is_not_suppressed(tokenizer):
    """Special tokens are, and rows that fill a matrix up."""
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["뷁뷁", "쀍쀍"])
    longer.add_special_tokens({"additional_special_tokens": ["<|own|>"]})
    assert longer.convert_tokens_to_ids("<|own|>") == 51867
    # In no list of special tokens, but one of them.
    longer.add_tokens([AddedToken("<|spk|>", special=True)])
    assert longer.convert_tokens_to_ids("<|spk|>") == 51868
    for n_vocabulary, n_above in ((51865, 0), (51866, 1), (51880, 2)):
        above = list(range(51865, 51865 + n_above))
        assert decode.above_timestamps(longer, n_vocabulary) == above
        suppressed = decode.suppressed_tokens(longer, n_vocabulary, None)
        everything = set(range(END + 1, n_vocabulary))
        assert suppressed == sorted(everything - set(above))
