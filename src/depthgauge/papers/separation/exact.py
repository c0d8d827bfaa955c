"""The probability of success in closed form, for self-attention and cross-attention.

Let κ₁ and κ₀ be the classes of j₃ in the two data sets. They coincide with probability 1/K. The sign vectors are
independent, so conditionally on κ₁ = κ₀ or κ₁ ≠ κ₀, P(success) = gᵐ − hᵐ with

    g = P(one y gives F_lin(D₁) = F(D₀) = F_lin(D₀) = 0),
    h = P(one y gives F_lin(D₁) = F(D₀) = F_lin(D₀) = F(D₁) = 0).

Both are sums over y₁, y_d, y_κ1, y_κ0 and the number p ~ Bin(r, ½) of + among the r remaining classes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from flint import arb, ctx
from jaxtyping import Int

from depthgauge._records import ArrayRecord
from depthgauge.papers.separation.decisions import Table, tables
from depthgauge.papers.separation.settings import AttentionSetting

_PRECISION = 128
_ENOUGH_BITS = 60

Counts = Int[np.ndarray, " p"]


@dataclass(frozen=True)
class ExactProbabilities:
    """The probabilities of success and of its conditions F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0."""

    success: float
    parts: tuple[float, float, float, float]


def exact(setting: AttentionSetting) -> ExactProbabilities:
    """Compute the probabilities of success and of its four conditions."""
    strong_1, lin_1, strong_0, lin_0 = tables(setting)
    classes, m = setting.classes, setting.m
    violated = lin_1 | strong_0 | lin_0
    three_zeros, four_zeros = _count(~violated), _count(~violated & ~strong_1)
    cases = [_Powers(three_zeros, four_zeros, signs=3, m=m, share=(1, classes))]
    if classes > 1:
        cases.append(_Powers(*_different_classes(setting), signs=4, m=m, share=(classes - 1, classes)))
    every = np.full(classes, 8)
    nothing = np.zeros(classes, dtype=np.int64)
    positive = _Powers(every, _count(~strong_1), signs=3, m=m)
    zeros = [_Powers(_count(~table), nothing, signs=3, m=m) for table in (lin_1, strong_0, lin_0)]
    p, q, r, s = (_value([part]) for part in (positive, *zeros))
    return ExactProbabilities(_value(cases), (p, q, r, s))


def _different_classes(setting: AttentionSetting) -> tuple[Counts, Counts]:
    """Return the counts for κ₁ ≠ κ₀. Each data set has the class κ of the other among its other classes."""
    strong_1, lin_1, strong_0, lin_0 = tables(setting)
    remaining = setting.classes - 2
    three_zeros = np.zeros(remaining + 1, dtype=np.int64)
    four_zeros = np.zeros(remaining + 1, dtype=np.int64)
    p = np.arange(remaining + 1)
    for own_1 in (0, 1):
        for own_0 in (0, 1):
            plus_1, plus_0 = p + own_0, p + own_1
            violated = lin_1[:, :, own_1, plus_1] | (strong_0 | lin_0)[:, :, own_0, plus_0]
            three_zeros += (~violated).sum(axis=(0, 1))
            four_zeros += (~violated & ~strong_1[:, :, own_1, plus_1]).sum(axis=(0, 1))
    return three_zeros, four_zeros


def _count(table: Table) -> Counts:
    """Return, for each p, the number of sign patterns (y₁, y_d, y_κ) for which the table is True."""
    return np.asarray(table.sum(axis=(0, 1, 2)))


@dataclass(frozen=True, eq=False, repr=False)
class _Powers(ArrayRecord):
    """The number share · (gᵐ − hᵐ), where g and h are given by counts of sign patterns for each p."""

    three_zeros: Counts
    four_zeros: Counts
    signs: int
    m: int
    share: tuple[int, int] = (1, 1)

    @property
    def zero(self) -> bool:
        return bool(np.array_equal(self.three_zeros, self.four_zeros))

    def to_arb(self, precision: int) -> Any:
        probabilities = _binomial(len(self.three_zeros) - 1, precision)
        g, h = (
            sum((int(k) * p for k, p in zip(counts, probabilities, strict=True) if k), arb(0)) / 2**self.signs
            for counts in (self.three_zeros, self.four_zeros)
        )
        return (g**self.m - h**self.m) * self.share[0] / self.share[1]


def _value(cases: list[_Powers]) -> float:
    """Return the sum of the cases as a float, computed with at least 60 correct bits."""
    nonzero = [case for case in cases if not case.zero]
    if not nonzero:
        return 0.0
    precision = _PRECISION
    while True:
        with ctx.workprec(precision):
            total = sum((case.to_arb(precision) for case in nonzero), arb(0))
            if total.rel_accuracy_bits() >= _ENOUGH_BITS:
                return float(total.mid())
        precision *= 2


@lru_cache(maxsize=16)
def _binomial(r: int, precision: int) -> tuple[Any, ...]:
    """Return C(r, p)/2^r for p = 0, …, r as arb. `precision` is the working precision, as a key for the cache."""
    probability = arb(1) / arb(2) ** r
    probabilities = [probability]
    for p in range(r):
        probability = probability * (r - p) / (p + 1)
        probabilities.append(probability)
    return tuple(probabilities)
