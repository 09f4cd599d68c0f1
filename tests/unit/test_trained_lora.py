"""Runs of adapters, and adapters of PEFT's own: loaded beside their base."""

import json
import shutil
import sys

import pytest
import torch
from conftest import LORA, forward
from local import checkpoints, engines, quantized, sources, trained
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, WhisperForConditionalGeneration

ADAPTER = "adapter_model.safetensors"


def moved(module):
    """Adapters that do something: B begins at zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05, generator=generator)
    return module.eval()


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch, tokenizer):
    """Most of the time that it takes to load a small model."""
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *_, **options: tokenizer
    )


@pytest.fixture
def saved(build, tmp_path):
    """The CKPT+… folder of a model with adapters, apart from any run."""

    def save(whisper):
        checkpointer = checkpoints.Checkpointer(
            tmp_path / "save", {"whisper": whisper}
        )
        checkpointer.save({}, end_of_epoch=True)
        return checkpointer.newest().path

    return save


@pytest.fixture
def adapter(quickstart, tmp_path):
    """A folder of PEFT's own making, and the model that it is of."""

    def make(**options):
        options = {"target_modules": ["q_proj", "v_proj"], "r": 4, **options}
        base = WhisperForConditionalGeneration.from_pretrained(quickstart)
        made = moved(get_peft_model(base, LoraConfig(**options)))
        made.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter", made

    return make


def load(folder, **options):
    source = trained.resolve(str(folder))
    return trained.load(source, "cpu", folder / "unused", **options)


@torch.no_grad()
def logits(whisper):
    return forward(whisper)[1]


# A run's checkpoint


@pytest.mark.parametrize("precision", quantized.BASE_PRECISIONS)
def test_a_checkpoint_is_loaded_beside_the_base_of_its_training(
    build, saved, precision
):
    low_rank = LORA._replace(part="decoder")
    whisper = moved(build("lora", precision, low_rank))
    loaded = load(saved(whisper))
    assert loaded.identity == whisper.identity
    assert not loaded.training and loaded.freeze_encoder
    with torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
        assert torch.equal(logits(loaded), logits(whisper))


@pytest.mark.parametrize("precision, most", [("bf16", 0.02), ("int4", 0.5)])
def test_merged_into_a_base_in_fp32(build, saved, precision, most):
    whisper, exact = moved(build("lora", precision)), build("lora").eval()
    for name, tensor in exact.trained_state().items():
        tensor.copy_(whisper.trained_state()[name])
    loaded = load(saved(whisper), base_precision="fp32")
    before = logits(loaded)
    assert torch.equal(before, logits(exact))
    loaded.merge()
    assert (logits(loaded) - before).abs().max() < 1e-4
    # What the rounding of the base makes.
    rounding = (logits(whisper.float()) - before).abs().max()
    assert 1e-4 < rounding / before.abs().max() < most


def gone(folder, base):
    shutil.rmtree(base)


def changed(folder, base):
    weights = load_file(base / "model.safetensors")
    weights["model.encoder.conv1.bias"][0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})


def without_config(folder, base):
    (folder / "adapter_config.json").unlink()


def truncated(folder, base):
    path = folder / ADAPTER
    path.write_bytes(path.read_bytes()[:-4])


def nonsense(folder, base):
    path = folder / ADAPTER
    path.write_bytes(b"x" * path.stat().st_size)


def of_another_rank(folder, base):
    """Padded, so that the file is as long as it was told to be."""
    path = folder / ADAPTER
    n_bytes = path.stat().st_size
    small = {k: t[..., :1] for k, t in load_file(path).items()}
    save_file({k: t.contiguous() for k, t in small.items()}, path)
    told = folder / "CKPT.yaml"
    sizes = f"{ADAPTER}: {n_bytes}", f"{ADAPTER}: {path.stat().st_size}"
    told.write_text(told.read_text().replace(*sizes))


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (gone, FileNotFoundError, "was trained from '.*base', without which"),
        (changed, ValueError, "other weights than those of whisper_hub="),
        (without_config, ValueError, "the checkpoint is not whole"),
        (truncated, ValueError, "the checkpoint is not whole"),
        (nonsense, ValueError, "cannot be loaded, is it whole"),
        (of_another_rank, ValueError, "holds another size: .*lora_A"),
    ],
)
def test_damaged_runs(
    build, quickstart, saved, tmp_path, damage, error, message
):
    base = shutil.copytree(quickstart, tmp_path / "base")
    whisper = build("lora")
    whisper.identity["whisper_hub"] = str(base)
    folder = saved(whisper)
    damage(folder, base)
    with pytest.raises(error, match=message):
        load(folder)


@pytest.mark.parametrize("package", ["bitsandbytes", "peft"])
def test_what_is_not_installed_is_told(build, saved, monkeypatch, package):
    folder = saved(build("lora", "int8"))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"is LoRA.*pip install {package}"):
        load(folder)


def test_an_adapter_beside_fp32_needs_no_bitsandbytes(
    build, saved, monkeypatch
):
    source = trained.resolve(str(saved(build("lora", "int8"))))
    monkeypatch.setattr(
        quantized,
        "problem",
        lambda base, device: "no" if base != "fp32" else None,
    )
    assert trained.problem(source, "cpu").endswith("base in int8: no")
    assert trained.problem(source, "cpu", "fp32") is None


