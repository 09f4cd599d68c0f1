"""Models with new tokens, exported: others write the text that they write."""

import functools
import json

import export
import numpy
import pytest
import torch
import transformers
from local import (
    checkpoints,
    decode,
    engines,
    model,
    random_model,
    sources,
    trained,
    vocabulary,
)
from outputs import greedy_text

N_MOST, N_CLIPS, LAST_TIMESTAMP = 24, 4, 51864
TEXTS = [
    "오늘은 날씨가 좋아서 동생과 함께 공원을 걸었습니다",
    "내일은 비가 온다고 했지만 우산을 가져가지 않았습니다",
    "어제 저녁에는 친구와 함께 맛있는 국수를 먹었습니다",
    "뷁 쀍 퀡 같은 글자는 거의 쓰지 않습니다",
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A model of 30 s of context, as small as can be."""
    with pytest.MonkeyPatch.context() as patch:
        size = random_model.Size(32, 2, 1, 2, init_std=0.3)
        patch.setitem(random_model.SIZES, "thirty", size)
        folder = tmp_path_factory.mktemp("model") / "thirty"
        return random_model.build_folder("thirty", folder, seed=1)


@pytest.fixture(scope="module", autouse=True)
def tokenizer():
    """Each source's is read once, which takes a second."""
    once = functools.cache(transformers.AutoTokenizer.from_pretrained)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", once)
        yield sources.load_tokenizer("random:tiny")


@pytest.fixture(scope="module")
def added(hub, tokenizer, tmp_path_factory):
    """A mode to a model, the folder of its checkpoint, and its export."""
    found = {}

    def build(mode):
        new = vocabulary.learn(TEXTS * 3, tokenizer, mode, 30, 51865)
        folder = tmp_path_factory.mktemp(mode)
        options = {"new_tokens": new, "new_rows": "normal"}
        whisper = model.Whisper(hub, "full", False, False, "", 1, **options)
        _lift(whisper.eval())
        checkpointer = checkpoints.Checkpointer(folder, {"whisper": whisper})
        checkpoint = checkpointer.save_checkpoint().path
        out = folder / "hf"
        assert export.export(str(checkpoint), out, "hf", "float32") < 1e-6
        return whisper, checkpoint, out

    def once(mode):
        if mode not in found:
            found[mode] = build(mode)
        return found[mode]

    return once


def _lift(whisper):
    """Longer rows are chosen more often: new tokens among the old, an end; no
    timestamps, which others may write."""
    end, decoder = whisper.tokenizer.eos_token_id, whisper.model.decoder
    with torch.no_grad():
        rows = decoder.embed_tokens.weight
        rows[end + 1 : LAST_TIMESTAMP + 1] *= 0.3
        rows[whisper.new_ids] *= 2
        decoder.embed_positions.weight.mul_(4)
        rows[end] = 1.05 * rows[rows_of(whisper, sounds())[3][-2]]


def sounds():
    """(samples,) each, up to the whole context."""
    generator = numpy.random.default_rng(3)
    lengths = (2, 9, 17, 30)
    beat = [numpy.sin(numpy.arange(16000 * n) / (9 + n)) for n in lengths]
    noise = [generator.normal(0, 0.1, len(one)) for one in beat]
    return [(b * n).astype("float32") for b, n in zip(beat, noise)]


def rows_of(whisper, clips):
    """Ids as scores have them: new ones are there, also in a row."""
    suppressed = decode.suppressed_tokens(
        whisper.tokenizer,
        whisper.config.vocab_size,
        whisper.suppressed_by_source,
    )
    wavs = [torch.from_numpy(clip) for clip in clips]
    wavs = torch.nn.utils.rnn.pad_sequence(wavs, batch_first=True)
    with torch.no_grad():
        states = whisper.encode(wavs)
        return decode.greedy(whisper, states, N_MOST, suppressed)


def texts_of(whisper, clips):
    return [whisper.tokenizer.decode(row) for row in rows_of(whisper, clips)]


@pytest.fixture(scope="module")
def clips():
    return sounds()


MODES = pytest.mark.parametrize("mode", vocabulary.NEW_TOKENS[1:])


def in_a_row(rows, ids):
    """How often one of the ids follows another."""
    pairs = [pair for row in rows for pair in zip(row, row[1:])]
    return sum({*pair} <= {*ids} for pair in pairs)


@MODES
def test_the_texts_here_hold_new_tokens(added, clips, mode):
    whisper, _, _ = added(mode)
    rows = rows_of(whisper, clips)
    used = set(sum(rows, []))
    assert len(used & {*whisper.new_ids}) > 3 and len(used) > 10
    assert in_a_row(rows, whisper.new_ids) > 3
    assert len({*map(tuple, rows)}) == N_CLIPS
    assert min(map(len, rows)) < N_MOST
    assert (max(whisper.new_ids) > LAST_TIMESTAMP) == (mode == "extend")


def generated(folder, clips, **changes):
    """By Transformers alone."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder
    )
    for name, value in changes.items():
        setattr(loaded.generation_config, name, value)
    features = processor(clips, sampling_rate=16000, return_tensors="pt")
    ids = loaded.generate(**features, max_new_tokens=N_MOST)
    return processor.batch_decode(ids, skip_special_tokens=True)


@MODES
def test_generate_writes_the_same(added, clips, mode):
    whisper, _, folder = added(mode)
    texts = texts_of(whisper, clips)
    assert generated(folder, clips) == texts


@pytest.mark.slow
def test_generate_loses_text_unless_it_is_told(added, clips):
    """It takes two ids above the timestamps for the end of a segment."""
    whisper, _, folder = added("extend")
    lost = generated(folder, clips, force_unique_generate_call=False)
    assert lost != texts_of(whisper, clips)


def test_what_is_replaced_is_written_by_a_pipeline(added, clips):
    whisper, _, folder = added("replace")
    pipeline = transformers.pipeline(
        "automatic-speech-recognition", str(folder)
    )
    sounds = [{"raw": clip, "sampling_rate": 16000} for clip in clips]
    greedily = {"max_new_tokens": N_MOST, "num_beams": 1}  # it takes 5
    options = {"generate_kwargs": greedily}
    found = [one["text"] for one in pipeline(sounds, **options)]
    assert found == texts_of(whisper, clips)


@pytest.fixture(scope="module")
def converted(added, tmp_path_factory):
    """The replaced one as CTranslate2 takes it, of its Hugging Face copy."""
    pytest.importorskip("ctranslate2")
    out = tmp_path_factory.mktemp("copies") / "ct2"
    assert export.export(str(added("replace")[2]), out, "ct2", "float32") < 1e-5
    return out


@pytest.mark.slow
def test_what_is_replaced_is_written_by_ctranslate2(
    added, converted, clips, tmp_path
):
    whisper, _, _ = added("replace")
    engine = engines.load(
        trained.resolve(str(converted)), "cpu", "fp32", 1, N_MOST, tmp_path
    )
    texts = [text.strip() for text in texts_of(whisper, clips)]
    wavs = [torch.from_numpy(clip) for clip in clips]
    assert [text.strip() for text in engine.transcribe(wavs)] == texts


@pytest.mark.slow
def test_what_is_replaced_is_written_by_faster_whisper(added, converted, clips):
    faster_whisper = pytest.importorskip("faster_whisper")
    whisper, _, _ = added("replace")
    loaded = faster_whisper.WhisperModel(
        str(converted), device="cpu", compute_type="float32"
    )
    for start in (0, 7000, 70000, 90000):
        # It pads the features of a short clip, not its sound.
        clip = numpy.tile(clips[1], 5)[start : start + 30 * 16000]
        written = greedy_text(loaded, clip, N_MOST)
        assert written == texts_of(whisper, [clip])[0].strip() != ""
        assert in_a_row(rows_of(whisper, [clip]), whisper.new_ids)


@pytest.mark.parametrize("form", ["checkpoint", "copy"])
def test_what_is_extended_is_refused_for_ctranslate2(added, tmp_path, form):
    _, checkpoint, copied = added("extend")
    given = checkpoint if form == "checkpoint" else copied
    told = "it has 30 tokens above the timestamps, .* choose --format hf"
    with pytest.raises(ValueError, match=told):
        export.export(str(given), tmp_path / "deep/ct2", "ct2", "float32")
    assert not list(tmp_path.iterdir())


@MODES
def test_provenance_tells_how_many(added, mode):
    whisper, _, folder = added(mode)
    told = json.loads((folder / "provenance.json").read_text())["new_tokens"]
    assert told == {"mode": mode, "n": len(whisper.new_ids)}


@pytest.mark.slow
@MODES
def test_a_source_that_has_new_tokens_gets_more(added, clips, mode, tmp_path):
    """Its own stay; the copy of a copy writes what the model writes."""
    first, _, folder = added(mode)
    tokenizer = sources.load_tokenizer(str(folder))
    texts = ["감귤나무 열매를 땄습니다 감귤나무 열매를 땄습니다"] * 3
    rows = sources.load_config(str(folder)).vocab_size
    new = vocabulary.learn(texts, tokenizer, mode, 5, rows, keep=first.new_ids)
    assert not {*new.ids} & {*first.new_ids}
    whisper = model.Whisper(
        str(folder), "full", False, False, "", 1, new_tokens=new
    )
    (token,) = whisper.tokenizer.encode(" 열매를", add_special_tokens=False)
    assert token in new.ids
    ours = first.model.decoder.embed_tokens.weight[first.new_ids]
    theirs = whisper.model.decoder.embed_tokens.weight[first.new_ids]
    assert torch.equal(ours, theirs)
    checkpointer = checkpoints.Checkpointer(tmp_path, {"whisper": whisper})
    path = str(checkpointer.save_checkpoint().path)
    source = trained.resolve(path)
    told = engines.load_tokenizer(source).get_vocab()
    assert told == whisper.tokenizer.get_vocab()
    assert trained.base(source).path == str(folder)
    export.export(path, tmp_path / "again", "hf", "float32")
    texts = texts_of(whisper.eval(), clips)
    assert generated(tmp_path / "again", clips) == texts
