"""Two arithmetics with the same interface: `FLOATS` for the search, `EXACT` for the verification.

A claim defines its two sides once, with NumPy arrays and the functions below. `FLOATS` evaluates them in double
precision. `EXACT` uses fractions until a transcendental function occurs, and arb numbers (intervals that contain the
true value) from there on. A comparison of `EXACT` numbers that returns True is therefore true.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
from flint import arb, ctx, fmpq

Value = Any
"""A number or an array of numbers of one arithmetic."""
PRECISION = 256
"""Precision of arb numbers in bits."""


class Floats:
    """Double precision. The search uses it; no verdict of failure rests on it."""

    def number(self, value: int | str | Fraction) -> Value:
        """Return a constant, rounded."""
        return float(Fraction(value))

    def exp(self, x: Value) -> Value:
        """e^x."""
        return np.exp(x)

    def log(self, x: Value) -> Value:
        """log x."""
        return np.log(x)

    def sqrt(self, x: Value) -> Value:
        """√x."""
        return np.sqrt(x)

    def tanh(self, x: Value) -> Value:
        """tanh x."""
        return np.tanh(x)

    def power(self, x: Value, y: Value) -> Value:
        """x^y."""
        return np.power(x, y)

    def max(self, x: Value, axis: int | None = None) -> Value:
        """The largest entry."""
        return np.max(x, axis=axis)

    def min(self, x: Value, axis: int | None = None) -> Value:
        """The smallest entry."""
        return np.min(x, axis=axis)


class Exact:
    """Fractions where possible, otherwise arb numbers. A comparison is True only if it is true for the exact values."""

    def number(self, value: int | str | Fraction) -> Value:
        """Return a constant, exactly."""
        fraction = Fraction(value)
        return fmpq(fraction.numerator, fraction.denominator)

    def exp(self, x: Value) -> Value:
        """e^x; e⁰ is exactly 1."""
        return _each(lambda v: fmpq(1) if v == 0 else _arb(v).exp(), x)

    def log(self, x: Value) -> Value:
        """log x; log 1 is exactly 0."""
        return _each(lambda v: fmpq(0) if v == 1 else _arb(v).log(), x)

    def sqrt(self, x: Value) -> Value:
        """√x, as a fraction where it is rational."""
        return _each(_root, x)

    def tanh(self, x: Value) -> Value:
        """tanh x; tanh 0 is exactly 0."""
        return _each(lambda v: fmpq(0) if v == 0 else _arb(v).tanh(), x)

    def power(self, x: Value, y: Value) -> Value:
        """x^y, as a fraction where y is an integer."""
        return np.frompyfunc(_power, 2, 1)(x, y) if isinstance(x, np.ndarray) else _power(x, y)

    def max(self, x: Value, axis: int | None = None) -> Value:
        """The largest entry. Where intervals overlap, an interval that contains it."""
        return _fold(_larger, x, axis)

    def min(self, x: Value, axis: int | None = None) -> Value:
        """The smallest entry."""
        return -_fold(_larger, -x, axis)


FLOATS, EXACT = Floats(), Exact()
Arithmetic = Floats | Exact
"""The functions that the two sides of a claim may use, besides + − · / @ and comparisons."""


def to_floats(value: Value) -> Value:
    """Convert to a float or an array of floats; integers stay integers."""
    if isinstance(value, np.ndarray):
        return np.array([float(v) for v in value.flat]).reshape(value.shape)
    return value if isinstance(value, int) else float(value)


def to_exact(value: Value) -> Value:
    """Convert to fractions without rounding; integers stay integers."""
    if isinstance(value, np.ndarray):
        return fill(value.shape, (to_exact(v) for v in value.flat))
    if isinstance(value, int):  # a size or a count, which is also used as an index
        return value
    fraction = Fraction(value)
    return fmpq(fraction.numerator, fraction.denominator)


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


def _arb(value: Value) -> arb:
    return value if isinstance(value, arb) else arb(value)


def _each(function: Callable[[Value], Value], x: Value) -> Value:
    return np.frompyfunc(function, 1, 1)(x) if isinstance(x, np.ndarray) else function(x)


def _root(value: Value) -> Value:
    if isinstance(value, arb):
        return value.sqrt()
    fraction = Fraction(int(fmpq(value).p), int(fmpq(value).q))
    if fraction >= 0:
        top, bottom = math.isqrt(fraction.numerator), math.isqrt(fraction.denominator)
        if top * top == fraction.numerator and bottom * bottom == fraction.denominator:
            return fmpq(top, bottom)
    return _arb(value).sqrt()


def _power(x: Value, y: Value) -> Value:
    if isinstance(y, int) or (isinstance(y, fmpq) and y.q == 1):
        return x ** int(y)
    return (_arb(y) * _arb(x).log()).exp()


def _larger(x: Value, y: Value) -> Value:
    if x >= y:
        return x
    return y if y >= x else _arb(x).max(_arb(y))


def _fold(pick: Callable[[Value, Value], Value], x: Value, axis: int | None) -> Value:
    if not isinstance(x, np.ndarray):
        return x
    if axis is None:
        return reduce(pick, x.flat)
    return np.frompyfunc(pick, 2, 1).reduce(x, axis=axis)
