"""Softmax, the balance of its scores, and sharp perturbation bounds.

The bounds in this file are plain floating-point formulas. Certificates use the outward-rounded versions, which are
built from `depthgauge.linalg.rounding`.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LINEAR_REMAINDER = 1.0 / (12.0 * math.sqrt(3.0))
"""ρ = 1/(12√3), the sharp constant of `linearization_bound`."""


def alpha(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Return α(x) = ⟨exp(x), 1⟩, the normaliser of softm (Definition 3.1)."""
    return x.exp().sum(dim=-1)


def softm(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return softm(x) = exp(x)/α(x) along the last dimension, computed without overflow.

    >>> softm(torch.tensor([1000.0, 1000.0])).tolist()
    [0.5, 0.5]
    """
    return torch.softmax(x, dim=-1)


def total_variation(p: Float[Tensor, "*batch n"], q: Float[Tensor, "*#batch n"]) -> Float[Tensor, "*batch"]:
    """Return the total variation distance TV(p, q) = ½ Σ_j |p_j − q_j|."""
    return (p - q).abs().sum(dim=-1) / 2


def row_ranges(E: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n"]:
    """Return D_ii(E) = max_{j,l} |E_ij − E_il|, the range of each row (Definition 3.5)."""
    return E.amax(dim=-1) - E.amin(dim=-1)


def is_balanced(E: Float[Tensor, "*batch n m"], theta: float) -> Bool[Tensor, "*batch"]:
    """Return whether every row range of E is at most θ (Definition 3.5)."""
    return row_ranges(E).amax(dim=-1) <= theta


def shift_tv_bound(range_b: float) -> float:
    """Return tanh(range(b)/4), the bound on TV(softm(a + b), softm(a)) for every a.

    Equality holds if b takes only its largest and its smallest value, and softm(a) puts the mass 1/(1 + e^{range/2})
    on the entries where b is largest.
    """
    return math.tanh(range_b / 4)


def shift_max_bound(epsilon: float) -> float:
    """Return tanh(ε/2): if |b| ≤ ε entrywise, then ‖softm(a + b) − softm(a)‖max ≤ tanh(ε/2). The bound is attained.

    The constant printed in paper A, 2(e^ε − 1), is four times larger for small ε.
    """
    return math.tanh(epsilon / 2)


def uniform_tv_bound(range_a: float) -> float:
    """Return tanh(range(a)/4), the bound on TV(softm(a), uniform).

    Equality holds if k of the n scores are at the maximum, the others are at the minimum, and e^{range/2} = (n − k)/k.
    For other ranges the bound is attained in the limit n → ∞.
    """
    return math.tanh(range_a / 4)


def average_gap_bound(tv: float, range_z: float) -> float:
    """Return TV(p, q) · range(z), the bound on |Σ_j (p_j − q_j) z_j|; `tv` is TV(p, q)."""
    return tv * range_z


def contraction_bound(theta: Float[Tensor, "*batch"], v_col: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch"]:
    """Return tanh(θ/2) · ‖V‖col, the bound on ‖Res(attention(X))‖max / ‖Res(X)‖max.

    θ bounds the row ranges of E = β Res(X) W Res(X)ᵀ. This is Lemma 5.1 of paper A with a correct constant: the
    printed bound (e^θ − 1)‖V‖max fails for every d ≥ 3. Two tokens X = ±1ᵀ and constant Q, K, V attain the bound for
    every d.
    """
    return torch.tanh(theta / 2) * v_col


def linearization_bound(theta: float) -> float:
    """Return ρθ², the sharp bound on TV(softm(s), (1 + s − s̄)/n).

    Here θ = range(s), s̄ is the mean of s, and ρ = 1/(12√3).
    """
    return LINEAR_REMAINDER * theta * theta
