"""Engines: their texts and losses, ours against CTranslate2's."""

import copy
import json
import shutil
from functools import partial

import pytest
import torch
from conftest import noise
from local import dataio, decode, engines, model, text, trained
from test_decode import END, lively
from transformers import WhisperForConditionalGeneration

from speechbrain.dataio.batch import PaddedBatch

N_NEW = 12
LABELS = ["네", "오늘 날씨가 좋네요", "", "3시 35분에 만나요"]


def wavs():
    """Four clips of other lengths, the last as long as the context."""
    return [noise(seconds, i) for i, seconds in enumerate((0.5, 2, 3.3, 5))]


@pytest.fixture(scope="module")
def folder(quickstart, tmp_path_factory):
    """A Hugging Face folder whose texts hang on the audio."""
    folder = tmp_path_factory.mktemp("lively") / "model"
    shutil.copytree(quickstart, folder)
    whisper = lively(
        model.Whisper(quickstart, "full", False, False, "unused", 0), 1
    )
    hub = WhisperForConditionalGeneration.from_pretrained(quickstart)
    hub.model.load_state_dict(whisper.model.state_dict())
    hub.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    source = trained.Source("hub", str(folder), "lively")
    return engines.load(source, "cpu", "fp32", 1, N_NEW, "unused")


@pytest.fixture(scope="module")
def load(loaded):
    """Engines of that folder, with one set of weights."""

    def engine(precision="fp32", beam_size=1, n_new=N_NEW, batch_size=32):
        whisper, decoding = loaded.whisper, (beam_size, n_new, batch_size)
        return engines.WhisperEngine(
            "lively", whisper, "cpu", precision, *decoding
        )

    return engine


@pytest.fixture(scope="module")
def ctranslate2_folder(folder, tmp_path_factory):
    """The same weights, as CTranslate2 keeps them."""
    pytest.importorskip("ctranslate2", reason="pip install ctranslate2")
    from ctranslate2.converters import TransformersConverter

    out = tmp_path_factory.mktemp("ctranslate2") / "model"
    beside = ["tokenizer.json", "preprocessor_config.json"]
    TransformersConverter(str(folder), copy_files=beside).convert(str(out))
    return out


def batch(tokenizer, failed=(False, False, False, False)):
    """The clips with labels, as a loader makes them."""
    rows = []
    for wav, label, has_failed in zip(wavs(), LABELS, failed):
        tokens_bos, tokens_eos = dataio.token_ids(label, tokenizer)
        rows.append(
            {
                "sig": wav,
                "tokens_bos": tokens_bos,
                "tokens_eos": tokens_eos,
                "failed": has_failed,
            }
        )
    return PaddedBatch(rows)


def nll_alone(whisper, wav, label):
    """A label's summed negative log-likelihood, without batch or padding."""
    tokens_bos, tokens_eos = dataio.token_ids(label, whisper.tokenizer)
    with torch.no_grad():
        _, logits = whisper(tokens_bos[None], len(tokens_eos), wav[None])
    return -logits[0].log_softmax(-1).gather(1, tokens_eos[:, None]).sum()


@pytest.mark.parametrize("beam_size, n_new", [(1, N_NEW), (1, 2), (2, N_NEW)])
def test_texts_are_those_of_the_search(load, beam_size, n_new):
    engine = load(beam_size=beam_size, n_new=n_new)
    whisper, tokenizer = engine.whisper, engine.tokenizer
    with torch.no_grad():
        states = torch.cat([whisper.encode(wav[None]) for wav in wavs()])
    suppressed = decode.suppressed_tokens(tokenizer, 51865, None)
    search = decode.greedy
    if beam_size > 1:
        search = partial(decode.beam, beam_size=beam_size)
    rows = search(whisper, states, n_new, suppressed)
    expected = [text.for_label(tokenizer.decode(row)) for row in rows]
    assert engine.transcribe(wavs()) == expected
    assert len(set(expected)) > 1


def test_beam_and_bound_change_the_texts(load):
    texts = load().transcribe(wavs())
    assert load(beam_size=2).transcribe(wavs()) != texts
    assert load(n_new=2).transcribe(wavs()) != texts


def test_so_many_at_a_time(load):
    assert load(batch_size=3).transcribe(wavs()) == load().transcribe(wavs())
    assert load().transcribe([]) == []


def test_a_clip_over_the_context_is_refused(load):
    assert load().context_s == 5
    with pytest.raises(ValueError, match=r"5\.1 s exceeds the 5 s"):
        load().transcribe([noise(1), noise(5.1)])


def test_english_is_asked_for_and_korean_again(load):
    engine = load()
    korean = engine.transcribe(wavs())
    with pytest.raises(KeyboardInterrupt), engine.hearing("en"):
        assert engine.tokenizer.prefix_tokens == [50258, 50259, 50359, 50363]
        tokens_bos, _ = dataio.token_ids("yes", engine.tokenizer)
        assert tokens_bos[1] == 50259
        assert engine.transcribe(wavs()) != korean
        raise KeyboardInterrupt
    assert engine.tokenizer.prefix_tokens == [50258, 50264, 50359, 50363]
    assert engine.transcribe(wavs()) == korean


