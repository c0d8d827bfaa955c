"""Sections 3 to 5 and A to C of paper B: definitions, tensor forms of attention, and softmax regression."""

import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial

import numpy as np
from numpy.random import Generator as Random

from depthgauge.base.format import number
from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import (
    Claim,
    Computation,
    Evaluation,
    Inequality,
    Instance,
    Misprint,
    Observed,
    Relation,
    Size,
    drawing,
    searched,
    sizes,
)
from depthgauge.papers.ledger.random_signs import DELTA
from depthgauge.papers.separation.settings import EXP, LIN, Dataset, ScoreMap

_ANY = "A₁, A₂ ∈ R^{n×d}, Q, K ∈ R^{d×d}"
_VEC = "Read with vec along the rows, which the paper leaves open; along the columns see ours.b-tensor-columns."


def _hoeffding(ar: Arithmetic, *, low: Value, high: Value, p: Value, t: Value) -> Evaluation:
    """X_i = high_i with probability p_i, else low_i; the probability is summed over all 2ⁿ outcomes."""
    mean = (p * high + (1 - p) * low).sum()
    probability = ar.number(0)
    for up in itertools.product((True, False), repeat=len(p)):
        value = sum((h if u else lo for u, h, lo in zip(up, high, low, strict=True)), ar.number(0))
        if abs(value - mean) >= t:
            weights = (q if u else 1 - q for u, q in zip(up, p, strict=True))
            probability = probability + math.prod(weights, start=ar.number(1))
    widths = ((high - low) ** 2).sum()
    return {"E[X]": mean, "Σ (b_i − a_i)²": widths}, probability, 2 * ar.exp(-2 * t * t / widths)


def _bounded(random: Random, size: Size) -> Instance:
    n = size["n"]
    low = random.normal(size=n)
    p = random.choice([random.uniform(size=n), np.full(n, 0.5), np.full(n, random.uniform())])
    return {"low": low, "high": low + random.exponential(size=n), "p": p, "t": float(random.exponential(n))}


def _coins(size: Size) -> Iterable[Instance]:
    n = size["n"]
    for t in range(n, 0, -2):
        yield {"low": np.full(n, -1), "high": np.full(n, 1), "p": np.full(n, Fraction(1, 2)), "t": Fraction(t)}


_HOEFFDING = searched(
    "B.3.1", "Lemma 3.1 (Hoeffding)", ("Pr[|X − E[X]| ≥ t]", "2 exp(−2t²/Σ(b_i − a_i)²)"), _hoeffding, _bounded,
    sizes(n=(1, 2, 3, 5)), "X_i ∈ [a_i, b_i] independent, t ≥ 0",
    statement="Pr[|X − E[X]| ≥ t] ≤ 2 exp(−2t²/Σ(b_i − a_i)²) for X = Σ X_i",
    allowed=lambda ar, low, high, p, t: bool(
        (low <= high).all() and (low < high).any() and (p >= 0).all() and (p <= 1).all() and t >= 0
    ),
    starts=_coins,
    note="The search covers variables with two values, low_i and high_i, for which all outcomes can be enumerated.",
)  # fmt: skip


def _named(left: str, kind: str) -> Inequality:
    """Compare F_exp or F_lin with the formula of Definition 3.6, which contains f_lin; φ_τ(z) = max(z − τ, 0)."""

    def evaluate(ar: Arithmetic, *, u: Value, y: Value, tau: Value) -> Evaluation:
        linear = u / u.sum()
        f = linear if kind == "lin" else ar.exp(u) / ar.exp(u).sum()
        displayed = ar.number(0)
        for column in y.T:
            inner = sum((a * b for a, b in zip(linear, column, strict=True)), ar.number(0)) - tau
            displayed = displayed + (inner if inner > 0 else 0)
        over = f @ y - tau
        return {f"f_{kind}": f, "f_lin": linear}, ((over + abs(over)) / 2).sum(), displayed

    def starts(size: Size) -> Iterable[Instance]:
        n, m = size["n"], size["m"]
        u = np.array([Fraction(3), *([Fraction(1)] * (n - 1))], dtype=object)
        yield {"u": u, "y": np.where(np.arange(n)[:, None] == 0, 1.0, -1.0) * np.ones((n, m)), "tau": Fraction(1, 4)}

    def draw(random: Random, size: Size) -> Instance:
        u, y = random.uniform(0.1, 3, size=size["n"]), random.choice([-1.0, 1.0], size=(size["n"], size["m"]))
        return {"u": u, "y": y, "tau": float(random.uniform(0.05, 0.5))}

    return Inequality(
        left, "φ(Σ_j φ_τ(⟨f_lin, y_j⟩))", evaluate, draw, sizes(n=(2, 3), m=(1, 2)),
        lambda ar, u, y, tau: bool((u > 0).all() and tau > 0), starts, "=", fixed=frozenset({"y"}),
    )  # fmt: skip


