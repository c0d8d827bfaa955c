"""A sharper norm for the leading term, by sums of squares (docs/math.md §3.5).

For covariances C ⪰ 0 the convex function Σ_b ⟨T_b, C⟩² on {tr C = 1} is largest at some C = zzᵀ, |z| = 1. There
⟨T_b, Y⟩² = tr(T_b Y T_b Y) and (tr Y)² = ‖Y‖_F² for Y = zzᵀ, so with any real α, ν

    max_z Σ_b (zᵀT_b z)² ≤ λ_max over symmetric Y, ‖Y‖_F = 1, of
        α Σ_b ⟨T_b, Y⟩² + (1 − α) Σ_b tr(T_b Y T_b Y) − ν((tr Y)² − ‖Y‖_F²).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.certificates.lead import LeadBound, Rank1Sum, assemble, scale_tensor, scaled_norm
from depthgauge.linalg.rounding import TINY, add_up, gamma, mul_up, sqrt_up
from depthgauge.linalg.spectral import frobenius_norm_up, largest_eigenvalue_up

STEPS = 30


@dataclass(frozen=True)
class Multipliers:
    """α and ν of the sum of squares, and the scalings D_u^{-½}, D_w^{-½} of the tensor it is applied to.

    `relative_nu` is ν in units of the tensor's squared size, for other tensors to begin from.
    """

    alpha: float
    nu: float
    relative_nu: float
    row_scale: Float[Tensor, " d"]
    column_scale: Float[Tensor, " d"]


def symmetric_pairs(d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices j ≤ k of an orthonormal basis of symmetric matrices, and √2 where j < k (1 where j = k)."""
    j, k = torch.triu_indices(d, d)
    # In float64 from the start: torch.where of two Python numbers is a float32, and its √2 is off by 2⁻²⁶.
    weight = torch.full((len(j),), math.sqrt(2.0), dtype=torch.float64)
    return j, k, weight.masked_fill(j == k, 1.0)


def quadratic_form(T: Float[Tensor, "d d d"], alpha: Tensor | float, nu: Tensor | float) -> Float[Tensor, "p p"]:
    """The matrix of the quadratic form above in the orthonormal basis of symmetric matrices."""
    d = T.shape[-1]
    j, k, weight = symmetric_pairs(d)
    S = T[:, j, k] * weight
    flat = T.reshape(d, d * d)
    # K[j,i,k,l] = Σ_b T_b[j,i] T_b[k,l]; tr(T Y T Y) = Σ Y_jk Y_il T_ji T_kl, symmetrised in (j, k).
    K = (flat.mT @ flat).reshape(d, d, d, d)
    j1, k1, i1, l1 = j[:, None], k[:, None], j[None, :], k[None, :]
    crossed = (K[j1, i1, k1, l1] + K[k1, i1, j1, l1]) / 2 * (weight[:, None] * weight[None, :])
    diagonal = (j == k).to(T.dtype)
    trace = diagonal[:, None] * diagonal[None, :] - torch.eye(len(j), dtype=T.dtype)
    return alpha * (S.mT @ S) + (1 - alpha) * crossed - nu * trace


def squared_norm_up(T: Float[Tensor, "d d d"], alpha: float, nu: float) -> Tensor:
    """At least max_z √(Σ_b (zᵀT_b z)²) over unit z, for the tensor of floating-point numbers given.

    The form as computed is off by at most γ_{d+16}(2(|α| + |1 − α|)‖T‖F² + |ν|(p + d)) in norm, and p(d + 8) times
    what an underflow loses.
    """
    d = T.shape[-1]
    form = quadratic_form(T, alpha, nu)
    size = frobenius_norm_up(T.flatten(1))
    lost = mul_up(2.0 * (abs(alpha) + abs(1.0 - alpha)) * (1 + 2**-40), mul_up(size, size))
    lost = mul_up(gamma(d + 16), add_up(lost, abs(nu) * (len(form) + d) * (1 + 2**-40)))
    lost = add_up(lost, mul_up((1.0 + abs(alpha) + abs(1.0 - alpha)) * len(form) * (d + 8), TINY))
    return sqrt_up(add_up(largest_eigenvalue_up((form + form.mT) / 2), mul_up(2.0, lost)).clamp(min=0.0))


