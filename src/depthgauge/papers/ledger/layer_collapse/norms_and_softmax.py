"""Paper A on norms, residuals and softmax: 3.2, 3.3, 4.1, 4.2, B.1, B.2, B.3, B.4, D.3, D.4, D.5."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluate, Evaluation, Inequality, Misprint
from depthgauge.papers.ledger.formulas import alpha, entry_sum, max_norm, residual, row_ranges, scores, softm
from depthgauge.papers.ledger.instances import corners, drawing, searched, sizes

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

CLAIMS: tuple[Claim, ...] = (
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
