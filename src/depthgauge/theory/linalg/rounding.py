"""Outward rounding: float64 computations with rigorous bounds on the real results.

A function that ends in `_up` returns a float64 that is at least the real result for the given float64 arguments. A
function that ends in `_down` returns one that is at most the real result. `enclosures` and `spectral` build on these
functions.

Assumptions:

- Addition, multiplication, division and square root follow IEEE 754 with rounding to nearest and gradual underflow.
- A matrix product with inner dimension n sums n products in some order, with or without fused multiply-add. Its error
  is at most γ_n |A||B|. Fast matrix multiplication (Strassen) is excluded.

Exponentials are computed here from their series, because the accuracy of library functions is not guaranteed.
"""

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.base.errors import InputError

UNIT = 2.0**-53
"""u, the largest relative error of one rounding."""
TINY = 2.0**-1074
"""The smallest positive float64. It bounds the absolute error of an underflow."""
SMALL = 2.0**-1010
"""What covers underflows where time matters: adding a subnormal number takes some 30 times as long as a normal one."""
_INF = math.inf
_ABOVE, _BELOW = torch.tensor(_INF, dtype=torch.float64), torch.tensor(-_INF, dtype=torch.float64)


def as_float64(x: Tensor | float) -> Tensor:
    """Convert to a float64 tensor without rounding; accept only Python numbers, float64 and float32."""
    if isinstance(x, Tensor) and x.dtype == torch.float64:  # most calls
        return x
    if isinstance(x, int | float):
        if float(x) != x and not math.isnan(x):
            raise InputError(
                f"{x} is not representable as float64; give a float, because rounding it would break a bound"
            )
        x = torch.tensor(float(x), dtype=torch.float64)
    tensor = x
    if tensor.dtype not in (torch.float64, torch.float32):
        raise InputError(f"rounding bounds need float64 or float32, got {tensor.dtype}; convert the tensor")
    return tensor.to(torch.float64)


def _operand(x: Tensor | float) -> Tensor | float:
    """Return x as an operand of a float64 operation; a Python float stays one, which saves the time of a tensor."""
    return x if isinstance(x, float) else as_float64(x)


def largest_not_above(value: float, dtype: torch.dtype) -> float:
    """Return the positive number `value` in `dtype`, rounded down."""
    held = torch.tensor(value, dtype=dtype)
    if held.item() > value:
        held = torch.nextafter(held, torch.zeros_like(held))
    return float(held)


def up(x: Tensor | float) -> Tensor:
    """Return the next larger float64."""
    return torch.nextafter(as_float64(x), _ABOVE)


def down(x: Tensor | float) -> Tensor:
    """Return the next smaller float64."""
    return torch.nextafter(as_float64(x), _BELOW)


