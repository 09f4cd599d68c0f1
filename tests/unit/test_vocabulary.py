"""New tokens: lossless in both modes, old ids in place, learned once a run."""

import json
import random
import unicodedata

import conftest
import pytest
from local import dataio, pieces, vocabulary
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    WhisperFeatureExtractor,
    WhisperProcessor,
    WhisperTokenizer,
)

N_ROWS = 51865  # of the embedding matrix
N_TOKENS = 60
END = 50257
MODES = vocabulary.NEW_TOKENS[1:]
STEMS = "먹었 갔었 그렇 괜찮 뚫렸 읽혔 쫓겼 앉아있 핥았 꿰맸".split()
ENDINGS = "습니다 지만요 는데요 거든요 을까요 더라고요 잖아요".split()
WORDS = [stem + ending for stem in STEMS for ending in ENDINGS]
SYLLABLES = [chr(code) for code in range(ord("가"), ord("힣") + 1)]
OTHER = "abcXYZ0189.,?!%$'\"()-~/@#é漢字あカабвдภาשא😀👩‍👩‍👧‍👦❤️ㄱㅏㅋㅠ가각½ "


def sentences(n, seed):
    """Lines of the small language above."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(n)]


def mixtures(n, seed):
    """Lines of anything, NFC, many of them with the small language's words."""
    rng = random.Random(seed)
    kinds = [
        lambda: rng.choice(WORDS),
        lambda: "".join(rng.choices(SYLLABLES, k=rng.randint(1, 6))),
        lambda: "".join(rng.choices(OTHER, k=rng.randint(1, 6))),
        lambda: rng.choice(["<|ko|>", "<|0.00|>", "", "\n", "다 ", "요."]),
    ]
    for _ in range(n):
        parts = [rng.choice(kinds)() for _ in range(rng.randint(1, 7))]
        joined = rng.choice(["", " ", "  "]).join(parts)
        yield unicodedata.normalize("NFC", joined)


def ids(tokenizer, lines):
    """Of each line, as the backend encodes it."""
    backend = tokenizer.backend_tokenizer
    return [
        e.ids for e in backend.encode_batch(lines, add_special_tokens=False)
    ]


def model_of(tokenizer):
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"]


def edited(tokenizer, edit):
    """A tokenizer whose JSON is another."""
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    edit(told)
    changed = WhisperTokenizer(
        tokenizer_object=Tokenizer.from_str(json.dumps(told)),
        extra_special_tokens=tokenizer.extra_special_tokens,
        **tokenizer.special_tokens_map,
    )
    changed.set_prefix_tokens(language="ko", task="transcribe")
    return changed


def first_splits(told):
    """Leaves each token one merge, as the files of the hub do."""
    firsts = {"".join(pair): pair for pair in told["model"]["merges"][::-1]}
    told["model"]["merges"] = [*firsts.values()][::-1]


def small(told):
    """Leaves Latin its letters, and no rare token: a tenth, the same ids."""
    model, added = told["model"], told["added_tokens"]
    kept = {
        token: i
        for token, i in model["vocab"].items()
        if len(token) < 2 or (i < 22000 and not token[1:].isascii())
    }
    pairs = [p for p in model["merges"] if {*p, "".join(p)} <= kept.keys()]
    specials = {token["content"]: token["id"] for token in added}
    told["model"] = {**model, "vocab": {**kept, **specials}, "merges": pairs}


@pytest.fixture(scope="module")
def base(tokenizer):
    return edited(tokenizer, small)


@pytest.fixture(scope="module")
def learned(base):
    """Mode to new tokens and the tokenizer that has them."""
    before = base.backend_tokenizer.to_str()
    found = {mode: both_of(base, mode) for mode in MODES}
    assert base.backend_tokenizer.to_str() == before  # it stays
    return found


def both_of(tokenizer, mode):
    texts = sentences(300, seed=0)
    new = vocabulary.learn(texts, tokenizer, mode, N_TOKENS, N_ROWS)
    return new, vocabulary.added_to(tokenizer, new)


@pytest.fixture(params=MODES)
def both(request, learned):
    return learned[request.param]


