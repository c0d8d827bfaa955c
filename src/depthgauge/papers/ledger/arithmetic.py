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


# --- Norms, residuals, softmax, attention and networks, in either arithmetic -----------------------------------------
# The tokens are the rows of X [n, d]. W = Q Kᵀ, and the scores are β X W Xᵀ.


def max_norm(ar: Arithmetic, A: Value) -> Value:
    """‖A‖max = max |A_ij|, written ‖A‖∞ in paper A."""
    return ar.max(abs(A))


def entry_sum(A: Value) -> Value:
    """‖A‖₁ = Σ |A_ij|."""
    return abs(A).sum()


def column_norm(ar: Arithmetic, A: Value) -> Value:
    """‖A‖col = max_j Σ_i |A_ij|."""
    return ar.max(abs(A).sum(axis=0))


def row_norm(ar: Arithmetic, A: Value) -> Value:
    """‖A‖row = max_i Σ_j |A_ij|."""
    return ar.max(abs(A).sum(axis=1))


def spread(ar: Arithmetic, z: Value) -> Value:
    """range(z) = max z − min z."""
    return ar.max(z) - ar.min(z)


def row_ranges(ar: Arithmetic, E: Value) -> Value:
    """D_ii = max_j E_ij − min_j E_ij."""
    return ar.max(E, axis=1) - ar.min(E, axis=1)


def residual(ar: Arithmetic, Z: Value) -> Value:
    """Res(Z) = Z − 1yᵀ, where y_j is the mid-range of column j."""
    return Z - (ar.max(Z, axis=0) + ar.min(Z, axis=0)) / 2


def alpha(ar: Arithmetic, x: Value) -> Value:
    """α(x) = Σ_i exp(x_i)."""
    return ar.exp(x).sum()


def softm(ar: Arithmetic, x: Value) -> Value:
    """softm(x) = exp(x)/α(x) for a vector, or for every row of a matrix."""
    if ar is FLOATS:
        x = x - np.max(x, axis=-1, keepdims=True)  # avoids overflow; softmax is invariant under shifts
    e = ar.exp(x)
    return e / e.sum(axis=-1, keepdims=True)


def total_variation(p: Value, q: Value) -> Value:
    """TV(p, q) = ½ Σ |p_j − q_j|."""
    return abs(p - q).sum() / 2


def scores(X: Value, Q: Value, K: Value, beta: Value = 1) -> Value:
    """β X Q Kᵀ Xᵀ."""
    return beta * (X @ Q @ K.T @ X.T)


def attention(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, beta: Value = 1) -> Value:
    """softmv(X) = softm(β X Q Kᵀ Xᵀ) X V."""
    return softm(ar, scores(X, Q, K, beta)) @ X @ V


def layer(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, heads: int = 1, beta: Value = 1) -> Value:
    """X + Σ_h attention_h(X) with equal heads."""
    return X + heads * attention(ar, X, Q, K, V, beta)


def depth(ar: Arithmetic, X: Value, weights: "tuple[Any, Any, Any]", layers: int, heads: int) -> Value:
    """X_ℓ, the output of ℓ equal layers with equal heads."""
    for _ in range(layers):
        X = layer(ar, X, *weights, heads=heads)
    return X
