"""From a violation seen in floats to a witness that a person can check: proved exactly, and made simple."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb, fmpq

from depthgauge.ledger.arithmetic import EXACT, Value, fill, precise, to_exact, to_float
from depthgauge.ledger.claim import Inequality, Instance, Relation, Witness

_DENOMINATORS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 50, 100, 1000)
_KEPT = 0.5
"""The share of the violation, up to a tenth of the right side, that a simpler witness must keep."""
_ENOUGH = 0.1
_ROUNDS = 3
_READABLE = 12
"""A fraction with more characters than this is shown in decimals."""


@dataclass(frozen=True)
class Proof:
    """The two sides at an instance where the hypotheses certainly hold and the statement certainly fails."""

    instance: dict[str, Any]
    left: Value
    right: Value
    steps: tuple[tuple[str, Value], ...]
    relation: Relation = "<="

    def witness(self) -> Witness:
        """The same as text, for readers."""
        over = margin(self)
        ratio = None if math.isinf(over) else 1 + over
        steps = tuple((name, show(value)) for name, value in self.steps)
        return Witness(self.instance, show(self.left), show(self.right), ratio, steps)


def prove(inequality: Inequality, instance: Instance) -> Proof | None:
    """The proof that the statement fails at the instance, if there is one."""
    exact = {name: to_exact(value) for name, value in instance.items()}
    with precise():
        try:
            if not inequality.allowed(EXACT, **exact):
                return None
            steps, left, right = worked(inequality, exact)
        except (ZeroDivisionError, OverflowError):
            return None
        if not violated(left, right, inequality.relation):
            return None
    fractions = {name: _fractions(value) for name, value in exact.items()}
    return Proof(fractions, left, right, steps, inequality.relation)


def worked(inequality: Inequality, exact: Instance) -> tuple[tuple[tuple[str, Value], ...], Value, Value]:
    """The steps and the two sides in exact arithmetic."""
    work, steps = inequality.work(EXACT, **exact), []
    while True:
        try:
            steps.append(next(work))
        except StopIteration as end:
            left, right = end.value
            return tuple(steps), left, right * EXACT.number(inequality.slack)


def violated(left: Value, right: Value, relation: Relation) -> bool:
    """Whether the relation certainly fails in at least one entry."""
    test: Mapping[str, Callable[[Value, Value], bool]] = {
        "<=": lambda x, y: x > y,
        "<": lambda x, y: x >= y,
        "=": lambda x, y: x > y or x < y,
    }
    return any(bool(test[relation](x, y)) for x, y in entries(left, right))


def entries(left: Value, right: Value) -> Iterator[tuple[Value, Value]]:
    """The pairs of entries of two sides."""
    yield from np.broadcast(np.asarray(left, dtype=object), np.asarray(right, dtype=object))


def margin(proof: Proof) -> float:
    """left/right − 1 at the worst entry, for an equation in either direction; infinite where the divisor is nought."""
    worst = 0.0
    for left, right in entries(proof.left, proof.right):
        x, y = to_float(left), to_float(right)
        pairs = ((x, y), (y, x)) if proof.relation == "=" else ((x, y),)
        worst = max(worst, *(a / b - 1 if b > 0 else (float("inf") if a > b else 0.0) for a, b in pairs))
    return worst


def simplest(inequality: Inequality, instance: Instance, ratio: float) -> Proof | None:
    """The proof at a simple instance near this one, or None if the statement certainly fails at none near it.

    First everything is rounded to one denominator; then matrix by matrix and entry by entry simpler values are tried.
    `ratio` is left/right at the instance; a good part of the violation is kept.
    """
    free = [n for n in instance if n not in inequality.fixed and not isinstance(instance[n], int)]
    keep = _KEPT * min(ratio - 1, _ENOUGH) if inequality.relation == "<=" else 0.0
    found = None
    for whole in _rounded(instance, free):
        proof = prove(inequality, whole)
        if proof is not None and (found is None or margin(proof) > margin(found)):
            found = proof
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
                    proof = prove(inequality, candidate)
                    if proof is not None and margin(proof) >= keep:
                        found = proof
        if cost(found.instance) == before:
            break
    return found


def cost(instance: Instance) -> float:
    """How much there is to read: equal rows once, a row of equal entries as one entry, nought nearly free."""
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
    """Values with less to read: of a matrix as a whole, then entry by entry."""
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
    """fmpq and floats as Fractions; sizes stay whole numbers."""
    if isinstance(value, np.ndarray):
        return fill(value.shape, (_fractions(v) for v in value.flat))
    if isinstance(value, fmpq):
        return Fraction(int(value.p), int(value.q))
    return value


def show(value: Value) -> str:
    """A number, vector or matrix for a reader: short fractions as they are, everything else in seven digits."""
    if isinstance(value, np.ndarray):
        return "[" + ", ".join(show(v) for v in value) + "]"
    if isinstance(value, arb):
        return value.str(7, radius=False) if value.rad() < 1e-20 else value.str(7)
    text = str(_fractions(value))
    return text if len(text) <= _READABLE else arb(value).str(7, radius=False)
