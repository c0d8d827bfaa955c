"""A smaller norm for the leading term, by sums of squares (docs/math.md §3.5).

For covariances C ⪰ 0 the convex function Σ_b ⟨T_b, C⟩² on {tr C = 1} attains its maximum at some C = zzᵀ with |z| = 1.
For Y = zzᵀ, ⟨T_b, Y⟩² = tr(T_b Y T_b Y) and (tr Y)² = ‖Y‖_F². Hence, for all real α and ν,

    max_z Σ_b (zᵀT_b z)² ≤ λ_max over symmetric Y with ‖Y‖_F = 1 of
        α Σ_b ⟨T_b, Y⟩² + (1 − α) Σ_b tr(T_b Y T_b Y) − ν((tr Y)² − ‖Y‖_F²).
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed
from depthgauge.theory.linalg.small_matrices import Adam

STEPS = 30


class Multipliers(NamedTuple):
    """α and ν of the sum of squares, and the scalings D_u^{-½} and D_w^{-½} of the tensor to which it is applied.

    `relative_nu` is ν divided by the squared Frobenius norm of the scaled tensor; it initialises the search for other
    coordinates.
    """

    alpha: float
    relative_nu: float
    nu: float
    row_scale: Float[Tensor, " d"]
    column_scale: Float[Tensor, " d"]


def scale_tensor(
    T: Float[Tensor, "a d d d"], left: Float[Tensor, "a d"], right: Float[Tensor, "a d"]
) -> Float[Tensor, "a d d d"]:
    """Return D_left T_a (D_right ⊗ D_right), in floating point."""
    return T * left[:, :, None, None] * right[:, None, :, None] * right[:, None, None, :]


def quadratic_form(T: Any, alpha: Tensor | float, nu: Tensor | float, root: Any) -> Any:
    """Return the matrix of the quadratic form above in an orthonormal basis of symmetric matrices, p = d(d + 1)/2.

    Args:
        T: The tensor, [d, d, d], symmetric in its last two axes; a torch tensor or an interval array.
        alpha: α.
        nu: ν.
        root: √2, in the arithmetic of T.
    """
    d = T.shape[-1]
    j, k = torch.triu_indices(d, d)
    diagonal = (j == k).to(torch.float64)
    weight = root * (1.0 - diagonal) + diagonal  # √2 for j < k, else 1
    S = T[:, j, k] * weight
    flat = T.reshape(d, d * d)
    # K[j,i,k,l] = Σ_b T_b[j,i] T_b[k,l], and tr(T Y T Y) = Σ Y_jk Y_il T_ji T_kl, symmetrised in (j, k).
    K = (flat.mT @ flat).reshape(d, d, d, d)
    j1, k1, i1, l1 = j[:, None], k[:, None], j[None, :], k[None, :]
    crossed = (K[j1, i1, k1, l1] + K[k1, i1, j1, l1]) * (weight[:, None] * weight[None, :]) * 0.5
    trace = diagonal[:, None] * diagonal[None, :] - torch.eye(len(j), dtype=torch.float64)
    return (S.mT @ S) * alpha + crossed * (1 - alpha) - trace * nu


def squared_form(A: BoundArithmetic, T: Enclosed, alpha: float, nu: float) -> Enclosed:
    """Return the form, whose largest eigenvalue bounds max_z Σ_b (zᵀT_b z)² over unit z.

    1 − α is rounded, so α is first replaced by the number for which it is exact.
    """
    exact = 1.0 - (1.0 - alpha)
    form: Enclosed = quadratic_form(T, exact, nu, A.root(2.0))
    return form


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
            eigenvalues = torch.linalg.eigvalsh(quadratic_form(S, alpha, nu * (size / d), math.sqrt(2.0)))
            top = eigenvalues[-1].detach().clamp(min=1e-300)
            smooth = torch.logsumexp(eigenvalues / top * 100.0, 0) / 100.0 * top
            masses = log_u.exp().sum().log() / 2 + log_w.exp().sum().log() if scalings else log_u.sum() * 0.0
            gradients = torch.autograd.grad(smooth.log() / 2 + masses, moved)
        value = float((top.log() / 2 + masses).detach())
        if value < best_value:
            relative = float(nu.detach()) / d
            scales = row_scale.detach().clone(), column_scale.detach().clone()
            best, best_value = Multipliers(float(alpha.detach()), relative, relative * size, *scales), value
        values[: len(moved)] = adam.step([x.detach() for x in moved], gradients, rate * (1 - step / (steps + 1)))
    return best