def test_the_base_of_a_run(build, quickstart, saved, monkeypatch):
    source = trained.resolve(str(saved(build("lora"))))
    found = trained.base(source)
    assert (found.kind, found.path) == ("hub", quickstart)
    monkeypatch.setattr(engines.sources, "load_tokenizer", lambda hub: hub)
    assert engines.load_tokenizer(source) == quickstart


def test_the_base_of_random_weights_is_what_the_run_has_built(tmp_path):
    run = tmp_path / "run"
    built = run / "random_whisper/quickstart_7"
    built.mkdir(parents=True)
    for name in (
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ):
        (built / name).touch()
    told = {"whisper_hub": "random:quickstart", "adaptation": "lora", "seed": 7}
    (tmp_path / "whisper.ckpt").write_text(json.dumps(told))
    source = trained.Source("checkpoint", str(tmp_path), "mine", run)
    assert trained.base(source).path == str(built)
    apart = source._replace(run=None)
    assert trained.base(apart).path == "random:quickstart"


# PEFT's own


def test_an_adapter_is_added_to_its_base_by_peft(adapter):
    """Whatever its kind of LoRA."""
    pattern = {"decoder.*q_proj": 2}
    folder, made = adapter(use_rslora=True, rank_pattern=pattern, use_dora=True)
    assert trained.resolve(str(folder)).kind == "adapter"
    whisper = load(folder)
    assert not any("lora" in name for name, _ in whisper.named_modules())
    ours = logits(whisper)
    whisper.model = made.get_base_model().model
    assert (logits(whisper) - ours).abs().max() < 1e-4
    with made.disable_adapter():
        assert (logits(whisper) - ours).abs().max() > 1e-2


def test_a_checkpoint_without_its_run_is_an_adapter(build, saved, tmp_path):
    whisper = moved(build("lora"))
    folder = saved(whisper)
    for name in ("CKPT.yaml", "whisper.ckpt"):
        (folder / name).unlink()
    assert (logits(load(folder)) - logits(whisper)).abs().max() < 1e-4
    base = WhisperForConditionalGeneration.from_pretrained(whisper.source)
    theirs = PeftModel.from_pretrained(base, folder).eval()
    whisper.model = theirs.get_base_model().model
    assert (logits(load(folder)) - logits(whisper)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "adapter_config.json is damaged"),
        ("3", "adapter_config.json is damaged"),
        ("{}", "peft_type=None is not LORA; base_model_name_or_path names no"),
        (
            '{"peft_type": "IA3", "base_model_name_or_path": "a"}',
            "'IA3' is not",
        ),
        (
            '{"peft_type": "LORA", "base_model_name_or_path": 5}',
            "here: base_model_name_or_path names no base; merge",
        ),
        (
            '{"peft_type": "LORA", "base_model_name_or_path": "a",'
            '"trainable_token_indices": [5]}',
            "here: trainable_token_indices is not read; merge",
        ),
    ],
)
def test_adapters_that_are_not_read(tmp_path, content, message):
    (tmp_path / "adapter_config.json").write_text(content)
    (tmp_path / ADAPTER).touch()
    with pytest.raises(ValueError, match=message):
        trained.resolve(str(tmp_path))


def test_an_adapter_without_weights(adapter):
    folder, _ = adapter()
    (folder / ADAPTER).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=f"it has no {ADAPTER}; merge it in"):
        trained.resolve(str(folder))


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
)
def test_an_adapter_of_the_embedding_is_refused(adapter, options):
    """It is the output matrix too, of which PEFT knows nothing."""
    folder, _ = adapter(**options)
    with pytest.raises(ValueError, match="changes decoder.embed_tokens, which"):
        load(folder)


def test_an_adapter_tells_the_weights_of_its_base(adapter, quickstart):
    folder, _ = adapter()
    digest = sources.sha256(quickstart)
    provenance = folder / trained.PROVENANCE
    provenance.write_text(json.dumps({"base_sha256": digest}))
    assert load(folder).identity["base_sha256"] == digest
    provenance.write_text(json.dumps({"base_sha256": "f" * 64}))
    with pytest.raises(ValueError, match=f"is f{{64}}, not {digest}; give"):
        load(folder)


def lacking(state):
    state.popitem()


def too_much(state):
    state["base_model.model.proj_out.lora_A.weight"] = torch.ones(4, 144)


def otherwise_named(state):
    for name in list(state):
        state[name.replace("model.model.", "model.", 1)] = state.pop(name)


def of_another_size(state):
    for name in state:
        state[name] = state[name][:1].contiguous()


@pytest.mark.parametrize(
    "damage, message",
    [
        (lacking, "of another model .* 1 of its weights do not fit, such as"),
        (too_much, "1 of its weights do not fit, such as .*proj_out"),
        (otherwise_named, "of its weights do not fit"),
        (of_another_size, "cannot be loaded, is it whole"),
    ],
)
def test_an_adapter_of_other_weights(adapter, damage, message):
    folder, _ = adapter()
    state = load_file(folder / ADAPTER)
    damage(state)
    save_file(state, folder / ADAPTER)
    with pytest.raises(ValueError, match=message):
        load(folder)
