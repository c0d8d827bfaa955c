"""The choice of a polynomial for scores up to B: the lowest degree that meets the tolerance, if it is worth its cost.

A `Chooser` depends on sizes, dtype, device and options of a call, and on none of its numbers. Calls of the same kind
can therefore share one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from depthgauge.fast_attention.backends import Backend, backend_for
from depthgauge.fast_attention.decide.cost import exact_cost, feature_count, polynomial_cost
from depthgauge.fast_attention.decide.minimax import (
    HIGHEST_DEGREE,
    SMALLEST_INDEX,
    Minimax,
    guarantee,
    limit_index,
    suited,
)
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Repeatable, SharedPolynomial

MOST_FEATURES = 2**17
LARGEST_TOLERANCE = 0.5
"""Looser tolerances are replaced by this one, which meets them."""
NEARLY = 1.25
"""A higher degree is chosen if it costs at most this many times the cheapest degree."""
LARGEST_ROUNDING = 0.25
"""The largest rounding allowance of the polynomial path, as a fraction of range(v). Heads beyond it are exact."""
COARSE = 8
"""One polynomial for all heads is computed for every eighth B of the grid only. A new one takes some 15 ms."""


@dataclass(frozen=True)
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


def call_cost(problem: Problem, degree: int, exact_rows: int, gradients: bool, may_repeat: bool) -> float:
    """Return the cost of a degree for one key head, on the backend that would compute it.

    `may_repeat` allows the lower cost of a repeated call, if the backend can repeat problems like this one.
    """
    backend = backend_for(problem, degree)
    is_repeated = may_repeat and backend.can_repeat(problem)
    rates = backend.rates
    call = rates.trained if gradients else rates.repeated if is_repeated else rates.call
    return polynomial_cost(problem, degree, exact_rows, rates, call)


def is_never_worth_it(problem: Problem, gradients: bool) -> bool:
    """Return whether exact attention is predicted to be cheaper than every degree, so that no survey is needed.

    Higher degrees cost more than degree 1. Degrees 0 and 1 may have different backends, so both are compared.
    """
    return all(
        call_cost(problem, degree, 0, gradients, True) > exact_cost(problem, backend_for(problem, degree).rates)
        for degree in (0, 1)
    )


class Chooser:
    """Chooses polynomials for a problem with these sizes. It keeps none of the problem's tensors."""

    def __init__(self, problem: Problem, tolerance: float, gradients: bool, force: str | None) -> None:
        self.problem, self.gradients, self.force = problem.outline(), gradients, force
        self.tolerance = min(tolerance, LARGEST_TOLERANCE)
        self.dim = problem.q.shape[-1]
        self._backends: dict[int, tuple[Backend, float, float]] = {}
        self._whole: dict[tuple[int, ...], Choice | None] = {}
        self._alike: dict[tuple[int, int], Choice | None] = {}

    def backend(self, degree: int) -> Backend:
        """Return the backend that computes this degree."""
        return self.with_costs(degree)[0]

    def with_costs(self, degree: int) -> tuple[Backend, float, float]:
        """Return the backend of a degree, its cost for a head without exact rows, and the cost of exact attention."""
        if degree not in self._backends:
            backend = backend_for(self.problem, degree)
            cost = self.cost(degree, 0, may_repeat=True)
            self._backends[degree] = backend, cost, exact_cost(self.problem, backend.rates)
        return self._backends[degree]

    def cost(self, degree: int, exact_rows: int, may_repeat: bool = False) -> float:
        """Return the predicted cost of a degree for one key head."""
        return call_cost(self.problem, degree, exact_rows, self.gradients, may_repeat)

    def limit(self, degree: int) -> int:
        """Return the largest grid index at which this degree meets the tolerance."""
        return limit(degree, self.dim, self.tolerance, self.gradients)

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
        if indices not in self._whole:  # equal heads are decided once
            self._whole[indices] = self._lowest(indices)
        return self._whole[indices]

    def _lowest(self, indices: tuple[int, ...]) -> Choice | None:
        degrees = [self.least_degree(index) for index in indices]
        known = [degree for degree in degrees if degree is not None]
        if not known:
            return None
        least = min(known)
        centring = degrees.index(least)
        return self._polynomial(self._nearly_free(least, indices[centring]), indices[centring], centring)

    def _polynomial(self, degree: int, index: int, centring: int) -> Choice:
        p = suited(degree, index, self.dim, self.tolerance, self.gradients)
        assert guarantee(p, self.gradients) <= self.tolerance
        cost = self.with_costs(degree)[1] if centring == 0 else self.cost(degree, 0)
        return Choice(p, centring, p.bound, 0, cost, lambda: "meets the tolerance at this degree")

    def _nearly_free(self, least: int, index: int) -> int:
        """Return the highest degree that costs at most NEARLY times the cheapest degree that meets the tolerance."""
        fits = [degree for degree in range(least, HIGHEST_DEGREE + 1) if index <= self.limit(degree)]
        costs = {degree: self.with_costs(degree)[1] for degree in fits}
        return max(degree for degree in fits if costs[degree] <= NEARLY * min(costs.values()))

    def alike(self, index: int) -> Choice | None:
        """Return one polynomial for all heads with scores up to 2^(index/GRID), without centring, or None.

        It is the polynomial of the next coarse B, or of the largest B at which the degree meets the tolerance.
        """
        least = self.least_degree(index)
        if least is None:
            return None
        degree = self._nearly_free(least, index)
        coarse = min(-(-index // COARSE) * COARSE, self.limit(degree))
        if (degree, coarse) not in self._alike:
            self._alike[degree, coarse] = self._polynomial(degree, coarse, 0)
        return self._alike[degree, coarse]

    def allowance(self, choice: Choice, spread: float) -> float:
        """Return the rounding allowance of a head, as a fraction of range(v). `spread` bounds log w_i − log w_j."""
        if choice.polynomial is None:
            return 0.0
        rounding = self.backend(choice.degree()).rounding
        return rounding(self.problem, choice.polynomial, choice.bound, choice.centring, spread)

    def is_worth_it(self, choice: Choice) -> bool:
        """Return whether the polynomial is forced, or predicted to cost no more than exact attention."""
        return self.force == "polynomial" or choice.cost <= self.with_costs(choice.degree())[2]

    def repeatable(self, degree: int) -> Repeatable:
        """Return what a backend needs to repeat decisions for one polynomial of this degree for all heads."""

        def shared_at(index: int) -> SharedPolynomial | None:
            choice = self.alike(index)
            if choice is None or choice.degree() != degree or not self.is_worth_it(choice):
                return None
            if not self.allowance(choice, 0.0) <= LARGEST_ROUNDING:
                return None
            assert choice.polynomial is not None
            least = self.least_degree(index)
            lower = SMALLEST_INDEX if not least else self.limit(least - 1) + 1
            return SharedPolynomial(choice.polynomial.coefficients, lower)

        return Repeatable(self.problem, degree, shared_at)

    def largest(self, degree: int) -> Choice | None:
        """Return the polynomial of a degree for the largest scores that it covers, or None if rounding forbids it."""
        choice = self._polynomial(degree, self.limit(degree), 0)
        return choice if self.allowance(choice, 0.0) <= LARGEST_ROUNDING else None
