"""Norms against loops in plain Python, and the inequalities for the residual."""

import math

import numpy as np
import pytest
import sharp_constants as sharp
import torch
from drawn import matrices, probability
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.theory.linalg import norms

ROUNDING = 1 + 1e-12


def naive(A: Tensor) -> dict[str, float]:
    """Compute all norms by loops over the entries."""
    rows = [[abs(x) for x in row] for row in A.tolist()]
    columns = list(zip(*rows, strict=True))
    largest_row, largest_column = max(map(math.fsum, rows)), max(map(math.fsum, columns))
    return {
        "max_norm": max(map(max, rows)),
        "entry_sum_norm": math.fsum(x for row in rows for x in row),
        "column_norm": largest_column,
        "row_norm": largest_row,
        "composite_norm": math.sqrt(largest_column * largest_row),
        "frobenius_norm": math.sqrt(math.fsum(x * x for row in rows for x in row)),
    }


@given(A=matrices())
def test_norms_agree_with_loops(A: Tensor) -> None:
    for name, expected in naive(A).items():
        assert getattr(norms, name)(A).item() == pytest.approx(expected, rel=1e-12, abs=1e-300), name


def test_norms_agree_with_numpy() -> None:
    A = np.random.default_rng(0).normal(size=(5, 7))
    given_A = torch.from_numpy(A)
    assert norms.column_norm(given_A).item() == pytest.approx(np.linalg.norm(A, 1))
    assert norms.row_norm(given_A).item() == pytest.approx(np.linalg.norm(A, np.inf))
    assert norms.frobenius_norm(given_A).item() == pytest.approx(np.linalg.norm(A, "fro"))
    assert norms.entry_sum_norm(given_A).item() == pytest.approx(np.abs(A).sum())
    assert norms.max_norm(given_A).item() == np.abs(A).max()


@pytest.mark.parametrize("name", naive(torch.ones(1, 1)))
def test_norms_take_batches(name: str) -> None:
    batch = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = getattr(norms, name)(batch)
    assert together.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            assert together[i, j].item() == pytest.approx(naive(batch[i, j])[name])


@given(A=matrices(st.just(3), st.just(4)), B=matrices(st.just(4), st.just(2)))
def test_the_composite_norm_bounds_the_spectral_norm_and_is_submultiplicative(A: Tensor, B: Tensor) -> None:
    assert torch.linalg.matrix_norm(A, 2) <= norms.composite_norm(A) * ROUNDING + 1e-12
    assert norms.composite_norm(A @ B) <= norms.composite_norm(A) * norms.composite_norm(B) * ROUNDING + 1e-12


# --- the residual --------------------------------------------------------------------------------------------------


@given(Z=matrices())
def test_midrange_residual_by_its_definition(Z: Tensor) -> None:
    expected = Z.numpy() - (Z.numpy().max(0) + Z.numpy().min(0)) / 2
    assert np.allclose(norms.residual(Z).numpy(), expected, atol=1e-14)
    half_ranges = (Z.amax(0) - Z.amin(0)) / 2
    assert torch.allclose(norms.residual(Z).abs().amax(0), half_ranges, atol=1e-14)


@given(Z=matrices())
def test_mean_residual_by_its_definition(Z: Tensor) -> None:
    assert np.allclose(norms.residual(Z, "mean").numpy(), Z.numpy() - Z.numpy().mean(0), atol=1e-14)


@given(Z=matrices(columns=st.just(3)), y=st.lists(st.floats(-10, 10), min_size=3, max_size=3))
def test_no_other_row_gives_a_smaller_residual(Z: Tensor, y: list[float]) -> None:
    """In every column, the mid-range minimises the largest absolute entry and the mean minimises the sum of squares."""
    other = Z - torch.tensor(y, dtype=torch.float64)
    assert bool((norms.residual(Z).abs().amax(0) <= other.abs().amax(0) + 1e-13).all())
    assert bool((norms.residual(Z, "mean").square().sum(0) <= other.square().sum(0) * ROUNDING + 1e-11).all())


