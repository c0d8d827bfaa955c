"""The distinct rows of the attention output, each as a few groups of keys with equal scores.

The class of a token is its row of the repeated identity; κ is the class of j₃. For a row of c and a sign vector y,
⟨c, y⟩ depends only on y₁, y_κ, the sum S of the signs of the other K − 1 classes, the sign σ of the row's own class if
that is not κ, and y_d (self-attention only). Values are divided by √(log n) for self-attention and scores by log n, so
all numbers in this file are rational.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flint import arb

from depthgauge.papers.separation.score_maps import ScoreMap, to_arb, weights
from depthgauge.papers.separation.settings import (
    AttentionSetting,
    CrossAttention,
    Dataset,
    SelfAttention,
    decimal,
    special,
)

_ZERO = Fraction(0)


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

    def total(self, signs: "Signs") -> Fraction:
        """Return Σ ⟨(A₃)_j, y⟩ over the keys of the group."""
        return (
            self.first * signs.first
            + self.own * signs.own
            + self.others * signs.others
            + self.turn * signs.turn
            + self.last * signs.last
        )


@dataclass(frozen=True)
class Signs:
    """The statistics of y on which ⟨c, y⟩ depends: y₁ (first), y_κ (own), S (others), σ (turn) and y_d (last)."""

    first: int
    own: int
    others: int
    turn: int
    last: int


@dataclass(frozen=True)
class OutputRow:
    """One distinct row of c. The groups partition the n keys."""

    groups: tuple[Group, ...]

    def coefficients(self, kind: ScoreMap, n: int) -> list[Any]:
        """Return the coefficients of ⟨c, y⟩ on (y₁, y_κ, S, σ, y_d) as arb: Σ_g k(q_g)·sum_g / Σ_g k(q_g)·count_g."""
        ws = weights(kind, n, [group.score for group in self.groups])
        normaliser = sum((w * group.count for w, group in zip(ws, self.groups, strict=True)), arb(0))
        columns = zip(*((g.first, g.own, g.others, g.turn, g.last) for g in self.groups), strict=True)
        return [
            sum((w * to_arb(v) for w, v in zip(ws, column, strict=True) if v), arb(0)) / normaliser
            for column in columns
        ]

    def excess(self, signs: Signs, threshold: Fraction) -> list[tuple[Fraction, Fraction]]:
        """Return terms (r, q) such that Σ r·k(q·log n) has the sign of ⟨c, y⟩ − τ."""
        return [(group.total(signs) - group.count * threshold, group.score) for group in self.groups]


def rows(setting: AttentionSetting, dataset: Dataset) -> tuple[OutputRow, ...]:
    """Return the distinct rows of c = f·A₃V on the data set. Rows of classes other than κ differ only in σ."""
    found = _self_rows(setting, dataset) if isinstance(setting, SelfAttention) else _cross_rows(setting, dataset)
    return tuple(OutputRow(tuple(g for g in groups if g.count)) for groups in found)


def _self_rows(setting: SelfAttention, dataset: Dataset) -> Iterator[list[Group]]:
    a, b, c = special(setting, dataset), decimal(setting.b), decimal(setting.c)
    n, t = setting.n, setting.n // setting.classes

    def special_key(score: Fraction) -> Group:
        return Group(1, score, first=a, own=b, last=c)

    def same_class(score: Fraction) -> Group:
        return Group(t - 1, score, own=(t - 1) * b, last=(t - 1) * c)

    def other_classes(score: Fraction) -> Group:
        return Group(n - t, score, others=t * b, last=(n - t) * c)

    if setting.x == "ones":  # u_{ij} = (row sum of i)·(row sum of j)
        s = b + c
        for query in (a + s, s) if n > 1 else (a + s,):
            yield [special_key(query * (a + s)), same_class(query * s), other_classes(query * s)]
        return
    near, far = b * b + c * c, c * c
    yield [special_key(a * a + near), same_class(near), other_classes(far)]
    if t > 1:
        yield [special_key(near), same_class(near), other_classes(far)]
    if setting.classes > 1:
        own_class = Group(t, near, turn=t * b, last=t * c)
        rest = Group(n - 2 * t, far, others=t * b, turn=-t * b, last=(n - 2 * t) * c)
        yield [special_key(far), same_class(far), own_class, rest]


def _cross_rows(setting: CrossAttention, dataset: Dataset) -> Iterator[list[Group]]:
    a, n, t = special(setting, dataset), setting.n, setting.n // setting.classes

    def groups(special_score: Fraction, score: Fraction) -> list[Group]:
        same_class = Group(t - 1, score, own=Fraction(t - 1))
        other_classes = Group(n - t, score, others=Fraction(t))
        return [Group(1, special_score, first=Fraction(1), own=Fraction(1)), same_class, other_classes]

    if setting.x == "ones":  # row sums of A₁: a + d − 1 at j₂, else d − 1; of A₂: 2 at j₃, else 1
        plain = Fraction(setting.d - 1)
        yield groups(2 * (a + plain), a + plain)
        yield groups(2 * plain, plain)
        return
    yield groups(1 + a, Fraction(1))
    yield groups(Fraction(1), Fraction(1))