def _kronecker(A: Value, B: Value) -> Value:
    """A ⊗ B: entry ((i₁−1)n₂ + i₂, (j₁−1)d₂ + j₂) is A[i₁, j₁]·B[i₂, j₂]."""
    return (A[:, None, :, None] * B[None, :, None, :]).reshape(A.shape[0] * B.shape[0], A.shape[1] * B.shape[1])


def _equation(left: str, right: str, sides: Callable[..., tuple[Value, Value]], square: bool = False) -> Inequality:
    """left = right for all A₁, A₂, Q, K; `square` if the printed shapes agree only for n = d."""

    def evaluate(ar: Arithmetic, *, A1: Value, A2: Value, Q: Value, K: Value) -> Evaluation:
        X = Q @ K.T
        return {"QKᵀ": X, "A₁QKᵀA₂ᵀ": A1 @ X @ A2.T}, *sides(ar, A1, A2, X)

    over = sizes(n=(1, 2, 3), d=(1, 2, 3)) if square else sizes(n=(1, 2, 2, 3), d=(1, 1, 2, 2))
    shapes = drawing({"A1": "n d", "A2": "n d", "Q": "d d", "K": "d d"})
    return Inequality(left, right, evaluate, shapes, over, relation="=")


def _identity(id: str, where: str, statement: str, check: Inequality, note: str = _VEC) -> Claim:
    return Claim(id, where, statement, check, _ANY, sharp=True, note=note)


def _blocks(A1: Value, A2: Value, X: Value) -> Value:
    """A_{j₀}x for every j₀, one per row: the blocks of (A₁ ⊗ A₂)·vec(X)."""
    return (_kronecker(A1, A2) @ X.reshape(-1)).reshape(len(A1), len(A2))


def _lengths(printed: str) -> Inequality:
    """Definition C.6: compare the length of a column of y with the length of a row of c."""

    return Inequality(
        "the length of y_l", "d, the length of c_exp[j₀]",
        lambda ar, **size: ({"lengths": np.array([size[printed], size["d"]])}, size[printed], size["d"]),
        lambda random, size: dict(size),
        sizes(n=(2, 3), d=(1, 4)), relation="=", condition=f"y ∈ R^{{{printed}×m}}",
    )  # fmt: skip


_SUMS_PRINTED = _equation(
    "⟨exp(A_{j₀}x), 1_n⟩", "⟨exp((A₁)_{j₀,*} QKᵀA₂), 1_n⟩",
    lambda ar, A1, A2, X: (ar.exp(_blocks(A1, A2, X)).sum(axis=1), ar.exp(A1 @ X @ A2).sum(axis=1)), square=True,
)  # fmt: skip
_SUMS_INTENDED = _equation(
    "⟨exp(A_{j₀}x), 1_n⟩", "⟨exp((A₁)_{j₀,*} QKᵀA₂ᵀ), 1_n⟩",
    lambda ar, A1, A2, X: (ar.exp(_blocks(A1, A2, X)).sum(axis=1), ar.exp(A1 @ X @ A2.T).sum(axis=1)),
)  # fmt: skip

