"""From a violation found in floats to a witness: an exactly verified counterexample with simple entries."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb, fmpq

from depthgauge.papers.ledger.arithmetic import EXACT, Value, fill, precise, to_exact, to_float
from depthgauge.papers.ledger.claim import Inequality, Instance, Relation
from depthgauge.papers.ledger.finding import Witness, plain

_DENOMINATORS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 100, 1000)
_KEPT = 0.5
"""The share of the violation that a simpler witness must keep."""
_ENOUGH = 0.1
"""A violation larger than this share of the right side need not be kept in full."""
_ROUNDS = 3
_READABLE = 12
"""A fraction with more characters than this is displayed as a decimal number."""


@dataclass(frozen=True)
class Refutation:
    """An instance at which, in exact arithmetic, the hypotheses hold and the statement fails.

    The instance has named arrays of fractions, fractions and integers; `relation` is the violated one.
    """

    instance: dict[str, Any]
    left: Value
    right: Value
    steps: Mapping[str, Value]
    relation: Relation = "<="

    def witness(self) -> Witness:
        """Return the refutation as a record of plain data."""
        over = margin(self)
        ratio = None if math.isinf(over) else 1 + over
        steps = tuple((name, show(value)) for name, value in self.steps.items())
        instance = {name: plain(value) for name, value in self.instance.items()}
        return Witness(instance, show(self.left), show(self.right), ratio, steps)


def refute(inequality: Inequality, instance: Instance) -> Refutation | None:
    """Return the refutation of the statement at this instance, or None if exact arithmetic does not confirm it."""
    exact = {name: to_exact(value) for name, value in instance.items()}
    with precise():
        try:
            if not inequality.allowed(EXACT, **exact):
                return None
            steps, left, right = inequality.evaluate(EXACT, **exact)
        except (ZeroDivisionError, OverflowError):
            return None
        if not violated(left, right, inequality.relation):
            return None
    fractions = {name: _fractions(value) for name, value in exact.items()}
    return Refutation(fractions, left, right, steps, inequality.relation)


def violated(left: Value, right: Value, relation: Relation) -> bool:
    """Return whether the relation fails for the exact values of at least one entry."""
    pairs = list(entries(left, right))
    if relation == "<":
        return any(bool(x >= y) for x, y in pairs)
    return any(bool(x > y or (relation == "=" and x < y)) for x, y in pairs)


def entries(left: Value, right: Value) -> Iterator[tuple[Value, Value]]:
    """Yield the pairs of entries of the two sides."""
    yield from np.broadcast(np.asarray(left, dtype=object), np.asarray(right, dtype=object))


def margin(refutation: Refutation) -> float:
    """Return left/right − 1 at the worst entry, in both directions for an equation; infinite if the divisor is zero."""
    worst = 0.0
    for left, right in entries(refutation.left, refutation.right):
        x, y = to_float(left), to_float(right)
        pairs = ((x, y), (y, x)) if refutation.relation == "=" else ((x, y),)
        worst = max(worst, *(a / b - 1 if b > 0 else (float("inf") if a > b else 0.0) for a, b in pairs))
    return worst


def simplest(inequality: Inequality, instance: Instance, ratio: float) -> Refutation | None:
    """Return a refutation at a simple instance near this one, or None if there is none among those tried.

    First all entries are rounded to a common denominator. Then simpler values are tried, matrix by matrix and entry by
    entry. `ratio` is left/right at the instance; a simpler instance must keep a share of the violation.
    """
    free = [n for n in instance if n not in inequality.fixed and not isinstance(instance[n], int)]
    keep = _KEPT * min(ratio - 1, _ENOUGH) if inequality.relation == "<=" else 0.0
    found = None
    for rounded in _rounded(instance, free):
        refutation = refute(inequality, rounded)
        if refutation is not None and (found is None or margin(refutation) > margin(found)):
            found = refutation
            if margin(found) >= keep:
                break
    if found is None:
        return None
    keep = min(keep, margin(found))
    for _ in range(_ROUNDS):
        before = cost(found.instance)
        for name in free:
            for value in _simpler(found.instance[name]):
                candidate = {**found.instance, name: value}
                if cost(candidate) < cost(found.instance):
                    refutation = refute(inequality, candidate)
                    if refutation is not None and margin(refutation) >= keep:
                        found = refutation
        if cost(found.instance) == before:
            break
    return found


def cost(instance: Instance) -> float:
    """Return how long an instance is to read: equal rows count once, a constant row as one entry, zeros little."""
    return sum(_cost(value) for value in instance.values())


def _cost(value: Any) -> float:
    if not isinstance(value, np.ndarray):
        fraction = Fraction(value)
        size = fraction.numerator.bit_length() + 1.5 * (fraction.denominator.bit_length() - 1)
        return size + (0.5 if fraction < 0 else 0.0) if fraction else 0.3
    if value.ndim > 1:
        return sum(_cost(np.array(row, dtype=object)) for row in {tuple(row) for row in value})
    distinct = set(value)
    return 1.2 * _cost(distinct.pop()) if len(distinct) == 1 else sum(_cost(entry) for entry in value)


def _rounded(instance: Instance, free: list[str]) -> Iterator[dict[str, Any]]:
    for q in _DENOMINATORS:
        yield {n: _on_grid(v, q) if n in free else _fractions(to_exact(v)) for n, v in instance.items()}
    yield {name: _fractions(to_exact(value)) for name, value in instance.items()}


def _on_grid(value: Any, q: int) -> Any:
    if isinstance(value, np.ndarray):
        return fill(value.shape, (Fraction(round(float(v) * q), q) for v in value.flat))
    return Fraction(round(float(value) * q), q)


def _simpler(value: Any) -> Iterator[Any]:
    """Yield simpler values: for the whole matrix, then entry by entry."""
    if not isinstance(value, np.ndarray):
        yield from _simpler_numbers(value)
        return
    largest = max(abs(v) for v in value.flat)
    for size in dict.fromkeys((Fraction(0), Fraction(1), largest)):
        yield fill(value.shape, (size for _ in value.flat))
        yield fill(value.shape, (size if v > 0 else (-size if v < 0 else Fraction(0)) for v in value.flat))
    for index in range(value.size):
        for number in _simpler_numbers(value.flat[index]):
            changed = value.copy()
            changed.flat[index] = number
            yield changed


def _simpler_numbers(value: Fraction) -> Iterator[Fraction]:
    sign = -1 if value < 0 else 1
    yield Fraction(0)
    yield Fraction(sign)
    yield abs(value)
    for q in _DENOMINATORS:
        yield Fraction(round(value * q), q)
        yield Fraction(sign, q)


def _fractions(value: Any) -> Any:
    """Convert fmpq numbers to Fractions; everything else stays as it is."""
    if isinstance(value, np.ndarray):
        return fill(value.shape, (_fractions(v) for v in value.flat))
    if isinstance(value, fmpq):
        return Fraction(int(value.p), int(value.q))
    return value


def show(value: Value) -> str:
    """Return a number, vector or matrix as text: short fractions exactly, everything else with seven digits."""
    if isinstance(value, np.ndarray):
        return "[" + ", ".join(show(v) for v in value) + "]"
    if isinstance(value, arb):
        return value.str(7, radius=False) if value.rad() < 1e-20 else value.str(7)
    text = str(_fractions(value))
    return text if len(text) <= _READABLE else arb(value).str(7, radius=False)
