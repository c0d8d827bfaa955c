"""Upper bounds on the sign norm ‖M‖_{∞→1} = max xᵀMy over sign vectors x, y.

Computing the value is NP-hard. This module takes the smallest of three upper bounds, all with outward rounding:

- Σ_ij |M_ij|, which is the exact value if all entries have one sign;
- for any u, v > 0,  xᵀMy ≤ σ_max(D_u^{-½} M D_v^{-½}) · √(Σu · Σv), because |D_u^{½} x|² = Σu and |D_v^{½} y|² = Σv;
  u = v = 1 gives √(mn)·σ_max, and the best u, v give the value of the semidefinite relaxation, which is at most
  1.783 times the norm (Grothendieck's inequality);
- if the shorter side is at most `ENUMERATED`, the maximum over all its sign vectors, which is the exact value.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.theory.linalg.enclosures import Enclosure, as_enclosure
from depthgauge.theory.linalg.rounding import as_float64, div_up, mul_up, nonnegative_sum_up, sqrt_up
from depthgauge.theory.linalg.spectral import spectral_norm_up

ENUMERATED = 10
"""The longest side for which all sign vectors are enumerated (2⁹ up to an overall sign)."""


@dataclass(frozen=True, eq=False, repr=False)
class SignBound(ArrayRecord):
    """An upper bound on ‖M‖_{∞→1}, the method that gave it, and the scalings that prove it.

    `row_scale` and `column_scale` are D_u^{-½} and D_v^{-½}, so u = 1/row_scale² and v = 1/column_scale².
    """

    value: Float[Tensor, "*batch"]
    method: str
    row_scale: Float[Tensor, "*batch m"] | None = None
    column_scale: Float[Tensor, "*batch n"] | None = None


def absolute_sum(M: Enclosure | Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Return Σ_ij |M_ij|, rounded up."""
    return nonnegative_sum_up(M.abs_up() if isinstance(M, Enclosure) else M.abs(), (-2, -1))


def scaled_spectral(
    M: Enclosure | Float[Tensor, "*batch m n"],
    row_scale: Float[Tensor, "*batch m"],
    column_scale: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch"]:
    """Return σ_max(D_u^{-½} M D_v^{-½}) · √(Σu · Σv), rounded up.

    `row_scale` is D_u^{-½} and `column_scale` is D_v^{-½}. Any positive scales give an upper bound.
    """
    scaled = as_enclosure(M) * row_scale[..., :, None] * column_scale[..., None, :]
    mass_u = nonnegative_sum_up(div_up(div_up(1.0, row_scale), row_scale), -1)
    mass_v = nonnegative_sum_up(div_up(div_up(1.0, column_scale), column_scale), -1)
    return mul_up(spectral_norm_up(scaled), mul_up(sqrt_up(mass_u), sqrt_up(mass_v)))


def enumerated(M: Enclosure | Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Return ‖M‖_{∞→1} = max_x Σ_j |Σ_i x_i M_ij| over all sign vectors x of the shorter side, rounded up."""
    M = as_enclosure(M)
    if M.shape[-2] > M.shape[-1]:
        M = M.mT
    m = M.shape[-2]
    if m > 20:
        raise InputError(f"enumeration needs a side of at most 20, got {tuple(M.shape[-2:])}; use sign_norm_up")
    products = Enclosure.exact(sign_vectors(m).to(M.mid.device)) @ M
    return nonnegative_sum_up(products.abs_up(), -1).amax(dim=-1)


def sign_vectors(m: int) -> Float[Tensor, "p m"]:
    """Return all sign vectors of length m up to an overall sign: 2^{m−1} rows that start with +1."""
    codes = torch.arange(2 ** max(m - 1, 0))
    bits = (codes[:, None] >> torch.arange(max(m - 1, 0))) & 1
    ones = torch.ones(len(codes), min(m, 1), dtype=torch.float64)
    return torch.cat([ones, 1.0 - 2.0 * bits.to(torch.float64)], dim=-1)


def best_scalings(
    M: Float[Tensor, "*batch m n"], iterations: int = 60
) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "*batch n"]]:
    """Return nearly optimal D_u^{-½} and D_v^{-½}, from the dual of the semidefinite relaxation.

    The relaxation max Σ_ij M_ij ⟨x_i, y_j⟩ over unit vectors is maximised by alternating updates, x_i ∝ Σ_j M_ij y_j
    and y_j ∝ Σ_i M_ij x_i, in a dimension that is high enough to have no spurious local maxima. At the maximum the
    lengths of these sums are the optimal u and v. The bound holds for any positive scaling, so convergence affects
    only its tightness.
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
    # A zero row would get an infinite scale. The lower limit hardly changes the bound.
    u = u.clamp(min=1e-300).maximum(1e-6 * u.amax(dim=-1, keepdim=True))
    v = v.clamp(min=1e-300).maximum(1e-6 * v.amax(dim=-1, keepdim=True))
    return u.rsqrt(), v.rsqrt()


def sign_norm_up(M: Enclosure | Float[Tensor, "*batch m n"], iterations: int = 60) -> SignBound:
    """Return the smallest of the bounds of this module on ‖M‖_{∞→1}, for all M in the enclosure.

    The bound is taken per matrix of the batch; `method` names the bound that was smallest for most of them.

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
    # Keep the scalings even if another bound is smaller for most matrices: a single matrix may need them.
    least = _least(bounds)
    return SignBound(least.value, least.method, row_scale, column_scale)


def _least(bounds: dict[str, Float[Tensor, "*batch"]]) -> SignBound:
    """Return the smallest bound per matrix. A NaN bound counts as +∞."""
    values = torch.stack([torch.where(b.isnan(), math.inf, b) for b in bounds.values()])
    winner = values.argmin(dim=0).flatten().mode().values if values[0].numel() else torch.tensor(0)
    return SignBound(values.amin(dim=0), list(bounds)[int(winner)])
