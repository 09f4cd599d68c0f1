"""Pictures of a run: its learning curves, and the rates of its steps."""

import json
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
from local import curves

NAN, INF = math.nan, math.inf
PNG = b"\x89PNG\r\n\x1a\n"
LOSSES, ERRORS, RATES, NORMS = range(4)  # panels from top to bottom


def train_line(step, loss=1.0, norm=1.0, skipped=0, lr=1e-5):
    line = {"step": step, "epoch": 1, "loss": loss, "lr": lr}
    line |= {"grad_norm": norm, "skipped": skipped}
    return {**line, "clips_per_s": 12.1, "wait": 3.1}


def valid_line(step, cer, wer=50.0, loss=1.0):
    scores = {"loss": loss, "CER": cer, "WER": wer}
    return {"step": step, "epoch": 1, "valid": scores}


@pytest.fixture
def told(tmp_path):
    """Writes a curves.jsonl of lines; its path."""

    def write(lines, end=""):
        path = tmp_path / "curves.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path.write_text(text + end, encoding="utf-8")
        return path

    return write


@pytest.fixture
def figures(monkeypatch):
    """A list of the figures that are to be written, instead of files."""
    found = []
    monkeypatch.setattr(curves, "_write", lambda f, path: found.append(f))
    return found


@pytest.fixture
def panels(told, tmp_path, figures):
    """The panels that are drawn of lines."""

    def drawn(lines):
        curves.draw(told(lines), tmp_path / "curves.png")
        return figures[-1].axes

    return drawn


def labels(axes):
    """Texts of a legend."""
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def line(axes, label):
    """(x, y) of the points that a legend names so."""
    (found,) = [one for one in axes.lines if one.get_label() == label]
    return found.get_xdata().tolist(), found.get_ydata().tolist()


# Lines of the file

STEP, VALID = train_line(20), valid_line(20, cer=9.0)


@pytest.mark.parametrize(
    "end",
    ["", "\n", '{"step": 40, "epo', '{"step": 40, "valid": {', "{", "\0\0\0"],
    ids=["whole", "empty", "torn", "torn validation", "brace", "zeros"],
)
def test_a_torn_or_empty_last_line_is_left_out(told, end):
    path = told([STEP, VALID, STEP], end)
    assert curves.read(path) == ([STEP, STEP], [VALID])
    assert curves.read(str(path)) == curves.read(path)


@pytest.mark.parametrize(
    "damaged", [b"\0" * 64, b'{"step": 4', b"\xff\xfe", b"", b"12", b"null"]
)
def test_a_damaged_line_costs_no_other(told, damaged):
    path = told([STEP])
    whole = path.read_bytes()
    path.write_bytes(whole + damaged + b"\n" + whole)
    assert curves.read(path) == ([STEP, STEP], [])


def test_what_is_not_finite_is_read(told):
    (row,), _ = curves.read(told([train_line(20, loss=NAN, norm=INF)]))
    assert math.isnan(row["loss"]) and row["grad_norm"] == INF


def test_an_empty_file_holds_nothing(told):
    assert curves.read(told([])) == ([], [])


