"""The probability of success in closed form, for self- and cross-attention.

Sign vectors are independent, so given whether the classes κ₁, κ₀ of the two data sets' j₃ coincide (probability
1/K), P(success) = gᵐ − hᵐ with

    g = P(one y leaves F_lin(D₁), F(D₀) and F_lin(D₀) at zero),
    h = P(one y does that and leaves F(D₁) at zero too).

Both are sums over y₁, y_d, y_κ1, y_κ0 and the number p ~ Bin(r, ½) of + among the r remaining classes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from flint import arb, ctx
from jaxtyping import Int

from depthgauge.separation.decisions import Table, tables
from depthgauge.separation.settings import AttentionSetting

_PRECISION = 128
_ENOUGH_BITS = 60

Counts = Int[np.ndarray, " p"]


@dataclass(frozen=True)
class Exact:
    """`success` is P(E_success); `parts` are the probabilities of its four conditions, each on its own."""

    success: float
    parts: tuple[float, float, float, float]


def exact(setting: AttentionSetting) -> Exact:
    """The probabilities of E_success and of F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0."""
    strong_1, lin_1, strong_0, lin_0 = tables(setting)
    classes, m = setting.classes, setting.m
    together = _kept_and_quiet(strong_1, lin_1 | strong_0 | lin_0)
    cases = [_Powers(*together, signs=3, m=m, share=(1, classes))]
    if classes > 1:
        cases.append(_Powers(*_apart(setting), signs=4, m=m, share=(classes - 1, classes)))
    every = np.full(classes, 8)
    nothing = np.zeros(classes, dtype=np.int64)
    fires = _Powers(every, _count(~strong_1), signs=3, m=m)
    zeros = [_Powers(_count(~table), nothing, signs=3, m=m) for table in (lin_1, strong_0, lin_0)]
    return Exact(_value(cases), (_value([fires]), *(_value([zero]) for zero in zeros)))  # type: ignore[arg-type]


def _apart(setting: AttentionSetting) -> tuple[Counts, Counts]:
    """Counts for κ₁ ≠ κ₀: each data set sees the other's class among its other classes."""
    strong_1, lin_1, strong_0, lin_0 = tables(setting)
    remaining = setting.classes - 2
    kept = np.zeros(remaining + 1, dtype=np.int64)
    quiet = np.zeros(remaining + 1, dtype=np.int64)
    p = np.arange(remaining + 1)
    for own_1 in (0, 1):
        for own_0 in (0, 1):
            seen_1, seen_0 = p + own_0, p + own_1
            bad = lin_1[:, :, own_1, seen_1] | (strong_0 | lin_0)[:, :, own_0, seen_0]
            kept += (~bad).sum(axis=(0, 1))
            quiet += (~bad & ~strong_1[:, :, own_1, seen_1]).sum(axis=(0, 1))
    return kept, quiet


def _kept_and_quiet(fires: Table, bad: Table) -> tuple[Counts, Counts]:
    return _count(~bad), _count(~bad & ~fires)


def _count(table: Table) -> Counts:
    """For each p, how many of the patterns of the named signs are in the table."""
    return np.asarray(table.sum(axis=(0, 1, 2)))


@dataclass(frozen=True)
class _Powers:
    """share · (gᵐ − hᵐ), g and h given by counts of patterns for every p; h ≤ g pattern by pattern."""

    kept: Counts
    quiet: Counts
    signs: int
    m: int
    share: tuple[int, int] = (1, 1)

    @property
    def zero(self) -> bool:
        return bool(np.array_equal(self.kept, self.quiet))

    def ball(self, precision: int) -> Any:
        chances = _binomial(len(self.kept) - 1, precision)
        g, h = (
            sum((int(k) * chance for k, chance in zip(counts, chances, strict=True) if k), arb(0)) / 2**self.signs
            for counts in (self.kept, self.quiet)
        )
        return (g**self.m - h**self.m) * self.share[0] / self.share[1]


def _value(cases: list[_Powers]) -> float:
    """The sum of the cases as a float, at a precision that leaves no more than its last bit in doubt."""
    live = [case for case in cases if not case.zero]
    if not live:
        return 0.0
    precision = _PRECISION
    while True:
        with ctx.workprec(precision):
            total = sum((case.ball(precision) for case in live), arb(0))
            if total.rel_accuracy_bits() >= _ENOUGH_BITS:
                return float(total.mid())
        precision *= 2


@lru_cache(maxsize=16)
def _binomial(r: int, precision: int) -> tuple[Any, ...]:
    """Balls around C(r, p)/2^r for p = 0, …, r; called at the working precision it names."""
    chance = arb(1) / arb(2) ** r
    chances = [chance]
    for p in range(r):
        chance = chance * (r - p) / (p + 1)
        chances.append(chance)
    return tuple(chances)