def sharpen(
    T: Rank1Sum, Tm: Rank1Sum, a: int, radius: float, kind: str, lead: LeadBound, start: Multipliers | None
) -> tuple[Tensor, Multipliers]:
    """B_a with the sum of squares in place of the norm of T_a, and what proves it.

    The search begins at the scalings of `lead` and the α, ν of another coordinate where one is given as `start`.
    """
    coordinate = torch.tensor([a])
    t, tm = T.slices(coordinate), Tm.slices(coordinate)
    begin = _begin(t[0], lead.row_scale[a], lead.column_scale[a], start)
    used = optimise_multipliers(t[0], begin, STEPS, scalings=kind == "box")
    rows, columns = used.row_scale[None], used.column_scale[None]
    scaled = scale_tensor(t, rows, columns)[0]
    sigma = add_up(squared_norm_up(scaled, used.alpha, used.nu)[None], T.slack(coordinate, rows, columns))
    sigma_m = scaled_norm(Tm, tm, coordinate, columns, columns)
    return assemble(sigma, sigma_m, rows, columns, radius, kind)[0], used


def _begin(
    T: Float[Tensor, "d d d"], row_scale: Tensor, column_scale: Tensor, start: Multipliers | None
) -> Multipliers:
    """α and ν to begin from: another coordinate's, or what is typical, in units of the tensor's squared size."""
    size = float(scale_tensor(T[None], row_scale[None], column_scale[None]).square().sum())
    alpha, relative = (0.15, 0.07 / T.shape[-1]) if start is None else (start.alpha, start.relative_nu)
    return Multipliers(alpha, relative * size, relative, row_scale, column_scale)


def optimise_multipliers(
    T: Float[Tensor, "d d d"], start: Multipliers, steps: int, *, scalings: bool, rate: float = 0.05
) -> Multipliers:
    """α, ν and, with `scalings`, u and w near the minimiser of √λ·√Σu·Σw; any are sound.

    Adam on a smoothed largest eigenvalue: at the optimum it is multiple, and has no gradient of its own.
    """
    size = float(scale_tensor(T[None], start.row_scale[None], start.column_scale[None]).square().sum())
    if size == 0.0:
        return start
    best, best_value = start, math.inf
    with torch.enable_grad():
        alpha = torch.tensor(start.alpha, dtype=torch.float64, requires_grad=True)
        nu = torch.tensor(start.relative_nu * T.shape[-1], dtype=torch.float64, requires_grad=True)
        log_u = (-2 * start.row_scale.log()).requires_grad_(scalings)
        log_w = (-2 * start.column_scale.log()).requires_grad_(scalings)
        moved = [alpha, nu, log_u, log_w] if scalings else [alpha, nu]
        optimiser = torch.optim.Adam(moved, lr=rate, betas=(0.9, 0.99))
        for step in range(steps + 1):
            row_scale, column_scale = (-log_u / 2).exp(), (-log_w / 2).exp()
            S = scale_tensor(T[None], row_scale[None], column_scale[None])[0]
            eigenvalues = torch.linalg.eigvalsh(quadratic_form(S, alpha, nu * (size / T.shape[-1])))
            top = eigenvalues[-1].detach().clamp(min=1e-300)
            smooth = torch.logsumexp(eigenvalues / top * 100.0, 0) / 100.0 * top
            masses = log_u.exp().sum().log() / 2 + log_w.exp().sum().log() if scalings else log_u.sum() * 0.0
            value = float((top.log() / 2 + masses).detach())
            if value < best_value:
                relative = float(nu.detach()) / T.shape[-1]
                scales = row_scale.detach().clone(), column_scale.detach().clone()
                best, best_value = Multipliers(float(alpha.detach()), relative * size, relative, *scales), value
            optimiser.param_groups[0]["lr"] = rate * (1 - step / (steps + 1))
            optimiser.zero_grad()
            (smooth.log() / 2 + masses).backward()
            optimiser.step()
    return best
