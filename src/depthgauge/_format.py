"""Numbers as a person reads them: one format for the terminal, the page, the verdicts and the ledger."""

import re

DASH = "–"


def number(value: float | None, digits: int = 3) -> str:
    """A few significant digits; whole numbers, and what is left of the point below 100000, in full.

    >>> number(5.1234e-8), number(2997.95), number(2.99e10), number(2048), number(None)
    ('5.12e-8', '2998', '2.99e10', '2048', '–')
    """
    if value is None:
        return DASH
    if isinstance(value, int):
        return str(value)
    if 10**digits <= abs(value) < 1e5:
        return f"{value:.0f}"
    return re.sub(r"e(-?)\+?0*(?=\d)", r"e\1", f"{value:.{digits}g}")
