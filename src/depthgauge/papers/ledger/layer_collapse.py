"""The numbered statements of paper A, in the order of the paper."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import (
    FLOATS,
    Arithmetic,
    Value,
    alpha,
    attention,
    depth,
    entry_sum,
    layer,
    max_norm,
    residual,
    row_ranges,
    scores,
    softm,
)
from depthgauge.papers.ledger.claim import (
    Claim,
    Evaluate,
    Evaluation,
    Inequality,
    Instance,
    Misprint,
    Size,
    Starts,
    corners,
    drawing,
    matrix,
    searched,
    sizes,
)
from depthgauge.papers.ledger.one_layer import SETTING

# --- Paper A on norms, residuals and softmax: 3.2, 3.3, 4.1, 4.2, B.1, B.2, B.3, B.4, D.3, D.4, D.5 ------------------

_STRICT = (
    "The transcription has a strict <, which may be a ≤ in the paper; the verdict is about the transcription. "
    "Besides the witness, b = ε·1 makes both sides equal for every ε."
)


def _norms(left: str, first: str, second: str) -> Evaluate:
    """‖AB‖ ≤ ‖A‖ ‖B‖ with the named norms: 1 is the sum of the entries, m the largest entry, in absolute value."""

    def norm(ar: Arithmetic, which: str, M: Value) -> Value:
        return entry_sum(M) if which == "1" else max_norm(ar, M)

    def evaluate(ar: Arithmetic, A: Value, B: Value) -> Evaluation:
        a, b = norm(ar, first, A), norm(ar, second, B)
        return {"AB": A @ B, "‖A‖": a, "‖B‖": b}, norm(ar, left, A @ B), a * b

    return evaluate


def _residuals(ar: Arithmetic, A: Value, B: Value) -> Evaluation:
    steps = {
        "A − B": A - B,
        "ε = ‖A − B‖∞": max_norm(ar, A - B),
        "Res(A), each column minus its (max + min)/2": residual(ar, A),
        "Res(B)": residual(ar, B),
        "Res(A) − Res(B)": residual(ar, A) - residual(ar, B),
    }
    return steps, max_norm(ar, residual(ar, A) - residual(ar, B)), max_norm(ar, A - B)


_FUNCTIONS: Mapping[str, Callable[[Arithmetic, Value], Value]] = {
    "exp({})": lambda ar, x: ar.exp(x),
    "α({})": alpha,
    "α({})⁻¹": lambda ar, x: 1 / alpha(ar, x),
}


def _moved(name: str, against_after: bool) -> Evaluate:
    """|F(a + b) − F(a)| ≤ (e^ε − 1)·F(a), or ·F(a + b), for the function F with this name."""

    def evaluate(ar: Arithmetic, a: Value, b: Value) -> Evaluation:
        before, after = _FUNCTIONS[name](ar, a), _FUNCTIONS[name](ar, a + b)
        growth = ar.exp(max_norm(ar, b)) - 1
        steps = {"ε = ‖b‖∞": max_norm(ar, b), name.format("a"): before, name.format("a + b"): after}
        steps |= {} if "⁻¹" in name else {"e^ε − 1": growth}
        return steps, abs(after - before), growth * (after if against_after else before)

    return evaluate


def _softmax(factor: int, linear: bool, against_b: bool = False) -> Evaluate:
    """‖softm(a + b) − softm(a)‖∞ against factor·(e^{‖b‖} − 1), or against factor·‖b‖."""

    def evaluate(ar: Arithmetic, a: Value, b: Value) -> Evaluation:
        moved, other, size = softm(ar, a + b), softm(ar, b if against_b else a), max_norm(ar, b)
        steps = {"softm(a + b)": moved, "softm(b)" if against_b else "softm(a)": other, "‖b‖∞": size}
        return steps, max_norm(ar, moved - other), factor * (size if linear else ar.exp(size) - 1)

    return evaluate


def _balanced(ar: Arithmetic, A: Value, E: Value) -> Evaluation:
    """The two inequalities as quotients: P_ij / (e^{D_ii} P̃_ij) ≤ 1 and e^{−D_ii} P̃_ij / P_ij ≤ 1."""
    P, Pt = softm(ar, A), softm(ar, A - E)
    D = ar.exp(row_ranges(ar, E))[:, None]
    steps = {"P = softm(A)": P, "P̃ = softm(A − E)": Pt, "e^D": D}
    return steps, np.stack([P / (D * Pt), Pt / (D * P)]), ar.number(1)


def _score_range(ar: Arithmetic, X: Value, Q: Value, K: Value) -> Evaluation:
    R = residual(ar, X)
    eta = ar.max(np.stack([max_norm(ar, Q), max_norm(ar, K)]))
    beta = 1 / (max_norm(ar, R) ** 2 * eta**2)
    E = scores(R, Q, K, beta)
    steps = {"Res(X)": R, "η = max(‖W_q‖∞, ‖W_k‖∞)": eta, "β = 1/(‖Res(X)‖∞² η²)": beta, "E = β Res(X) W Res(X)ᵀ": E}
    return steps, ar.max(row_ranges(ar, E)), ar.number(1)


_PAIR = {"a": "n", "b": "n"}
_TWO = {"A": "n d", "B": "n d"}
_SCORES = {"X": "n d", "Q": "d d", "K": "d d"}
_LENGTHS = sizes(n=(1, 2, 3, 5))
_FACTORS = {"A": "n m", "B": "m p"}
_SHAPES = sizes(n=(1, 1, 1, 2, 2), m=(1, 1, 2, 2, 3), p=(1, 2, 1, 2, 2))


def _product_claim(part: int, left: str, first: str, second: str, corrected: str | None) -> Claim:
    names = {"1": "₁", "m": "∞"}
    return searched(
        f"A.3.3.{part}", f"Fact 3.3 ({part})",
        (f"‖AB‖{names[left]}", f"‖A‖{names[first]} ‖B‖{names[second]}"), _norms(left, first, second), _FACTORS, _SHAPES,
        "any A, B", corrected, starts=corners(_FACTORS), sharp=corrected is None,
    )  # fmt: skip


def _strict(id: str, where: str, left: str, right: str, evaluate: Evaluate) -> Claim:
    """A statement that is transcribed with < and whose proof gives ≤."""
    proved = Inequality(left, right, evaluate, drawing(_PAIR), _LENGTHS)
    printed = replace(proved, relation="<", starts=lambda size: [{"a": np.zeros(size["n"]), "b": np.zeros(size["n"])}])
    return Claim(id, where, f"{left} < {right}", Misprint(printed, proved), "‖b‖∞ ≤ ε", sharp=True, note=_STRICT)


def _pair(
    id: str, where: str, left: str, right: str, evaluate: Evaluate, hypothesis: str = "‖b‖∞ ≤ ε", note: str = ""
) -> Claim:
    """A statement about a and b; the constant is sharp unless there is a note."""
    return searched(id, where, (left, right), evaluate, _PAIR, _LENGTHS, hypothesis, sharp=not note, note=note)


_SOFTM_B = Inequality(
    "‖softm(a + b) − softm(b)‖∞", "4‖b‖∞", _softmax(4, linear=True, against_b=True), drawing(_PAIR), _LENGTHS,
    lambda ar, a, b: bool(max_norm(ar, b) <= 1 and max_norm(ar, b) > 0),
    lambda size: ({"a": x["a"], "b": x["b"] / 8} for x in corners(_PAIR)(size)),
)  # fmt: skip
_SOFTM_A = Inequality(
    "‖softm(a + b) − softm(a)‖∞", "4‖b‖∞", _softmax(4, linear=True), drawing(_PAIR), _LENGTHS,
    lambda ar, a, b: bool(max_norm(ar, b) <= 1),
)  # fmt: skip

SOFTMAX: tuple[Claim, ...] = (
    searched(
        "A.3.2", "Fact 3.2", ("softm(x)", "softm(x + a·1)"),
        lambda ar, x, a: (
            {"softm(x)": softm(ar, x), "softm(x + a·1)": softm(ar, x + a)}, softm(ar, x), softm(ar, x + a)
        ),
        {"x": "n", "a": ""}, _LENGTHS, "x is a vector, a is a number", relation="=",
    ),
    _product_claim(1, "1", "1", "1", None),
    _product_claim(2, "m", "m", "m", "ours.product-max"),
    _product_claim(3, "1", "1", "m", "ours.product-sum"),
    searched(
        "A.4.1", "Lemma 4.1", ("‖Res(A) − Res(B)‖∞", "‖A − B‖∞"), _residuals, _TWO,
        sizes(n=(1, 2, 3, 3), d=(1, 1, 1, 2)),
        "‖A − B‖∞ ≤ ε; Res(Z) = Z − 1yᵀ where y minimises ‖Z − 1yᵀ‖∞", "ours.residual-lipschitz",
        statement="‖Res(A) − Res(B)‖∞ ≤ ε", starts=corners(_TWO),
        note="With one column the minimiser y is unique, so the witness does not depend on a choice.",
    ),
    _pair("A.4.2.1", "Lemma 4.2 (1)", "|exp(a_i + b_i) − exp(a_i)|", "(e^ε − 1) exp(a_i)", _moved("exp({})", False)),
    _pair(
        "A.4.2.2", "Lemma 4.2 (2)", "|exp(a_i + b_i) − exp(a_i)|", "(e^ε − 1) exp(a_i + b_i)", _moved("exp({})", True)
    ),
    _strict("A.4.2.3", "Lemma 4.2 (3)", "|α(a + b) − α(a)|", "(e^ε − 1) α(a)", _moved("α({})", False)),
    _pair("A.4.2.4", "Lemma 4.2 (4)", "|α(a + b) − α(a)|", "(e^ε − 1) α(a + b)", _moved("α({})", True)),
    _strict("A.B.1.1", "Lemma B.1 (1)", "|α(a + b)⁻¹ − α(a)⁻¹|", "(e^ε − 1) α(a)⁻¹", _moved("α({})⁻¹", False)),
    _strict("A.B.1.2", "Lemma B.1 (2)", "|α(a + b)⁻¹ − α(a)⁻¹|", "(e^ε − 1) α(a + b)⁻¹", _moved("α({})⁻¹", True)),
    _pair(
        "A.B.2", "Lemma B.2", "‖softm(a + b) − softm(a)‖∞", "2(e^ε − 1)", _softmax(2, linear=False),
        note="The bound is four times larger than necessary at small ε; ours.softmax-shift has the sharp constant.",
    ),
    searched(
        "A.B.3", "Lemma B.3", ("P_ij/(e^{D_ii} P̃_ij) and P̃_ij/(e^{D_ii} P_ij)", "1"), _balanced,
        {"A": "n n", "E": "n n"}, sizes(n=(1, 2, 3)),
        "P = softm(A), P̃ = softm(A − E), D_ii is the range of row i of E",
        statement="e^{−D_ii} P̃_ij ≤ P_ij ≤ e^{D_ii} P̃_ij", sharp=True,
        starts=lambda size: [{"A": 8 * np.eye(size["n"]), "E": E * np.eye(size["n"])} for E in (0.0, -0.5, 0.5)],
    ),
    searched(
        "A.B.4", "Lemma B.4", ("max_i D_ii(E)", "1"), _score_range, _SCORES, sizes(n=(2, 2), d=(1, 2)),
        "W = W_q W_kᵀ, ‖W_q‖∞, ‖W_k‖∞ ≤ η, β ≤ 1/(‖Res(X)‖∞² η²)", "ours.score-range",
        statement="E = β Res(X) W Res(X)ᵀ is 1-balanced: every row of E has range ≤ 1",
        allowed=lambda ar, X, Q, K: bool(
            max_norm(ar, residual(ar, X)) > 0 and max_norm(ar, Q) > 0 and max_norm(ar, K) > 0
        ),
        starts=corners(_SCORES),
        note="The entries of E have absolute value at most d³, so its row ranges are at most 2d³.",
    ),
    searched(
        "A.D.3", "Remark D.3", ("‖W‖₁", "d² ‖W‖∞"),
        lambda ar, W: ({"‖W‖∞": max_norm(ar, W)}, entry_sum(W), W.shape[0] ** 2 * max_norm(ar, W)),
        {"W": "d d"}, sizes(d=(1, 2, 3)), "W is d × d", sharp=True,
        note="From the remark's comparison of Dong's β with η. Its O(·) conditions have hidden constants.",
    ),
    searched(
        "A.D.3.residual", "Remark D.3", ("‖Res(X)‖∞", "‖X‖∞"),
        lambda ar, X: ({"Res(X)": residual(ar, X)}, max_norm(ar, residual(ar, X)), max_norm(ar, X)),
        {"X": "n d"}, sizes(n=(1, 2, 3), d=(1, 1, 2)), "any X", sharp=True,
    ),
    _pair(
        "A.D.4", "Corollary D.4", "‖softm(a + b) − softm(a)‖∞", "2(e^{‖b‖∞} − 1)", _softmax(2, linear=False),
        "any a, b", "See Lemma B.2; ours.softmax-shift has the sharp constant.",
    ),
    Claim(
        "A.D.5", "Lemma D.5", "‖softm(a + b) − softm(b)‖∞ ≤ 4‖b‖∞", Misprint(_SOFTM_B, _SOFTM_A), "‖b‖∞ ≤ 1",
        "ours.softmax-shift",
        note="softm(b) is printed where the proof uses softm(a). With softm(a), ½‖b‖∞ is a bound too.",
    ),
)  # fmt: skip


# --- Paper A on one attention layer and on two consecutive ones: 5.1, 5.2, C.1, D.6 ----------------------------------

_WEIGHTS = {"Q": "d d", "K": "d d", "V": "d d"}


def growth(ar: Arithmetic, epsilon: Value) -> Value:
    """g(ε) = 2(e^ε − 1) (Definition A.3)."""
    return 2 * (ar.exp(epsilon) - 1)


def balance(ar: Arithmetic, X: Value, Q: Value, K: Value) -> Value:
    """θ: the largest row range of E = Res(X) Q Kᵀ Res(X)ᵀ."""
    R = residual(ar, X)
    return ar.max(row_ranges(ar, scores(R, Q, K)))


def opposite_tokens(size: Size) -> Iterator[Instance]:
    """Two opposite tokens ±1, one nonzero score weight, constant values: the constants are attained here."""
    d = size["d"]
    X = np.array([[1.0], [-1.0]]) * np.ones(d)
    corner = np.zeros((d, d))
    corner[0, 0] = 1.0
    for score in (0.5, 0.25, 0.125):
        yield {"X": X, "Q": score * corner, "K": corner, "V": np.ones((d, d))}


def _contracted(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    R, theta = residual(ar, X), balance(ar, X, Q, K)
    out, factor = attention(ar, X, Q, K, V), (ar.exp(theta) - 1) * max_norm(ar, V)
    steps = {
        "Res(X)": R,
        "E = Res(X) W Res(X)ᵀ": scores(R, Q, K),
        "θ, the largest row range of E": theta,
        "softm(X W Xᵀ)": softm(ar, scores(X, Q, K)),
        "SAtt(X) = softm(X W Xᵀ) X V": out,
        "Res(SAtt(X))": residual(ar, out),
        "K = (e^θ − 1)‖V‖∞": factor,
    }
    return steps, max_norm(ar, residual(ar, out)), factor * max_norm(ar, R)


def _second_layer(
    ar: Arithmetic, X: Value, Q1: Value, K1: Value, V1: Value, Q2: Value, K2: Value, eps: Value
) -> Evaluation:
    """Lemma 5.2: the first layer adds its attention matrix, so n = d."""
    A, bound = softm(ar, scores(X, Q1, K1)), 2 * growth(ar, 2 * eps)
    before, after = softm(ar, scores(X, Q2, K2)), softm(ar, scores(X + A, Q2, K2))
    steps = {
        "A = softm₁(X)": A,
        "Res(A)": residual(ar, A),
        "K‖Res(X)‖∞ with K = (e^θ − 1)‖V₁‖∞": _first_bound(ar, X, Q1, K1, V1),
        "B = X + A": X + A,
        "softm₂(X)": before,
        "softm₂(B)": after,
        "ε₀ = 2g(2ε)": bound,
    }
    return steps, max_norm(ar, after - before), bound


def _first_bound(ar: Arithmetic, X: Value, Q1: Value, K1: Value, V1: Value) -> Value:
    return (ar.exp(balance(ar, X, Q1, K1)) - 1) * max_norm(ar, V1) * max_norm(ar, residual(ar, X))


def _second_layer_needs(ar: Arithmetic, X: Value, Q1: Value, K1: Value, V1: Value, eps: Value, **_: Value) -> bool:
    first, bound = softm(ar, scores(X, Q1, K1)), _first_bound(ar, X, Q1, K1, V1)
    return bool(eps > 0 and max_norm(ar, residual(ar, first)) <= bound and bound <= eps)


def _uniform_first_layer(size: Size) -> Iterator[Instance]:
    """Layer 1 with Q = 0: its attention is uniform and has residual zero, but it moves every token."""
    zero, eye = np.zeros((size["n"], size["n"])), np.eye(size["n"])
    X = zero.copy()
    X[0, 0] = 1.0
    for scale in (1.0, 2.0, 4.0):
        yield {"X": X, "Q1": zero, "K1": zero, "V1": zero, "Q2": scale * eye, "K2": eye, "eps": 0.01}


def _skipped(part: int, where: str, corrected: str) -> Claim:
    """Lemma C.1: H equal heads in layer 1; the attention matrix (part 1) or output (part 2) of a head in layer 2."""
    with_values = part == 2

    def evaluate(ar: Arithmetic, X: Value, H: int, eps: Value, **w: Value) -> Evaluation:
        A = attention(ar, X, w["Q1"], w["K1"], w["V1"])
        B, bound = X + H * A, 3 * growth(ar, 2 * H * eps)
        before, after = softm(ar, scores(X, w["Q2"], w["K2"])), softm(ar, scores(B, w["Q2"], w["K2"]))
        steps = {
            "A_i = softmv₁(X), every head": A,
            "Res(A_i)": residual(ar, A),
            "K‖Res(X)‖∞": _first_bound(ar, X, w["Q1"], w["K1"], w["V1"]),
            "B = X + Σ A_i": B,
            "(B − X) W_v": (B - X) @ w["V2"],
            "X W_v": X @ w["V2"],
            "softm₂(X)": before,
            "softm₂(B)": after,
            "ε₀ = 3g(2Hε)": bound,
        }
        if with_values:
            before, after = before @ X @ w["V2"], after @ B @ w["V2"]
            steps |= {"softmv₂(X)": before, "softmv₂(B)": after}
        return steps, max_norm(ar, after - before), bound

    def needs(ar: Arithmetic, X: Value, H: int, eps: Value, **w: Value) -> bool:
        A = attention(ar, X, w["Q1"], w["K1"], w["V1"])
        bound = _first_bound(ar, X, w["Q1"], w["K1"], w["V1"])
        return bool(
            eps > 0
            and max_norm(ar, residual(ar, A)) <= bound
            and bound <= eps
            and max_norm(ar, H * A @ w["V2"]) <= H * eps
            and max_norm(ar, X @ w["V2"]) <= 1
        )

    def starts(size: Size) -> Iterator[Instance]:
        """A uniform first layer that shifts coordinate 1, and a second layer that uses it in its scores only."""
        n, d = size["n"], size["d"]
        zero, eye = np.zeros((d, d)), np.eye(d)
        X = np.zeros((n, d))
        X[0] = 1.0
        first, last = zero.copy(), zero.copy()
        first[0, 0], last[d - 1, d - 1] = 1.0, 1.0 if with_values and d > 1 else 0.0
        for score in (1.0, 2.0, 4.0, 8.0):
            yield {
                "X": X, "H": 1, "eps": 0.01, "Q1": zero, "K1": zero, "V1": 4 * first, "Q2": score * eye, "K2": eye,
                "V2": last,
            }  # fmt: skip

    draw = drawing({"X": "n d", **dict.fromkeys(("Q1", "K1", "V1", "Q2", "K2", "V2"), "d d"), "eps": ""})
    left = "‖softmv₂(B) − softmv₂(X)‖∞" if with_values else "‖softm₂(B) − softm₂(X)‖∞"
    return searched(
        f"A.C.1.{part}", f"Lemma C.1 ({part})", (left, "3g(2Hε)"), evaluate,
        lambda random, size: {**draw(random, size), "H": 1}, sizes(n=(2, 2), d=(1, 2)), where, corrected,
        allowed=needs, starts=starts, note=_COLUMN_SHIFT,
    )  # fmt: skip


def _close(part: int, right: str, corrected: str) -> Claim:
    """Lemma D.6: the distance between the attention matrices (part 1) or outputs (part 2) of two inputs."""
    with_values = part == 2

    def evaluate(ar: Arithmetic, X: Value, Y: Value, Q: Value, K: Value, V: Value) -> Evaluation:
        W, gap = Q @ K.T, max_norm(ar, X - Y)
        before, after = softm(ar, scores(X, Q, K)), softm(ar, scores(Y, Q, K))
        constant = 12 * max_norm(ar, X) * max_norm(ar, W)
        steps = {"W = W_q W_kᵀ": W, "‖X − Y‖∞": gap, "softm(X)": before, "softm(Y)": after}
        steps |= {"K₁ = 12 ‖X‖∞ ‖W‖∞": constant}
        if with_values:
            before, after = before @ X @ V, after @ Y @ V
            constant = (constant * max_norm(ar, X) + 1) * max_norm(ar, V)
            steps |= {"softmv(X)": before, "softmv(Y)": after, "K₂ = K₁ ‖X‖∞ ‖W_v‖∞ + ‖W_v‖∞": constant}
        return steps, max_norm(ar, before - after), constant * gap

    def needs(ar: Arithmetic, X: Value, Y: Value, **_: Value) -> bool:
        return bool(max_norm(ar, X - Y) <= 2 * max_norm(ar, X) and max_norm(ar, X - Y) > 0)

    def starts(size: Size) -> Iterator[Instance]:
        n, d = size["n"], size["d"]
        X = np.ones((n, d)) * (1.0 if n == 1 else np.array([[1.0], [-1.0]]))
        ones, column = np.ones((d, d)), np.zeros((d, d))
        column[:, 0] = 1.0
        for score in (0.0, 0.01, 0.001):
            yield {"X": X, "Y": 3 * X, "Q": score * column, "K": column, "V": ones if with_values else 0 * ones}

    left = "‖softmv(X) − softmv(Y)‖∞" if with_values else "‖softm(X) − softm(Y)‖∞"
    over = sizes(n=(1, 1, 2), d=(1, 2, 2)) if with_values else sizes(n=(2, 2, 2), d=(1, 2, 3))
    return searched(
        f"A.D.6.{part}", f"Lemma D.6 ({part})", (left, f"K{'₁₂'[part - 1]} ‖X − Y‖∞"), evaluate,
        {"X": "n d", "Y": "n d", **_WEIGHTS}, over, "‖Y − X‖∞ ≤ 2‖X‖∞, W = W_q W_kᵀ", corrected,
        statement=f"{left} ≤ {right} ‖X − Y‖∞", allowed=needs, starts=starts,
    )  # fmt: skip


_COLUMN_SHIFT = (
    "A uniform first layer has residual zero, but it adds the same row to every token. This does not shift the rows of "
    "the score matrix by constants, so softmax does not cancel it."
)

ATTENTION: tuple[Claim, ...] = (
    searched(
        "A.5.1", "Lemma 5.1", ("‖Res(SAtt(X))‖∞", "(e^θ − 1) ‖V‖∞ ‖Res(X)‖∞"), _contracted,
        {"X": "n d", **_WEIGHTS}, sizes(n=(2, 2, 2), d=(1, 2, 3)),
        "E = β Res(X) W Res(X)ᵀ is θ-balanced, W = W_q W_kᵀ", "ours.residual-contraction",
        statement="‖Res(SAtt(X))‖∞ ≤ (e^θ − 1) ‖W_v‖∞ ‖Res(X)‖∞", starts=opposite_tokens,
        note="Tested with β = 1; another β only rescales Q.",
    ),
    searched(
        "A.5.2", "Lemma 5.2", ("‖softm₂(B) − softm₂(X)‖∞", "2g(2ε)"), _second_layer,
        {"X": "d d", **dict.fromkeys(("Q1", "K1", "V1", "Q2", "K2"), "d d"), "eps": ""}, sizes(n=(1, 2), d=(1, 2)),
        "‖Res(A)‖∞ ≤ K‖Res(X)‖∞ ≤ ε for A = softm₁(X), n = d", "ours.attention-lipschitz",
        statement="‖softm₂(X + softm₁(X)) − softm₂(X)‖∞ ≤ 2g(2ε), g(ε) = 2(e^ε − 1)",
        allowed=_second_layer_needs, starts=_uniform_first_layer, note=_COLUMN_SHIFT,
    ),
    _skipped(
        1, "B = X + Σ_i A_i, ‖Res(A_i)‖∞ ≤ K‖Res(X)‖∞ ≤ ε, ‖(B − X)W_v‖∞ ≤ Hε, ‖XW_v‖∞ ≤ 1", "ours.attention-lipschitz"
    ),
    _skipped(2, "as in part 1", "ours.attention-lipschitz-values"),
    _close(1, "12 ‖X‖∞ ‖W‖∞", "ours.attention-lipschitz"),
    _close(2, "(12 ‖X‖∞² ‖W‖∞ + 1) ‖W_v‖∞", "ours.attention-lipschitz-values"),
)  # fmt: skip


# --- Paper A on the layers of a network with small weights: C.2, D.7, D.8 --------------------------------------------
# The networks here have equal layers and equal heads. A counterexample among them is a counterexample to the statement
# about all networks.

_NETWORK = "every weight has absolute value at most η, ‖X₀‖∞ ≤ φ₀, X_ℓ is the output of layer ℓ"
_EQUAL = "The network of the witness has equal layers, equal heads and β = 1."


def largest_weight(ar: Arithmetic, Q: Value, K: Value, V: Value) -> Value:
    """η, the largest absolute value of the weights."""
    return ar.max(np.stack([max_norm(ar, M) for M in (Q, K, V)]))


def epsilon(ar: Arithmetic, eta: Value, phi: Value, heads: int, ell: int) -> Value:
    """ε_ℓ = 2 η φ₀ (1 + Hη)^ℓ (Definition A.2)."""
    return 2 * eta * phi * (1 + heads * eta) ** ell


def _small(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, H: int, ell: int, **_: Value) -> bool:
    """The conditions of Lemma C.2: η ∈ (0, 1], ε_ℓ ∈ (0, 1)."""
    eta, phi = largest_weight(ar, Q, K, V), max_norm(ar, X0)
    if not bool(eta > 0 and eta <= 1 and phi > 0):
        return False
    return bool(epsilon(ar, eta, phi, H, ell) < 1)


def _quantities(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, H: int, ell: int) -> tuple[Value, Value]:
    eta, phi = largest_weight(ar, Q, K, V), max_norm(ar, X0)
    return depth(ar, X0, (Q, K, V), ell, H), epsilon(ar, eta, phi, H, ell)


def _condition(part: int) -> Evaluate:
    def evaluate(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, H: int, ell: int) -> Evaluation:
        X, eps = _quantities(ar, X0, Q, K, V, H, ell)
        steps = {"X_ℓ": X, "ε_ℓ = 2ηφ₀(1 + Hη)^ℓ": eps}
        if part == 1:
            R, k = residual(ar, X), (ar.exp(ar.number(1)) - 1) * max_norm(ar, V)
            steps |= {"Res(X_ℓ)": R, "K = (e^θ − 1)‖W_v‖∞ with θ = 1": k}
            return steps, k * max_norm(ar, R), eps
        if part == 2:
            added = H * attention(ar, X, Q, K, V)
            return steps | {"B − X_ℓ = Σ_i softmv_i(X_ℓ)": added}, max_norm(ar, added @ V), H * eps
        return steps | {"X_ℓ W_v": X @ V}, max_norm(ar, X @ V), ar.number(1)

    return evaluate


def _lipschitz(restored: bool) -> Evaluate:
    def evaluate(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, Y: Value, H: int, ell: int) -> Evaluation:
        X, eps = _quantities(ar, X0, Q, K, V, H, ell)
        eta, gap = largest_weight(ar, Q, K, V), max_norm(ar, X - Y)
        first, second = attention(ar, X, Q, K, V), attention(ar, Y, Q, K, V)
        steps = {"X_ℓ": X, "‖X_ℓ − Y‖∞": gap, "softmv(X_ℓ)": first, "softmv(Y)": second, "η": eta}
        steps |= {"ε_ℓ = 2ηφ₀(1 + Hη)^ℓ": eps}
        bound = 3 * eta * (eps**2 + 1)
        return steps, max_norm(ar, first - second), bound * gap if restored else bound

    return evaluate


def _near(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, Y: Value, H: int, ell: int) -> bool:
    """‖Y − X_ℓ‖∞ < 2‖X_ℓ‖∞, with nonzero weights and input."""
    X, eps = _quantities(ar, X0, Q, K, V, H, ell)
    return bool(max_norm(ar, X - Y) < 2 * max_norm(ar, X) and max_norm(ar, X - Y) > 0 and eps > 0)


def _growing(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, H: int) -> Evaluation:
    after = X + H * attention(ar, X, Q, K, V)
    steps = {"X_{ℓ+1} = X_ℓ + Σ_i softmv_i(X_ℓ)": after, "η = ‖W_v‖∞": max_norm(ar, V)}
    return steps, max_norm(ar, after), max_norm(ar, X) * (1 + H * max_norm(ar, V))


def _grown(ar: Arithmetic, X0: Value, Q: Value, K: Value, V: Value, H: int, ell: int) -> Evaluation:
    after, eta = depth(ar, X0, (Q, K, V), ell, H), max_norm(ar, V)
    return {"X_ℓ": after, "η = ‖W_v‖∞": eta}, max_norm(ar, after), max_norm(ar, X0) * (1 + H * eta) ** ell


def _drawn(names: dict[str, str], **counts: int) -> Callable[[Random, Size], Instance]:
    draw = drawing(names)

    def sample(random: Random, size: Size) -> Instance:
        instance = dict(draw(random, size))
        for name in ("Q", "K", "V"):
            instance[name] = np.clip(instance[name], -1, 1)
        return {**instance, **counts}

    return sample


def _aligned(size: Size, entry: str, inputs: Sequence[float], etas: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Tokens φ·1 (and −φ·1 for n = 2) and every weight η, so that contributions add up instead of cancelling."""
    n, d = size["n"], size["d"]
    signs = np.ones((n, 1)) if n == 1 else np.array([[1.0], [-1.0]])
    for phi, eta in itertools.product(inputs, etas):
        weight = eta * np.ones((d, d))
        yield {entry: phi * signs * np.ones(d), "Q": weight, "K": weight, "V": weight}


