"""The verdict on a claim, by a search for a counterexample: structured starts, random draws, ascent on left/right.

The length of a search is a number of evaluations and its random numbers are seeded by name, so every run gives the same
result; a deadline can only stop it early. A violation found in floats counts only after it is verified exactly.
"""

import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from flint import arb, fmpq
from numpy.random import Generator as Random
from numpy.random import default_rng

from depthgauge.base.format import number
from depthgauge.papers.ledger.arithmetic import EXACT, FLOATS, Value, fill, precise, to_exact, to_float, to_floats
from depthgauge.papers.ledger.claim import (
    Claim,
    Inequality,
    Instance,
    Misprint,
    Observed,
    Relation,
    Size,
    Witness,
    plain,
)

# --- From a violation found in floats to a witness with simple entries ------------------------------------------------

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
        for simpler in _simpler_numbers(value.flat[index]):
            changed = value.copy()
            changed.flat[index] = simpler
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


EVALUATIONS = 3000
"""The number of instances that a search evaluates, divided equally among the sizes."""
_DRAWN = 0.3
"""The share of the evaluations spent on starts and random draws; the rest is spent on ascent from the best ones."""
_CHAINS = 3
_ROUNDING = 1e-9
"""A relative violation smaller than this in floats is not verified exactly."""
_NOISE = 1e-11
"""A left side smaller than this may be rounding error; its ratio is ignored."""
_VERIFICATIONS = 12
"""The number of candidates of one size that are verified exactly; further ones are attributed to rounding."""


class StoppedError(Exception):
    """The deadline passed before the search ended."""


