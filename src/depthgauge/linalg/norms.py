"""The norms of attention theory, and what is left of a matrix when its best constant row is taken away.

Throughout, tokens are the rows of a matrix Z [n, d]; leading batch dimensions are allowed everywhere.
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from depthgauge.errors import unknown_name

Center = Literal["midrange", "mean"]
CENTERS: tuple[Center, ...] = ("midrange", "mean")


def max_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """‖A‖max = max_ij |A_ij|, the largest entry in size.

    >>> import torch
    >>> max_norm(torch.tensor([[1.0, -3.0], [2.0, 0.0]])).item()
    3.0
    """
    return A.abs().amax(dim=(-2, -1))


def entry_sum_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """‖A‖₁ = Σ_ij |A_ij|, the sum of all entries in size."""
    return A.abs().sum(dim=(-2, -1))


def column_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """‖A‖col = max_j Σ_i |A_ij|, the largest column sum; ‖Y A‖max ≤ ‖Y‖max ‖A‖col."""
    return A.abs().sum(dim=-2).amax(dim=-1)


def row_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """‖A‖row = max_i Σ_j |A_ij|, the largest row sum."""
    return A.abs().sum(dim=-1).amax(dim=-1)


def composite_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """‖A‖₁,∞ = √(‖A‖col · ‖A‖row), the composite norm of Dong et al. (2021)."""
    return (column_norm(A) * row_norm(A)).sqrt()


def frobenius_norm(A: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch"]:
    """‖A‖F = √(Σ_ij A_ij²)."""
    return A.square().sum(dim=(-2, -1)).sqrt()


def center_row(Z: Float[Tensor, "*batch n d"], center: Center = "midrange") -> Float[Tensor, "*batch 1 d"]:
    """The row yᵀ that `residual` subtracts: per column (max + min)/2, or the token mean."""
    if center == "midrange":
        return Z.amin(dim=-2, keepdim=True) / 2 + Z.amax(dim=-2, keepdim=True) / 2
    if center == "mean":
        return Z.mean(dim=-2, keepdim=True)
    raise unknown_name("center", center, CENTERS)


def residual(Z: Float[Tensor, "*batch n d"], center: Center = "midrange") -> Float[Tensor, "*batch n d"]:
    """Res(Z) = Z − 1yᵀ.

    `midrange` takes y_c = (max_i Z_ic + min_i Z_ic)/2, the minimiser of ‖Z − 1yᵀ‖max that is optimal in every
    column (the minimiser itself is not unique: only the widest column is forced); `mean` is the choice of
    Dong et al.

    >>> import torch
    >>> residual(torch.tensor([[2.0], [0.0], [-2.0]])).flatten().tolist()
    [2.0, 0.0, -2.0]
    """
    return Z - center_row(Z, center)


def residual_shift_bound(epsilon: float) -> float:
    """‖A − B‖max ≤ ε gives ‖Res(A) − Res(B)‖max ≤ 2ε (mid-range), attained by A = (2, 0, −2)ᵀ, B = (1, 1, −3)ᵀ."""
    return 2.0 * epsilon


def residual_norm_shift_bound(epsilon: float) -> float:
    """‖A − B‖max ≤ ε gives | ‖Res A‖max − ‖Res B‖max | ≤ ε (mid-range): half a range moves by at most ε."""
    return epsilon


def projected_max_bound(y_max: float, v_col: float) -> float:
    """‖P Y V‖max ≤ ‖Y‖max · ‖V‖col for row-stochastic P; `y_max` is ‖Y‖max and `v_col` is ‖V‖col.

    (‖AB‖max ≤ ‖A‖max ‖B‖max is false: the inner dimension has to be paid for, here by the column sum.)
    """
    return y_max * v_col
