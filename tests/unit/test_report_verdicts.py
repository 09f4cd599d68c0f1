"""What a report says first: each model's score, its twins and its faults."""

import json
import re

import pytest
from local.report import figures, page, verdicts

LOOP = "booty " * 40


def result(model, cer, test_set="test", analysis=None, texts=(), **scores):
    """Of a set of 150 clips; a text for each clip that is listed."""
    named = {"model": model, "test_set": test_set}
    scores = {"CER": cer, "n_utterances": 150} | scores
    heard = [{"id": str(i), "hypothesis": t} for i, t in enumerate(texts)]
    named |= {"scores": scores, "analysis": analysis}
    return named | {"utterances": heard}


def pair(difference, low, high, test_set="test", **values):
    names = {"test_set": test_set, "model_a": "base", "model_b": "tuned"}
    found = {"difference": difference, "low": low, "high": high}
    return {**names, "CER": found, **values}


def told(results=(), **evaluation):
    """Model, sentences and warnings of each verdict."""
    found = verdicts.verdicts({"results": list(results), **evaluation})
    return {
        one["model"]: (" ".join(one["sentences"]), one["warnings"])
        for one in found
    }


@pytest.fixture
def write(tmp_path):
    """Writes a report; its text without elements, script and style."""

    def written(results=(), **evaluation):
        path = tmp_path / "report.html"
        page.write(path, {"results": list(results), **evaluation}, "none")
        source = path.read_text(encoding="utf-8")
        return source, re.sub("<[^>]+>", "", source.split("<script")[0])

    return written


# Scores


@pytest.mark.parametrize(
    "paired, sentence",
    [
        ([], "CER 3.14 % [1.96, 4.41] on test."),
        (
            [pair(-969.15, -1018.1, -917.9)],
            "CER 3.14 % [1.96, 4.41] on test, 969.15 points below base "
            "(the interval excludes 0).",
        ),
        (
            [pair(0.12, -0.4, 0.6)],
            "CER 3.14 % [1.96, 4.41] on test, 0.12 points above base "
            "(not told apart: the interval includes 0).",
        ),
        (
            [pair(0.0, 0.0, 0.0)],
            "CER 3.14 % [1.96, 4.41] on test, as base "
            "(not told apart: the interval includes 0).",
        ),
        (
            [pair(-2.0, -3.0, -1.0, n_utterances=4)],
            "CER 3.14 % [1.96, 4.41] on test, 2.00 points below base "
            "(too few clips to tell).",
        ),
        (
            [pair(-2.0, -3.0, -1.0, test_set="other")],
            "CER 3.14 % [1.96, 4.41] on test.",
        ),
    ],
)
def test_a_model_is_told_in_a_sentence(paired, sentence):
    limits = {"intervals": {"CER": [1.96, 4.41]}}
    found = told([result("tuned", 3.143, analysis=limits)], paired=paired)
    assert found == {"tuned": (sentence, [])}


def test_of_few_clips_no_interval_is_told():
    limits = {"intervals": {"CER": [1.0, 2.0]}}
    few = result("m", 1.5, analysis=limits, n_utterances=4)
    assert told([few])["m"][0] == "CER 1.50 % on test."


def test_of_many_sets_the_first_are_told():
    found = told([result("m", n, test_set=f"t{n}") for n in range(5)])
    assert found["m"][0] == (
        "CER 0.00 % on t0; 1.00 % on t1; 2.00 % on t2; 2 more test sets below."
    )


@pytest.mark.parametrize("cer", [None, float("nan"), float("inf")])
def test_where_nothing_was_scored_nothing_is_told(cer):
    assert told([result("m", cer)]) == {}
    assert verdicts.verdicts({}) == []


# Models that write the same


@pytest.mark.parametrize(
    "base, tuned, sentence",
    [
        (["가", "나"], ["가", "나"], "It writes the same texts as base."),
        (["가", "나"], ["가", "다"], ""),
        (["가", "나"], ["가"], ""),
        (["가", None], ["가", ""], "It writes the same texts as base."),
        (["", ""], ["", ""], ""),
        ([], [], ""),
    ],
)
def test_models_of_the_same_texts_are_named(base, tuned, sentence):
    found = told(
        [result("base", 1, texts=base), result("tuned", 1, texts=tuned)]
    )
    assert found["tuned"][0].removeprefix("CER 1.00 % on test.").strip() == (
        sentence
    )
    assert "same" not in found["base"][0]


def test_texts_that_are_the_same_on_one_set_alone():
    results = [
        result(model, 1, test_set=name, texts=[text])
        for model, text in (("a", "가"), ("b", "나"))
        for name, text in (("x", "가"), ("y", text))
    ]
    assert told(results)["b"][0].endswith("It writes the same texts as a on x.")


