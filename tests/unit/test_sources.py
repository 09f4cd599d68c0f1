"""What is read of a model source, and the digest of its weights."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from conftest import PREFIX
from local import random_model, sources
from safetensors.torch import load_file
from transformers import WhisperForConditionalGeneration


def test_prefix_and_context(quickstart, tokenizer):
    assert tokenizer.prefix_tokens == PREFIX
    assert sources.load_tokenizer(quickstart).prefix_tokens == PREFIX
    assert sources.context_seconds(quickstart) == 5
    assert sources.context_seconds("random:quickstart") == 5
    assert sources.context_seconds("random:large-v3") == 30


def test_a_missing_source_is_named():
    for source in ("nobody/has-this", "results/nothing"):
        with pytest.raises(FileNotFoundError, match=f"whisper_hub='{source}'"):
            sources.load_tokenizer(source)
    with pytest.raises(ValueError, match="no size 'huge'; choose tiny, base"):
        sources.load_tokenizer("random:huge")


def test_an_english_only_source_is_refused(quickstart, tmp_path):
    """OpenAI's have the token <|ko|> too, and every special one lower."""
    vocabulary = json.loads(open(f"{quickstart}/tokenizer.json").read())
    for token in vocabulary["added_tokens"]:
        token["id"] -= 1
    ids = vocabulary["model"]["vocab"]
    del ids[max(ids, key=ids.get)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert '"<|ko|>"' in json.dumps(vocabulary)
    with pytest.raises(ValueError, match="English-only.*multilingual Whisper"):
        sources.load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "load",
    [
        sources.load_extractor,
        sources.load_config,
        sources.load_tokenizer,
        sources.context_seconds,
    ],
)
def test_an_unknown_size_is_told_with_the_choices(load):
    with pytest.raises(ValueError, match="no size 'huge'; choose tiny, base"):
        load("random:huge")


def test_a_random_source_needs_no_folder():
    size = random_model.SIZES["large-v3"]
    extractor = sources.load_extractor("random:large-v3")
    config = sources.load_config("random:large-v3")
    assert extractor.feature_size == config.num_mel_bins == size.n_mels
    assert extractor.chunk_length == size.context_s
    assert config.max_source_positions == 50 * size.context_s
    assert config.d_model == size.width
    assert config.vocab_size == 51766 + size.n_languages


# The digest


def of_files(folder, *names):
    contents = b"".join((Path(folder) / name).read_bytes() for name in names)
    return hashlib.sha256(contents).hexdigest()


def test_the_digest_of_one_file_is_its_own(quickstart):
    wanted = of_files(quickstart, "model.safetensors")
    assert sources.sha256(quickstart) == wanted


def test_a_base_is_read_block_by_block(quickstart, monkeypatch):
    wanted = sources.sha256(quickstart)
    monkeypatch.setattr(sources, "BLOCK", 2**20 + 1)
    assert sources.sha256(quickstart) == wanted


def test_the_digest_of_several_files_is_that_of_them_in_order(
    quickstart, tmp_path
):
    whisper = WhisperForConditionalGeneration.from_pretrained(quickstart)
    whisper.save_pretrained(tmp_path, max_shard_size="8MB")
    parts = sorted(p.name for p in tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    wanted = of_files(tmp_path, *parts)
    assert sources.sha256(str(tmp_path)) == wanted
    (tmp_path / "notes.safetensors").write_bytes(b"nobody reads this")
    assert sources.sha256(str(tmp_path)) == wanted
    with open(tmp_path / parts[-1], "r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert sources.sha256(str(tmp_path)) != wanted


@pytest.mark.parametrize(
    "there, read",
    [
        (["pytorch_model.bin"], "pytorch_model.bin"),
        (["pytorch_model.bin", "model.safetensors"], "model.safetensors"),
        (["model.safetensors", "adapter_model.safetensors"], None),
    ],
)
def test_the_file_that_transformers_reads(tmp_path, there, read):
    for name in there:
        (tmp_path / name).write_bytes(name.encode())
    wanted = of_files(tmp_path, read or there[0])
    assert sources.sha256(str(tmp_path)) == wanted


def test_transformers_reads_that_file_too(quickstart, tmp_path):
    """Of the two kinds side by side, it takes the one that is hashed."""
    state = load_file(f"{quickstart}/model.safetensors")
    name = "model.encoder.conv1.bias"
    other = {**state, name: state[name] + 1}
    torch.save(other, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").symlink_to(f"{quickstart}/config.json")

    def loaded():
        load = WhisperForConditionalGeneration.from_pretrained
        return load(tmp_path).model.encoder.conv1.bias

    assert torch.equal(loaded(), other[name])
    pickled = of_files(tmp_path, "pytorch_model.bin")
    assert sources.sha256(str(tmp_path)) == pickled
    weights = tmp_path / "model.safetensors"
    weights.symlink_to(f"{quickstart}/model.safetensors")
    assert torch.equal(loaded(), state[name])
    assert sources.sha256(str(tmp_path)) == sources.sha256(quickstart)


def test_a_source_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="has no weights; give a hub"):
        sources.sha256(str(tmp_path))
