"""The model against Transformers, and what of it is trained and kept."""

import copy
import json

import pytest
import torch
from conftest import N_TARGETS, SEED, TOKENS, clips, forward, host_reads, noise
from local import features, model, random_model
from safetensors.torch import load_file, save_file
from transformers import (
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder


def objective(logits):
    """A scalar that every logit moves by another weight."""
    generator = torch.Generator().manual_seed(1)
    return (logits * torch.randn(logits.shape, generator=generator)).sum()


def gradients(whisper, **options):
    whisper.train()
    objective(forward(whisper, **options)[1]).backward()
    return {
        name: parameter.grad
        for name, parameter in whisper.model.named_parameters()
        if parameter.grad is not None
    }


@pytest.fixture(scope="module")
def transformers_model(quickstart):
    return WhisperForConditionalGeneration.from_pretrained(quickstart)


def test_logits_and_gradients_are_those_of_transformers(
    build, transformers_model
):
    whisper = build()
    states, logits = forward(whisper)
    assert states.shape == (2, 250, 144)
    assert logits.shape == (2, N_TARGETS, 51865)

    padded = torch.nn.functional.pad(clips(), (0, 2 * 16000))
    theirs = transformers_model(
        input_features=whisper.log_mel_spectrogram(padded),
        decoder_input_ids=TOKENS,
    )
    torch.testing.assert_close(states, theirs.encoder_last_hidden_state)
    expected = theirs.logits[:, -N_TARGETS:]
    torch.testing.assert_close(logits, expected)

    objective(logits).backward()
    objective(expected).backward()
    wanted = dict(transformers_model.model.named_parameters())
    for name, parameter in whisper.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad, wanted[name].grad, atol=1e-3, rtol=1e-3
            )
            assert parameter.grad.abs().sum() > 0 or "k_proj" in name
    transformers_model.zero_grad()


@pytest.mark.parametrize("n_targets", [1, 5, 8])
def test_the_last_targets_alone_have_logits(build, n_targets):
    whisper = build().eval()
    with torch.no_grad():
        states, every = whisper(TOKENS, 8, clips())
        again, logits = whisper(TOKENS, n_targets, encoder_states=states)
    assert again is states
    assert every.shape == (2, 8, 51865)
    torch.testing.assert_close(logits, every[:, 8 - n_targets :])


# The encoder at other lengths