@given(Z=matrices(columns=st.just(3)), c=st.lists(st.floats(-10, 10), min_size=3, max_size=3))
@pytest.mark.parametrize("center", norms.CENTERS)
def test_the_residual_does_not_depend_on_a_common_row(center: norms.Center, Z: Tensor, c: list[float]) -> None:
    shifted = Z + torch.tensor(c, dtype=torch.float64)
    assert torch.allclose(norms.residual(shifted, center), norms.residual(Z, center), atol=1e-13)


def test_midrange_does_not_overflow_where_the_sum_would() -> None:
    Z = torch.tensor([[1.5e308], [1.25e308]], dtype=torch.float64)
    assert norms.residual(Z).flatten().tolist() == [0.125e308, -0.125e308]


def test_an_unknown_center_is_named() -> None:
    with pytest.raises((InputError, TypeError), match="midrange"):
        norms.center_row(torch.ones(2, 2), "midrnage")  # type: ignore[arg-type]


@given(A=matrices(st.just(4), st.just(3)), B=matrices(st.just(4), st.just(3)), near=st.booleans())
def test_the_residual_changes_by_at_most_twice_the_change_of_the_matrix(A: Tensor, B: Tensor, near: bool) -> None:
    B = A + B / 100 if near else B
    epsilon = norms.max_norm(A - B).item()
    moved = norms.max_norm(norms.residual(A) - norms.residual(B)).item()
    assert moved <= sharp.residual_shift_bound(epsilon) * ROUNDING + 1e-13
    change = abs(norms.max_norm(norms.residual(A)) - norms.max_norm(norms.residual(B))).item()
    assert change <= sharp.residual_norm_shift_bound(epsilon) * ROUNDING + 1e-13


@given(
    P=matrices(st.just(4), st.just(4), st.floats(0, 1)),
    Y=matrices(st.just(4), st.just(3)),
    V=matrices(st.just(3), st.just(3)),
)
def test_averaging_and_projecting_grow_by_at_most_the_column_norm(P: Tensor, Y: Tensor, V: Tensor) -> None:
    P = probability(P)
    y_max, v_col = norms.max_norm(Y).item(), norms.column_norm(V).item()
    assert norms.max_norm(P @ Y).item() <= y_max * ROUNDING
    assert norms.max_norm(P @ Y @ V).item() <= sharp.projected_max_bound(y_max, v_col) * ROUNDING + 1e-13


def test_the_attained_cases_refute_smaller_constants() -> None:
    A, B = (torch.tensor([column], dtype=torch.float64).mT for column in ([2.0, 0.0, -2.0], [1.0, 1.0, -3.0]))
    moved = norms.max_norm(norms.residual(A) - norms.residual(B)).item()
    assert moved == sharp.residual_shift_bound(norms.max_norm(A - B).item()) == 2.0
    assert moved > 0.97 * sharp.residual_shift_bound(1.0)

    wide = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    change = norms.max_norm(norms.residual(3 * wide)) - norms.max_norm(norms.residual(2 * wide))
    assert change.item() == sharp.residual_norm_shift_bound(1.0)
    assert change.item() > 0.97 * sharp.residual_norm_shift_bound(1.0)

    Y, V = torch.ones(2, 5, dtype=torch.float64), torch.ones(5, 5, dtype=torch.float64)
    value = norms.max_norm(torch.eye(2, dtype=torch.float64) @ Y @ V).item()
    assert value == sharp.projected_max_bound(1.0, norms.column_norm(V).item()) == 5.0
    assert value > norms.max_norm(Y) * norms.max_norm(V)  # ‖AB‖max ≤ ‖A‖max‖B‖max is false


def test_the_bound_on_norms_fails_about_the_mean() -> None:
    """About the mean, the norm of the residual can change by more than ε. This is why mid-range is the default."""
    A = torch.tensor([[1.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    B = torch.tensor([[2.0], [-1.0], [-1.0], [-1.0]], dtype=torch.float64)
    assert norms.max_norm(A - B) == 1
    change = norms.max_norm(norms.residual(B, "mean")) - norms.max_norm(norms.residual(A, "mean"))
    assert change > sharp.residual_norm_shift_bound(1.0) * 1.2


@given(Z=matrices())
def test_both_centers_agree_on_two_tokens(Z: Tensor) -> None:
    assume(Z.shape[0] >= 2)
    assert torch.allclose(norms.residual(Z[:2]), norms.residual(Z[:2], "mean"), atol=1e-14)
