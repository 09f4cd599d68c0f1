"""Exported copies: loaded by others, they write what the model writes."""

import json
import stat
import subprocess
import sys

import export
import numpy
import pytest
import soundfile
import torch
import transformers
from local import checkpoints, copies, decode, exporting, random_model, trained
from outputs import greedy_text

N_MOST = 8  # tokens


@pytest.fixture(scope="module")
def brain(here, tmp_path_factory):
    """A trained model, in the memory of the run that trained it."""
    return here(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def copied(brain, tmp_path_factory):
    out = tmp_path_factory.mktemp("copies") / "deep" / "hf"
    difference = export.export(str(brain.output_folder), out, "hf", "float32")
    assert difference < 1e-6
    return out


@pytest.fixture(scope="module")
def model(copied):
    loaded = transformers.WhisperForConditionalGeneration.from_pretrained(
        copied
    )
    return loaded.eval()


@pytest.fixture(scope="module")
def clips(corpus):
    """(samples,) of three spoken clips."""
    paths = sorted((corpus / "audio").rglob("*.*"))[:3]
    return [soundfile.read(path, dtype="float32")[0] for path in paths]


@pytest.fixture(scope="module")
def processor(copied):
    return transformers.AutoProcessor.from_pretrained(copied)


@pytest.fixture(scope="module")
def features(processor, clips):
    return processor(clips, sampling_rate=16000, return_tensors="pt")


@pytest.fixture(scope="module")
def thirty(tmp_path_factory):
    """A model of 30 s of context, as small as can be."""
    with pytest.MonkeyPatch.context() as patch:
        size = random_model.Size(32, 2, 1, 1, init_std=0.1)
        patch.setitem(random_model.SIZES, "thirty", size)
        folder = tmp_path_factory.mktemp("model") / "thirty"
        return random_model.build_folder("thirty", folder, seed=1)


def texts_of(whisper, clips, n_most=N_MOST):
    """What scores are made of."""
    suppressed = decode.suppressed_tokens(
        whisper.tokenizer,
        whisper.config.vocab_size,
        whisper.suppressed_by_source,
    )
    wavs = [torch.from_numpy(clip) for clip in clips]
    wavs = torch.nn.utils.rnn.pad_sequence(wavs, batch_first=True)
    with torch.no_grad():
        ids = decode.greedy(whisper, whisper.encode(wavs), n_most, suppressed)
    return whisper.tokenizer.batch_decode(ids)


# Transformers alone


def test_the_logits_are_the_same(brain, model, clips, features):
    tokens = torch.tensor([[*brain.tokenizer.prefix_tokens, 11, 22, 33]] * 3)
    wavs = torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(clip) for clip in clips], batch_first=True
    )
    with torch.no_grad():
        _, ours = brain.whisper.eval()(tokens, tokens.shape[1], wavs)
        theirs = model(**features, decoder_input_ids=tokens).logits
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)
    assert ours.std() > 0.01


@pytest.mark.parametrize(
    "options", [{}, {"language": "ko", "task": "transcribe"}]
)
def test_the_text_is_the_same(
    brain, model, processor, clips, features, options
):
    ids = model.generate(**features, max_new_tokens=N_MOST, **options)
    written = processor.batch_decode(ids, skip_special_tokens=True)
    assert written == texts_of(brain.whisper, clips)
    assert any(written)


def test_another_language_and_long_audio_work(model, processor, clips):
    short = processor(clips[0], sampling_rate=16000, return_tensors="pt")
    model.generate(**short, language="en", max_new_tokens=N_MOST)
    twelve_s = processor(
        torch.randn(12 * 16000).numpy() / 10,
        sampling_rate=16000,
        return_tensors="pt",
        truncation=False,
        padding="longest",
        return_attention_mask=True,
    )
    model.generate(**twelve_s, return_timestamps=True, max_new_tokens=N_MOST)


def test_no_speech_may_be_no_text(model):
    """Transformers' own lists forbid an end at once, and the slash."""
    config = model.generation_config
    assert config.begin_suppress_tokens == []
    assert config.forced_decoder_ids is None
    assert config.eos_token_id not in config.suppress_tokens
    assert config.no_timestamps_token_id + 1 not in config.suppress_tokens
    assert model.config.dtype == torch.float32