def _starts_for_conditions(size: Size) -> Iterator[Instance]:
    return ({**start, "H": 1, "ell": 1} for start in _aligned(size, "X0", (0.125, 0.2, 0.24), (1.0, 0.5)))


def _starts_for_growth(entry: str, **counts: int) -> Starts:
    def starts(size: Size) -> Iterator[Instance]:
        for start in _aligned(size, entry, (1.0,), (1.0, 0.1)):
            yield {**start, "Q": 0 * start["Q"], "K": 0 * start["K"], "H": 1, **counts}

    return starts


def _starts_for_lipschitz(size: Size) -> Iterator[Instance]:
    for start in _aligned(size, "X0", (4.0, 1.5, 1.0), (0.01, 0.1)):
        X = depth(FLOATS, start["X0"], (start["Q"], start["K"], start["V"]), 1, 1)
        yield from ({**start, "Y": factor * X, "H": 1, "ell": 1} for factor in (0, 0.75))


_ONE = {"X0": "n d", **_WEIGHTS}


def _condition_claim(part: int, sides: tuple[str, str], hypothesis: str, over: tuple[Size, ...], **more: Any) -> Claim:
    return searched(
        f"A.C.2.{part}", f"Lemma C.2 ({part})", sides, _condition(part), _drawn(_ONE, H=1, ell=1), over, hypothesis,
        "ours.layer-growth", allowed=_small, starts=_starts_for_conditions, note=_EQUAL, **more,
    )  # fmt: skip


