"""scores.csv and the Markdown table: what stands in which cell."""

import csv

import pytest
from local.report import tables

SCORES = {"CER": 10.0, "CER_no_space": 8.126, "WER": 30.5, "sWER": 20.0}
SCORES |= {"CER_raw": 12.0, "WER_raw": 33.0, "loss": None, "n_utterances": 7}
SCORES |= {"n_reference_chars": 90, "n_failed": 1, "text_policy": "korean-1"}
ANALYSIS = {
    "intervals": {"CER": [9.5, 10.5], "WER": [29.0, 32.0]},
    "repetition": {"rate": 1.5, "ids": ["a"]},
    "hallucination": {"rate": 0.0, "ids": []},
    "numbers": {"n_mixed": 3, "CER_merged": 9.9, "WER_merged": 30.0},
}


def result(model="base", test_set="test", analysis=ANALYSIS, **scores):
    named = {"model": model, "test_set": test_set, "real_time_factor": 0.03}
    return {**named, "scores": {**SCORES, **scores}, "analysis": analysis}


def pair(low, high, wer=(-2.75, -1.25)):
    names = {"test_set": "test", "model_a": "base", "model_b": "tuned"}
    cer = {"difference": -1.0, "low": low, "high": high}
    wer = {"difference": -2.0, "low": wer[0], "high": wer[1]}
    return {**names, "CER": cer, "WER": wer}


