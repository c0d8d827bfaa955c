"""The exact expansion of a network with skip connections, and the bound that follows from it (docs/math.md §3)."""

from collections.abc import Iterator

import numpy as np
from numpy.random import Generator as Random

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Claim, Evaluation, Instance, Size
from depthgauge.papers.ledger.formulas import attention, entry_sum, max_norm, scores, softm
from depthgauge.papers.ledger.instances import matrix, searched, sizes


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

CLAIMS: tuple[Claim, ...] = (
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
