"""Adapters: where they are put, PEFT's files, merging, whose they are."""

import json
import shutil

import pytest
import torch
from conftest import LORA, SEED, TOKENS, clips, forward
from local import lora, model, quantized, sources
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import WhisperForConditionalGeneration, WhisperModel

ALL = ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"]
REGEX = r"model\.decoder\.layers\.[01]\.self_attn\.(q|out)_proj"
CHOICES = "fc1, fc2, k_proj, out_proj, q_proj, v_proj"


@pytest.fixture(scope="module")
def config():
    return sources.load_config("random:quickstart")


def written(part, *names):
    """WhisperModel's names of "self_attn.q" and the like; two layers."""
    return {
        f"{part}.layers.{n}.{name}_proj" for name in names for n in range(2)
    }


ENCODER = written("encoder", "self_attn.q", "self_attn.v")
OF_TEXT = written("decoder", "self_attn.q", "self_attn.v")
OF_SOUND = written("decoder", "encoder_attn.q", "encoder_attn.v")
DECODER = OF_TEXT | OF_SOUND


# Where adapters are put


@pytest.mark.parametrize(
    "pattern, part, names",
    [
        (["q_proj", "v_proj"], "both", ENCODER | DECODER),
        (["q_proj", "v_proj"], "encoder", ENCODER),
        (["q_proj", "v_proj"], "decoder", DECODER),
        (["q_proj", "q_proj", "v_proj"], "decoder", DECODER),
        (["encoder_attn.q_proj", "encoder_attn.v_proj"], "both", OF_SOUND),
        (["self_attn.q_proj", "self_attn.v_proj"], "decoder", OF_TEXT),
        (["model.encoder.layers.1.fc1"], "both", {"encoder.layers.1.fc1"}),
        (["decoder.layers.0.fc2"], "both", {"decoder.layers.0.fc2"}),
        (REGEX, "both", written("decoder", "self_attn.q", "self_attn.out")),
        (r".*\.self_attn\.[qv]_proj", "encoder", ENCODER),
        (r"(?i).*\.SELF_ATTN\.[QV]_PROJ", "decoder", OF_TEXT),
    ],
)
def test_targets(config, pattern, part, names):
    chosen = LORA._replace(target_modules=pattern, part=part)
    found = lora.targets(config, chosen)
    assert set(found) == names and len(found) == len(names)


@pytest.mark.parametrize("part, n_layers", [("encoder", 1), ("decoder", 2)])
def test_all_linear_layers(config, part, n_layers):
    """Four matrices an attention, two behind it."""
    chosen = LORA._replace(target_modules="all-linear", part=part)
    found = lora.targets(config, chosen)
    assert len(set(found)) == 2 * (4 * n_layers + 2)
    assert lora.targets(config, chosen._replace(target_modules=ALL)) == found


@pytest.mark.parametrize(
    "pattern, part, message",
    [
        (["query"], "both", r"\['query'\] names no layer in lora_part='both'"),
        (["q_proj", "v_prj"], "both", r"\['v_prj'\] names no layer"),
        (["q_proj", "proj_out"], "both", r"\['proj_out'\] names no layer"),
        (["all-linear"], "both", r"\['all-linear'\] names no layer"),
        ("q_proj", "both", "'q_proj' names no layer"),  # not a whole name
        (r"decoder\..*q_proj", "both", "names no layer"),
        (["encoder_attn.q_proj"], "encoder", "in lora_part='encoder'"),
        (REGEX, "encoder", "names no layer in lora_part='encoder'"),
        (["conv1"], "both", "names encoder.conv1, which is no linear layer"),
        (["q_proj", "embed_tokens"], "both", "names decoder.embed_tokens"),
        (["self_attn"], "decoder", "names decoder.layers.0.self_attn, "),
        (".*", "both", "names encoder, which is no linear layer"),
        ([""], "both", "names no layer"),
    ],
)
def test_a_pattern_that_is_refused(config, pattern, part, message):
    chosen = LORA._replace(target_modules=pattern, part=part)
    with pytest.raises(ValueError, match=message) as error:
        lora.targets(config, chosen)
    assert str(error.value).startswith(f"lora_target_modules={pattern!r}")
    assert CHOICES in str(error.value)


def test_adapters_of_large_v3_are_small(tmp_path):
    """Rank 32 on q_proj and v_proj: 15.7 M numbers in fp32."""
    chosen = lora.Lora(32, 64, 0.05, ["q_proj", "v_proj"], "both")
    with torch.device("meta"):
        whisper = WhisperModel(sources.load_config("random:large-v3"))
        names = lora.inject(whisper, chosen, SEED)
    assert len(names) == 2 * (32 + 2 * 32)  # attentions
    trained = [p for p in whisper.parameters() if p.requires_grad]
    n_bytes = sum(p.numel() * p.itemsize for p in trained)
    assert n_bytes == 192 * 32 * (1280 + 1280) * 4
    assert n_bytes < 70e6


