"""Functions on a simplex, enclosed by the linear interpolation of their values at the vertices (docs/math.md §3.15).

A point of a simplex with vertices p_1, …, p_K is p = Σ_k λ_k p_k with λ_k ≥ 0 and Σ_k λ_k = 1. A function x is
enclosed as

    x(p) = Σ_k λ_k x(p_k) + Σ_g ε_g(p) noise_g + rest,   |ε_g| ≤ 1.

Noise and rest are of second order in the size of the simplex, and zero for linear functions. The symbols ε_g are those
of all functions on the simplex, so that errors of one cause cancel as far as they are linear. For K = 1 the simplex is
a `Point`, where `at` encloses the value.
"""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from depthgauge.theory.linalg.bound_arithmetic import CURVATURE, BoundArithmetic, Upper

Bilinear = Callable[[Any, Any], Any]
Known = Callable[[], tuple[Upper, Upper]]
"""Returns known bounds (top, below): −below ≤ x ≤ top."""


class Interpolated:
    """Functions on B simplices: `at` [B, K, …], `noise` [B, G, …] or None, and `rest` [B, 1, …]."""

    __slots__ = ("A", "at", "noise", "rest")

    def __init__(self, A: BoundArithmetic, at: Any, rest: Any, noise: Any = None) -> None:
        self.A, self.at, self.rest, self.noise = A, at, rest, noise

    @staticmethod
    def linear(A: BoundArithmetic, at: Any) -> "Interpolated":
        """Return linear functions, given by their values at the vertices."""
        if at.shape[1] == 1:
            return Point(A, at)
        return Interpolated(A, at, A.exact(torch.zeros(at.shape[0], 1, *at.shape[2:], dtype=torch.float64)))

    def each(self, function: Callable[[Any], Any]) -> "Interpolated":
        """Apply a linear function of arrays, such as a product with a constant matrix."""
        noise = None if self.noise is None else function(self.noise)
        return Interpolated(self.A, function(self.at), function(self.rest), noise)

    def __add__(self, other: "Interpolated") -> "Interpolated":
        return Interpolated(self.A, self.at + other.at, self.rest + other.rest, _sum(self.noise, other.noise))

    def __sub__(self, other: "Interpolated") -> "Interpolated":
        return self + other.each(lambda e: -e)

    def plus(self, constant: Any) -> "Interpolated":
        """Add constants."""
        return Interpolated(self.A, self.at + constant, self.rest, self.noise)

    def ends(self) -> tuple[Upper, Upper]:
        """Bound the largest value at a vertex, and the negative of the smallest one, [B, 1, …]."""
        B, K, *inner = self.at.shape
        top, below = self.at.reshape(B, K, -1).ends()
        return top.reshape(B, 1, *inner), below.reshape(B, 1, *inner)

    def away(self) -> tuple[Upper, Upper]:
        """Bound x − Σ λ_k x(p_k), the noise and the rest together, from above, and its negative."""
        top, below = self.rest.top(), (-self.rest).top()
        if self.noise is None:
            return top, below
        swing = self.noise.size().sum(1)[:, None]
        return top + swing, below + swing

    def whole(self) -> tuple[Upper, Upper]:
        """Bound the function on the simplex from above, and its negative."""
        (top, below), (more, less) = self.ends(), self.away()
        return top + more, below + less

    def reach(self) -> tuple[Upper, Upper]:
        """Bound all numbers between the function and its interpolation, where a mean-value theorem has its slope."""
        (top, below), (more, less) = self.ends(), self.away()
        return top + more.most(0.0), below + less.most(0.0)

    def within(self, known: Known) -> "Interpolated":
        """Use that −below ≤ x ≤ top for the pair (top, below) that `known` returns.

        x − Σ λ_k x(p_k) is at most top − min_k x(p_k), and so on. Where this is more than is known of the noise and
        the rest together, it replaces both.
        """
        top, below = known()
        A, (highest, lowest), (above, under) = self.A, self.ends(), self.away()
        given = A.between((top + lowest).least(above), (below + highest).least(under))
        if self.noise is None:
            return Interpolated(A, self.at, given)
        width, before = (given - given.floats()).size().floats(), above.floats() + under.floats()
        is_kept = 2 * width >= before * 0.999
        nothing = A.exact(torch.zeros(1, dtype=torch.float64))
        return Interpolated(A, self.at, A.where(is_kept, self.rest, given), A.where(is_kept, self.noise, nothing))

    def settled(self) -> "Interpolated":
        """Count the noise to the rest."""
        return self if self.noise is None else Interpolated(self.A, self.at, self.A.between(*self.away()))

    def renewed(self) -> "Interpolated":
        """Make the rest of each function a symbol of its own, so that what follows is linear in it."""
        middle = self.rest.floats()
        size = self.A.interval((self.rest - middle).size())
        each = torch.eye(math.prod(middle.shape[1:]), dtype=torch.float64).reshape(-1, *middle.shape[2:])
        made = size * each[None]
        noise = made if self.noise is None else self.A.cat([self.noise, made], 1)
        return Interpolated(self.A, self.at, self.A.exact(middle), noise)

    def times(self, other: "Interpolated", product: Bilinear = lambda x, y: x * y) -> "Interpolated":
        """Return x·y for a bilinear product.

        With x = a + u and y = b + w, where a and b are the interpolations, x·y = a·b + a·w + u·b + u·w and
        Σ_k λ_k a_k·b_k − a·b = Σ_{j<k} λ_j λ_k (a_j − a_k)·(b_j − b_k), where Σ_{j<k} λ_j λ_k ≤ (K − 1)/(2K).
        The noise is multiplied by the middles of the ranges of a and b; what is left goes to the rest.
        """
        A, K = self.A, self.at.shape[1]
        a, b = (A.between(*x.ends()) for x in (self, other))
        a_mid, b_mid = (A.exact(x.floats()) for x in (a, b))
        u, w = (A.between(*x.away()) for x in (self, other))
        rest = product(a_mid, other.rest) + product(self.rest, b_mid) + product(a - a_mid, w)
        rest = rest + product(u, b - b_mid + w)
        noise = _sum(
            None if self.noise is None else product(self.noise, b_mid),
            None if other.noise is None else product(a_mid, other.noise),
        )
        if K > 1:
            first, second = (torch.tensor(index) for index in zip(*combinations(range(K), 2), strict=True))
            edges = product(self.at[:, first] - self.at[:, second], other.at[:, first] - other.at[:, second])
            top, below = Interpolated(A, edges, rest).ends()
            most = A.exact(float(K - 1)) * A.inverse(A.exact(2.0 * K))
            rest = rest - A.between(top.most(0.0), below.most(0.0)) * most
        return Interpolated(A, product(self.at, other.at), rest, noise)

    def composed(self, at: Any, slope: Any, curvature: Any) -> "Interpolated":
        """Return f(x).

        With x = a + u and ranges r of the values a_k: f(x) − f(a) = f'(·)u, and Σ_k λ_k f(a_k) − f(a) =
        ½ Σ_k λ_k f''(·)(a_k − a)², where Σ_k λ_k (a_k − a)² ≤ r²/4.

        Args:
            at: f at the vertices.
            slope: an enclosure of f' on all numbers between x and a.
            curvature: an enclosure of f'' on the interval of the values at the vertices.
        """
        top, below = self.ends()
        size = (top + below).most(0.0)
        spread = self.A.between(size * size * 0.125, size * 0.0)
        return self._followed(at, slope, curvature * spread)

    def _followed(self, at: Any, slope: Any, gap: Any) -> "Interpolated":
        """Return f(x) for Σ_k λ_k f(a_k) − f(a) in `gap`."""
        middle = self.A.exact(slope.floats())
        rest = middle * self.rest + (slope - middle) * self.A.between(*self.away()) - gap
        return Interpolated(self.A, at, rest, None if self.noise is None else self.noise * middle)

    def exp(self) -> "Interpolated":
        """Return e^x."""
        return self._image(self.A.exp, lambda slope, curvature: (slope, curvature))

    def inverse(self, known: Known) -> "Interpolated":
        """Return 1/x, where 0 < −below ≤ x ≤ top for the pair (top, below) that `known` returns."""
        return self._image(self.A.inverse, lambda s, c: (-(s * s), c * c * c * 2.0), known)

    def inverse_root(self, least: Any) -> "Interpolated":
        """Return 1/√x, where 0 < least ≤ x is known."""
        return self._image(
            self.A.inverse_root,
            lambda s, c: (s * s * s * -0.5, c * c * (c * c) * c * 0.75),
            lambda: (self.A.upper(math.inf), (-least).top()),
        )

    def _image(
        self,
        function: Callable[[Any], Any],
        derivatives: Callable[[Any, Any], tuple[Any, Any]],
        known: Known | None = None,
    ) -> "Interpolated":
        """Return f(x); `derivatives` returns f' and f'' from f on the reach of x, and from f on the values at vertices.

        Both ranges are made smaller by bounds −below ≤ x ≤ top that are known.
        """
        ranges, K = [self.reach(), self.ends()], self.at.shape[1]
        if known is not None:
            top, below = known()
            ranges = [(high.least(top), low.least(below)) for high, low in ranges]
        found = function(self.A.cat([self.at, *(self.A.between(*ends) for ends in ranges)], 1))
        return self.composed(found[:, :K], *derivatives(found[:, K : K + 1], found[:, K + 1 :]))

    def activation(self, name: str) -> "Interpolated":
        """Return act(x).

        ReLU lies below its chord by at most min(u, −l) on [l, u] with l < 0 < u, and nowhere above it. GELU has
        −0.11 ≤ f'' ≤ 0.798 (docs/math.md §3.13).
        """
        A = self.A
        values, _ = A.activation(self.at, name)
        if name == "gelu":
            bends = A.between(A.upper(CURVATURE), A.upper(-LEAST_CURVATURE))
            return self.composed(values, A.activation(A.between(*self.reach()), name)[1], bends)
        high, low = self.reach()
        all_positive, all_negative = (A.activation(A.between(*pair), name)[1] for pair in ((high, low), (low, high)))
        slope = A.between((-all_negative + 1.0).top(), (-all_positive).top())
        top, below = self.ends()
        gap = top.least(below).most(0.0)
        return self._followed(values, slope, A.between(gap, gap * 0.0))


