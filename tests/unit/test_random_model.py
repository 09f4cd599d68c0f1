"""Random models: OpenAI's vocabulary, its sizes, and reproducible weights."""

import os

import pytest
import torch
from local import random_model
from transformers import (
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperModel,
    WhisperTokenizer,
)
from whisper.tokenizer import get_tokenizer

TEXTS = [
    "안녕하세요, 반갑습니다.",
    "뷁쀍 힣힢 갃 낅 똠방각하 ㅋㅋㅋ ㅠㅠ",
    "3.5% 1,000원 (A/S) \"네\" #1 @ ~ : 'don't'",
    "👩‍👩‍👧‍👦 😀🇰🇷 ❤️",
    "한국어",  # decomposed
    "漢字 かな русский  두  칸\n줄",
    " 앞과 뒤 ",
    "가" * 300,
    "",
]


@pytest.fixture(scope="module", params=["quickstart", "large-v3"])
def tokenizers(request):
    """Ours, and OpenAI's own with as many languages."""
    size = random_model.size_named(request.param)
    assert (
        size.n_languages == {"quickstart": 99, "large-v3": 100}[request.param]
    )
    theirs = get_tokenizer(True, num_languages=size.n_languages)
    return random_model.build_tokenizer(size), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_ids_of_text_are_those_of_openai(tokenizers, text):
    ours, theirs = tokenizers
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == text


def test_special_ids_are_those_of_openai(tokenizers):
    ours, theirs = tokenizers
    special = theirs.special_tokens
    assert len(special) > 1600
    assert {t: ours.convert_tokens_to_ids(t) for t in special} == special
    assert len(ours) == theirs.encoding.n_vocab
    assert ours.eos_token_id == ours.pad_token_id == theirs.eot
    ours.set_prefix_tokens(language="ko", task="transcribe")
    assert ours.prefix_tokens == [
        special[f"<|{name}|>"]
        for name in ("startoftranscript", "ko", "transcribe", "notimestamps")
    ]


def test_vocabularies_differ_by_one_language():
    n_tokens = {
        name: len(random_model.build_tokenizer(random_model.SIZES[name]))
        for name in ("large-v2", "large-v3")
    }
    assert n_tokens == {"large-v2": 51865, "large-v3": 51866}


@pytest.mark.parametrize(
    "name, millions",
    [
        ("tiny", 37.76),
        ("base", 72.59),
        ("small", 241.73),
        ("large-v2", 1543.30),
        ("large-v3", 1543.49),
        ("large-v3-turbo", 808.88),
    ],
)
def test_published_sizes(tokenizers, name, millions):
    size = random_model.size_named(name)
    tokenizer = tokenizers[0]
    if len(tokenizer) != 51766 + size.n_languages:
        tokenizer = random_model.build_tokenizer(size)
    with torch.device("meta"):
        model = WhisperModel(random_model.build_config(size, tokenizer))
    n_parameters = sum(p.numel() for p in model.parameters())
    assert n_parameters / 1e6 == pytest.approx(millions, abs=0.006)


def test_the_folder_is_one_of_transformers(quickstart):
    """Nothing of ours is needed to read it, nor a warning given."""
    model, report = WhisperForConditionalGeneration.from_pretrained(
        quickstart, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(
        8.8e6, rel=0.01
    )
    extractor = WhisperFeatureExtractor.from_pretrained(quickstart)
    assert extractor.n_samples == 5 * 16000
    tokenizer = WhisperTokenizer.from_pretrained(quickstart)
    generated = model.generate(
        torch.zeros(1, 80, 500),
        language="ko",
        task="transcribe",
        max_new_tokens=3,
        force_unique_generate_call=True,
    )
    tokenizer.set_prefix_tokens(language="ko", task="transcribe")
    assert generated[0, :4].tolist() == tokenizer.prefix_tokens
    assert tokenizer.encode("뷁", add_special_tokens=False) == [167, 115, 223]


def weights(folder):
    return WhisperModel.from_pretrained(folder).state_dict()


def test_seeds(tmp_path, monkeypatch):
    size = random_model.Size(8, 2, 1, 1, context_s=1)
    monkeypatch.setitem(random_model.SIZES, "mini", size)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    same, again, other = (
        weights(random_model.build_folder("mini", tmp_path / name, seed))
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert torch.equal(torch.rand(3), expected)
    for name, tensor in same.items():
        assert torch.equal(tensor, again[name])
    assert not torch.equal(
        same["encoder.conv1.weight"], other["encoder.conv1.weight"]
    )


def test_a_finished_folder_is_reused_and_a_broken_one_never_seen(
    quickstart, tmp_path, monkeypatch
):
    before = {p.name: p.stat().st_mtime_ns for p in os.scandir(quickstart)}
    random_model.build_folder("quickstart", quickstart, 3)
    after = {p.name: p.stat().st_mtime_ns for p in os.scandir(quickstart)}
    assert after == before

    size = random_model.Size(8, 2, 1, 1, context_s=1)
    monkeypatch.setitem(random_model.SIZES, "mini", size)
    with monkeypatch.context() as broken:
        broken.setattr(WhisperTokenizer, "save_pretrained", _disk_full)
        with pytest.raises(OSError, match="No space left"):
            random_model.build_folder("mini", tmp_path / "mini", 1)
    assert not (tmp_path / "mini").exists()
    random_model.build_folder("mini", tmp_path / "mini", 1)
    assert os.listdir(tmp_path) == ["mini"]


def test_unknown_size():
    with pytest.raises(ValueError, match="no size 'medum'; choose tiny, base"):
        random_model.size_named("medum")


def test_openai_whisper_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install openai-whisper"):
        random_model.build_tokenizer(random_model.SIZES["tiny"])


def _disk_full(*_, **__):
    raise OSError(28, "No space left on device")