def search(
    inequality: Inequality, name: str, evaluations: int = EVALUATIONS, deadline: float | None = None
) -> Observed:
    """Search for a counterexample to an inequality, smallest sizes first; `name` seeds the random numbers.

    The verdict is `undecided` if no instance that satisfies the hypotheses was found.
    """
    seen, best, where = 0, 0.0, None
    clean: list[Size] = []
    for index, size in enumerate(inequality.sizes):
        random = default_rng([zlib.crc32(name.encode()), index])
        at_size = _SearchAtSize(inequality, size, random, evaluations // len(inequality.sizes), deadline)
        witness = at_size.run()
        seen += at_size.seen
        if where is None or at_size.best > best:
            best, where = at_size.best, at_size.where
        if witness is not None:
            remarks = (f"No counterexample was found at the smaller sizes {_listed(clean)}.",) if clean else ()
            return Observed("fails", witness.ratio, seen, remarks, witness)
        clean.append(size)
    if where is None:
        return Observed("undecided", None, seen, ("No instance that satisfies the hypotheses was found.",))
    return Observed("holds", _exact_ratio(inequality, where), seen, (f"Sizes searched: {_listed(clean)}.",))


def judge(claim: Claim, evaluations: int = EVALUATIONS, deadline: float | None = None) -> Observed:
    """Check one claim.

    After `deadline` (a time of `time.monotonic`) no check is started and searches end as `undecided`. A study that has
    started, and the verification of a counterexample that a search has found, run to their end.
    """
    if deadline is not None and time.monotonic() > deadline:
        return Observed("undecided", None, 0, ("The time budget ran out before this check started.",))
    try:
        if isinstance(claim.check, Inequality):
            return search(claim.check, claim.id, evaluations, deadline)
        if isinstance(claim.check, Misprint):
            return _judge_misprint(claim.check, claim.id, evaluations, deadline)
        return claim.check.run()
    except StoppedError:
        return Observed("undecided", None, 0, ("The time budget ran out during the search.",))


def _judge_misprint(check: Misprint, name: str, evaluations: int, deadline: float | None) -> Observed:
    """Return `misprint` if the printed form fails and the proved form holds, else the verdict on the printed form."""
    printed = search(check.printed, name, evaluations, deadline)
    if printed.verdict != "fails":
        return printed
    proved = search(check.proved, f"{name}/proved", evaluations, deadline)
    seen = printed.evaluations + proved.evaluations
    form = f"The intended form is {check.proved.text()}"
    if proved.verdict == "holds":
        reached = "" if proved.ratio is None else f" (largest ratio seen {number(proved.ratio, 6)})"
        remark = f"{form}; the search found no counterexample to it{reached}."
        return replace(printed, verdict="misprint", evaluations=seen, remarks=(*printed.remarks, remark))
    verdict = "fails too" if proved.verdict == "fails" else "is undecided"
    return replace(printed, evaluations=seen, remarks=(*printed.remarks, f"{form}; it {verdict}."))


def _listed(sizes: Sequence[Size]) -> str:
    return ", ".join("(" + ", ".join(f"{k} = {v}" for k, v in size.items()) + ")" for size in sizes)


def _exact_ratio(inequality: Inequality, instance: Instance) -> float | None:
    """Return left/right in exact arithmetic, so that rounding cannot push it over 1; for an equation it is 1."""
    if inequality.relation == "=":
        return 1.0
    with precise():
        _, left, right = inequality.evaluate(EXACT, **{name: to_exact(value) for name, value in instance.items()})
        ratios = [to_float(x / y) for x, y in entries(left, right) if to_float(y) > 0]
    return max(ratios, default=None)


def ratio(left: Value, right: Value, relation: Relation) -> float:
    """Return the largest left/right over the entries, in floats; for an equation also of right/left.

    0/0 counts as 0 for ≤ and as 1 for < and =.
    """
    left, right = np.broadcast_arrays(np.asarray(left, dtype=float), np.asarray(right, dtype=float))
    if not (np.isfinite(left).all() and np.isfinite(right).all()):
        return 0.0
    if relation == "=":
        apart = np.abs(left - right) > _ROUNDING * (1 + np.maximum(np.abs(left), np.abs(right)))
        low, high = np.minimum(np.abs(left), np.abs(right)), np.maximum(np.abs(left), np.abs(right))
        return float(np.where(apart, np.divide(high, low, out=np.full_like(low, np.inf), where=low > 0), 1.0).max())
    none = np.where((relation == "<") & (left == right), 1.0, 0.0)
    over = np.where(left > right + _NOISE, np.inf, none)
    return float(np.divide(left, right, out=over, where=(right > 0) & (np.abs(left) > _NOISE)).max())


class _SearchAtSize:
    def __init__(
        self, inequality: Inequality, size: Size, random: Random, evaluations: int, deadline: float | None
    ) -> None:
        self.inequality, self.size, self.random = inequality, size, random
        self.evaluations, self.deadline = max(evaluations, 1), deadline
        self.seen, self.verified = 0, 0
        self.best = -1.0
        self.where: Instance | None = None
        self.witness: Witness | None = None

    def run(self) -> Witness | None:
        """Evaluate the starts and random draws, then ascend from the best of them."""
        pool: list[tuple[float, Instance]] = []
        for instance in self._initial_instances():
            pool.append((self._evaluate(instance), instance))
            if self._done():
                return self.witness
        pool.sort(key=lambda pair: -pair[0])
        for chain, (value, instance) in enumerate(pool[:_CHAINS]):
            end = self.seen + (self.evaluations - self.seen) // (min(_CHAINS, len(pool)) - chain)
            self._ascend(value, instance, end)
            if self._done():
                break
        return self.witness

    def _initial_instances(self) -> Iterable[Instance]:
        yield from (_as_floats(start) for start in self.inequality.starts(self.size))
        while self.seen < self.evaluations * _DRAWN:
            yield _as_floats(self.inequality.draw(self.random, self.size))

    def _done(self) -> bool:
        return self.witness is not None or self.seen >= self.evaluations

    def _evaluate(self, instance: Instance) -> float:
        """Return left/right at an instance, or −1 if it violates the hypotheses; verify a violation immediately."""
        self.seen += 1
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise StoppedError
        inequality = self.inequality
        with np.errstate(all="ignore"):
            if not inequality.allowed(FLOATS, **instance):
                return -1.0
            _, left, right = inequality.evaluate(FLOATS, **instance)
            value = ratio(left, right, inequality.relation)
        strict = inequality.relation == "<" and value >= 1 - _ROUNDING
        if value > 1 + _ROUNDING or strict:
            self._verify(instance, value)
            if self.witness is None:
                return -1.0  # a rounding error; do not ascend from here
        if value > self.best:
            self.best, self.where = value, instance
        return value

    def _verify(self, instance: Instance, value: float) -> None:
        if self.verified < _VERIFICATIONS:
            self.verified += 1
            found = simplest(self.inequality, instance, value)
            self.witness = None if found is None else found.witness()

    def _ascend(self, value: float, instance: Instance, end: int) -> None:
        """Take random steps and keep those that do not decrease the ratio; adapt the step size to the success."""
        scale = 0.3
        while self.seen < end and self.witness is None:
            step = self._step(instance, scale)
            reached = self._evaluate(step)
            if reached >= value and reached >= 0:
                scale = min(scale * 1.3, 3.0) if reached > value else scale
                value, instance = reached, step
            else:
                scale = max(scale * 0.97, 1e-6)

    def _step(self, instance: Instance, scale: float) -> Instance:
        """Return an instance near this one: add noise, replace one entry, scale a matrix, or reduce it to its signs."""
        free = [name for name in instance if name not in self.inequality.fixed and not isinstance(instance[name], int)]
        if not free:
            return _as_floats(self.inequality.draw(self.random, self.size))
        kind = self.random.integers(4)
        if kind == 0:  # noise on every value
            return {**instance, **{name: self._noisy(instance[name], scale) for name in free}}
        name = free[self.random.integers(len(free))]
        old = instance[name]
        if kind == 1 and isinstance(old, np.ndarray):
            return {**instance, name: self._one_entry(old)}
        if kind == 2:
            return {**instance, name: old * float(np.exp(scale * self.random.normal()))}
        if kind == 3 and isinstance(old, np.ndarray) and self.random.random() < 0.2:
            return {**instance, name: np.where(old >= 0, 1.0, -1.0) * np.abs(old).max()}
        return {**instance, name: self._noisy(old, scale)}

    def _noisy(self, old: Any, scale: float) -> Any:
        if isinstance(old, np.ndarray):
            return old + scale * (0.1 + np.abs(old).mean()) * self.random.normal(size=old.shape)
        return old + scale * (0.1 + abs(old)) * float(self.random.normal())

    def _one_entry(self, old: np.ndarray) -> np.ndarray:
        new, top = old.copy(), float(np.abs(old).max()) or 1.0
        options = (0.0, top, -top, 2 * top, float(old.flat[self.random.integers(old.size)]))
        new.flat[self.random.integers(old.size)] = options[self.random.integers(len(options))]
        return new


def _as_floats(instance: Instance) -> Instance:
    return {name: to_floats(value) for name, value in instance.items()}
