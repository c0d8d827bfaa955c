"""The choice of a path for every head: the lowest degree that meets the tolerance, or exact attention if cheaper."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as every
from operator import mul

from torch import Tensor

from depthgauge.errors import InputError
from depthgauge.fast_attention.backends import Backend, backend_for
from depthgauge.fast_attention.decide.bounds import (
    Survey,
    norm_up,
    score_bound,
    unit,
)
from depthgauge.fast_attention.decide.cost import exact_cost, feature_count, polynomial_cost
from depthgauge.fast_attention.decide.minimax import (
    HIGHEST_DEGREE,
    SMALLEST_INDEX,
    Minimax,
    at_index,
    degree_it_would_take,
    gradient_error,
    grid_index,
    guarantee,
    limit_index,
    output_error,
    suited,
)
from depthgauge.fast_attention.plan import HeadPlan, Plan
from depthgauge.fast_attention.problem import Kind, Problem, Request
from depthgauge.fast_attention.spec import Repeatable

MOST_FEATURES = 2**17
LARGEST_TOLERANCE = 0.5
"""Looser tolerances are replaced by this one, which meets them."""
MOST_EXACT_ROWS = 1 / 8
"""The largest fraction of rows that are computed exactly beside a polynomial. With more, the whole head is exact."""
NEARLY = 1.25
"""A higher degree is chosen if it costs at most this many times the cheapest degree."""
LARGEST_ROUNDING = 0.25
"""The largest rounding allowance of the polynomial path, as a fraction of range(v). Heads beyond it are exact."""
CENTRINGS = ("none", "keys", "keys, queries")


class GuaranteeError(InputError):
    """The polynomial path was forced where it cannot meet the tolerance. The message states B and the needed degree."""


@dataclass(frozen=True)
class Choice:
    """The decision for one key head.

    `polynomial` is None for exact attention. `centring` is 0, 1 or 2 as in `Spec`. `bound` is B, `exact_rows` the
    number of rows computed exactly beside the polynomial, and `cost` the predicted cost of the polynomial path.
    """

    polynomial: Minimax | None
    centring: int
    bound: float
    exact_rows: int
    cost: float
    why: str

    def batch(self) -> tuple[int, bool]:
        """Return what heads computed together have in common: the degree (−1: exact) and whether q or k are changed."""
        is_changed = self.centring > 0 or self.exact_rows > 0
        return (-1, False) if self.polynomial is None else (self.polynomial.degree, is_changed)


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


class Decision:
    """The choices for all heads of a problem, and the survey behind them."""

    def __init__(self, problem: Problem, surveyed: Survey, request: Request, gradients: bool) -> None:
        self.problem, self.survey, self.gradients = problem, surveyed, gradients
        self.tolerance = min(request.options.tolerance, LARGEST_TOLERANCE)
        self.force = request.options.force
        self.dim = problem.q.shape[-1]
        # Centred q and k are rounded once more in a short dtype: |t| ≤ (1 + 2u)² B after this rounding.
        self.growth = (1 + 2 * unit(problem.q.dtype)) ** 2
        self._row_norms: Tensor | None = None
        self._backends: dict[int, tuple[Backend, float, float]] = {}
        self._whole: dict[tuple[int, ...], Choice | None] = {}
        self.choices = self._all_alike() or [self._choose(head) for head in range(problem.heads)]

    def _all_alike(self) -> list[Choice] | None:
        """Return the choices if centring cannot lower the degree of any head, which is cheap to check; else None."""
        s, scale = self.survey, self.problem.scale
        if not all(s.is_usable):
            return None
        bounds = [score_bound(scale, q, k) for q, k in zip(s.query, s.key, strict=True)]
        lowest = min(map(mul, map(min, s.query, s.query_centred), map(min, s.key, s.key_centred)))
        degree = self.least_degree(grid_index(max(bounds)))
        if degree is None or degree > 2 or degree != self.least_degree(grid_index(abs(scale) * lowest)):
            return None
        if self.problem.q.is_cuda:  # one polynomial for all heads needs no table on the device
            bounds = [max(bounds)] * len(bounds)
        whole = {bound: self._without_exact_rows((grid_index(bound),)) for bound in set(bounds)}
        heads = range(len(bounds))
        worth = {bound: self._if_worth_it(choice, heads) for bound, choice in whole.items() if choice is not None}
        return [worth[bound] for bound in bounds]

    def remember(self, kind: Kind) -> None:
        """Let the backend repeat the decision for later calls of this kind, if it is one polynomial for all heads."""
        first = self.choices[0]
        p = first.polynomial
        is_alike = all(c.polynomial is p and c.centring == 0 and c.exact_rows == 0 for c in self.choices)
        if p is None or not is_alike:
            return
        index = grid_index(p.bound)
        degree = self.least_degree(index)
        assert degree is not None
        least = limit(degree - 1, self.dim, self.tolerance, self.gradients) + 1 if degree > 0 else SMALLEST_INDEX
        self.backend(p.degree).remember(kind, Repeatable(self.problem, p.coefficients, index, least))

    def bounds(self, head: int) -> tuple[float, float, float]:
        """Return B without centring, with centred keys, and with centred keys and queries."""
        s, scale, grown = self.survey, self.problem.scale, self.growth
        keys = s.key_centred[head]
        return (
            score_bound(scale, s.query[head], s.key[head]),
            score_bound(scale, s.query[head], keys) * grown,
            score_bound(scale, s.query_centred[head], keys) * grown,
        )

    def backend(self, degree: int) -> Backend:
        """Return the backend that computes this degree."""
        return self._with_costs(degree)[0]

    def _with_costs(self, degree: int) -> tuple[Backend, float, float]:
        """Return the backend of a degree, its cost for a head without exact rows, and the cost of exact attention."""
        if degree not in self._backends:
            backend = backend_for(self.problem, degree)
            cost = self._cost(degree, 0, may_repeat=True)
            self._backends[degree] = backend, cost, exact_cost(self.problem, backend.rates)
        return self._backends[degree]

    def _cost(self, degree: int, exact_rows: int, may_repeat: bool = False) -> float:
        return call_cost(self.problem, degree, exact_rows, self.gradients, may_repeat)

    def least_degree(self, index: int) -> int | None:
        """Return the lowest degree that meets the tolerance for scores up to 2^(index/GRID), or None."""
        for degree in range(HIGHEST_DEGREE + 1):
            if index <= limit(degree, self.dim, self.tolerance, self.gradients):
                return degree
        return None

    def _choose(self, head: int) -> Choice:
        if not self.survey.is_usable[head]:
            return Choice(None, 0, math.inf, 0, math.inf, "q, k or v is not finite, or sums of it would overflow")
        bounds = self.bounds(head)
        may_weigh = self.survey.spread[head] <= self.backend(2).largest_log_range(self.problem)
        indices = tuple(grid_index(bound) for bound in (bounds if may_weigh else bounds[:2]))
        if indices not in self._whole:  # equal heads are decided once
            self._whole[indices] = self._without_exact_rows(indices)
        whole = self._whole[indices]
        least = HIGHEST_DEGREE + 1 if whole is None else self.least_degree(min(indices))
        if whole is not None and least is not None and least <= 2:
            return self._if_worth_it(whole, [head])
        found = self._with_exact_rows(head, len(indices) - 1, HIGHEST_DEGREE + 1 if least is None else least)
        found += [] if whole is None else [whole]
        if not found:
            return self._none_fits(head, min(bounds[: len(indices)]))
        return self._if_worth_it(min(found, key=lambda choice: choice.cost), [head])

    def _without_exact_rows(self, indices: tuple[int, ...]) -> Choice | None:
        """Return the lowest degree for all rows, or a higher one of similar cost, with the least centring."""
        degrees = [self.least_degree(index) for index in indices]
        known = [degree for degree in degrees if degree is not None]
        if not known:
            return None
        least = min(known)
        centring = degrees.index(least)
        index = indices[centring]
        degree = self._nearly_free(least, index)
        p = suited(degree, index, self.dim, self.tolerance, self.gradients)
        assert guarantee(p, self.gradients) <= self.tolerance
        cost = self._with_costs(degree)[1] if centring == 0 else self._cost(degree, 0)
        return Choice(p, centring, p.bound, 0, cost, "meets the tolerance at this degree")

    def _nearly_free(self, least: int, index: int) -> int:
        """Return the highest degree that costs at most NEARLY times the cheapest degree that meets the tolerance."""
        fits = [
            degree
            for degree in range(least, HIGHEST_DEGREE + 1)
            if index <= limit(degree, self.dim, self.tolerance, self.gradients)
        ]
        costs = {degree: self._with_costs(degree)[1] for degree in fits}
        return max(degree for degree in fits if costs[degree] <= NEARLY * min(costs.values()))

    def _if_worth_it(self, choice: Choice, heads: Sequence[int]) -> Choice:
        """Return the choice, or exact attention if it is cheaper or if the rounding allowance is too large."""
        allowance = self._allowance(choice, heads)
        if not allowance <= LARGEST_ROUNDING:
            dtype = str(self.problem.q.dtype).removeprefix("torch.")
            why = f"rounding in {dtype} may add {allowance:.2g} × range(v) at degree {_degree(choice)}"
            advice = "use a longer dtype"
            if not all(self._holds(choice, head) for head in heads):
                why = f"sums of degree {_degree(choice)} may leave the range of float32"
                advice = "scale q, k and v closer to 1"
            if self.force == "polynomial":
                raise GuaranteeError(f'force="polynomial" is not possible: {why}; {advice}, or leave force unset')
            return Choice(None, choice.centring, choice.bound, choice.exact_rows, choice.cost, why)
        if self.force == "polynomial" or choice.cost <= self._with_costs(_degree(choice))[2]:
            return choice
        why = f"degree {_degree(choice)} meets the tolerance, but exact attention is predicted to be cheaper"
        return Choice(None, choice.centring, choice.bound, choice.exact_rows, choice.cost, why)

    def _none_fits(self, head: int, bound: float) -> Choice:
        degree = degree_it_would_take(bound, self.tolerance) if bound < 1e6 else None
        needed = f"about degree {degree}" if degree is not None else "a degree that is out of reach"
        if degree is not None and degree <= HIGHEST_DEGREE:
            needed += f" with {feature_count(self.dim, degree)} features, more than the limit of {MOST_FEATURES}"
        why = f"scores up to B = {bound:.3g} need {needed}"
        if self.force == "polynomial":
            what = " with gradients" if self.gradients else ""
            raise GuaranteeError(
                f"the polynomial path cannot meet tolerance {self.tolerance:g}{what} for key head {head}: {why}; "
                "increase the tolerance, scale q or k down, or leave force unset"
            )
        return Choice(None, 0, bound, 0, math.inf, why)

    def row_norms(self) -> Tensor:
        """Return an upper bound on ‖q_i − μ‖ for every row: [N, G, n]."""
        if self._row_norms is None:
            work = self.problem.working
            self._row_norms = norm_up(self.problem.q.to(work) - self.survey.query_centre[:, None, None])
        return self._row_norms

    def row_bounds(self, head: int, centring: int) -> Tensor:
        """Return B_i for every row of a head: [G, n]."""
        s = self.survey
        norms = self.row_norms()[head] if centring == 2 else norm_up(self.problem.q[head].to(self.problem.working))
        keys = s.key_centred[head] if centring else s.key[head]
        grown = self.growth if centring else 1.0
        return norms * (score_bound(self.problem.scale, 1.0, keys) * grown * (1 + 2.0**-20))

    def _with_exact_rows(self, head: int, centring: int, below: int) -> list[Choice]:
        """Return choices of lower degrees, in which the rows with B_i beyond the limit are computed exactly."""
        rows = self.row_bounds(head, centring)
        choices = []
        for degree in range(1, below):
            index = limit(degree, self.dim, self.tolerance, self.gradients)
            if index < SMALLEST_INDEX:
                continue
            p = at_index(degree, index)
            beyond = int((~(rows <= p.bound)).sum())
            if 0 < beyond <= MOST_EXACT_ROWS * rows.numel():
                cost = self._cost(degree, beyond)
                why = f"{beyond} of {rows.numel()} rows exceed B = {p.bound:.3g} and are computed exactly"
                choices.append(Choice(p, centring, p.bound, beyond, cost, why))
        return choices

    def rounding(self, head: int) -> float:
        """Return the rounding allowance of a head on the polynomial path, as a fraction of range(v)."""
        return self._allowance(self.choices[head], [head])

    def _allowance(self, choice: Choice, heads: Sequence[int]) -> float:
        """Return the largest rounding allowance of heads that share a choice, or infinity if sums leave their range."""
        if choice.polynomial is None:
            return 0.0
        if not all(self._holds(choice, head) for head in heads):
            return math.inf
        rounding = self.backend(choice.polynomial.degree).rounding
        spread = max(self.survey.spread[head] for head in heads) if choice.centring == 2 else 0.0
        return rounding(self.problem, choice.polynomial, choice.bound, choice.centring, spread)

    def _holds(self, choice: Choice, head: int) -> bool:
        s = self.survey
        return self.backend(_degree(choice)).holds(self.problem.scale, s.query[head], s.key[head], s.value_size[head])

    def plan(self, request: Request, notes: Sequence[str]) -> Plan:
        """Return the choices as a Plan."""
        shape = request.k.shape[:-2]
        heads = []
        for head, index in enumerate(every(*map(range, shape))):
            c = self.choices[head]
            p = c.polynomial
            before, _, after = self.bounds(head)
            degree = p.degree if p else None
            backend = self.backend(p.degree if p else 2)
            heads.append(
                HeadPlan(
                    index=index, path="polynomial" if p else "exact", why=c.why, bound_before=before,
                    bound_after=after, centring=CENTRINGS[c.centring] if p else "none", degree=degree,
                    features=feature_count(self.dim, degree) if degree is not None else 0, exact_rows=c.exact_rows,
                    cost_exact=exact_cost(self.problem, backend.rates), cost_polynomial=c.cost,
                    guarantee=output_error(p.error) if p else 0.0, rounding=self.rounding(head),
                    gradient=gradient_error(p) if p and self.gradients else None, backend=backend.name,
                )
            )  # fmt: skip
        return Plan(request.options.tolerance, request.q.dtype, tuple(heads), tuple(notes))


def _degree(choice: Choice) -> int:
    assert choice.polynomial is not None
    return choice.polynomial.degree