def _lipschitz_claim(id: str, where: str, right: str, relation: str, over: tuple[Size, ...], note: str) -> Claim:
    """Lemma D.7, as printed or with the factor ‖X_ℓ − Y‖∞ of its proof."""
    return searched(
        id, where, ("‖softmv(X_ℓ) − softmv(Y)‖∞", right), _lipschitz(restored=relation == "<="),
        _drawn({**_ONE, "Y": "n d"}, H=1, ell=1), over, f"{_NETWORK}, ‖Y − X_ℓ‖∞ < 2‖X_ℓ‖∞",
        "ours.attention-lipschitz-values", allowed=_near, starts=_starts_for_lipschitz, relation=relation, note=note,
    )  # fmt: skip


def _shapes(n: int, *dims: int) -> tuple[Size, ...]:
    return tuple({"n": n, "d": d} for d in dims)


NETWORKS: tuple[Claim, ...] = (
    _condition_claim(
        1, ("(e − 1)‖W_v‖∞ ‖Res(X_ℓ)‖∞", "ε_ℓ"),
        f"{_NETWORK}, η ∈ (0, 1], ε_ℓ = 2ηφ₀(1 + Hη)^ℓ ∈ (0, 1); θ = 1 by Lemma B.4", _shapes(2, 1, 2, 3),
        statement="K‖Res(X_ℓ)‖∞ ≤ ε_ℓ, K = (e − 1)‖W_v‖∞",
    ),
    _condition_claim(
        2, ("‖(B − X_ℓ)W_v‖∞", "Hε_ℓ"), "as in part 1; B = X_ℓ + Σ_i softmv_i(X_ℓ)", _shapes(1, 1, 2)
    ),
    _condition_claim(3, ("‖X_ℓ W_v‖∞", "1"), "as in part 1", _shapes(1, 1, 2)),
    _lipschitz_claim(
        "A.D.7", "Lemma D.7", "3η(ε_ℓ² + 1)", "<", _shapes(1, 1, 2),
        "The factor ‖X_ℓ − Y‖∞ of the proof is missing in the statement. A.D.7.restored has it and fails too. "
        + _EQUAL,
    ),
    _lipschitz_claim(
        "A.D.7.restored", "Lemma D.7, with the factor of its proof", "3η(ε_ℓ² + 1) ‖X_ℓ − Y‖∞", "<=",
        _shapes(2, 1, 2, 3), _EQUAL,
    ),
    searched(
        "A.D.8.1", "Lemma D.8 (1)", ("‖X_{ℓ+1}‖∞", "‖X_ℓ‖∞ (1 + Hη)"), _growing,
        _drawn({"X": "n d", **_WEIGHTS}, H=1), _shapes(1, 1, 2), "‖W_v‖∞ ≤ η, H heads", "ours.layer-growth",
        starts=_starts_for_growth("X"), note=_EQUAL,
    ),
    searched(
        "A.D.8.2", "Lemma D.8 (2)", ("‖X_ℓ‖∞", "φ₀ (1 + Hη)^ℓ"), _grown, _drawn(_ONE, H=1, ell=2), _shapes(1, 1, 2),
        "‖X₀‖∞ ≤ φ₀, ‖W_v‖∞ ≤ η, H heads", "ours.layer-growth", starts=_starts_for_growth("X0", ell=2), note=_EQUAL,
    ),
)  # fmt: skip


