"""Hoeffding's bound, the definitions of the networks, and the tensor forms of the attention formulas."""

import itertools
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Inequality, Instance, Misprint, Size
from depthgauge.papers.ledger.instances import drawing, sizes

_MATRICES = {"A1": "n d", "A2": "n d", "Q": "d d", "K": "d d"}
_SIZES = sizes(n=(1, 2, 2, 3), d=(1, 1, 2, 2))
_ANY = "A₁, A₂ ∈ R^{n×d}, Q, K ∈ R^{d×d}"
_VEC = "Read with vec along the rows, which the paper leaves open; along the columns see ours.b-tensor-columns."


def _hoeffding(ar: Arithmetic, *, low: Value, high: Value, p: Value, t: Value) -> Any:
    """X_i = high_i with probability p_i, else low_i; the probability is summed over all 2ⁿ outcomes."""
    mean = (p * high + (1 - p) * low).sum()
    yield "E[X]", mean
    probability = ar.number(0)
    for up in itertools.product((True, False), repeat=len(p)):
        value = sum((h if u else lo for u, h, lo in zip(up, high, low, strict=True)), ar.number(0))
        if abs(value - mean) >= t:
            weight = ar.number(1)
            for u, q in zip(up, p, strict=True):
                weight = weight * (q if u else 1 - q)
            probability = probability + weight
    widths = ((high - low) ** 2).sum()
    yield "Σ (b_i − a_i)²", widths
    return probability, 2 * ar.exp(-2 * t * t / widths)


def _bounded(random: Random, size: Size) -> Instance:
    n = size["n"]
    low = random.normal(size=n)
    p = random.choice([random.uniform(size=n), np.full(n, 0.5), np.full(n, random.uniform())])
    return {"low": low, "high": low + random.exponential(size=n), "p": p, "t": float(random.exponential(n))}


def _coins(size: Size) -> Iterable[Instance]:
    n = size["n"]
    for t in range(n, 0, -2):
        yield {"low": np.full(n, -1), "high": np.full(n, 1), "p": np.full(n, Fraction(1, 2)), "t": Fraction(t)}


_HOEFFDING = Claim(
    id="B.3.1",
    where="Lemma 3.1 (Hoeffding)",
    statement="Pr[|X − E[X]| ≥ t] ≤ 2 exp(−2t²/Σ(b_i − a_i)²) for X = Σ X_i",
    check=Inequality(
        left="Pr[|X − E[X]| ≥ t]",
        right="2 exp(−2t²/Σ(b_i − a_i)²)",
        evaluate=_hoeffding,
        draw=_bounded,
        sizes=sizes(n=(1, 2, 3, 5)),
        allowed=lambda ar, low, high, p, t: bool(
            (low <= high).all() and (low < high).any() and (p >= 0).all() and (p <= 1).all() and t >= 0
        ),
        starts=_coins,
    ),
    hypothesis="X_i ∈ [a_i, b_i] independent, t ≥ 0",
    note="The search covers variables with two values, low_i and high_i, for which all outcomes can be enumerated.",
)


def _network(f: Value, y: Value, tau: Value) -> Value:
    """φ(Σ_j φ_τ(⟨f, y_j⟩)), φ_τ(z) = max(z − τ, 0)."""
    over = f @ y - tau
    return ((over + abs(over)) / 2).sum()


