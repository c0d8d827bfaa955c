"""The leading term: its tensors are enclosed, checked in rational arithmetic."""

from fractions import Fraction
from itertools import product

import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.linalg.bound_arithmetic import Outward, precision
from depthgauge.theory.linalg.enclosures import Enclosure

Case = tuple[Rank1Sum, torch.Tensor, torch.Tensor]


def drawn(seed: int, terms: int, d: int, exponents: tuple[int, int, int, int]) -> Case:
    """Factors and scalings with mantissas in [1, 2) and the given binary exponents."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((terms, d, d), (terms, d, d), (1, d), (1, d))
    L, R, left, right = (
        torch.ldexp(1 + torch.rand(shape, generator=generator, dtype=torch.float64), torch.tensor(power))
        for shape, power in zip(shapes, exponents, strict=True)
    )
    return Rank1Sum(Outward(), Enclosure.exact(L), Enclosure.exact(R)), left, right


def rationals(x: torch.Tensor) -> list[Fraction]:
    return [Fraction(value) for value in x.flatten().tolist()]


def is_enclosed(case: Case) -> bool:
    """Whether D_left T_0 (D_right ⊗ D_right) and T_0 are in their enclosures, without rounding in the comparison."""
    tensor, left, right = case
    coordinate = torch.tensor([0])
    scaled, plain = tensor.at(coordinate, left, right)[0], tensor.at(coordinate)[0]
    d, terms = left.shape[-1], tensor.terms
    L, R, rows, columns = (rationals(x) for x in (tensor.left.mid, tensor.right.mid[:, :, 0], left, right))
    for b, c, e in product(range(d), repeat=3):
        pairs = ((L[r * d * d + b * d + i], R[r * d + j]) for r in range(terms) for i, j in ((c, e), (e, c)))
        entry = sum((x * y for x, y in pairs), Fraction(0)) / 2
        for found, exact in ((scaled, entry * rows[b] * columns[c] * columns[e]), (plain, entry)):
            mid, rad = found.mid[b, c, e].item(), found.rad[b, c, e].item()
            if rad != torch.inf and abs(Fraction(mid) - exact) > Fraction(rad):
                return False
    return True


EXPONENTS = st.tuples(st.integers(-530, 300), st.integers(-530, 100), st.integers(-500, 300), st.integers(-300, 500))
# L ≈ 2⁻³⁰⁰, R ≈ 2⁻⁵²⁰, left ≈ 2⁻²²⁰: T·left is subnormal, and right² ≈ 2¹⁰⁰⁰ enlarges the bits it lost.
UNDERFLOW = (-300, -520, -220, 500)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    terms=st.integers(1, 4),
    d=st.integers(1, 3),
    exponents=st.just(UNDERFLOW) | EXPONENTS,
)
def test_tensors_are_enclosed_with_rounding_and_underflow(seed, terms, d, exponents):
    assert is_enclosed(drawn(seed, terms, d, exponents))


def test_no_terms_are_the_tensor_zero():
    A = Outward()
    none = Rank1Sum.join(A, 2, [])
    assert none.terms == 0
    assert float(none.at(torch.arange(2)).size().floats().max()) < 1e-300


def test_rho_is_an_upper_bound_and_nearly_exact():
    with precision(200):
        rho = 1 / (12 * arb(3).sqrt())
        found = arb(float(Outward().rho.floats()))
        assert found >= rho
        assert found <= rho * (1 + arb(2) ** -49)
