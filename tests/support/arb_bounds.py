"""Comparison of float64 bounds with real numbers, enclosed by python-flint `arb` numbers at 200 bits."""

import math
from collections.abc import Callable
from typing import Any

from flint import arb, ctx

BITS = 200


def at_200_bits(f: Callable[[], Any]) -> Any:
    """Evaluate with 200 bits and restore the precision."""
    before, ctx.prec = ctx.prec, BITS
    try:
        return f()
    finally:
        ctx.prec = before


def is_upper(bound: float, exact: arb) -> bool:
    """Return whether `bound` is certainly at least the real number enclosed by `exact`. NaN is not a bound."""
    return bound == math.inf or bool(at_200_bits(lambda: arb(bound) >= exact))


def is_lower(bound: float, exact: arb) -> bool:
    """Return whether `bound` is certainly at most the real number enclosed by `exact`."""
    return bound == -math.inf or bool(at_200_bits(lambda: arb(bound) <= exact))
