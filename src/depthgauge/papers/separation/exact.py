"""The probability of success in closed form, for self-attention and cross-attention.

Let κ₁ and κ₀ be the classes of j₃ in the two data sets. They coincide with probability 1/K. The sign vectors are
independent, so conditionally on κ₁ = κ₀ or κ₁ ≠ κ₀, P(success) = gᵐ − hᵐ with

    g = P(one y gives F_lin(D₁) = F(D₀) = F_lin(D₀) = 0),
    h = P(one y gives F_lin(D₁) = F(D₀) = F_lin(D₀) = F(D₁) = 0).

Both are sums over y₁, y_d, y_κ1, y_κ0 and the number p ~ Bin(r, ½) of + among the r remaining classes.
"""

import itertools
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from flint import arb, ctx
from jaxtyping import Int

from depthgauge.papers.separation.decisions import Table, tables
from depthgauge.papers.separation.settings import AttentionSetting

_PRECISION = 128
_ENOUGH_BITS = 60

Counts = Int[np.ndarray, " p"]
PowerTerm = tuple[Counts, Counts, int, int, Fraction]


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
    cases: list[PowerTerm] = [(three_zeros, four_zeros, 3, m, Fraction(1, classes))]
    if classes > 1:
        cases.append((*_different_classes(setting), 4, m, Fraction(classes - 1, classes)))
    every, nothing, one = np.full(classes, 8), np.zeros(classes, dtype=np.int64), Fraction(1)
    positive = _value((every, _count(~strong_1), 3, m, one))
    q, r, s = (_value((_count(~table), nothing, 3, m, one)) for table in (lin_1, strong_0, lin_0))
    return ExactProbabilities(_value(*cases), (positive, q, r, s))


def _different_classes(setting: AttentionSetting) -> tuple[Counts, Counts]:
    """Return the counts for κ₁ ≠ κ₀. Each data set has the class κ of the other among its other classes."""
    strong_1, lin_1, strong_0, lin_0 = tables(setting)
    remaining = setting.classes - 2
    three_zeros, four_zeros = np.zeros((2, remaining + 1), dtype=np.int64)
    p = np.arange(remaining + 1)
    for own_1, own_0 in itertools.product((0, 1), repeat=2):
        plus_1, plus_0 = p + own_0, p + own_1
        violated = lin_1[:, :, own_1, plus_1] | (strong_0 | lin_0)[:, :, own_0, plus_0]
        three_zeros += (~violated).sum(axis=(0, 1))
        four_zeros += (~violated & ~strong_1[:, :, own_1, plus_1]).sum(axis=(0, 1))
    return three_zeros, four_zeros


def _count(table: Table) -> Counts:
    """Return, for each p, the number of sign patterns (y₁, y_d, y_κ) for which the table is True."""
    return np.asarray(table.sum(axis=(0, 1, 2)))


def _value(*cases: PowerTerm) -> float:
    """Return Σ share·(gᵐ − hᵐ) as a float, computed with at least 60 correct bits.

    A term has the counts for g and for h, the number of signs that they count, the exponent m and the share.
    """
    nonzero = [case for case in cases if not np.array_equal(case[0], case[1])]
    precision = _PRECISION
    while nonzero:
        with ctx.workprec(precision):
            total = sum((_powers(precision, *case) for case in nonzero), arb(0))
            if total.rel_accuracy_bits() >= _ENOUGH_BITS:
                return float(total.mid())
        precision *= 2
    return 0.0


def _powers(precision: int, three_zeros: Counts, four_zeros: Counts, signs: int, m: int, share: Fraction) -> Any:
    """Return share·(gᵐ − hᵐ) as arb, where g and h are given by counts of sign patterns for each p."""
    probabilities = _binomial(len(three_zeros) - 1, precision)
    g, h = (
        sum((int(k) * p for k, p in zip(counts, probabilities, strict=True) if k), arb(0)) / 2**signs
        for counts in (three_zeros, four_zeros)
    )
    return (g**m - h**m) * share.numerator / share.denominator


@lru_cache(maxsize=16)
def _binomial(r: int, precision: int) -> tuple[Any, ...]:
    """Return C(r, p)/2^r for p = 0, …, r as arb. `precision` is the working precision, as a key for the cache."""
    probability = arb(1) / arb(2) ** r
    probabilities = [probability]
    for p in range(r):
        probability = probability * (r - p) / (p + 1)
        probabilities.append(probability)
    return tuple(probabilities)
