"""The polynomials: the Remez exchange finds the best one, and the proved errors are true."""

import math
from decimal import Decimal, getcontext, localcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthgauge.fast_attention.bounds import (
    SMALLEST_INDEX,
    Minimax,
    _error_by_cells,
    at_index,
    degree_it_would_take,
    gradient_error,
    grid_bound,
    grid_index,
    guarantee,
    limit_index,
    minimax,
    moment_certificate,
    moment_terms,
    output_error,
    relative_error,
    suited,
)

# The largest B at relative errors 1e-2, 1e-3, 1e-4, found independently.
LARGEST = {
    1: (0.200226, 0.063253, 0.020000),
    2: (0.625261, 0.288826, 0.133924),
    3: (1.194068, 0.664884, 0.372760),
    4: (1.849329, 1.149883, 0.721491),
}


def sampled_error(coefficients: tuple[float, ...], bound: float, samples: int = 121) -> float:
    """Return max |p e^−t − 1| over many points, in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        worst = Decimal(0)
        for i in range(samples):
            t = Decimal(bound) * (2 * Decimal(i) / (samples - 1) - 1)
            value = sum((Decimal(c) * t**k if k else Decimal(c) for k, c in enumerate(coefficients)), Decimal(0))
            worst = max(worst, abs(value * (-t).exp() - 1))
        return float(worst)


def largest_bound(degree: int, epsilon: float) -> float:
    """Return the largest B at which the relative error is at most ε, rounded down by at most 1e-8 B."""
    low, high = 0.0, 16.0
    while high - low > 1e-8 * high:
        middle = (low + high) / 2
        try:
            is_met = minimax(degree, middle).error <= epsilon
        except ArithmeticError:
            is_met = False
        low, high = (middle, high) if is_met else (low, middle)
    return low


@pytest.mark.parametrize("degree", LARGEST)
def test_the_largest_bounds_are_the_known_ones(degree: int) -> None:
    for epsilon, known in zip((1e-2, 1e-3, 1e-4), LARGEST[degree], strict=True):
        assert minimax(degree, known - 1e-6).error <= epsilon < minimax(degree, known + 1e-6).error
    assert largest_bound(1, 1e-2) == pytest.approx(LARGEST[1][0], abs=1.01e-6)


def test_degree_zero_is_the_hyperbolic_tangent() -> None:
    # The best constant is 1/cosh B with error tanh B. The output error is tanh(B/2), the sharp constant of softmax.
    for bound in (1e-4, 0.1, 1.0):
        p = minimax(0, bound)
        assert p.coefficients[0] == pytest.approx(1 / math.cosh(bound), rel=1e-12)
        assert p.error == pytest.approx(math.tanh(bound), rel=1e-12)
        assert output_error(p.error) == pytest.approx(math.tanh(bound / 2), rel=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 4), st.floats(-18, 1.5))
def test_proved_errors_are_never_below_sampled_ones_and_hardly_above(degree: int, exponent: float) -> None:
    bound = 2.0**exponent
    p = minimax(degree, bound)
    sampled = sampled_error(p.coefficients, bound)
    assert sampled <= p.error <= sampled * (1 + 2e-2) + 1e-15
    slope = tuple(k * c for k, c in enumerate(p.coefficients))[1:] or (0.0,)
    assert sampled_error(slope, bound) <= p.slope_error * (1 + 1e-12) + 1e-15


@settings(max_examples=20)
@given(st.integers(1, 4), st.floats(-6, 1), st.integers(0, 2**32))
def test_no_nearby_polynomial_is_better(degree: int, exponent: float, seed: int) -> None:
    bound = 2.0**exponent
    p = minimax(degree, bound)
    step = torch.randn(degree + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    # Perturb in both directions, by an amount of the order of the error everywhere on the interval.
    moves = [p.error * float(s) / bound**k for k, s in enumerate(step)]
    for sign in (1, -1):
        other = tuple(c + sign * m for c, m in zip(p.coefficients, moves, strict=True))
        assert sampled_error(other, bound) > p.error * (1 - 2e-2)


def test_errors_of_arbitrary_polynomials_are_proved_too() -> None:
    generator = torch.Generator().manual_seed(0)
    for degree in range(5):
        for _ in range(8):
            drawn = torch.randn(degree + 1, generator=generator, dtype=torch.float64).tolist()
            bound = 0.7
            found = relative_error(drawn, bound)
            assert sampled_error(tuple(drawn), bound, 61) <= found
            cells = _error_by_cells([Decimal(c) for c in drawn], Decimal(bound))
            assert sampled_error(tuple(drawn), bound, 61) <= cells <= found * 1.05 + 1e-9
    assert getcontext().prec == 28  # the global decimal context is unchanged


@given(st.floats(1e-12, 16))
def test_grid_bounds_are_rounded_up(bound: float) -> None:
    index = grid_index(bound)
    assert grid_bound(index) >= bound
    assert index == SMALLEST_INDEX or grid_bound(index - 1) < bound


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("tolerance", [0.5, 1e-2, 1e-3, 1e-5])
def test_limits_are_the_largest_indices_that_meet_the_tolerance(tolerance: float, gradients: bool) -> None:
    limits = [limit_index(degree, tolerance, gradients) for degree in range(5)]
    for degree, index in enumerate(limits):
        if index < SMALLEST_INDEX:
            assert gradients  # the gradient of a constant is 0
            assert degree == 0
            continue
        assert guarantee(at_index(degree, index), gradients) <= tolerance
        assert guarantee(at_index(degree, index + 1), gradients) > tolerance
    assert limits == sorted(limits)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3])
def test_the_polynomial_used_is_narrow_where_the_tolerance_allows_it(tolerance: float) -> None:
    for degree in (1, 2, 3):
        last = limit_index(degree, tolerance)
        at_the_limit, inside = (suited(degree, index, 64, tolerance, False) for index in (last, last - 48))
        assert at_the_limit.bound == grid_bound(last)
        assert output_error(at_the_limit.error) <= tolerance
        assert output_error(inside.error) <= tolerance
        # Below the limit it is computed for scores of 2B/√d = B/4, where its error is below that of the minimax of B.
        narrow = grid_bound(last - 48) / 4
        assert relative_error(inside.coefficients, narrow) < at_index(degree, last - 48).error / 3
        assert sampled_error(inside.coefficients, inside.bound) <= inside.error
    assert suited(2, 0, 1, 0.5, False) == at_index(2, 0)  # width 1: no narrower interval


def test_gradients_cost_one_degree() -> None:
    # p′ is about as good as a polynomial of one degree less: at degree 2, p has error 1 % and p′ about 20 %.
    p = minimax(2, 0.6252)
    assert 0.1 < p.slope_error < 0.25
    assert gradient_error(p) > p.slope_error


def test_output_error_is_attained() -> None:
    # Mass a has the factor 1+ε, the rest 1−ε: the worst a attains the bound.
    for epsilon in (1e-6, 0.01, 0.3, 0.9):
        a = torch.linspace(0, 1, 200001, dtype=torch.float64)
        moved = a * (1 + epsilon) / (a * (1 + epsilon) + (1 - a) * (1 - epsilon)) - a
        assert float(moved.max()) <= output_error(epsilon) + 1e-15
        assert float(moved.max()) == pytest.approx(output_error(epsilon), rel=1e-6)
    assert output_error(1.0) == 1.0


def test_the_estimated_degree_is_off_by_at_most_one() -> None:
    for bound in (0.05, 0.3, 0.7, 1.2):
        found = next(g for g in range(6) if g == 5 or output_error(minimax(g, bound).error) <= 1e-3)
        assert abs(degree_it_would_take(bound, 1e-3) - found) <= 1
    assert degree_it_would_take(50.0, 1e-3) > 25


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_moment_certificate_covers_the_rest_of_the_series(degree: int) -> None:
    """For the series of e^t itself, and all scores t = B, the rest is all that is left; e^B bounds its last term."""
    p = Minimax(degree, 1.0, tuple(1 / math.factorial(k) for k in range(degree + 1)), 0.0, 0.0)
    terms, one = moment_terms(p, is_pure=True), torch.ones(1, dtype=torch.float64)
    for size in (0.1, 0.5, 1.0):
        value = sum(c * size**k for k, c in enumerate(p.coefficients))
        found = moment_certificate(terms, size * one, one, size**2 * one, value * one).item()
        assert 1 <= found / ((math.exp(size) - value) / value) < 2.5
