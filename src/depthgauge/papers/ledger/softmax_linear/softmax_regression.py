"""Softmax regression: Lemmas 4.1 to 5.4 on the data sets of Definition 3.8, by Hoeffding's bound for the worst case.

For f with Σ f = 1 and random signs σ, P(|Σ f_i σ_i| > s) ≤ 2 exp(−s²/(2 Σ f_i²)). Among all allowed data sets Σ f_i² is
largest at a corner, with k of the weights at their maximum and the others at their minimum, because
(α + Σ v²) − s(β + Σ v)² is convex in every v for s < 1 (docs/math.md 4.1). The bounds below therefore apply to every
matrix A of the data set. They are evaluated for a list of n.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np

from depthgauge.base.format import number
from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Computation, Evaluation, Inequality, Observed, Relation
from depthgauge.papers.ledger.softmax_linear.sign_probabilities import DELTA
from depthgauge.papers.separation.score_maps import EXP, LIN, ScoreMap
from depthgauge.papers.separation.settings import Dataset

TOKEN_COUNTS = tuple(round(10 ** (k / 4)) for k in range(2, 33))
TAU = 0.25
_WIDTH = 2
"""The constant C > 1 of Definition 3.7: m = ⌈2 log(n/δ)⌉."""
_READING = (
    f"Read with δ = {DELTA} and δ/n for δ/poly(n), for {len(TOKEN_COUNTS)} values of n from {TOKEN_COUNTS[0]} to 10⁸."
)
_HYPOTHESIS = "Definition 3.8: (Ax)_i ∈ [log n, 1.4 log n]{}, σ uniform in {{−1, +1}}ⁿ, 0 < δ < 1/10"
HYPOTHESES = {0: _HYPOTHESIS.format(""), 1: _HYPOTHESIS.format(" except for one index j with (Ax)_j = 4 log n")}


def largest_squares(kind: ScoreMap, dataset: Dataset, n: int) -> float:
    """Return the largest Σ f_i² over all matrices A of a data set.

    With weights from 1 to `top`, and `peak` at index j in D₁, it is the maximum over k of
    (peak² + k·top² + free − k)/(peak + k·top + free − k)². The derivative in k has one zero, so it suffices to evaluate
    the two ends and the integers next to that zero.
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
    """Return the n of the list from which on bound(n) ≤ δ/n, and the largest bound·n/δ from there on."""
    shares = [bound(n) * n / float(DELTA) for n in TOKEN_COUNTS]
    bad = [i for i, share in enumerate(shares) if share > 1]
    first = bad[-1] + 1 if bad else 0
    return (TOKEN_COUNTS[first], max(shares[first:])) if first < len(TOKEN_COUNTS) else (None, shares[-1])


def _deviation(kind: ScoreMap, dataset: Dataset, rate: float) -> Observed:
    """Lemma 4.1 and Part 1 of 4.2: |Σ f σ| ≤ C √(log(n/δ))/n^rate, with the least multiple C of ½ that suffices."""

    def bound(factor: float, n: int) -> float:
        s = factor * math.sqrt(math.log(n / DELTA)) / n**rate
        return 2 * math.exp(-(s**2) / (2 * largest_squares(kind, dataset, n)))

    for half in range(2, 41):
        since, share = _since(partial(bound, half / 2))
        if since == TOKEN_COUNTS[0]:
            found = f"C = {number(half / 2, 6)} suffices for every allowed A and every n of the list."
            remarks = (f"By Hoeffding's bound {found}", _READING)
            return Observed("holds", share, len(TOKEN_COUNTS) * (half - 1), remarks)
    remarks = ("Hoeffding's bound does not show it for any C up to 20.", _READING)
    return Observed("undecided", None, 39 * len(TOKEN_COUNTS), remarks)


def _zero_output(kind: ScoreMap, dataset: Dataset) -> Observed:
    """Lemmas 5.1, 5.3, 5.4: Pr[F > 0] ≤ m·P(⟨f, y⟩ > τ) ≤ m exp(−τ²/(2 Σ f²)) ≤ δ/n."""

    def bound(n: int) -> float:
        m = math.ceil(_WIDTH * math.log(n / DELTA))
        return m * math.exp(-(TAU**2) / (2 * largest_squares(kind, dataset, n)))

    since, share = _since(bound)
    if since is None:
        return Observed("undecided", None, len(TOKEN_COUNTS), ("Hoeffding's bound does not show it.", _READING))
    remarks = (
        f"Hoeffding's bound shows it from n = {since:,} on, for every allowed A, with m = ⌈{_WIDTH} log(n/δ)⌉ and "
        f"τ = {TAU}. For smaller n it does not decide.",
        _READING,
    )
    return Observed("holds", share, len(TOKEN_COUNTS), remarks)


