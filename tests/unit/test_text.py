"""The Korean text rules, as tables: one row a rule."""

import unicodedata

import pytest
from hypothesis import (
    given,
    strategies as st,
)
from local import text

NFD = unicodedata.normalize("NFD", "한국어 닭볶음 값")
EXAMPLE = (
    "b/ (70%)/(칠 십 퍼센트) 확률이라니 아/ (뭐+ 뭔)/(모+ 몬) "
    "(100%)(백 프로)가 왜 안돼? n/"
)

# Syllables, jamo alone, decomposed text, markup, invisible characters.
korean = st.text(
    st.sampled_from(
        "가각힣뭐ㅋㅏ\u1112\u1161\u11ab()/+*[]bnOu "
        "3.5,:~-\"'’”%&@#ＡＢ！\u200b\u200d\u3164\u3000\t\n\u0301JA"
    )
    | st.characters()
)


@pytest.mark.parametrize(
    "given_text, expected",
    [
        (NFD, "한국어 닭볶음 값"),
        ("  가 \t나\r\n다\u3000라\u00a0마 ", "가 나 다 라 마"),
        ("가\u200b나", "가 나"),
        ("가\u3164나", "가 나"),
        ("\ufeff가\u200d나\u00ad다", "가나다"),
        ("가\x00나\x1f다", "가 나 다"),
        ("가\ud800나", "가나"),
        ('ㅋㅋ 3.5% "네"! ＯＫ A/S', 'ㅋㅋ 3.5% "네"! ＯＫ A/S'),
        ("", ""),
        (" \u200b\n", ""),
    ],
)
def test_for_label(given_text, expected):
    assert text.for_label(given_text) == expected


@pytest.mark.parametrize(
    "given_text, expected",
    [
        (NFD, "한국어 닭볶음 값"),
        ("３시，ＯＫ", "3시 ok"),
        ("ㅋㅋ", "ㅋㅋ"),
        ("네, 그래요?! 아…", "네 그래요 아"),
        ("가.나", "가 나"),
        ("A/S", "a s"),
        ("e-mail", "e mail"),
        ("*별표*", "별표"),
        ("3.5 1,000원 10:30", "3.5 1,000원 10:30"),
        ("1/2 3~4 010-12", "1/2 3~4 010-12"),
        ("3. 5 3...5 3.가 (3)4", "3 5 3 5 3 가 3 4"),
        ("2024.", "2024"),
        ("don't don’t 90's", "dont dont 90s"),
        ('"네"라고 “네.”라고 『토지』를', "네라고 네라고 토지를"),
        ('"네" "아니"', "네 아니"),
        ('"네""아니"', "네 아니"),
        ("서울(수도)은", "서울 수도 은"),
        ("3.5% R&B @ #1", "3.5% r&b @ #1"),
        ("％", "%"),
        ("25℃ $3 ₩5 1+1=2", "25℃ $3 ₩5 1+1=2"),
        ("네~ ^^ 한ㆍ중 한·중", "네 한 중 한 중"),
        ("J\u030c Ａ\u0301", "ǰ á"),
        ("...", ""),
    ],
)
def test_for_scoring(given_text, expected):
    assert text.for_scoring(given_text) == expected


def test_without_spaces():
    assert text.without_spaces(" 가고 싶어\t요\n") == "가고싶어요"


@pytest.mark.parametrize(
    "raw, spelling, pronunciation",
    [
        (
            EXAMPLE,
            "70% 확률이라니 아 뭐 뭔 100%가 왜 안돼?",
            "칠 십 퍼센트 확률이라니 아 모 몬 백 프로가 왜 안돼?",
        ),
        ("(3시)/(세 시)에", "3시에", "세 시에"),
        ("(3시) /(세 시)에", "3시에", "세 시에"),
        ("(3시)/ (세 시)에", "3시에", "세 시에"),
        ("(3시) / (세 시)에", "3시에", "세 시에"),
        ("(3시)(세 시)에", "3시에", "세 시에"),
        ("( 3시 )/( 세 시 )에", "3시에", "세 시에"),
        ("(3.5)/(삼 점 오) 1.5", "3.5 1.5", "삼 점 오 1.5"),
        ("()/(뭐) (뭐)/()", "뭐 뭐", "뭐 뭐"),
        ("(b/ 그)/(그) 네", "그 네", "그 네"),
        ("(tv/)/(티비)", "tv", "티비"),
        ("(A/S)/(에이 에스)", "A/S", "에이 에스"),
        ("((가)/(나))", "(가)", "(나)"),
        ("((가)/(나))/(다)", "(가)/(다)", "(나)/(다)"),
        ("(가)/(나)/(다)", "가/(다)", "나/(다)"),
    ],
)
def test_ksponspeech_pairs(raw, spelling, pronunciation):
    assert text.ksponspeech(raw, "spelling") == spelling
    assert text.ksponspeech(raw, "pronunciation") == pronunciation


