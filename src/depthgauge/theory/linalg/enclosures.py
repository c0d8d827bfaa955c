"""Enclosures of matrices, and verified upper bounds on their norms.

An enclosure is a midpoint–radius matrix, for results of either sign that pass through several operations. The bounds on
eigenvalues and spectral norms are verified: a floating-point SVD is not a proof.

The sign norm is ‖M‖_{∞→1} = max xᵀMy over sign vectors x, y. Computing it is NP-hard. `sign_norm_up` takes the smallest
of three upper bounds, all with outward rounding:

- Σ_ij |M_ij|, which is the exact value if all entries have one sign;
- for any u, v > 0,  xᵀMy ≤ σ_max(D_u^{-½} M D_v^{-½}) · √(Σu · Σv), because |D_u^{½} x|² = Σu and |D_v^{½} y|² = Σv;
  u = v = 1 gives √(mn)·σ_max, and the best u, v give the value of the semidefinite relaxation, which is at most
  1.783 times the norm (Grothendieck's inequality);
- if the shorter side is at most `ENUMERATED`, the maximum over all its sign vectors, which is the exact value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.theory.linalg.rounding import (
    TINY,
    UNIT,
    add_down,
    add_up,
    as_float64,
    div_up,
    down,
    gamma,
    mul_up,
    no_bound,
    nonnegative_matmul_up,
    nonnegative_sum_up,
    raised,
    sqrt_up,
    sub_down,
    tanh_up,
    times_power_of_two,
    up,
)


class OutwardUpper:
    """Upper bounds in float64; every operation rounds up."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @staticmethod
    def cat(parts: "Sequence[OutwardUpper]", dim: int = 0) -> "OutwardUpper":
        """Concatenate bounds."""
        return OutwardUpper(torch.cat([part.value for part in parts], dim))

    @property
    def shape(self) -> torch.Size:
        """The shape of the array."""
        return self.value.shape

    def __getitem__(self, index: Any) -> "OutwardUpper":
        return OutwardUpper(self.value[index])

    def __add__(self, other: Any) -> "OutwardUpper":
        return OutwardUpper(up(self.value + _value(other)))

    def __mul__(self, other: Any) -> "OutwardUpper":
        return OutwardUpper(up(self.value * _value(other)))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "OutwardUpper":
        return OutwardUpper(div_up(self.value, _value(other)))

    def __matmul__(self, other: "OutwardUpper") -> "OutwardUpper":
        return OutwardUpper(nonnegative_matmul_up(self.value, other.value))

    def sum(self, dim: int | tuple[int, ...]) -> "OutwardUpper":
        """Bound the sums of numbers that are not negative."""
        return OutwardUpper(nonnegative_sum_up(self.value, dim))

    def amax(self, dim: int | tuple[int, ...]) -> "OutwardUpper":
        """Return the largest bounds."""
        return OutwardUpper(self.value.amax(dim))

    def expand(self, *shape: int) -> "OutwardUpper":
        """As `torch.Tensor.expand`."""
        return OutwardUpper(self.value.expand(*shape))

    def reshape(self, *shape: int) -> "OutwardUpper":
        """As `torch.Tensor.reshape`."""
        return OutwardUpper(self.value.reshape(*shape))

    def least(self, other: Any) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(torch.fmin(self.value, torch.as_tensor(_value(other), dtype=torch.float64)))

    def most(self, other: Any) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(torch.maximum(self.value, torch.as_tensor(_value(other), dtype=torch.float64)))

    def sqrt(self) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(sqrt_up(self.value))

    def tanh(self) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(tanh_up(self.value))

    def over_rest(self, part: "OutwardUpper") -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(div_up(self.value, sub_down(1.0, part.value).clamp(min=0.0)))

    def chord(self) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        s = self.value
        cosine = down(sub_down(1.0, mul_up(s, s)).clamp(min=0.0).sqrt())
        chord = mul_up(s, sqrt_up(div_up(2.0, add_down(1.0, cosine))))
        return OutwardUpper(torch.where(s < 1, chord.clamp(max=2.0), 2.0))

    def floats(self) -> Tensor:
        """As in `arithmetic.Upper`."""
        return self.value