def _positive_output() -> Observed:
    """Lemma 5.2: a vector y makes F positive if and only if y_j = +1, so Pr[F = 0] = 2^(−m)."""
    shares = [2.0 ** -math.ceil(_WIDTH * math.log(n / DELTA)) * n / float(DELTA) for n in TOKEN_COUNTS]
    # f_j − Σ_{i≠j} f_i with the others at their maximum
    margin = min(1 - 2 / (1 + n**2.6 / (n - 1)) for n in TOKEN_COUNTS)
    least = 1 / math.log(2)
    remarks = (
        f"f_j exceeds the sum of the others by at least {number(margin)}, so ⟨f, y⟩ > τ = {TAU} if and only if "
        "y_j = +1. Hence Pr[F = 0] = 2^(−m).",
        f"For m = C log(n/δ) this is at most δ/n if and only if C ≥ 1/log 2 = {least:.4f}. An arbitrary C > 1 does not "
        f"suffice; C = {_WIDTH} does.",
        _READING,
    )
    holds = max(shares) <= 1 and margin > TAU
    return Observed("holds" if holds else "undecided", max(shares), len(TOKEN_COUNTS), remarks)


def _on_d1(
    left: str, right: str, relation: Relation, sides: Callable[[Arithmetic, Value, Value], tuple[Value, Value]]
) -> Inequality:
    """An inequality about f_exp on D₁, with (Ax)_i = u_i log n at the n − 1 other indices, for the worst signs."""

    def evaluate(ar: Arithmetic, *, n: int, u: Value) -> Evaluation:
        log = ar.log(ar.number(n))
        others, peak = ar.exp(u * log), ar.exp(4 * log)
        total = others.sum() + peak
        f, rest = peak / total, others / total
        return {"f_j": f, "the other f_i": rest}, *sides(ar, f, rest)

    return Inequality(
        left, right, evaluate, lambda random, size: {**size, "u": random.uniform(1, 1.4, size=size["n"] - 1)},
        tuple({"n": n} for n in (2, 3, 4, 10, 40)),
        lambda ar, *, n, u: bool((u >= 1).all()) and bool((u <= ar.number("7/5")).all()),
        lambda size: ({**size, "u": np.full(size["n"] - 1, value)} for value in (Fraction(7, 5), Fraction(1))),
        relation,
    )  # fmt: skip


def _computed(id: str, statement: str, dataset: Dataset, run: Callable[[], Observed], note: str = "") -> Claim:
    """A part of Lemma 4.1 or 4.2, or one of Lemmas 5.1 to 5.4."""
    where = f"Lemma {id[:3]}, Part {id[4:]}" if id[3:] else f"Lemma {id}"
    statement = f"for D{'₀₁'[dataset]}: Pr[{statement}] ≥ 1 − δ/poly(n)"
    return Claim(f"B.{id}", where, statement, Computation(run), HYPOTHESES[dataset], note=note)


_M = "m = C log(n/δ) sign vectors (Definition 3.7). τ = 1/4 is taken from Lemma 5.2, since none is given."
CLAIMS: tuple[Claim, ...] = (
    _computed("4.1.1", "|Σ f_lin,i σ_i| ≤ C√(log(n/δ))/√n", 0, partial(_deviation, LIN, 0, 0.5)),
    _computed("4.1.2", "|Σ f_exp,i σ_i| ≤ C√(log(n/δ))/n^0.1", 0, partial(_deviation, EXP, 0, 0.1)),
    _computed("4.2.1", "|Σ f_lin,i σ_i| ≤ C√(log(n/δ)/n)", 1, partial(_deviation, LIN, 1, 0.5)),
    Claim(
        "B.4.2.2", "Lemma 4.2, Part 2", "for D₁ and every σ: |Σ f_exp,i σ_i| ≥ 1/4",
        _on_d1("1/4", "f_j − Σ_{i≠j} f_i", "<=", lambda ar, peak, others: (ar.number("1/4"), peak - others.sum())),
        HYPOTHESES[1],
        note="“With probability 1” means for every σ. The worst σ has σ_i = −σ_j for all i ≠ j. u_i is (Ax)_i/log n.",
    ),
    Claim(
        "B.4.2.3", "Lemma 4.2, Part 3", "for D₁: Pr[Σ f_exp,i σ_i > 0] = Pr[Σ f_exp,i σ_i < 0] = 1/2",
        _on_d1("Σ_{i≠j} f_i", "f_j", "<", lambda ar, peak, rest: (rest.sum(), peak)), HYPOTHESES[1],
        note="σ_j determines the sign for every σ if f_j exceeds the sum of the others. u_i is (Ax)_i/log n.",
    ),
    _computed("5.1", "F_exp = 0", 0, partial(_zero_output, EXP, 0), _M),
    _computed("5.2", "F_exp > 0", 1, _positive_output, _M),
    _computed("5.3", "F_lin = 0", 0, partial(_zero_output, LIN, 0), _M),
    _computed("5.4", "F_lin = 0", 1, partial(_zero_output, LIN, 1), _M),
)  # fmt: skip
