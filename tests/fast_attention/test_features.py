"""Symmetric features: their number, their meaning, and their gradient."""

import math

import pytest
import torch

from depthgauge.fast_attention.call import feature_count
from depthgauge.fast_attention.polynomial_path import Featurizer, features_vjp, multinomials


def test_the_number_of_features() -> None:
    assert feature_count(64, 2) == 2145
    assert feature_count(16, 2) == 153
    assert feature_count(64, 3) == 47905
    assert feature_count(7, 0) == 1


@pytest.mark.parametrize("dim", [1, 2, 5, 16])
@pytest.mark.parametrize("degree", range(5))
def test_features_are_the_powers_of_the_inner_product(dim: int, degree: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    x, y = (torch.randn(3, dim, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    values, degrees = multinomials(dim, degree)
    assert Featurizer(degree)(x).shape == (3, math.comb(dim + degree, degree), 4)
    for k in range(degree + 1):
        mine = torch.where(degrees == k, values, 0)[:, None]
        product = (Featurizer(degree)(x) * mine * Featurizer(degree)(y)).sum(1)
        torch.testing.assert_close(product, (x * y).sum(1) ** k, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dim", [1, 3, 6])
@pytest.mark.parametrize("degree", range(5))
def test_the_gradient_is_that_of_the_monomials(dim: int, degree: int) -> None:
    generator = torch.Generator().manual_seed(degree)
    x = torch.randn(2, dim, 3, generator=generator, dtype=torch.float64)
    grad = torch.randn(2, feature_count(dim, degree), 3, generator=generator, dtype=torch.float64)

    def written_out(x: torch.Tensor) -> torch.Tensor:
        blocks = [[torch.ones_like(x[:, 0])]]
        tails = [0]
        for _ in range(degree):
            block, firsts = [], []
            for a in range(dim):
                for monomial, first in zip(blocks[-1], tails, strict=True):
                    if len(blocks) == 1 or first >= a:
                        block.append(x[:, a] * monomial)
                        firsts.append(a)
            blocks.append(block)
            tails = firsts
        return torch.stack([monomial for block in blocks for monomial in block], dim=1)

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((written_out(leaf) * grad).sum() + 0 * leaf.sum(), leaf)
    torch.testing.assert_close(Featurizer(degree)(x), written_out(x))
    torch.testing.assert_close(features_vjp(x, Featurizer(degree)(x), grad.clone(), degree), expected)


def test_buffers_are_reused_without_mixing_chunks() -> None:
    make = Featurizer(2)
    x, y = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    first = make(x).clone()
    assert make(y).data_ptr() == make(x).data_ptr()
    torch.testing.assert_close(make(x), first)
    torch.testing.assert_close(make(y[..., :2]), Featurizer(2)(y[..., :2]))
