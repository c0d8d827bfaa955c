"""Upper bounds on the sign norm ‖M‖_{∞→1} = max xᵀMy over sign vectors x, y.

The value itself is NP-hard. Three bounds, each proved with its rounding, and the least is kept:

- Σ|M|, which is exact for matrices of one sign;
- for any u, v > 0,  xᵀMy ≤ σ_max(D_u^{-½} M D_v^{-½}) · √(Σu · Σv), because |D_u^{½} x|² = Σu and |D_v^{½} y|² = Σv;
  u = v = 1 gives √(mn)·σ_max, and the best u, v give the semidefinite (Grothendieck) value, at most 1.783 times
  the truth;
- where the shorter side is at most `ENUMERATED`, the maximum over all its sign vectors, which is the truth.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.errors import InputError
from depthgauge.linalg.rounding import (
    Enclosure,
    as_float64,
    div_up,
    mul_up,
    nonnegative_sum_up,
    spectral_norm_up,
    sqrt_up,
)

ENUMERATED = 10
"""Up to this many rows or columns the sign vectors are enumerated (2⁹ of them)."""


@dataclass(frozen=True)
class SignBound:
    """An upper bound on ‖M‖_{∞→1}, how it was reached, and the scalings that prove it.

    `row_scale` and `column_scale` are D_u^{-½} and D_v^{-½} as used: u = 1/row_scale², v = 1/column_scale².
    """

    value: Float[Tensor, "*batch"]
    method: str
    row_scale: Float[Tensor, "*batch m"] | None = None
    column_scale: Float[Tensor, "*batch n"] | None = None


def absolute_sum(M: Enclosure | Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Σ_ij |M_ij|, rounded up."""
    size = M.abs_up() if isinstance(M, Enclosure) else M.abs()
    return nonnegative_sum_up(size, (-2, -1))


def scaled_spectral(
    M: Enclosure | Float[Tensor, "*batch m n"],
    row_scale: Float[Tensor, "*batch m"],
    column_scale: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch"]:
    """σ_max(D_u^{-½} M D_v^{-½}) · √(Σu · Σv), rounded up; the scales are D_u^{-½} and D_v^{-½}, any positive."""
    M = M if isinstance(M, Enclosure) else Enclosure.exact(M)
    scaled = M * row_scale[..., :, None] * column_scale[..., None, :]
    mass_u = nonnegative_sum_up(div_up(div_up(1.0, row_scale), row_scale), -1)
    mass_v = nonnegative_sum_up(div_up(div_up(1.0, column_scale), column_scale), -1)
    return mul_up(spectral_norm_up(scaled), mul_up(sqrt_up(mass_u), sqrt_up(mass_v)))


def enumerated(M: Enclosure | Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """max_x Σ_j |Σ_i x_i M_ij| over all sign vectors x of the shorter side, rounded up: the norm itself."""
    M = M if isinstance(M, Enclosure) else Enclosure.exact(M)
    if M.shape[-2] > M.shape[-1]:
        M = M.mT
    m = M.shape[-2]
    if m > 20:
        raise InputError(f"enumeration needs a side of at most 20, got {tuple(M.shape[-2:])}; use sign_norm_up")
    products = Enclosure.exact(sign_vectors(m).to(M.mid.device)) @ M
    return nonnegative_sum_up(products.abs_up(), -1).amax(dim=-1)


def sign_vectors(m: int) -> Float[Tensor, "p m"]:
    """All sign vectors of length m up to an overall sign: 2^{m−1} rows that begin with +1."""
    codes = torch.arange(2 ** max(m - 1, 0))
    bits = (codes[:, None] >> torch.arange(max(m - 1, 0))) & 1
    ones = torch.ones(len(codes), min(m, 1), dtype=torch.float64)
    return torch.cat([ones, 1.0 - 2.0 * bits.to(torch.float64)], dim=-1)


def best_scalings(
    M: Float[Tensor, "*batch m n"], iterations: int = 60
) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch n"]]:
    """D_u^{-½} and D_v^{-½} near the best ones, from the dual of the semidefinite relaxation.

    The relaxation max Σ_ij M_ij ⟨x_i, y_j⟩ over unit vectors is climbed by turns, x_i ∝ Σ_j M_ij y_j and
    y_j ∝ Σ_i M_ij x_i, in a dimension high enough to have no false summits; at its summit the lengths of those sums
    are the optimal u and v. Any positive scaling is sound, so nothing has to converge for the bound to hold.
    """
    *batch, m, n = M.shape
    size = M.abs().amax(dim=(-2, -1), keepdim=True)
    M = M / torch.where(size > 0, size, 1.0)
    rank = math.isqrt(2 * (m + n)) + 2
    y = torch.randn(n, rank, generator=torch.Generator().manual_seed(0), dtype=M.dtype).to(M.device)
    y = (y / y.norm(dim=-1, keepdim=True)).expand(*batch, n, rank)
    for _ in range(iterations):
        x = M @ y
        u = x.norm(dim=-1, keepdim=True)
        x = x / u.clamp(min=1e-300)
        y = M.mT @ x
        v = y.norm(dim=-1, keepdim=True)
        y = y / v.clamp(min=1e-300)
    u, v = u.squeeze(-1), v.squeeze(-1)
    # A row that is (almost) zero would get an infinite scale; a floor costs next to nothing.
    u = u.clamp(min=1e-300).maximum(1e-6 * u.amax(dim=-1, keepdim=True))
    v = v.clamp(min=1e-300).maximum(1e-6 * v.amax(dim=-1, keepdim=True))
    return u.rsqrt(), v.rsqrt()


def sign_norm_up(M: Enclosure | Float[Tensor, "*batch m n"], iterations: int = 60) -> SignBound:
    """At least ‖M‖_{∞→1} for every matrix in the enclosure: the least of the bounds of this module.

    Batched; `method` names the bound that was least for most of the batch.

    >>> M = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    >>> round(sign_norm_up(M).value.item(), 9), round(absolute_sum(M).item(), 9)
    (2.0, 4.0)
    """
    total = absolute_sum(M)
    if min(M.shape[-2:]) <= ENUMERATED:
        return _least({"absolute sum": total, "enumeration": enumerated(M)})
    mid = M.mid if isinstance(M, Enclosure) else as_float64(M)
    usable = torch.where(mid.isfinite(), mid, 0.0)
    row_scale, column_scale = best_scalings(usable, iterations)
    ones = torch.ones_like(row_scale), torch.ones_like(column_scale)
    bounds = {
        "absolute sum": total,
        "spectral norm": scaled_spectral(M, *ones),
        "scaled spectral norm": scaled_spectral(M, row_scale, column_scale),
    }
    # The scalings are kept in any case: some matrix of the batch may need them though most do not.
    least = _least(bounds)
    return SignBound(least.value, least.method, row_scale, column_scale)


def _least(bounds: dict[str, Float[Tensor, "*batch"]]) -> SignBound:
    """The smallest bound per matrix; a bound that is not a number counts as infinite."""
    values = torch.stack([torch.where(b.isnan(), math.inf, b) for b in bounds.values()])
    winner = values.argmin(dim=0).flatten().mode().values if values[0].numel() else torch.tensor(0)
    return SignBound(values.amin(dim=0), list(bounds)[int(winner)])