# --- The bound in the proof of the main theorem of paper A, D.1 ----------------------------------------------------
# The proof of Theorem D.1 deletes every layer except the last and bounds the distance by (C^L + … + C + 1)δ with ε_ℓ =
# 2ηφ₀(1 + Hη)^ℓ, δ = max_ℓ 2g(2Hε_ℓ), C = max_ℓ 3η(ε_ℓ² + 1). This bound has no hidden constant and can be tested. The
# theorem itself states O(A/L); `one_layer` decides it.


def _proof_bound(ar: Arithmetic, eta: Value, phi: Value, H: int, L: int) -> tuple[Value, Value, Value, Value]:
    """Return ε_L, δ, C and (C^L + … + 1)δ. The maxima over ℓ are attained at ℓ = L, since ε_ℓ ≤ ε_L."""
    eps = epsilon(ar, eta, phi, H, L)
    delta, c = 2 * growth(ar, 2 * H * eps), 3 * eta * (eps**2 + 1)
    return eps, delta, c, sum((c**k for k in range(L + 1)), ar.number(0)) * delta


def _collapsed(displayed: bool) -> Evaluate:
    def evaluate(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, H: int, L: int) -> Evaluation:
        eta, phi, weights = largest_weight(ar, Q, K, V), max_norm(ar, X), (Q, K, V)
        before = depth(ar, X, weights, L - 1, H)
        if displayed:
            first, second = attention(ar, before, *weights), attention(ar, X, *weights)
            outputs = {"softmv_L(X_{L−1}), the last layer's attention in S": first}
            outputs |= {"softmv_L(X), the last layer's attention on the input": second}
        else:
            first, second = layer(ar, before, *weights, heads=H), layer(ar, X, *weights, heads=H)
            outputs = {"S(X)": first, "S'(X), the last layer alone": second}
        eps, delta, c, bound = _proof_bound(ar, eta, phi, H, L)
        steps = {
            "η, the largest weight": eta,
            "φ₀ = ‖X‖∞": phi,
            "X_{L−1}, the input of the last layer of S": before,
            **outputs,
            "ε_L = 2ηφ₀(1 + Hη)^L": eps,
            "δ = 2g(2Hε_L), g(ε) = 2(e^ε − 1)": delta,
            "C = 3η(ε_L² + 1)": c,
            "(C^L + … + C + 1)δ": bound,
        }
        return steps, max_norm(ar, first - second), bound

    return evaluate


