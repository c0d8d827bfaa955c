"""Symmetric features: the C(d+g, g) monomials of degree at most g, each once.

    (x·y)^k = Σ over monomials α of degree k of multinomial(α) · x^α · y^α

The block of degree k holds the products x_a1 x_a2 … x_ak with a1 ≤ a2 ≤ … ≤ ak in lexicographic order. The products
that begin with a are x_a times the tail of block k−1 whose indices are all at least a, so a block consists of d scaled
tails.
"""

import math
from functools import lru_cache
from itertools import combinations_with_replacement, groupby

import torch
from torch import Tensor

from depthgauge.fast_attention.theory.cost import feature_count


@lru_cache(maxsize=256)
def _blocks(dim: int, degree: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return for every degree k = 1 … g the length of its block, and for every a the start of the tail of block k−1."""
    blocks = []
    for k in range(1, degree + 1):
        before = math.comb(dim + k - 2, k - 1)
        starts = tuple(before - math.comb(dim - a + k - 2, k - 1) for a in range(dim))
        blocks.append((math.comb(dim + k - 1, k), starts))
    return tuple(blocks)


def multinomials(dim: int, degree: int) -> tuple[Tensor, Tensor]:
    """Return the multinomial coefficient (float64) and the degree of every feature: two [F]."""
    values, degrees = [], []
    for k in range(degree + 1):
        for monomial in combinations_with_replacement(range(dim), k):
            repeats = math.prod(math.factorial(len(list(same))) for _, same in groupby(monomial))
            values.append(math.factorial(k) / repeats)
            degrees.append(k)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(degrees)


class FeatureBuffer:
    """A buffer for the features of one chunk of tokens, and the views that fill it.

    Tokens are the last axis, [..., F, n], so that every product runs over contiguous memory.
    """

    def __init__(self, like: Tensor, degree: int) -> None:
        """Allocate a buffer for chunks of the shape, dtype and device of `like` [..., d, n]."""
        dim, n = like.shape[-2:]
        self.out = like.new_empty(*like.shape[:-2], feature_count(dim, degree), n)
        self.out[..., 0, :] = 1
        self._linear = self.out[..., 1 : dim + 1, :]
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        end = 1
        previous = self.out[..., :1, :]
        for k, (length, starts) in enumerate(_blocks(dim, degree), start=1):
            block, at = self.out[..., end : end + length, :], 0
            for a, start in enumerate(starts if k > 1 else ()):
                tail = previous[..., start:, :]
                self._steps.append((self._linear[..., a : a + 1, :], tail, block[..., at : at + tail.shape[-2], :]))
                at += tail.shape[-2]
            previous, end = block, end + length

    def fill(self, x: Tensor) -> Tensor:
        """Return the features of x [..., d, n]. They are valid until the next call."""
        if self.out.shape[-2] > 1:
            self._linear.copy_(x)
        for scale, tail, target in self._steps:
            torch.mul(scale, tail, out=target)
        return self.out


class Featurizer:
    """All monomials up to a degree, the constant first, of many chunks of a few shapes, in reused buffers.

    >>> Featurizer(2)(torch.tensor([[2.0], [3.0]])).flatten()
    tensor([1., 2., 3., 4., 6., 9.])
    """

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._buffers: dict[tuple[int, ...], FeatureBuffer] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the features [..., F, n] of x [..., d, n]. They are valid until the next call with this shape."""
        key = tuple(x.shape)
        if key not in self._buffers:
            self._buffers[key] = FeatureBuffer(x, self.degree)
        return self._buffers[key].fill(x)


def features_vjp(x: Tensor, phi: Tensor, grad: Tensor, degree: int) -> Tensor:
    """Return the gradient of ⟨grad, φ(x)⟩ with respect to x, [..., d, n]. It overwrites `grad`.

    `phi` is φ(x), the features. The blocks are visited from the highest degree down: the product x_a · tail adds
    grad·tail to the gradient of x_a and grad·x_a to that of the block below.
    """
    dim = x.shape[-2]
    out = torch.zeros_like(x)
    ends = [1]
    for length, _ in _blocks(dim, degree):
        ends.append(ends[-1] + length)
    for k in range(degree, 0, -1):
        begin, previous = ends[k - 1], ends[k - 2] if k > 1 else 0
        at = begin
        for a, start in enumerate(_blocks(dim, degree)[k - 1][1]):
            size = begin - previous - start
            part = grad[..., at : at + size, :]
            out[..., a, :] += (part * phi[..., previous + start : begin, :]).sum(-2)
            grad[..., previous + start : begin, :] += part * x[..., a : a + 1, :]
            at += size
    return out