@pytest.mark.slow
def test_what_a_source_knows_of_its_heads_is_kept(thirty, tmp_path):
    path = tmp_path / "source"
    subprocess.run(["cp", "-r", thirty, path], check=True)
    config = json.loads((path / "generation_config.json").read_text())
    config["alignment_heads"] = [[0, 1]]
    config["suppress_tokens"] = [1, 14, 50257]  # a quote, a slash, the end
    (path / "generation_config.json").write_text(json.dumps(config))
    transformers.WhisperForConditionalGeneration.from_pretrained(
        path
    ).half().save_pretrained(path)
    export.export(str(path), tmp_path / "hf", "hf", "float32")
    written = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert written.alignment_heads == [[0, 1]]
    assert not {1, 14, 50257} & set(written.suppress_tokens)
    config = transformers.WhisperConfig.from_pretrained(tmp_path / "hf")
    assert config.dtype == torch.float32


# Where it comes from


def test_provenance(brain, copied):
    told = json.loads((copied / "provenance.json").read_text())
    best = checkpoints.Checkpointer(brain.output_folder / "save").best()
    assert told["source"] == str(brain.output_folder)
    assert told["checkpoint"] == best.path.name
    assert told["scores"]["CER"] == best.meta["CER"]
    assert told["versions"]["torch"] == torch.__version__.split("+")[0]
    settings = {"precision": "fp32", "beam_size": 1, "max_new_tokens": N_MOST}
    assert trained.run_settings(trained.resolve(str(copied))) == settings


@pytest.mark.slow
def test_a_copy_of_a_copy_keeps_its_provenance(copied, tmp_path):
    export.export(str(copied), tmp_path / "again", "hf", "float32")
    again = (tmp_path / "again/provenance.json").read_bytes()
    assert again == (copied / "provenance.json").read_bytes()


def test_others_may_read_the_files(copied):
    modes = {stat.filemode(path.stat().st_mode) for path in copied.iterdir()}
    assert len(modes) == 1


# CTranslate2


@pytest.mark.slow
def test_faster_whisper_writes_the_same(thirty, tmp_path, clips):
    faster_whisper = pytest.importorskip("faster_whisper")
    out = tmp_path / "ct2"
    assert export.export(thirty, out, "ct2", "float32") < 1e-5
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.bin",
        "preprocessor_config.json",
        "provenance.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocabulary.json",
    }
    whisper = trained.load(trained.resolve(thirty), "cpu", tmp_path)
    loaded = faster_whisper.WhisperModel(
        str(out), device="cpu", compute_type="float32"
    )
    # It pads the features of a short clip, not its sound.
    whole = numpy.tile(numpy.concatenate(clips), 9)
    for start in (0, 7000, 70000):
        clip = whole[start : start + 30 * 16000]
        written = greedy_text(loaded, clip, N_MOST)
        assert written == texts_of(whisper, [clip])[0].strip() != ""


@pytest.mark.slow
def test_weights_are_quantised(thirty, tmp_path):
    pytest.importorskip("ctranslate2")
    difference = export.export(thirty, tmp_path / "int8", "ct2", "int8")
    assert 1e-4 < difference < 0.1
    with pytest.raises(ValueError, match="int8' is CTranslate2's already"):
        export.export(str(tmp_path / "int8"), tmp_path / "x", "hf", "int8")


@pytest.mark.slow
def test_five_seconds_are_not_for_faster_whisper(copied, tmp_path, caplog):
    pytest.importorskip("ctranslate2")
    assert export.export(str(copied), tmp_path / "ct2", "ct2", "float32") < 1e-5
    assert "takes 5 s at once: CTranslate2 transcribes" in caplog.text


# What goes wrong


@pytest.mark.parametrize("name", ["there", "there/file"])
def test_what_is_there_stays(hub, tmp_path, name):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_text("mine")
    with pytest.raises(ValueError, match="is there already; remove it"):
        export.export(hub, tmp_path / name, "hf", "float32")
    assert (tmp_path / "there/file").read_text() == "mine"


@pytest.mark.parametrize(
    "name, value",
    [
        ("difference", lambda *_: 0.01),
        pytest.param("_greedy", lambda *_: [11], marks=pytest.mark.slow),
    ],
)
def test_a_copy_that_differs_is_removed(
    hub, tmp_path, monkeypatch, name, value
):
    monkeypatch.setattr(copies, name, value)
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="was written and removed: loaded"):
        export.export(hub, tmp_path / "out", "hf", "float32")
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


def test_ctranslate2_is_not_installed(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(
        exporting.importlib.util, "find_spec", lambda name: None
    )
    with pytest.raises(ValueError, match="pip install ctranslate2"):
        export.export(hub, tmp_path / "out", "ct2", "int8")


def test_the_command_tells_errors_in_a_line(tmp_path, monkeypatch):
    arguments = ["export.py", str(tmp_path), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(
        SystemExit, match="export.py: model '.*' holds|holds no"
    ):
        export.main()
