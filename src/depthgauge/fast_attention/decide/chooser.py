"""The choice of a polynomial for scores up to B: the lowest degree that meets the tolerance, if it is worth its cost.

A `Chooser` depends on the sizes and options of a call, and on none of its numbers. It is therefore kept by them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from depthgauge.fast_attention.backends import Backend, backend_for
from depthgauge.fast_attention.problem import Rules, Sizes
from depthgauge.fast_attention.theory.cost import exact_cost, feature_count, polynomial_cost
from depthgauge.fast_attention.theory.minimax import (
    HIGHEST_DEGREE,
    SMALLEST_INDEX,
    Minimax,
    grid_bound,
    guarantee,
    limit_index,
    suited,
)

MOST_FEATURES = 2**17
LARGEST_TOLERANCE = 0.5
"""Looser tolerances are replaced by this one, which meets them."""
NEARLY = 1.25
"""A higher degree is chosen if it costs at most this many times the cheapest degree."""
LARGEST_ROUNDING = 0.25
"""The largest rounding allowance of the polynomial path, as a fraction of range(v). Heads beyond it are exact."""
COARSE = 8
"""One polynomial for all heads is computed for every eighth B of the grid only. A new one takes some 15 ms."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The decision for one key head.

    `polynomial` is None for exact attention. `centring` is 0, 1 or 2 as in `Spec`. `bound` is B, `exact_rows` the
    number of rows computed exactly beside the polynomial, and `cost` the predicted cost of the polynomial path. `why`
    returns the reason; it is called for plans and errors only.
    """

    polynomial: Minimax | None
    centring: int
    bound: float
    exact_rows: int
    cost: float
    why: Callable[[], str]

    def batch(self) -> tuple[int, bool]:
        """Return what heads computed together have in common: the degree (−1: exact) and whether q or k are changed."""
        is_changed = self.centring > 0 or self.exact_rows > 0
        return (-1, False) if self.polynomial is None else (self.polynomial.degree, is_changed)

    def degree(self) -> int:
        """Return the degree of the polynomial."""
        assert self.polynomial is not None
        return self.polynomial.degree


@lru_cache(maxsize=1024)
def limit(degree: int, dim: int, tolerance: float, gradients: bool) -> int:
    """Return the largest grid index at which this degree meets the tolerance, or SMALLEST_INDEX − 1 if none does."""
    if feature_count(dim, degree) > MOST_FEATURES:
        return SMALLEST_INDEX - 1
    index = limit_index(degree, tolerance, gradients)
    return SMALLEST_INDEX - 1 if index is None else index


CallKind = tuple[Rules, int, int, bool, bool]
"""What calls have in common that can share a chooser: the arguments of `chooser_for`."""


@lru_cache(maxsize=1024)
def chooser_for(rules: Rules, n: int, m: int, gradients: bool, is_padded: bool) -> "Chooser":
    """Return the chooser of calls with n rows and m keys, with or without gradients and padding."""
    return Chooser(rules.sizes(n, m, is_padded), rules.tolerance, gradients, rules.force)


class Chooser:
    """Chooses polynomials for problems of these sizes."""

    def __init__(self, sizes: Sizes, tolerance: float, gradients: bool, force: str | None) -> None:
        self.sizes, self.gradients, self.force = sizes, gradients, force
        self.problem = sizes.outline()
        self.tolerance = min(tolerance, LARGEST_TOLERANCE)
        self._backends: dict[int, tuple[Backend, float, float]] = {}

    def backend(self, degree: int) -> Backend:
        """Return the backend that computes this degree."""
        return self.with_costs(degree)[0]

    def with_costs(self, degree: int) -> tuple[Backend, float, float]:
        """Return the backend of a degree, its cost for a head without exact rows, and the cost of exact attention."""
        if degree not in self._backends:
            backend = backend_for(self.problem, degree)
            cost = polynomial_cost(self.sizes, degree, 0, backend.rates)
            self._backends[degree] = backend, cost, exact_cost(self.sizes, backend.rates)
        return self._backends[degree]

    def cost(self, degree: int, exact_rows: int) -> float:
        """Return the predicted cost of a degree for one key head."""
        return polynomial_cost(self.sizes, degree, exact_rows, self.backend(degree).rates)

    @cached_property
    def largest_bound(self) -> float:
        """The largest B that a polynomial covers whose cost is worth it, or 0 if none is."""
        degrees = [degree for degree in range(HIGHEST_DEGREE + 1) if self._pays(degree, self.with_costs(degree)[1])]
        return max((grid_bound(self.limit(g)) for g in degrees if self.limit(g) >= SMALLEST_INDEX), default=0.0)

    def _pays(self, degree: int, cost: float) -> bool:
        return self.force == "polynomial" or cost <= self.with_costs(degree)[2]

    def is_beyond(self, product: float) -> bool:
        """Return whether scores of norms with this product are larger than any polynomial covers that pays."""
        return abs(self.sizes.scale) * product > self.largest_bound

    def limit(self, degree: int) -> int:
        """Return the largest grid index at which this degree meets the tolerance."""
        return limit(degree, self.sizes.d, self.tolerance, self.gradients)

    def least_degree(self, index: int) -> int | None:
        """Return the lowest degree that meets the tolerance for scores up to 2^(index/GRID), or None."""
        for degree in range(HIGHEST_DEGREE + 1):
            if index <= self.limit(degree):
                return degree
        return None

    def whole(self, indices: tuple[int, ...]) -> Choice | None:
        """Return the lowest degree for all rows, or a higher one of similar cost, with the least centring.

        Args:
            indices: the grid indices of B without centring, with centred keys, and with centred keys and queries.
        """
        degrees = [self.least_degree(index) for index in indices]
        known = [degree for degree in degrees if degree is not None]
        if not known:
            return None
        least = min(known)
        centring = degrees.index(least)
        return self._polynomial(self._nearly_free(least, indices[centring]), indices[centring], centring)

    def _polynomial(self, degree: int, index: int, centring: int) -> Choice:
        p = suited(degree, index, self.sizes.d, self.tolerance, self.gradients)
        assert guarantee(p, self.gradients) <= self.tolerance
        return Choice(p, centring, p.bound, 0, self.with_costs(degree)[1], lambda: "meets the tolerance at this degree")

    def _nearly_free(self, least: int, index: int) -> int:
        """Return the highest degree that costs at most NEARLY times the cheapest degree that meets the tolerance."""
        fits = [degree for degree in range(least, HIGHEST_DEGREE + 1) if index <= self.limit(degree)]
        costs = {degree: self.with_costs(degree)[1] for degree in fits}
        return max(degree for degree in fits if costs[degree] <= NEARLY * min(costs.values()))

    def alike(self, index: int, lowest: int | None = None) -> Choice | None:
        """Return one polynomial for all heads with scores up to 2^(index/GRID), without centring, or None.

        It is the polynomial of the next coarse B, or of the largest B at which the degree meets the tolerance. If the
        scores of a centred head are up to 2^(lowest/GRID) only, the result is None if centring lowers its degree.
        """
        least = self.least_degree(index)
        if least is None or (lowest is not None and (least > 2 or least != self.least_degree(lowest))):
            return None
        degree = self._nearly_free(least, index)
        coarse = min(-(-index // COARSE) * COARSE, self.limit(degree))
        return self._polynomial(degree, coarse, 0)

    def allowance(self, choice: Choice, spread: float) -> float:
        """Return the rounding allowance of a head, as a fraction of range(v). `spread` bounds log w_i − log w_j."""
        if choice.polynomial is None:
            return 0.0
        rounding = self.backend(choice.degree()).rounding
        return rounding(self.problem, choice.polynomial, choice.bound, choice.centring, spread)

    def is_worth_it(self, choice: Choice) -> bool:
        """Return whether the polynomial is forced, or predicted to cost no more than exact attention."""
        return self._pays(choice.degree(), choice.cost)

    def largest(self, degree: int) -> Choice | None:
        """Return the polynomial of a degree for the largest scores that it covers, or None if rounding forbids it."""
        choice = self._polynomial(degree, self.limit(degree), 0)
        return choice if self.allowance(choice, 0.0) <= LARGEST_ROUNDING else None
