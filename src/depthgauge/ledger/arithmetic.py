"""Two arithmetics under one set of names: floats to search with, exact numbers and balls to convince with.

A claim writes its two sides once, with numpy arrays and the functions below. `FLOATS` evaluates them quickly;
`EXACT` holds fractions until a transcendental function is met and verified balls from there on, so that a comparison
that comes out true is true.
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
"""Bits of a ball: far more than any margin a claim is decided by."""


class Floats:
    """IEEE double precision: what the search runs on; it decides nothing."""

    def number(self, value: int | str | Fraction) -> Value:
        """A constant, rounded."""
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
    """Fractions while they last, balls after; a comparison is true only when it is certain."""

    def number(self, value: int | str | Fraction) -> Value:
        """A constant, exactly."""
        fraction = Fraction(value)
        return fmpq(fraction.numerator, fraction.denominator)

    def exp(self, x: Value) -> Value:
        """e^x; e⁰ is exactly one."""
        return _each(lambda v: fmpq(1) if v == 0 else _ball(v).exp(), x)

    def log(self, x: Value) -> Value:
        """log x; log 1 is exactly nought."""
        return _each(lambda v: fmpq(0) if v == 1 else _ball(v).log(), x)

    def sqrt(self, x: Value) -> Value:
        """√x, a fraction where it is one."""
        return _each(_root, x)

    def tanh(self, x: Value) -> Value:
        """tanh x; tanh 0 is exactly nought."""
        return _each(lambda v: fmpq(0) if v == 0 else _ball(v).tanh(), x)

    def power(self, x: Value, y: Value) -> Value:
        """x^y, a fraction where y is a whole number."""
        return np.frompyfunc(_power, 2, 1)(x, y) if isinstance(x, np.ndarray) else _power(x, y)

    def max(self, x: Value, axis: int | None = None) -> Value:
        """The largest entry: a ball that holds it where balls overlap."""
        return _fold(_larger, x, axis)

    def min(self, x: Value, axis: int | None = None) -> Value:
        """The smallest entry."""
        return -_fold(_larger, -x, axis)


FLOATS, EXACT = Floats(), Exact()
Arithmetic = Floats | Exact
"""What the two sides of a claim may be written with, besides + − · / @ and comparisons."""


def to_floats(value: Value) -> Value:
    """A whole number stays one, everything else becomes a float or an array of floats."""
    if isinstance(value, np.ndarray):
        return np.array([float(v) for v in value.flat]).reshape(value.shape)
    return value if isinstance(value, int) else float(value)


def to_exact(value: Value) -> Value:
    """The same number as a fraction: a float is the dyadic fraction it stands for."""
    if isinstance(value, np.ndarray):
        return fill(value.shape, (to_exact(v) for v in value.flat))
    if isinstance(value, int):  # a size or a count: it also indexes and repeats
        return value
    fraction = Fraction(value)
    return fmpq(fraction.numerator, fraction.denominator)


def to_float(value: Value) -> float:
    """A number of either arithmetic as the nearest float, for showing only."""
    if isinstance(value, arb):
        return float(value.mid())
    return float(Fraction(int(value.p), int(value.q))) if isinstance(value, fmpq) else float(value)


@contextmanager
def precise() -> Iterator[None]:
    """Balls carry `PRECISION` bits; the setting before it is put back."""
    before, ctx.prec = ctx.prec, PRECISION
    try:
        yield
    finally:
        ctx.prec = before


def fill(shape: tuple[int, ...], entries: Iterable[Value]) -> np.ndarray:
    """An array of objects with these entries, row by row."""
    out = np.empty(shape, dtype=object)
    for index, entry in enumerate(entries):
        out.reshape(-1)[index] = entry
    return out


def _ball(value: Value) -> arb:
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
    return _ball(value).sqrt()


def _power(x: Value, y: Value) -> Value:
    if isinstance(y, int) or (isinstance(y, fmpq) and y.q == 1):
        return x ** int(y)
    return (_ball(y) * _ball(x).log()).exp()


def _larger(x: Value, y: Value) -> Value:
    if x >= y:
        return x
    return y if y >= x else _ball(x).max(_ball(y))


def _fold(pick: Callable[[Value, Value], Value], x: Value, axis: int | None) -> Value:
    if not isinstance(x, np.ndarray):
        return x
    if axis is None:
        return reduce(pick, x.flat)
    return np.frompyfunc(pick, 2, 1).reduce(x, axis=axis)