def test_score_gives_texts_loss_and_time(load):
    engine = load()
    scored = engine.score(batch(engine.tokenizer))
    assert scored.texts == engine.transcribe(wavs())
    alone = [nll_alone(engine.whisper, *p) for p in zip(wavs(), LABELS)]
    assert scored.nll == pytest.approx(float(sum(alone)), rel=1e-5)
    lengths = [len(dataio.token_ids(t, engine.tokenizer)[1]) for t in LABELS]
    assert scored.n_tokens == sum(lengths)
    assert engine.has_loss and 0 < scored.seconds < 60


def test_a_failed_clip_counts_nothing_in_the_loss(load):
    engine = load()
    failed = engine.score(batch(engine.tokenizer, (False, True, False, True)))
    pairs = list(zip(wavs(), LABELS))[::2]
    alone = sum(nll_alone(engine.whisper, *pair) for pair in pairs)
    assert failed.nll == pytest.approx(float(alone), rel=1e-5)
    lengths = [len(dataio.token_ids(t, engine.tokenizer)[1]) for t in LABELS]
    assert failed.n_tokens == lengths[0] + lengths[2]


def test_precision(load):
    exact, rough = (
        load(p).score(batch(load().tokenizer)).nll for p in ("fp32", "bf16")
    )
    assert rough != exact and rough == pytest.approx(exact, rel=0.05)
    assert load("bf16").precision == "bf16"


def test_a_base_in_bf16_is_computed_with_in_fp32(build):
    whisper = build("lora", "bf16").eval()
    rough = copy.deepcopy(whisper.model.encoder.conv1.weight)
    assert rough.dtype == torch.bfloat16
    engine = engines.WhisperEngine("a", whisper, "cpu", "fp32", 1, 3, 2)
    assert len(engine.score(batch(engine.tokenizer)).texts) == 4
    exact = whisper.model.encoder.conv1.weight
    assert exact.dtype == torch.float32 and torch.equal(exact, rough.float())


def test_damaged_weights_are_told(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    source = trained.Source("hub", str(broken), "broken")
    with pytest.raises(ValueError, match="broken' cannot be loaded, is it"):
        engines.load(source, "cpu", "fp32", 1, N_NEW, "unused")


# The tokenizer, before any weights


def test_the_tokenizer_of_a_checkpoint_is_that_of_its_source(tmp_path):
    identity = {"whisper_hub": "random:quickstart", "adaptation": "full"}
    (tmp_path / "whisper.ckpt").write_text(json.dumps(identity))
    source = trained.Source("checkpoint", str(tmp_path), "mine")
    prefix = engines.load_tokenizer(source).prefix_tokens
    assert prefix == [50258, 50264, 50359, 50363]


def test_ctranslate2_missing_is_told_with_the_command(monkeypatch, tmp_path):
    find_spec = engines.importlib.util.find_spec
    monkeypatch.setattr(
        engines.importlib.util,
        "find_spec",
        lambda name: None if name == "ctranslate2" else find_spec(name),
    )
    source = trained.Source("ctranslate2", str(tmp_path), "ct2")
    with pytest.raises(ValueError, match="pip install ctranslate2"):
        engines.load_tokenizer(source)


# CTranslate2


@pytest.mark.parametrize("n_new", [1, 2, N_NEW])
def test_ctranslate2_writes_what_our_greedy_search_does(
    load, ctranslate2_folder, n_new
):
    source = trained.Source("ctranslate2", str(ctranslate2_folder), "ct2")
    engine = engines.load(source, "cpu", "bf16", 1, n_new, "unused", 3)
    assert (engine.name, engine.context_s) == ("ct2", 5)
    assert engine.precision == "float32"  # as it was converted
    expected = load(n_new=n_new).transcribe(wavs())
    assert engine.transcribe(wavs()) == expected
    scored = engine.score(batch(engine.tokenizer))
    assert scored.texts == expected
    assert not engine.has_loss and (scored.nll, scored.n_tokens) == (0, 0)


def test_ctranslate2_writes_no_suppressed_token(ctranslate2_folder, tmp_path):
    """What the folder's own config forbids, less what labels hold."""
    shutil.copytree(ctranslate2_folder, tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    comma = 11  # "," which Korean labels hold
    config["suppress_ids"] = [comma, 1000]
    path.write_text(json.dumps(config), encoding="utf-8")
    source = trained.Source("ctranslate2", str(path.parent), "ct2")
    engine = engines.load(source, "cpu", "fp32", 1, N_NEW, "unused")
    forbidden = engine.options["suppress_tokens"]
    assert forbidden == [1000, *range(END + 1, 51865)]


@pytest.mark.parametrize(
    "name, written",
    [
        ("vocabulary.json", '["a", "b", "c"]'),
        ("vocabulary.txt", "a\nb\u2028\nc\n"),
    ],
)
def test_size_of_a_vocabulary(tmp_path, name, written):
    (tmp_path / name).write_text(written, encoding="utf-8")
    assert engines._n_vocabulary(tmp_path) == 3
