"""Decoding against Transformers' generate, and by a script of logits."""

from types import SimpleNamespace

import pytest
import torch
from conftest import noise
from local import decode
from transformers import WhisperForConditionalGeneration
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


def states(whisper, rows=slice(None)):
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
    """Stands in for a Whisper: step n of clip i favours script[i][n]."""

    vocabulary = 10

    def __init__(self, script, n_positions=448):
        self.script, self.calls = script, []
        self.n_prefix = 2
        self.tokenizer = SimpleNamespace(prefix_tokens=[7, 8], eos_token_id=9)
        config = SimpleNamespace(max_target_positions=n_positions)
        self.model = SimpleNamespace(config=config, decoder=self.decoder)

    def decoder(self, input_ids, **_):
        self.calls.append(input_ids.tolist())
        step = torch.full((*input_ids.shape, 1), float(len(self.calls) - 1))
        return SimpleNamespace(last_hidden_state=step)

    def logits(self, hidden):
        scores = torch.zeros(len(self.script), self.vocabulary)
        for i, row in enumerate(self.script):
            favoured = row[min(int(hidden[0, 0]), len(row) - 1)]
            for place, token in enumerate(favoured):
                scores[i, token] = 9.0 - place
        return scores


def run(script, max_new_tokens=20, suppressed=(), **settings):
    scripted = Scripted(script, **settings)
    rows = decode.greedy(
        scripted,
        torch.zeros(len(script), 1, 1),
        max_new_tokens,
        list(suppressed),
    )
    return rows, scripted.calls


def test_ends_at_the_end_token_and_says_nothing_after_it():
    rows, calls = run([[[9], [5]], [[1], [2], [3], [9], [4]]])
    assert rows == [[], [1, 2, 3]]
    assert calls[0] == [[7, 8], [7, 8]]
    assert calls[1:5] == [[[9], [1]], [[9], [2]], [[9], [3]], [[9], [9]]]
    assert len(calls) <= 4 + decode.STEPS_BETWEEN_END_CHECKS


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
