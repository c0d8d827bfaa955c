"""Softmax, its balance, and the sharp constants by which it moves.

The bounds here are plain floating-point formulas, written to be read; a certificate uses their outward-rounded
twins from `depthgauge.linalg.rounding`.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LINEAR_REMAINDER = 1.0 / (12.0 * math.sqrt(3.0))
"""ρ = 1/(12√3), the sharp constant of `linearization_bound`."""


def alpha(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """α(x) = ⟨exp(x), 1⟩, the normaliser of softm (Definition 3.1)."""
    return x.exp().sum(dim=-1)


def softm(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """softm(x) = exp(x)/α(x), row by row, computed without overflow.

    >>> softm(torch.tensor([1000.0, 1000.0])).tolist()
    [0.5, 0.5]
    """
    return torch.softmax(x, dim=-1)


def total_variation(p: Float[Tensor, "*batch n"], q: Float[Tensor, "*#batch n"]) -> Float[Tensor, "*batch"]:
    """TV(p, q) = ½ Σ_j |p_j − q_j|."""
    return (p - q).abs().sum(dim=-1) / 2


def row_ranges(E: Float[Tensor, "*batch n m"]) -> Float[Tensor, "*batch n"]:
    """D_ii(E) = max_{j,l} |E_ij − E_il|, the range of every row (Definition 3.5)."""
    return E.amax(dim=-1) - E.amin(dim=-1)


def is_balanced(E: Float[Tensor, "*batch n m"], theta: float) -> Bool[Tensor, "*batch"]:
    """Whether every row range of E is at most θ (Definition 3.5)."""
    return row_ranges(E).amax(dim=-1) <= theta


def shift_tv_bound(range_b: float) -> float:
    """TV(softm(a + b), softm(a)) ≤ tanh(range(b)/4), for every a.

    Attained: with a share 1/(1 + e^{range/2}) of softm(a)'s mass where b is largest, the rest where it is least.
    """
    return math.tanh(range_b / 4)


def shift_max_bound(epsilon: float) -> float:
    """|b| ≤ ε gives ‖softm(a + b) − softm(a)‖max ≤ tanh(ε/2); attained.

    The printed constant 2(e^ε − 1) is four times larger at small ε.
    """
    return math.tanh(epsilon / 2)


def uniform_tv_bound(range_a: float) -> float:
    """TV(softm(a), uniform) ≤ tanh(range(a)/4).

    Attained by k of n scores at the top and the others at the bottom, where e^{range/2} = (n − k)/k; for other ranges
    in the limit of many tokens.
    """
    return math.tanh(range_a / 4)


def average_gap_bound(tv: float, range_z: float) -> float:
    """|Σ_j (p_j − q_j) z_j| ≤ TV(p, q) · range(z); `tv` is TV(p, q)."""
    return tv * range_z


def contraction_bound(theta: Float[Tensor, "*batch"], v_col: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch"]:
    """‖Res(attention(X))‖max / ‖Res(X)‖max ≤ tanh(θ/2) · ‖V‖col.

    θ bounds the row ranges of E = β Res(X) W Res(X)ᵀ. This is Lemma 5.1 with the constant that holds: the printed
    (e^θ − 1)‖V‖max fails from d = 3 on. Attained by n = 2, X = ±1ᵀ and constant Q, K, V, for every d.
    """
    return torch.tanh(theta / 2) * v_col


def linearization_bound(theta: float) -> float:
    """TV(softm(s), (1 + s − s̄)/n) ≤ ρθ² with θ = range(s), s̄ the mean of s, ρ = 1/(12√3); sharp."""
    return LINEAR_REMAINDER * theta * theta
