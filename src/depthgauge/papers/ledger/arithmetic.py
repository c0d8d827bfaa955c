"""Two arithmetics with the same interface: `FLOATS` for the search, `EXACT` for the verification.

A claim defines its two sides once, with NumPy arrays and the functions below. `FLOATS` evaluates them in double
precision. `EXACT` uses fractions until a transcendental function occurs, and arb numbers (intervals that contain the
true value) from there on. A comparison of `EXACT` numbers that returns True is therefore true.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import numpy as np
from flint import arb, ctx, fmpq

Value = Any
"""A number or an array of numbers of one arithmetic."""
PRECISION = 256
"""Precision of arb numbers in bits."""


@dataclass(frozen=True)
class Arithmetic:
    """The functions that the two sides of a claim may use, besides + − · / @ and comparisons.

    `number` returns a constant; `max` and `min` take an array and an optional axis.
    """

    number: Callable[[int | str | Fraction], Value]
    exp: Callable[[Value], Value]
    log: Callable[[Value], Value]
    sqrt: Callable[[Value], Value]
    tanh: Callable[[Value], Value]
    max: Callable[..., Value]
    min: Callable[..., Value]


def to_floats(value: Value) -> Value:
    """Convert to a float or an array of floats; integers stay integers."""
    if isinstance(value, np.ndarray):
        return np.array([float(v) for v in value.flat]).reshape(value.shape)
    return value if isinstance(value, int) else float(value)


def to_exact(value: Value) -> Value:
    """Convert to fractions without rounding; integers stay integers."""
    if isinstance(value, np.ndarray):
        return fill(value.shape, (to_exact(v) for v in value.flat))
    return value if isinstance(value, int) else _rational(value)  # an int is a size, which is also used as an index


def to_float(value: Value) -> float:
    """Return a number of either arithmetic as a float, for display."""
    if isinstance(value, arb):
        return float(value.mid())
    return float(Fraction(int(value.p), int(value.q))) if isinstance(value, fmpq) else float(value)


@contextmanager
def precise() -> Iterator[None]:
    """Set the precision of arb numbers to `PRECISION` bits, and restore the previous precision at the end."""
    before, ctx.prec = ctx.prec, PRECISION
    try:
        yield
    finally:
        ctx.prec = before


def fill(shape: tuple[int, ...], entries: Iterable[Value]) -> np.ndarray:
    """Return an object array with these entries in row-major order."""
    out = np.empty(shape, dtype=object)
    for index, entry in enumerate(entries):
        out.reshape(-1)[index] = entry
    return out


def _rational(value: Value) -> fmpq:
    fraction = Fraction(value)
    return fmpq(fraction.numerator, fraction.denominator)


def _arb(value: Value) -> arb:
    return value if isinstance(value, arb) else arb(value)


def _each(function: Callable[[Value], Value], x: Value) -> Value:
    return np.frompyfunc(function, 1, 1)(x) if isinstance(x, np.ndarray) else function(x)


def _entrywise(name: str, at: int, value: int) -> Callable[[Value], Value]:
    """Return a function of arb numbers for every entry; it has the rational value `value` at `at`."""
    return partial(_each, lambda v: fmpq(value) if v == at else getattr(_arb(v), name)())


def _root(value: Value) -> Value:
    """√x, as a fraction where it is rational."""
    if isinstance(value, arb):
        return value.sqrt()
    fraction = Fraction(int(fmpq(value).p), int(fmpq(value).q))
    if fraction >= 0:
        top, bottom = math.isqrt(fraction.numerator), math.isqrt(fraction.denominator)
        if top * top == fraction.numerator and bottom * bottom == fraction.denominator:
            return fmpq(top, bottom)
    return _arb(value).sqrt()


def _larger(x: Value, y: Value) -> Value:
    """The larger number; an interval that contains it where the intervals overlap."""
    if x >= y:
        return x
    return y if y >= x else _arb(x).max(_arb(y))


def _largest(x: Value, axis: int | None = None) -> Value:
    if not isinstance(x, np.ndarray):
        return x
    return reduce(_larger, x.flat) if axis is None else np.frompyfunc(_larger, 2, 1).reduce(x, axis=axis)


FLOATS = Arithmetic(lambda value: float(Fraction(value)), np.exp, np.log, np.sqrt, np.tanh, np.max, np.min)
"""Double precision. The search uses it; no verdict of failure rests on it."""
EXACT = Arithmetic(
    number=_rational,
    exp=_entrywise("exp", 0, 1),
    log=_entrywise("log", 1, 0),
    sqrt=partial(_each, _root),
    tanh=_entrywise("tanh", 0, 0),
    max=_largest,
    min=lambda x, axis=None: -_largest(-x, axis),
)
"""Fractions where possible, otherwise arb numbers."""
