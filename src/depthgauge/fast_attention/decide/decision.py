"""Which heads are computed how, and why: the smallest degree that meets the tolerance, if it is worth it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as every
from operator import mul

import torch
from torch import Tensor

from depthgauge.errors import InputError
from depthgauge.fast_attention.backends import Backend, backend_for
from depthgauge.fast_attention.decide.bounds import (
    LARGEST_LOG_RANGE,
    LARGEST_LOG_RANGE_FLOAT16,
    Survey,
    norm_up,
    score_bound,
    unit,
)
from depthgauge.fast_attention.decide.cost import exact_cost, polynomial_cost
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
from depthgauge.fast_attention.features import feature_count
from depthgauge.fast_attention.plan import HeadPlan, Plan
from depthgauge.fast_attention.problem import Problem, Request
from depthgauge.fast_attention.triton import route as triton_route
from depthgauge.fast_attention.triton.route import Kind

MOST_FEATURES = 2**17
LARGEST_TOLERANCE = 0.5
"""A looser tolerance is met by this one: beyond it polynomials are of no use."""
MOST_EXACT_ROWS = 1 / 8
"""The share of rows that may be done exactly beside a polynomial; with more the whole head is exact."""
NEARLY = 1.25
"""A higher degree is taken where it costs no more than this many times the cheapest."""
LARGEST_ROUNDING = 0.25
"""Where rounding may add more than this share of range(v), a guarantee would be worth nothing."""
CENTRINGS = ("none", "keys", "keys, queries")


class GuaranteeError(InputError):
    """The polynomial was forced where it cannot meet the tolerance; the message says B and the degree it would take."""


@dataclass(frozen=True)
class Choice:
    """The decision for one key head: the polynomial (None: exact), what is centred, and the rows done exactly."""

    polynomial: Minimax | None
    centring: int
    bound: float
    exact_rows: int
    cost: float
    why: str

    def sort(self) -> tuple[int, bool]:
        """The degree, −1 for exact attention, and whether q and k are changed before the polynomial sees them."""
        is_changed = self.centring > 0 or self.exact_rows > 0
        return (-1, False) if self.polynomial is None else (self.polynomial.degree, is_changed)


@lru_cache(maxsize=1024)
def limit(degree: int, dim: int, tolerance: float, gradients: bool) -> int:
    """The largest grid index at which this degree meets the tolerance; below every index where there is none."""
    if feature_count(dim, degree) > MOST_FEATURES:
        return SMALLEST_INDEX - 1
    index = limit_index(degree, tolerance, gradients)
    return SMALLEST_INDEX - 1 if index is None else index


def call_cost(problem: Problem, degree: int, exact_rows: int, gradients: bool, is_repeatable: bool) -> float:
    """What a degree costs for one key head, on the backend that would compute it."""
    rates = backend_for(problem, degree).rates
    call = rates.trained if gradients else rates.repeated if is_repeatable else rates.call
    return polynomial_cost(problem, degree, exact_rows, rates, call)


def is_never_worth_it(problem: Problem, gradients: bool) -> bool:
    """Whether exact attention is predicted to be cheaper than any degree, so that nothing needs to be surveyed.

    Higher degrees cost more; degree 0 and the others may have different backends.
    """
    is_repeatable = triton_route.is_possible(problem)
    return all(
        call_cost(problem, degree, 0, gradients, is_repeatable)
        > exact_cost(problem, backend_for(problem, degree).rates)
        for degree in (0, 1)
    )


class Decision:
    """The choices for all heads of a problem, and what was surveyed to make them."""

    def __init__(self, problem: Problem, surveyed: Survey, request: Request, gradients: bool) -> None:
        self.problem, self.survey, self.gradients = problem, surveyed, gradients
        self.tolerance = min(request.tolerance, LARGEST_TOLERANCE)
        self.force = request.force
        self.dim = problem.q.shape[-1]
        # A shorter dtype rounds what was centred once more, and the polynomial must cover what it then sees.
        self.growth = (1 + 2 * unit(problem.q.dtype)) ** 2
        self._row_norms: Tensor | None = None
        self._backends: dict[int, tuple[Backend, float, float]] = {}
        self._whole: dict[tuple[int, ...], Choice | None] = {}
        self.choices = self._all_alike() or [self._choose(head) for head in range(problem.heads)]

    def _all_alike(self) -> list[Choice] | None:
        """The choices where centring can lower no head's degree, which is quickly seen; None where it might."""
        s, scale = self.survey, self.problem.scale
        if not all(s.is_usable):
            return None
        bounds = [score_bound(scale, q, k) for q, k in zip(s.query, s.key, strict=True)]
        lowest = min(map(mul, map(min, s.query, s.query_centred), map(min, s.key, s.key_centred)))
        degree = self.least_degree(grid_index(max(bounds)))
        if degree is None or degree > 2 or degree != self.least_degree(grid_index(abs(scale) * lowest)):
            return None
        if self.problem.q.is_cuda:  # one polynomial for all, which then needs no table on the device
            bounds = [max(bounds)] * len(bounds)
        whole = {bound: self._without_exact_rows((grid_index(bound),)) for bound in set(bounds)}
        heads = range(len(bounds))
        worth = {bound: self._if_worth_it(choice, heads) for bound, choice in whole.items() if choice is not None}
        return [worth[bound] for bound in bounds]

    def teach(self, kind: Kind) -> None:
        """Let later calls of this kind repeat the decision, if it is one polynomial for all heads and nothing else."""
        first = self.choices[0]
        p = first.polynomial
        is_alike = all(c.polynomial is p and c.centring == 0 and c.exact_rows == 0 for c in self.choices)
        if p is None or not is_alike or self.backend(p.degree).name != "triton":
            return
        index = grid_index(p.bound)
        degree = self.least_degree(index)
        assert degree is not None
        least = limit(degree - 1, self.dim, self.tolerance, self.gradients) + 1 if degree > 0 else SMALLEST_INDEX
        triton_route.learn(kind, self.problem, p.coefficients, index, least)

    def bounds(self, head: int) -> tuple[float, float, float]:
        """B as given, with the keys centred, and with the queries centred too."""
        s, scale, grown = self.survey, self.problem.scale, self.growth
        keys = s.key_centred[head]
        return (
            score_bound(scale, s.query[head], s.key[head]),
            score_bound(scale, s.query[head], keys) * grown,
            score_bound(scale, s.query_centred[head], keys) * grown,
        )

    def backend(self, degree: int) -> Backend:
        """What would compute this degree."""
        return self._with_costs(degree)[0]

    def _with_costs(self, degree: int) -> tuple[Backend, float, float]:
        """The backend of a degree, its cost for a head without exact rows, and that of exact attention."""
        if degree not in self._backends:
            backend = backend_for(self.problem, degree)
            cost = self._cost(degree, 0, triton_route.is_possible(self.problem))
            self._backends[degree] = backend, cost, exact_cost(self.problem, backend.rates)
        return self._backends[degree]

    def _cost(self, degree: int, exact_rows: int, is_repeatable: bool = False) -> float:
        return call_cost(self.problem, degree, exact_rows, self.gradients, is_repeatable)

    def least_degree(self, index: int) -> int | None:
        """The least degree that meets the tolerance for scores up to 2^(index/GRID)."""
        for degree in range(HIGHEST_DEGREE + 1):
            if index <= limit(degree, self.dim, self.tolerance, self.gradients):
                return degree
        return None

    def _choose(self, head: int) -> Choice:
        if not self.survey.is_usable[head]:
            return Choice(None, 0, math.inf, 0, math.inf, "q, k or v is not finite, or its sums would not be")
        bounds = self.bounds(head)
        may_weigh = self.survey.spread[head] <= self._largest_log_range()
        indices = tuple(grid_index(bound) for bound in (bounds if may_weigh else bounds[:2]))
        if indices not in self._whole:  # heads alike are decided once
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

    def _largest_log_range(self) -> float:
        """How far log w may range: sums in float32 lose small weights only where a causal row sees no others."""
        if self.problem.q.dtype == torch.float16 and self.backend(2).name == "triton":
            return LARGEST_LOG_RANGE_FLOAT16
        return LARGEST_LOG_RANGE if self.problem.causal else math.inf

    def _without_exact_rows(self, indices: tuple[int, ...]) -> Choice | None:
        """The least degree for all rows, or a higher one that costs little more, with the least centring for it."""
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
        """The highest degree that costs little more than the cheapest that meets the tolerance."""
        fits = [
            degree
            for degree in range(least, HIGHEST_DEGREE + 1)
            if index <= limit(degree, self.dim, self.tolerance, self.gradients)
        ]
        costs = {degree: self._with_costs(degree)[1] for degree in fits}
        return max(degree for degree in fits if costs[degree] <= NEARLY * min(costs.values()))

    def _if_worth_it(self, choice: Choice, heads: Sequence[int]) -> Choice:
        """The choice, or exact attention where this is cheaper or rounding would leave nothing of the guarantee."""
        allowance = self._allowance(choice, heads)
        if not allowance <= LARGEST_ROUNDING:
            dtype = str(self.problem.q.dtype).removeprefix("torch.")
            why = f"rounding in {dtype} may add {allowance:.2g} of range(v) at degree {_degree(choice)}"
            advice = "use a longer dtype"
            if not all(self._holds(choice, head) for head in heads):
                why = f"sums of degree {_degree(choice)} may leave the range of float32"
                advice = "bring q, k, v and the scale nearer to 1"
            if self.force == "polynomial":
                raise GuaranteeError(f"the polynomial cannot be forced here: {why}; {advice}, or leave force unset")
            return Choice(None, choice.centring, choice.bound, choice.exact_rows, choice.cost, why)
        if self.force == "polynomial" or choice.cost <= self._with_costs(_degree(choice))[2]:
            return choice
        why = f"degree {_degree(choice)} would meet the tolerance, but exact is predicted to be cheaper"
        return Choice(None, choice.centring, choice.bound, choice.exact_rows, choice.cost, why)

    def _none_fits(self, head: int, bound: float) -> Choice:
        degree = degree_it_would_take(bound, self.tolerance) if bound < 1e6 else None
        needed = f"degree {degree}" if degree is not None else "a degree beyond reach"
        if degree is not None and degree <= HIGHEST_DEGREE:
            needed += f" ({feature_count(self.dim, degree)} features, at most {MOST_FEATURES} fit)"
        why = f"scores up to B = {bound:.3g} would take about {needed}"
        if self.force == "polynomial":
            what = "tolerance and gradients" if self.gradients else "tolerance"
            raise GuaranteeError(
                f"the polynomial cannot meet {what} {self.tolerance:g} for key head {head}: {why}; "
                "loosen the tolerance, scale q or k down, or leave force unset"
            )
        return Choice(None, 0, bound, 0, math.inf, why)

    def row_norms(self) -> Tensor:
        """At least ‖q_i − μ‖ of every row: [N, G, n]."""
        if self._row_norms is None:
            work = self.problem.working
            self._row_norms = norm_up(self.problem.q.to(work) - self.survey.query_centre[:, None, None])
        return self._row_norms

    def row_bounds(self, head: int, centring: int) -> Tensor:
        """B_i of every row of a head: [G, n]."""
        s = self.survey
        norms = self.row_norms()[head] if centring == 2 else norm_up(self.problem.q[head].to(self.problem.working))
        keys = s.key_centred[head] if centring else s.key[head]
        grown = self.growth if centring else 1.0
        return norms * (score_bound(self.problem.scale, 1.0, keys) * grown * (1 + 2.0**-20))

    def _with_exact_rows(self, head: int, centring: int, below: int) -> list[Choice]:
        """Lower degrees, with the rows beyond their limit done exactly."""
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
                why = f"{beyond} of {rows.numel()} rows beyond B = {p.bound:.3g} are done exactly"
                choices.append(Choice(p, centring, p.bound, beyond, cost, why))
        return choices

    def rounding(self, head: int) -> float:
        """The rounding allowance of a head on the fast path, as a share of range(v)."""
        return self._allowance(self.choices[head], [head])

    def _allowance(self, choice: Choice, heads: Sequence[int]) -> float:
        """The same for a choice that some heads share; infinite where sums leave their range."""
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
        """The choices as a Plan."""
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
        return Plan(request.tolerance, request.q.dtype, tuple(heads), tuple(notes))


def _degree(choice: Choice) -> int:
    assert choice.polynomial is not None
    return choice.polynomial.degree
