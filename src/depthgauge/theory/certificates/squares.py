"""A smaller norm for the leading term, by sums of squares (docs/math.md §3.5).

For covariances C ⪰ 0 the convex function Σ_b ⟨T_b, C⟩² on {tr C = 1} attains its maximum at some C = zzᵀ with |z| = 1.
For Y = zzᵀ, ⟨T_b, Y⟩² = tr(T_b Y T_b Y) and (tr Y)² = ‖Y‖_F². Hence, for all real α and ν,

    max_z Σ_b (zᵀT_b z)² ≤ λ_max over symmetric Y with ‖Y‖_F = 1 of
        α Σ_b ⟨T_b, Y⟩² + (1 − α) Σ_b tr(T_b Y T_b Y) − ν((tr Y)² − ‖Y‖_F²).
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.theory.certificates.compared_networks import InputSet
from depthgauge.theory.certificates.lead import LeadBound, Rank1Sum, assemble, scale_tensor, scaled_norm
from depthgauge.theory.linalg.enclosures import frobenius_norm_up, largest_eigenvalue_up
from depthgauge.theory.linalg.rounding import TINY, add_up, gamma, mul_up, sqrt_up
from depthgauge.theory.linalg.small_matrices import Adam

STEPS = 30


@dataclass(frozen=True, eq=False, repr=False)
class Multipliers(ArrayRecord):
    """α and ν of the sum of squares, and the scalings D_u^{-½} and D_w^{-½} of the tensor to which it is applied.

    `relative_nu` is ν divided by the squared Frobenius norm of the scaled tensor; it initialises the search for other
    coordinates.
    """

    alpha: float
    nu: float
    relative_nu: float
    row_scale: Float[Tensor, " d"]
    column_scale: Float[Tensor, " d"]


def symmetric_pairs(d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices j ≤ k of an orthonormal basis of symmetric matrices, and its weights: √2 for j < k, else 1."""
    j, k = torch.triu_indices(d, d)
    # torch.where of two Python numbers would give float32, whose √2 has a relative error of 2⁻²⁶.
    weight = torch.full((len(j),), math.sqrt(2.0), dtype=torch.float64)
    return j, k, weight.masked_fill(j == k, 1.0)


def quadratic_form(T: Float[Tensor, "d d d"], alpha: Tensor | float, nu: Tensor | float) -> Float[Tensor, "p p"]:
    """Return the matrix of the quadratic form above in the orthonormal basis of symmetric matrices, p = d(d + 1)/2."""
    d = T.shape[-1]
    j, k, weight = symmetric_pairs(d)
    S = T[:, j, k] * weight
    flat = T.reshape(d, d * d)
    # K[j,i,k,l] = Σ_b T_b[j,i] T_b[k,l], and tr(T Y T Y) = Σ Y_jk Y_il T_ji T_kl, symmetrised in (j, k).
    K = (flat.mT @ flat).reshape(d, d, d, d)
    j1, k1, i1, l1 = j[:, None], k[:, None], j[None, :], k[None, :]
    crossed = (K[j1, i1, k1, l1] + K[k1, i1, j1, l1]) / 2 * (weight[:, None] * weight[None, :])
    diagonal = (j == k).to(T.dtype)
    trace = diagonal[:, None] * diagonal[None, :] - torch.eye(len(j), dtype=T.dtype)
    return alpha * (S.mT @ S) + (1 - alpha) * crossed - nu * trace


def squared_norm_up(T: Float[Tensor, "d d d"], alpha: float, nu: float) -> Tensor:
    """Bound max_z √(Σ_b (zᵀT_b z)²) over unit z, for a tensor T of float64 numbers.

    Write F = αA + (1 − α)B − νC for the form, with A = SᵀS, B the crossed part and C the trace part. An entry takes at
    most d + 9 roundings relative to the same sum of absolute values. In the Frobenius norm ‖|S|ᵀ|S|‖ ≤ ‖T‖_F², the
    absolute crossed part is at most ‖T‖_F², and ‖C‖ ≤ p + d. So without underflow

        ‖F_computed − F‖_F ≤ γ_{d+16} ( (|α| + |1 − α|)‖T‖_F² + |ν|(p + d) ).

    Underflow adds at most τ = `TINY` per multiplication: dτ in an entry of A, (2d + 3)τ in one of B (with the factor
    √2·√2), and τ for each of the products with α, 1 − α and ν and for the halving in (F + Fᵀ)/2. An entry of F is off
    by at most (1 + |α| + |1 − α|)(2d + 4)τ, and the p × p matrix by p times that. An entry of S off by τ changes A by
    at most 2τΣ_b|S_b|, which is below 2τ or below γ_{d+16}‖T‖_F². The code takes twice
    γ_{d+16}(2(|α| + |1 − α|)‖T‖_F² + |ν|(p + d)) + (1 + |α| + |1 − α|)p(d + 8)τ, which exceeds the sum of all of these.
    """
    d = T.shape[-1]
    form = quadratic_form(T, alpha, nu)
    size = frobenius_norm_up(T.flatten(1))
    lost = mul_up(2.0 * (abs(alpha) + abs(1.0 - alpha)) * (1 + 2**-40), mul_up(size, size))
    lost = mul_up(gamma(d + 16), add_up(lost, abs(nu) * (len(form) + d) * (1 + 2**-40)))
    lost = add_up(lost, mul_up((1.0 + abs(alpha) + abs(1.0 - alpha)) * len(form) * (d + 8), TINY))
    return sqrt_up(add_up(largest_eigenvalue_up((form + form.mT) / 2), mul_up(2.0, lost)).clamp(min=0.0))


