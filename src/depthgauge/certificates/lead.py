"""The leading term of the error, bounded for all heads and layers at once (docs/math.md §3.3).

To first order in the scores, row i of the error in coordinate a is

    Σ_b x_b ⟨T_a[b], C⟩ + Σ_b m_b ⟨Tᵐ_a[b], C⟩,     m = mean(X),  C = cov(X),

with two tensors that sum over every layer and head *before* anything is bounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.linalg.enclosures import Enclosure
from depthgauge.linalg.rounding import (
    TINY,
    add_up,
    div_up,
    gamma,
    mul_up,
    nonnegative_matmul_up,
    nonnegative_sum_up,
    sqrt_up,
)
from depthgauge.linalg.spectral import spectral_norm_up

STEPS = 40
LEARNING_RATE = 0.2
CHUNK_ENTRIES = 2**22
"""Entries of the tensors that are formed at once (32 MB each)."""


@dataclass(frozen=True)
class Rank1Sum:
    """A tensor T_a[b; c, e] = Σ_r left_r[b, c] · right_r[e, a], symmetrised in (c, e), kept as its factors."""

    left: Enclosure
    right: Enclosure

    @staticmethod
    def join(*parts: "Rank1Sum") -> "Rank1Sum":
        """The sum of several."""
        return Rank1Sum(_stack([p.left for p in parts]), _stack([p.right for p in parts]))

    def heads(self, chosen: Sequence[int]) -> "Rank1Sum":
        """The part of some terms r."""
        return Rank1Sum(self.left.at(chosen), self.right.at(chosen))

    def negated(self) -> "Rank1Sum":
        """Minus the tensor."""
        return Rank1Sum(-self.left, self.right)

    def slices(self, coordinates: Tensor) -> Float[Tensor, "a d d d"]:
        """T_a[b; c, e] for the output coordinates a given, in floating point; `slack` bounds what that loses."""
        r, d, _ = self.left.shape
        A = len(coordinates)
        product = self.left.mid.reshape(r, d * d).mT @ self.right.mid[:, :, coordinates].reshape(r, d * A)
        tensor = product.reshape(d, d, d, A).permute(3, 0, 1, 2)
        return ((tensor + tensor.mT) * 0.5).contiguous()

    def slack(
        self, coordinates: Tensor, left: Float[Tensor, "a d"], right: Float[Tensor, "a d"]
    ) -> Float[Tensor, " a"]:
        """At least the Frobenius distance of the scaled `slices`, as computed, to the scaled tensor itself.

        Every entry of the product, its symmetrisation and the three scalings rounds at most r + 6 times relative to
        Σ_r |left_r||right_r|, and a Frobenius norm of such a sum is at most the sum of products of norms.
        """
        r, d, _ = self.left.shape
        l_size, r_size = self.left.abs_up(), self.right.abs_up()[:, :, coordinates]
        r_rad = self.right.rad[:, :, coordinates]
        rows, columns = mul_up(left, left), mul_up(right, right)
        whole_left, whole_right = _left_norms(l_size, rows, columns), _right_norms(r_size, columns)
        rad_left, rad_right = _left_norms(self.left.rad, rows, columns), _right_norms(r_rad, columns)
        rounding = mul_up(mul_up(gamma(r + 6), whole_left), whole_right)
        enclosing = add_up(mul_up(rad_left, whole_right), mul_up(whole_left, rad_right))
        # A product that underflows loses up to TINY, which the scalings after it may enlarge but never have to.
        most_left, most_right = add_up(1.0, left.amax(-1)), add_up(1.0, right.amax(-1))
        underflow = mul_up(4.0 * (r + 1) * d * d * TINY, mul_up(most_left, mul_up(most_right, most_right)))
        return add_up(nonnegative_sum_up(add_up(rounding, enclosing), -1), underflow)


def _left_norms(
    size: Float[Tensor, "r d d"], rows: Float[Tensor, "a d"], columns: Float[Tensor, "a d"]
) -> Float[Tensor, "a r"]:
    """‖D_left |left_r| D_right‖_F for every a and r, rounded up; `rows` and `columns` are the squared scalings."""
    inner = nonnegative_matmul_up(rows, mul_up(size, size))  # [r, a, c]
    return sqrt_up(nonnegative_sum_up(mul_up(inner, columns), -1)).mT


def _right_norms(size: Float[Tensor, "r d a"], columns: Float[Tensor, "a d"]) -> Float[Tensor, "a r"]:
    """‖D_right |right_r|[:, a]‖₂ for every a and r, rounded up."""
    return sqrt_up(nonnegative_sum_up(mul_up(mul_up(size, size), columns.mT), 1)).mT


def _stack(parts: list[Enclosure]) -> Enclosure:
    return Enclosure(torch.cat([p.mid for p in parts]), torch.cat([p.rad for p in parts]))


@dataclass(frozen=True)
class LeadBound:
    """Upper bounds B_a on the leading term, with the scalings D_u^{-½}, D_w^{-½} that prove them."""

    value: Float[Tensor, " d"]
    row_scale: Float[Tensor, "d d"]
    column_scale: Float[Tensor, "d d"]


def scale_tensor(
    T: Float[Tensor, "a d d d"], left: Float[Tensor, "a d"], right: Float[Tensor, "a d"]
) -> Float[Tensor, "a d d d"]:
    """D_left T_a (D_right ⊗ D_right), in floating point."""
    return T * left[:, :, None, None] * right[:, None, :, None] * right[:, None, None, :]


def scaled_norm(
    tensor: Rank1Sum,
    T: Float[Tensor, "a d d d"],
    coordinates: Tensor,
    left: Float[Tensor, "a d"],
    right: Float[Tensor, "a d"],
) -> Float[Tensor, " a"]:
    """At least ‖D_left T_a (D_right ⊗ D_right)‖₂ with T_a read as a d × d² matrix; `T` holds `tensor`'s slices."""
    return add_up(spectral_norm_up(scale_tensor(T, left, right).flatten(2)), tensor.slack(coordinates, left, right))


