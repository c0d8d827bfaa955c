"""Inequalities for norms, residuals and softmax with sharp constants (docs/math.md §2)."""

from collections.abc import Iterator

import numpy as np

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluate, Evaluation, Instance, Size, Starts
from depthgauge.papers.ledger.formulas import (
    attention,
    column_norm,
    entry_sum,
    max_norm,
    residual,
    row_norm,
    row_ranges,
    scores,
    softm,
    spread,
    total_variation,
)
from depthgauge.papers.ledger.instances import searched, sizes
from depthgauge.papers.ledger.layer_collapse.attention_layers import balance, opposite_tokens

_WEIGHTS = {"Q": "d d", "K": "d d", "V": "d d"}


def _shares(x: Value) -> Value:
    """Return a probability vector with positive entries proportional to |x_i| + 1/1000."""
    return (1000 * abs(x) + 1) / (1000 * abs(x) + 1).sum()


def _gap(ar: Arithmetic, x: Value, y: Value, z: Value) -> Evaluation:
    p, q = _shares(x), _shares(y)
    return {"p": p, "q": q}, abs(((p - q) * z).sum()), total_variation(p, q) * spread(ar, z)


def _residual_norm(ar: Arithmetic, A: Value, B: Value) -> Evaluation:
    first, second = max_norm(ar, residual(ar, A)), max_norm(ar, residual(ar, B))
    return {"‖Res(A)‖max": first}, abs(first - second), max_norm(ar, A - B)


def _average(ar: Arithmetic, S: Value, Y: Value) -> Evaluation:
    P = np.stack([_shares(row) for row in S])
    return {"P": P}, max_norm(ar, P @ Y), max_norm(ar, Y)


