"""The report in a browser: headless Chromium opens it, and its script runs."""

import functools
import html
import re
import shutil
import subprocess
import urllib.parse

import evaluations
import pytest
from local.report.page import write

CHROMIUM = shutil.which("chromium")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-sync"]
OPTIONS += ["--enable-logging=stderr", "--dump-dom"]
HOSTILE = "</script><img src=x onerror=console.error('ran')><b>굵게</b>"
LONG = "가" * 99 + "x" * 99
HUNDREDS = {"CER": 972.29, "CER_no_space": 1001.36, "WER": 1774.27}
HUNDREDS |= {"sWER": 774.27}
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
# A page tells how wide it and its summary are to the one it stands in.
TELL = """<script>
const wide = [document.documentElement, document.querySelector("#summary .box")]
  .map((one) => `${one.scrollWidth} of ${one.clientWidth}`);
parent.postMessage(`${innerWidth}: ${wide.join(", ")}`, "*")</script>"""
FRAMES = """<script>onmessage = (event) => {
  document.body.append(`width ${event.data};`); }</script>
<iframe src="page.html" width="390" height="900"></iframe>
<iframe src="page.html" width="1400" height="900"></iframe>"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium: apt-get install chromium"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def page(folder):
    """A report of 300 hypotheses, one of which is out for trouble."""
    evaluation = evaluations.evaluation(folder / "audio")
    for result in evaluation["results"]:
        trouble = {"hypothesis": HOSTILE, "errors": 50, "wav": "gone.wav"}
        result["utterances"][3] |= trouble | {"speaker": LONG}
    for result in evaluation["results"][::2]:
        result["scores"] |= HUNDREDS
        intervals = {name: [HUNDREDS[name]] * 2 for name in ("CER", "WER")}
        result["analysis"]["intervals"] = intervals
    evaluation["settings"] |= {LONG: LONG}
    path = folder / "report.html"
    write(path, evaluation, n_embedded=20)
    return path


@pytest.fixture(scope="module")
def see(page, folder):
    """What is on a page after its script ran: its whole DOM, as HTML."""

    @functools.lru_cache(maxsize=None)
    def seen(path=page, **asked):
        fragment = urllib.parse.urlencode(asked)
        profile = f"--user-data-dir={folder / 'profile'}"
        command = [CHROMIUM, *OPTIONS, profile, f"{path.as_uri()}#{fragment}"]
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        )
        assert "CONSOLE" not in ran.stderr
        return ran.stdout

    return seen


def rows(dom):
    """The rows of the table of utterances, as HTML."""
    table = dom[dom.index('<table class="utterances"') :]
    body = table[table.index("<tbody") : table.index("</tbody>")]
    return body.split("<tr ")[1:]


def words(part):
    """The text of a piece of HTML."""
    text = html.unescape(re.sub("<[^>]+>", "", part))
    return text.replace("\u200b", "")


def test_a_page_of_the_last_models_rows_worst_first(see):
    dom = see()
    found = rows(dom)
    assert len(found) == 50
    assert "150 of 300 hypotheses" in dom and "1 – 50 of 150" in dom
    assert all("fine-tuned" in words(row) for row in found)
    assert evaluations.BASE not in words("".join(found))
    errors = [int(re.search(r">(\d+) / \d+<", row)[1]) for row in found]
    assert errors == sorted(errors, reverse=True)


def test_all_models_and_each_set_can_be_chosen(see):
    dom = see(model="", set=evaluations.SETS[0])
    chosen = re.search(r'<select name="set">(.*?)</select>', dom)[1]
    assert words(chosen) == "All" + "".join(evaluations.SETS)
    assert "150 of 300 hypotheses" in dom
    found = words("".join(rows(dom)))
    assert evaluations.BASE in found and "fine-tuned" in found
    assert evaluations.SETS[1] not in found


def test_a_table_laid_out_as_cards_is_heard_as_a_table(see):
    dom = see()
    table = dom[dom.index('<table class="plotted cards"') :].split("</table>")[
        0
    ]
    assert (
        'role="table"' in table and '<th scope="row" role="rowheader">' in table
    )
    assert all('role="' in tag for tag in re.findall("<t[rdh] [^>]*>", table))


def test_an_address_searches_filters_and_sorts(see):
    found = rows(see(q="3시 회의를", model="fine-tuned", sort="cer up"))
    assert 1 < len(found) < 50
    for row in found:
        assert "회의" in words(row) and "fine-tuned" in words(row)
        assert evaluations.BASE not in words(row)
    assert re.search(r">(\d+\.\d)<", found[0])[1] == "0.0"


def test_a_single_hit_opens_with_its_player_and_the_other_model(see):
    row, below = rows(see(q="test_clean_0007", model=evaluations.BASE))
    assert 'aria-expanded="true"' in row and "repetition" in row
    assert '<audio controls="" preload="metadata"' in below
    assert 'src="data:audio/mpeg;base64,' in below
    assert "cannot play" not in below
    assert evaluations.BASE in below and "fine-tuned" in below


def test_edits_differ_by_more_than_colour(see):
    row = rows(see(q="test_clean_0007", model=evaluations.BASE))[0]
    assert re.search(r'<s class="(sub|del)" title="\w+">', row)
    assert re.search(r'<u class="ins" title="inserted">[^<]*␣', row)


def test_a_text_of_html_stays_a_text_and_a_lost_clip_is_told(see):
    row, below = rows(see(q="test_clean_0003", model="fine-tuned"))
    assert "Cannot be read: no audio file" in below
    assert "<audio" not in below
    assert "<img" not in row + below and "<b>굵게" not in row + below
    assert HOSTILE in words(below)


def test_neither_the_page_nor_its_summary_scrolls_sideways(see, page):
    plain = POLICY.sub("", page.read_text(encoding="utf-8"))
    copy = page.with_name("page.html")
    copy.write_text(plain.replace("</body>", f"{TELL}</body>"))
    frames = page.with_name("frames.html")
    frames.write_text(FRAMES)
    told = re.findall(
        r"width (\d+): (\d+) of (\d+), (\d+) of (\d+);", see(frames)
    )
    assert sorted(int(width) for width, *_ in told) == [390, 1400]
    for _, *widths in told:
        page_needs, page_has, summary_needs, summary_has = map(int, widths)
        assert page_needs <= page_has and summary_needs <= summary_has