# Their first weights


def test_first_weights_hang_on_the_seed_alone(quickstart, build):
    def adapters(seed, global_seed):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        whisper = build("full")
        lora.inject(whisper.model, LORA, seed)
        assert torch.equal(torch.get_rng_state(), before)
        whisper.lora = LORA
        return whisper.trained_state()

    first, again, other = adapters(1, 5), adapters(1, 6), adapters(2, 5)
    assert first.keys() == again.keys() == other.keys()
    for name, tensor in first.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, again[name])
        if "lora_A" in name:
            assert not torch.equal(tensor, other[name]) and tensor.all()
        else:
            assert not tensor.any()


def test_an_adapter_begins_as_nothing(build):
    with torch.no_grad():
        wanted = forward(build("full").eval())
        got = forward(build("lora").eval())
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


# PEFT's files


def trained(whisper, scale=0.05):
    """The model with adapters that change what it says."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in whisper.trained_state().values():
            tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    return whisper.eval()


def logits_of(theirs, whisper):
    """Transformers' logits of the same two clips, at the full context."""
    padded = torch.nn.functional.pad(clips(), (0, 2 * 16000))
    with torch.no_grad():
        return theirs(
            input_features=whisper.log_mel_spectrogram(padded),
            decoder_input_ids=TOKENS,
        ).logits[:, -5:]


def by_peft(folder, quickstart, base_precision="fp32"):
    """The checkpoint as anyone loads it, and what PEFT complains about."""
    options = quantized.loading_options(base_precision, "cpu")
    if options:  # it has the tied proj_out beside
        options["quantization_config"].llm_int8_skip_modules = None
    load = WhisperForConditionalGeneration.from_pretrained
    theirs = load(quickstart, **options)
    if options:  # bitsandbytes' own int4 knows widths of 64 alone on a CPU
        quantized.prepare(theirs.model, base_precision)
    return PeftModel.from_pretrained(theirs, folder).eval()


@pytest.mark.parametrize(
    "pattern, part, base_precision",
    [
        (["q_proj", "v_proj"], "both", "fp32"),
        (["q_proj", "v_proj"], "encoder", "fp32"),
        (["q_proj", "v_proj"], "decoder", "fp32"),
        (REGEX, "both", "fp32"),
        (".*proj.*", "both", "fp32"),  # proj_out too, were it PEFT's
        ("all-linear", "both", "fp32"),
        (["q_proj", "v_proj"], "both", "int8"),
        (["q_proj", "v_proj"], "both", "int4"),
    ],
)
@pytest.mark.filterwarnings("error:Found missing adapter keys")
def test_peft_loads_a_checkpoint(
    build, quickstart, tmp_path, pattern, part, base_precision
):
    chosen = LORA._replace(target_modules=pattern, part=part)
    whisper = trained(build("lora", base_precision, chosen))
    whisper.save(tmp_path / "whisper.ckpt")
    theirs = by_peft(tmp_path, quickstart, base_precision)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    loaded = {
        name.replace(".default.", "."): tensor
        for name, tensor in theirs.state_dict().items()
        if "lora_" in name
    }
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)

    with torch.no_grad():
        ours = forward(whisper)[1]
        plain = forward(build("full").eval())[1]
    expected = logits_of(theirs, whisper)
    assert (ours - plain).abs().max() > 0.1
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("part", lora.PARTS)
def test_adapter_config_is_complete(build, quickstart, tmp_path, part):
    whisper = build("lora", "fp32", LORA._replace(part=part))
    whisper.save(tmp_path / "whisper.ckpt")
    stored = LoraConfig.from_pretrained(tmp_path)
    assert (stored.r, stored.lora_alpha, stored.lora_dropout) == LORA[:3]
    assert stored.base_model_name_or_path == quickstart
    assert stored.inference_mode and stored.bias == "none"
    names = {"encoder": ENCODER, "decoder": DECODER}
    names["both"] = {"q_proj", "v_proj"}
    assert stored.target_modules == names[part]


# Merging


def test_merging_changes_no_logits_in_fp32(build):
    whisper = trained(build("lora"))
    with torch.no_grad():
        before = forward(whisper)[1]
        whisper.merge()
        after = forward(whisper)[1]
    torch.testing.assert_close(after, before, atol=1e-4, rtol=0)
    plain = build("full").model.state_dict()
    merged = whisper.model.state_dict()
    assert merged.keys() == plain.keys()
    moved = {k for k in plain if not torch.equal(plain[k], merged[k])}
    assert moved == {f"{name}.weight" for name in ENCODER | DECODER}


