"""The working precision of python-flint, and rounding from arb to float64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import flint
from flint import arb


@contextmanager
def precision(bits: int) -> Iterator[None]:
    """Set the working precision of python-flint within a `with` block."""
    before = flint.ctx.prec
    flint.ctx.prec = bits
    try:
        yield
    finally:
        flint.ctx.prec = before


def float_below(x: arb) -> float:
    """Return a float64 that is at most every number in the interval x."""
    value = float(x.lower().mid())
    while arb(value) > x.lower():
        value = math.nextafter(value, -math.inf)
    return math.nextafter(value, -math.inf) if not arb(value) <= x.lower() else value
