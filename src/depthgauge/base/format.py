"""Formatting of numbers and texts, shared by the terminal tables, the HTML report, the verdicts and the ledger."""

import re
from collections.abc import Sequence
from itertools import pairwise

DASH = "–"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits.

    Integers are written in full. Floats that round to 10^digits or more, up to 100000, are rounded to the nearest
    integer. None is a dash.

    >>> number(5.1234e-8), number(2997.95), number(2.99e10), number(2048), number(99.7, 2), number(None)
    ('5.12e-8', '2998', '2.99e10', '2048', '100', '–')
    """
    if value is None:
        return DASH
    if isinstance(value, int):
        return str(value)
    if 10**digits - 0.5 <= abs(value) < 1e5:
        return f"{value:.0f}"
    return re.sub(r"e(-?)\+?0*(?=\d)", r"e\1", f"{value:.{digits}g}")


def interval_text(value: float | None, low: float | None, high: float | None, digits: int = 3) -> str:
    """Return a number with its interval.

    >>> interval_text(0.4312, 0.38, 0.4849), interval_text(0.4312, None, None), interval_text(None, None, None)
    ('0.431 [0.38, 0.485]', '0.431', '–')
    """
    ends = "" if low is None or high is None else f" [{number(low, digits)}, {number(high, digits)}]"
    return number(value, digits) + ends


def one_line(text: object, most: int = 200) -> str:
    """Return a text, or the message of an error, on one line of at most `most` characters.

    >>> one_line("a  long\\n text", 6), one_line(KeyError())
    ('a lon…', 'KeyError')
    """
    return short(" ".join(str(text).split()) or type(text).__name__, most)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "layer"), counted(12, "layer")
    ('1 layer', '12 layers')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(text: str, most: int) -> str:
    """Return a text of at most `most` characters; a longer one ends with an ellipsis.

    >>> short("mean-field", 20), short("a name that goes on and on", 20)
    ('mean-field', 'a name that goes on…')
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def printable(text: str) -> str:
    """Return a text without control characters, line breaks and bidirectional marks."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def duration(seconds: float) -> str:
    """Return a rounded duration.

    >>> duration(0.4), duration(80), duration(400), duration(7000), duration(3e11)
    ('1 second', '80 seconds', '7 minutes', '2 hours', '9513 years')
    """
    for size, name in ((31536000.0, "year"), (86400.0, "day"), (3600.0, "hour"), (60.0, "minute")):
        if seconds >= 1.5 * size:
            return counted(round(seconds / size), name)
    return counted(max(1, round(seconds)), "second")


def size_text(count: float) -> str:
    """Return a number of bytes with its unit.

    >>> size_text(538090408), size_text(7), size_text(2048), size_text(2e15)
    ('538 MB', '7 B', '2.05 kB', '2000 TB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{number(float(count))} {unit}"
        count /= 1000
    return f"{number(count)} TB"


def contiguous(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return increasing numbers as half-open ranges.

    >>> contiguous([0, 1, 2, 5]), contiguous([])
    ([(0, 3), (5, 6)], [])
    """
    breaks = [0, *(k for k, (a, b) in enumerate(pairwise(numbers), start=1) if b != a + 1), len(numbers)]
    return [(numbers[start], numbers[stop - 1] + 1) for start, stop in pairwise(breaks)] if numbers else []


def ranges(numbers: Sequence[int]) -> str:
    """Return increasing numbers as text, with consecutive ones joined.

    >>> ranges([0, 1, 2, 5]), ranges([])
    ('0–2, 5', 'none')
    """
    runs = [str(start) if stop == start + 1 else f"{start}–{stop - 1}" for start, stop in contiguous(numbers)]
    return ", ".join(runs) or "none"


def capital(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def percent(value: float | None) -> str:
    """Return a share of 1 in percent, with one decimal.

    >>> percent(0.0433), percent(1e-9)
    ('4.3 %', '< 0.1 %')
    """
    if value is None:
        return DASH
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def span(values: Sequence[int]) -> str:
    """Return the smallest and the largest of a few counts.

    >>> span([2, 2]), span([2, 4, 3])
    ('2', '2–4')
    """
    return "–".join(str(value) for value in sorted({min(values), max(values)})) if values else DASH
