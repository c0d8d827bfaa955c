"""Verified spectral bounds, checked in rational arithmetic: t ≥ λ_max(S) iff tI − S is positive semidefinite."""

import math
from fractions import Fraction

import pytest
import torch
from arb_bounds import at_200_bits, is_upper
from drawn import LARGEST, TINY, matrices, seeded
from exact import Rows, bounds_eigenvalues, bounds_spectral_norm, is_positive_semidefinite, rationals
from flint import acb_mat, arb
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.theory.linalg.enclosures import Enclosure, frobenius_norm_up, largest_eigenvalue_up, spectral_norm_up

ENTRIES = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 1.0, -1.0]))


def orthogonal(n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


def is_norm_bound(bound: float, M: Rows) -> bool:
    return bound == math.inf or bounds_spectral_norm(Fraction(bound), M)


def is_tight_norm_bound(bound: float, M: Rows, relative: float = 1e-11, absolute: float = 1e-300) -> bool:
    """Return whether a slightly smaller number is not a bound."""
    return not bounds_spectral_norm(Fraction(bound) * (1 - Fraction(relative)) - Fraction(absolute), M)


def test_the_exact_checks_accept_and_reject() -> None:
    assert is_positive_semidefinite(rationals(torch.tensor([[2.0, 1.0], [1.0, 0.5]])))
    assert not is_positive_semidefinite(rationals(torch.tensor([[2.0, 1.0], [1.0, 0.4999]])))
    assert not is_positive_semidefinite(rationals(torch.tensor([[0.0, 1.0], [1.0, 0.0]])))
    assert bounds_spectral_norm(Fraction(5), rationals(torch.tensor([[3.0], [4.0]])))
    assert not bounds_spectral_norm(Fraction(5) - Fraction(1, 10**30), rationals(torch.tensor([[3.0], [4.0]])))


@given(M=matrices(st.integers(1, 5), st.integers(1, 5), ENTRIES))
def test_spectral_norm_is_an_upper_bound_and_tight(M: Tensor) -> None:
    bound = spectral_norm_up(M).item()
    assert is_norm_bound(bound, rationals(M))
    assert is_tight_norm_bound(bound, rationals(M))


@given(A=matrices(st.just(4), st.just(4), ENTRIES), shift=st.sampled_from([0.0, 30.0, -50.0, -1000.0]))
def test_largest_eigenvalue_is_an_upper_bound_and_tight(A: Tensor, shift: float) -> None:
    """A large negative shift gives λ < 0, where the bound divides by 1 + δ."""
    S = (A + A.mT) / 2 + shift * torch.eye(4, dtype=torch.float64)
    bound = largest_eigenvalue_up(S).item()
    assert bounds_eigenvalues(Fraction(bound), rationals(S))
    slack = Fraction(1e-12 * S.abs().max().item() + 1e-300)
    assert not bounds_eigenvalues(Fraction(bound) - slack, rationals(S))
    assert shift > -50 or bound < 0


@pytest.mark.parametrize("gap", [0.0, 1e-15, 1e-12, 1e-8])
def test_clustered_eigenvalues(gap: float) -> None:
    Q = orthogonal(6)
    S = Q @ torch.diag(torch.tensor([1.0, 1.0 - gap, 1.0 - 2 * gap, 0.5, 0.5, -1.0], dtype=torch.float64)) @ Q.mT
    S = (S + S.mT) / 2
    bound = Fraction(largest_eigenvalue_up(S).item())
    assert bounds_eigenvalues(bound, rationals(S))
    assert not bounds_eigenvalues(bound - Fraction(1e-13), rationals(S))


@pytest.mark.parametrize("seed", range(5))
def test_against_flints_enclosure_of_the_eigenvalues(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    S = A + A.mT
    roots = at_200_bits(lambda: [root.real for root in acb_mat(S.tolist()).eig()])
    bound = largest_eigenvalue_up(S).item()
    assert all(is_upper(bound, root) for root in roots)
    assert max(float(root) for root in roots) == pytest.approx(bound, rel=1e-13)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (6, 6), (1, 7), (7, 1)])