def inverse_square_sum(scale: Float[Tensor, "a d"]) -> Float[Tensor, " a"]:
    """Σ 1/scale², rounded up: Σu for scale = D_u^{-½}."""
    return nonnegative_sum_up(div_up(div_up(1.0, scale), scale), -1)


def cubic_maximum(p: Tensor, q: Tensor, radius: float) -> Tensor:
    """At least max over 0 ≤ μ ≤ φ of (p + qμ)(φ² − μ²), for p, q ≥ 0; `radius` is φ.

    The function is concave there, so it lies below its tangent at any μ₀; μ₀ near the maximiser
    (√(p² + 3q²φ²) − p)/(3q) makes the tangent almost flat.
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
    """B_a from the two norms: max_μ (p + qμ)(φ² − μ²)·Σw with p = σφ√Σu, q = σ_m√Σw on the box.

    On the ball the masses Σu and Σw are absent, since lengths of tokens are bounded as they are.
    """
    if kind == "ball":
        return cubic_maximum(mul_up(sigma, radius), sigma_m, radius)
    mass_u, mass_w = inverse_square_sum(row_scale), inverse_square_sum(column_scale)
    p, q = mul_up(mul_up(sigma, radius), sqrt_up(mass_u)), mul_up(sigma_m, sqrt_up(mass_w))
    return mul_up(cubic_maximum(p, q, radius), mass_w)


def lead_bound(T: Rank1Sum, Tm: Rank1Sum, radius: float, kind: str = "box", steps: int = STEPS) -> LeadBound:
    """B_a for every coordinate a; on the box the least of the scaled spectral bound and φ³(Σ|T_a| + Σ|Tᵐ_a|)."""
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
    """At least Σ_bce |T_a[b; c, e]|: what was computed, and d^{3/2} times its Frobenius slack."""
    d = T.shape[-1]
    ones = torch.ones(T.shape[:2], dtype=torch.float64)
    return add_up(
        nonnegative_sum_up(T.abs(), (-3, -2, -1)), mul_up(sqrt_up(float(d**3)), tensor.slack(coordinates, ones, ones))
    )


def optimise_scalings(
    T: Float[Tensor, "a d d d"], Tm: Float[Tensor, "a d d d"], radius: float, steps: int
) -> tuple[Float[Tensor, "a d"], Float[Tensor, "a d"]]:
    """D_u^{-½} and D_w^{-½} near the minimiser of B_a, by Adam on log u, log w with the norms smoothed.

    Any positive scaling is sound, so this is plain floating point.
    """
    A, d = T.shape[:2]
    log_u, log_w = torch.zeros(A, d, dtype=T.dtype), torch.zeros(A, d, dtype=T.dtype)
    # A tensor that weighs little moves the best scaling little; leaving it out of the search saves half the work.
    size, size_m = T.square().sum((-3, -2, -1)).sqrt().amax(), Tm.square().sum((-3, -2, -1)).sqrt().amax()
    use, use_m = bool(size > 0.1 * size_m), bool(size_m > 0.3 * size)
    first, second = torch.zeros(A, 2 * d, dtype=T.dtype), torch.zeros(A, 2 * d, dtype=T.dtype)
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
        gradient = torch.cat([gradient_u, gradient_w], dim=-1)
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        change = (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-12)
        rate = LEARNING_RATE * (1 - step / (steps + 1))
        log_u, log_w = log_u - rate * change[:, :d], log_w - rate * change[:, d:]
    return (-log_u / 2).exp(), (-log_w / 2).exp()


def _smooth_norm(
    T: Float[Tensor, "a d d d"], log_left: Tensor, log_right: Tensor
) -> tuple[Float[Tensor, "a 1"], Float[Tensor, "a d"], Float[Tensor, "a d"]]:
    """(tr G³²)^{1/64} for G the Gram matrix of the scaled tensor, with its derivatives by log left and log right.

    At the optimum many singular values are equal, so the norm itself has no gradient worth following there.
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