class Point(Interpolated):
    """Functions at B points, K = 1: `at` encloses their values, and there is no rest."""

    def __init__(self, A: BoundArithmetic, at: Any) -> None:
        self.A, self.at, self.noise = A, at, None

    @property
    def rest(self) -> Any:
        """Zeros."""
        return self.A.exact(torch.zeros(self.at.shape, dtype=torch.float64))

    def each(self, function: Callable[[Any], Any]) -> "Point":
        """As in the base class."""
        return Point(self.A, function(self.at))

    def __add__(self, other: Interpolated) -> "Point":
        return Point(self.A, self.at + other.at)

    def plus(self, constant: Any) -> "Point":
        """As in the base class."""
        return Point(self.A, self.at + constant)

    def whole(self) -> tuple[Upper, Upper]:
        """As in the base class."""
        return self.ends()

    def within(self, known: Known) -> "Point":
        """As in the base class; nothing is gained."""
        return self

    def times(self, other: Interpolated, product: Bilinear = lambda x, y: x * y) -> "Point":
        """As in the base class."""
        return Point(self.A, product(self.at, other.at))

    def _image(self, function: Callable[[Any], Any], *_: Any) -> "Point":
        return self.each(function)

    def activation(self, name: str) -> "Point":
        """As in the base class."""
        return self.each(lambda e: self.A.activation(e, name)[0])


def _sum(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


LEAST_CURVATURE = -0.11
"""Lower bound on gelu'', whose smallest value is −0.108…, at ±2."""


def middle(x: Interpolated) -> Tensor:
    """Return approximate values in the middle of the simplex, [B, 1, …], 0 where they are not finite."""
    found = x.at.floats().mean(1, keepdim=True)
    return torch.where(found.isfinite(), found, 0.0)