DEFINITIONS: tuple[Claim, ...] = (
    _HOEFFDING,
    Claim(
        "B.3.6", "Definition 3.6", "F_exp(A; x, y) = φ(Σ_j φ_τ(⟨f_lin(A, x), y_j⟩))",
        Misprint(_named("F_exp of Definition 3.5", "exp"), _named("F_lin", "lin")),
        "u = Ax with positive entries, τ > 0",
        note="The definition of F_lin is printed with the name F_exp, which Definition 3.5 defines with f_exp.",
    ),
    _identity(
        "B.A.1", "Fact A.1 (tensor trick)", "vec(exp(A₁QKᵀA₂ᵀ)) = exp((A₁ ⊗ A₂) vec(QKᵀ))",
        _equation(
            "vec(exp(A₁QKᵀA₂ᵀ))", "exp((A₁ ⊗ A₂) vec(QKᵀ))",
            lambda ar, A1, A2, X: (ar.exp(A1 @ X @ A2.T), ar.exp(_blocks(A1, A2, X))),
        ),
    ),
    _identity(
        "ours.b-tensor-columns", "Fact A.1 with vec along the columns",
        "vec(exp(A₁QKᵀA₂ᵀ)) = exp((A₂ ⊗ A₁) vec(QKᵀ)), vec stacking columns",
        _equation(
            "vec(exp(A₁QKᵀA₂ᵀ))", "exp((A₂ ⊗ A₁) vec(QKᵀ))",
            lambda ar, A1, A2, X: (
                ar.exp(A1 @ X @ A2.T).T.reshape(-1), ar.exp(_kronecker(A2, A1) @ X.T.reshape(-1))
            ),
        ),
        note="",
    ),
    _identity(
        "B.C.3.1", "Claim C.3, first formula", "u_lin(A, x)_{j₀} = ((A₁)_{j₀,*} QKᵀA₂ᵀ)ᵀ",
        _equation("A_{j₀}x", "((A₁)_{j₀,*} QKᵀA₂ᵀ)ᵀ", lambda ar, A1, A2, X: (_blocks(A1, A2, X), A1 @ X @ A2.T)),
    ),
    _identity(
        "B.C.3.2", "Claim C.3, second formula", "α_lin(A, x)_{j₀} = ⟨((A₁)_{j₀,*} QKᵀA₂ᵀ)ᵀ, 1_n⟩",
        _equation(
            "⟨A_{j₀}x, 1_n⟩", "⟨((A₁)_{j₀,*} QKᵀA₂ᵀ)ᵀ, 1_n⟩",
            lambda ar, A1, A2, X: (_blocks(A1, A2, X).sum(axis=1), (A1 @ X @ A2.T).sum(axis=1)),
        ),
    ),
    _identity(
        "B.C.5.1", "Claim C.5, first formula", "u_exp(A, x)_{j₀} = (exp((A₁)_{j₀,*} QKᵀA₂ᵀ))ᵀ",
        _equation(
            "exp(A_{j₀}x)", "(exp((A₁)_{j₀,*} QKᵀA₂ᵀ))ᵀ",
            lambda ar, A1, A2, X: (ar.exp(_blocks(A1, A2, X)), ar.exp(A1 @ X @ A2.T)),
        ),
    ),
    Claim(
        "B.C.5.2", "Claim C.5, second formula", "α_exp(A, x)_{j₀} = ⟨(exp((A₁)_{j₀,*} QKᵀA₂)ᵀ)ᵀ, 1_n⟩",
        Misprint(_SUMS_PRINTED, _SUMS_INTENDED), f"{_ANY}; the printed shapes agree only for n = d",
        note=f"The transpose of A₂ is missing or outside the bracket. {_VEC}",
    ),
    Claim(
        "B.C.6", "Definition C.6", "for y ∈ R^{n×m} the inner product ⟨c_exp(A, x)_{j₀}, y_l⟩ is defined",
        Misprint(_lengths("n"), _lengths("d")),
        note="c_exp(A, x)_{j₀} has d entries, and Definition C.2 has y ∈ R^{d×m}.",
    ),
)  # fmt: skip


# --- Softmax regression -----------------------------------------------------------------------------------------------
# Softmax regression: Lemmas 4.1 to 5.4 on the data sets of Definition 3.8, by Hoeffding's bound for the worst case. For
# f with Σ f = 1 and random signs σ, P(|Σ f_i σ_i| > s) ≤ 2 exp(−s²/(2 Σ f_i²)). Among all allowed data sets Σ f_i² is
# largest at a corner, with k of the weights at their maximum and the others at their minimum, because (α + Σ v²) − s(β
# + Σ v)² is convex in every v for s < 1 (docs/math.md 4.1). The bounds below therefore apply to every matrix A of the
# data set. They are evaluated for a list of n.

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
REGRESSION: tuple[Claim, ...] = (
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