def sharpen(
    T: Rank1Sum, Tm: Rank1Sum, a: int, inputs: InputSet, lead: LeadBound, start: Multipliers | None
) -> tuple[Tensor, Multipliers]:
    """Compute B_a with the sum of squares in place of ‖T_a‖₂; return it with the multipliers that prove it.

    The search starts from the scalings of `lead`, and from the α and ν of another coordinate if `start` is given, else
    from typical values; ν is relative to the tensor's squared norm.
    """
    coordinate = torch.tensor([a])
    t, tm = T.slices(coordinate), Tm.slices(coordinate)
    scales = lead.row_scale[a], lead.column_scale[a]
    size = float(scale_tensor(t, scales[0][None], scales[1][None]).square().sum())
    alpha, relative = (0.15, 0.07 / t.shape[-1]) if start is None else (start.alpha, start.relative_nu)
    begin = Multipliers(alpha, relative * size, relative, *scales)
    used = optimise_multipliers(t[0], begin, STEPS, scalings=inputs.kind == "box")
    rows, columns = used.row_scale[None], used.column_scale[None]
    scaled = scale_tensor(t, rows, columns)[0]
    sigma = add_up(squared_norm_up(scaled, used.alpha, used.nu)[None], T.slack(coordinate, rows, columns))
    sigma_m = scaled_norm(Tm, tm, coordinate, columns, columns)
    return assemble(sigma, sigma_m, rows, columns, inputs.radius, inputs.kind)[0], used


def optimise_multipliers(
    T: Float[Tensor, "d d d"], start: Multipliers, steps: int, *, scalings: bool, rate: float = 0.05
) -> Multipliers:
    """Minimise √λ·√Σu·Σw over α, ν and, with `scalings`, u and w; all values are sound.

    Adam runs on a smoothed largest eigenvalue. At the optimum the largest eigenvalue is multiple, where it is not
    differentiable.
    """
    size = float(scale_tensor(T[None], start.row_scale[None], start.column_scale[None]).square().sum())
    if size == 0.0:
        return start
    d = T.shape[-1]
    best, best_value = start, math.inf
    alpha = torch.tensor(start.alpha, dtype=torch.float64)
    nu = torch.tensor(start.relative_nu * d, dtype=torch.float64)
    values = [alpha, nu, -2 * start.row_scale.log(), -2 * start.column_scale.log()]
    adam = Adam(betas=(0.9, 0.99))
    for step in range(steps + 1):
        with torch.enable_grad():
            moved = [value.detach().requires_grad_(True) for value in (values if scalings else values[:2])]
            alpha, nu, log_u, log_w = moved if scalings else [*moved, *values[2:]]
            row_scale, column_scale = (-log_u / 2).exp(), (-log_w / 2).exp()
            S = scale_tensor(T[None], row_scale[None], column_scale[None])[0]
            eigenvalues = torch.linalg.eigvalsh(quadratic_form(S, alpha, nu * (size / d)))
            top = eigenvalues[-1].detach().clamp(min=1e-300)
            smooth = torch.logsumexp(eigenvalues / top * 100.0, 0) / 100.0 * top
            masses = log_u.exp().sum().log() / 2 + log_w.exp().sum().log() if scalings else log_u.sum() * 0.0
            gradients = torch.autograd.grad(smooth.log() / 2 + masses, moved)
        value = float((top.log() / 2 + masses).detach())
        if value < best_value:
            relative = float(nu.detach()) / d
            scales = row_scale.detach().clone(), column_scale.detach().clone()
            best, best_value = Multipliers(float(alpha.detach()), relative * size, relative, *scales), value
        values[: len(moved)] = adam.step([x.detach() for x in moved], gradients, rate * (1 - step / (steps + 1)))
    return best