@pytest.mark.parametrize(
    "raw, expected, left",
    [
        ("그거 (진짜 좋아", "그거 (진짜 좋아", "("),
        ("그거 진짜) 좋아", "그거 진짜) 좋아", ")"),
        ("그거 (진짜) 좋아", "그거 (진짜) 좋아", "()"),
        ("(웃음) (네)", "(웃음) (네)", "()()"),
        ("가/(다)", "가/(다)", "/()"),
        (")(/)(", ")(/)(", ")(/)("),
        ("(tv/)", "(tv)", "()"),
        ("(b/ 네)", "( 네)", "()"),
        ("b/ 네 l/ o/ n/ u/", "네", ""),
        ("B/ 네 O/ N/", "네", ""),
        ("b/n/ 네 n/.", "네 .", ""),
        ("email/ N/A o/x A/S", "email N/A o/x A/S", ""),
        ("b/네", "b/네", "/"),
        ("그래n/", "그래n/", "/"),
        # No tag letter is left behind without its slash.
        ("네.n/ 그래?b/ 응", "네.n/ 그래?b/ 응", "//"),
        ("(칠십)/(칠십)b/ 네", "칠십b/ 네", "/"),
        ("*n/ 네 n/+", "* 네 +", "*+"),
        ("（칠십）／（칠십） 네", "칠십 네", ""),
        ("아/ 음/, 어?/ 네", "아 음, 어? 네", ""),
        ("아 / 네", "아 / 네", "/"),
        ("뭐+ 뭔 그+, 네+", "뭐 뭔 그, 네", ""),
        ("그+그거", "그 그거", ""),
        ("뭐+/ 뭐*+ 네", "뭐 뭐 네", ""),
        ("1+1 A+ C++", "1+1 A+ C++", ""),
        ("3+ 4", "3+ 4", "+"),
        ("*저기 그거* *뭐*", "저기 그거 뭐", ""),
        ("2*3", "2*3", "*"),
        ("3.5 1,000 왜? 네, 아.", "3.5 1,000 왜? 네, 아.", ""),
        ("[12] 네", "[12] 네", "[]"),
        ("  네\t네 \n", "네 네", ""),
        ("", "", ""),
    ],
)
def test_ksponspeech_marks_and_leftovers(raw, expected, left):
    for form in text.FORMS:
        assert text.ksponspeech(raw, form) == expected
    assert text.leftovers(expected) == left


def test_unknown_form_is_named_with_the_choices():
    with pytest.raises(ValueError, match="'both'.*spelling or pronunciation"):
        text.ksponspeech("네", "both")


@pytest.mark.parametrize("rule", [text.for_label, text.for_scoring])
@given(any_text=korean)
def test_a_rule_twice_is_the_rule_once(rule, any_text):
    once = rule(any_text)
    assert rule(once) == once


@pytest.mark.parametrize("rule", [text.for_label, text.for_scoring])
@given(any_text=korean)
def test_decomposed_input_changes_nothing(rule, any_text):
    decomposed = unicodedata.normalize("NFD", any_text)
    composed = unicodedata.normalize("NFC", any_text)
    assert rule(decomposed) == rule(composed)


@pytest.mark.parametrize("rule", [text.for_label, text.for_scoring])
@given(any_text=st.text(st.sampled_from("가각힣뭐ㅋㅏ３ａ.!( )\u200b")))
def test_syllables_are_never_decomposed(rule, any_text):
    result = rule(any_text)
    assert not any("\u1100" <= c <= "\u11ff" for c in result)
    assert _syllables(result) == _syllables(any_text)


@given(any_text=korean)
def test_labels_lose_no_letter_and_no_punctuation(any_text):
    result = text.for_label(any_text)
    assert _seen(result) == _seen(unicodedata.normalize("NFC", any_text))


@given(any_text=korean, form=st.sampled_from(text.FORMS))
def test_ksponspeech_reads_any_text(any_text, form):
    result = text.ksponspeech(any_text, form)
    assert result == text.for_label(result)


@given(any_text=korean, form=st.sampled_from(text.FORMS))
def test_ksponspeech_leaves_text_without_markup(any_text, form):
    plain = any_text.translate(dict.fromkeys(map(ord, "()/+*[]（）／")))
    assert text.ksponspeech(plain, form) == text.for_label(plain)


@given(any_text=korean, form=st.sampled_from(text.FORMS))
def test_a_lone_parenthesis_deletes_no_syllable(any_text, form):
    plain = any_text.replace(")", "")
    result = text.ksponspeech(plain, form)
    assert _syllables(result) == _syllables(text.for_label(plain))


def _syllables(any_text):
    return [c for c in any_text if "가" <= c <= "힣"]


def _seen(any_text):
    """Letters and punctuation, decomposed so that only loss shows."""
    decomposed = unicodedata.normalize("NFD", any_text)
    blank = "\u3164\uffa0"
    return sorted(
        c
        for c in decomposed
        if unicodedata.category(c)[0] in "LPNSM" and c not in blank
    )
