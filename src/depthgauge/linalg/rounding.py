"""The only source of rounding bounds: what is computed here in float64 encloses the real number it stands for.

Two kinds of objects. Functions ending in `_up` or `_down` return a float64 that is never below, or never above,
the real result for the float64 arguments given. An `Enclosure` is a matrix of midpoints with a matrix of radii, for
results of either sign that pass through several products.

What is trusted: IEEE-754 addition, multiplication, division and square root with rounding to nearest and gradual
underflow, and that a matrix product sums its n products in some order, fused or not (error at most γ_n |A||B|;
no fast matrix multiplication). Exponentials are summed here from their series, so no library function is trusted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from depthgauge.errors import InputError

UNIT = 2.0**-53
"""u, the largest relative error of one rounding."""
TINY = 2.0**-1074
"""The smallest positive float64: bounds the absolute error of an underflow."""
_INF = math.inf


def as_float64(x: Tensor | float) -> Tensor:
    """The argument as a float64 tensor; float32 is exact in it, anything else is refused."""
    if isinstance(x, int | float):
        if float(x) != x and not math.isnan(x):
            raise InputError(f"{x} is no float64, and a bound must not begin with a rounding; give a float")
        x = torch.tensor(float(x), dtype=torch.float64)
    tensor = x
    if tensor.dtype not in (torch.float64, torch.float32):
        raise InputError(f"rounding bounds need float64 or float32, got {tensor.dtype}; convert the tensor")
    return tensor.to(torch.float64)


def largest_not_above(value: float, dtype: torch.dtype) -> float:
    """A positive number as the dtype holds it, never above the one given: a bound survives its conversion."""
    held = torch.tensor(value, dtype=dtype)
    if held.item() > value:
        held = torch.nextafter(held, torch.zeros_like(held))
    return float(held)


def up(x: Tensor | float) -> Tensor:
    """The next float64 above."""
    x = as_float64(x)
    return torch.nextafter(x, x.new_tensor(_INF))


def down(x: Tensor | float) -> Tensor:
    """The next float64 below."""
    x = as_float64(x)
    return torch.nextafter(x, x.new_tensor(-_INF))


def add_up(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At least a + b."""
    return up(as_float64(a) + as_float64(b))


