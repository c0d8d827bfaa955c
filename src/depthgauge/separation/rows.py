"""The few distinct rows of the attention output, each as a handful of groups of keys with one score.

A token's class is its row of the repeated identity; κ is the class of j₃.  Everything a row of c needs to know
about a sign vector y is y₁, y_κ, S = Σ of the signs of the other K − 1 classes, the sign σ of the row's own class
where that is not κ, and y_d (self-attention only).  Lengths are in units of √(log n) for self-attention and of
1 for cross-attention, scores in units of log n; so every number here is rational.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flint import arb

from depthgauge.separation.score_maps import Attention, ball, weights
from depthgauge.separation.settings import (
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
    """Keys that a row scores alike: their number, their score q, and the sum of ⟨(A₃)_j, y⟩ over them.

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
        """Σ ⟨(A₃)_j, y⟩ over the keys of the group."""
        return (
            self.first * signs.first
            + self.own * signs.own
            + self.others * signs.others
            + self.turn * signs.turn
            + self.last * signs.last
        )


@dataclass(frozen=True)
class Signs:
    """What a row sees of y: y₁, y_κ, S, σ and y_d."""

    first: int
    own: int
    others: int
    turn: int
    last: int


@dataclass(frozen=True)
class Row:
    """One distinct row of c: groups of keys that together are all n keys."""

    groups: tuple[Group, ...]

    def coefficients(self, kind: Attention, n: int) -> list[Any]:
        """Balls around c's coefficients on (y₁, y_κ, S, σ, y_d): Σ_g k(q_g)·sum_g / Σ_g k(q_g)·count_g."""
        ws = weights(kind, n, [group.score for group in self.groups])
        normaliser = sum((w * group.count for w, group in zip(ws, self.groups, strict=True)), arb(0))
        columns = zip(*((g.first, g.own, g.others, g.turn, g.last) for g in self.groups), strict=True)
        return [
            sum((w * ball(v) for w, v in zip(ws, column, strict=True) if v), arb(0)) / normaliser for column in columns
        ]

    def excess(self, signs: Signs, threshold: Fraction) -> list[tuple[Fraction, Fraction]]:
        """Terms (r, q) whose sum Σ r·k(q·log n) has the sign of ⟨c, y⟩ − τ."""
        return [(group.total(signs) - group.count * threshold, group.score) for group in self.groups]


def rows(setting: AttentionSetting, dataset: Dataset) -> tuple[Row, ...]:
    """The distinct rows of c = f·A₃V on the data set; rows of one class other than κ differ only in σ."""
    found = _self_rows(setting, dataset) if isinstance(setting, SelfAttention) else _cross_rows(setting, dataset)
    return tuple(Row(tuple(g for g in groups if g.count)) for groups in found)


def _self_rows(setting: SelfAttention, dataset: Dataset) -> Iterator[list[Group]]:
    a, b, c = special(setting, dataset), decimal(setting.b), decimal(setting.c)
    n, t = setting.n, setting.n // setting.classes

    def j3(score: Fraction) -> Group:
        return Group(1, score, first=a, own=b, last=c)

    def mates(score: Fraction) -> Group:
        return Group(t - 1, score, own=(t - 1) * b, last=(t - 1) * c)

    def strangers(score: Fraction) -> Group:
        return Group(n - t, score, others=t * b, last=(n - t) * c)

    if setting.x == "ones":  # u_{ij} = (row sum of i)·(row sum of j)
        s = b + c
        for query in (a + s, s) if n > 1 else (a + s,):
            yield [j3(query * (a + s)), mates(query * s), strangers(query * s)]
        return
    near, far = b * b + c * c, c * c
    yield [j3(a * a + near), mates(near), strangers(far)]
    if t > 1:
        yield [j3(near), mates(near), strangers(far)]
    if setting.classes > 1:
        own_class = Group(t, near, turn=t * b, last=t * c)
        rest = Group(n - 2 * t, far, others=t * b, turn=-t * b, last=(n - 2 * t) * c)
        yield [j3(far), mates(far), own_class, rest]


def _cross_rows(setting: CrossAttention, dataset: Dataset) -> Iterator[list[Group]]:
    a, n, t = special(setting, dataset), setting.n, setting.n // setting.classes

    def groups(special_score: Fraction, score: Fraction) -> list[Group]:
        mates = Group(t - 1, score, own=Fraction(t - 1))
        strangers = Group(n - t, score, others=Fraction(t))
        return [Group(1, special_score, first=Fraction(1), own=Fraction(1)), mates, strangers]

    if setting.x == "ones":  # row sums of A₁: a + d − 1 at j₂, else d − 1; of A₂: 2 at j₃, else 1
        plain = Fraction(setting.d - 1)
        yield groups(2 * (a + plain), a + plain)
        yield groups(2 * plain, plain)
        return
    yield groups(1 + a, Fraction(1))
    yield groups(Fraction(1), Fraction(1))
