"""Bounds on the sign norm against the exact value, enumerated in rational arithmetic."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from drawn import floats, matrices, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.theory.linalg import enclosures
from depthgauge.theory.linalg.enclosures import Enclosure

ENTRIES = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 1.0, -1.0]))


def exact_norm(M: Tensor) -> Fraction:
    """Return max xᵀMy over sign vectors exactly. For given x, the best y has the signs of the entries of xᵀM."""
    rows = [[Fraction(v) for v in row] for row in (M if M.shape[0] <= M.shape[1] else M.mT).tolist()]
    return max(
        sum(
            (abs(sum(s * v for s, v in zip(x, column, strict=True))) for column in zip(*rows, strict=True)), Fraction(0)
        )
        for x in itertools.product((1, -1), repeat=len(rows))
    )


def norm_by_enumeration(M: Tensor) -> float:
    """Return the same in floating point, with relative error below 1e-13; it is fast enough for d = 10."""
    x = torch.tensor(list(itertools.product((1.0, -1.0), repeat=M.shape[0])), dtype=torch.float64)
    return (x @ M).abs().sum(dim=-1).max().item()


@given(M=matrices(st.integers(1, 5), st.integers(1, 5), ENTRIES))
def test_every_bound_is_above_the_exact_norm(M: Tensor) -> None:
    exact = exact_norm(M)
    ones = torch.ones(M.shape[0], dtype=torch.float64), torch.ones(M.shape[1], dtype=torch.float64)
    bounds = {
        "absolute sum": enclosures.absolute_sum(M),
        "spectral": enclosures.scaled_spectral(M, *ones),
        "optimised": enclosures.scaled_spectral(M, *enclosures.best_scalings(M)),
        "enumerated": enclosures.enumerated(M),
        "kept": enclosures.sign_norm_up(M).value,
    }
    for name, bound in bounds.items():
        assert Fraction(bound.item()) >= exact, name
    assert bounds["kept"].item() <= bounds["absolute sum"].item()
    # Enumeration gives the norm itself, up to rounding.
    assert Fraction(bounds["enumerated"].item()) <= exact * (1 + Fraction(1, 10**13)) + Fraction(1, 10**260)


@given(
    M=matrices(st.just(4), st.just(3), floats(-1e100, 1e100)),
    rows=st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=4),
    columns=st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3),
)
def test_any_positive_scaling_gives_an_upper_bound(M: Tensor, rows: list[float], columns: list[float]) -> None:
    bound = enclosures.scaled_spectral(
        M, torch.tensor(rows, dtype=torch.float64), torch.tensor(columns, dtype=torch.float64)
    )
    assert Fraction(bound.item()) >= exact_norm(M)


@given(M=seeded(10, 10), sparse=st.booleans())
@settings(max_examples=20)
def test_ten_by_ten_by_enumeration(M: Tensor, sparse: bool) -> None:
    M = M * (M.abs() > 1) if sparse else M
    exact = norm_by_enumeration(M)
    slack = 1 - 1e-12
    ones = torch.ones(10, dtype=torch.float64)
    assert enclosures.absolute_sum(M).item() >= exact * slack
    assert enclosures.scaled_spectral(M, ones, ones).item() >= exact * slack
    optimised = enclosures.scaled_spectral(M, *enclosures.best_scalings(M)).item()
    assert optimised >= exact * slack
    assert optimised <= 1.783 * exact * (1 + 1e-2)  # Grothendieck's constant, and 1 % for incomplete convergence
    assert enclosures.sign_norm_up(M).value.item() == pytest.approx(exact, rel=1e-12)


@given(M=seeded(10, 14))
@settings(max_examples=15)
def test_wide_and_tall_matrices_above_the_enumerated_size(M: Tensor) -> None:
    """11 × 14 matrices and their transposes use the spectral bounds, which are at least the enumerated norm."""
    M = torch.cat([M, M[:1].flip(-1)])
    exact = norm_by_enumeration(M)
    for matrix in (M, M.mT):
        bound = enclosures.sign_norm_up(matrix)
        assert bound.value.item() >= exact * (1 - 1e-12)
        assert bound.value.item() <= 1.5 * exact
        assert bound.value < enclosures.absolute_sum(matrix)


def test_optimised_scalings_are_tighter_than_none_where_rows_differ() -> None:
    generator = torch.Generator().manual_seed(0)
    M = torch.randn(24, 24, generator=generator, dtype=torch.float64)
    M = M * torch.logspace(-2, 2, 24, dtype=torch.float64)[:, None]
    ones = torch.ones(24, dtype=torch.float64)
    plain, optimised = (
        enclosures.scaled_spectral(M, ones, ones),
        enclosures.scaled_spectral(M, *enclosures.best_scalings(M)),
    )
    assert optimised < 0.75 * plain
    assert optimised < 0.75 * enclosures.absolute_sum(M)
    kept = enclosures.sign_norm_up(M)
    assert kept.value == optimised
    # The scalings in the record prove the bound: they give the same value again.
    assert kept.row_scale is not None
    assert kept.column_scale is not None
    assert enclosures.scaled_spectral(M, kept.row_scale, kept.column_scale) == kept.value


def test_more_iterations_do_not_make_the_bound_much_larger() -> None:
    generator = torch.Generator().manual_seed(1)
    M = torch.randn(16, 16, generator=generator, dtype=torch.float64)
    few, many = (enclosures.sign_norm_up(M, iterations=k).value.item() for k in (5, 200))
    assert many <= few
    assert enclosures.sign_norm_up(M).value.item() <= 1.01 * many


def test_a_matrix_of_one_sign_is_its_absolute_sum() -> None:
    M = torch.rand(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bound = enclosures.sign_norm_up(M)
    exact = sum((Fraction(v) for v in M.flatten().tolist()), Fraction(0))
    assert torch.equal(bound.value, enclosures.absolute_sum(M))
    assert Fraction(bound.value.item()) >= exact
    assert Fraction(bound.value.item()) <= exact * (1 + Fraction(1, 10**12))


@pytest.mark.parametrize("n", [12, 16])
def test_hadamard_matrices_are_where_the_spectral_norm_wins(n: int) -> None:
    """For orthogonal rows of ±1, √(mn)·σ = n√n, which is smaller than the absolute sum by a factor of √n."""
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < 16:
        H = torch.cat([torch.cat([H, H], -1), torch.cat([H, -H], -1)])
    H = H[:n]
    bound = enclosures.sign_norm_up(H).value.item()
    assert bound >= enclosures.enumerated(H).item() * (1 - 1e-12)
    assert bound <= math.sqrt(16 * n) * 4 * (1 + 1e-9)
    assert enclosures.absolute_sum(H).item() >= 16 * n


@given(
    mid=matrices(st.just(3), st.just(3), ENTRIES),
    rad=matrices(st.just(3), st.just(3), st.floats(0, 1)),
    corner=st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=9, max_size=9),
)
def test_every_member_of_an_enclosure_is_bounded(mid: Tensor, rad: Tensor, corner: list[float]) -> None:
    enclosure = Enclosure(mid, rad)
    member = [
        [Fraction(m) + Fraction(c) * Fraction(d) for m, c, d in zip(*rows, strict=True)]
        for rows in zip(mid.tolist(), torch.tensor(corner).reshape(3, 3).tolist(), rad.tolist(), strict=True)
    ]
    exact = max(
        sum((abs(sum(s * v for s, v in zip(x, col, strict=True))) for col in zip(*member, strict=True)), Fraction(0))
        for x in itertools.product((1, -1), repeat=3)
    )
    ones = torch.ones(3, dtype=torch.float64)
    for bound in (
        enclosures.absolute_sum(enclosure),
        enclosures.scaled_spectral(enclosure, ones, 2 * ones),
        enclosures.enumerated(enclosure),
        enclosures.sign_norm_up(enclosure).value,
    ):
        assert Fraction(bound.item()) >= exact


@pytest.mark.parametrize("size", [4, 12])
def test_batches_and_float32(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(2, 3, size, size, generator=generator, dtype=torch.float32)
    batch[0, 0, 1] = 0.0  # a row of zeros must not break the scaling
    together = enclosures.sign_norm_up(batch).value
    assert together.shape == (2, 3)
    assert together.dtype == torch.float64
    for i, j in itertools.product(range(2), range(3)):
        exact = norm_by_enumeration(batch[i, j].double())
        assert together[i, j].item() >= exact * (1 - 1e-12)
        assert together[i, j].item() <= 1.5 * exact


@pytest.mark.parametrize("size", [3, 12])
@pytest.mark.parametrize("scale", [1e-200, 1e200, 1e-310])
def test_sizes_far_from_one(size: int, scale: float) -> None:
    M = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale
    bound, exact = enclosures.sign_norm_up(M).value.item(), norm_by_enumeration(M)
    assert bound >= exact * (1 - 1e-12)
    assert bound <= 1.5 * exact


@pytest.mark.parametrize("size", [3, 12])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_matrices_with_infinity_or_nan_have_the_bound_infinity(size: int, bad: float) -> None:
    M = torch.ones(2, size, size, dtype=torch.float64)
    M[0, 1, 2] = bad
    first, second = enclosures.sign_norm_up(M).value.tolist()
    assert first == math.inf
    assert second == pytest.approx(size * size)


def test_zero_matrices() -> None:
    for size in (3, 12):
        assert 0 <= enclosures.sign_norm_up(torch.zeros(size, size, dtype=torch.float64)).value.item() < 1e-300


def test_sign_vectors_are_complete_up_to_an_overall_sign() -> None:
    for m in (1, 2, 5):
        rows = {tuple(row) for row in enclosures.sign_vectors(m).tolist()}
        everything = set(itertools.product((1.0, -1.0), repeat=m))
        assert len(rows) == 2 ** (m - 1)
        assert rows | {tuple(-v for v in row) for row in rows} == everything


def test_enumeration_rejects_large_matrices() -> None:
    with pytest.raises(InputError, match="at most 20"):
        enclosures.enumerated(torch.ones(21, 21, dtype=torch.float64))
