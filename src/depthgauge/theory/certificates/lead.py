"""The leading term of the error, bounded for all heads and layers together (docs/math.md §3.3).

To first order in the scores, coordinate a of row i of the error is

    Σ_b x_b ⟨T_a[b], C⟩ + Σ_b m_b ⟨Tᵐ_a[b], C⟩,     m = mean(X),  C = cov(X).

The tensors T and Tᵐ are summed over all layers and heads before any bound is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.theory.linalg.enclosures import Enclosure, spectral_norm_up
from depthgauge.theory.linalg.rounding import (
    TINY,
    add_up,
    div_up,
    gamma,
    mul_up,
    nonnegative_matmul_up,
    nonnegative_sum_up,
    sqrt_up,
)
from depthgauge.theory.linalg.small_matrices import Adam

STEPS = 40
LEARNING_RATE = 0.2
CHUNK_ENTRIES = 2**22
"""Number of tensor entries that are formed at a time (32 MB)."""


@dataclass(frozen=True, eq=False, repr=False)
class Rank1Sum(ArrayRecord):
    """The tensor T_a[b; c, e] = Σ_r left_r[b, c] · right_r[e, a], symmetrised in (c, e) and stored as its factors."""

    left: Enclosure
    right: Enclosure

    @staticmethod
    def join(*parts: "Rank1Sum") -> "Rank1Sum":
        """Return the sum of several tensors."""
        return Rank1Sum(Enclosure.cat([p.left for p in parts]), Enclosure.cat([p.right for p in parts]))

    def heads(self, chosen: Sequence[int]) -> "Rank1Sum":
        """Return the sum over the chosen terms r only."""
        return Rank1Sum(self.left.at(chosen), self.right.at(chosen))

    def negated(self) -> "Rank1Sum":
        """Return −T."""
        return Rank1Sum(-self.left, self.right)

    @property
    def terms(self) -> int:
        """The number of terms r."""
        return len(self.left.mid)

    def slices(self, coordinates: Tensor) -> Float[Tensor, "a d d d"]:
        """Return T_a[b; c, e] for the given coordinates a, in floating point; `slack` bounds the rounding error."""
        r, d, _ = self.left.shape
        A = len(coordinates)
        product = self.left.mid.reshape(r, d * d).mT @ self.right.mid[:, :, coordinates].reshape(r, d * A)
        tensor = product.reshape(d, d, d, A).permute(3, 0, 1, 2)
        return ((tensor + tensor.mT) * 0.5).contiguous()

    def slack(
        self, coordinates: Tensor, left: Float[Tensor, "a d"], right: Float[Tensor, "a d"]
    ) -> Float[Tensor, " a"]:
        """Bound ‖F_a − D_left T_a (D_right ⊗ D_right)‖_F, where F = `scale_tensor(slices(coordinates), left, right)`.

        Write l, w for the two scalings and |L_r|, |R_r| for bounds on the factors. An entry of F takes at most r + 6
        roundings (r products and sums, one sum of the symmetrisation, three scalings), so without underflow

            |F − T̃|[b, c, e] ≤ γ_{r+6} Σ_r l_b |L_r|[b, c] w_c · w_e |R_r|[e, a]      (symmetrised in c, e),

        and the Frobenius norm of a term is the product ‖D_l |L_r| D_w‖_F · ‖D_w |R_r| e_a‖₂. Replacing a factor by
        another member of its enclosure adds at most rad(L_r)|R_r| + |L_r| rad(R_r), which has norms of the same form.

        Underflow adds at most τ = 2⁻¹⁰⁷⁴ (`TINY`) per multiplication; sums do not underflow. The r products and the
        halving put at most (r + 1)τ into an entry of the slice. The three scalings multiply this error and add τ
        each, so that in all an entry is off by at most

            (((r + 1)τ·l_b + τ)w_c + τ)w_e + τ ≤ (r + 1)τ(1 + l)(1 + w)²,     l = max_b l_b,  w = max_c w_c,

        times (1 + u)⁵ < 2 for the roundings after it. There are d³ entries and √(d³) ≤ d², which makes the Frobenius
        norm of this part at most 2(r + 1)d²τ(1 + l)(1 + w)²; the code uses twice that.
        """
        r, d, _ = self.left.shape
        l_size, r_size = self.left.abs_up(), self.right.abs_up()[:, :, coordinates]
        r_rad = self.right.rad[:, :, coordinates]
        rows, columns = mul_up(left, left), mul_up(right, right)
        whole_left, whole_right = _left_norms(l_size, rows, columns), _right_norms(r_size, columns)
        rad_left, rad_right = _left_norms(self.left.rad, rows, columns), _right_norms(r_rad, columns)
        rounding = mul_up(mul_up(gamma(r + 6), whole_left), whole_right)
        enclosing = add_up(mul_up(rad_left, whole_right), mul_up(whole_left, rad_right))
        most_left, most_right = add_up(1.0, left.amax(-1)), add_up(1.0, right.amax(-1))
        underflow = mul_up(4.0 * (r + 1) * d * d * TINY, mul_up(most_left, mul_up(most_right, most_right)))
        return add_up(nonnegative_sum_up(add_up(rounding, enclosing), -1), underflow)


def _left_norms(
    size: Float[Tensor, "r d d"], rows: Float[Tensor, "a d"], columns: Float[Tensor, "a d"]
) -> Float[Tensor, "a r"]:
    """Bound ‖D_left |left_r| D_right‖_F for every a and r; `rows` and `columns` are the squared scalings."""
    inner = nonnegative_matmul_up(rows, mul_up(size, size))  # [r, a, c]
    return sqrt_up(nonnegative_sum_up(mul_up(inner, columns), -1)).mT


def _right_norms(size: Float[Tensor, "r d a"], columns: Float[Tensor, "a d"]) -> Float[Tensor, "a r"]:
    """Bound ‖D_right |right_r|[:, a]‖₂ for every a and r."""
    return sqrt_up(nonnegative_sum_up(mul_up(mul_up(size, size), columns.mT), 1)).mT


@dataclass(frozen=True, eq=False, repr=False)
class LeadBound(ArrayRecord):
    """Upper bounds B_a on the leading term, with the scalings D_u^{-½} and D_w^{-½} that prove them."""

    value: Float[Tensor, " d"]
    row_scale: Float[Tensor, "d d"]
    column_scale: Float[Tensor, "d d"]


def scale_tensor(
    T: Float[Tensor, "a d d d"], left: Float[Tensor, "a d"], right: Float[Tensor, "a d"]
) -> Float[Tensor, "a d d d"]:
    """Return D_left T_a (D_right ⊗ D_right), in floating point."""
    return T * left[:, :, None, None] * right[:, None, :, None] * right[:, None, None, :]


def scaled_norm(
    tensor: Rank1Sum,
    T: Float[Tensor, "a d d d"],
    coordinates: Tensor,
    left: Float[Tensor, "a d"],
    right: Float[Tensor, "a d"],
) -> Float[Tensor, " a"]:
    """Bound ‖D_left T_a (D_right ⊗ D_right)‖₂, T_a read as a d × d² matrix; `T` is `tensor.slices(coordinates)`.

    ‖T̃‖₂ ≤ ‖F‖₂ + ‖T̃ − F‖_F, where F is the scaled tensor in floating point.
    """
    return add_up(spectral_norm_up(scale_tensor(T, left, right).flatten(2)), tensor.slack(coordinates, left, right))


def inverse_square_sum(scale: Float[Tensor, "a d"]) -> Float[Tensor, " a"]:
    """Bound Σ_i 1/scale_i², which is Σu for scale = D_u^{-½}."""
    return nonnegative_sum_up(div_up(div_up(1.0, scale), scale), -1)


def cubic_maximum(p: Tensor, q: Tensor, radius: float) -> Tensor:
    """Bound max f(μ) = (p + qμ)(φ² − μ²) over 0 ≤ μ ≤ φ, for p, q ≥ 0; `radius` is φ.

    f″ = −2p − 6qμ ≤ 0, so f(μ) ≤ f(μ₀) + |f′(μ₀)|φ for every μ₀ in [0, φ], f′(μ) = q(φ² − μ²) − 2μ(p + qμ).
    The maximiser is μ₀ = (√(p² + 3q²φ²) − p)/(3q) = φ²q/(p + √(p² + 3q²φ²)), computed in floating point.
    """
    guess = radius * radius * q / (p + (p * p + 3.0 * q * q * radius * radius).sqrt())
    mu = guess.nan_to_num(nan=0.0).clamp(0.0, radius)
    P, Q, M, R = Enclosure.exact(p), Enclosure.exact(q), Enclosure.exact(mu), Enclosure.exact(radius)
    level, height = P + Q * M, R * R - M * M
    slope = Q * height - M * level * 2.0
    return add_up((level * height).upper(), mul_up(slope.abs_up(), radius))


def assemble(
    sigma: Float[Tensor, " a"],
    sigma_m: Float[Tensor, " a"],
    row_scale: Float[Tensor, "a d"],
    column_scale: Float[Tensor, "a d"],
    radius: float,
    kind: str,
) -> Float[Tensor, " a"]:
    """Compute B_a = max_μ (p + qμ)(φ² − μ²)·Σw with p = σφ√Σu and q = σ_m√Σw on the box.

    On the ball B_a = max_μ (σr + σ_mμ)(r² − μ²), without scalings.
    """
    if kind == "ball":
        return cubic_maximum(mul_up(sigma, radius), sigma_m, radius)
    mass_u, mass_w = inverse_square_sum(row_scale), inverse_square_sum(column_scale)
    p, q = mul_up(mul_up(sigma, radius), sqrt_up(mass_u)), mul_up(sigma_m, sqrt_up(mass_w))
    return mul_up(cubic_maximum(p, q, radius), mass_w)


def lead_bound(T: Rank1Sum, Tm: Rank1Sum, radius: float, kind: str = "box", steps: int = STEPS) -> LeadBound:
    """Compute B_a for every coordinate a; on the box the smaller of `assemble` and φ³(Σ|T_a| + Σ|Tᵐ_a|)."""
    d = T.left.shape[-1]
    values, rows, columns = [], [], []
    width = max(1, CHUNK_ENTRIES // d**3)
    for start in range(0, d, width):
        coordinates = torch.arange(start, min(start + width, d))
        t, tm = T.slices(coordinates), Tm.slices(coordinates)
        row_scale, column_scale = optimise_scalings(t, tm, radius, steps if kind == "box" else 0)
        sigma = scaled_norm(T, t, coordinates, row_scale, column_scale)
        sigma_m = scaled_norm(Tm, tm, coordinates, column_scale, column_scale)
        value = assemble(sigma, sigma_m, row_scale, column_scale, radius, kind)
        if kind == "box":
            entries = add_up(_entry_sum(T, t, coordinates), _entry_sum(Tm, tm, coordinates))
            value = torch.fmin(value, mul_up(entries, mul_up(mul_up(radius, radius), radius)))
        values.append(value)
        rows.append(row_scale)
        columns.append(column_scale)
    return LeadBound(torch.cat(values), torch.cat(rows), torch.cat(columns))


def _entry_sum(tensor: Rank1Sum, T: Float[Tensor, "a d d d"], coordinates: Tensor) -> Float[Tensor, " a"]:
    """Bound Σ_bce |T_a[b; c, e]| ≤ Σ|F| + d^{3/2}‖T_a − F‖_F (Cauchy–Schwarz), F = `T` the slices as computed."""
    d = T.shape[-1]
    ones = torch.ones(T.shape[:2], dtype=torch.float64)
    return add_up(
        nonnegative_sum_up(T.abs(), (-3, -2, -1)), mul_up(sqrt_up(float(d**3)), tensor.slack(coordinates, ones, ones))
    )


def optimise_scalings(
    T: Float[Tensor, "a d d d"], Tm: Float[Tensor, "a d d d"], radius: float, steps: int
) -> tuple[Float[Tensor, "a d"], Float[Tensor, "a d"]]:
    """Return D_u^{-½} and D_w^{-½} near the minimiser of B_a, by Adam on log u and log w with smoothed norms.

    Every positive scaling gives a sound bound, so this runs in floating point.
    """
    A, d = T.shape[:2]
    log_u, log_w = torch.zeros(A, d, dtype=T.dtype), torch.zeros(A, d, dtype=T.dtype)
    # A tensor of small norm has little effect on the best scaling; leaving it out of the search halves the cost.
    size, size_m = T.square().sum((-3, -2, -1)).sqrt().amax(), Tm.square().sum((-3, -2, -1)).sqrt().amax()
    use, use_m = bool(size > 0.1 * size_m), bool(size_m > 0.3 * size)
    adam = Adam(betas=(0.9, 0.99), epsilon=1e-12)
    for step in range(1, steps + 1):
        u, w = log_u.exp(), log_w.exp()
        mass_u, mass_w = u.sum(-1, keepdim=True), w.sum(-1, keepdim=True)
        norm, du, dw = _smooth_norm(T, log_u, log_w) if use else (torch.zeros(A, 1), 0.0, 0.0)
        norm_m, dl, dr = _smooth_norm(Tm, log_w, log_w) if use_m else (torch.zeros(A, 1), 0.0, 0.0)
        p, q = norm * radius * mass_u.sqrt(), norm_m * mass_w.sqrt()
        mu = (radius**2 * q / (p + (p * p + 3 * q * q * radius**2).sqrt())).nan_to_num(nan=0.0)
        share = (p / (p + q * mu)).nan_to_num(nan=0.0)
        gradient_u = share * (u / mass_u / 2 + du)
        gradient_w = (1 + (1 - share) / 2) * w / mass_w + share * dw + (1 - share) * (dl + dr)
        rate = LEARNING_RATE * (1 - step / (steps + 1))
        log_u, log_w = adam.step([log_u, log_w], [gradient_u, gradient_w], rate)
    return (-log_u / 2).exp(), (-log_w / 2).exp()


def _smooth_norm(
    T: Float[Tensor, "a d d d"], log_left: Tensor, log_right: Tensor
) -> tuple[Float[Tensor, "a 1"], Float[Tensor, "a d"], Float[Tensor, "a d"]]:
    """Return (tr G³²)^{1/64}, G the Gram matrix of the scaled tensor, and its derivatives by log left and log right.

    At the optimum several singular values coincide, where the spectral norm itself is not differentiable.
    """
    S = scale_tensor(T, (-log_left / 2).exp(), (-log_right / 2).exp())
    flat = S.flatten(2)
    G = flat @ flat.mT
    trace = G.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=1e-300)[:, None, None]
    unit = G / trace
    G2 = unit @ unit
    G4 = G2 @ G2
    G8 = G4 @ G4
    G16 = G8 @ G8
    top = (G16 * G16).sum((-2, -1)).clamp(min=1e-300)[:, None, None]
    weight = (G16 @ G8 @ G4 @ G2 @ unit) / top / trace  # G³¹/tr G³², so that tr(weight · G) = 1
    norm = (top[:, :, 0] ** (1 / 32) * trace[:, :, 0]).sqrt()
    gradient_left = -(weight * G).sum(-1) / 2
    spread = (weight @ flat).reshape(S.shape) * S
    gradient_right = -spread.sum((1, 3))
    return norm, gradient_left, gradient_right
