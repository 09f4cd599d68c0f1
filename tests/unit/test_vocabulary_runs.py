"""New tokens of a run: learned at its first start, the same at the next."""

import json
import shutil
from types import SimpleNamespace

import conftest
import pytest
from local import sources, vocabulary
from test_vocabulary import edited, small
from transformers import WhisperTokenizer

TRAIN = ["괜찮습니다 먹었습니다"] * 9 + ["갔었지만요"] * 5
HELD_OUT = ["괜찮습니다", "abc"]
TEXT = "뚫렸거든요\n" * 5
MODE = ("replace", 12)


@pytest.fixture(scope="module")
def base(tokenizer):
    return edited(tokenizer, small)


@pytest.fixture
def told(monkeypatch):
    """What is logged; the number of rows is not asked of a source."""
    config = SimpleNamespace(vocab_size=51865)
    monkeypatch.setattr(sources, "load_config", lambda _: config)
    return conftest.logged(monkeypatch, vocabulary.logger, "info")


def manifest(path, labels):
    rows = [f"{n},1.0,{n}.wav,,{label}\n" for n, label in enumerate(labels)]
    path.write_text(
        "ID,duration,wav,spk_id,wrd\n" + "".join(rows), encoding="utf-8"
    )
    return path


@pytest.fixture
def start(tmp_path, base, told):
    """Starts a run in ``tmp_path``; its tokens."""
    manifest(tmp_path / "train.csv", TRAIN)
    manifest(tmp_path / "valid.csv", HELD_OUT)
    (tmp_path / "more.txt").write_text(TEXT, encoding="utf-8")

    def start(
        mode=MODE[0],
        n_tokens=MODE[1],
        text_file="",
        tokenizer=base,
        test_only=False,
        **options,
    ):
        return vocabulary.for_run(
            tokenizer,
            tmp_path,
            test_only,
            mode=mode,
            n_tokens=n_tokens,
            text_file=text_file,
            whisper_hub="random:quickstart",
            train_csv="train.csv",
            valid_csv="valid.csv",
            output_folder=str(tmp_path / "out"),
            **{"save_folder": str(tmp_path / "out/save"), **options},
        )

    return start


@pytest.fixture
def once(monkeypatch):
    """Lets tokens be learned no more."""

    def once():
        monkeypatch.setattr(vocabulary, "learn", None)

    return once


def test_none_costs_nothing(tmp_path):
    names = "n_tokens text_file whisper_hub train_csv valid_csv output_folder"
    absent = dict.fromkeys([*names.split(), "save_folder"], tmp_path / "absent")
    given = None, tmp_path / "absent", False
    assert vocabulary.for_run(*given, mode="none", **absent) is None
    assert not [*tmp_path.iterdir()]


def test_a_run_learns_once(start, once, told, tmp_path, base):
    first = start()
    assert first.mode == "replace"
    assert 0 < len(first.ids) <= 12
    once()
    assert start() == first
    assert start(test_only=True) == first
    folder = tmp_path / "out" / "tokenizer"
    stored = json.loads((folder / "new_tokens.json").read_text("utf-8"))
    assert vocabulary.from_json(stored) == first
    after = vocabulary.added_to(base, first)
    loaded = WhisperTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == after.get_vocab()
    rates = [vocabulary.tokens_per_syllable(HELD_OUT, t) for t in (base, after)]
    line = (
        "new tokens: {} by replace; {:.3f} -> {:.3f} tokens a syllable on 2 "
        "held-out texts"
    )
    assert told == [line.format(len(first.ids), *rates)] * 3
    assert rates[1] < rates[0]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["tokenizer"]


def test_another_text_is_learned_anew(start, tmp_path):
    first = start("extend")
    text_file = tmp_path / "more.txt"
    second = start("extend", text_file=str(text_file))
    assert first.merges != second.merges
    text_file.write_text("쫓겼거든요\n" * 6, encoding="utf-8")
    assert start("extend", text_file=str(text_file)) != second
    assert start("extend") == first


def test_another_source_is_learned_anew(start, base):
    first = start("extend")
    other = edited(base, lambda told: None)
    other.add_tokens("<|30.02|>")  # large-v3 has one more than the others
    assert other.get_vocab()["<|30.02|>"] == first.ids[0]
    with pytest.raises(ValueError, match="belong to another whisper_hub"):
        start("extend", tokenizer=other)  # for as many rows as before


def test_checkpoints_keep_their_tokens(start, once, tmp_path):
    first = start()
    (tmp_path / "out/save/CKPT+1").mkdir(parents=True)
    once()
    assert start() == first
    told = r"n_new_tokens \(then 12, now 3\) changed; go on"
    with pytest.raises(ValueError, match=told):
        start(n_tokens=3)
    manifest(tmp_path / "train.csv", TRAIN[1:])
    with pytest.raises(
        ValueError, match="new_tokens .*train.csv and new_tokens_"
    ):
        start("extend")
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "out/save").rename(elsewhere)
    with pytest.raises(
        ValueError, match="train.csv and new_tokens_text .* changed"
    ):
        start(save_folder=str(elsewhere))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"mode": "extend"}', "\udcff"]
)
def test_damaged_tokens_are_told(start, tmp_path, content):
    path = tmp_path / "out/tokenizer/new_tokens.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    for test_only in (False, True):
        with pytest.raises(ValueError, match="is damaged .* remove"):
            start(test_only=test_only)


def test_a_test_needs_its_tokens(start, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="start without --test_only learns"
    ):
        start(test_only=True)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_learned_leaves_nothing(start, tmp_path):
    manifest(tmp_path / "train.csv", ["abc"])
    with pytest.raises(ValueError, match="no Hangul piece"):
        start()
    with pytest.raises(FileNotFoundError, match="more.text is not there"):
        start(text_file=str(tmp_path / "more.text"))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_leaves_what_was_there(
    start, tmp_path, monkeypatch
):
    first = start()

    def full(*_, **__):
        raise Exception("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(WhisperTokenizer, "save_pretrained", full)
        with pytest.raises(OSError, match="cannot write .*; free space there"):
            start(n_tokens=3)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["tokenizer"]
    assert start() == first


def test_suppressed_ids_of_a_source_are_kept(start, monkeypatch, tmp_path):
    free = start().ids
    monkeypatch.setattr(sources, "RANDOM", "other:")
    monkeypatch.setattr(sources, "suppressed", lambda _: free[:3])
    shutil.rmtree(tmp_path / "out")
    assert not {*free[:3]} & {*start().ids}
    monkeypatch.setattr(sources, "suppressed", lambda _: None)
    shutil.rmtree(tmp_path / "out")
    assert start().ids == free