# Warnings


@pytest.mark.parametrize("name", list(verdicts.FAULTS))
@pytest.mark.parametrize("rate, warned", [(5.0, 0), (5.1, 1), (None, 0)])
def test_a_frequent_fault_is_a_warning(name, rate, warned):
    found = told([result("m", 1, analysis={name: {"rate": rate}})])
    words = f"{verdicts.FAULTS[name]} 5.1 % of the clips of test."
    assert found["m"][1] == [(words, "edits")] * warned


@pytest.mark.parametrize("share, warned", [(10.0, 0), (13.3, 1), (None, 0)])
def test_text_where_nobody_speaks_is_a_warning(share, warned):
    probe = {"model": "m", "n_clips": 30, "with_text": share}
    probes = [
        probe | {"kind": "silence", "texts": [["가", 3], ["나", 1]]},
        probe | {"kind": "noise", "texts": [["나", 4]]},
        probe | {"kind": "music", "with_text": 0.0, "texts": []},
    ]
    words = "writes text for 4 of 30 clips of silence, 4 of 30 clips of noise"
    warning = (f"{words}, most often “나”.", "probes")
    found = told([result("m", 1)], probes=probes)
    assert found["m"][1] == [warning] * warned


def test_the_same_warnings_are_told_once():
    fault = {"repetition": {"rate": 50.0}}
    results = [result(name, 1, analysis=fault) for name in "ab"]
    assert told(results)["b"][1] == [("has the same warnings as a.", "edits")]
    clean = [result(name, 1) for name in "ab"]
    assert told(clean)["b"][1] == []


# The page


def test_failed_clips_are_told_above_the_table(write):
    failed = result("tuned", 50.0, n_failed=80)
    source, text = write([result("base", 9.0, n_failed=0), failed])
    words = "tuned: 80 of 150 clips of test failed and count as empty."
    assert text.count("failed and count as empty") == 1 and words in text
    assert text.index(words) < text.index("Real-time factor")
    assert '<td class="n warned" data-name="Failed clips">80<' in source
    assert '<td class="n" data-name="Failed clips">0<' in source
    assert 'href="#set=test&amp;model=tuned&amp;flag=failed"' in source


def test_warnings_link_to_parts_of_the_page(write):
    probe = {"model": "m", "kind": "noise", "n_clips": 2, "with_text": 100.0}
    fault = {"repetition": {"rate": 50.0}}
    source, _ = write([result("m", 1, analysis=fault)], probes=[probe])
    for part in ("edits", "probes"):
        assert f'<a href="#{part}">See ' in source
        assert f'<section id="{part}">' in source


def test_a_long_invented_text_is_cut_and_whole_in_its_details(write):
    probe = {"model": "m", "kind": "noise", "n_clips": 2, "with_text": 50.0}
    source, _ = write(probes=[probe | {"texts": [[LOOP, 1], ["가", 1]]}])
    cut = figures.short(LOOP)
    assert len(cut) <= 60 and cut.endswith("…")
    assert f"<summary>{cut} " in source and f"</summary>{LOOP}<" in source
    assert source.count('<details class="long">') == 1
    assert f"most often “{cut}”" in source


@pytest.mark.parametrize("n, is_cut", [(60, False), (61, True)])
def test_a_text_is_cut_at_60_characters(n, is_cut):
    assert (figures.short("가" * n) != "가" * n) == is_cut


@pytest.mark.parametrize(
    "rates, end",
    [
        ([(972.3, (921.7, 1021.2)), (3.1, (2.0, 4.4))], 6),
        ([(972.3, (921.7, 1021.2)), (99.0, (80.0, 120.0))], 100),
        ([(972.3, None)], 100),
        ([(None, None), (3.1, None)], 4),
    ],
)
def test_a_model_off_the_scale_does_not_squeeze_the_others(rates, end):
    lines = [{"CER": cer, "limits": limits} for cer, limits in rates]
    assert page._axis(lines).end == end


def test_an_interval_beyond_the_axis_is_an_arrow_alone():
    axis = page._axis([{"CER": 3.0, "limits": (2.0, 4.0)}])
    beyond = axis.whisker(972.3, (921.7, 1021.2), 0)
    assert page.plots.BEYOND in beyond and 'class="range"' not in beyond


@pytest.mark.parametrize(
    "results, preset",
    [
        ([], ""),
        ([result("a", 1, texts=["가"]), result("b", 1, texts=["나"])], "b"),
        ([result("a", 1, texts=["가"]), result("b", 1)], "a"),
    ],
)
def test_the_table_begins_with_the_last_models_rows(write, results, preset):
    source, _ = write(results)
    data = re.search(r'id="data">(.*?)</script>', source)[1]
    assert json.loads(data)["preset"] == preset
