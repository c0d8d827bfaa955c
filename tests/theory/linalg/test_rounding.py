"""Every bound of `linalg.rounding` against real arithmetic: exact rationals, or arb numbers of 200 bits."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from arb_bounds import at_200_bits, is_lower, is_upper
from drawn import AWKWARD, LARGEST, TINY, floats, matrices, ulps_between, vectors
from flint import arb
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.theory.linalg import rounding as r
from depthgauge.theory.linalg.enclosures import Enclosure

OPERATIONS = {
    "add": (r.add_up, r.add_down, lambda a, b: a + b),
    "sub": (r.sub_up, r.sub_down, lambda a, b: a - b),
    "mul": (r.mul_up, r.mul_down, lambda a, b: a * b),
    "div": (r.div_up, lambda a, b: -r.div_up(-a, b), lambda a, b: a / b),
}


def at_least(bound: float, exact: Fraction) -> bool:
    return bound == math.inf or (bound > -math.inf and Fraction(bound) >= exact)


def at_most(bound: float, exact: Fraction) -> bool:
    return at_least(-bound, -exact)


@pytest.mark.parametrize("name", OPERATIONS)
@given(a=floats(), b=floats())
@example(a=1.0, b=2.0**-53)
@example(a=1.0 + 2.0**-52, b=2.0**-53)
@example(a=LARGEST, b=LARGEST)
@example(a=-LARGEST, b=LARGEST)
@example(a=TINY, b=0.5)
@example(a=-TINY, b=TINY)
def test_one_operation_encloses_the_exact_result_within_two_steps(name: str, a: float, b: float) -> None:
    upward, downward, exactly = OPERATIONS[name]
    assume(name != "div" or b != 0)
    high, low = upward(a, b).item(), downward(a, b).item()
    exact = exactly(Fraction(a), Fraction(b))
    assert at_least(high, exact)
    assert at_most(low, exact)
    enclosed = at_200_bits(lambda: exactly(arb(a), arb(b)))
    assert is_upper(high, enclosed)
    assert is_lower(low, enclosed)
    if math.isfinite(high) and math.isfinite(low):
        assert ulps_between(low, high) <= 2


@given(a=st.lists(floats(), min_size=2, max_size=2), b=st.lists(floats(), min_size=3, max_size=3))
def test_operations_broadcast_and_take_float32_exactly(a: list[float], b: list[float]) -> None:
    rows = torch.tensor(a, dtype=torch.float64)[:, None]
    narrow = torch.tensor(b, dtype=torch.float64).clamp(-3e38, 3e38).to(torch.float32)
    high = r.add_up(rows, narrow)
    assert high.dtype == torch.float64
    assert high.shape == (2, 3)
    for i, x in enumerate(a):
        for j, y in enumerate(narrow.tolist()):
            assert at_least(high[i, j].item(), Fraction(x) + Fraction(y))


@given(a=floats(low=0.0))
def test_square_roots(a: float) -> None:
    high = r.sqrt_up(a).item()
    assert Fraction(high) ** 2 >= Fraction(a)
    root = at_200_bits(lambda: arb(a).sqrt())
    assert is_upper(high, root)
    assert ulps_between(float(root.mid()), high) <= 2


@given(x=st.one_of(floats(-745.5, 709.9), st.floats(-1e-8, 1e-8)))
@example(x=0.0)
@example(x=math.log(2.0))
@example(x=-math.log(2.0))
@example(x=1000 * math.log(2.0))
@example(x=-745.0)
@example(x=math.nextafter(-745.0, 0.0))
@example(x=-744.4400719213812)
@example(x=-708.3964185322641)
@example(x=709.0)
@example(x=709.78)
@example(x=math.nextafter(709.78, 710.0))
@example(x=709.782712893384)
def test_exponentials_are_bounded_tightly(x: float) -> None:
    high = r.exp_up(x).item()
    exact = at_200_bits(lambda: arb(x).exp())
    assert is_upper(high, exact)
    if x <= 709.78:
        assert ulps_between(float(exact.mid()), high) <= 10


@given(x=st.one_of(floats(-25.0, 25.0), st.floats(-1e-3, 1e-3)))
@example(x=0.35)
@example(x=math.nextafter(0.35, 1.0))
@example(x=-0.35)
@example(x=TINY)
@example(x=18.9)
@example(x=LARGEST)
def test_hyperbolic_tangents_are_bounded_tightly(x: float) -> None:
    high = r.tanh_up(x).item()
    exact = at_200_bits(lambda: arb(x).tanh()) if abs(x) < 1e4 else arb(math.copysign(1.0, x))
    assert is_upper(high, exact)
    assert 0 <= high <= 1
    assert x < 1e-300 or ulps_between(float(exact.mid()), high) <= 10


def test_exp_and_tanh_of_a_dense_grid() -> None:
    grid = torch.linspace(-720, 709.7, 6001, dtype=torch.float64)
    for x, above in zip(grid.tolist(), r.exp_up(grid).tolist(), strict=True):
        assert is_upper(above, at_200_bits(lambda x=x: arb(x).exp()))
    grid = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    for x, above in zip(grid.tolist(), r.tanh_up(grid).tolist(), strict=True):
        assert is_upper(above, at_200_bits(lambda x=x: arb(x).tanh()))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, 2**20, 2**40])
def test_gamma_is_at_least_its_formula(n: int) -> None:
    u = Fraction(1, 2**53)
    assert Fraction(r.gamma(n)) >= n * u / (1 - n * u)
    assert Fraction(r.gamma(n)) <= n * u / (1 - n * u) * (1 + Fraction(1, 2**50)) + Fraction(TINY)


def test_gamma_refuses_sums_too_long_to_bound() -> None:
    with pytest.raises(InputError, match="too long"):
        r.gamma(2**52)


@given(x=vectors(floats(), most=40))
@example(x=torch.tensor([LARGEST, LARGEST, 1.0], dtype=torch.float64))
@example(x=torch.tensor([1e16, 1.0, 1.0], dtype=torch.float64))
def test_sums_bound_the_exact_sum(x: Tensor) -> None:
    size = sum((abs(Fraction(v)) for v in x.tolist()), Fraction(0))
    bound = r.nonnegative_sum_up(x.abs(), -1).item()
    assert at_least(bound, size)
    assert bound == math.inf or Fraction(bound) <= size * (1 + Fraction(len(x) + 4, 2**52)) + Fraction(TINY)


def test_a_long_sum_that_rounds_down_still_gives_an_upper_bound() -> None:
    x = torch.cat([torch.ones(1, dtype=torch.float64), torch.full((4096,), 2.0**-54, dtype=torch.float64)])
    exact = 1 + Fraction(4096, 2**54)
    assert at_least(r.nonnegative_sum_up(x, 0).item(), exact)
    one_at_a_time = 1.0
    for term in x[1:].tolist():
        one_at_a_time += term
    assert Fraction(one_at_a_time) < exact  # so the plain sum is not an upper bound


def test_sums_over_several_dimensions_count_all_their_terms() -> None:
    x = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = [sum((Fraction(v) for v in x[:, i].flatten().tolist()), Fraction(0)) for i in range(5)]
    for bound, high in zip(exact, r.nonnegative_sum_up(x, (0, 2)), strict=True):
        assert at_least(high.item(), bound)
        assert high.item() - float(bound) < 1e-12


def exact_product(A: list[list[float]], B: list[list[float]]) -> list[list[Fraction]]:
    return [[sum((Fraction(a) * Fraction(b) for a, b in zip(row, column, strict=True)), Fraction(0))
             for column in zip(*B, strict=True)] for row in A]  # fmt: skip


@st.composite
def chained(draw: st.DrawFn, low: float | None = None) -> tuple[Tensor, Tensor]:
    """Draw two matrices that can be multiplied."""
    k = draw(st.integers(1, 6))
    A = draw(matrices(columns=st.just(k), elements=floats(low)))
    return A, draw(matrices(rows=st.just(k), elements=floats(low)))


@given(pair=chained(low=0.0))
def test_nonnegative_products(pair: tuple[Tensor, Tensor]) -> None:
    A, B = pair
    bound = r.nonnegative_matmul_up(A, B)
    # Positive entries below 2⁻⁹⁰⁰ are raised to 2⁻⁹⁰⁰. Apart from rounding, the bound may lose nothing else.
    lifted = [[[max(x, 2.0**-900) if x > 0 else x for x in row] for row in M.tolist()] for M in (A, B)]
    products = exact_product(A.tolist(), B.tolist()), exact_product(*lifted)
    for row, exact_row, lifted_row in zip(bound.tolist(), *products, strict=True):
        for value, exact, most in zip(row, exact_row, lifted_row, strict=True):
            assert at_least(value, exact)
            if math.isfinite(value):
                assert Fraction(value) <= most * (1 + Fraction(1, 2**48)) + 2 * Fraction(r.SMALL)


def test_products_in_the_subnormals_are_bounded() -> None:
    """If the matrix product flushed subnormal numbers to zero, the allowance for k underflows would be too small."""
    A = torch.full((8, 64), 2.0**-537, dtype=torch.float64)
    exact = 64 * Fraction(2) ** -1074
    assert Fraction((A @ A.mT).min().item()) >= exact * Fraction(1, 2)
    assert at_least(r.nonnegative_matmul_up(A, A.mT).min().item(), exact)


# --- enclosures ------------------------------------------------------------------------------------------------------


@st.composite
def enclosures_with_members(
    draw: st.DrawFn, shape: tuple[int, ...], size: float = 1e3, radius: float = 1.0
) -> tuple[Enclosure, list[Fraction]]:
    """Draw an enclosure and an exact rational member, often on the boundary."""
    count = math.prod(shape)
    mids = draw(st.lists(floats(-size, size), min_size=count, max_size=count))
    rads = draw(st.lists(floats(0.0, radius), min_size=count, max_size=count))
    shares = draw(st.lists(st.sampled_from([-1, 0, 1, Fraction(1, 3)]), min_size=count, max_size=count))
    enclosure = Enclosure(
        torch.tensor(mids, dtype=torch.float64).reshape(shape), torch.tensor(rads, dtype=torch.float64).reshape(shape)
    )
    return enclosure, [Fraction(m) + s * Fraction(d) for m, d, s in zip(mids, rads, shares, strict=True)]


def holds(enclosure: Enclosure, member: list[Fraction]) -> bool:
    inside = [
        abs(exact - Fraction(mid)) <= Fraction(rad)
        for mid, rad, exact in zip(
            enclosure.mid.flatten().tolist(), enclosure.rad.flatten().tolist(), member, strict=True
        )
    ]
    upper = all(at_least(b, x) for b, x in zip(enclosure.upper().flatten().tolist(), member, strict=True))
    lower = all(at_most(b, x) for b, x in zip(enclosure.lower().flatten().tolist(), member, strict=True))
    size = all(at_least(b, abs(x)) for b, x in zip(enclosure.abs_up().flatten().tolist(), member, strict=True))
    return all(inside) and upper and lower and size


@given(a=enclosures_with_members((3,)), b=enclosures_with_members((3,)))
def test_enclosure_arithmetic_encloses_exact_arithmetic_on_members(
    a: tuple[Enclosure, list[Fraction]], b: tuple[Enclosure, list[Fraction]]
) -> None:
    (A, x), (B, y) = a, b
    assert holds(A, x)
    assert holds(-A, [-v for v in x])
    assert holds(A + B, [v + w for v, w in zip(x, y, strict=True)])
    assert holds(A - B, [v - w for v, w in zip(x, y, strict=True)])
    assert holds(A * B, [v * w for v, w in zip(x, y, strict=True)])
    assert holds(A * 0.1, [v * Fraction(0.1) for v in x])
    assert holds(A + 0.1, [v + Fraction(0.1) for v in x])
    assert holds(A - B.mid, [v - Fraction(w) for v, w in zip(x, B.mid.tolist(), strict=True)])
    assert holds(A.sum(0), [sum(x, Fraction(0))])


@given(a=enclosures_with_members((2, 3)), b=enclosures_with_members((3, 2)), c=enclosures_with_members((2, 2)))
def test_chains_of_enclosure_products_enclose(
    a: tuple[Enclosure, list[Fraction]], b: tuple[Enclosure, list[Fraction]], c: tuple[Enclosure, list[Fraction]]
) -> None:
    def grid(values: list[Fraction], columns: int) -> list[list[Fraction]]:
        return [values[i : i + columns] for i in range(0, len(values), columns)]

    def times(X: list[list[Fraction]], Y: list[list[Fraction]]) -> list[list[Fraction]]:
        return [[sum(p * q for p, q in zip(row, col, strict=True)) for col in zip(*Y, strict=True)] for row in X]

    (A, x), (B, y), (C, z) = a, b, c
    AB = times(grid(x, 3), grid(y, 2))
    assert holds(A @ B, [v for row in AB for v in row])
    exact = times([[p + q for p, q in zip(s, t, strict=True)] for s, t in zip(AB, grid(z, 2), strict=True)], AB)
    assert holds((A @ B + C) @ (A @ B), [v for row in exact for v in row])
    transposed = [list(row) for row in zip(*AB, strict=True)]
    assert holds((A @ B).mT, [v for row in transposed for v in row])
    assert holds((A @ B)[[0]], AB[0])


@given(a=enclosures_with_members((2, 2), size=LARGEST, radius=LARGEST / 4), b=enclosures_with_members((2, 2), size=4.0))
def test_enclosures_of_every_size_never_bound_wrongly(
    a: tuple[Enclosure, list[Fraction]], b: tuple[Enclosure, list[Fraction]]
) -> None:
    """Near overflow a bound may be infinite or NaN, but never finite and wrong."""
    (A, x), (B, y) = a, b
    product = [
        x[0] * y[0] + x[1] * y[2],
        x[0] * y[1] + x[1] * y[3],
        x[2] * y[0] + x[3] * y[2],
        x[2] * y[1] + x[3] * y[3],
    ]
    for enclosure, member in [
        (A * B, [v * w for v, w in zip(x, y, strict=True)]),
        (A + B, [v + w for v, w in zip(x, y, strict=True)]),
        (A @ B, product),
    ]:
        for high, low, exact in zip(
            enclosure.upper().flatten().tolist(), enclosure.lower().flatten().tolist(), member, strict=True
        ):
            assert not math.isfinite(high) or Fraction(high) >= exact
            assert not math.isfinite(low) or Fraction(low) <= exact


def test_an_intermediate_overflow_does_not_give_a_finite_bound() -> None:
    """1.5e308 + 1.5e308 − 2.5e308 = 0.5e308, but the partial sum is already infinite."""
    A = torch.tensor([[1.5e308, 1.5e308, -1.25e308, -1.25e308]], dtype=torch.float64)
    ones = torch.ones(4, 1, dtype=torch.float64)
    exact = sum(map(Fraction, A[0].tolist()), Fraction(0))
    for sign in (1.0, -1.0):
        for enclosure in (Enclosure.exact(sign * A) @ ones, Enclosure.exact(sign * A).sum(-1)):
            assert not math.isfinite(enclosure.upper().item()) or Fraction(enclosure.upper().item()) >= sign * exact
            assert not math.isfinite(enclosure.lower().item()) or Fraction(enclosure.lower().item()) <= sign * exact


def test_radii_stay_near_the_unit_roundoff() -> None:
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(20, 20, generator=generator, dtype=torch.float64) for _ in range(2))
    product = Enclosure.exact(A) @ B
    assert (product.rad / (A.abs() @ B.abs())).max() < 25 * r.UNIT


def test_enclosure_products_need_matrices() -> None:
    with pytest.raises(InputError, match="row or column"):
        Enclosure.exact(torch.ones(3, dtype=torch.float64)) @ torch.ones(3, 3, dtype=torch.float64)


# --- NaN, infinity and wrong dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_operations_on_infinity_and_nan_give_no_finite_bounds(bad: float) -> None:
    for (upward, downward, _), other in itertools.product(OPERATIONS.values(), AWKWARD):
        for a, b in [(bad, other), (other, bad)]:
            if math.isinf(b) and upward is r.div_up:
                continue  # a finite number divided by infinity is zero, which has finite bounds
            high, low = upward(a, b).item(), downward(a, b).item()
            assert not (math.isfinite(high) and math.isfinite(low)), (a, b)
            if math.isnan(bad):
                assert math.isnan(high) or high == math.inf
                assert math.isnan(low) or low == -math.inf


def test_division_by_zero_gives_infinite_bounds() -> None:
    for a in AWKWARD:
        assert [r.div_up(a, zero).item() for zero in (0.0, -0.0)] == [math.inf, math.inf], a


def test_functions_at_infinity() -> None:
    assert r.exp_up(math.inf).item() == math.inf
    assert r.exp_up(710.0).item() == math.inf
    assert 0 < r.exp_up(-math.inf).item() <= 2 * TINY
    assert r.tanh_up(math.inf).item() == 1
    assert 0 <= r.tanh_up(-math.inf).item() <= 2 * TINY
    for function in (r.exp_up, r.tanh_up, r.sqrt_up):
        assert math.isnan(function(math.nan).item())
    assert math.isnan(r.sqrt_up(-1.0).item())


def test_other_dtypes_are_rejected() -> None:
    for bad in (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float16), 2**53 + 1):
        with pytest.raises(InputError):
            r.add_up(bad, 1.0)
