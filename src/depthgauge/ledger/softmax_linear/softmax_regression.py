"""Softmax regression: Lemmas 4.1 to 5.4 on the data sets of Definition 3.8, by Hoeffding's bound on the worst of them.

For f with Σ f = 1 and random signs σ, P(|Σ f_i σ_i| > s) ≤ 2 exp(−s²/(2 Σ f_i²)). Among all data sets allowed Σ f_i² is
largest at a corner: with k of the weights at their top and the others at their bottom, since (α + Σ v²) − s(β + Σ v)²
is convex in every v for s < 1. So what is said below holds for every A, not for drawn ones.
"""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from depthgauge._format import number
from depthgauge.ledger.arithmetic import Arithmetic, Value
from depthgauge.ledger.claim import Claim, Inequality, Instance, Observed, Relation, Size, Study
from depthgauge.ledger.softmax_linear.chance import DELTA
from depthgauge.separation.score_maps import EXP, LIN, Attention
from depthgauge.separation.settings import Dataset

LADDER = tuple(round(10 ** (k / 4)) for k in range(2, 33))
TAU = 0.25
_WIDTH = 2
"""m = ⌈2 log(n/δ)⌉: the constant C > 1 of Definition 3.7."""
_READING = f"Read with δ = {DELTA} and δ/n for δ/poly(n); {len(LADDER)} values of n from {LADDER[0]} to 10⁸."
_HYPOTHESIS = "Definition 3.8: (Ax)_i ∈ [log n, 1.4 log n]{}, σ uniform in {{−1, +1}}ⁿ, 0 < δ < 1/10"
HYPOTHESES = {0: _HYPOTHESIS.format(""), 1: _HYPOTHESIS.format(" but for one index j with (Ax)_j = 4 log n")}


def largest_squares(kind: Attention, dataset: Dataset, n: int) -> float:
    """The largest Σ f_i² of a data set, over all A that it allows.

    With weights 1 to `top`, and `peak` at j in D₁, it is the maximum over k of
    (peak² + k·top² + rest)/(peak + k·top + rest)², rest = free − k. Its derivative in k has one zero, so the ends and
    the whole numbers beside that zero are enough.
    """
    top = 1.4 if kind is LIN else n**0.4
    peak = 0.0 if dataset == 0 else (4.0 if kind is LIN else float(n) ** 3)
    free = n if dataset == 0 else n - 1
    squares, total = peak**2 + free, peak + free
    slope = top - 1
    turn = total / slope - 2 * squares / (slope * (top + 1))
    corners = {0, free, *(min(max(math.floor(turn) + i, 0), free) for i in (0, 1))}
    return max((squares + k * (top**2 - 1)) / (total + k * slope) ** 2 for k in corners)


def _since(bound: Callable[[int], float]) -> tuple[int | None, float]:
    """The n from which on the bound stays within δ/n along the ladder, and the largest bound·n/δ from there on."""
    shares = [bound(n) * n / float(DELTA) for n in LADDER]
    bad = [i for i, share in enumerate(shares) if share > 1]
    first = bad[-1] + 1 if bad else 0
    return (LADDER[first], max(shares[first:])) if first < len(LADDER) else (None, shares[-1])


def _deviation(kind: Attention, dataset: Dataset, rate: float) -> Observed:
    """Lemma 4.1 and Part 1 of 4.2: |Σ f σ| ≤ C √(log(n/δ))/n^rate; the least C in halves that does everywhere."""

    def bound(factor: float) -> Callable[[int], float]:
        def at(n: int) -> float:
            s = factor * math.sqrt(math.log(n / DELTA)) / n**rate
            return 2 * math.exp(-(s**2) / (2 * largest_squares(kind, dataset, n)))

        return at

    for half in range(2, 41):
        since, share = _since(bound(half / 2))
        if since == LADDER[0]:
            words = (
                f"C = {number(half / 2, 6)} is sufficiently large, for every A allowed and every n of the ladder.",
                _READING,
            )
            return Observed("holds", share, len(LADDER) * (half - 1), words)
    return Observed("undecided", None, 39 * len(LADDER), ("No C up to 20 does.", _READING))


def _quiet(kind: Attention, dataset: Dataset) -> Observed:
    """Lemmas 5.1, 5.3, 5.4: F = 0, as m·P(⟨f, y⟩ > τ) ≤ m exp(−τ²/(2 Σ f²)) is within δ/n."""

    def bound(n: int) -> float:
        m = math.ceil(_WIDTH * math.log(n / DELTA))
        return m * math.exp(-(TAU**2) / (2 * largest_squares(kind, dataset, n)))

    since, share = _since(bound)
    if since is None:
        return Observed("undecided", None, len(LADDER), ("Hoeffding's bound does not reach it.", _READING))
    words = (
        f"From n = {since:,} on, for every A allowed, with m = ⌈{_WIDTH} log(n/δ)⌉ and τ = {TAU}; below that "
        "Hoeffding's bound says nothing.",
        _READING,
    )
    return Observed("holds", share, len(LADDER), words)


