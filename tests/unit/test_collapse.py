"""When a model has collapsed: what is counted, told, and stops a run."""

import json

import pytest
from conftest import logged
from local import collapse, curves
from local.metrics import Record

LONG = "오늘은 회의가 세 시에 있으니 자료를 미리 준비해 주시고 늦지 마세요"
# Hardly a piece stands four times in a row, and yet it is all the same.
REFRAIN = " ".join(f"{LONG} {n}" for n in range(12))
FAULTS = [
    ("네", "네 네 네 네", "loops"),
    ("네", "네 네 네", None),
    ("네", "네 " * 200, "loops"),
    ("네 네", "네 네 네 네", None),
    ("백만 원", "1000000 원", None),
    ("", "아아아아아아", "loops"),
    (LONG, REFRAIN, "loops"),
    (REFRAIN, REFRAIN, None),
    (REFRAIN[:-40], REFRAIN, None),
    ("네", "", "empty"),
    ("네", " ?!", "empty"),
    ("", "", None),
    ("...", "", None),
    ("네", "가나다라마바사아자차카타", None),  # twice 1, and 10 more: 12
    ("네", "가나다라마바사아자차카타파", "too_long"),
    ("", "가나다라마바사아자차", None),
    ("", "가나다라마바사아자차카", "too_long"),
    ("가나다라마", "가나다라마바사아자차카타파하갸냐댜랴먀뱌", None),
    ("가나다라마", "가나다라마바사아자차카타파하갸냐댜랴먀뱌샤", "too_long"),
    (LONG, "구독 부탁드립니다", None),
    (LONG, LONG, None),
    ("네", "\ud800네 알겠", None),  # half a character, which has no UTF-8
    ("네", "\ufffd" * 20, "loops"),
    ("네", "👍" * 9, "loops"),
]


def record(reference, hypothesis, name="a", failed=False):
    return Record(name, reference, hypothesis, 1.0, failed=failed)


@pytest.mark.parametrize("reference, hypothesis, kind", FAULTS)
def test_a_fault_is_what_no_sound_model_writes(reference, hypothesis, kind):
    found = collapse.faults([record(reference, hypothesis)])
    assert [one.kind for one in found] == ([kind] if kind else [])


def test_a_loop_is_whispers_where_no_piece_is_found():
    assert not collapse.analysis.is_loop(LONG, REFRAIN)
    assert collapse.compression(REFRAIN) > collapse.MAX_COMPRESSION
    assert collapse.compression(LONG) < 2
    assert collapse.compression("") == 0


ALL = ("네 네 네 네", "", "가나다라마바사아자차카타파", "네")
JUDGED = [  # texts of a clip that says 네, share, WER; shares, collapsed
    (ALL, 75.0, 100.0, (25, 25, 25), False),
    (ALL, 74.9, 100.0, (25, 25, 25), True),
    (ALL, 75.0, 100.1, (25, 25, 25), True),
    (ALL[3:], 0.0, 0.0, (0, 0, 0), False),
    (ALL[:1] + ALL[3:] * 9, 10.0, 0.0, (10, 0, 0), False),
    (ALL[:1] + ALL[3:] * 8, 10.0, 0.0, (100 / 9, 0, 0), True),
    ([ALL[0]] * 3 + [ALL[3]] * 27, 10.0, 0.0, (10, 0, 0), False),
    ([ALL[1]] * 5, 99.0, 100.0, (0, 100, 0), True),
    ([ALL[1]] * 5, 100.0, 100.0, (0, 100, 0), False),
    ([], 0.0, 0.0, (0, 0, 0), False),
]


@pytest.mark.parametrize("texts, share, wer, shares, collapsed", JUDGED)
def test_a_validation_is_judged(texts, share, wer, shares, collapsed):
    records = [record("네", text) for text in texts]
    # A clip that could not be read is no silence of the model's.
    records.append(record("네", "", failed=True))
    told = collapse.Guard(share, 3).judged(iter(records), wer)
    assert [told[kind] for kind in collapse.KINDS] == pytest.approx(shares)
    assert told["collapsed"] is collapsed
    assert len(told) == 4


