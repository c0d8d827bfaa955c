"""Polynomials that approximate exp with the smallest relative error, by a Remez exchange, and proofs of the error.

    e(t) = p(t) exp(−t) − 1,   ε = max |e| over [−B, B],   p of degree g with the smallest ε

Because e′ = (p′ − p) exp(−t), the extrema of e are ±B and the roots of one polynomial of degree g. The exchange
therefore needs no grid, and the proof needs g + 2 evaluations. Both use decimal arithmetic with 80 digits and a
correctly rounded exp. The error is proved for the float64 coefficients that are used.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from itertools import pairwise

HIGHEST_DEGREE = 4
GRID = 32
"""Polynomials are computed for B = 2^(k/GRID) with integer k only, so that few of them have to be cached."""
SMALLEST_INDEX = -20 * GRID
"""For B below 2⁻²⁰ the polynomial of 2⁻²⁰ is used; its error is at most that of its float64 coefficients."""
_DIGITS = Context(prec=80)
_SLACK = Decimal("1e-60")
_CLOSE = Decimal("1e-60")
_WIDTH = Decimal("1e-40")
"""Half the width, as a fraction of B, of the interval that is proved to contain a root."""


@dataclass(frozen=True)
class Minimax:
    """p(t) = Σ_k coefficients[k] t^k on [−bound, bound].

    `error` ≥ max |p e^−t − 1| and `slope_error` ≥ max |p′ e^−t − 1| are proved for these coefficients.
    """

    degree: int
    bound: float
    coefficients: tuple[float, ...]
    error: float
    slope_error: float


def horner(coefficients: Sequence[Decimal], t: Decimal) -> Decimal:
    """Return Σ_k coefficients[k] t^k."""
    value = Decimal(0)
    for c in reversed(coefficients):
        value = value * t + c
    return value


def derivative(coefficients: Sequence[Decimal]) -> list[Decimal]:
    """Return the coefficients of p′; the derivative of a constant is the zero polynomial."""
    return [k * c for k, c in enumerate(coefficients)][1:] or [Decimal(0)]


def _slope_of_error(p: Sequence[Decimal]) -> list[Decimal]:
    """Return the coefficients of p′ − p = e′ exp(t)."""
    d = derivative(p)
    return [(d[k] if k < len(d) else Decimal(0)) - c for k, c in enumerate(p)]


def real_roots(p: Sequence[Decimal], low: Decimal, high: Decimal) -> list[Decimal]:
    """Return the roots of p in (low, high) at which p changes sign, in order.

    Between two neighbouring roots of p′ there is at most one root of p.
    """
    while len(p) > 1 and p[-1] == 0:
        p = p[:-1]
    if len(p) <= 1:
        return []
    ends = [low, *real_roots(derivative(p), low, high), high]
    return [_bisect(p, a, b) for a, b in pairwise(ends) if horner(p, a) * horner(p, b) < 0]


def _bisect(p: Sequence[Decimal], low: Decimal, high: Decimal) -> Decimal:
    """Return the root between points of opposite sign, by Newton steps that fall back to bisection."""
    slope, sign = derivative(p), horner(p, low) > 0
    t, close = (low + high) / 2, _CLOSE * (high - low)
    for _ in range(400):
        value = horner(p, t)
        if (value > 0) == sign:
            low = t
        else:
            high = t
        steep = horner(slope, t)
        step = t - value / steep if steep != 0 else low
        nearer = step if low < step < high else (low + high) / 2
        if abs(nearer - t) <= close:
            return nearer
        t = nearer
    return t


def _solve(matrix: list[list[Decimal]], right: list[Decimal]) -> list[Decimal]:
    """Solve a small linear system by Gaussian elimination with row exchanges."""
    rows = [[*row, r] for row, r in zip(matrix, right, strict=True)]
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    solution = [Decimal(0)] * n
    for i in reversed(range(n)):
        solution[i] = (rows[i][n] - sum(rows[i][j] * solution[j] for j in range(i + 1, n))) / rows[i][i]
    return solution


def _remez(degree: int, bound: Decimal) -> list[Decimal]:
    """Return the coefficients of p: solve p(x_i) e^−x_i − 1 = ±E on g + 2 points, move them to the extrema, repeat."""
    points = [
        bound * Decimal(-math.cos(math.pi * i / (degree + 1))) if 0 < i <= degree else bound * (1 if i else -1)
        for i in range(degree + 2)
    ]
    for _ in range(60):
        rows, right = [], []
        for i, x in enumerate(points):
            weight = (-x).exp()
            # The unknowns are c_k B^k, which keeps the system well scaled for small B.
            rows.append([weight * (x / bound) ** k for k in range(degree + 1)] + [Decimal(-1) ** i])
            right.append(Decimal(1))
        *scaled, level = _solve(rows, right)
        p = [c / bound**k for k, c in enumerate(scaled)]
        inner = real_roots(_slope_of_error(p), -bound, bound)
        if len(inner) != degree:
            raise ArithmeticError(f"found no alternation of {degree + 2} points at B = {bound}")
        points = [-bound, *inner, bound]
        largest = max(abs(horner(p, x) * (-x).exp() - 1) for x in points)
        if largest - abs(level) <= abs(largest) * Decimal("1e-20"):
            return p
    raise ArithmeticError(f"the Remez exchange did not converge at B = {bound}")  # pragma: no cover


def relative_error(coefficients: Sequence[float], bound: float) -> float:
    """Return a proved upper bound on max |p(t) e^−t − 1| over [−bound, bound] for these float64 coefficients.

    e is monotone between the roots of p′ − p. Every root z is enclosed in an interval at whose ends p′ − p has opposite
    signs. If the number of enclosures equals the degree of p′ − p, there are no other roots. On an enclosure,
    |e| ≤ |e(z)| + width·max |e′|. If fewer roots are enclosed, the bound is computed on a grid of cells instead.

    >>> relative_error([1.0, 1.0], 0.1) < 0.0056
    True
    """
    with localcontext(_DIGITS):
        p, edge = [Decimal(c) for c in coefficients], Decimal(bound)
        slope = _slope_of_error(p)
        while len(slope) > 1 and slope[-1] == 0:
            slope = slope[:-1]
        worst = max(abs(horner(p, t) * (-t).exp() - 1) for t in (-edge, edge))
        width = edge * _WIDTH
        enclosed = 0
        for z in real_roots(slope, -edge, edge):
            low, high = z - width, z + width
            if horner(slope, low) * horner(slope, high) < 0:
                enclosed += 1
            steep = sum((abs(c) * edge**k for k, c in enumerate(slope)), Decimal(0)) * (2 * edge).exp()
            worst = max(worst, abs(horner(p, z) * (-z).exp() - 1) + 2 * width * steep)
        if enclosed < len(slope) - 1:
            return _error_by_cells(p, edge)
        return _round_up(worst + _SLACK)


def _error_by_cells(p: Sequence[Decimal], edge: Decimal, cells: int = 400) -> float:
    """Return the same bound without the roots: on a cell, |e| ≤ max |e| at its ends + width²/8 · max |e″|."""
    first = derivative(p)
    second = derivative(first)
    bend = [
        abs(c - 2 * (first[k] if k < len(first) else 0) + (second[k] if k < len(second) else 0))
        for k, c in enumerate(p)
    ]
    curvature = horner(bend, edge) * edge.exp()
    width = 2 * edge / cells
    ends = (abs(horner(p, t) * (-t).exp() - 1) for t in (-edge + i * width for i in range(cells + 1)))
    return _round_up(max(ends) + width * width / 8 * curvature + _SLACK)


def _round_up(x: Decimal) -> float:
    return math.nextafter(float(x), math.inf)


@lru_cache(maxsize=4096)
def minimax(degree: int, bound: float) -> Minimax:
    """Return the polynomial of a degree with the smallest relative error on [−bound, bound], and its proved error.

    >>> minimax(2, 0.288).error < 1e-3
    True
    """
    with localcontext(_DIGITS):
        exact = _remez(degree, Decimal(bound))
        coefficients = tuple(float(c) for c in exact)
    return widened(Minimax(degree, bound, coefficients, math.inf, math.inf), bound)


def grid_bound(index: int) -> float:
    """Return 2^(index/GRID) as a float64."""
    return float(2.0 ** (index / GRID))


LARGEST_INDEX = 4 * GRID
_GRID_BOUNDS = [grid_bound(index) for index in range(SMALLEST_INDEX, LARGEST_INDEX + 1)]


def grid_index(bound: float) -> int:
    """Return the smallest index on the grid with 2^(index/GRID) ≥ bound, or LARGEST_INDEX + 1 beyond the grid."""
    return SMALLEST_INDEX + bisect_left(_GRID_BOUNDS, bound)


def at_index(degree: int, index: int) -> Minimax:
    """Return the minimax polynomial of a degree for B = 2^(index/GRID)."""
    return minimax(degree, grid_bound(index))


def widened(p: Minimax, bound: float) -> Minimax:
    """Return the same polynomial with its errors proved on a wider interval."""
    slope = [k * c for k, c in enumerate(p.coefficients)][1:] or [0.0]
    # Every product k·c_k is rounded once, so p′ is off by at most 2⁻⁵³ Σ |k c_k| B^k ≤ 2⁻⁵² Σ |k c_k| B^k.
    slack = 2.0**-52 * sum(abs(c) * bound**k for k, c in enumerate(slope)) * math.exp(bound)
    slope_error = relative_error(slope, bound) + slack
    return Minimax(p.degree, bound, p.coefficients, relative_error(p.coefficients, bound), slope_error)


@lru_cache(maxsize=4096)
def suited(degree: int, index: int, dim: int, tolerance: float, gradients: bool) -> Minimax:
    """Return the polynomial to use for scores up to B = 2^(index/GRID) of vectors of width `dim`.

    Scores of vectors without a common direction are about B/√d, far below B. The polynomial is therefore the minimax
    polynomial of [−b, b], with b as close to 2B/√d as the tolerance on all of [−B, B] allows. b = B is always allowed.
    """
    bound = grid_bound(index)
    narrow = min(index, grid_index(2 * bound / math.sqrt(dim)))
    candidates = [*range(narrow, index, GRID // 4), index]
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        is_met = guarantee(widened(at_index(degree, candidates[middle]), bound), gradients) <= tolerance
        low, high = (low, middle) if is_met else (middle + 1, high)
    p = at_index(degree, candidates[low])
    return p if p.bound == bound else widened(p, bound)


def output_error(epsilon: float) -> float:
    """Return h(ε) = (1 − √(1−ε²))/ε, the largest error of the output as a fraction of range(v), rounded up.

    The weights are those of softmax times 1 + δ_j with |δ_j| ≤ ε. In the worst case, mass a has the factor 1+ε and the
    rest 1−ε, which moves a(1−a)·2ε/(1−ε+2aε) of the mass; the maximum over a is h(ε). It is computed as
    ε/(1 + √(1−ε²)), which avoids cancellation.
    """
    if epsilon >= 1:
        return 1.0
    return epsilon / (1 + math.sqrt((1 - epsilon) * (1 + epsilon))) * (1 + 2.0**-50)


def gradient_error(p: Minimax) -> float:
    """Return G = κ + (1+κ)·h(ε) with κ = (ε + ε′)/(1 − ε), the relative bound of the gradients.

    The derivation is in docs/concepts/fast-attention-derivation.md, section Gradients.
    """
    if p.error >= 1:
        return math.inf
    kappa = (p.error + p.slope_error) / (1 - p.error)
    return (kappa + (1 + kappa) * output_error(p.error)) * (1 + 2.0**-50)


def guarantee(p: Minimax, gradients: bool) -> float:
    """Return the error that is compared with the tolerance: of the output, and with `gradients` of both."""
    return max(output_error(p.error), gradient_error(p)) if gradients else output_error(p.error)


@lru_cache(maxsize=1024)
def limit_index(degree: int, tolerance: float, gradients: bool = False) -> int | None:
    """Return the largest grid index at which a polynomial of this degree meets the tolerance, or None."""

    def is_met(index: int) -> bool:
        try:
            p = at_index(degree, index)
        except ArithmeticError:  # far beyond the tolerance: no alternation is found, and none is needed
            return False
        return p.error < 1 and guarantee(p, gradients) <= tolerance

    low, high = SMALLEST_INDEX, LARGEST_INDEX
    if not is_met(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def degree_it_would_take(bound: float, tolerance: float) -> int:
    """Estimate the degree at which scores up to B meet the tolerance, from ε ≈ B^{g+1}/(2^g (g+1)!) for g > B."""
    epsilon = 2 * tolerance / (1 + tolerance * tolerance)
    g = 0
    while (g + 1) * math.log(bound) - g * math.log(2) - math.lgamma(g + 2) > math.log(epsilon) or g < bound / 2:
        g += 1
    return g