TEXTS = [
    "괜찮습니다, 그렇지만요.",
    "뷁쀍 힣힢 갃 똠방각하 ㅋㅋㅋ ㅠㅠ",
    "3.5% 1,000원 (A/S) \"네\" #1 @ ~ : 'don't'",
    "👩‍👩‍👧‍👦 😀🇰🇷 ❤️",
    "\u1112\u1161\u11ab\u11a8 \u1100 \u3131\u314f \u115f",
    "漢字 かな русский العربية ไทย עברית",
    " 두  칸\n줄 \t ",
    "먹었습니다" * 100,
    "▁가나 Ġ가나",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_returned_unchanged(both, text):
    _, tokenizer = both
    text = unicodedata.normalize("NFC", text)
    assert tokenizer.decode(dataio.encode(text, tokenizer)) == text


def test_names_of_tokens_are_text_as_before(both):
    _, tokenizer = both
    text = "<|ko|> 먹었습니다 <|notimestamps|><|endoftext|>"
    found = dataio.encode(text, tokenizer)
    assert tokenizer.decode(found) == text
    assert not set(found) & set(range(END, N_ROWS))


def failures(tokenizer, before, new, lines):
    """Lines that are not returned, or changed without any new id."""
    after, old = ids(tokenizer, lines), ids(before, lines)
    texts = tokenizer.batch_decode(after)
    made = {*new.ids}
    n_new = sum(not made.isdisjoint(row) for row in after)
    lost = sum(a != b for a, b in zip(texts, lines))
    rows = zip(after, old)
    changed = sum(a != b for a, b in rows if made.isdisjoint(a))
    return lost, changed, n_new


def test_thousands_of_lines(learned, base):
    lines = [line for line in mixtures(2000, seed=1) if "<|" not in line]
    new, extended = learned["extend"]
    lost, changed, n_new = failures(extended, base, new, lines)
    assert lost == changed == 0
    assert 300 < n_new < len(lines) - 300
    new, replaced = learned["replace"]
    assert failures(replaced, base, new, lines)[0] == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_tokenizer_as_the_hub_has_it(base, mode):
    hub = edited(base, first_splits)
    assert len(model_of(hub)["merges"]) < len(model_of(base)["merges"]) - 1000
    new, after = both_of(hub, mode)
    lines = [line for line in mixtures(500, seed=4) if "<|" not in line]
    lost, changed, n_new = failures(after, hub, new, lines)
    assert lost == 0 < n_new
    assert mode == "replace" or changed == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_merges", [98783, 50000])
def test_a_hundred_thousand_lines(tokenizer, n_merges, mode):
    if n_merges == 50000:
        tokenizer = edited(tokenizer, first_splits)
    assert len(model_of(tokenizer)["merges"]) == n_merges
    lines = {*SYLLABLES, *mixtures(170_000, seed=2)}
    lines = sorted(line for line in lines if "<|" not in line)
    assert len(lines) >= 100_000
    new, after = both_of(tokenizer, mode)
    lost, changed, n_new = failures(after, tokenizer, new, lines)
    assert lost == 0
    assert mode == "replace" or changed == 0
    assert 10_000 < n_new < len(lines) - 10_000


def test_new_ids_stand_where_the_mode_says(learned, base):
    new, after = learned["extend"]
    assert new.ids == list(range(N_ROWS, N_ROWS + N_TOKENS))
    assert max(after.get_vocab().values()) == N_ROWS + N_TOKENS - 1
    new, after = learned["replace"]
    assert len({*new.ids}) == N_TOKENS
    assert max(new.ids) < END
    assert {*after.get_vocab().values()} == {*base.get_vocab().values()}
    gone = "".join(base.batch_decode([[i] for i in new.ids])).replace(" ", "")
    assert {unicodedata.category(c)[0] for c in gone} <= {"L", "M"}
    scripts = {unicodedata.name(c).split()[0] for c in gone}
    assert not scripts & {"HANGUL", "LATIN", "CJK", "GREEK", "COMBINING"}


def test_old_ids_keep_their_tokens(both, base):
    new, after = both
    vocab = after.get_vocab()
    old = {t: i for t, i in base.get_vocab().items() if i not in new.ids}
    assert old.items() <= vocab.items()
    made = {"".join(pair): i for pair, i in zip(new.merges, new.ids)}
    assert vocab.items() - old.items() == made.items()
    assert after.all_special_ids == base.all_special_ids
    assert after.prefix_tokens == conftest.PREFIX


def test_no_merge_makes_or_needs_what_is_gone(both):
    model = model_of(both[1])
    for left, right in model["merges"]:
        assert {left, right, left + right} <= model["vocab"].keys()
    assert model["merges"][-N_TOKENS:] == both[0].merges


def test_learning_is_the_same_each_time(learned, base):
    again = sentences(300, seed=0)
    found = vocabulary.learn(again, base, "extend", N_TOKENS, N_ROWS)
    assert found == learned["extend"][0]
    assert found.merges == learned["replace"][0].merges


def test_rare_words_of_a_large_text_are_left_out(base, monkeypatch):
    monkeypatch.setattr(pieces, "N_WORDS", 2)
    texts = ["드문", "가끔 가끔 가끔", "자주 자주 자주 자주", "abc abc abc"]
    found = pieces._words(texts, base.backend_tokenizer.pre_tokenizer)
    assert found == {" 자주": 3, " 가끔": 2}


def test_every_merge_is_used_on_the_texts(learned, base):
    new, after = learned["extend"]
    words = pieces._words(
        sentences(300, seed=0), base.backend_tokenizer.pre_tokenizer
    )
    merges = [tuple(pair) for pair in new.merges]
    assert pieces._most_used(merges, words, base, N_TOKENS) == merges
    rare = pieces._most_used(merges, {"가": 1}, base, N_TOKENS)
    assert rare == []


def test_held_out_texts_take_fewer_tokens(both, base):
    held_out = sentences(50, seed=9)
    before = vocabulary.tokens_per_syllable(held_out, base)
    assert vocabulary.tokens_per_syllable(held_out, both[1]) < 0.8 * before


@pytest.mark.parametrize(
    "texts, expected",
    [(["안녕"], 1.0), (["안녕", "abc"], 1.0), (["안녕."], 1.5), ([], None)],
)
def test_tokens_per_syllable(tokenizer, texts, expected):
    found = vocabulary.tokens_per_syllable(texts, tokenizer)
    assert found != found if expected is None else found == expected


def test_old_parts_spell_the_new_tokens(both, base):
    new, after = both
    parts = vocabulary.old_parts(base, new)
    assert [*parts] == new.ids
    assert not {*new.ids} & {i for row in parts.values() for i in row}
    assert min(map(len, parts.values())) > 1
    for i, row in parts.items():
        spelled = "".join(base.convert_ids_to_tokens(row))
        assert after.convert_ids_to_tokens(i) == spelled


@pytest.mark.parametrize(
    "mode, kind",
    [
        ("extend", WhisperTokenizer),
        ("replace", AutoTokenizer),
        pytest.param("extend", WhisperProcessor, marks=pytest.mark.slow),
        pytest.param("replace", WhisperProcessor, marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_loads_in_transformers(learned, mode, kind, tmp_path):
    _, tokenizer = learned[mode]
    tokenizer.save_pretrained(tmp_path)
    WhisperFeatureExtractor().save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    loaded = loaded.tokenizer if kind is WhisperProcessor else loaded
    assert type(loaded) is WhisperTokenizer
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.all_special_ids == tokenizer.all_special_ids
    lines = [*TEXTS, *sentences(50, seed=3)]
    assert ids(loaded, lines) == ids(tokenizer, lines)


def without_timestamps(told):
    told["added_tokens"] = [t for t in told["added_tokens"] if t["id"] < 50364]
    vocab = told["model"]["vocab"]
    told["model"]["vocab"] = {t: i for t, i in vocab.items() if i < 50364}


def test_an_older_tokenizer_gets_its_timestamps(base, learned):
    old = edited(base, without_timestamps)
    assert "<|0.00|>" not in old.get_vocab()
    after = vocabulary.added_to(old, learned["extend"][0])
    assert after.get_vocab() == learned["extend"][1].get_vocab()
    assert ids(after, ["<|0.02|>먹"])[0][0] == 50365


def test_what_can_be_replaced(base, learned, monkeypatch):
    keep = {*learned["replace"][0].ids[:5]}
    found = pieces.replaceable(base, N_TOKENS, keep)
    assert len({*found}) == N_TOKENS
    assert not keep & {*found}
    monkeypatch.setattr(pieces, "FOREIGN", {"THAI", "TAMIL"})
    with pytest.raises(ValueError, match=r"finds \d\d tokens of foreign"):
        pieces.replaceable(base, 100, keep)


@pytest.mark.parametrize("texts", [[], ["abc 123"], [""], ["먹었습니다"]])
def test_texts_that_yield_nothing_are_refused(base, texts):
    with pytest.raises(ValueError, match="no Hangul piece"):
        vocabulary.learn(texts, base, "extend", 10, N_ROWS)


def test_fewer_than_asked_for_are_told(base, monkeypatch):
    warned = conftest.logged(monkeypatch, vocabulary.logger, "warning")
    found = vocabulary.learn(["괜찮습니다"] * 2, base, "extend", 500, N_ROWS)
    assert 0 < len(found.ids) < 20
    assert warned == [f"n_new_tokens=500: only {len(found.ids)} occur twice"]


def test_an_unknown_mode_is_refused(base):
    with pytest.raises(ValueError, match="choose none, extend, replace"):
        vocabulary.learn([], base, "add", 10, N_ROWS)


def test_ids_of_another_model_are_refused(base, learned):
    new = learned["extend"][0]
    taken = [*range(N_ROWS - 1, N_ROWS - 1 + N_TOKENS)]
    for other in (new._replace(ids=taken), new._replace(mode="replace")):
        with pytest.raises(ValueError, match="belong to another whisper_hub"):
            vocabulary.added_to(base, other)


GOOD = {"mode": "extend", "merges": [["a", "b"], ["ab", "c"]], "ids": [7, 8]}


def test_new_tokens_are_stored_as_json():
    found = vocabulary.from_json(json.loads(json.dumps(GOOD)))
    assert found._asdict() == GOOD
    assert vocabulary.from_json(None) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"mode": "none"},
        {"mode": ["extend"]},
        {"merges": [["a", "b"]]},
        {"merges": [["a", "b"], ["ab"]]},
        {"merges": [["a", "b"], ["a", "b"]]},
        {"merges": None},
        {"merges": [], "ids": []},
        {"merges": [[1, 2], ["a", "b"]]},
        {"ids": [7, 7]},
        {"ids": [7, -1]},
        {"ids": [7, "8"]},
        {"ids": [7, [8]]},
    ],
)
def test_damaged_tokens_are_refused(damage):
    with pytest.raises(ValueError, match="damaged"):
        vocabulary.from_json({**GOOD, **damage})
    with pytest.raises(ValueError, match="damaged"):
        vocabulary.from_json([])
