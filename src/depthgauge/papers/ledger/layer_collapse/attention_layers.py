"""Paper A on one attention layer and on two consecutive ones: 5.1, 5.2, C.1, D.6."""

from collections.abc import Iterator

import numpy as np

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluation, Instance, Size
from depthgauge.papers.ledger.formulas import attention, max_norm, residual, row_ranges, scores, softm
from depthgauge.papers.ledger.instances import drawing, searched, sizes

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

CLAIMS: tuple[Claim, ...] = (
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