def _conditions(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, H: int, L: int) -> bool:
    """The conditions that the proof uses: η ≤ min{1/(HL), 1/φ₀} (that is A ≤ 1), ε_ℓ < 1, 2Hε_ℓ ≤ ½, C < ½."""
    eta, phi = largest_weight(ar, Q, K, V), max_norm(ar, X)
    if not bool(eta > 0 and phi > 0 and eta * H * L <= 1 and eta * phi <= 1):
        return False
    eps, _, c, _ = _proof_bound(ar, eta, phi, H, L)
    return bool(eps < 1 and 4 * H * eps <= 1 and 2 * c < 1)


def _aligned_inputs(size: Size) -> Iterator[Instance]:
    """One token φ₀·1 and every value weight η: each layer multiplies the token by 1 + Hηd."""
    d = size["d"]
    for eta, phi in ((0.01, 1.0), (0.1, 0.25)):
        weight = eta * np.ones((d, d))
        yield {"X": phi * np.ones((1, d)), "Q": 0 * weight, "K": 0 * weight, "V": weight, "H": 1, "L": size["L"]}


def _drawn_network(random: np.random.Generator, size: Size) -> Instance:
    d = size["d"]
    weights = {name: 0.01 * matrix(random, d, d) for name in ("Q", "K", "V")}
    return {"X": matrix(random, 1, d), **weights, "H": 1, "L": size["L"]}


