"""Functions on a simplex, enclosed by the linear interpolation of their values at the vertices (docs/math.md §3.15).

A point of a simplex with vertices p_1, …, p_K is p = Σ_k λ_k p_k with λ_k ≥ 0 and Σ_k λ_k = 1. A function x is
enclosed as

    x(p) ∈ Σ_k λ_k x(p_k) + rest.

The rest is of second order in the size of the simplex, and zero for linear functions. For K = 1 the simplex is a point
and `at` encloses the value there.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Upper

Bilinear = Callable[[Any, Any], Any]


class Interpolated:
    """The values at the vertices, `at` [B, K, …], and `rest` [B, 1, …], for B simplices and any array of functions."""

    __slots__ = ("A", "at", "rest")

    def __init__(self, A: BoundArithmetic, at: Any, rest: Any) -> None:
        self.A, self.at, self.rest = A, at, rest

    @staticmethod
    def linear(A: BoundArithmetic, at: Any) -> "Interpolated":
        """Return linear functions, given by their values at the vertices."""
        return Interpolated(A, at, A.exact(torch.zeros(at.shape[0], 1, *at.shape[2:], dtype=torch.float64)))

    def each(self, function: Callable[[Any], Any]) -> "Interpolated":
        """Apply a linear function of arrays, such as a product with a constant matrix."""
        return Interpolated(self.A, function(self.at), function(self.rest))

    def __add__(self, other: "Interpolated") -> "Interpolated":
        return Interpolated(self.A, self.at + other.at, self.rest + other.rest)

    def __sub__(self, other: "Interpolated") -> "Interpolated":
        return Interpolated(self.A, self.at - other.at, self.rest - other.rest)

    def plus(self, constant: Any) -> "Interpolated":
        """Add constants."""
        return Interpolated(self.A, self.at + constant, self.rest)

    def ends(self) -> tuple[Upper, Upper]:
        """Bound the largest value at a vertex, and the negative of the smallest one, [B, 1, …]."""
        B, K, *inner = self.at.shape
        top, below = self.at.reshape(B, K, -1).ends()
        return top.reshape(B, 1, *inner), below.reshape(B, 1, *inner)

    def whole(self) -> tuple[Upper, Upper]:
        """Bound the function on the simplex from above, and its negative."""
        top, below = self.ends()
        return top + self.rest.top(), below + (-self.rest).top()

    def within(self, top: Upper, below: Upper) -> "Interpolated":
        """Use that −below ≤ x ≤ top is known: x − Σ λ_k x(p_k) is at most top − min_k x(p_k), and so on."""
        highest, lowest = self.ends()
        above, under = self.rest.top().least(top + lowest), (-self.rest).top().least(below + highest)
        return Interpolated(self.A, self.at, self.A.between(above, under))

    def times(self, other: "Interpolated", product: Bilinear = lambda x, y: x * y) -> "Interpolated":
        """Return x·y for a bilinear product.

        With x = a + e and y = b + h, where a and b are the interpolations, x·y = a·b + a·h + e·y and
        Σ_k λ_k a_k·b_k − a·b = Σ_{j<k} λ_j λ_k (a_j − a_k)·(b_j − b_k), where Σ_{j<k} λ_j λ_k ≤ (K − 1)/(2K).
        """
        A, K = self.A, self.at.shape[1]
        rest = product(A.between(*self.ends()), other.rest) + product(self.rest, A.between(*other.whole()))
        if K > 1:
            first, second = (torch.tensor(index) for index in zip(*combinations(range(K), 2), strict=True))
            edges = product(self.at[:, first] - self.at[:, second], other.at[:, first] - other.at[:, second])
            top, below = Interpolated(A, edges, rest).ends()
            most = A.exact(float(K - 1)) * A.inverse(A.exact(2.0 * K))
            rest = rest - A.between(top.most(0.0), below.most(0.0)) * most
        return Interpolated(A, product(self.at, other.at), rest)

    def composed(self, at: Any, slope: Any, curvature: Any) -> "Interpolated":
        """Return f(x).

        With x = a + e and ranges r of the values a_k: f(x) − f(a) = f'(·)e, and Σ_k λ_k f(a_k) − f(a) =
        ½ Σ_k λ_k f''(·)(a_k − a)², where Σ_k λ_k (a_k − a)² ≤ r²/4.

        Args:
            at: f at the vertices.
            slope: an enclosure of f' on all values of x.
            curvature: an enclosure of f'' on the interval of the values at the vertices.
        """
        top, below = self.ends()
        size = (top + below).most(0.0)
        spread = self.A.between(size * size * 0.125, size * 0.0)
        return Interpolated(self.A, at, slope * self.rest - curvature * spread)

    def exp(self) -> "Interpolated":
        """Return e^x."""
        at, slope, curvature = self._applied(self.A.exp)
        return self.composed(at, slope, curvature)

    def inverse(self, top: Upper, below: Upper) -> "Interpolated":
        """Return 1/x, where 0 < −below ≤ x ≤ top is known."""
        at, slope, curvature = self._applied(self.A.inverse, top, below)
        return self.composed(at, -(slope * slope), curvature * curvature * curvature * 2.0)

    def inverse_root(self, least: Any) -> "Interpolated":
        """Return 1/√x, where 0 < least ≤ x is known."""
        at, slope, curvature = self._applied(self.A.inverse_root, None, (-least).top())
        square = curvature * curvature
        return self.composed(at, slope * slope * slope * -0.5, square * square * curvature * 0.75)

    def _applied(
        self, function: Callable[[Any], Any], top: Upper | None = None, below: Upper | None = None
    ) -> list[Any]:
        """Apply a function to the values at the vertices, to the range of x, and to the range of these values.

        The ranges are made smaller by known bounds −below ≤ x ≤ top.
        """
        ranges = [
            self.A.between(high if top is None else high.least(top), low if below is None else low.least(below))
            for high, low in (self.whole(), self.ends())
        ]
        K, found = self.at.shape[1], function(self.A.cat([self.at, *ranges], 1))
        return [found[:, :K], found[:, K : K + 1], found[:, K + 1 :]]

    def activation(self, name: str) -> "Interpolated":
        """Return act(x).

        ReLU lies below its chord by at most min(u, −l) on [l, u] with l < 0 < u, and nowhere above it. GELU has
        −0.11 ≤ f'' ≤ 0.798 (docs/math.md §3.13).
        """
        A = self.A
        values, _ = A.activation(self.at, name)
        if name == "gelu":
            bends = A.between(A.upper(CURVATURE), A.upper(-LEAST_CURVATURE))
            return self.composed(values, A.activation(A.between(*self.whole()), name)[1], bends)
        high, low = self.whole()
        all_positive, all_negative = (A.activation(A.between(*pair), name)[1] for pair in ((high, low), (low, high)))
        slope = A.between((-all_negative + 1.0).top(), (-all_positive).top())
        top, below = self.ends()
        gap = top.least(below).most(0.0)
        return Interpolated(A, values, slope * self.rest - A.between(gap, gap * 0.0))


CURVATURE, LEAST_CURVATURE = 0.798, -0.11
"""Bounds on gelu''."""


def middle(x: Interpolated) -> Tensor:
    """Return approximate values in the middle of the simplex, [B, 1, …], 0 where they are not finite."""
    found = x.at.floats().mean(1, keepdim=True)
    return torch.where(found.isfinite(), found, 0.0)
