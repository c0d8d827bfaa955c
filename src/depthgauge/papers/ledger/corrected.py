"""Our own statements: corrected forms of the papers' statements, and the bounds that the library uses."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import (
    Arithmetic,
    Value,
    attention,
    column_norm,
    depth,
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
from depthgauge.papers.ledger.claim import (
    Claim,
    Computation,
    Evaluate,
    Evaluation,
    Instance,
    Observed,
    Size,
    Starts,
    Verdict,
    matrix,
    searched,
    sizes,
)
from depthgauge.papers.ledger.layer_collapse import balance, opposite_tokens
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.certificate import certify
from depthgauge.theory.linalg.enclosures import scaled_spectral, sign_norm_up, sign_vectors
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.network.random_networks import random_network, uniform_inputs
from depthgauge.theory.surrogates.closed_forms import closed_form, fold

# --- Inequalities for norms, residuals and softmax with sharp constants (docs/math.md §2) ----------------------------

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

CONSTANTS: tuple[Claim, ...] = (
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


# --- The exact expansion of a network, and the bound that follows from it (docs/math.md §3) ---------------------------


def _layers(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> list[Value]:
    """X_0, …, X_L for weights [L, H, d, d]."""
    states = [X]
    for q, k, v in zip(Q, K, V, strict=True):
        heads = zip(q, k, v, strict=True)
        states.append(states[-1] + sum(attention(ar, states[-1], *head) for head in heads))
    return states


def _drift(V: Value, first: int, last: int, eye: Value) -> Value:
    """N_{first:last} = (I + V_first) ⋯ (I + V_{last−1}), V_ℓ the sum over heads."""
    product = eye
    for v in V[first:last]:
        product = product @ (eye + v.sum(axis=0))
    return product


def _mean_field(X: Value, V: Value, eye: Value) -> Value:
    """X + 1·mean(X)(N_{0:L} − I)."""
    return X + X.sum(axis=0, keepdims=True) / len(X) @ (_drift(V, 0, len(V), eye) - eye)


def _expanded(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    states, eye, L, n = _layers(ar, X, Q, K, V), np.eye(X.shape[1], dtype=object), len(V), len(X)
    right = _mean_field(X, V, eye)
    for k in range(L):
        heads = zip(Q[k], K[k], V[k], strict=True)
        uniform = ar.number(1) / n
        E = sum((softm(ar, scores(states[k], q, kk)) - uniform) @ states[k] @ v for q, kk, v in heads)
        right = right + E + E.sum(axis=0, keepdims=True) / n @ (_drift(V, k + 1, L, eye) - eye)
    return {"X_L": states[-1]}, states[-1], right


def certificate(ar: Arithmetic, phi: Value, Q: Value, K: Value, V: Value) -> Value:
    """Return own + common at the last layer for each coordinate: the plain recursion, with Σ|·| for the sign norm.

    With φ = ‖X‖max:
    state_ℓ = φ1 + φ1|N − I| + own + common, spread_ℓ = φ1 + own, θ = 2 Σ|diag(state) W diag(spread)|,
    G = 2 tanh(θ/4) spread, own = Σ G|V|, common = Σ G|V(N − I)|.
    """
    L, H, d, _ = V.shape
    eye, zero = np.eye(d, dtype=object), np.array([0] * d, dtype=object)
    gains: list[list[Value]] = []
    for ell in range(L + 1):
        own, common = zero, zero
        for k, row in enumerate(gains):
            rest = _drift(V, k + 1, ell, eye) - eye
            for h, G in enumerate(row):
                own = own + G @ abs(V[k, h])
                common = common + G @ abs(V[k, h] @ rest)
        if ell == L:
            break
        spread = phi + own
        state = spread + phi * abs(_drift(V, 0, ell, eye) - eye).sum(axis=0) + common
        thetas = [2 * entry_sum(state[:, None] * (Q[ell, h] @ K[ell, h].T) * spread[None, :]) for h in range(H)]
        gains.append([2 * ar.tanh(theta / 4) * spread for theta in thetas])
    return own + common


def _certified(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    end = _layers(ar, X, Q, K, V)[-1]
    one = _mean_field(X, V, np.eye(X.shape[1], dtype=object))
    bound = ar.max(certificate(ar, max_norm(ar, X), Q, K, V))
    return {"S(X)": end, "S'(X)": one}, max_norm(ar, end - one), bound


def _without_scores(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    end = _layers(ar, X, Q, K * 0, V)[-1]
    return {"S(X)": end}, end, _mean_field(X, V, np.eye(X.shape[1], dtype=object))


def drawn(random: Random, size: Size) -> Instance:
    """Draw an input of the box and the weights of a network of some size η."""
    n, d, H, L = size["n"], size["d"], size["H"], size["L"]
    eta = random.choice((0.01, 0.1, 0.5, 1.0))
    weights = {name: eta * matrix(random, L, H, d, d) for name in ("Q", "K", "V")}
    return {"X": np.clip(matrix(random, n, d), -1, 1), **weights}


def _aligned(size: Size) -> Iterator[Instance]:
    n, d, H, L = size["n"], size["d"], size["H"], size["L"]
    X = np.where(np.arange(n)[:, None] < n - 1, 1.0, -1.0) * np.ones(d)
    for eta in (0.1, 0.5):
        weight = eta * np.ones((L, H, d, d))
        yield {"X": X, "Q": weight, "K": weight, "V": weight}


_SIZES = sizes(n=(2, 3, 3), d=(1, 2, 2), H=(1, 1, 2), L=(1, 2, 3))
_WHERE = "docs/math.md §3"

EXPANSION: tuple[Claim, ...] = (
    searched(
        "ours.expansion", _WHERE, ("X_L", "the expansion"), _expanded, drawn, _SIZES,
        "E_k = Σ_h (P_kh − U) X_k V_kh, N_{k:ℓ} = (I + V_k) ⋯ (I + V_{ℓ−1}), U = 11ᵀ/n; with skip connections",
        statement="X_L = X + 1·mean(X)(N_{0:L} − I) + Σ_k [E_k + 1·mean(E_k)(N_{k+1:L} − I)]", relation="=",
    ),
    searched(
        "ours.mean-field-exact", _WHERE, ("S(X)", "X + 1·mean(X)(N_{0:L} − I)"), _without_scores, drawn, _SIZES,
        "Q Kᵀ = 0 in every head; with skip connections",
        statement="S(X) = X + 1·mean(X)(N_{0:L} − I) when all scores are zero, for every V", relation="=",
    ),
    searched(
        "ours.mean-field-certificate", _WHERE, ("‖S(X) − S'(X)‖max", "max_a (own_L + common_L)_a"), _certified, drawn,
        _SIZES, "‖X‖max ≤ φ, any number of tokens; own and common by the plain recursion; with skip connections",
        statement="‖S(X) − S'(X)‖max ≤ max_a (own_L + common_L)_a, where S' is the mean-field layer", starts=_aligned,
        note="`depthgauge collapse` computes a smaller bound; this one is simple enough to check by hand.",
    ),
)  # fmt: skip


# --- How close one layer can come to L layers, from both sides (docs/math.md §3.14) ----------------------------------


def _gain(ar: Arithmetic, eta: Value, n: int, d: int, H: int, L: int) -> Evaluation:
    """Compare the bound of 3.14 with |S(0; q) − q(S(1) − 1)|/(1 + q), where q = 1/n and all weights of S are η."""
    weight, q, r, w = np.full((d, d), eta), ar.number(1) / n, H * d * eta, d**3 * eta**2

    def above(score: Value) -> Value:
        return q / (q + (1 - q) * ar.exp(-score)) - q

    left = sum(above(w * q * ((1 + r) ** k - 1)) + q * k * r * above(w) for k in range(1, L)) * r / (1 + q)
    X = np.array([[ar.number(int(row == n - 1))] * d for row in range(n)])
    at_zero, at_one = (depth(ar, tokens, (weight, weight, weight), L, H)[0, 0] for tokens in (X, X[-1:]))
    return {"S(0; q)": at_zero, "S(1)": at_one}, left, abs(at_zero - q * (at_one - 1)) / (1 + q)


def _drawn_gain(random: Random, size: Size) -> Instance:
    return {"eta": float(np.exp(random.uniform(np.log(0.001), 0))), **size}


def _error_of_corrected(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    L, H, d, _ = V.shape
    end, mean, one = _layers(ar, X, Q, K, V)[-1], X.sum(axis=0, keepdims=True) / len(X), 0
    for head in zip(*(M.reshape(L * H, d, d) for M in (Q, K, V)), strict=True):
        one = one + attention(ar, X, *head) - mean @ head[2]
    one = one + _mean_field(X, V, np.eye(d, dtype=object))
    eta = max_norm(ar, np.stack([Q, K, V]))
    bound = (ar.exp(ar.number(4)) - 1) * d**3 * eta**2 * (H * L * d * eta) ** 2
    return {"S(X)": end, "S'(X)": one, "η": eta}, max_norm(ar, end - one), bound


def _within_one(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> bool:
    L, H, d, _ = V.shape
    return bool(H * L * d * max_norm(ar, np.stack([Q, K, V])) <= 1 and max_norm(ar, X) <= 1)


def _drawn_small(random: Random, size: Size) -> Instance:
    """Scale the weights to HLdη ≤ 1."""
    found = dict(drawn(random, size))
    scale = random.uniform(0, 1) / (size["H"] * size["L"] * size["d"])
    weights = {name: found[name] / max(np.abs(found[name]).max(), 1e-9) for name in "QKV"}
    return {"X": found["X"], **{name: scale * weight for name, weight in weights.items()}}


_WHERE_ONE, _SHAPE = "docs/math.md §3.14", "Q, K, V ∈ R^{d×d} with entries up to η, β = 1"

ONE_LAYER: tuple[Claim, ...] = (
    searched(
        "ours.one-layer-distance", _WHERE_ONE, ("the bound", "|S(0; q) − q(S(1) − 1)|/(1 + q)"), _gain,
        _drawn_gain, sizes(n=(2, 2, 4), d=(1, 2, 2), H=(1, 2, 1), L=(2, 3, 4)),
        f"{_SHAPE}; k = 1, …, L − 1; r = Hdη, w = d³η², u_q(s) = q/(q + (1 − q)e^−s) − q, q = 1/n",
        statement="every one-layer network is at least r/(1 + q) Σ_k [u_q(wq((1 + r)^k − 1)) + qkr u_q(w)] away from "
        "the network with all weights η", allowed=lambda ar, eta, **_: bool(eta > 0), sharp=True,
    ),
    searched(
        "ours.one-layer-error", _WHERE_ONE, ("‖S(X) − S'(X)‖max", "(e⁴ − 1) d³η² (HLdη)²"), _error_of_corrected,
        _drawn_small, _SIZES, f"{_SHAPE}, ‖X‖max ≤ 1, HLdη ≤ 1; with skip connections, any number of tokens",
        statement="‖S(X) − S'(X)‖max ≤ (e⁴ − 1) d³η² (HLdη)², where S' has all heads and the mean-field correction",
        allowed=_within_one,
    ),
)  # fmt: skip


# --- The bounds of the library, tested on random networks (docs/math.md §3) -------------------------------------------

_NETWORKS = ((2, 1, 4, 0.01), (2, 1, 4, 0.2), (3, 2, 4, 0.05), (4, 2, 8, 0.01))
"""(layers, heads, dim, η) of the random networks."""


def _sandwiched(
    surrogate: Callable[[SelfAttentionNetwork], SelfAttentionNetwork],
    inputs: str = "radius",
    tokens: int | None = None,
    **kind: Any,
) -> Callable[[], Observed]:
    """Return a check that holds if no attack exceeds its certificate; its ratio is the largest attack/certificate.

    `inputs` is the argument of `certify`: a box or a ball of radius 1, or all sequences of five vectors.
    With a number of tokens the networks are causal. `kind` are further options of the networks.
    """

    def run() -> Observed:
        found = []
        for seed, (layers, heads, dim, eta) in enumerate(_NETWORKS):
            shape = {"layers": layers, "heads": heads, "dim": dim, "eta": eta}
            network = random_network(**shape, seed=seed, causal=tokens is not None, **kind)  # type: ignore[arg-type]
            region: Any = Tokens(uniform_inputs(1, 5, dim, seed=seed)[0]) if inputs == "inputs" else 1.0
            bounds = certify(network, surrogate(network), **{inputs: region}, tokens=tokens, starts=4, steps=10)
            found.append(bounds)
        ratios = [c.lower / c.upper for c in found if c.upper is not None]
        broken = sum(ratio > 1 for ratio in ratios)
        remark = f"{len(ratios)} random networks with a finite certificate; an attack exceeded it for {broken} of them."
        verdict: Verdict = "fails" if broken else "holds" if ratios else "undecided"
        return Observed(verdict, max(ratios, default=None), len(found), (remark,))

    return run


def _by_method(method: str, inputs: str = "radius", **kind: Any) -> Callable[[], Observed]:
    return _sandwiched(lambda network: closed_form(network, method), inputs, **kind)


def _sign_norms() -> Observed:
    """Compare with the norm itself, found by enumerating all sign vectors; integer entries make that exact."""
    generator = torch.Generator().manual_seed(0)
    ratios = []
    for m, n in ((1, 1), (2, 2), (3, 5), (8, 8), (12, 4)) * 4:
        M = torch.randint(-9, 10, (m, n), generator=generator, dtype=torch.float64)
        norm = (sign_vectors(m) @ M).abs().sum(dim=1).max()
        upper = min(float(scaled_spectral(M, torch.ones(m), torch.ones(n))), float(sign_norm_up(M).value))
        ratios.append(float(norm) / upper)
    remarks = ("The norm of random integer matrices was computed by enumerating all sign vectors.",)
    return Observed("fails" if max(ratios) > 1 else "holds", max(ratios), len(ratios), remarks)


_SET = "‖X‖max ≤ φ, any number of tokens"
_PROMPTS = "every token is one of finitely many vectors, any number of tokens"


def _claim(id: str, statement: str, run: Callable[[], Observed], hypothesis: str = _SET) -> Claim:
    return Claim(f"ours.{id}", _WHERE, statement, Computation(run), hypothesis)


CERTIFICATES: tuple[Claim, ...] = (
    _claim(
        "sign-norm", "max over sign vectors x, y of xᵀMy ≤ σ_max(diag(u)^-½ M diag(v)^-½) √(Σu Σv)", _sign_norms,
        "any u, v > 0; tested with the smallest bound over several u, v",
    ),
    _claim(
        "joint-certificate",
        "‖S(X) − S'(X)‖max ≤ lead + remainder, where S' is the mean-field layer and all heads are bounded jointly",
        _by_method("mean-field"),
    ),
    _claim("identity", "‖S(X) − X‖max ≤ max φ1|N_{0:L} − I| + err_L", _by_method("identity")),
    _claim("last-layer", "‖S(X) − layer_L(X)‖max ≤ its certificate", _by_method("last-layer")),
    _claim(
        "parallel", "‖S(X) − S'(X)‖max ≤ its certificate, where S' has all heads in one layer", _by_method("parallel")
    ),
    _claim(
        "corrected",
        "‖S(X) − S'(X)‖max ≤ its certificate, where S' has all heads and the mean-field correction in one layer",
        _by_method("corrected"),
    ),
    _claim(
        "effective-depth", "‖S(X) − S_K(X)‖max ≤ its certificate, where S_K keeps only the layers in K",
        _sandwiched(lambda network: fold(network, [len(network.layers) - 1])),
    ),
    _claim(
        "row-ball", "‖S(X) − S'(X)‖max ≤ its certificate, where S' is the mean-field layer",
        _by_method("mean-field", "ball"), "every token has Euclidean norm at most r; any number of tokens",
    ),
    _claim(
        "causal-mean-field",
        "‖S(X) − S'(X)‖max ≤ its certificate, where S' is the causal layer with the patterns C^m and the values e_m",
        _sandwiched(lambda network: closed_form(network, "mean-field", 6), tokens=6),
        "‖X‖max ≤ φ, 6 tokens, row i sees the tokens 1 to i",
    ),
    _claim(
        "mlp-deletion",
        "deleting the attention of layer ℓ changes the output by at most λ_ℓ out_ℓ Π_{k>ℓ} λ_k (1 + Lip_k)",
        _by_method("identity", mlp=8),
        "X_{ℓ+1} = f_ℓ(X_ℓ + Σ_h attention_h(X_ℓ)), f_ℓ with Lipschitz constant λ_ℓ in the max norm",
    ),
    _claim(
        "tokens", "‖S(X) − S'(X)‖max ≤ its certificate over tokens (3.11), where S' is the mean-field layer",
        _by_method("mean-field", "inputs"), _PROMPTS,
    ),
    _claim(
        "wide-block", "‖S(X) − S'(X)‖max ≤ its certificate (3.13), where S' has all heads, then all MLPs, side by side",
        _by_method("parallel", "inputs", norm="pre", mlp=8, mlp_skip=True),
        f"{_PROMPTS}; LayerNorm before attention and MLP, both with skip connections",
    ),
)  # fmt: skip


# --- The expansion of a causal network about repeated averages, and its order (docs/math.md §3.12) -------------------

ORDER = 3
"""The order in η of the error of the mean-field layer."""


def _visible(ar: Arithmetic, X: Value, Q: Value, K: Value) -> list[Value]:
    """Return row i of the attention over the tokens 0 to i, for every i."""
    table = scores(X, Q, K)
    return [softm(ar, table[i, : i + 1]) for i in range(len(X))]


def _averaged(X: Value) -> Value:
    """C X: row i is the mean of the rows 0 to i."""
    return np.stack([X[: i + 1].sum(axis=0) / (i + 1) for i in range(len(X))])


def _carried(X: Value, V: Value, first: int) -> Value:
    """Σ_m C^m X e_m over the layers from `first` on: one averaging layer X ↦ X + C X V_ℓ after the other."""
    for v in V[first:]:
        X = X + _averaged(X) @ v.sum(axis=0)
    return X


def _orders(V: Value, d: int) -> list[Value]:
    """Return e_0, e_1, …, e_L as sums over increasing layers."""
    found = [np.eye(d, dtype=object), *(np.zeros((d, d), dtype=object) for _ in V)]
    for v in V:
        for m in range(len(V), 0, -1):
            found[m] = found[m] + found[m - 1] @ v.sum(axis=0)
    return found


def _causally_expanded(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value) -> Evaluation:
    state, errors = X, []
    for q, k, v in zip(Q, K, V, strict=True):
        mixed, E = 0, 0
        for head in zip(q, k, v, strict=True):
            rows = _visible(ar, state, *head[:2])
            attended = np.stack([row @ state[: i + 1] for i, row in enumerate(rows)])
            mixed = mixed + attended @ head[2]
            E = E + (attended - _averaged(state)) @ head[2]
        errors.append(E)
        state = state + mixed
    power, right = X, 0
    for e in _orders(V, X.shape[1]):
        right = right + power @ e
        power = _averaged(power)
    for k, E in enumerate(errors):
        right = right + _carried(E, V, k + 1)
    return {"X_L": state}, state, right


def _slopes() -> Observed:
    """Compute how the error of the mean-field layer falls when η is halved, on random networks and inputs."""
    found = []
    for seed in range(6):
        unit = random_network(layers=3, heads=2, dim=4, eta=1.0, seed=seed, causal=True)
        x = 2 * torch.rand(64, 6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
        errors = []
        for eta in (4e-3, 2e-3):
            network = unit.rescale(eta)
            with torch.no_grad():
                errors.append(float((network(x) - closed_form(network, "mean-field", 6)(x)).abs().max()))
        found.append(math.log2(errors[0] / errors[1]))
    is_third = all(abs(slope - ORDER) < 0.1 for slope in found)
    remark = (
        f"log₂ of the error at η = 0.004 over that at 0.002, 6 random networks: {min(found):.3f} to {max(found):.3f}."
    )
    return Observed("holds" if is_third else "fails", None, len(found), (remark,))


_WHERE_CAUSAL = "docs/math.md §3.12"

CAUSAL: tuple[Claim, ...] = (
    searched(
        "ours.causal-expansion", _WHERE_CAUSAL, ("X_L", "the expansion"), _causally_expanded, drawn,
        sizes(n=(2, 3, 3), d=(1, 2, 2), H=(1, 1, 2), L=(1, 2, 3)),
        "row i sees the tokens 1 to i; C_ij = 1/i for j ≤ i; E_k = Σ_h (P_kh − C) X_k V_kh; with skip connections",
        statement="X_L = Σ_m C^m X e_m(0:L) + Σ_k Σ_m C^m E_k e_m(k+1:L)", relation="=",
    ),
    Claim(
        "ours.causal-mean-field-order", _WHERE_CAUSAL,
        "‖S(X) − Σ_m C^m X e_m(0:L)‖max is of order η³, and of no higher order", Computation(_slopes),
        "causal, with skip connections; weights of size η",
    ),
)  # fmt: skip


CLAIMS: tuple[Claim, ...] = (*CONSTANTS, *EXPANSION, *ONE_LAYER, *CAUSAL, *CERTIFICATES)
