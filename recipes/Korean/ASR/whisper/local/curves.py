"""Pictures of a run: its learning curves, and the rates of its steps.

In: curves.jsonl, to which a run appends; the rate of every step.
Out: PNG files, whole or not there; neither a window nor a display is needed.
"""

import json
import logging
from pathlib import Path

import numpy as np

from local import files

NAN = float("nan")
# Okabe and Ito's colours: told apart by colour-blind readers, too.
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
WIDTH_IN = 6.5
DPI = 160
MARGINS_IN = {"left": 0.65, "right": 0.25, "top": 0.35, "bottom": 0.45}
FAULTS = ("loops", "empty", "too_long")  # as local.collapse tells them
N_DRAWN = 1000  # points a line: the picture has 1040 pixels across
N_MARKED = 40  # up to so many points, each is marked
N_RAW = 100  # up to so many points, a line is not smoothed
WINDOW = 0.02  # of a line's points, that a smoothed one takes together


def read(path):
    """The lines that a run has told so far.

    Arguments
    ---------
    path : str or Path
        Of curves.jsonl. What is no whole line is left out: the file of a
        killed run may end within one.

    Returns
    -------
    train, valid : list of dict
        Lines of steps; of validations, which have ``valid``.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    """
    lines = Path(path).read_bytes().splitlines()
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # halves the time
    except ValueError:
        rows = [_parsed(line) for line in lines]
    rows = [row for row in rows if isinstance(row, dict)]
    train = [row for row in rows if "valid" not in row]
    return train, [row for row in rows if "valid" in row]


def _parsed(line):
    try:
        return json.loads(line)
    except ValueError:
        return None


def draw(curves_file, picture):
    """Draws the learning curves of a run, however far it has come.

    Arguments
    ---------
    curves_file : str or Path
        As for ``read``.
    picture : str or Path
        A PNG. What stood there stays until the new one is whole.

    Raises
    ------
    FileNotFoundError
        There is no ``curves_file``.
    OSError
        The picture cannot be written, for example on a full disk.
    """
    train, valid = read(curves_file)
    scores = [line["valid"] for line in valid]
    steps, valid_steps = _column(train, "step"), _column(valid, "step")
    figure, panels = _figure([2.4, 2.4, 1.3, 1.6])
    losses, errors, rates, norms = panels
    # Of clips alone, as the validation is, where there is text without audio.
    all_losses, of_clips = _column(train, "loss"), _column(train, "asr_loss")
    has_text = np.isfinite(_column(train, "text_loss"))
    heard = np.where(has_text, of_clips, all_losses)
    _draw_scatter(losses, steps, heard, BLUE, "training")
    valid_losses = _column(scores, "loss")
    _draw_line(losses, valid_steps, valid_losses, RED, "validation")
    _draw_errors(errors, valid_steps, scores)
    _draw_line(rates, steps, _column(train, "lr"), GREY)
    _draw_norms(norms, steps, train)
    names = "loss (nats a token)", "error rate (%)", "learning rate"
    for axes, name in zip(panels, [*names, "gradient norm"]):
        _dress(axes, name)
    _from_zero(rates)
    _along_steps(norms, max([1, *steps[-1:], *valid_steps[-1:]]))
    _write(figure, Path(picture))


def draw_rates(rates, picture):
    """Draws the learning rate of each step of a run.

    Arguments
    ---------
    rates : list of float
        Of steps 1 to N; at least one.
    picture : str or Path
        A PNG. What stood there stays until the new one is whole.

    Raises
    ------
    OSError
        The picture cannot be written, for example on a full disk.
    """
    rates = np.asarray(rates, dtype=float)
    figure, (axes,) = _figure([2.4])
    _draw_line(axes, np.arange(1, len(rates) + 1), rates, BLUE)
    highest = rates.argmax()
    text = f"highest: {rates[highest]:.2e} at step {highest + 1:,}"
    _draw_star(axes, highest + 1, rates[highest], BLUE, text)
    _dress(axes, "learning rate")
    _from_zero(axes)
    _along_steps(axes, len(rates))
    _write(figure, Path(picture))


# What is drawn


def _draw_errors(axes, steps, scores):
    """WER, CER, bad texts; of equally low CERs the newest is the best."""
    bad = sum(_column(scores, kind) for kind in FAULTS)
    _draw_line(axes, steps, bad, GREY, "bad texts")
    _draw_line(axes, steps, _column(scores, "WER"), GREEN, "WER")
    rates = _column(scores, "CER")
    _draw_line(axes, steps, rates, RED, "CER")
    if not np.isfinite(rates).any():
        return
    sound = np.where(_column(scores, "collapsed") == 1, NAN, rates)
    rates = sound if np.isfinite(sound).any() else rates
    lowest = np.nanmin(rates)
    step = steps[rates == lowest][-1]
    text = f"best CER: {lowest:.2f} % at step {step:,.0f}"
    _draw_star(axes, step, lowest, RED, text)
    axes.set_ylim(bottom=0)
    # A model that repeats itself scores hundreds of percent.
    if lowest < 50 and axes.get_ylim()[1] > 105:
        axes.set_ylim(top=105)


