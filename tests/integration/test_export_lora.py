"""A run of adapters for other programs: merged into its base, or apart."""

import json
import shutil
import sys

import export
import numpy
import pytest
import torch
import transformers
from local import checkpoints, copies, decode, exporting, lora, model, trained
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

N_MOST = 12  # tokens
LORA = lora.Lora(4, 8, 0.0, ["q_proj", "v_proj"], "both")


def build(hub, folder, base_precision, low_rank=LORA):
    """A CKPT+… folder of adapters that do something, and their model."""
    whisper = model.Whisper(
        *(hub, "lora", False, False, "unused", 1986, base_precision, low_rank)
    )
    generator = torch.Generator().manual_seed(1)
    for name, tensor in whisper.trained_state().items():
        if "lora_B" in name:
            tensor.normal_(0, 0.3, generator=generator)
    saver = checkpoints.Checkpointer(folder / "save", {"whisper": whisper})
    saver.save({"CER": 12.5}, end_of_epoch=True)
    return saver.newest().path, whisper.eval()


@pytest.fixture(scope="module")
def run(hub, tmp_path_factory):
    return build(hub, tmp_path_factory.mktemp("run"), "fp32")


@pytest.fixture(scope="module")
def copied(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("copies") / "hf"
    assert export.export(str(run[0]), out, "hf", "float32") < 1e-6
    return out


@pytest.fixture(scope="module")
def wavs():
    """Three clips of noise, (samples,)."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(n, generator=generator) / 9 for n in (9000, 30000, 80000)
    ]


def texts_of(whisper, wavs):
    """What scores are made of."""
    wavs = torch.nn.utils.rnn.pad_sequence(wavs, batch_first=True)
    ids = decode.suppressed_tokens(
        whisper.tokenizer,
        whisper.config.vocab_size,
        whisper.suppressed_by_source,
    )
    with torch.no_grad():
        found = decode.greedy(whisper, whisper.encode(wavs), N_MOST, ids)
    return whisper.tokenizer.batch_decode(found)


def provenance(folder):
    return json.loads((folder / "provenance.json").read_text(encoding="utf-8"))


# Merged


def test_transformers_writes_what_the_adapters_do(run, copied, wavs):
    processor = transformers.AutoProcessor.from_pretrained(copied)
    merged = transformers.WhisperForConditionalGeneration.from_pretrained(
        copied
    ).eval()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    features = processor(
        [wav.numpy() for wav in wavs], sampling_rate=16000, return_tensors="pt"
    )
    ids = merged.generate(**features, max_new_tokens=N_MOST)
    written = processor.batch_decode(ids, skip_special_tokens=True)
    assert written == texts_of(run[1], wavs) and len({*written}) > 1


def test_provenance_of_what_is_merged(run, copied, hub):
    told = provenance(copied)
    assert told["merged"] is True and told["checkpoint"] == run[0].name
    assert told["whisper_hub"] == hub and told["base_precision"] == "fp32"
    assert told["base_sha256"] == run[1].identity["base_sha256"]
    assert told["scores"] == {"CER": 12.5}


@pytest.mark.slow
def test_ctranslate2_writes_what_the_adapters_do(run, tmp_path, wavs):
    ctranslate2 = pytest.importorskip("ctranslate2")
    out = tmp_path / "ct2"
    assert export.export(str(run[0]), out, "ct2", "float32") < 1e-5
    loaded = ctranslate2.models.Whisper(str(out), compute_type="float32")
    whisper = run[1]
    for wav in wavs:
        spare = whisper.context_samples - len(wav)
        mel = whisper.log_mel_spectrogram(
            torch.nn.functional.pad(wav[None], (0, spare))
        )
        (found,) = loaded.generate(
            ctranslate2.StorageView.from_array(numpy.ascontiguousarray(mel)),
            [whisper.tokenizer.prefix_tokens],
            beam_size=1,
            max_length=2 * N_MOST,
            suppress_blank=False,
            suppress_tokens=copies.suppressed(whisper),
        )
        text = whisper.tokenizer.decode(found.sequences_ids[0])
        assert [text] == texts_of(whisper, [wav])


@pytest.mark.parametrize(
    "precision", ["int8", pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_how_far_a_merged_model_is_from_the_trained_one(
    hub, tmp_path, caplog, precision
):
    path, _ = build(hub, tmp_path, precision)
    out = tmp_path / "out"
    assert export.export(str(path), out, "hf", "float32") < 1e-6
    (told,) = [t for t in caplog.messages if "merged into the base" in t]
    assert f"beside the base in {precision}" in told
    assert 1e-5 < float(told.split("by ")[1].split()[0]) < 0.2
    assert provenance(out)["base_precision"] == precision


def test_no_bitsandbytes_no_comparison(hub, tmp_path, caplog, monkeypatch):
    path, _ = build(hub, tmp_path, "int8")
    whisper = trained.load(trained.resolve(str(path)), "cpu", "unused", "fp32")
    lacking = "pip install bitsandbytes"
    monkeypatch.setattr(trained.quantized, "problem", lambda *_: lacking)
    exporting.merge(whisper, trained.resolve(str(path)), "unused")
    assert caplog.messages[-1].startswith("not compared with the model as")
    assert caplog.messages[-1].endswith(lacking)


# Apart


@pytest.fixture(scope="module")
def adapter(hub, tmp_path_factory):
    """The adapter folder of a run in which the decoder alone has some."""
    folder = tmp_path_factory.mktemp("adapter")
    path, whisper = build(hub, folder, "int8", LORA._replace(part="decoder"))
    difference = export.export(str(path), folder / "out", "adapter", "float32")
    assert difference < 1e-6
    return folder / "out", path


def test_the_files_are_those_of_the_checkpoint(adapter):
    out, checkpoint = adapter
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(p.name for p in out.iterdir()) == [*names, "provenance.json"]
    for name in names:
        assert (out / name).read_bytes() == (checkpoint / name).read_bytes()
    told = provenance(out)
    assert told["merged"] is False and told["base_precision"] == "int8"


def test_an_adapter_names_its_base_where_it_lies_now(run, hub, tmp_path):
    path, whisper = run
    moved = shutil.copytree(path, tmp_path / "moved")
    config = json.loads((moved / "adapter_config.json").read_text())
    old = {**config, "base_model_name_or_path": "/no/such"}
    (moved / "adapter_config.json").write_text(json.dumps(old))
    (tmp_path / "out").mkdir()
    source = trained.Source("checkpoint", str(moved), "moved")
    exporting.write_adapter(whisper, tmp_path / "out", source, {})
    written = (tmp_path / "out/adapter_config.json").read_text()
    assert json.loads(written) == {**config, "base_model_name_or_path": hub}


def test_another_base_than_the_adapters_is_refused(adapter, hub, tmp_path):
    base = shutil.copytree(hub, tmp_path / "base")
    changed = load_file(base / "model.safetensors")
    changed["model.encoder.conv1.bias"] += 1
    save_file(changed, base / "model.safetensors", {"format": "pt"})
    out = shutil.copytree(adapter[0], tmp_path / "adapter")
    config = json.loads((out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (out / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="beside other weights than those of"):
        export.export(str(out), tmp_path / "hf", "hf", "float32")


@pytest.mark.slow
def test_an_adapter_folder_becomes_what_its_run_becomes(adapter, tmp_path):
    """PEFT's merging and ours give the same bits."""
    weights = []
    for i, source in enumerate(adapter):
        export.export(str(source), tmp_path / str(i), "hf", "float32")
        weights.append((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    told = provenance(tmp_path / "0")
    assert told["merged"] is True and told["base_precision"] == "int8"


def test_what_has_no_adapter_to_write(hub, adapter, tmp_path):
    for source, told in (
        (hub, "its weights are whole"),
        (adapter[0], "copy it"),
    ):
        with pytest.raises(ValueError, match=f"--format adapter: .*{told}"):
            export.export(str(source), tmp_path / "out", "adapter", "float32")
    assert not list(tmp_path.iterdir())


# What goes wrong


@pytest.mark.parametrize("form", ["hf", "adapter"])
def test_a_full_disk(run, tmp_path, monkeypatch, form, capsys):
    def full(*_, **options):
        raise OSError(28, "No space left on device")

    def full_in_rust(*_, **options):
        raise SafetensorError(
            "I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(exporting.shutil, "copy", full)
    monkeypatch.setattr(
        transformers.modeling_utils, "safe_save_file", full_in_rust
    )
    arguments = ["export.py", str(run[0]), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*arguments, f"--format={form}"])
    with pytest.raises(
        SystemExit, match="export.py: .*No space left on device"
    ):
        export.main()
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_cannot_be_read_is_no_full_disk(
    run, tmp_path, monkeypatch
):
    def damaged(*_):
        raise SafetensorError("invalid header")

    monkeypatch.setattr(model, "load_file", damaged)
    with pytest.raises(ValueError, match="cannot be loaded, is it whole"):
        export.export(str(run[0]), tmp_path / "out", "hf", "float32")
    assert not list(tmp_path.iterdir())


def test_merging_that_changes_the_texts_is_refused(run, monkeypatch):
    source = trained.resolve(str(run[0]))
    whisper = trained.load(source, "cpu", "unused")
    monkeypatch.setattr(copies, "difference", lambda *_: 0.01)
    with pytest.raises(ValueError, match="merged, its logits differ by 0.01"):
        exporting.merge(whisper, source, "unused")