def test_rank_one_matrices_have_a_known_norm(shape: tuple[int, int]) -> None:
    """All entries are ±2⁻³, so the norm is 2⁻³ √(mn)."""
    m, n = shape
    signs = torch.outer(
        torch.tensor([(-1.0) ** i for i in range(m)], dtype=torch.float64), torch.ones(n, dtype=torch.float64)
    )
    bound = spectral_norm_up(signs / 8).item()
    assert is_upper(bound, at_200_bits(lambda: arb(m * n).sqrt() / 8))
    assert bound == pytest.approx(math.sqrt(m * n) / 8, rel=1e-14)


@pytest.mark.parametrize("exponent", [-1060, -1022, -700, -664, 0, 664, 1000, 1015])
def test_powers_of_two_scale_through(exponent: int) -> None:
    """The Hadamard matrix of order 4 has norm 2. Times 2^e it has norm 2^{e+1}, whose square may overflow."""
    H2 = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    M = torch.kron(H2, H2) * 2.0**exponent
    for bound in (spectral_norm_up(M).item(), spectral_norm_up(Enclosure.exact(M)).item()):
        assert Fraction(bound) >= Fraction(2) ** (exponent + 1)
        assert Fraction(bound) <= Fraction(2) ** (exponent + 1) * (1 + Fraction(1e-13)) + 4 * Fraction(TINY)


@given(
    M=seeded(4, 3),
    high=st.sampled_from([1e200, 1e-200, 1e300, 1e-310]),
    low=st.sampled_from([1.0, 1e-200, 1e-320]),
)
def test_entries_of_very_different_sizes(M: Tensor, high: float, low: float) -> None:
    scaled = M * torch.tensor([high, 1.0, low], dtype=torch.float64)
    bound = spectral_norm_up(scaled).item()
    assert is_norm_bound(bound, rationals(scaled))
    assert is_tight_norm_bound(bound, rationals(scaled))
    assert is_norm_bound(frobenius_norm_up(scaled).item(), rationals(scaled))


@given(M=matrices(elements=st.floats(-1e300, 1e300)))
def test_frobenius_norm(M: Tensor) -> None:
    squares = sum((x * x for row in rationals(M) for x in row), Fraction(0))
    bound = Fraction(frobenius_norm_up(M).item())
    assert bound**2 >= squares
    assert bound**2 <= squares * (1 + Fraction(1e-13)) + Fraction(1e-300)


@given(
    mid=matrices(st.just(3), st.just(3), ENTRIES),
    rad=matrices(st.just(3), st.just(3), st.floats(0, 1)),
    signs=st.lists(st.sampled_from([-1, 1]), min_size=9, max_size=9),
)
@example(mid=torch.ones(3, 3, dtype=torch.float64), rad=torch.ones(3, 3, dtype=torch.float64), signs=[1] * 9)
def test_every_member_of_an_enclosure_is_bounded(mid: Tensor, rad: Tensor, signs: list[int]) -> None:
    def member(enclosure: Enclosure, sign: list[list[int]]) -> Rows:
        rows = zip(rationals(enclosure.mid), rationals(enclosure.rad), sign, strict=True)
        return [[m + s * d for m, d, s in zip(*row, strict=True)] for row in rows]

    corner = [signs[0:3], signs[3:6], signs[6:9]]
    enclosure = Enclosure(mid, rad)
    assert is_norm_bound(spectral_norm_up(enclosure).item(), member(enclosure, corner))
    frobenius = Fraction(frobenius_norm_up(enclosure).item())
    assert frobenius**2 >= sum(x * x for row in member(enclosure, corner) for x in row)
    symmetric = Enclosure((mid + mid.mT) / 2, torch.maximum(rad, rad.mT))
    mirrored = [[corner[min(i, j)][max(i, j)] for j in range(3)] for i in range(3)]
    assert bounds_eigenvalues(Fraction(largest_eigenvalue_up(symmetric).item()), member(symmetric, mirrored))