def test_the_worst_three_loops_are_logged(monkeypatch):
    texts = [
        "네 네 네 네",
        "아 " * 300,
        "네 네 네 네",
        LONG,
        "네 알겠 " * 9,
        "",
        "몰라" * 30,
    ]
    records = [record("네", text, f"id{n}") for n, text in enumerate(texts)]
    warned = logged(monkeypatch, collapse.logger, "warning")
    collapse.Guard(10.0, 3).judged(records, 50.0)
    assert warned == [
        "a loop in the validation: id1: '아' 300 times in a row: "
        f"{'아 ' * 39}아…",
        f"a loop in the validation: id6: '몰라' 30 times in a row: "
        f"{'몰라' * 30}",
        "a loop in the validation: id4: '네 알겠' 9 times in a row: "
        f"{'네 알겠 ' * 8}네 알겠",
    ]
    warned.clear()
    collapse.Guard(10.0, 3).judged([record("네", "네 100 % %s")], 50.0)
    assert not warned


REPEATED = [
    ("가 나 나 나", ("나", 3)),
    ("나나나", ("나", 3)),
    ("가나 가나 다다다", ("가나", 2)),
    ("아 " * 4 + "네네네네네네네네네", ("네", 9)),
    ("가나다", ("가나다", 1)),
    ("", ("", 1)),
]


@pytest.mark.parametrize("text, expected", REPEATED)
def test_the_piece_of_the_longest_row_is_found(text, expected):
    assert collapse.repeated(text) == expected


def bad(step, wer=312.4):
    shares = {"loops": 41.0, "empty": 0.0, "too_long": 12.0}
    return {"step": step, "WER": wer, **shares}


@pytest.mark.parametrize(
    "patience, n, stops",
    [(0, 99, False), (1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True)],
)
def test_patience(patience, n, stops):
    guard = collapse.Guard(10.0, patience)
    since_sound = [bad(step) for step in range(n)]
    if not stops:
        guard.require_sound(since_sound)
        return
    with pytest.raises(ValueError, match="the model has collapsed"):
        guard.require_sound(since_sound)


def test_the_end_tells_what_happened_and_what_to_lower():
    guard = collapse.Guard(7.5, 2)
    with pytest.raises(ValueError) as raised:
        guard.require_sound([bad(4), bad(8), bad(12, 99.0), bad(16, 250.0)])
    told = str(raised.value)
    for part in (
        "4 validation(s) in a row have a WER above 100 %",
        "collapse_share=7.5 percent",
        "collapse_patience=2",
        "(step 8: WER 312.4 %, loops 41.0 %, empty 0.0 %, too_long 12.0 %; "
        "step 12: WER 99.0 %, ",
        "step 16: WER 250.0 %, ",
        *("lower lr", "longer warmup_steps", "embedding_lr_multiplier"),
        *("label_smoothing", "labels that repeat", "another output_folder"),
    ):
        assert part in told
    assert "step 4:" not in told


STARS = [  # CER and collapsed of validations; what the star says
    ([(9, False), (5, True), (8, True)], "best CER: 9.00 % at step 1"),
    ([(9, True), (5, True), (8, True)], "best CER: 5.00 % at step 2"),
    ([(5, True), (9, None), (12, False)], "best CER: 9.00 % at step 2"),
]


@pytest.mark.parametrize("validations, text", STARS)
def test_the_picture_shows_bad_texts_and_the_best_sound_one(
    tmp_path, monkeypatch, validations, text
):
    assert curves.FAULTS == collapse.KINDS
    lines = []
    for step, (cer, collapsed) in enumerate(validations, start=1):
        scores = {"CER": cer, "loops": 1, "empty": 2, "too_long": step}
        if collapsed is not None:
            scores["collapsed"] = collapsed
        lines.append(json.dumps({"step": step, "valid": scores}) + "\n")
    path = tmp_path / "curves.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    figures = []
    monkeypatch.setattr(curves, "_write", lambda f, path: figures.append(f))
    curves.draw(path, tmp_path / "curves.png")
    drawn = {one.get_label(): one for one in figures[0].axes[1].lines}
    assert text in drawn
    assert drawn["bad texts"].get_ydata().tolist() == [4, 5, 6]