def _named(left: str, kind: str) -> Inequality:
    """Compare F_exp or F_lin with the formula that Definition 3.6 displays, which contains f_lin."""

    def evaluate(ar: Arithmetic, *, u: Value, y: Value, tau: Value) -> Any:
        linear = u / u.sum()
        f = linear if kind == "lin" else ar.exp(u) / ar.exp(u).sum()
        yield f"f_{kind}", f
        yield "f_lin", linear
        displayed = ar.number(0)
        for column in y.T:
            inner = sum((a * b for a, b in zip(linear, column, strict=True)), ar.number(0)) - tau
            displayed = displayed + (inner if inner > 0 else 0)
        return _network(f, y, tau), displayed

    def starts(size: Size) -> Iterable[Instance]:
        n, m = size["n"], size["m"]
        u = np.array([Fraction(3), *([Fraction(1)] * (n - 1))], dtype=object)
        yield {"u": u, "y": np.where(np.arange(n)[:, None] == 0, 1.0, -1.0) * np.ones((n, m)), "tau": Fraction(1, 4)}

    return Inequality(
        left=left,
        right="φ(Σ_j φ_τ(⟨f_lin, y_j⟩))",
        evaluate=evaluate,
        draw=lambda random, size: {
            "u": random.uniform(0.1, 3, size=size["n"]),
            "y": random.choice([-1.0, 1.0], size=(size["n"], size["m"])),
            "tau": float(random.uniform(0.05, 0.5)),
        },
        sizes=sizes(n=(2, 3), m=(1, 2)),
        allowed=lambda ar, u, y, tau: bool((u > 0).all() and tau > 0),
        starts=starts,
        relation="=",
        fixed=frozenset({"y"}),
    )


def _kronecker(A: Value, B: Value) -> Value:
    """A ⊗ B: entry ((i₁−1)n₂ + i₂, (j₁−1)d₂ + j₂) is A[i₁, j₁]·B[i₂, j₂]."""
    return (A[:, None, :, None] * B[None, :, None, :]).reshape(A.shape[0] * B.shape[0], A.shape[1] * B.shape[1])


def _equation(left: str, right: str, sides: Callable[..., tuple[Value, Value]], square: bool = False) -> Inequality:
    """left = right for all A₁, A₂, Q, K; `square` if the printed shapes agree only for n = d."""

    def evaluate(ar: Arithmetic, *, A1: Value, A2: Value, Q: Value, K: Value) -> Any:
        X = Q @ K.T
        yield "QKᵀ", X
        yield "A₁QKᵀA₂ᵀ", A1 @ X @ A2.T
        return sides(ar, A1, A2, X)

    return Inequality(
        left, right, evaluate, drawing(_MATRICES), sizes(n=(1, 2, 3), d=(1, 2, 3)) if square else _SIZES, relation="="
    )


def _blocks(A1: Value, A2: Value, X: Value) -> Value:
    """A_{j₀}x for every j₀, one per row: the blocks of (A₁ ⊗ A₂)·vec(X)."""
    return (_kronecker(A1, A2) @ X.reshape(-1)).reshape(len(A1), len(A2))


def _lengths(printed: str) -> Inequality:
    """Definition C.6: compare the length of a column of y with the length of a row of c."""
    return Inequality(
        left="the length of y_l",
        right="d, the length of c_exp[j₀]",
        evaluate=lambda ar, **size: _no_steps(size[printed], size["d"]),
        draw=lambda random, size: dict(size),
        sizes=sizes(n=(2, 3), d=(1, 4)),
        relation="=",
        condition=f"y ∈ R^{{{printed}×m}}",
    )


def _no_steps(left: int, right: int) -> Any:
    yield "lengths", np.array([left, right])
    return left, right