def _explicit(displayed: bool, over: tuple[Size, ...], where: str, statement: str, note: str) -> Claim:
    left = "‖softmv_L(X_{L−1}) − softmv_L(X)‖∞" if displayed else "‖S(X) − S'(X)‖∞"
    return searched(
        "A.D.1.displayed" if displayed else "A.D.1", f"Theorem D.1, {where} of its proof",
        (left, "(C^L + … + C + 1)δ"), _collapsed(displayed), _drawn_network, over, SETTING,
        "ours.mean-field-certificate", statement=statement, allowed=_conditions, starts=_aligned_inputs,
        note=f"{note} {_SAME}",
    )  # fmt: skip


_SAME = "All layers and heads of the witness have the same Q, K, V; the conditions hold with A = 1."

THEOREM: tuple[Claim, ...] = (
    _explicit(
        False, tuple({"d": 1, "L": L} for L in (4, 8, 16, 24)), "the bound",
        "‖S(X) − S'(X)‖∞ ≤ (C^L + … + C + 1)δ, where S' is the last layer alone",
        "The witness is one token with one coordinate. Its attention output is η times the token, so each layer "
        "multiplies it by 1 + η and no softmax is needed to check it. Wider tokens need fewer layers.",
    ),
    _explicit(
        True, tuple({"d": d, "L": 4} for d in (2, 4, 8)), "the displayed inequality",
        "‖softmv_L(B_L⁰) − softmv_L(B_L^L)‖∞ ≤ (C^L + … + C + 1)δ",
        "These are the attention outputs of the last layer, without the skip connection.",
    ),
)  # fmt: skip


CLAIMS: tuple[Claim, ...] = (*SOFTMAX, *ATTENTION, *NETWORKS, *THEOREM)