def add_down(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At most a + b."""
    return down(as_float64(a) + as_float64(b))


def sub_up(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At least a − b."""
    return up(as_float64(a) - as_float64(b))


def sub_down(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At most a − b."""
    return down(as_float64(a) - as_float64(b))


def mul_up(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At least a · b."""
    return up(as_float64(a) * as_float64(b))


def mul_down(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At most a · b."""
    return down(as_float64(a) * as_float64(b))


def div_up(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At least a / b; +∞ where b is zero of either sign."""
    a, b = as_float64(a), as_float64(b)
    return torch.where(b == 0, _INF, up(a / b))


def div_down(a: Tensor | float, b: Tensor | float) -> Tensor:
    """At most a / b; −∞ where b is zero of either sign."""
    a, b = as_float64(a), as_float64(b)
    return torch.where(b == 0, -_INF, down(a / b))


def sqrt_up(a: Tensor | float) -> Tensor:
    """At least √a."""
    return up(as_float64(a).sqrt())


def sqrt_down(a: Tensor | float) -> Tensor:
    """At most √a, and not below 0."""
    return down(as_float64(a).sqrt()).clamp(min=0.0)


def gamma(n: int) -> float:
    """γ_n = nu/(1 − nu), rounded up: the relative error of n roundings in a row."""
    if n * UNIT >= 0.5:
        raise InputError(f"a sum of {n} terms is too long for a rounding bound")
    return math.nextafter(n * UNIT / math.nextafter(1.0 - n * UNIT, 0.0), _INF)


def _shrink(n: int) -> float:
    """1 − γ_n, rounded down: what n roundings leave of a sum of terms of one sign."""
    return math.nextafter(1.0 - gamma(n), 0.0)


def nonnegative_sum_up(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """At least Σ x over `dim`, for x ≥ 0."""
    x = as_float64(x)
    total = x.sum(dim=dim)
    count = x.numel() // max(total.numel(), 1)
    return div_up(total, _shrink(max(count - 1, 0)))


def sum_up(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """At least Σ x over `dim`, whatever the signs: the computed sum plus γ_{n−1} Σ|x|; +∞ where the sum overflowed."""
    x = as_float64(x)
    total = x.sum(dim=dim)
    count = x.numel() // max(total.numel(), 1)
    bound = add_up(total, mul_up(gamma(max(count - 1, 0)), nonnegative_sum_up(x.abs(), dim)))
    return torch.where(total.isinf(), _INF, bound)


def sum_down(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """At most Σ x over `dim`."""
    return -sum_up(-as_float64(x), dim)


def nonnegative_matmul_up(A: Float[Tensor, "*a m k"], B: Float[Tensor, "*b k n"]) -> Tensor:
    """At least A B entrywise, for A, B ≥ 0: the computed product over 1 − γ_k, and k underflows."""
    k = A.shape[-1]
    return add_up(div_up(_lifted(A) @ _lifted(B), _shrink(k)), k * TINY)


def _lifted(x: Tensor) -> Tensor:
    """x with its positive entries at least 2⁻⁹⁰⁰: products of subnormal numbers are several times slower."""
    x = as_float64(x)
    return torch.where(x > 0, x.clamp(min=2.0**-900), x)


# --- exponentials, from their series ---------------------------------------------------------------------------

# ln 2 = HI + LO up to 2⁻⁸⁶; HI ends in 20 zero bits, so that k·HI is exact for every exponent k of a float64.
_LN2_HI = float.fromhex("0x1.62e42feep-1")
_LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
_LN2 = math.log(2.0)
# e^−745 lies between TINY and 2 TINY, and e^709.78 just below the largest float64.
_EXP_LEAST, _EXP_MOST = -745.0, 709.78
_TERMS = 22
# 1/(1 − r/(N+1)) for r ≤ 0.75 and N = 22: bounds the tail Σ_{j≥N} r^{j−N} N!/j! of the series.
_TAIL = 1.04
_Op = Callable[[Tensor | float, Tensor | float], Tensor]


def _expm1_series(r: Tensor, mul: _Op, div: _Op, add: _Op, tail: float) -> Tensor:
    """e^r − 1 for 0 ≤ r ≤ 0.75 as r(1 + r/2(1 + r/3(…))), rounded the way `mul`, `div`, `add` round."""
    series = torch.full_like(r, tail)
    for j in range(_TERMS, 1, -1):
        series = add(div(mul(series, r), float(j)), 1.0)
    return mul(series, r)


def _expm1_series_up(r: Tensor) -> Tensor:
    return _expm1_series(r, mul_up, div_up, add_up, _TAIL)


def _expm1_series_down(r: Tensor) -> Tensor:
    return _expm1_series(r, mul_down, div_down, add_down, 1.0).clamp(min=0.0)


def _power_of_two(k: Int64[Tensor, "*batch"]) -> Tensor:
    """2^k exactly, for −1022 ≤ k ≤ 1023, written straight into the exponent bits."""
    return ((k + 1023) << 52).view(torch.float64)


def _scale(x: Tensor, k: Int64[Tensor, "*batch"]) -> Tensor:
    """x · 2^k in two exact halves, so that only the last step can round (into the subnormals)."""
    half = k // 2
    return x * _power_of_two(half) * _power_of_two(k - half)


def _reduce(x: Tensor) -> tuple[Int64[Tensor, "*batch"], Tensor, Tensor]:
    """k and bounds r_down ≤ x − k ln 2 ≤ r_up with 0 ≤ r_down and r_up ≤ 0.75."""
    k = torch.floor(x / _LN2)
    head = sub_down(x, k * _LN2_HI)
    # Where rounding put x just under k ln 2, one k less keeps the remainder on the positive side.
    k = torch.where(head - (k * _LN2_LO) < 1e-9, k - 1, k).clamp(min=-1200)
    low = torch.minimum(mul_down(k, math.nextafter(_LN2_LO, 1)), mul_down(k, math.nextafter(_LN2_LO, 0)))
    high = torch.maximum(mul_up(k, math.nextafter(_LN2_LO, 1)), mul_up(k, math.nextafter(_LN2_LO, 0)))
    r_down = sub_down(sub_down(x, k * _LN2_HI), high).clamp(min=0.0)
    r_up = sub_up(sub_up(x, k * _LN2_HI), low)
    return k.to(torch.int64), r_down, r_up


def exp_up(x: Tensor | float) -> Tensor:
    """At least e^x: 2^k · e^r with r = x − k ln 2 ∈ [0, 0.75)."""
    x = as_float64(x)
    inside = x.clamp(min=_EXP_LEAST, max=_EXP_MOST)
    k, _, r_up = _reduce(inside)
    value = up(_scale(add_up(_expm1_series_up(r_up), 1.0), k))
    value = torch.where(x < _EXP_LEAST, 2 * TINY, value)
    value = torch.where(x > _EXP_MOST, _INF, value)
    return torch.where(x.isnan(), x, value)


def exp_down(x: Tensor | float) -> Tensor:
    """At most e^x, and not below 0."""
    x = as_float64(x)
    inside = x.clamp(min=_EXP_LEAST, max=_EXP_MOST)
    k, r_down, _ = _reduce(inside)
    value = down(_scale(add_down(_expm1_series_down(r_down), 1.0), k)).clamp(min=0.0)
    value = torch.where(x < _EXP_LEAST, 0.0, value)
    return torch.where(x.isnan(), x, value)


def _tanh_of_nonnegative(x: Tensor, upward: bool) -> Tensor:
    """tanh x = E/(E + 2) with E = e^{2x} − 1, increasing in E, for x ≥ 0."""
    doubled = 2.0 * x
    small = doubled <= 0.7
    if upward and bool(small.all()):
        E = _expm1_series_up(doubled)
        return div_up(E, add_down(E, 2.0)).clamp(max=1.0)
    if upward:
        E = torch.where(small, _expm1_series_up(doubled.clamp(max=0.7)), sub_up(exp_up(doubled), 1.0))
        quotient = div_up(E, add_down(E, 2.0)).clamp(max=1.0)
        return torch.where(E.isinf(), 1.0, quotient)
    E = torch.where(small, _expm1_series_down(doubled.clamp(max=0.7)), sub_down(exp_down(doubled), 1.0))
    return div_down(E, add_up(E, 2.0)).clamp(min=0.0)


def tanh_up(x: Tensor | float) -> Tensor:
    """At least tanh x."""
    x = as_float64(x)
    value = _tanh_of_nonnegative(x.abs(), True)
    if bool((x < 0).any()):
        value = torch.where(x >= 0, value, -_tanh_of_nonnegative(x.abs(), False))
    return torch.where(x.isnan(), x, value)


def tanh_down(x: Tensor | float) -> Tensor:
    """At most tanh x."""
    return -tanh_up(-as_float64(x))


# --- matrices with radii ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Enclosure:
    """The set of matrices M with |M − mid| ≤ rad entrywise (midpoint–radius arithmetic).

    The result of an operation contains the result of the operation on all members.
    """

    mid: Tensor
    rad: Tensor

    @staticmethod
    def exact(x: Tensor | float) -> "Enclosure":
        """Return the enclosure that contains only `x`."""
        mid = as_float64(x)
        return Enclosure(mid, torch.zeros_like(mid))

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrices."""
        return self.mid.shape

    @property
    def mT(self) -> "Enclosure":
        """The transposes."""
        return Enclosure(self.mid.mT, self.rad.mT)

    def move(self, rearrange: Callable[[Tensor], Tensor]) -> "Enclosure":
        """Apply a rearrangement that computes nothing: reshape, permute, index, stack with itself."""
        return Enclosure(rearrange(self.mid), rearrange(self.rad))

    def at(self, indices: Sequence[int]) -> "Enclosure":
        """The matrices of a batch at some indices of its first dimension."""
        return self.move(lambda t: t[list(indices)])

    def upper(self) -> Tensor:
        """An upper bound of every member, entry by entry."""
        return add_up(self.mid, self.rad)

    def lower(self) -> Tensor:
        """A lower bound of every member, entry by entry."""
        return sub_down(self.mid, self.rad)

    def abs_up(self) -> Tensor:
        """An upper bound of |member|, entry by entry."""
        return add_up(self.mid.abs(), self.rad)

    def __neg__(self) -> "Enclosure":
        return Enclosure(-self.mid, self.rad)

    def __add__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        other = _enclosure(other)
        mid = self.mid + other.mid
        return Enclosure(mid, add_up(add_up(self.rad, other.rad), mul_up(mid.abs(), UNIT)))

    def __sub__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        return self + (-_enclosure(other))

    def __mul__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        other = _enclosure(other)
        mid = self.mid * other.mid
        own = mul_up(mid.abs(), UNIT)
        crossed = add_up(mul_up(self.mid.abs(), other.rad), mul_up(self.rad, other.abs_up()))
        return Enclosure(mid, add_up(add_up(own, crossed), TINY))

    def __matmul__(self, other: "Enclosure | Tensor") -> "Enclosure":
        other = _enclosure(other)
        k = self.shape[-1]
        if self.mid.ndim < 2 or other.mid.ndim < 2:
            raise InputError(
                "a product of enclosures needs matrices on both sides; give a vector a row or column dimension"
            )
        mid = self.mid @ other.mid
        own = add_up(mul_up(gamma(k), other.mid.abs()), other.rad)
        rad = nonnegative_matmul_up(self.mid.abs(), own)
        if bool((self.rad != 0).any()):
            rad = add_up(rad, nonnegative_matmul_up(self.rad, other.abs_up()))
        return _without_overflow(mid, add_up(rad, k * TINY))

    def sum(self, dim: int | tuple[int, ...]) -> "Enclosure":
        """The sum over `dim`."""
        mid = self.mid.sum(dim=dim)
        count = max(self.mid.numel() // max(mid.numel(), 1), 1)
        rad = nonnegative_sum_up(add_up(self.rad, mul_up(gamma(count - 1), self.mid.abs())), dim)
        return _without_overflow(mid, rad)


def _enclosure(x: Enclosure | Tensor | float) -> Enclosure:
    return x if isinstance(x, Enclosure) else Enclosure.exact(x)


def _without_overflow(mid: Tensor, rad: Tensor) -> Enclosure:
    """A sum that overflowed on the way may be ±∞ where the real one is finite, even of the other sign: any number."""
    return Enclosure(torch.where(mid.isinf(), 0.0, mid), torch.where(mid.isfinite(), rad, _INF))


# --- verified spectral bounds --------------------------------------------------------------------------------------


def largest_eigenvalue_up(S: Enclosure | Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """At least λ_max of every symmetric matrix in the enclosure.

    With V the floating-point eigenvectors, B = Vᵀ S V and δ ≥ ‖VᵀV − I‖ (largest row sum), x = V y gives
    xᵀSx / xᵀx = yᵀBy / yᵀVᵀVy ≤ λ/(1 − δ) for λ ≥ 0, and λ/(1 + δ) for λ < 0, where λ = max_i B_ii + Σ_j≠i |B_ij|
    (Gershgorin). V only has to be near the eigenvectors for the bound to be tight, never for it to be true: δ < 1
    makes V invertible. Where that fails the largest absolute row sum is used.
    """
    S = _enclosure(S)
    n = S.shape[-1]
    row_sum = nonnegative_sum_up(S.abs_up(), -1).amax(dim=-1)
    finite = S.mid.isfinite().all(dim=-1).all(dim=-1)
    safe = torch.where(finite[..., None, None], S.mid, 0.0)
    eye = torch.eye(n, dtype=torch.float64, device=S.mid.device)
    try:
        V = torch.linalg.eigh(safe / 2 + safe.mT / 2)[1]
    except LinAlgError:  # no convergence: the plain Gershgorin bound is left
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
    """At least ‖M‖F, entries scaled by a power of two so that squares neither overflow nor vanish."""
    size = _enclosure(M).abs_up()
    scaled, exponent = _to_unit_scale(size)
    squares = nonnegative_sum_up(mul_up(scaled, scaled), (-2, -1))
    return up(_scale(sqrt_up(squares), exponent))


def spectral_norm_up(M: Enclosure | Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """At least ‖M‖₂ = √λ_max(MᵀM) for every matrix in the enclosure, verified (a floating-point SVD proves nothing)."""
    M = _enclosure(M)
    if M.shape[-2] < M.shape[-1]:
        M = M.mT
    scaled, exponent = _to_unit_scale(M.mid)
    # The Gram matrix as computed and made symmetric is off by at most γ_{m+1} |M|ᵀ|M|, hence by γ_{m+1} ‖M‖F² in norm;
    # underflows add to that.
    m, n = scaled.shape[-2:]
    size = frobenius_norm_up(scaled)
    lost = add_up(mul_up(gamma(m + 1), mul_up(size, size)), 4.0 * m * n * TINY)
    gram = scaled.mT @ scaled
    square = add_up(largest_eigenvalue_up((gram + gram.mT) / 2).clamp(min=0.0), lost)
    verified = up(_scale(sqrt_up(square), exponent))
    of_mid = torch.minimum(verified, frobenius_norm_up(M.mid))
    return add_up(of_mid, frobenius_norm_up(M.rad)) if bool((M.rad != 0).any()) else of_mid


def _to_unit_scale(M: Tensor) -> tuple[Tensor, Int64[Tensor, "*batch"]]:
    """M · 2^{−k} with its largest entry in [½, 1), and k, per matrix; zero and non-finite matrices stay as they are."""
    largest = M.abs().amax(dim=(-2, -1))
    k = torch.frexp(torch.where(largest.isfinite(), largest, 1.0))[1].to(torch.int64).clamp(min=-1020, max=1022)
    return _scale(M, -k[..., None, None]), k