def _contraction(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    theta = balance(ar, X, Q, K)
    left = max_norm(ar, residual(ar, attention(ar, X, Q, K, V)))
    return {"θ": theta}, left, ar.tanh(theta / 2) * column_norm(ar, V) * max_norm(ar, residual(ar, X))


def _linear(ar: Arithmetic, s: Value) -> Evaluation:
    linear = (1 + s - s.sum() / len(s)) / len(s)
    rho = 1 / (12 * ar.sqrt(ar.number(3)))
    return {"(1 + s − s̄)/n": linear}, total_variation(softm(ar, s), linear), rho * spread(ar, s) ** 2


def _cumulant(ar: Arithmetic, x: Value, s: Value, z: Value) -> Evaluation:
    p = _shares(x)
    deviation, other = s - (p * s).sum(), z - (p * z).sum()
    bound = spread(ar, s) ** 2 * spread(ar, z) / (6 * ar.sqrt(ar.number(3)))
    return {"p": p}, abs((p * deviation * deviation * other).sum()), bound


def _score_range(ar: Arithmetic, X: Value, Q: Value, K: Value) -> Evaluation:
    R = residual(ar, X)
    bound = 2 * max_norm(ar, R) ** 2 * entry_sum(Q @ K.T)
    return {"Res(X)": R}, ar.max(row_ranges(ar, scores(R, Q, K))), bound


def _attention_gap(ar: Arithmetic, X: Value, Y: Value, Q: Value, K: Value) -> Value:
    """Return tanh(½ Σ|W| (‖X‖ + ‖Y‖) ‖X − Y‖), which bounds TV between the rows of softm(X W Xᵀ) and softm(Y W Yᵀ)."""
    moved = entry_sum(Q @ K.T) * (max_norm(ar, X) + max_norm(ar, Y)) * max_norm(ar, X - Y)
    return ar.tanh(moved / 2)


def _lipschitz(ar: Arithmetic, X: Value, Y: Value, Q: Value, K: Value) -> Evaluation:
    gap = softm(ar, scores(X, Q, K)) - softm(ar, scores(Y, Q, K))
    return {"softm(X) − softm(Y)": gap}, max_norm(ar, gap), _attention_gap(ar, X, Y, Q, K)


def _lipschitz_values(ar: Arithmetic, X: Value, Y: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    gap = attention(ar, X, Q, K, V) - attention(ar, Y, Q, K, V)
    moved = max_norm(ar, X - Y) + 2 * _attention_gap(ar, X, Y, Q, K) * max_norm(ar, X)
    return {"softmv(X) − softmv(Y)": gap}, max_norm(ar, gap), column_norm(ar, V) * moved


def _growth(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    after = X + attention(ar, X, Q, K, V)
    return {"X + softmv(X)": after}, max_norm(ar, after), max_norm(ar, X) * (1 + column_norm(ar, V))


def _crossing(size: Size) -> Iterator[Instance]:
    """b moves one entry from below the others to equally far above them."""
    for lift in (0.5, 2.0):
        b = np.full(size["n"], -lift)
        b[0] = lift
        a = np.zeros(size["n"])
        a[0] = np.log(size["n"] - 1) - lift
        yield {"a": a, "b": b}


def _widened(size: Size) -> Iterator[Instance]:
    """Two opposite tokens, nearly zero in X and of size 1 in Y, so that nearly equal scores become different."""
    X = np.array([[1.0], [-1.0]]) * np.ones(size["d"])
    one = np.zeros((size["d"], size["d"]))
    one[0, 0] = 0.1
    yield {"X": 0.01 * X, "Y": X, "Q": one, "K": one, "V": np.ones_like(one)}


def _small_scores(size: Size) -> Iterator[Instance]:
    """A share of high scores near (1 − 1/√3)/2, where the third cumulant is largest."""
    n = size["n"]
    high = max(1, round(n * (1 - 3**-0.5) / 2))
    yield {"s": 0.01 * (np.arange(n) < high)}


def _ours(
    id: str, sides: tuple[str, str], evaluate: Evaluate, shapes: dict[str, str], over: tuple[Size, ...],
    hypothesis: str = "none", starts: Starts = lambda size: (),
) -> Claim:  # fmt: skip
    return searched(
        f"ours.{id}", "docs/math.md §2", sides, evaluate, shapes, over, hypothesis, starts=starts, sharp=True
    )


_PAIR = {"a": "n", "b": "n"}
_LENGTHS = sizes(n=(2, 3, 5))
_FACTORS = {"A": "n m", "B": "m p"}
_SHAPES = sizes(n=(1, 1, 2), m=(1, 2, 3), p=(1, 2, 2))
_TOKENS = sizes(n=(1, 2, 3), d=(1, 2, 3))
_COLUMNS = {"A": "n d", "B": "n d"}

CLAIMS: tuple[Claim, ...] = (
    _ours(
        "softmax-tv", ("TV(softm(a + b), softm(a))", "tanh(range(b)/4)"),
        lambda ar, a, b: (
            {"range(b)": spread(ar, b)}, total_variation(softm(ar, a + b), softm(ar, a)), ar.tanh(spread(ar, b) / 4)
        ),
        _PAIR, _LENGTHS, starts=_crossing,
    ),
    _ours(
        "softmax-shift", ("‖softm(a + b) − softm(a)‖max", "tanh(‖b‖max/2)"),
        lambda ar, a, b: (
            {"‖b‖∞": max_norm(ar, b)}, max_norm(ar, softm(ar, a + b) - softm(ar, a)), ar.tanh(max_norm(ar, b) / 2)
        ),
        _PAIR, _LENGTHS, starts=_crossing,
    ),
    _ours(
        "softmax-uniform", ("TV(softm(a), uniform)", "tanh(range(a)/4)"),
        lambda ar, a: (
            {"softm(a)": softm(ar, a)}, total_variation(softm(ar, a), ar.number(1) / len(a)),
            ar.tanh(spread(ar, a) / 4),
        ),
        {"a": "n"}, _LENGTHS,
    ),
    _ours(
        "average-gap", ("|Σ_j (p_j − q_j) z_j|", "TV(p, q) range(z)"),
        _gap, {"x": "n", "y": "n", "z": "n"}, _LENGTHS, "p, q are probability vectors",
    ),
    _ours(
        "residual-lipschitz", ("‖Res(A) − Res(B)‖max", "2‖A − B‖max"),
        lambda ar, A, B: (
            {"Res(A) − Res(B)": residual(ar, A) - residual(ar, B)},
            max_norm(ar, residual(ar, A) - residual(ar, B)), 2 * max_norm(ar, A - B),
        ),
        _COLUMNS, sizes(n=(2, 3, 3), d=(1, 1, 2)), "Res subtracts the mid-range from every column",
    ),
    _ours(
        "residual-norm", ("|‖Res(A)‖max − ‖Res(B)‖max|", "‖A − B‖max"),
        _residual_norm, _COLUMNS, sizes(n=(2, 3, 3), d=(1, 1, 2)),
    ),
    _ours(
        "stochastic-product", ("‖PY‖max", "‖Y‖max"), _average, {"S": "n n", "Y": "n d"}, _TOKENS, "P is row-stochastic"
    ),
    _ours(
        "product-max", ("‖AB‖max", "‖A‖max ‖B‖col"),
        lambda ar, A, B: ({"AB": A @ B}, max_norm(ar, A @ B), max_norm(ar, A) * column_norm(ar, B)), _FACTORS, _SHAPES,
    ),
    _ours(
        "product-inner", ("‖AB‖max", "m ‖A‖max ‖B‖max"),
        lambda ar, A, B: ({"AB": A @ B}, max_norm(ar, A @ B), A.shape[1] * max_norm(ar, A) * max_norm(ar, B)),
        _FACTORS, _SHAPES, "A has m columns",
    ),
    _ours(
        "product-sum", ("‖AB‖₁", "‖A‖₁ ‖B‖row"),
        lambda ar, A, B: ({"AB": A @ B}, entry_sum(A @ B), entry_sum(A) * row_norm(ar, B)), _FACTORS, _SHAPES,
    ),
    _ours(
        "residual-contraction", ("‖Res(attention(X))‖max", "tanh(θ/2) ‖V‖col ‖Res(X)‖max"),
        _contraction, {"X": "n d", **_WEIGHTS}, sizes(n=(2, 2, 2), d=(1, 2, 3)),
        "E = Res(X) W Res(X)ᵀ is θ-balanced", opposite_tokens,
    ),
    _ours(
        "softmax-linear", ("TV(softm(s), (1 + s − s̄)/n)", "range(s)²/(12√3)"),
        _linear, {"s": "n"}, sizes(n=(5, 14, 19)), starts=_small_scores,
    ),
    _ours(
        "third-cumulant", ("|Σ_j p_j (s_j − Σps)² (z_j − Σpz)|", "range(s)² range(z)/(6√3)"),
        _cumulant, {"x": "n", "s": "n", "z": "n"}, sizes(n=(2, 3)), "p is a probability vector",
    ),
    _ours(
        "score-range", ("max_i D_ii(Res(X) W Res(X)ᵀ)", "2 ‖Res(X)‖max² Σ|W|"),
        _score_range, {"X": "n d", "Q": "d d", "K": "d d"}, sizes(n=(2, 2), d=(1, 2)),
    ),
    _ours(
        "attention-lipschitz", ("‖softm(X) − softm(Y)‖max", "tanh(½ Σ|W| (‖X‖max + ‖Y‖max) ‖X − Y‖max)"),
        _lipschitz, {"X": "n d", "Y": "n d", "Q": "d d", "K": "d d"}, sizes(n=(2, 2), d=(1, 2)),
        "softm(X) = softm(X W Xᵀ)", lambda size: ({name: start[name] for name in "XYQK"} for start in _widened(size)),
    ),
    _ours(
        "attention-lipschitz-values",
        ("‖softmv(X) − softmv(Y)‖max", "‖V‖col (‖X − Y‖max + 2 tanh(½ Σ|W| (‖X‖max + ‖Y‖max) ‖X − Y‖max) ‖X‖max)"),
        _lipschitz_values, {"X": "n d", "Y": "n d", **_WEIGHTS}, sizes(n=(1, 2, 2), d=(2, 1, 2)),
        "softmv(X) = softm(X W Xᵀ) X V", _widened,
    ),
    _ours(
        "layer-growth", ("‖X + softmv(X)‖max", "‖X‖max (1 + ‖V‖col)"),
        _growth, {"X": "n d", **_WEIGHTS}, _TOKENS,
        "one head; for several heads ‖V‖col is replaced by the sum over the heads",
    ),
)  # fmt: skip
