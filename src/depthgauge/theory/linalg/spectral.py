"""Verified upper bounds on eigenvalues, spectral norms and Frobenius norms. A floating-point SVD is not a proof."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from depthgauge.theory.linalg.enclosures import Enclosure, as_enclosure
from depthgauge.theory.linalg.rounding import (
    TINY,
    add_up,
    div_up,
    gamma,
    mul_up,
    nonnegative_sum_up,
    sqrt_up,
    sub_down,
    times_power_of_two,
    up,
)


def largest_eigenvalue_up(S: Enclosure | Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Return an upper bound on λ_max(S) for all symmetric matrices S in the enclosure.

    Let V hold the floating-point eigenvectors, B = Vᵀ S V, δ ≥ ‖VᵀV − I‖row and λ = max_i (B_ii + Σ_{j≠i} |B_ij|).
    If δ < 1, then V is invertible and every x is V y for some y. By Gershgorin's theorem,

        xᵀSx / xᵀx = yᵀBy / yᵀVᵀVy ≤ λ/(1 − δ)  if λ ≥ 0,   and  ≤ λ/(1 + δ)  if λ < 0.

    The bound holds for every V with δ < 1; it is tight if V is close to the eigenvectors. If δ ≥ ½ or a number is not
    finite, the largest absolute row sum of S is returned instead.
    """
    S = as_enclosure(S)
    n = S.shape[-1]
    row_sum = nonnegative_sum_up(S.abs_up(), -1).amax(dim=-1)
    finite = S.mid.isfinite().all(dim=-1).all(dim=-1)
    safe = torch.where(finite[..., None, None], S.mid, 0.0)
    eye = torch.eye(n, dtype=torch.float64, device=S.mid.device)
    try:
        V = torch.linalg.eigh(safe / 2 + safe.mT / 2)[1]
    except LinAlgError:  # no convergence: V = I gives the plain Gershgorin bound
        V = eye.expand_as(safe)
    delta = nonnegative_sum_up((Enclosure.exact(V).mT @ V - eye).abs_up(), -1).amax(dim=-1)
    B = Enclosure.exact(V).mT @ S @ V
    off_diagonal = nonnegative_sum_up(B.abs_up() * (1.0 - eye), -1)
    gershgorin = add_up(B.upper().diagonal(dim1=-2, dim2=-1), off_diagonal).amax(dim=-1)
    verified = torch.where(
        gershgorin >= 0, div_up(gershgorin, sub_down(1.0, delta)), div_up(gershgorin, add_up(1.0, delta))
    )
    usable = finite & (delta < 0.5) & verified.isfinite()
    return torch.where(usable, torch.minimum(verified, row_sum), row_sum)


def frobenius_norm_up(M: Enclosure | Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Return an upper bound on ‖M‖F. Entries are scaled by a power of two, so squares do not overflow or underflow."""
    size = as_enclosure(M).abs_up()
    scaled, exponent = _to_unit_scale(size)
    squares = nonnegative_sum_up(mul_up(scaled, scaled), (-2, -1))
    return up(times_power_of_two(sqrt_up(squares), exponent))


def spectral_norm_up(M: Enclosure | Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Return an upper bound on ‖M‖₂ = √λ_max(MᵀM) for all M in the enclosure."""
    M = as_enclosure(M)
    if M.shape[-2] < M.shape[-1]:
        M = M.mT
    scaled, exponent = _to_unit_scale(M.mid)
    # G = fl(MᵀM) satisfies |(G + Gᵀ)/2 − MᵀM| ≤ γ_{m+1} |M|ᵀ|M| up to underflow, hence
    # ‖(G + Gᵀ)/2 − MᵀM‖₂ ≤ γ_{m+1} ‖M‖F² + 4mn·TINY.
    m, n = scaled.shape[-2:]
    size = frobenius_norm_up(scaled)
    lost = add_up(mul_up(gamma(m + 1), mul_up(size, size)), 4.0 * m * n * TINY)
    gram = scaled.mT @ scaled
    square = add_up(largest_eigenvalue_up((gram + gram.mT) / 2).clamp(min=0.0), lost)
    verified = up(times_power_of_two(sqrt_up(square), exponent))
    of_mid = torch.minimum(verified, frobenius_norm_up(M.mid))
    return add_up(of_mid, frobenius_norm_up(M.rad)) if bool((M.rad != 0).any()) else of_mid


def _to_unit_scale(M: Tensor) -> tuple[Tensor, Int64[Tensor, "*batch"]]:
    """Return M · 2^{−k} with largest absolute entry in [½, 1), and k, per matrix; keep zero and non-finite ones."""
    largest = M.abs().amax(dim=(-2, -1))
    k = torch.frexp(torch.where(largest.isfinite(), largest, 1.0))[1].to(torch.int64).clamp(min=-1020, max=1022)
    return times_power_of_two(M, -k[..., None, None]), k
