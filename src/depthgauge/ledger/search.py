"""The search for an instance at which a statement fails: structured starts, random draws, then ascent on left/right.

It is counted in evaluations, never in seconds, so that the same search ends the same way every time; a deadline only
stops it. A violation seen in floats counts for nothing until it stands in exact arithmetic.
"""

import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator as Random
from numpy.random import default_rng

from depthgauge.ledger.arithmetic import FLOATS, Value, to_floats
from depthgauge.ledger.claim import Inequality, Instance, Relation, Size, Witness
from depthgauge.ledger.witness import simplest

EVALUATIONS = 3000
"""How many instances a search looks at, shared out among the sizes."""
_DRAWN = 0.3
"""The share of them that is drawn; the others climb from the best."""
_CHAINS = 3
_ROUNDING = 1e-9
"""A violation smaller than this in floats is not worth an exact check."""
_NOISE = 1e-11
"""A left side smaller than this may be all rounding; it is no place to climb from."""
_PROOFS = 12
"""How many candidates of one size are tried in exact arithmetic before the violation is put down to rounding."""


class StoppedError(Exception):
    """The deadline came before the search was done."""


@dataclass(frozen=True)
class Outcome:
    """The largest ratio seen and where, the witness if there is one, and the sizes at which there was none."""

    ratio: float
    instance: Instance | None
    witness: Witness | None
    evaluations: int
    clean: tuple[Size, ...]


def search(inequality: Inequality, name: str, evaluations: int = EVALUATIONS, deadline: float | None = None) -> Outcome:
    """Look for a violation, smallest sizes first; `name` seeds the random numbers."""
    seen, best, where = 0, 0.0, None
    clean: list[Size] = []
    for index, size in enumerate(inequality.sizes):
        random = default_rng([zlib.crc32(name.encode()), index])
        climb = _Climb(inequality, size, random, evaluations // len(inequality.sizes), deadline)
        witness = climb.run()
        seen += climb.seen
        if where is None or climb.best > best:
            best, where = climb.best, climb.where
        if witness is not None:
            return Outcome(climb.best, climb.where, witness, seen, tuple(clean))
        clean.append(size)
    return Outcome(best, where, None, seen, tuple(clean))


def ratio(left: Value, right: Value, relation: Relation) -> float:
    """The largest left/right over the entries, in floats; for an equation the larger of left/right and right/left.

    Nought against nought counts as 0 for ≤, and as 1 where it matters (<, =).
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


class _Climb:
    """The search at one size."""

    def __init__(
        self, inequality: Inequality, size: Size, random: Random, evaluations: int, deadline: float | None
    ) -> None:
        self.inequality, self.size, self.random = inequality, size, random
        self.evaluations, self.deadline = max(evaluations, 1), deadline
        self.seen, self.proofs = 0, 0
        self.best = -1.0
        self.where: Instance | None = None
        self.witness: Witness | None = None

    def run(self) -> Witness | None:
        """Starts, draws, then chains of climbing from the best of them."""
        pool: list[tuple[float, Instance]] = []
        for instance in self._first():
            pool.append((self._look(instance), instance))
            if self._done():
                return self.witness
        pool.sort(key=lambda pair: -pair[0])
        for chain, (value, instance) in enumerate(pool[:_CHAINS]):
            end = self.seen + (self.evaluations - self.seen) // (min(_CHAINS, len(pool)) - chain)
            self._ascend(value, instance, end)
            if self._done():
                break
        return self.witness

    def _first(self) -> Iterable[Instance]:
        yield from (_as_floats(start) for start in self.inequality.starts(self.size))
        while self.seen < self.evaluations * _DRAWN:
            yield _as_floats(self.inequality.draw(self.random, self.size))

    def _done(self) -> bool:
        return self.witness is not None or self.seen >= self.evaluations

    def _look(self, instance: Instance) -> float:
        """left/right at an instance, −1 where the hypotheses do not hold; a violation is proved at once."""
        self.seen += 1
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise StoppedError
        inequality = self.inequality
        with np.errstate(all="ignore"):
            if not inequality.allowed(FLOATS, **instance):
                return -1.0
            value = ratio(*_sides(inequality, instance), inequality.relation)
        strict = inequality.relation == "<" and value >= 1 - _ROUNDING
        if value > 1 + _ROUNDING or strict:
            self._prove(instance, value)
            if self.witness is None:
                return -1.0  # rounding, not a violation: not a place to climb from either
        if value > self.best:
            self.best, self.where = value, instance
        return value

    def _prove(self, instance: Instance, value: float) -> None:
        if self.proofs < _PROOFS:
            self.proofs += 1
            found = simplest(self.inequality, instance, value)
            self.witness = None if found is None else found.witness()

    def _ascend(self, value: float, instance: Instance, end: int) -> None:
        """Random steps that are kept when the ratio does not fall; their size follows their success."""
        scale = 0.3
        while self.seen < end and self.witness is None:
            step = self._step(instance, scale)
            reached = self._look(step)
            if reached >= value and reached >= 0:
                scale = min(scale * 1.3, 3.0) if reached > value else scale
                value, instance = reached, step
            else:
                scale = max(scale * 0.97, 1e-6)

    def _step(self, instance: Instance, scale: float) -> Instance:
        """An instance near this one: a little noise, one entry moved far, a matrix scaled or pushed to a corner."""
        free = [name for name in instance if name not in self.inequality.fixed and not isinstance(instance[name], int)]
        if not free:
            return _as_floats(self.inequality.draw(self.random, self.size))
        kind = self.random.integers(4)
        if kind == 0:  # everything a little
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


def _sides(inequality: Inequality, instance: Instance) -> tuple[Value, Value]:
    work = inequality.work(FLOATS, **instance)
    while True:
        try:
            next(work)
        except StopIteration as end:
            left, right = end.value
            return left, right * float(inequality.slack)