def test_batches_are_bounded_matrix_by_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64)
    batch = batch * torch.logspace(-200, 200, 6, dtype=torch.float64).reshape(2, 3, 1, 1)
    together = spectral_norm_up(batch)
    assert together.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            assert is_norm_bound(together[i, j].item(), rationals(batch[i, j]))
            assert math.isclose(together[i, j].item(), spectral_norm_up(batch[i, j]).item(), rel_tol=1e-12)


def test_a_bad_basis_gives_a_looser_but_valid_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for wrong, singular and missing eigenvectors."""
    S = torch.tensor([[1.0, 2.0, 0.0], [2.0, -1.0, 1.0], [0.0, 1.0, 3.0]], dtype=torch.float64)
    exact = rationals(S)
    generator = torch.Generator().manual_seed(0)
    bases = [
        torch.eye(3, dtype=torch.float64),
        orthogonal(3) + 0.05 * torch.randn(3, 3, generator=generator, dtype=torch.float64),
        torch.ones(3, 3, dtype=torch.float64),
        torch.full((3, 3), math.nan, dtype=torch.float64),
        torch.zeros(3, 3, dtype=torch.float64),
    ]
    for basis in bases:
        monkeypatch.setattr(torch.linalg, "eigh", lambda _, basis=basis: (None, basis))
        assert bounds_eigenvalues(Fraction(largest_eigenvalue_up(S).item()), exact)
        below = S - 10 * torch.eye(3, dtype=torch.float64)  # negative definite: the branch λ < 0
        assert bounds_eigenvalues(Fraction(largest_eigenvalue_up(below).item()), rationals(below))
        assert bounds_spectral_norm(Fraction(spectral_norm_up(S).item()), exact)

    def fails(_: Tensor) -> None:
        raise torch.linalg.LinAlgError("no convergence")  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    assert bounds_eigenvalues(Fraction(largest_eigenvalue_up(S).item()), exact)


@pytest.mark.parametrize("length", [0.8, 0.95, 1.05, 1.2])
@pytest.mark.parametrize("eigenvalue", [3.0, -3.0])
def test_a_basis_of_the_wrong_length_is_accounted_for_with_either_sign(
    monkeypatch: pytest.MonkeyPatch, length: float, eigenvalue: float
) -> None:
    """With this basis only the division by 1 ± δ makes the bound valid, so dividing by the wrong one fails."""
    eye = torch.eye(3, dtype=torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", lambda _: (None, length * eye))
    bound = largest_eigenvalue_up(eigenvalue * eye).item()
    assert eigenvalue <= bound <= eigenvalue + 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [(0, 0), (0, 2), (2, 1)])
def test_matrices_with_infinity_or_nan_have_no_finite_bound(bad: float, position: tuple[int, int]) -> None:
    M = torch.ones(3, 3, dtype=torch.float64)
    M[position] = bad
    batch = torch.stack([M, torch.ones(3, 3, dtype=torch.float64)])
    for function in (spectral_norm_up, frobenius_norm_up, largest_eigenvalue_up):
        assert not math.isfinite(function(M).item())
        first, second = function(batch).tolist()
        assert not math.isfinite(first)
        assert 3 <= second < 3.0001  # the other matrix of the batch is not affected
        assert not math.isfinite(function(Enclosure(torch.ones_like(M), (M - 1).abs())).item())


@pytest.mark.parametrize("size", [LARGEST, LARGEST / 4, TINY, 3 * TINY, 0.0])
def test_the_ends_of_the_range(size: float) -> None:
    M = torch.full((3, 3), size, dtype=torch.float64)
    exact = 3 * Fraction(size)
    for function in (spectral_norm_up, largest_eigenvalue_up, frobenius_norm_up):
        bound = function(M).item()
        assert bound == math.inf or Fraction(bound) >= exact
        assert size > 1 or bound <= 1e-320