def read(path, results):
    """The header, and the lines as dicts."""
    tables.write_csv(path, {"results": results})
    with open(path, encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        return lines.fieldnames, list(lines)


def test_a_line_holds_every_score_with_its_interval_beside_it(tmp_path):
    names, (line,) = read(tmp_path / "a.csv", [result()])
    assert names == (
        "model,test_set,text_policy,CER,CER_low,CER_high,CER_no_space,WER,"
        "WER_low,WER_high,sWER,CER_raw,WER_raw,loss,n_utterances,"
        "n_reference_chars,n_failed,real_time_factor,repetition,"
        "hallucination,numbers,CER_merged,WER_merged"
    ).split(",")
    assert [line[n] for n in ("CER_low", "CER", "CER_high")] == [
        "9.5",
        "10.0",
        "10.5",
    ]
    told = {"loss": "", "n_failed": "1", "text_policy": "korean-1"}
    told |= {"repetition": "1.5", "hallucination": "0.0", "numbers": "3"}
    told |= {"CER_merged": "9.9", "WER_merged": "30.0"}
    assert {name: line[name] for name in told} == told


@pytest.mark.parametrize("analysis", [None, {}, {"intervals": None}])
def test_what_was_not_analysed_is_empty(tmp_path, analysis):
    whole = result(test_set="가 나,다")
    names, lines = read(tmp_path / "a.csv", [result("x", "y", analysis), whole])
    assert "CER_low" in names
    assert (lines[0]["CER_low"], lines[0]["repetition"]) == ("", "")
    assert (lines[1]["test_set"], lines[1]["CER_low"]) == ("가 나,다", "9.5")


def test_nothing_scored_is_a_header(tmp_path):
    assert read(tmp_path / "a.csv", []) == (tables.FIRST, [])


@pytest.mark.parametrize(
    "name, written",
    [("=1+1", "'=1+1"), ("+a", "'+a"), ("-a", "'-a"), ("@a", "'@a")]
    + [("\t=a", "'\t=a"), ("a=1", "a=1"), ("모델", "모델"), ('a"b', 'a"b')],
)
def test_no_name_is_a_formula(tmp_path, name, written):
    _, (line,) = read(tmp_path / "a.csv", [result(name, name)])
    assert (line["model"], line["test_set"]) == (written, written)


def test_a_negative_number_stays_a_number(tmp_path):
    _, (line,) = read(tmp_path / "a.csv", [result(loss=-0.5)])
    assert line["loss"] == "-0.5"


def test_on_a_full_disk_the_table_before_stays(tmp_path):
    (tmp_path / "a.csv").write_text("old")
    (tmp_path / "a.csv.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="a.csv: No space left.*free space"):
        tables.write_csv(tmp_path / "a.csv", {"results": [result()]})
    assert (tmp_path / "a.csv").read_text() == "old"


# Markdown


def test_a_table_to_paste():
    results = [result(), result("tuned", analysis={}, n_failed=0)]
    found = {"results": results, "paired": [pair(-1.5, -0.5)]}
    assert tables.markdown(found).splitlines() == [
        "| Test set | Model | CER | CER_no_space | WER | sWER | "
        "CER difference | WER difference | Failed |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| test | base | 10.00 [9.50, 10.50] | 8.13 | 30.50 [29.00, 32.00] | "
        "20.00 |  |  | 1 |",
        "| test | tuned | 10.00 | 8.13 | 30.50 | 20.00 | "
        "-1.00 [-1.50, -0.50] from base | -2.00 [-2.75, -1.25] from base | 0 |",
        "",
        "In percent, with 95 % intervals in brackets. Text policy: korean-1.",
    ]


@pytest.mark.parametrize("n_failed", [0, None])
def test_where_no_clip_failed_no_column_tells_it(n_failed):
    head, rules, row, *_ = tables.markdown(
        {"results": [result(n_failed=n_failed)]}
    ).splitlines()
    assert head.endswith("| CER difference | WER difference |")
    assert head.count("|") == rules.count("|") == row.count("|")


def test_a_set_of_few_clips_has_no_intervals():
    results = [result(), result("tuned")]
    for one in results:
        one["scores"] = one["scores"] | {"n_utterances": 4}
    few = pair(-1.5, -0.5) | {"n_utterances": 4}
    *_, base, tuned, _, _ = tables.markdown(
        {"results": results, "paired": [few]}
    ).splitlines()
    assert "| 10.00 |" in base and "| 30.50 |" in base
    assert tuned.endswith("| -2.00 (too few clips) from base | 1 |")


@pytest.mark.parametrize(
    "low, high, holds",
    [
        (-2, -1, False),
        (1, 2, False),
        (-1, 1, True),
        (0, 1, True),
        (-1, 0, True),
    ],
)
def test_a_difference_tells_whether_its_interval_holds_0(low, high, holds):
    for one in (pair(low, high), pair(-2, -1, (low, high))):
        found = {"results": [result("tuned")], "paired": [one]}
        assert ("(holds 0)" in tables.markdown(found)) == holds


def test_the_models_of_a_set_stand_beside_each_other():
    pairs = [("a", "y"), ("a", "x"), ("b", "y"), ("b", "x")]
    found = {"results": [result(*pair) for pair in pairs]}
    lines = tables.markdown(found).splitlines()[2:6]
    assert [line[:9] for line in lines] == [
        "| y | a |",
        "| y | b |",
        "| x | a |",
        "| x | b |",
    ]


def test_a_difference_stands_at_its_own_model_and_set():
    found = {"results": [result("other")], "paired": [pair(-2, -1)]}
    assert "from base" not in tables.markdown(found)
    found = {"results": [result("tuned", "b")], "paired": [pair(-2, -1)]}
    assert "from base" not in tables.markdown(found)


@pytest.mark.parametrize(
    "name, cell",
    [
        ("a|b", r"a\|b"),
        ("a\nb", "a b"),
        ("*a*", r"\*a\*"),
        ("<img>", r"\<img>"),
        ("[a](b)", r"\[a\](b)"),
        ("whisper_large", "whisper_large"),
    ],
)
def test_a_name_stays_in_its_cell(name, cell):
    line = tables.markdown({"results": [result(name)]}).splitlines()[2]
    assert line.startswith(f"| test | {cell} | 10.00")


@pytest.mark.parametrize(
    "results, told",
    [
        ([result()], "Text policy: korean-1."),
        ([result(text_policy=None)], "Text policy: of settings."),
        ([], "Text policy: of settings."),
        (
            [result(), result(text_policy="korean-2")],
            "Text policies differ: korean-1, korean-2; do not compare.",
        ),
    ],
)
def test_the_policy_is_named(results, told):
    settings = {"text_policy": "of settings"}
    found = {"results": results, "settings": settings}
    assert tables.policy(found) == told
    assert told in tables.markdown(found)


def test_no_policy_is_told_as_well():
    assert tables.policy({}) == "Text policy: not named."


def test_the_base_beside_adapters_is_told():
    found = {"results": [result()], "settings": {"base of tuned": "int4"}}
    assert " Base of tuned: int4. Text policy" in tables.markdown(found)