def _value(x: Any) -> Any:
    return x.value if isinstance(x, OutwardUpper) else x


@dataclass(frozen=True, eq=False, repr=False)
class Enclosure(ArrayRecord):
    """The set of all matrices M with |M − mid| ≤ rad entrywise.

    The result of an operation on enclosures contains the results for all members of the operands.
    """

    mid: Tensor
    rad: Tensor

    @staticmethod
    def exact(x: Tensor | float) -> "Enclosure":
        """Return the enclosure that contains only x."""
        mid = as_float64(x)
        return Enclosure(mid, torch.zeros_like(mid))

    @staticmethod
    def cat(parts: "Sequence[Enclosure]", dim: int = 0) -> "Enclosure":
        """Concatenate enclosures."""
        return Enclosure(torch.cat([p.mid for p in parts], dim), torch.cat([p.rad for p in parts], dim))

    @property
    def shape(self) -> torch.Size:
        """The shape of the members."""
        return self.mid.shape

    @property
    def mT(self) -> "Enclosure":
        """The enclosure of the transposes."""
        return Enclosure(self.mid.mT, self.rad.mT)

    def __getitem__(self, index: Any) -> "Enclosure":
        return Enclosure(self.mid[index], self.rad[index])

    def expand(self, *shape: int) -> "Enclosure":
        """As `torch.Tensor.expand`."""
        return Enclosure(self.mid.expand(*shape), self.rad.expand(*shape))

    def reshape(self, *shape: int) -> "Enclosure":
        """As `torch.Tensor.reshape`."""
        return Enclosure(self.mid.reshape(*shape), self.rad.reshape(*shape))

    def permute(self, *order: int) -> "Enclosure":
        """As `torch.Tensor.permute`."""
        return Enclosure(self.mid.permute(*order), self.rad.permute(*order))

    def size(self) -> OutwardUpper:
        """Return entrywise upper bounds on |M| over all members M."""
        return OutwardUpper(self.abs_up())

    def top(self) -> OutwardUpper:
        """Return entrywise upper bounds on all members."""
        return OutwardUpper(self.upper())

    def ends(self) -> tuple[OutwardUpper, OutwardUpper]:
        """Bound the largest entry of every column, and the negative of the smallest one."""
        mid, rad = self.mid, self.rad
        if mid.ndim > 1 and rad.stride(-2) == 0:  # one radius for all rows
            rad = rad[..., 0, :]
            return OutwardUpper(add_up(mid.amax(-2), rad)), OutwardUpper(add_up(-mid.amin(-2), rad))
        return OutwardUpper(up((mid + rad).amax(-2))), OutwardUpper(up((rad - mid).amax(-2)))

    def floats(self) -> Tensor:
        """Return the midpoints."""
        return self.mid

    def upper(self) -> Tensor:
        """Return an entrywise upper bound on all members."""
        return add_up(self.mid, self.rad)

    def lower(self) -> Tensor:
        """Return an entrywise lower bound on all members."""
        return sub_down(self.mid, self.rad)

    def abs_up(self) -> Tensor:
        """Return an entrywise upper bound on |M| over all members M."""
        return add_up(self.mid.abs(), self.rad)

    def __neg__(self) -> "Enclosure":
        return Enclosure(-self.mid, self.rad)

    def __add__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        other = as_enclosure(other)
        mid = self.mid + other.mid
        return Enclosure(mid, raised(mid.abs().mul_(UNIT).add_(self.rad).add_(other.rad)))

    def __sub__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        return self + (-as_enclosure(other))

    def __mul__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        other = as_enclosure(other)
        mid = self.mid * other.mid
        rad = mid.abs().mul_(UNIT).add_(self.mid.abs() * other.rad).add_(self.rad * (other.mid.abs() + other.rad))
        return Enclosure(mid, up(up(up(rad.mul_(1 + 8 * UNIT)))))  # as `raised`, also sharp for subnormal numbers

    def __matmul__(self, other: "Enclosure | Tensor") -> "Enclosure":
        other = as_enclosure(other)
        k = self.shape[-1]
        if self.mid.ndim < 2 or other.mid.ndim < 2:
            raise InputError("a product of enclosures needs two matrices; give a vector a row or column dimension")
        mid = self.mid @ other.mid
        own = raised(other.mid.abs().mul_(gamma(k)).add_(other.rad))
        rad = nonnegative_matmul_up(self.mid.abs(), own)
        if bool(self.rad.any()):
            rad.add_(nonnegative_matmul_up(self.rad, other.abs_up()))
        return _without_overflow(mid, raised(rad))

    def coarse(self, other: "Enclosure | Tensor") -> "Enclosure":
        """Return the product with one radius for all rows: that of the largest |entries| and radii of a column."""
        other = as_enclosure(other)
        k, mid = self.shape[-1], self.mid @ other.mid
        size, off = (x.amax(-2, keepdim=True) for x in (self.mid.abs(), self.rad))
        rad = nonnegative_matmul_up(size, raised(other.mid.abs().mul_(gamma(k)).add_(other.rad)))
        if bool(off.any()):
            rad.add_(nonnegative_matmul_up(off, other.abs_up()))
        return _without_overflow(mid, raised(rad).expand_as(mid))

    def sum(self, dim: int | tuple[int, ...]) -> "Enclosure":
        """Return the enclosure of the sums over `dim`."""
        mid = self.mid.sum(dim=dim)
        count = max(self.mid.numel() // max(mid.numel(), 1), 1)
        rad = nonnegative_sum_up(add_up(self.rad, mul_up(gamma(count - 1), self.mid.abs())), dim)
        return _without_overflow(mid, rad)


def as_enclosure(x: Enclosure | Tensor | float) -> Enclosure:
    """Return x if it is an enclosure, and the enclosure that contains only x otherwise."""
    return x if isinstance(x, Enclosure) else Enclosure.exact(x)


def _without_overflow(mid: Tensor, rad: Tensor) -> Enclosure:
    """Return the enclosure (mid, rad), with radius +∞ where mid is not finite.

    A computed sum may overflow to ±∞ although the real sum is finite, and even if it has the other sign.
    """
    if bool(mid.sum().isfinite()):  # then all are, which takes a fraction of the time
        return Enclosure(mid, rad)
    return Enclosure(torch.where(mid.isinf(), 0.0, mid), torch.where(mid.isfinite(), rad, math.inf))


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


ENUMERATED = 10
"""The longest side for which all sign vectors are enumerated (2⁹ up to an overall sign)."""


@dataclass(frozen=True, eq=False, repr=False)
class SignBound(ArrayRecord):
    """An upper bound on ‖M‖_{∞→1}, and the scalings that prove it.

    `row_scale` and `column_scale` are D_u^{-½} and D_v^{-½}, so u = 1/row_scale² and v = 1/column_scale².
    """

    value: Float[Tensor, "*batch"]
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

    The bound is taken per matrix of the batch.

    >>> M = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    >>> round(sign_norm_up(M).value.item(), 9), round(absolute_sum(M).item(), 9)
    (2.0, 4.0)
    """
    total = absolute_sum(M)
    if min(M.shape[-2:]) <= ENUMERATED:
        return SignBound(no_bound(torch.fmin(total, enumerated(M))))
    mid = M.mid if isinstance(M, Enclosure) else as_float64(M)
    row_scale, column_scale = best_scalings(torch.where(mid.isfinite(), mid, 0.0), iterations)
    plain = scaled_spectral(M, torch.ones_like(row_scale), torch.ones_like(column_scale))
    scaled = scaled_spectral(M, row_scale, column_scale)
    # The scalings are kept even if another bound is smaller for most matrices: a single one may need them.
    return SignBound(no_bound(torch.fmin(torch.fmin(total, plain), scaled)), row_scale, column_scale)
