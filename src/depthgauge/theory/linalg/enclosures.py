"""Enclosures: midpoint–radius matrices, for results of either sign that pass through several operations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.theory.linalg.rounding import (
    TINY,
    UNIT,
    add_up,
    as_float64,
    gamma,
    mul_up,
    nonnegative_matmul_up,
    nonnegative_sum_up,
    sub_down,
)


@dataclass(frozen=True, eq=False, repr=False)
class Enclosure(ArrayRecord):
    """The set of all matrices M with |M − mid| ≤ rad entrywise.

    The result of an operation on enclosures contains the results for all members of the operands.
    """

    mid: Tensor
    rad: Tensor

    @staticmethod
    def exact(x: Tensor | float) -> "Enclosure":
        """Return the enclosure that contains only x."""
        mid = as_float64(x)
        return Enclosure(mid, torch.zeros_like(mid))

    @staticmethod
    def cat(parts: "Sequence[Enclosure]", dim: int = 0) -> "Enclosure":
        """Concatenate enclosures."""
        return Enclosure(torch.cat([p.mid for p in parts], dim), torch.cat([p.rad for p in parts], dim))

    @property
    def shape(self) -> torch.Size:
        """The shape of the members."""
        return self.mid.shape

    @property
    def mT(self) -> "Enclosure":
        """The enclosure of the transposes."""
        return Enclosure(self.mid.mT, self.rad.mT)

    def at(self, indices: Sequence[int]) -> "Enclosure":
        """Select entries of the first (batch) dimension."""
        return Enclosure(self.mid[list(indices)], self.rad[list(indices)])

    def upper(self) -> Tensor:
        """Return an entrywise upper bound on all members."""
        return add_up(self.mid, self.rad)

    def lower(self) -> Tensor:
        """Return an entrywise lower bound on all members."""
        return sub_down(self.mid, self.rad)

    def abs_up(self) -> Tensor:
        """Return an entrywise upper bound on |M| over all members M."""
        return add_up(self.mid.abs(), self.rad)

    def __neg__(self) -> "Enclosure":
        return Enclosure(-self.mid, self.rad)

    def __add__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        other = as_enclosure(other)
        mid = self.mid + other.mid
        return Enclosure(mid, add_up(add_up(self.rad, other.rad), mul_up(mid.abs(), UNIT)))

    def __sub__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        return self + (-as_enclosure(other))

    def __mul__(self, other: "Enclosure | Tensor | float") -> "Enclosure":
        other = as_enclosure(other)
        mid = self.mid * other.mid
        own = mul_up(mid.abs(), UNIT)
        crossed = add_up(mul_up(self.mid.abs(), other.rad), mul_up(self.rad, other.abs_up()))
        return Enclosure(mid, add_up(add_up(own, crossed), TINY))

    def __matmul__(self, other: "Enclosure | Tensor") -> "Enclosure":
        other = as_enclosure(other)
        k = self.shape[-1]
        if self.mid.ndim < 2 or other.mid.ndim < 2:
            raise InputError("a product of enclosures needs two matrices; give a vector a row or column dimension")
        mid = self.mid @ other.mid
        own = add_up(mul_up(gamma(k), other.mid.abs()), other.rad)
        rad = nonnegative_matmul_up(self.mid.abs(), own)
        if bool((self.rad != 0).any()):
            rad = add_up(rad, nonnegative_matmul_up(self.rad, other.abs_up()))
        return _without_overflow(mid, add_up(rad, k * TINY))

    def sum(self, dim: int | tuple[int, ...]) -> "Enclosure":
        """Return the enclosure of the sums over `dim`."""
        mid = self.mid.sum(dim=dim)
        count = max(self.mid.numel() // max(mid.numel(), 1), 1)
        rad = nonnegative_sum_up(add_up(self.rad, mul_up(gamma(count - 1), self.mid.abs())), dim)
        return _without_overflow(mid, rad)


def as_enclosure(x: Enclosure | Tensor | float) -> Enclosure:
    """Return x if it is an enclosure, and the enclosure that contains only x otherwise."""
    return x if isinstance(x, Enclosure) else Enclosure.exact(x)


def _without_overflow(mid: Tensor, rad: Tensor) -> Enclosure:
    """Return the enclosure (mid, rad), with radius +∞ where mid is not finite.

    A computed sum may overflow to ±∞ although the real sum is finite, and even if it has the other sign.
    """
    return Enclosure(torch.where(mid.isinf(), 0.0, mid), torch.where(mid.isfinite(), rad, math.inf))