@pytest.mark.parametrize("n_steps", [1, 4, 10, 15])
def test_a_shorter_context_is_a_smaller_encoder_of_transformers(build, n_steps):
    """Theirs takes one length alone, so it is built with fewer positions."""
    whisper = build()
    n_samples = 5120 * n_steps
    wavs = clips(seconds=0.3)
    states = whisper.encode(wavs, n_samples)

    config = copy.deepcopy(whisper.config)
    config.max_source_positions = n_samples // 320
    theirs = WhisperEncoder(config)
    weights = whisper.model.encoder.state_dict()
    name = "embed_positions.weight"
    weights[name] = weights[name][: n_samples // 320]
    theirs.load_state_dict(weights)
    padded = torch.nn.functional.pad(wavs, (0, n_samples - wavs.shape[1]))
    expected = theirs(whisper.log_mel_spectrogram(padded)).last_hidden_state
    assert states.shape == (2, n_samples // 320, 144)
    torch.testing.assert_close(states, expected)


def test_a_context_is_raised_to_the_audio_and_capped(build):
    """Speed perturbation makes clips longer than their manifest says."""
    whisper = build().eval()
    wavs = clips(seconds=2.0)
    with torch.no_grad():
        wanted = whisper.encode(wavs, 32000)
        assert wanted.shape[1] == 100
        assert torch.equal(whisper.encode(wavs, 16000), wanted)
        full = whisper.encode(wavs)
        assert torch.equal(whisper.encode(wavs, 10**6), full)
        assert full.shape[1] == 250
        assert not torch.allclose(full[:, :100], wanted)


@pytest.mark.parametrize(
    "n_samples, n_frames", [(16000, 100), (16001, 101), (70000, 250)]
)
def test_a_frozen_encoder_hears_its_full_context(build, n_samples, n_frames):
    """Its states are trimmed to the length asked for, and one second."""
    whisper = build("frozen_encoder")
    wavs = clips(seconds=1.0)
    states = whisper.encode(wavs, n_samples)
    assert torch.equal(states, whisper.encode(wavs)[:, :n_frames])
    assert states.shape[1] == n_frames
    trained = build().encode(wavs, n_samples)
    assert not torch.allclose(trained[:, :50], states[:, :50])


@pytest.mark.parametrize("n_samples", [48000, 51200])
def test_a_shorter_context_trains_the_encoder(build, n_samples):
    got = gradients(build(), n_samples=n_samples)
    full = gradients(build())
    assert got.keys() == full.keys()
    name = "encoder.layers.0.fc1.weight"
    assert not torch.allclose(got[name], full[name])


# A ready mel instead of a waveform


def mels(whisper, seconds):
    """(2, frames, mels) of two clips, as shards hold them."""
    given = [
        features.of_clip(wav, whisper._mel_filters, 80000)
        for wav in clips(seconds=seconds)
    ]
    return torch.stack(given).transpose(1, 2)


@pytest.mark.parametrize("adaptation", model.ADAPTATIONS)
@pytest.mark.parametrize("n_samples", [None, 16000, 35840])
def test_a_mel_is_heard_as_its_waveform(build, adaptation, n_samples):
    """A context too short for it is raised, less the silence behind it."""
    whisper = build(adaptation).eval()
    mel = mels(whisper, seconds=2.0)
    with torch.no_grad():
        wanted = whisper.encode(clips(seconds=2.0), n_samples)
        got = whisper.encode(n_samples=n_samples, mel=mel)
        _, logits = forward(whisper, wav=None, n_samples=n_samples, mel=mel)
        _, expected = forward(whisper, encoder_states=got)
    assert got.shape == wanted.shape
    n_heard = 99 if n_samples == 16000 else None  # the last window's end
    torch.testing.assert_close(
        got[:, :n_heard], wanted[:, :n_heard], atol=1e-3, rtol=0
    )
    assert torch.equal(logits, expected)


def test_a_mel_over_the_context_is_an_error(build):
    whisper = build()
    whisper.encode(mel=torch.zeros(1, 503, 80))
    with pytest.raises(ValueError, match="80160 samples exceed.* 80000"):
        whisper.encode(mel=torch.zeros(1, 504, 80))


# The decoder


@pytest.mark.parametrize("autocast", [False, True])
def test_decoder_is_that_of_transformers(build, autocast):
    whisper = build()
    states = whisper.encode(clips()).detach()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = whisper.decode(TOKENS, states)
        expected = whisper.model.decoder(
            input_ids=TOKENS, encoder_hidden_states=states, use_cache=False
        ).last_hidden_state
    assert torch.equal(got, expected)
    weights = list(whisper.model.decoder.parameters())
    mine = torch.autograd.grad(objective(got), weights)
    theirs = torch.autograd.grad(objective(expected), weights)
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("garbage", [0.0, 1e4])
def test_masked_states_change_nothing(build, garbage):
    whisper = build().eval()
    lengths = [70, 250]
    with torch.no_grad():
        states = whisper.encode(clips())
        states[0, 70:] = garbage
        mask = torch.arange(250) < torch.tensor(lengths)[:, None]
        _, logits = forward(whisper, encoder_states=states, encoder_mask=mask)
        for i, n_frames in enumerate(lengths):
            _, alone = whisper(
                TOKENS[i : i + 1],
                N_TARGETS,
                encoder_states=states[i : i + 1, :n_frames],
            )
            torch.testing.assert_close(logits[i], alone[0], atol=1e-4, rtol=0)
        _, unmasked = forward(whisper, encoder_states=states)
    assert not torch.allclose(unmasked[0], logits[0], atol=1e-2)


@pytest.mark.parametrize("adaptation", model.ADAPTATIONS)
@pytest.mark.parametrize("heard", ["wav", "mel", "states"])
def test_the_host_never_waits_in_a_training_pass(build, adaptation, heard):
    whisper = build(adaptation).train()
    options = {"n_samples": 51200}
    if heard == "states":
        states = whisper.encode(clips()).detach()
        mask = torch.arange(250) < torch.tensor([[70], [250]])
        options = {"encoder_states": states, "encoder_mask": mask}
    lengths, mel = torch.tensor([0.5, 1.0]), mels(whisper, 3.0)
    with host_reads() as found:
        if heard == "mel":
            mel = features.repeat_last(mel, lengths)
            options = {**options, "wav": None, "mel": mel}
        objective(forward(whisper, **options)[1]).backward()
    assert found == []


# Log-mels


@pytest.mark.parametrize("loudness", [0.001, 0.1])
def test_log_mel_is_that_of_transformers(build, quickstart, loudness):
    wav = noise(2.7, loudness=loudness)
    extractor = WhisperFeatureExtractor.from_pretrained(quickstart)
    expected = extractor(
        wav.numpy(), sampling_rate=16000, return_tensors="pt"
    ).input_features
    padded = torch.nn.functional.pad(wav, (0, 80000 - len(wav)))[None]
    mel = build().log_mel_spectrogram(padded)
    assert mel.shape == (1, 80, 500)
    torch.testing.assert_close(mel, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_log_mel_does_not_hear_the_neighbour(build, autocast):
    whisper = build()
    quiet, loud = noise(5, 0, 0.001), noise(5, 1, 0.9)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        alone = whisper.log_mel_spectrogram(quiet[None])[0]
        beside = whisper.log_mel_spectrogram(torch.stack([quiet, loud]))[0]
    assert alone.dtype == beside.dtype == torch.float32
    assert (alone - beside).abs().max() == 0
    assert (alone - whisper.log_mel_spectrogram(quiet[None])[0]).any() == 0


def test_short_audio_is_padded_to_the_context(build):
    whisper = build().eval()
    wavs = clips(seconds=1.0)
    padded = torch.nn.functional.pad(wavs, (0, 4 * 16000))
    with torch.no_grad():
        states = whisper.encode(wavs)
        assert states.shape[1] == 250
        assert torch.equal(states, whisper.encode(padded))
        assert not torch.allclose(states, whisper.encode(padded.roll(16000)))


def test_audio_over_the_context_is_an_error(build):
    whisper = build()
    whisper.encode(torch.zeros(1, 80000))
    with pytest.raises(ValueError, match="80001 samples exceed.* 80000"):
        whisper.encode(torch.zeros(1, 80001))


def test_frozen_encoder_has_the_decoder_gradients_of_full(build):
    full, frozen = gradients(build()), gradients(build("frozen_encoder"))
    assert any(name.startswith("encoder.") for name in full)
    for name, gradient in frozen.items():
        torch.testing.assert_close(gradient, full[name], msg=name)


@pytest.mark.parametrize("adaptation", model.ADAPTATIONS)
@pytest.mark.parametrize("n_samples", [None, 51200])
def test_gradient_checkpointing_changes_nothing_but_memory(
    build, adaptation, n_samples
):
    plain, saving = build(adaptation), checkpointed(build(adaptation))
    counts = {"encoder": 0, "decoder": 0}
    for name in counts:

        def count(*_, name=name):
            counts[name] += 1

        layer = getattr(saving.model, name).layers[0].fc2
        layer.register_forward_pre_hook(count)
    wanted = gradients(plain, n_samples=n_samples)
    got = gradients(saving, n_samples=n_samples)
    # Forward, and again in backward.
    n_encoder = 1 if adaptation == "frozen_encoder" else 2
    assert counts == {"encoder": n_encoder, "decoder": 2}
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert torch.equal(gradient, got[name]), name
    with torch.no_grad():
        assert torch.equal(forward(plain)[1], forward(saving)[1])


def checkpointed(whisper):
    whisper.model.gradient_checkpointing_enable({"use_reentrant": False})
    return whisper


def test_gradient_checkpointing_and_compiling_are_settings(build, quickstart):
    def flags(whisper):
        parts = whisper.model.encoder, whisper.model.decoder
        layers = [layer for part in parts for layer in part.layers]
        assert len(layers) == 4
        return {
            (
                layer.gradient_checkpointing,
                layer._compiled_call_impl is not None,
            )
            for layer in layers
        }

    plain = build()
    both = model.Whisper(quickstart, "full", True, True, "unused", SEED)
    assert flags(plain) == {(False, False)}
    assert flags(both) == {(True, True)}
    # Nothing was compiled yet, and a checkpoint has the same names.
    assert both.trained_state().keys() == plain.trained_state().keys()
    assert both.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_give_the_same(build, quickstart, checkpointing):
    compiled = model.Whisper(
        quickstart, "full", checkpointing, True, "unused", SEED
    )
    for n_samples in (51200, 61440):
        plain = build()
        wanted = gradients(plain, n_samples=n_samples)
        got = gradients(compiled, n_samples=n_samples)
        assert wanted.keys() == got.keys()
        for name, gradient in wanted.items():
            difference = (gradient - got[name]).norm()
            assert difference <= 1e-4 * gradient.norm() + 1e-3, name
        with torch.no_grad():
            torch.testing.assert_close(
                forward(plain, n_samples=n_samples)[1],
                forward(compiled, n_samples=n_samples)[1],
                atol=1e-4,
                rtol=1e-4,
            )
        compiled.zero_grad()


# In a checkpoint


def changed(whisper):
    with torch.no_grad():
        for parameter in whisper.trained_state().values():
            parameter.add_(0.5)
    return whisper


@pytest.mark.parametrize("adaptation", model.ADAPTATIONS)
def test_save_and_load(build, tmp_path, adaptation):
    trained = changed(build(adaptation))
    trained.save(tmp_path / "whisper.ckpt")
    is_lora = adaptation == "lora"
    files = ["model.safetensors"]
    if is_lora:
        files = ["adapter_model.safetensors", "adapter_config.json"]
    assert {p.name for p in tmp_path.iterdir()} == {"whisper.ckpt", *files}
    stored = load_file(tmp_path / files[0])
    assert stored.keys() == trained.trained_state().keys()
    has_encoder = any(".encoder." in f".{name}" for name in stored)
    assert has_encoder == (adaptation != "frozen_encoder")
    identity = json.loads((tmp_path / "whisper.ckpt").read_text())
    assert identity["adaptation"] == adaptation

    fresh = build(adaptation)
    fresh.load(tmp_path / "whisper.ckpt", end_of_epoch=True)
    wanted = trained.model.state_dict()
    for name, tensor in fresh.model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert all(
        p.requires_grad == q.requires_grad
        for p, q in zip(fresh.parameters(), trained.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "saved, loaded",
    [("full", "frozen_encoder"), ("frozen_encoder", "full")],
)
def test_load_of_another_adaptation(build, tmp_path, saved, loaded):
    build(saved).save(tmp_path / "whisper.ckpt")
    whisper = build(loaded)
    before = whisper.model.encoder.conv1.weight.clone()
    with pytest.raises(ValueError, match=f"adaptation='{loaded}'.*encoder"):
        whisper.load(tmp_path / "whisper.ckpt", end_of_epoch=False)
    assert torch.equal(whisper.model.encoder.conv1.weight, before)


def test_load_of_another_size(build, tmp_path):
    whisper = build()
    whisper.save(tmp_path / "whisper.ckpt")
    stored = load_file(tmp_path / "model.safetensors")
    stored["encoder.conv1.bias"] = torch.zeros(1)  # would broadcast
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="encoder.conv1.bias"):
        whisper.load(tmp_path / "whisper.ckpt", end_of_epoch=False)


# Sources


def test_a_source_in_fp16_is_loaded_as_fp32(quickstart, tmp_path):
    half = WhisperForConditionalGeneration.from_pretrained(
        quickstart, dtype=torch.float16
    )
    half.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float16}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(f"{quickstart}/{name}")
    name = "preprocessor_config.json"
    (tmp_path / name).symlink_to(f"{quickstart}/{name}")
    whisper = model.Whisper(str(tmp_path), "full", False, False, "", SEED)
    assert {p.dtype for p in whisper.parameters()} == {torch.float32}
    assert torch.equal(
        whisper.model.encoder.conv1.weight,
        half.model.encoder.conv1.weight.float(),
    )


def test_random_source_is_built_once_and_per_size_and_seed(
    tmp_path, monkeypatch, tokenizer
):
    monkeypatch.setattr(random_model, "build_tokenizer", lambda size: tokenizer)
    for width in (4, 8):
        size = random_model.Size(width, *[4] * 3)
        monkeypatch.setitem(random_model.SIZES, f"width{width}", size)

    def whisper(size, seed):
        folder = str(tmp_path / "r")
        return model.Whisper(
            f"random:{size}", "full", False, False, folder, seed
        ).model

    first = whisper("width4", 1)
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    again = whisper("width4", 1)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == files
    weight = first.decoder.embed_tokens.weight
    assert torch.equal(weight, again.decoder.embed_tokens.weight)
    other = whisper("width4", 2)
    assert not torch.equal(weight, other.decoder.embed_tokens.weight)
    assert whisper("width8", 1).config.d_model == 8
