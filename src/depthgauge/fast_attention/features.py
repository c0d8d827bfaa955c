"""Symmetric features: the C(d+g, g) monomials of degree at most g, each once.

    (x·y)^k = Σ over monomials of degree k of multinomial · x^α · y^α

A block of degree k holds the products x_a1 x_a2 … x_ak with a1 ≤ a2 ≤ … ≤ ak in lexicographic order. Those that begin
with a are x_a times the tail of block k−1 whose indices are all at least a: every block is d scaled tails.
"""

import math
from functools import lru_cache
from itertools import combinations_with_replacement, groupby

import torch
from torch import Tensor


def feature_count(dim: int, degree: int) -> int:
    """C(d+g, g).

    >>> feature_count(64, 2)
    2145
    """
    return math.comb(dim + degree, degree)


@lru_cache(maxsize=256)
def _blocks(dim: int, degree: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """For every degree k = 1 … g: its block's length, and for every a where the tail of block k−1 begins."""
    blocks = []
    for k in range(1, degree + 1):
        before = math.comb(dim + k - 2, k - 1)
        starts = tuple(before - math.comb(dim - a + k - 2, k - 1) for a in range(dim))
        blocks.append((math.comb(dim + k - 1, k), starts))
    return tuple(blocks)


@lru_cache(maxsize=32)
def multinomials(dim: int, degree: int) -> tuple[Tensor, Tensor]:
    """For every feature the multinomial coefficient (float64) and the degree it belongs to."""
    values, degrees = [], []
    for k in range(degree + 1):
        for monomial in combinations_with_replacement(range(dim), k):
            repeats = math.prod(math.factorial(len(list(same))) for _, same in groupby(monomial))
            values.append(math.factorial(k) / repeats)
            degrees.append(k)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(degrees)


class FeatureBuffer:
    """Room for the features of one chunk of tokens, with the views that fill it made once.

    Tokens come last, [..., F, n], so that every product runs over contiguous memory.
    """

    def __init__(self, like: Tensor, degree: int) -> None:
        """For chunks of the shape, dtype and device of `like` [..., d, n]."""
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
        """The features of x [..., d, n]; they stay valid until the next call."""
        if self.out.shape[-2] > 1:
            self._linear.copy_(x)
        for scale, tail, target in self._steps:
            torch.mul(scale, tail, out=target)
        return self.out


class Featurizer:
    """`features` for many chunks of a few shapes, in buffers that are used again."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._buffers: dict[tuple[int, ...], FeatureBuffer] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """[..., d, n] → [..., F, n], valid until the next call with this shape."""
        key = tuple(x.shape)
        if key not in self._buffers:
            self._buffers[key] = FeatureBuffer(x, self.degree)
        return self._buffers[key].fill(x)


def features(x: Tensor, degree: int) -> Tensor:
    """All monomials up to a degree, tokens along the last axis: [..., d, n] → [..., C(d+g, g), n], the constant first.

    >>> features(torch.tensor([[2.0], [3.0]]), 2).flatten()
    tensor([1., 2., 3., 4., 6., 9.])
    """
    return FeatureBuffer(x, degree).fill(x)


def features_vjp(x: Tensor, phi: Tensor, grad: Tensor, degree: int) -> Tensor:
    """The gradient of ⟨grad, features(x)⟩ in x, [..., d, n]; `phi` is features(x), and `grad` is used up.

    Walks the blocks from the top: x_a · tail hands grad·tail to x_a and grad·x_a to the block below.
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
