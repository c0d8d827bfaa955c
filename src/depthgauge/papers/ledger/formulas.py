"""Norms, residuals, softmax, attention and networks, in either arithmetic.

The tokens are the rows of X [n, d]. W = Q Kᵀ, and the scores are β X W Xᵀ.
"""

from typing import Any

import numpy as np

from depthgauge.papers.ledger.arithmetic import FLOATS, Arithmetic, Value


def max_norm(ar: Arithmetic, A: Value) -> Value:
    """‖A‖max = max |A_ij|, written ‖A‖∞ in paper A."""
    return ar.max(abs(A))


def entry_sum(A: Value) -> Value:
    """‖A‖₁ = Σ |A_ij|."""
    return abs(A).sum()


def column_norm(ar: Arithmetic, A: Value) -> Value:
    """‖A‖col = max_j Σ_i |A_ij|."""
    return ar.max(abs(A).sum(axis=0))


def row_norm(ar: Arithmetic, A: Value) -> Value:
    """‖A‖row = max_i Σ_j |A_ij|."""
    return ar.max(abs(A).sum(axis=1))


def spread(ar: Arithmetic, z: Value) -> Value:
    """range(z) = max z − min z."""
    return ar.max(z) - ar.min(z)


def row_ranges(ar: Arithmetic, E: Value) -> Value:
    """D_ii = max_j E_ij − min_j E_ij."""
    return ar.max(E, axis=1) - ar.min(E, axis=1)


def residual(ar: Arithmetic, Z: Value) -> Value:
    """Res(Z) = Z − 1yᵀ, where y_j is the mid-range of column j."""
    return Z - (ar.max(Z, axis=0) + ar.min(Z, axis=0)) / 2


def alpha(ar: Arithmetic, x: Value) -> Value:
    """α(x) = Σ_i exp(x_i)."""
    return ar.exp(x).sum()


def softm(ar: Arithmetic, x: Value) -> Value:
    """softm(x) = exp(x)/α(x) for a vector, or for every row of a matrix."""
    if ar is FLOATS:
        x = x - np.max(x, axis=-1, keepdims=True)  # avoids overflow; softmax is invariant under shifts
    e = ar.exp(x)
    return e / e.sum(axis=-1, keepdims=True)


def total_variation(p: Value, q: Value) -> Value:
    """TV(p, q) = ½ Σ |p_j − q_j|."""
    return abs(p - q).sum() / 2


def scores(X: Value, Q: Value, K: Value, beta: Value = 1) -> Value:
    """β X Q Kᵀ Xᵀ."""
    return beta * (X @ Q @ K.T @ X.T)


def attention(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, beta: Value = 1) -> Value:
    """softmv(X) = softm(β X Q Kᵀ Xᵀ) X V."""
    return softm(ar, scores(X, Q, K, beta)) @ X @ V


def layer(ar: Arithmetic, X: Value, Q: Value, K: Value, V: Value, heads: int = 1, beta: Value = 1) -> Value:
    """X + Σ_h attention_h(X) with equal heads."""
    return X + heads * attention(ar, X, Q, K, V, beta)


def depth(ar: Arithmetic, X: Value, weights: "tuple[Any, Any, Any]", layers: int, heads: int, beta: Value = 1) -> Value:
    """X_ℓ, the output of ℓ equal layers with equal heads."""
    for _ in range(layers):
        X = layer(ar, X, *weights, heads=heads, beta=beta)
    return X