def add_up(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return an upper bound on a + b."""
    return up(_operand(a) + _operand(b))


def add_down(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a lower bound on a + b."""
    return down(_operand(a) + _operand(b))


def sub_up(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return an upper bound on a − b."""
    return up(_operand(a) - _operand(b))


def sub_down(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a lower bound on a − b."""
    return down(_operand(a) - _operand(b))


def mul_up(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return an upper bound on a · b."""
    return up(_operand(a) * _operand(b))


def mul_down(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a lower bound on a · b."""
    return down(_operand(a) * _operand(b))


def div_up(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return an upper bound on a / b, and +∞ where b is +0 or −0."""
    if isinstance(b, float) and b != 0:
        return up(as_float64(a) / b)
    a, b = as_float64(a), as_float64(b)
    return torch.where(b == 0, _INF, up(a / b))


def sqrt_up(a: Tensor | float) -> Tensor:
    """Return an upper bound on √a."""
    return up(as_float64(a).sqrt())


def no_bound(x: Tensor) -> Tensor:
    """Replace NaN by +∞: a bound that is not a number is no bound. (`nan_to_num` would make +∞ finite.)"""
    return torch.where(x.isnan(), _INF, x)


def gamma(n: int, unit: float = UNIT) -> float:
    """Return γ_n = nu/(1 − nu), rounded up. It bounds the relative error of n successive roundings of size u."""
    if n * unit >= 0.5:
        raise InputError(f"a sum of {n} terms is too long for a rounding bound; n must be below {0.5 / unit:.0f}")
    return math.nextafter(n * unit / math.nextafter(1.0 - n * unit, 0.0), _INF)


def _shrink(n: int) -> float:
    """Return 1 − γ_n, rounded down. For x ≥ 0 a sum computed with n roundings satisfies fl(Σ x) ≥ (1 − γ_n) Σ x."""
    return math.nextafter(1.0 - gamma(n), 0.0)


def nonnegative_sum_up(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return an upper bound on Σ x over `dim`, for x ≥ 0."""
    x = as_float64(x)
    total = x.sum(dim=dim)
    count = x.numel() // max(total.numel(), 1)
    return div_up(total, _shrink(max(count - 1, 0)))


def nonnegative_matmul_up(A: Float[Tensor, "*a m k"], B: Float[Tensor, "*b k n"]) -> Tensor:
    """Return fl(A B)/(1 − γ_k) + SMALL ≥ A B entrywise, for A, B ≥ 0 with inner dimension k; SMALL ≥ (k + 1)·TINY.

    γ_{k+4} in place of γ_k is for the roundings of the quotient and of the sum: 1 − γ_{k+4} ≤ (1 − u)²(1 − γ_k).
    """
    return (_lifted(A) @ _lifted(B)).div_(_shrink(A.shape[-1] + 4)).add_(SMALL)


def raised(x: Tensor) -> Tensor:
    """Return, in place of x, a bound on a sum of products that was computed as x with at most 4 roundings each.

    (1 + 8u)(1 − u)² ≥ (1 − u)⁻⁴, and SMALL is far above the `TINY` by which each product may be off in an underflow.
    """
    return x.mul_(1 + 8 * UNIT).add_(SMALL)


def _lifted(x: Tensor) -> Tensor:
    """Raise positive entries below 2⁻⁹⁰⁰ to 2⁻⁹⁰⁰; products of subnormal numbers are several times slower."""
    x = as_float64(x)
    if x.numel() and bool(x.amin() >= 2.0**-900):  # most calls
        return x
    return torch.where(x > 0, x.clamp(min=2.0**-900), x)


# --- exponentials ----------------------------------------------------------------------------------------------

# |ln 2 − (HI + LO)| ≤ 2⁻⁸⁶. HI ends in 20 zero bits, so k·HI is exact for every exponent k of a float64.
_LN2_HI = float.fromhex("0x1.62e42feep-1")
_LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
_LN2 = math.log(2.0)
# TINY < e^−745 < 2 TINY, and e^709.78 is just below the largest float64.
_EXP_LEAST, _EXP_MOST = -745.0, 709.78
_TERMS = 22
# The tail of the series: Σ_{j≥N} r^{j−N} N!/j! ≤ 1/(1 − r/(N+1)) ≤ 1.04 for r ≤ 0.75 and N = 22.
_TAIL = 1.04


def _power_of_two(k: Int64[Tensor, "*batch"]) -> Tensor:
    """Return 2^k exactly for −1022 ≤ k ≤ 1023, by setting the exponent bits."""
    return ((k + 1023) << 52).view(torch.float64)


def times_power_of_two(x: Tensor, k: Int64[Tensor, "*batch"]) -> Tensor:
    """Return x · 2^k as two products. Only the second can round, and only if the result is subnormal."""
    half = k // 2
    return x * _power_of_two(half) * _power_of_two(k - half)


def _expm1_series_up(r: Tensor) -> Tensor:
    """Return an upper bound on e^r − 1 = r(1 + r/2(1 + r/3(…))) for 0 ≤ r ≤ 0.75."""
    series = torch.full_like(r, _TAIL)
    for j in range(_TERMS, 1, -1):
        series = add_up(div_up(mul_up(series, r), float(j)), 1.0)
    return mul_up(series, r)


def exp_up(x: Tensor | float) -> Tensor:
    """Return an upper bound on e^x = 2^k · e^r with r = x − k ln 2 ∈ [0, 0.75)."""
    x = as_float64(x)
    inside = x.clamp(min=_EXP_LEAST, max=_EXP_MOST)
    k = torch.floor(inside / _LN2)
    head = sub_down(inside, k * _LN2_HI)
    # If rounding gives x < k ln 2, replacing k by k − 1 makes the remainder positive.
    k = torch.where(head - (k * _LN2_LO) < 1e-9, k - 1, k).clamp(min=-1200)
    low = torch.minimum(mul_down(k, math.nextafter(_LN2_LO, 1)), mul_down(k, math.nextafter(_LN2_LO, 0)))
    r = sub_up(sub_up(inside, k * _LN2_HI), low)
    value = up(times_power_of_two(add_up(_expm1_series_up(r), 1.0), k.to(torch.int64)))
    value = torch.where(x < _EXP_LEAST, 2 * TINY, value)
    value = torch.where(x > _EXP_MOST, _INF, value)
    return torch.where(x.isnan(), x, value)


def tanh_up(x: Tensor | float) -> Tensor:
    """Return an upper bound on tanh x: E/(E + 2) with E = e^{2x} − 1 for x ≥ 0. For x < 0 it bounds tanh 0 = 0.

    The quotient increases with E.
    """
    x = as_float64(x)
    doubled = 2.0 * x.clamp(min=0.0)
    E = _expm1_series_up(doubled.clamp(max=0.7))
    if not bool((doubled <= 0.7).all()):
        E = torch.where(doubled <= 0.7, E, sub_up(exp_up(doubled), 1.0))
    quotient = div_up(E, add_down(E, 2.0)).clamp(max=1.0)
    return torch.where(E.isinf(), 1.0, quotient)