def test_a_missing_file_is_named(tmp_path):
    missing = tmp_path / "curves.jsonl"
    with pytest.raises(FileNotFoundError, match="curves.jsonl"):
        curves.read(missing)
    with pytest.raises(FileNotFoundError, match="curves.jsonl"):
        curves.draw(missing, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


# What is drawn


def test_four_panels_with_units_share_the_steps(panels):
    drawn = panels([STEP, VALID, train_line(1200)])
    assert [axes.get_ylabel() for axes in drawn] == [
        "loss (nats a token)",
        "error rate (%)",
        "learning rate",
        "gradient norm",
    ]
    assert drawn[NORMS].get_xlabel() == "step"
    for axes in drawn:
        assert axes.get_xlim() == (0, 1212)
    assert drawn[NORMS].xaxis.get_major_formatter()(1000) == "1,000"
    assert drawn[NORMS].get_yscale() == "log"
    assert {axes.get_yscale() for axes in drawn[:NORMS]} == {"linear"}


def test_each_figure_stands_at_its_step(panels):
    steps = [train_line(n, 1 / n, 10.0 * n, lr=n * 1e-5) for n in (2, 4)]
    drawn = panels([*steps, valid_line(5, 20.0, 40.0, loss=0.5)])
    assert line(drawn[LOSSES], "training") == ([2, 4], [0.5, 0.25])
    assert line(drawn[LOSSES], "validation") == ([5], [0.5])
    assert line(drawn[ERRORS], "WER") == ([5], [40.0])
    assert line(drawn[ERRORS], "CER") == ([5], [20.0])
    (rates,), (norms,) = drawn[RATES].lines, drawn[NORMS].lines
    assert rates.get_ydata().tolist() == [2e-5, 4e-5]
    assert norms.get_ydata().tolist() == [20.0, 40.0]
    assert labels(drawn[NORMS]) == []
    assert drawn[NORMS].get_xlim() == (0, 5.05)


@pytest.mark.parametrize(
    "rates, step, text",
    [
        ([30, 12.345, 14], 2000, "best CER: 12.35 % at step 2,000"),
        ([14, 9, 30, 9, 30], 4000, "best CER: 9.00 % at step 4,000"),
        ([NAN, 9, NAN], 2000, "best CER: 9.00 % at step 2,000"),
        ([250.0], 1000, "best CER: 250.00 % at step 1,000"),
        ([9.0, 0.0], 2000, "best CER: 0.00 % at step 2,000"),
    ],
    ids=["one", "newest of equals", "not a number", "repeats", "perfect"],
)
def test_the_best_cer_is_marked(panels, rates, step, text):
    lines = [valid_line(1000 * n, cer) for n, cer in enumerate(rates, 1)]
    errors = panels(lines)[ERRORS]
    assert labels(errors) == ["WER", "CER", text]
    assert line(errors, text) == ([step], [np.nanmin(rates)])


@pytest.mark.parametrize(
    "cers, wer, top",
    [([900, 9], 20, 105), ([40, 9], 180, 105)]
    + [([60, 30], 90, None), ([900, 300], 990, None)],
)
def test_what_a_repeating_model_scores_squeezes_no_other(
    panels, cers, wer, top
):
    lines = [valid_line(n, cer, wer) for n, cer in enumerate(cers, 1)]
    low, high = panels(lines)[ERRORS].get_ylim()
    assert low == 0
    assert high == top if top else max(*cers, wer) < high


def test_skipped_steps_are_counted_and_stand_where_they_were(panels):
    skipped = {40: 3, 80: 20}
    lines = [
        train_line(n, NAN, NAN, skipped[n]) if n in skipped else train_line(n)
        for n in range(20, 101, 20)
    ]
    norms = panels(lines)[NORMS]
    assert labels(norms) == ["steps skipped: 23"]
    assert line(norms, "steps skipped: 23")[0] == [40, 80]


@pytest.mark.parametrize(
    "norms, limits",
    [
        ([1.2, 1.7], (1, 10)),
        ([1.0], (1, 10)),
        ([0.03, 250], (0.01, 1000)),
        ([0.0, 5.0, INF, NAN], (1, 10)),
    ],
)
def test_norms_stand_between_whole_decades(panels, norms, limits):
    lines = [train_line(n, norm=norm) for n, norm in enumerate(norms, 1)]
    axes = panels(lines)[NORMS]
    assert axes.get_ylim() == pytest.approx(limits)
    formatter = axes.yaxis.get_major_formatter()
    assert (formatter(0.01), formatter(1.0)) == ("0.01", "1")


@pytest.mark.parametrize(
    "lines, empty",
    [
        ([], [LOSSES, ERRORS, RATES, NORMS]),
        ([STEP], [ERRORS]),
        ([VALID], [RATES, NORMS]),
        ([valid_line(0, 9.0)], [RATES, NORMS]),
        ([STEP, VALID], []),
        (
            [train_line(n, NAN, NAN, 20) for n in range(20, 4000, 20)],
            [LOSSES, ERRORS, NORMS],
        ),
        ([train_line(1, INF, 0.0), valid_line(1, NAN, NAN, NAN)], [0, 1, 3]),
        ([{"step": 1, "epoch": 1}], [0, 1, 2, 3]),
        (
            [{"step": 1, "loss": None}, {"step": 1, "valid": {"WER": 3.0}}],
            [LOSSES, RATES, NORMS],
        ),
    ],
    ids=[
        "nothing",
        "no validation",
        "one validation",
        "before the first step",
        "one of each",
        "all skipped",
        "nothing finite",
        "no figures",
        "some figures",
    ],
)
def test_a_panel_without_figures_says_so(panels, figures, lines, empty):
    drawn = panels(lines)
    texts = [[text.get_text() for text in axes.texts] for axes in drawn]
    expected = [["none so far"] if n in empty else [] for n in range(4)]
    assert texts == expected
    ticks = [len(axes.get_yticks()) > 0 for axes in drawn]
    assert ticks == [n not in empty for n in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figures[-1].canvas.draw()


def test_of_a_long_run_few_points_are_drawn_and_no_outlier_is_lost(panels):
    n = 20_000
    losses, norms = np.full((2, n), 0.5)
    losses[7_777], norms[12_345] = 50.0, 1e4
    losses[7_776] = norms[12_346] = NAN
    lines = [
        train_line(step, loss, norm, skipped=1)
        for step, loss, norm in zip(range(1, n + 1), losses, norms)
    ]
    lines += [valid_line(step, 9.0) for step in range(1, n + 1)]
    drawn = panels(lines)
    for axes in drawn:
        for one in axes.lines:
            assert 0 < len(one.get_xdata()) <= 2 * curves.N_DRAWN
    for axes, highest, at in (LOSSES, 50.0, 7778), (NORMS, 1e4, 12346):
        raw = drawn[axes].lines[0]
        assert raw.get_alpha() < 1
        assert raw.get_ydata().max() == highest
        there = raw.get_xdata()[raw.get_ydata().argmax()]
        assert there == pytest.approx(at, abs=n / curves.N_DRAWN)
        assert raw.get_ydata().min() == 0.5
    smooth = line(drawn[LOSSES], "training")
    assert (smooth[0][0], smooth[0][-1]) == (1, n)
    assert 0.5 < max(smooth[1]) < 1.5


def test_few_points_are_marked_and_many_are_smoothed(panels):
    def drawn(n):
        noise = 1 + 0.5 * (-1.0) ** np.arange(n)
        rows = [train_line(s, y, y) for s, y in enumerate(noise, 1)]
        return panels(rows)

    for n, n_lines, marker in [(40, 1, "o"), (41, 1, "None"), (101, 2, "None")]:
        for axes in np.array(drawn(n))[[LOSSES, NORMS]]:
            assert len(axes.lines) == n_lines
            assert axes.lines[-1].get_marker() == marker
    # Smoothed as its axis is: in arithmetic, and in geometric means.
    axes = drawn(1000)
    for panel, mean in (LOSSES, 1.0), (NORMS, math.sqrt(0.5 * 1.5)):
        raw, smooth = axes[panel].lines
        assert np.ptp(raw.get_ydata()) == 1.0
        assert smooth.get_ydata()[20:] == pytest.approx(mean, abs=0.1)


@pytest.mark.parametrize(
    "values, half, expected",
    [
        ([4, 1, 1, 1, 7], 1, [4, 2, 1, 3, 4]),
        ([9, 0, 0, 0, 0], 2, [9, 3, 1.8, 0, 0]),
        ([6, NAN, 0, NAN, NAN, NAN, 3], 1, [6, 3, 0, 0, NAN, 3, 3]),
        ([5], 3, [5]),
        ([NAN, NAN], 1, [NAN, NAN]),
    ],
)
def test_means(values, half, expected):
    found = curves._means(np.array(values, dtype=float), half)
    assert found.tolist() == pytest.approx(expected, nan_ok=True)


# The rates of a run


@pytest.mark.parametrize("n_steps", [1, 2, 18, 70_000])
def test_rates_are_drawn_with_the_highest(tmp_path, figures, n_steps):
    rates = [2e-3 * min(n / 2, (2 / n) ** 0.5) for n in range(1, n_steps + 1)]
    curves.draw_rates(rates, tmp_path / "rates.png")
    (axes,) = figures[0].axes
    at = min(2, n_steps)
    text = f"highest: {max(rates):.2e} at step {at}"
    assert labels(axes) == [text]
    assert line(axes, text) == ([at], [max(rates)])
    steps, drawn = axes.lines[0].get_data()
    assert (steps[0], steps[-1]) == (1, n_steps)
    assert drawn.tolist() == [rates[step - 1] for step in steps]
    assert len(steps) == min(n_steps, curves.N_DRAWN)
    assert axes.get_xlim() == pytest.approx((0, 1.01 * n_steps))
    assert axes.get_ylim()[0] == 0


# Files


def draw_both(folder, path):
    """Both kinds of pictures, as calls."""
    return [
        lambda: curves.draw(path, folder / "a.png"),
        lambda: curves.draw_rates([0.1, 0.2], str(folder / "a.png")),
    ]


def test_a_picture_takes_the_place_of_the_one_before(told, tmp_path):
    for call in draw_both(tmp_path, told([STEP, VALID])):
        (tmp_path / "a.png").write_bytes(b"old")
        call()
        assert (tmp_path / "a.png").read_bytes().startswith(PNG)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["a.png", "curves.jsonl"]


def test_on_a_full_disk_the_picture_before_stays(told, tmp_path):
    for call in draw_both(tmp_path, told([STEP, VALID])):
        (tmp_path / "a.png").write_bytes(b"old")
        (tmp_path / "a.png.tmp").symlink_to("/dev/full")
        with pytest.raises(OSError, match="a.png: No space left.*free space"):
            call()
        assert (tmp_path / "a.png").read_bytes() == b"old"
        assert not (tmp_path / "a.png.tmp").is_symlink()


def test_an_error_without_a_number_is_told_in_its_words(
    told, tmp_path, monkeypatch
):
    def fails(*names):
        raise OSError("encoder error -2 when writing image file")

    monkeypatch.setattr(curves.files.os, "replace", fails)
    for call in draw_both(tmp_path, told([STEP])):
        with pytest.raises(OSError, match="a.png: encoder error -2.*free"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["curves.jsonl"]


def test_a_folder_that_is_gone_is_told(told, tmp_path):
    for folder in (tmp_path / "gone", tmp_path / "curves.jsonl"):
        for call in draw_both(folder, told([STEP])):
            with pytest.raises(OSError):
                call()


ALONE = """
import sys
from local import curves
assert "matplotlib" not in sys.modules
curves.draw(sys.argv[1], sys.argv[2])
assert "matplotlib.pyplot" not in sys.modules
"""


def test_matplotlib_is_imported_by_who_draws_and_pyplot_never(told, tmp_path):
    picture = tmp_path / "curves.png"
    subprocess.run(
        [sys.executable, "-c", ALONE, told([STEP, VALID]), picture],
        cwd=curves.__file__.rsplit("/local/", 1)[0],
        check=True,
    )
    assert picture.read_bytes().startswith(PNG)
