"""Numbers and names of a report as they are read.

In: rates in percent, counts, hours, intervals; None where nothing is known.
Out: text.
"""

import math

MINUS = "\N{MINUS SIGN}"
NO_NUMBER = "\N{EN DASH}"
N_SHORT = 60  # characters of an invented text; a loop has hundreds


def known(value):
    """A finite number, or None."""
    number = isinstance(value, (int, float)) and math.isfinite(value)
    return value if number else None


def rate(value, digits=2):
    """With so many digits behind the point."""
    if known(value) is None:
        return NO_NUMBER
    return f"{value:,.{digits}f}".replace("-", MINUS)


def signed(value):
    """A difference."""
    if known(value) is None:
        return NO_NUMBER
    return f"{value:+,.2f}".replace("-", MINUS)


def count(value):
    """A whole number."""
    return NO_NUMBER if known(value) is None else f"{value:,}"


def clips(n):
    """So many clips."""
    return f"{count(n)} clip{'' if n == 1 else 's'}"


def time(hours):
    """Of a length: in minutes while it is below an hour."""
    if known(hours) is None or hours >= 1:
        return f"{rate(hours, 1)} h"
    return f"{rate(60 * hours, 1)} min"


def limits(pair, is_signed=False):
    """An interval; empty where there is none."""
    if not pair or None in map(known, pair):
        return ""
    form = signed if is_signed else rate
    return f"{form(pair[0])} to {form(pair[1])}"


def short(text):
    """A text that is cut where it is long."""
    return text if len(text) <= N_SHORT else f"{text[: N_SHORT - 1].rstrip()}…"


FILTERS = {"rate": rate, "signed": signed, "count": count, "clips": clips}
FILTERS |= {"time": time, "limits": limits, "short": short}
