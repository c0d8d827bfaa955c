"""Hoeffding's bound, the definitions of the networks, and the tensor forms of the attention formulas."""

import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np
from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluation, Inequality, Instance, Misprint, Size
from depthgauge.papers.ledger.instances import drawing, searched, sizes

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

CLAIMS: tuple[Claim, ...] = (
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
