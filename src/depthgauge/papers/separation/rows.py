"""The distinct rows of the attention output, each as a few groups of keys with equal scores.

The class of a token is its row of the repeated identity; κ is the class of j₃. For a row of c and a sign vector y,
⟨c, y⟩ depends only on y₁, y_κ, the sum S of the signs of the other K − 1 classes, the sign σ of the row's own class if
that is not κ, and y_d (self-attention only). Values are divided by √(log n) for self-attention and scores by log n, so
all numbers in this file are rational.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from flint import arb

from depthgauge.papers.separation.score_maps import ScoreMap, to_arb, weights
from depthgauge.papers.separation.settings import AttentionSetting, Dataset, SelfAttention, decimal, special

_ZERO = Fraction(0)


class Signs(NamedTuple):
    """The statistics of y on which ⟨c, y⟩ depends: y₁ (first), y_κ (own), S (others), σ (turn) and y_d (last)."""

    first: int
    own: int
    others: int
    turn: int
    last: int


@dataclass(frozen=True)
class Group:
    """Keys to which a row gives the same score: their number, their score q, and Σ ⟨(A₃)_j, y⟩ over them.

    The sum is first·y₁ + own·y_κ + others·S + turn·σ + last·y_d.
    """

    count: int
    score: Fraction
    first: Fraction = _ZERO
    own: Fraction = _ZERO
    others: Fraction = _ZERO
    turn: Fraction = _ZERO
    last: Fraction = _ZERO

    @property
    def factors(self) -> tuple[Fraction, ...]:
        """The factors of the statistics, in the order of `Signs`."""
        return self.first, self.own, self.others, self.turn, self.last


@dataclass(frozen=True)
class OutputRow:
    """One distinct row of c. The groups partition the n keys."""

    groups: tuple[Group, ...]

    def coefficients(self, kind: ScoreMap, n: int) -> list[Any]:
        """Return the coefficients of ⟨c, y⟩ on (y₁, y_κ, S, σ, y_d) as arb: Σ_g k(q_g)·sum_g / Σ_g k(q_g)·count_g."""
        ws = weights(kind, n, [group.score for group in self.groups])
        normaliser = sum((w * group.count for w, group in zip(ws, self.groups, strict=True)), arb(0))
        columns = zip(*(group.factors for group in self.groups), strict=True)
        return [
            sum((w * to_arb(v) for w, v in zip(ws, column, strict=True) if v), arb(0)) / normaliser
            for column in columns
        ]

    def excess(self, signs: Signs, threshold: Fraction) -> list[tuple[Fraction, Fraction]]:
        """Return terms (r, q) such that Σ r·k(q·log n) has the sign of ⟨c, y⟩ − τ."""
        return [
            (sum(map(operator.mul, group.factors, signs), _ZERO) - group.count * threshold, group.score)
            for group in self.groups
        ]


def rows(setting: AttentionSetting, dataset: Dataset) -> tuple[OutputRow, ...]:
    """Return the distinct rows of c = f·A₃V on the data set. Rows of classes other than κ differ only in σ."""
    return tuple(OutputRow(tuple(g for g in groups if g.count)) for groups in _rows(setting, dataset))


def _rows(setting: AttentionSetting, dataset: Dataset) -> Iterator[list[Group]]:
    a, n, t = special(setting, dataset), setting.n, setting.n // setting.classes
    one = Fraction(1)
    first, b, c = (
        (a, decimal(setting.b), decimal(setting.c)) if isinstance(setting, SelfAttention) else (one, one, _ZERO)
    )

    def groups(special_key: Fraction, same_class: Fraction, other_classes: Fraction) -> list[Group]:
        """Return the groups of a row from its scores of j₃, of the other keys of class κ, and of the other classes."""
        return [
            Group(1, special_key, first=first, own=b, last=c),
            Group(t - 1, same_class, own=(t - 1) * b, last=(t - 1) * c),
            Group(n - t, other_classes, others=t * b, last=(n - t) * c),
        ]

    if setting.x == "ones":  # u_{ij} = (row sum of i)·(row sum of j)
        key = first + b + c, b + c
        plain = b + c if isinstance(setting, SelfAttention) else Fraction(setting.d - 1)
        for query in (a + plain, plain):
            yield groups(query * key[0], query * key[1], query * key[1])
        return
    if not isinstance(setting, SelfAttention):
        yield groups(1 + a, one, one)
        yield groups(one, one, one)
        return
    near, far = b * b + c * c, c * c
    yield groups(a * a + near, near, far)
    if t > 1:
        yield groups(near, near, far)
    if setting.classes > 1:
        own_class = Group(t, near, turn=t * b, last=t * c)
        rest = Group(n - 2 * t, far, others=t * b, turn=-t * b, last=(n - 2 * t) * c)
        yield [*groups(far, far, far)[:2], own_class, rest]
