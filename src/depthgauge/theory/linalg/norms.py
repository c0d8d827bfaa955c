"""Matrix norms, the residual of a matrix (its distance from a matrix with equal rows), and softmax.

Tokens are the rows of a matrix Z of shape [n, d]. All functions accept leading batch dimensions. They are plain
floating-point formulas; certificates use outward-rounded versions of them.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import unknown_name

Center = Literal["midrange", "mean"]
CENTERS: tuple[Center, ...] = ("midrange", "mean")


def max_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Return ‖A‖max = max_ij |A_ij|, the largest absolute entry.

    >>> import torch
    >>> max_norm(torch.tensor([[1.0, -3.0], [2.0, 0.0]])).item()
    3.0
    """
    return A.abs().amax(dim=(-2, -1))


def entry_sum_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Return ‖A‖₁ = Σ_ij |A_ij|, the sum of all absolute entries."""
    return A.abs().sum(dim=(-2, -1))


def column_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Return ‖A‖col = max_j Σ_i |A_ij|, the largest absolute column sum. It satisfies ‖Y A‖max ≤ ‖Y‖max ‖A‖col."""
    return A.abs().sum(dim=-2).amax(dim=-1)


def row_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Return ‖A‖row = max_i Σ_j |A_ij|, the largest absolute row sum."""
    return A.abs().sum(dim=-1).amax(dim=-1)


def composite_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Return ‖A‖₁,∞ = √(‖A‖col · ‖A‖row), the composite norm of Dong et al. (2021)."""
    return (column_norm(A) * row_norm(A)).sqrt()


def frobenius_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """Return the Frobenius norm ‖A‖F = √(Σ_ij A_ij²)."""
    return A.square().sum(dim=(-2, -1)).sqrt()


def center_row(Z: Float[Tensor, "*batch n d"], center: Center = "midrange") -> Float[Tensor, "*batch 1 d"]:
    """Return the row yᵀ that `residual` subtracts: (max + min)/2 of each column, or the mean of each column."""
    if center == "midrange":
        return Z.amin(dim=-2, keepdim=True) / 2 + Z.amax(dim=-2, keepdim=True) / 2
    if center == "mean":
        return Z.mean(dim=-2, keepdim=True)
    raise unknown_name("center", center, CENTERS)


def residual(Z: Float[Tensor, "*batch n d"], center: Center = "midrange") -> Float[Tensor, "*batch n d"]:
    """Return the residual Res(Z) = Z − 1yᵀ.

    With `center="midrange"`, y_c = (max_i Z_ic + min_i Z_ic)/2. This y minimises ‖Z − 1yᵀ‖max. The minimiser is not
    unique, because only the column with the largest range determines the norm; this one is optimal in every column.
    With `center="mean"`, y is the mean of the tokens, as in Dong et al. (2021).

    >>> import torch
    >>> residual(torch.tensor([[2.0], [0.0], [-2.0]])).flatten().tolist()
    [2.0, 0.0, -2.0]
    """
    return Z - center_row(Z, center)


LINEAR_REMAINDER = 1.0 / (12.0 * math.sqrt(3.0))
"""ρ = 1/(12√3): TV(softm(s), (1 + s − s̄)/n) ≤ ρθ² with θ = range(s) and s̄ the mean of s. The constant is sharp."""


def softm(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """Return softm(x) = exp(x)/α(x) along the last dimension, computed without overflow.

    >>> softm(torch.tensor([1000.0, 1000.0])).tolist()
    [0.5, 0.5]
    """
    return torch.softmax(x, dim=-1)


def total_variation(p: Float[Tensor, "*batch n"], q: Float[Tensor, "*#batch n"]) -> Float[Tensor, "*batch"]:
    """Return the total variation distance TV(p, q) = ½ Σ_j |p_j − q_j|."""
    return (p - q).abs().sum(dim=-1) / 2


def contraction_bound(theta: Float[Tensor, "*batch"], v_col: Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch"]:
    """Return tanh(θ/2) · ‖V‖col, the bound on ‖Res(attention(X))‖max / ‖Res(X)‖max.

    θ bounds the row ranges of E = β Res(X) W Res(X)ᵀ. This is Lemma 5.1 of paper A with a correct constant: the
    printed bound (e^θ − 1)‖V‖max fails for every d ≥ 3. Two tokens X = ±1ᵀ and constant Q, K, V attain the bound for
    every d.
    """
    return torch.tanh(theta / 2) * v_col
