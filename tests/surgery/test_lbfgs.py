"""L-BFGS: exact on quadratics with the exact preconditioner, never uphill, and as good as an independent minimizer."""

import math
from itertools import pairwise

import pytest
import torch
from scipy.optimize import minimize as scipy_minimize
from torch import Tensor

from depthgauge.surgery.lbfgs import Evaluate, minimize


def quadratic(size: int) -> tuple[Tensor, Tensor, Evaluate]:
    """A positive definite matrix A, a point c, and the function (x − c)ᵀ A (x − c)."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    center = torch.randn(size, generator=generator, dtype=torch.float64)
    matrix = root @ root.T + 0.1 * torch.eye(size)

    def evaluate(x: Tensor) -> tuple[float, Tensor]:
        slope = 2 * matrix @ (x - center)
        return float((x - center) @ slope / 2), slope

    return matrix, center, evaluate


def test_one_step_solves_a_quadratic_with_its_inverse_as_preconditioner() -> None:
    matrix, center, evaluate = quadratic(8)
    start = torch.zeros(8, dtype=torch.float64)
    found, values = minimize(evaluate, lambda v: torch.linalg.solve(2 * matrix, v), start, 1)
    torch.testing.assert_close(found, center)
    assert len(values) == 2


def test_a_quadratic_is_solved_with_a_crude_preconditioner() -> None:
    matrix, center, evaluate = quadratic(6)
    start = torch.zeros(6, dtype=torch.float64)
    found, values = minimize(evaluate, lambda v: v / matrix.diagonal(), start, 500, tolerance=0.0)
    torch.testing.assert_close(found, center, rtol=1e-4, atol=1e-4)
    assert values == sorted(values, reverse=True)


def rosenbrock(x: Tensor) -> tuple[float, Tensor]:
    x = x.clone().requires_grad_()
    value = (100 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).sum()
    (gradient,) = torch.autograd.grad(value, x)
    return float(value.detach()), gradient


def test_the_minimum_of_a_nonconvex_function_is_found() -> None:
    start = torch.tensor([-1.2, 1.0, -0.5, 0.7], dtype=torch.float64)
    found, values = minimize(rosenbrock, lambda v: v / 1000, start, 500, tolerance=0.0)
    reference = scipy_minimize(lambda x: rosenbrock(torch.tensor(x))[0], start.numpy(), method="Nelder-Mead")
    assert values[-1] <= max(float(reference.fun), 1e-6) * 1.01
    assert values == sorted(values, reverse=True)
    assert rosenbrock(found)[0] == values[-1]


@pytest.mark.parametrize("preconditioner", [1e6, -1.0, 0.0])
def test_a_useless_preconditioner_never_increases_the_value(preconditioner: float) -> None:
    start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
    found, values = minimize(rosenbrock, lambda v: preconditioner * v, start, 5)
    assert values == sorted(values, reverse=True)
    assert rosenbrock(found)[0] == values[-1] <= rosenbrock(start)[0]


def test_infinite_values_shorten_the_step() -> None:
    def steep(x: Tensor) -> tuple[float, Tensor]:
        value = float(x[0])
        return (-math.log(value), -1 / x) if value > 0 else (math.inf, torch.full_like(x, math.nan))

    def barrier(x: Tensor) -> tuple[float, Tensor]:
        inside, slope = steep(x)
        return inside + float(x[0]), slope + 1

    found, values = minimize(barrier, lambda v: 100 * v, torch.tensor([3.0], dtype=torch.float64), 50, tolerance=0.0)
    assert float(found) == pytest.approx(1.0, abs=1e-2)
    assert all(map(math.isfinite, values))


def test_it_stops_when_steps_gain_little() -> None:
    _, values = minimize(rosenbrock, lambda v: v / 1e5, torch.tensor([-1.2, 1.0], dtype=torch.float64), 50, 0.3)
    gains = [(a - b) / a for a, b in pairwise(values)]
    assert gains[-1] < 0.3
    assert all(gain >= 0.3 for gain in gains[:-1])
    assert len(values) < 51


def test_no_iterations_evaluate_nothing() -> None:
    start = torch.ones(3, dtype=torch.float64)
    found, values = minimize(lambda x: pytest.fail("evaluated"), lambda v: v, start, 0)
    assert torch.equal(found, start)
    assert values == []
