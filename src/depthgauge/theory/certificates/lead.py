"""The leading term of the error, bounded for all heads and layers together (docs/math.md §3.3).

To first order in the scores, coordinate a of row i of the error is

    Σ_b x_b ⟨T_a[b], C⟩ + Σ_b m_b ⟨Tᵐ_a[b], C⟩,     m = mean(X),  C = cov(X).

The tensors T and Tᵐ are summed over all layers and heads before any bound is taken. This is the bound on a box and on a
ball; `pair_lead` has that on a finite set of points.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.squares import STEPS as SQUARE_STEPS
from depthgauge.theory.certificates.squares import Multipliers, optimise_multipliers, scale_tensor, squared_form
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed, Upper, total
from depthgauge.theory.linalg.small_matrices import Adam

STEPS = 40
LEARNING_RATE = 0.2
CHUNK_ENTRIES = 2**22
"""Number of tensor entries that are formed at a time (32 MB)."""


class Rank1Sum:
    """The tensor T_a[b; c, e] = Σ_r left_r[b, c] · right_r[e, a], symmetrised in (c, e) and stored as its factors."""

    def __init__(self, A: BoundArithmetic, left: Enclosed, right: Enclosed) -> None:
        self.A, self.left, self.right = A, left, right

    @staticmethod
    def join(A: BoundArithmetic, width: int, parts: "Iterable[Rank1Sum]") -> "Rank1Sum":
        """Return the sum of several tensors, which may be none; `width` is d."""
        none = A.exact(torch.zeros(0, width, width, dtype=torch.float64))
        found = [part for part in parts if part.terms]
        if not found:
            return Rank1Sum(A, none, none)
        return Rank1Sum(A, A.cat([part.left for part in found]), A.cat([part.right for part in found]))

    def heads(self, chosen: Sequence[int]) -> "Rank1Sum":
        """Return the sum over the chosen terms r only."""
        return Rank1Sum(self.A, self.left[list(chosen)], self.right[list(chosen)])

    def negated(self) -> "Rank1Sum":
        """Return −T."""
        return Rank1Sum(self.A, -self.left, self.right)

    def read(self, readout: Enclosed | None) -> "Rank1Sum":
        """Return the tensor for the output times R with a readout R."""
        return self if readout is None else Rank1Sum(self.A, self.left, self.right @ readout)

    @property
    def terms(self) -> int:
        """The number of terms r."""
        return self.left.shape[0]

    def slices(self, coordinates: Tensor) -> Float[Tensor, "a d d d"]:
        """Return T_a[b; c, e] for the given coordinates a, approximately."""
        r, d, _ = self.left.shape
        A = len(coordinates)
        right = self.right.floats()[:, :, coordinates]
        product = self.left.floats().reshape(r, d * d).mT @ right.reshape(r, right.shape[1] * A)
        tensor = product.reshape(d, d, d, A).permute(3, 0, 1, 2)
        return ((tensor + tensor.mT) * 0.5).contiguous()

    def at(self, coordinates: Tensor, left: Tensor | None = None, right: Tensor | None = None) -> Enclosed:
        """Return D_left T_a (D_right ⊗ D_right), [a, d, d, d], for the coordinates a, or T_a without scalings.

        Args:
            coordinates: the a.
            left: the diagonal of D_left for each of them, [a, d].
            right: the diagonal of D_right for each of them, [a, d].
        """
        r, d, _ = self.left.shape
        factor, other = self.left.permute(1, 2, 0), self.right[:, :, coordinates].permute(2, 0, 1)
        if left is None or right is None:
            made = self.left.reshape(r, d * d).mT @ other.permute(1, 2, 0).reshape(r, d * len(coordinates))
            made = made.reshape(d, d, d, len(coordinates)).permute(3, 0, 1, 2)
        else:
            first = factor[None] * left[:, :, None, None] * right[:, None, :, None]
            made = first.reshape(len(coordinates), d * d, r) @ (other * right[:, None, :])
            made = made.reshape(len(coordinates), d, d, d)
        return (made + made.mT) * 0.5


@runtime_checkable
class Lead(Protocol):
    """A bound on a leading term: `value` per coordinate, and `sharper` for one of them where `can_sharpen`.

    With `is_slow`, a coordinate is sharpened only where the bound can become the smallest one.
    """

    value: Upper
    can_sharpen: bool
    is_slow: bool

    def sharper(self, a: int) -> Upper:
        """Return a smaller bound for coordinate a."""


def sharpened(
    A: BoundArithmetic, plain: Upper, beyond: Upper, leads: Sequence[Lead], enough: Tensor | None = None
) -> tuple[Upper, set[int]]:
    """Return the joint bound, the sum of the leads and of what is beyond them, and the coordinates made sharper.

    A coordinate is sharpened where the bound is the largest of all, until that is sharp, or until a bound cannot become
    smaller than `enough`, from which on it is of no use.
    """
    joint, done = total(beyond, *(lead.value for lead in leads)), set[int]()
    able = bool(leads) and all(lead.can_sharpen for lead in leads)

    def worst() -> int | None:
        joint_, plain_ = joint.floats(), plain.floats()
        if enough is not None:
            least = beyond.floats().clone()
            least[list(done)] = joint_[list(done)]
            if bool((torch.fmin(least, plain_) >= enough).any()):
                return None
        a = int(torch.fmin(joint_, plain_).argmax())
        too_slow = bool(plain_[a] <= joint_[a]) and any(lead.is_slow for lead in leads)
        return None if a in done or too_slow or not bool(joint_[a].isfinite()) else a

    while able and (a := A.choose("a coordinate to sharpen", worst)) is not None:
        found = joint[a].least(total(beyond[a], *(lead.sharper(a) for lead in leads)))
        joint = A.cat([joint[:a], found.reshape(1), joint[a + 1 :]])
        done.add(a)
    return joint, done


def cubic_maximum(A: BoundArithmetic, p: Upper, q: Upper, radius: float) -> Upper:
    """Bound max f(μ) = (p + qμ)(φ² − μ²) over 0 ≤ μ ≤ φ, for p, q ≥ 0; `radius` is φ.

    f″ = −2p − 6qμ ≤ 0, so f(μ) ≤ f(μ₀) + |f′(μ₀)|φ for every μ₀ in [0, φ], f′(μ) = q(φ² − μ²) − 2μ(p + qμ).
    The maximiser is μ₀ = (√(p² + 3q²φ²) − p)/(3q) = φ²q/(p + √(p² + 3q²φ²)), computed in floating point.
    """

    def maximiser() -> Tensor:
        p_, q_ = p.floats(), q.floats()
        guess = radius * radius * q_ / (p_ + (p_ * p_ + 3.0 * q_ * q_ * radius * radius).sqrt())
        return guess.nan_to_num(nan=0.0).clamp(0.0, radius)

    P, Q, mu, R = A.interval(p), A.interval(q), A.exact(A.choose("a point", maximiser)), A.exact(radius)
    level, height = P + Q * mu, R * R - mu * mu
    slope = Q * height - mu * level * 2.0
    return (level * height).top() + slope.size() * radius


class ConvexLead:
    """Bounds B_a on the leading term for every coordinate a, on a box or a ball.

    With p = σφ√Σu and q = σ_m√Σw on the box, where σ and σ_m are the norms of the scaled tensors, B_a is the smaller
    one of max_μ (p + qμ)(φ² − μ²)·Σw and φ³(Σ|T_a| + Σ|Tᵐ_a|). On the ball it is max_μ (σr + σ_mμ)(r² − μ²), without
    scalings. All scalings u, w > 0 are sound.
    """

    is_slow = True

    def __init__(self, A: BoundArithmetic, T: Rank1Sum, Tm: Rank1Sum, radius: float, kind: str, steps: int) -> None:
        self.A, self.T, self.Tm, self.radius, self.is_box = A, T, Tm, radius, kind == "box"
        self.can_sharpen = bool(T.terms)
        self._start: Multipliers | None = None
        d = T.left.shape[-1]
        values, self.scales = [], []
        width = max(1, CHUNK_ENTRIES // d**3)
        for start in range(0, d, width):
            coordinates = torch.arange(start, min(start + width, d))
            rows, columns = A.choose("scalings of a lead", lambda c=coordinates: self._scalings(c, steps))  # type: ignore[misc]
            require_scalings(rows, columns, (len(coordinates), d))
            sigma, sigma_m = (
                A.spectral_norm(tensor.at(coordinates, side, columns).reshape(-1, d, d * d))
                for tensor, side in ((T, rows), (Tm, columns))
            )
            value = self._assemble(sigma, sigma_m, rows, columns)
            if self.is_box:
                entries = T.at(coordinates).size().sum((-3, -2, -1)) + Tm.at(coordinates).size().sum((-3, -2, -1))
                value = value.least(entries * radius * radius * radius)
            values.append(value)
            self.scales += [(rows[i], columns[i]) for i in range(len(coordinates))]
        self.value: Upper = A.cat(values)

    def _scalings(self, coordinates: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return D_u^{-½} and D_w^{-½} for some coordinates."""
        t, tm = self.T.slices(coordinates), self.Tm.slices(coordinates)
        return optimise_scalings(t, tm, self.radius, steps if self.is_box else 0)

    def _assemble(self, sigma: Upper, sigma_m: Upper, rows: Tensor, columns: Tensor) -> Upper:
        if not self.is_box:
            return cubic_maximum(self.A, sigma * self.radius, sigma_m, self.radius)
        mass_u, mass_w = ((self.A.upper(1.0) / scale / scale).sum(-1) for scale in (rows, columns))
        p, q = sigma * self.radius * mass_u.sqrt(), sigma_m * mass_w.sqrt()
        return cubic_maximum(self.A, p, q, self.radius) * mass_w

    def sharper(self, a: int) -> Upper:
        """Return B_a with the sum of squares in place of ‖T_a‖₂ (docs/math.md §3.5).

        The search for α and ν starts from those of the coordinate before, or from typical values.
        """
        d, coordinate, scales = self.T.left.shape[-1], torch.tensor([a]), self.scales[a]

        def multipliers() -> Multipliers:
            t = self.T.slices(coordinate)
            size = float(scale_tensor(t, scales[0][None], scales[1][None]).square().sum())
            alpha, relative = (0.15, 0.07 / d) if self._start is None else self._start[:2]
            start = Multipliers(alpha, relative, relative * size, *scales)
            self._start = optimise_multipliers(t[0], start, SQUARE_STEPS, scalings=self.is_box)
            return self._start

        used = self.A.choose("multipliers", multipliers)
        rows, columns = used.row_scale[None], used.column_scale[None]
        require_scalings(rows, columns, (1, d))
        form = squared_form(self.A, self.T.at(coordinate, rows, columns)[0], used.alpha, used.nu)
        sigma = self.A.largest_eigenvalue(form[None]).sqrt()
        sigma_m = self.A.spectral_norm(self.Tm.at(coordinate, columns, columns).reshape(1, d, d * d))
        return self._assemble(sigma, sigma_m, rows, columns)[0]


def require_scalings(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> None:
    """Raise VerificationError unless recorded scalings have a number for every row and column."""
    if not rows.shape == columns.shape == shape:
        raise VerificationError(f"the recorded scalings do not have the shape {list(shape)}")


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
