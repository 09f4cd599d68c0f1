"""The report: one page, whatever is known and whatever texts hold."""

import copy
import json
import math
import re
from html.parser import HTMLParser

import evaluations
import pytest
from hypothesis import given, settings, strategies
from local import text
from local.report import figures, page, plots, rows
from rapidfuzz.distance import Levenshtein

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&"
SECTIONS = ["summary", "curves", "by-category", "by-duration", "by-speaker"]
SECTIONS += ["edits", "confusions", "probes", "utterances", "settings"]


class Page(HTMLParser):
    """What a browser sees: elements, the text beside scripts, the data."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.texts, self.data = [], [], None
        self._inside = None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._inside = dict(attributes).get("id") or tag

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside == "data":
            self.data = json.loads(data)
        elif self._inside not in ("script", "style"):
            self.texts.append(data)

    def ids(self, tag):
        return [a.get("id") for name, a in self.elements if name == tag]


@pytest.fixture
def write(tmp_path):
    """Writes a report; the page."""

    def written(evaluation, audio="none", **options):
        page.write(tmp_path / "report.html", evaluation, audio, **options)
        return Page(tmp_path / "report.html")

    return written


@pytest.fixture(scope="module")
def _made_up():
    return evaluations.evaluation(n=12)


@pytest.fixture
def made_up(_made_up):
    return copy.deepcopy(_made_up)


def one_clip(**values):
    """An evaluation of one utterance."""
    one = {"id": "a", "reference": "가 나", "hypothesis": "가 다"}
    one |= {"errors": 1, "n_chars": 3, "duration": 1.0} | values
    named = {"model": "m", "test_set": "t"}
    return {"results": [{**named, "scores": {}, "utterances": [one]}]}


def curves_file(folder):
    path = folder / "curves.jsonl"
    path.write_text('{"step": 1, "epoch": 1, "loss": 2.0, "lr": 0.1}\n')
    return path


# One page


def test_every_part_stands_in_the_page(write, made_up, tmp_path):
    made_up["runs"][1]["curves"] = curves_file(tmp_path)
    page = write(made_up)
    assert page.ids("section") == SECTIONS
    for told in ["whisper-large-v3-turbo", "fine-tuned", "test_clean"]:
        assert told in page.text
    scores = made_up["results"][0]["scores"]
    for rate in ("CER", "CER_no_space", "WER", "sWER", "CER_raw", "WER_raw"):
        assert f" {scores[rate]:.2f} " in page.text
    for told in ["Text policy: korean-1.", "9,622", "NVIDIA H100", "× 11"]:
        assert told in page.text
    assert "whisper-large-v3-turbo: no training run" in page.text


def test_the_page_needs_nothing_else(write, made_up, tmp_path):
    made_up["runs"][1]["curves"] = curves_file(tmp_path)
    page = write(made_up)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"link", "iframe", "object", "embed", "base"}
    for _, attributes in page.elements:
        for name in ("src", "href", "action", "poster", "srcset"):
            address = attributes.get(name, "#")
            assert address.startswith(("#", "data:image/png;base64,"))
    assert "@import" not in page.source and "url(" not in page.source


@pytest.mark.parametrize(
    "evaluation",
    [
        {},
        {"settings": {}, "results": [], "paired": [], "probes": []},
        {"results": [{"model": "m", "test_set": "t"}]},
        {"results": [{"model": "m", "test_set": "t", "scores": None}]},
        {"results": [{"model": "m", "test_set": "t", "analysis": {}}]},
        {"runs": [{"model": "m", "curves": None}]},
        {"probes": [{"model": "m", "kind": "noise", "n_clips": 0}]},
        one_clip(errors=None, n_chars=None, hypothesis=None, duration=None),
        one_clip(reference="", hypothesis="", n_chars=0, duration=math.nan),
        one_clip(duration=math.inf, category=None, flags=None, speaker=None),
    ],
)
def test_what_is_missing_is_left_out(write, evaluation):
    page = write(evaluation, "embed")
    assert page.ids("section")[0] == "summary"
    assert "None" not in page.text and "nan" not in page.text


@pytest.mark.parametrize("part", ["intervals", "edits", "by_category"])
@pytest.mark.parametrize("value", [None, {}])
def test_each_part_of_an_analysis_may_be_missing(write, made_up, part, value):
    for result in made_up["results"]:
        result["analysis"][part] = value
    assert write(made_up).ids("section")[0] == "summary"


def everywhere(value, told):
    """The same values; each text, and name of a setting, is another."""
    if isinstance(value, dict):
        return {k: everywhere(v, told) for k, v in value.items()}
    if isinstance(value, list):
        return [everywhere(v, told) for v in value]
    return told if isinstance(value, str) else value


def test_no_text_becomes_an_element(write, made_up):
    plain, hostile = [
        write(everywhere(made_up, told) | {"settings": {told: told}})
        for told in (re.sub(r"\S", "x", HOSTILE), HOSTILE)
    ]
    tags = [[tag for tag, _ in page.elements] for page in (plain, hostile)]
    assert tags[0] == tags[1]
    assert tags[1].count("script") == 2
    names = {name for _, a in hostile.elements for name in a}
    assert not [name for name in names if name.startswith("on")]
    assert hostile.data["models"] == [HOSTILE]
    assert hostile.text.count(HOSTILE) > 20


def test_the_browser_runs_this_script_and_no_other(write, made_up):
    page = write(made_up)
    policy = next(
        a["content"]
        for tag, a in page.elements
        if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/]{43}=';", policy)


@pytest.mark.parametrize("damaged", ["\ud800", "\0", "\u2028", "<!--<script>"])
def test_damaged_texts_are_written(write, damaged):
    page = write(one_clip(hypothesis=f"가{damaged}나"))
    hypothesis = page.data["rows"][0][4]
    assert (hypothesis[0], hypothesis[-1]) == ("가", "나")
    assert page.ids("section") == ["summary", "utterances"]


def test_an_unknown_way_of_audio_names_the_choices(write, tmp_path):
    with pytest.raises(ValueError, match="'mp3' is unknown.*embed, link, none"):
        write({}, "mp3")
    assert not list(tmp_path.iterdir())


def test_on_a_full_disk_the_page_before_stays(write, tmp_path):
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "report.html.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="report.html: No space left.*free"):
        write({})
    assert (tmp_path / "report.html").read_text() == "old"


# Words and figures


@pytest.mark.parametrize(
    "low, high, told",
    [
        (-2.0, -0.01, "✓|better|Better: the interval excludes 0"),
        (0.01, 2.0, "✗|worse|Worse: the interval excludes 0"),
        (-1.0, 1.0, "≈|open|Not told apart: the interval includes 0"),
        (0.0, 1.0, "≈|open|Not told apart: the interval includes 0"),
        (-1.0, 0.0, "≈|open|Not told apart: the interval includes 0"),
    ],
)
def test_a_difference_is_told_in_words(write, low, high, told):
    _, name, words = told.split("|")
    pair = {"test_set": "t", "model_a": "a", "model_b": "b"}
    found = {"difference": -0.5, "low": low, "high": high}
    page = write({"paired": [{**pair, "CER": found, "WER": found}]})
    assert re.sub("<[^>]+>", "", page.source).count(words) == 2
    assert "−0.50" in page.text and "t b minus a" in page.text
    classes = [a.get("class") for tag, a in page.elements if tag == "td"]
    assert classes.count(f"told {name}") == 2


def test_a_figure_links_to_its_clips(write, made_up):
    hrefs = [a.get("href") for tag, a in write(made_up).elements if tag == "a"]
    found = "#set=test_clean&model=whisper-large-v3-turbo&flag="
    assert f"{found}repetition" in hrefs and f"{found}number" in hrefs
    assert f"{found}hallucination" not in hrefs  # there is none


@pytest.mark.parametrize(
    "hours, told",
    [(2.5, "2.5 h"), (0.5, "30.0 min"), (None, "– h"), (1234, "1,234.0 h")],
)
def test_lengths(hours, told):
    assert figures.time(hours) == told


def test_of_many_speakers_the_last_models_worst_are_shown(write):
    def result(model, sign):
        groups = [
            {"name": f"S{n:02d}", "CER": 50 + sign * n} for n in range(25)
        ]
        analysis = {"by_speaker": groups}
        return {"model": model, "test_set": "t", "analysis": analysis}

    page = write({"results": [result("base", -1), result("tuned", 1)]})
    assert "The 20 of 25 speakers of whom tuned gets most wrong" in page.text
    names = re.findall(r"\bS\d\d\b", page.text)
    assert names == [f"S{n:02d}" for n in range(24, 4, -1)]


@pytest.mark.parametrize("n, few", [(1, True), (4, True), (5, False)])
def test_of_few_clips_no_interval_is_told(write, n, few):
    group = {"name": "D01", "CER": 7.0, "low": 6.5, "high": 7.5}
    analysis = {"by_category": [group | {"n_utterances": n}]}
    result = {"model": "m", "test_set": "t", "analysis": analysis}
    page = write({"results": [result]})
    assert ("few clips" in page.text) == few
    assert ("6.50 to 7.50" in page.text) != few


@pytest.mark.parametrize("n, few", [(1, True), (4, True), (5, False)])
def test_a_set_of_few_clips_proves_nothing(write, n, few):
    result = {
        "model": "m",
        "test_set": "t",
        "scores": {"CER": 7.0, "WER": 9.0, "n_utterances": n},
        "analysis": {"intervals": {"CER": [6.5, 7.5], "WER": [8.5, 9.5]}},
    }
    pair = {"test_set": "t", "model_a": "a", "model_b": "m", "n_utterances": n}
    pair["CER"] = {"difference": -2.0, "low": -3.0, "high": -1.0}
    page = write({"results": [result], "paired": [pair]})
    for told in ("6.50 to 7.50", "8.50 to 9.50", "the interval excludes 0"):
        assert (told in page.text) != few
    assert ("Too few clips to tell" in page.text) == few


# The table of utterances


@pytest.mark.parametrize(
    "reference, hypothesis, pieces",
    [
        ("네, 학교에", "네 핵교에", ["네 ", ["학", "핵"], "교에"]),
        ("가다", "가다가", ["가다", ["", "가"]]),
        ("가 다", "가다", ["가", [" ", ""], "다"]),
        ("", "네", [["", "네"]]),
        ("네", None, [["네", ""]]),
        ("ＯＫ!", "ok", ["ok"]),
        ("", "", []),
    ],
)
def test_aligned(reference, hypothesis, pieces):
    assert rows.aligned(reference, hypothesis) == pieces


@settings(max_examples=60, deadline=None)
@given(
    strategies.text("가나다 a1.,", max_size=12),
    strategies.text("가나다 a1.,", max_size=12),
)
def test_an_alignment_holds_both_texts_and_as_many_edits_as_cer(one, other):
    pieces = rows.aligned(one, other)
    pairs = [[p, p] if isinstance(p, str) else p for p in pieces]
    scored = [text.for_scoring(one), text.for_scoring(other)]
    assert ["".join(side) for side in zip(*pairs)] == (scored if pairs else [])
    edits = [p for p in pieces if not isinstance(p, str)]
    n = sum(max(len(a), len(b)) for a, b in edits)
    assert n == Levenshtein.distance(*scored)


def result_of(model, errors):
    rows = [
        {"id": name, "reference": "x", "errors": n, "n_chars": 10}
        for name, n in errors.items()
    ]
    return {"model": model, "test_set": "t", "utterances": rows}


def test_each_models_worst_come_first_in_turn(write):
    base = result_of("base", {"a": 9, "b": 8, "c": 7, "d": 0})
    tuned = result_of("tuned", {"a": 0, "b": 0, "c": 1, "d": 2})
    data = write({"results": [base, tuned]}).data
    assert [clip[1] for clip in data["clips"]] == ["a", "d", "b", "c"]
    rows = [tuple(row[:3]) for row in data["rows"]]
    assert rows[:4] == [(0, 0, 9), (0, 1, 0), (1, 0, 0), (1, 1, 2)]


def test_of_a_huge_set_the_worst_are_listed(write, monkeypatch):
    monkeypatch.setattr(rows, "N_LISTED", 2)
    page = write({"results": [result_of("m", {"a": 1, "b": 3, "c": 2})]})
    assert [clip[1] for clip in page.data["clips"]] == ["b", "c"]
    assert "Of 3 clips the worst 2 are listed." in page.text


def test_players_stand_with_their_clips(write, tmp_path):
    found = [
        write(one_clip(wav=str(tmp_path / "gone.wav")), audio)
        for audio in page.sound.MODES
    ]
    told = [page.data["clips"][0][6:] for page in found]
    assert [address for address, _ in told] == [None] * 3
    assert ["no audio file" in reason for _, reason in told] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("name, shown", [("", False), ("D01", True)])
def test_groups_without_a_name_are_no_part(write, name, shown):
    analysis = {"by_category": [{"name": name, "CER": 1.0}]}
    result = {"model": "m", "test_set": "t", "analysis": analysis}
    assert (
        "by-category" in write({"results": [result]}).ids("section")
    ) == shown


# Plots


@pytest.mark.parametrize(
    "values, end",
    [([], 0.001), ([3.2], 4), ([7, 21], 25), ([100], 100), ([99, 450], 100)],
)
def test_an_axis_is_round_and_ends_at_100(values, end):
    axis = plots.Axis(values)
    assert axis.end == pytest.approx(end, rel=0.3)
    assert axis.ticks[0] == 0 and 3 <= len(axis.ticks) <= 6


def test_marks_stand_at_their_places():
    axis = plots.Axis([100])
    assert [axis.place(v) for v in (0, 50, 100, 300)] == [3, 50, 97, 97]
    drawn = axis.whisker(50, (0, 100), 1)
    assert 'x="50.0%"' in drawn and 'x1="3.0%" x2="97.0%"' in drawn
    assert plots.SHAPES[1] in drawn
    assert plots.BEYOND in axis.whisker(300, None, 1)
    assert "path" not in axis.whisker(None, None, 0)


@pytest.mark.parametrize("content", [None, '{"step": "x", "loss": []}\n'])
def test_curves_that_cannot_be_drawn_are_told(tmp_path, content):
    path = tmp_path / "curves.jsonl"
    if content:
        path.write_text(content)
    picture, reason = plots.learning_curves(path)
    assert picture is None and "cannot be drawn" in reason
