"""The leading term: the rounding errors of its tensors are within the slack, checked in rational arithmetic."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

from depthgauge.theory.certificates.arb_values import precision
from depthgauge.theory.certificates.box import RHO
from depthgauge.theory.certificates.lead import Rank1Sum, scale_tensor
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.rounding import TINY, gamma

Case = tuple[Rank1Sum, torch.Tensor, torch.Tensor]


def drawn(seed: int, terms: int, d: int, exponents: tuple[int, int, int, int]) -> Case:
    """Factors and scalings with mantissas in [1, 2) and the given binary exponents."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((terms, d, d), (terms, d, d), (1, d), (1, d))
    L, R, left, right = (
        torch.ldexp(1 + torch.rand(shape, generator=generator, dtype=torch.float64), torch.tensor(power))
        for shape, power in zip(shapes, exponents, strict=True)
    )
    return Rank1Sum(Enclosure.exact(L), Enclosure.exact(R)), left, right


def rationals(x: torch.Tensor) -> list[Fraction]:
    return [Fraction(value) for value in x.flatten().tolist()]


def distance_squared(case: Case) -> Fraction:
    """‖F − D_left T_0 (D_right ⊗ D_right)‖_F² for the coordinate a = 0, without rounding."""
    tensor, left, right = case
    computed = scale_tensor(tensor.slices(torch.tensor([0])), left, right)[0]
    d, terms = len(computed), tensor.terms
    L, R, rows, columns = (rationals(x) for x in (tensor.left.mid, tensor.right.mid[:, :, 0], left, right))
    total = Fraction(0)
    for b, c, e in product(range(d), repeat=3):
        pairs = ((L[r * d * d + b * d + i], R[r * d + j]) for r in range(terms) for i, j in ((c, e), (e, c)))
        entry = sum((x * y for x, y in pairs), Fraction(0)) / 2 * rows[b] * columns[c] * columns[e]
        total += (Fraction(computed[b, c, e].item()) - entry) ** 2
    return total


def relative_part_squared(case: Case) -> Fraction:
    """γ_{r+6}² Σ_r (‖D |L_r| D‖_F ‖D |R_r|‖₂)²; for one term, the square of the relative part of the slack."""
    tensor, left, right = case
    d, terms = left.shape[-1], tensor.terms
    L, R, rows, columns = (rationals(x) for x in (tensor.left.mid, tensor.right.mid[:, :, 0], left, right))
    total = Fraction(0)
    for r in range(terms):
        left_norm = sum((rows[b] * L[r * d * d + b * d + c] * columns[c]) ** 2 for b, c in product(range(d), repeat=2))
        total += left_norm * sum((columns[e] * R[r * d + e]) ** 2 for e in range(d))
    return Fraction(gamma(terms + 6)) ** 2 * total


def underflow_part(case: Case) -> Fraction:
    """2(r + 1)d²τ(1 + l)(1 + w)², the inequality in the docstring of `slack`."""
    tensor, left, right = case
    most_left, most_right = 1 + Fraction(left.max().item()), 1 + Fraction(right.max().item())
    return 2 * (tensor.terms + 1) * left.shape[-1] ** 2 * Fraction(TINY) * most_left * most_right**2


def slack_holds(case: Case) -> bool:
    tensor, left, right = case
    slack = tensor.slack(torch.tensor([0]), left, right).item()
    return not math.isfinite(slack) or distance_squared(case) <= Fraction(slack) ** 2


EXPONENTS = st.tuples(st.integers(-530, 300), st.integers(-530, 100), st.integers(-500, 300), st.integers(-300, 500))
# L ≈ 2⁻³⁰⁰, R ≈ 2⁻⁵²⁰, left ≈ 2⁻²²⁰: T·left is subnormal, and right² ≈ 2¹⁰⁰⁰ enlarges the bits it lost.
UNDERFLOW = (-300, -520, -220, 500)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), terms=st.integers(1, 4), d=st.integers(1, 3), exponents=EXPONENTS)
def test_slack_covers_rounding_and_underflow(seed, terms, d, exponents):
    assert slack_holds(drawn(seed, terms, d, exponents))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), d=st.integers(1, 3), exponents=st.just(UNDERFLOW) | EXPONENTS)
def test_the_inequality_for_rounding_and_underflow(seed, d, exponents):
    """For one term: ‖F − T̃‖_F ≤ relative + underflow, hence its square is at most 2(relative² + underflow²)."""
    case = drawn(seed, 1, d, exponents)
    assert distance_squared(case) <= 2 * (relative_part_squared(case) + underflow_part(case) ** 2)


@pytest.mark.parametrize("d", [1, 2, 3])
def test_underflow_exceeds_the_relative_rounding_error_and_is_covered(d):
    case = drawn(0, 1, d, UNDERFLOW)
    assert distance_squared(case) > 100 * relative_part_squared(case)
    assert distance_squared(case) <= underflow_part(case) ** 2
    assert slack_holds(case)


def test_rho_is_an_upper_bound_and_nearly_exact():
    with precision(200):
        rho = 1 / (12 * arb(3).sqrt())
        assert arb(RHO) >= rho
        assert arb(RHO) <= rho * (1 + arb(2) ** -50)