def _loud() -> Observed:
    """Lemma 5.2: every y with y_j = + makes F positive, every other does not, so Pr[F = 0] = 2^(−m) exactly."""
    shares = [2.0 ** -math.ceil(_WIDTH * math.log(n / DELTA)) * n / float(DELTA) for n in LADDER]
    margin = min(1 - 2 / (1 + n**2.6 / (n - 1)) for n in LADDER)  # f_j − Σ_{i≠j} f_i with all others at their top
    least = 1 / math.log(2)
    words = (
        f"f_j exceeds the others together by {number(margin)} or more, so ⟨f, y⟩ > τ = {TAU} exactly when y_j = +: "
        "Pr[F = 0] = 2^(−m).",
        f"That is within δ/n for m = C log(n/δ) exactly when C ≥ 1/log 2 = {least:.4f}; “some C > 1” is not enough, "
        f"C = {_WIDTH} is.",
        _READING,
    )
    holds = max(shares) <= 1 and margin > TAU
    return Observed("holds" if holds else "undecided", max(shares), len(LADDER), words)


def _softmax(ar: Arithmetic, n: int, u: Value) -> tuple[Value, Value]:
    """f_exp on D₁ for (Ax)_i = u_i log n at the n − 1 other indices: f_j and the other f."""
    log = ar.log(ar.number(n))
    others, peak = ar.exp(u * log), ar.exp(4 * log)
    total = others.sum() + peak
    return peak / total, others / total


def _on_d1(
    left: str, right: str, relation: Relation, sides: Callable[[Arithmetic, Value, Value], tuple[Value, Value]]
) -> Inequality:
    """An inequality about f_exp on D₁, the signs being as bad as they can be."""

    def work(ar: Arithmetic, *, n: int, u: Value) -> Any:
        peak, others = _softmax(ar, n, u)
        yield "f_j", peak
        yield "the other f_i", others
        return sides(ar, peak, others)

    def starts(size: Size) -> Iterable[Instance]:
        return ({**size, "u": np.full(size["n"] - 1, value)} for value in (Fraction(7, 5), Fraction(1)))

    return Inequality(
        left=left,
        right=right,
        work=work,
        draw=lambda random, size: {**size, "u": random.uniform(1, 1.4, size=size["n"] - 1)},
        sizes=tuple({"n": n} for n in (2, 3, 4, 10, 40)),
        allowed=lambda ar, *, n, u: bool((u >= 1).all()) and bool((u <= ar.number("7/5")).all()),
        starts=starts,
        relation=relation,
    )


def _study(id: str, where: str, statement: str, dataset: Dataset, run: Callable[[], Observed], note: str = "") -> Claim:
    return Claim(f"B.{id}", where, statement, Study(run), HYPOTHESES[dataset], note=note)


_POLY = "≥ 1 − δ/poly(n)"
_M = "m = C log(n/δ) sign vectors (Definition 3.7); τ is not given, 1/4 is Lemma 5.2's."
CLAIMS: tuple[Claim, ...] = (
    _study(
        "4.1.1",
        "Lemma 4.1, Part 1",
        f"for D₀: Pr[|Σ f_lin,i σ_i| ≤ C√(log(n/δ))/√n] {_POLY}",
        0,
        lambda: _deviation(LIN, 0, 0.5),
    ),
    _study(
        "4.1.2",
        "Lemma 4.1, Part 2",
        f"for D₀: Pr[|Σ f_exp,i σ_i| ≤ C√(log(n/δ))/n^0.1] {_POLY}",
        0,
        lambda: _deviation(EXP, 0, 0.1),
    ),
    _study(
        "4.2.1",
        "Lemma 4.2, Part 1",
        f"for D₁: Pr[|Σ f_lin,i σ_i| ≤ C√(log(n/δ)/n)] {_POLY}",
        1,
        lambda: _deviation(LIN, 1, 0.5),
    ),
    Claim(
        id="B.4.2.2",
        where="Lemma 4.2, Part 2",
        statement="for D₁ and every σ: |Σ f_exp,i σ_i| ≥ 1/4",
        check=_on_d1(
            "1/4", "f_j − Σ_{i≠j} f_i", "<=", lambda ar, peak, others: (ar.number("1/4"), peak - others.sum())
        ),
        hypothesis=HYPOTHESES[1],
        note="With probability 1 means for every σ; the worst σ has σ_i = −σ_j for all i ≠ j. u_i is (Ax)_i / log n.",
    ),
    Claim(
        id="B.4.2.3",
        where="Lemma 4.2, Part 3",
        statement="for D₁: Pr[Σ f_exp,i σ_i > 0] = Pr[Σ f_exp,i σ_i < 0] = 1/2",
        check=_on_d1("Σ_{i≠j} f_i", "f_j", "<", lambda ar, peak, rest: (rest.sum(), peak)),
        hypothesis=HYPOTHESES[1],
        note="σ_j decides the sign exactly when f_j exceeds all the others together. u_i is (Ax)_i / log n.",
    ),
    _study("5.1", "Lemma 5.1", f"for D₀: Pr[F_exp = 0] {_POLY}", 0, lambda: _quiet(EXP, 0), _M),
    _study("5.2", "Lemma 5.2", f"for D₁: Pr[F_exp > 0] {_POLY}", 1, _loud, _M),
    _study("5.3", "Lemma 5.3", f"for D₀: Pr[F_lin = 0] {_POLY}", 0, lambda: _quiet(LIN, 0), _M),
    _study("5.4", "Lemma 5.4", f"for D₁: Pr[F_lin = 0] {_POLY}", 1, lambda: _quiet(LIN, 1), _M),
)
