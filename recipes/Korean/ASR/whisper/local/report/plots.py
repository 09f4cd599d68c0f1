"""Pictures of a report: whiskers on one axis, and a run's curves.

In: rates and their intervals in percent; the curves.jsonl of a run.
Out: SVG that takes the width it is given and the page's colours; a PNG.
"""

import base64
import tempfile
from pathlib import Path

from markupsafe import Markup

from local import curves

FULL = 100.0  # percent; a model that repeats itself scores hundreds
MARGIN = 3.0  # percent of the width, so that no mark is cut
MIDDLE = 13  # px: half of a line's height
# Told apart by their shape too: circle, square, diamond, triangles, cross.
SHAPES = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "M-4.5 -4.5h9v9h-9z",
    "M0 -6L6 0L0 6L-6 0z",
    "M0 -6L5.5 4.5h-11z",
    "M0 6L5.5 -4.5h-11z",
    "M-5 -2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
)
BEYOND = "M-5 -5L5 0L-5 5z"


class Axis:
    """From 0 to a round number; what lies beyond it is drawn as an arrow.

    Arguments
    ---------
    values : iterable of float
        What it has to hold.
    """

    def __init__(self, values):
        from matplotlib.ticker import MaxNLocator  # takes its time

        highest = min(max([*values, 1e-3]), FULL)
        locator = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10])
        self.ticks = [float(t) for t in locator.tick_values(0, highest)]
        self.end = self.ticks[-1]

    def place(self, value):
        """Where a value stands, in percent of the width."""
        share = min(max(value / self.end, 0.0), 1.0)
        return round(MARGIN + (100 - 2 * MARGIN) * share, 2)

    def scale(self):
        """The numbers of the axis, as SVG."""
        texts = [
            f'<text x="{self.place(t)}%" y="12" text-anchor="middle">'
            f"{t:g}</text>"
            for t in self.ticks
        ]
        return _svg("axis", texts)

    def whisker(self, value, limits, model):
        """A rate and its interval, as SVG.

        Arguments
        ---------
        value : float or None
            Nothing but the axis is drawn without it.
        limits : (float, float) or None
            Of its interval.
        model : int
            Place among the models: the shape and the colour.

        Returns
        -------
        Markup
        """
        parts = [
            _line(self.place(t), self.place(t), "tick") for t in self.ticks
        ]
        if limits and limits[0] <= self.end:
            low, high = map(self.place, limits)
            parts.append(_line(low, high, "range"))
            parts += [_line(at, at, "end") for at in (low, high)]
        if value is not None:
            shape = SHAPES[model % len(SHAPES)]
            shape = BEYOND if value > self.end else shape
            parts.append(
                f'<svg x="{self.place(value)}%" y="{MIDDLE}" '
                f'overflow="visible"><path d="{shape}"/></svg>'
            )
        return _svg(f"m{model % len(SHAPES)}", parts)


def mark(model):
    """The shape that stands for a model, as SVG."""
    n = model % len(SHAPES)
    return Markup(
        f'<svg class="mark m{n}" viewBox="-7 -7 14 14" aria-hidden="true">'
        f'<path d="{SHAPES[n]}"/></svg>'
    )


def _svg(name, parts):
    return Markup(
        f'<svg class="plot {name}" aria-hidden="true">{"".join(parts)}</svg>'
    )


def _line(left, right, name):
    top, bottom = {"tick": (0, 26), "range": (13, 13), "end": (9, 17)}[name]
    return (
        f'<line class="{name}" x1="{left}%" x2="{right}%" '
        f'y1="{top}" y2="{bottom}"/>'
    )


def learning_curves(path):
    """A run's curves as an address that holds a PNG.

    Arguments
    ---------
    path : str or Path or None
        Of curves.jsonl.

    Returns
    -------
    (str or None, str)
        The address; or None, and why.
    """
    if path is None:
        return None, "no training run of it is known."
    try:
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "curves.png"
            curves.draw(path, picture)
            content = picture.read_bytes()
    except (OSError, ValueError, TypeError) as error:
        return None, f"its curves cannot be drawn: {error}"
    coded = base64.b64encode(content).decode()
    return f"data:image/png;base64,{coded}", ""