CLAIMS: tuple[Claim, ...] = (
    _HOEFFDING,
    Claim(
        id="B.3.6",
        where="Definition 3.6",
        statement="F_exp(A; x, y) = φ(Σ_j φ_τ(⟨f_lin(A, x), y_j⟩))",
        check=Misprint(_named("F_exp of Definition 3.5", "exp"), _named("F_lin", "lin")),
        hypothesis="u = Ax with positive entries, τ > 0",
        note="The definition of F_lin is printed with the name F_exp, which Definition 3.5 defines with f_exp.",
    ),
    Claim(
        id="B.A.1",
        where="Fact A.1 (tensor trick)",
        statement="vec(exp(A₁QKᵀA₂ᵀ)) = exp((A₁ ⊗ A₂) vec(QKᵀ))",
        check=_equation(
            "vec(exp(A₁QKᵀA₂ᵀ))",
            "exp((A₁ ⊗ A₂) vec(QKᵀ))",
            lambda ar, A1, A2, X: (ar.exp(A1 @ X @ A2.T), ar.exp(_blocks(A1, A2, X))),
        ),
        hypothesis=_ANY,
        sharp=True,
        note=_VEC,
    ),
    Claim(
        id="ours.b-tensor-columns",
        where="Fact A.1 with vec along the columns",
        statement="vec(exp(A₁QKᵀA₂ᵀ)) = exp((A₂ ⊗ A₁) vec(QKᵀ)), vec stacking columns",
        check=_equation(
            "vec(exp(A₁QKᵀA₂ᵀ))",
            "exp((A₂ ⊗ A₁) vec(QKᵀ))",
            lambda ar, A1, A2, X: (
                ar.exp(A1 @ X @ A2.T).T.reshape(-1),
                ar.exp(_kronecker(A2, A1) @ X.T.reshape(-1)),
            ),
        ),
        hypothesis=_ANY,
        sharp=True,
    ),
    Claim(
        id="B.C.3.1",
        where="Claim C.3, first formula",
        statement="u_lin(A, x)_{j₀} = ((A₁)_{j₀,*} QKᵀA₂ᵀ)ᵀ",
        check=_equation("A_{j₀}x", "((A₁)_{j₀,*} QKᵀA₂ᵀ)ᵀ", lambda ar, A1, A2, X: (_blocks(A1, A2, X), A1 @ X @ A2.T)),
        hypothesis=_ANY,
        sharp=True,
        note=_VEC,
    ),
    Claim(
        id="B.C.3.2",
        where="Claim C.3, second formula",
        statement="α_lin(A, x)_{j₀} = ⟨((A₁)_{j₀,*} QKᵀA₂ᵀ)ᵀ, 1_n⟩",
        check=_equation(
            "⟨A_{j₀}x, 1_n⟩",
            "⟨((A₁)_{j₀,*} QKᵀA₂ᵀ)ᵀ, 1_n⟩",
            lambda ar, A1, A2, X: (_blocks(A1, A2, X).sum(axis=1), (A1 @ X @ A2.T).sum(axis=1)),
        ),
        hypothesis=_ANY,
        sharp=True,
        note=_VEC,
    ),
    Claim(
        id="B.C.5.1",
        where="Claim C.5, first formula",
        statement="u_exp(A, x)_{j₀} = (exp((A₁)_{j₀,*} QKᵀA₂ᵀ))ᵀ",
        check=_equation(
            "exp(A_{j₀}x)",
            "(exp((A₁)_{j₀,*} QKᵀA₂ᵀ))ᵀ",
            lambda ar, A1, A2, X: (ar.exp(_blocks(A1, A2, X)), ar.exp(A1 @ X @ A2.T)),
        ),
        hypothesis=_ANY,
        sharp=True,
        note=_VEC,
    ),
    Claim(
        id="B.C.5.2",
        where="Claim C.5, second formula",
        statement="α_exp(A, x)_{j₀} = ⟨(exp((A₁)_{j₀,*} QKᵀA₂)ᵀ)ᵀ, 1_n⟩",
        check=Misprint(
            _equation(
                "⟨exp(A_{j₀}x), 1_n⟩",
                "⟨exp((A₁)_{j₀,*} QKᵀA₂), 1_n⟩",
                lambda ar, A1, A2, X: (ar.exp(_blocks(A1, A2, X)).sum(axis=1), ar.exp(A1 @ X @ A2).sum(axis=1)),
                square=True,
            ),
            _equation(
                "⟨exp(A_{j₀}x), 1_n⟩",
                "⟨exp((A₁)_{j₀,*} QKᵀA₂ᵀ), 1_n⟩",
                lambda ar, A1, A2, X: (ar.exp(_blocks(A1, A2, X)).sum(axis=1), ar.exp(A1 @ X @ A2.T).sum(axis=1)),
            ),
        ),
        hypothesis=f"{_ANY}; the printed shapes agree only for n = d",
        note=f"The transpose of A₂ is missing or outside the bracket. {_VEC}",
    ),
    Claim(
        id="B.C.6",
        where="Definition C.6",
        statement="for y ∈ R^{n×m} the inner product ⟨c_exp(A, x)_{j₀}, y_l⟩ is defined",
        check=Misprint(_lengths("n"), _lengths("d")),
        note="c_exp(A, x)_{j₀} has d entries, and Definition C.2 has y ∈ R^{d×m}.",
    ),
)