def _draw_norms(axes, steps, train):
    """On a log axis of whole decades; ticks where steps were skipped."""
    norms = _column(train, "grad_norm")
    norms[norms <= 0] = NAN
    if np.isfinite(norms).any():
        low = np.floor(np.log10(np.nanmin(norms)))
        high = max(np.ceil(np.log10(np.nanmax(norms))), low + 1)
        axes.set_yscale("log")
        axes.set_ylim(10**low, 10**high)
        axes.yaxis.set_major_formatter("{x:g}")
    _draw_scatter(axes, steps, norms, GREY, in_log=True)
    skipped = np.nan_to_num(_column(train, "skipped"))
    if skipped.any():
        where = steps[skipped > 0]
        where = where[_spread(len(where))]
        axes.plot(
            where,
            np.full(len(where), 0.04),  # of the axis, from its foot
            "|",
            color=RED,
            label=f"steps skipped: {skipped.sum():,.0f}",
            transform=axes.get_xaxis_transform(),
        )


def _draw_line(axes, steps, values, color, label=None):
    """A line through all values; marks on them while they are few."""
    if not np.isfinite(values).any():
        return
    kept = _spread(len(values))
    axes.plot(
        steps[kept],
        values[kept],
        color=color,
        label=label,
        linewidth=1.5,
        marker="o" if len(values) <= N_MARKED else None,
        markersize=4,
    )


def _draw_scatter(axes, steps, values, color, label=None, in_log=False):
    """Values that scatter: as they are, pale, behind a smoothed line."""
    if len(values) <= N_RAW:
        _draw_line(axes, steps, values, color, label)
        return
    axes.plot(*_envelope(steps, values), color=color, alpha=0.3, linewidth=0.5)
    smooth = np.exp(_smooth(np.log(values))) if in_log else _smooth(values)
    _draw_line(axes, steps, smooth, color, label)


def _draw_star(axes, step, value, color, label):
    axes.plot(
        step,
        value,
        color=color,
        label=label,
        linestyle="",
        marker="*",
        markersize=11,
        clip_on=False,
        zorder=3,
    )


# From lines to points


def _column(lines, name):
    """(n_lines,) float64, NaN for what is missing or not finite."""
    values = np.array([line.get(name, NAN) for line in lines], dtype=float)
    values[~np.isfinite(values)] = NAN
    return values


def _spread(n):
    """Indices of the points that are drawn, the first and last among them."""
    return np.linspace(0, n - 1, min(n, N_DRAWN)).round().astype(int)


def _envelope(steps, values):
    """Lowest and highest in turn, so that thinning loses no outlier."""
    if len(values) <= 2 * N_DRAWN:
        return steps, values
    starts = np.linspace(0, len(values), N_DRAWN, endpoint=False).astype(int)
    lows = np.fmin.reduceat(values, starts)
    highs = np.fmax.reduceat(values, starts)
    return np.repeat(steps[starts], 2), np.column_stack([lows, highs]).ravel()


def _smooth(values):
    """Means around each value, twice, so that an outlier leaves no step."""
    half = max(1, round(WINDOW * len(values) / 4))
    return _means(_means(values, half), half)


def _means(values, half):
    """Means of what is finite from ``half`` before to ``half`` after.

    At the line's end they are of what there is. At its start as much is taken
    from both sides: what comes after would hide how high values began.
    """
    n = len(values)
    here = np.arange(n)
    first = np.maximum(here - half, 0)
    end = np.minimum(np.minimum(here + half, 2 * here) + 1, n)
    finite = np.isfinite(values)
    sums = np.append(0, np.where(finite, values, 0).cumsum())
    counts = np.append(0, finite.cumsum())
    n_finite = counts[end] - counts[first]
    means = (sums[end] - sums[first]) / np.maximum(n_finite, 1)
    return np.where(n_finite > 0, means, NAN)


# The sheet


def _figure(heights_in):
    """A figure, and its panels from top to bottom; no display knows of it."""
    # Takes half a second to import: for those who draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # SpeechBrain logs all that anyone says, and matplotlib says much of fonts.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    left, right, top, bottom = MARGINS_IN.values()
    n = len(heights_in)
    height = sum(heights_in) + n * top + bottom
    figure = Figure((WIDTH_IN, height), DPI)
    FigureCanvasAgg(figure)
    panels = figure.subplots(
        n,
        sharex=True,
        squeeze=False,
        height_ratios=heights_in,
        gridspec_kw={
            "left": left / WIDTH_IN,
            "right": 1 - right / WIDTH_IN,
            "top": 1 - top / height,
            "bottom": bottom / height,
            "hspace": top * n / sum(heights_in),  # legends stand there
        },
    )
    return figure, panels[:, 0]


def _dress(axes, name):
    """Names the axis; a legend above it, where it hides no data."""
    axes.set_ylabel(name, fontsize=9)
    axes.yaxis.set_label_coords(-0.085, 0.5)  # the same for all panels
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    if not np.isfinite(axes.dataLim.intervaly).all():
        axes.set_yticks([])
        where = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.5, "none so far", color="0.6", fontsize=9, **where)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=4,
            frameon=False,
            fontsize=8,
            borderaxespad=0,
            columnspacing=1.5,
        )


def _from_zero(axes):
    """An axis of rates: from 0, in powers of ten."""
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(
        axis="y", style="sci", scilimits=(0, 0), useMathText=True
    )
    axes.yaxis.get_offset_text().set_fontsize(8)


def _along_steps(axes, last):
    """The axis of the steps, from 0 to a little behind the last one."""
    axes.set_xlabel("step", fontsize=9)
    axes.set_xlim(0, 1.01 * last)
    axes.locator_params(axis="x", nbins=8, integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _write(figure, picture):
    with files.replacing(picture, binary=True) as file:
        figure.savefig(file, format="png")