def test_merging_is_that_of_peft(build, quickstart, tmp_path):
    whisper = trained(build("lora"))
    whisper.save(tmp_path / "whisper.ckpt")
    theirs = by_peft(tmp_path, quickstart).merge_and_unload()
    wanted = theirs.model.state_dict()
    whisper.merge()
    for name, tensor in whisper.model.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], atol=1e-6, rtol=0)


def test_merging_into_bf16_rounds_once(build):
    whisper = trained(build("lora", "bf16"))
    before = {k: v.clone() for k, v in whisper.model.state_dict().items()}
    autocast = torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), autocast:
        told = forward(whisper)[1]
    whisper.merge()
    with torch.no_grad(), autocast:
        torch.testing.assert_close(forward(whisper)[1], told, atol=0.1, rtol=0)
    after = whisper.model.state_dict()
    for name in ENCODER | DECODER:
        rows, columns = (
            before[f"{name}.lora_{x}.default.weight"] for x in "AB"
        )
        whole = before[f"{name}.base_layer.weight"].float()
        whole += LORA.alpha / LORA.rank * columns @ rows
        assert torch.equal(after[f"{name}.weight"], whole.bfloat16()), name


def test_an_adapter_that_is_not_finite_is_not_merged(build):
    whisper = trained(build("lora"))
    name = sorted(whisper.trained_state())[0]
    whisper.trained_state()[name].fill_(float("nan"))
    with pytest.raises(ValueError, match="NaNs"):
        whisper.merge()


# Whose they are


@pytest.fixture(scope="module")
def other_base(quickstart, tmp_path_factory):
    """The same architecture, one weight changed."""
    folder = tmp_path_factory.mktemp("other") / "quickstart"
    shutil.copytree(quickstart, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.encoder.conv1.bias"][0] += 1e-3
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    return str(folder)


def test_a_checkpoint_beside_another_base(
    build, quickstart, other_base, tmp_path
):
    trained(build("lora")).save(tmp_path / "whisper.ckpt")
    beside = model.Whisper(
        other_base, "lora", False, False, "", SEED, lora=LORA
    )
    before = {k: v.clone() for k, v in beside.trained_state().items()}
    digests = map(sources.sha256, (quickstart, other_base))
    message = "their SHA-256 is {}, not {}; give the source".format(*digests)
    with pytest.raises(ValueError, match=message):
        beside.load(tmp_path / "whisper.ckpt", end_of_epoch=False)
    for name, tensor in beside.trained_state().items():
        assert torch.equal(tensor, before[name])
    build("lora").load(tmp_path / "whisper.ckpt", end_of_epoch=False)


def test_an_older_checkpoint_tells_no_digest(build, tmp_path):
    whisper = trained(build("frozen_encoder"))
    path = tmp_path / "whisper.ckpt"
    whisper.save(path)
    identity = json.loads(path.read_text())
    assert len(identity.pop("base_sha256")) == 64
    path.write_text(json.dumps(identity))
    fresh = build("frozen_encoder")
    fresh.load(path, end_of_epoch=False)
    wanted = whisper.trained_state()
    for name, tensor in fresh.trained_state().items():
        assert torch.equal(tensor, wanted[name])


def test_identity_tells_all_that_adapters_hang_on(build, quickstart):
    assert build("lora", "int8").identity == {
        "whisper_hub": quickstart,
        "adaptation": "lora",
        "base_precision": "int8",
        "lora_rank": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_part": "both",
        "base_sha256": sources.sha256(quickstart),
    }
    assert "base_sha256" not in build("full").identity


def test_adapters_of_another_rank_are_not_loaded(build, tmp_path):
    build("lora").save(tmp_path / "whisper.ckpt")
    other = build("lora", "fp32", LORA._replace(rank=1))
    with pytest.raises(ValueError, match="lora_A.*has the shape.*4.*not.*1"):
        other.load(tmp_path / "whisper.ckpt", end_of_epoch=False)


@pytest.mark.parametrize("there", [True, False])
def test_peft_that_is_not_installed(monkeypatch, there):
    found = (lambda name: name) if there else (lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", found)
    wanted = None if there else "PEFT is not installed: pip install peft"
    assert lora.problem() == wanted


def test_dropout_is_heard_in_training_alone(build):
    whisper = trained(build("lora", "fp32", LORA._replace(dropout=0.5)))
    with torch.no_grad():
        assert torch.equal(*(forward(whisper)[1] for _ in range(2)))
        whisper.train()
        assert not torch.equal(*(forward(whisper)[1] for _ in range(2)))


def test_a_peft_model_is_what_is_injected(build, quickstart):
    """The same names as PEFT's own way, before anything is trained."""
    theirs = get_peft_model(
        WhisperForConditionalGeneration.from_pretrained(quickstart),
        LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
    )
    names = {n for n, p in theirs.named_parameters() if p.requires_grad}
    ours = build("lora").trained_state()
    assert ours.keys() == {name.replace(".default.", ".") for name in names}
