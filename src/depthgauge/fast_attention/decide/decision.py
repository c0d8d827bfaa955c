"""The choice of a path for every head: the lowest degree that meets the tolerance, or exact attention if cheaper."""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import product as every
from operator import mul

import torch
from torch import Tensor

from depthgauge.fast_attention.backends import Backend
from depthgauge.fast_attention.decide.chooser import LARGEST_ROUNDING, MOST_FEATURES, Choice, Chooser, chooser_for
from depthgauge.fast_attention.plan import AttentionPlan, Fixed, HeadPlan
from depthgauge.fast_attention.problem import GuaranteeError, Problem, Request
from depthgauge.fast_attention.theory.bounds import Survey, norm_up, score_bound, unit
from depthgauge.fast_attention.theory.cost import exact_cost, feature_count
from depthgauge.fast_attention.theory.minimax import (
    HIGHEST_DEGREE,
    SMALLEST_INDEX,
    Minimax,
    at_index,
    degree_it_would_take,
    gradient_error,
    grid_index,
    output_error,
)

MOST_EXACT_ROWS = 1 / 8
"""The largest fraction of rows that are computed exactly beside a polynomial. With more, the whole head is exact."""
CENTRINGS = ("none", "keys", "keys, queries")


class Decision:
    """The choices for all heads of a problem, and the survey behind them."""

    def __init__(self, problem: Problem, survey: Survey, chooser: Chooser) -> None:
        self.problem, self.survey, self.chooser = problem, survey, chooser
        self._row_norms: Tensor | None = None
        self._beyond: dict[int, dict[int, list[int]]] = {}

    @cached_property
    def choices(self) -> list[Choice]:
        """The choice for every head."""
        return self.alike or [self._choose(head) for head in range(self.problem.heads)]

    @cached_property
    def alike(self) -> list[Choice] | None:
        """The choices if centring cannot lower the degree of any head, which is cheap to check; else None."""
        s, scale, chooser = self.survey, self.problem.scale, self.chooser
        if not all(s.is_usable):
            return None
        lowest = min(map(mul, map(min, s.query, s.query_centred), map(min, s.key, s.key_centred)))
        largest = score_bound(scale, max(map(mul, s.query, s.key)), 1.0)
        shared = chooser.alike(grid_index(largest), grid_index(abs(scale) * lowest))
        if shared is None:
            return None
        heads = range(self.problem.heads)
        if self.problem.q.is_cuda or self.backend(2).is_capturable(self.problem):  # one polynomial needs no table
            return [self._if_worth_it(shared, heads)] * len(heads)
        bounds = [score_bound(scale, q, k) for q, k in zip(s.query, s.key, strict=True)]
        whole = {bound: chooser.whole((grid_index(bound),)) for bound in set(bounds)}
        worth = {bound: self._if_worth_it(choice, heads) for bound, choice in whole.items() if choice is not None}
        return [worth[bound] for bound in bounds]

    @cached_property
    def growth(self) -> float:
        """The growth of B by rounding: centred q and k are rounded once more, and then |t| ≤ (1 + 2u)² B."""
        return (1 + 2 * unit(self.problem.q.dtype)) ** 2

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
        return self.chooser.backend(degree)

    def _choose(self, head: int) -> Choice:
        if not self.survey.is_usable[head]:
            return Choice(
                None, 0, math.inf, 0, math.inf, lambda: "q, k or v is not finite, or sums of it would overflow"
            )
        bounds, chooser = self.bounds(head), self.chooser
        may_weigh = self.survey.spread[head] <= self.backend(2).largest_log_range(self.problem)
        indices = tuple(grid_index(bound) for bound in (bounds if may_weigh else bounds[:2]))
        whole = chooser.whole(indices)
        least = HIGHEST_DEGREE + 1 if whole is None else chooser.least_degree(min(indices))
        if whole is not None and least is not None and least <= 2:
            return self._if_worth_it(whole, [head])
        found = self._with_exact_rows(head, len(indices) - 1, HIGHEST_DEGREE + 1 if least is None else least)
        found += [] if whole is None else [whole]
        if not found:
            return self._none_fits(head, min(bounds[: len(indices)]))
        return self._if_worth_it(min(found, key=lambda choice: choice.cost), [head])

    def _if_worth_it(self, choice: Choice, heads: Sequence[int]) -> Choice:
        """Return the choice, or exact attention if it is cheaper or if the rounding allowance is too large."""
        degree, force = choice.degree(), self.chooser.force
        allowance = self._allowance(choice, heads)
        if not allowance <= LARGEST_ROUNDING:
            is_held = self._holds(choice, heads)

            def why() -> str:
                if not is_held:
                    return f"sums of degree {degree} may leave the range of float32"
                dtype = str(self.problem.q.dtype).removeprefix("torch.")
                return f"rounding in {dtype} may add {allowance:.2g} × range(v) at degree {degree}"

            if force == "polynomial":
                advice = "use a longer dtype" if is_held else "scale q, k and v closer to 1"
                raise GuaranteeError(f'force="polynomial" is not possible: {why()}; {advice}, or leave force unset')
            return Choice(None, choice.centring, choice.bound, choice.exact_rows, choice.cost, why)
        if self.chooser.is_worth_it(choice):
            return choice

        def cheaper() -> str:
            return f"degree {degree} meets the tolerance, but exact attention is predicted to be cheaper"

        return Choice(None, choice.centring, choice.bound, choice.exact_rows, choice.cost, cheaper)

    def _none_fits(self, head: int, bound: float) -> Choice:
        chooser = self.chooser

        def why() -> str:
            degree = degree_it_would_take(bound, chooser.tolerance) if bound < 1e6 else None
            needed = f"about degree {degree}" if degree is not None else "a degree that is out of reach"
            if degree is not None and degree <= HIGHEST_DEGREE:
                features = feature_count(chooser.sizes.d, degree)
                needed += f" with {features} features, more than the limit of {MOST_FEATURES}"
            return f"scores up to B = {bound:.3g} need {needed}"

        if chooser.force == "polynomial":
            what = " with gradients" if chooser.gradients else ""
            raise GuaranteeError(
                f"the polynomial path cannot meet tolerance {chooser.tolerance:g}{what} for key head {head}: {why()}; "
                "increase the tolerance, scale q or k down, or leave force unset"
            )
        return Choice(None, 0, bound, 0, math.inf, why)

    def row_norms(self) -> Tensor:
        """Return an upper bound on ‖q_i − μ‖ for every row: [N, G, n]."""
        if self._row_norms is None:
            work = self.problem.working
            self._row_norms = norm_up(self.problem.q.to(work) - self.survey.query_centre[:, None, None])
        return self._row_norms

    def _row_factor(self, head: int, centring: int) -> float:
        """Return the factor with which the norm of a query becomes B_i."""
        s = self.survey
        keys = s.key_centred[head] if centring else s.key[head]
        return score_bound(self.problem.scale, 1.0, keys) * (self.growth if centring else 1.0) * (1 + 2.0**-20)

    def row_bounds(self, head: int, centring: int) -> Tensor:
        """Return B_i for every row of a head: [G, n]."""
        norms = self.row_norms()[head] if centring == 2 else norm_up(self.problem.q[head].to(self.problem.working))
        return norms * self._row_factor(head, centring)

    def _rows_beyond(self, centring: int) -> dict[int, list[int]]:
        """Return for every degree the number of rows of every head with B_i beyond the limit of the degree.

        All heads are counted at once, with one transfer to the host.
        """
        if centring not in self._beyond:
            limits = {degree: self.chooser.limit(degree) for degree in range(1, HIGHEST_DEGREE + 1)}
            known = {degree: index for degree, index in limits.items() if index >= SMALLEST_INDEX}
            norms = self.row_norms() if centring == 2 else norm_up(self.problem.q.to(self.problem.working))
            factors = [self._row_factor(head, centring) for head in range(self.problem.heads)]
            rows = norms * norms.new_tensor(factors)[:, None, None]
            counts = [(~(rows <= at_index(degree, index).bound)).sum(dim=(1, 2)) for degree, index in known.items()]
            table = torch.stack(counts).tolist() if counts else []
            self._beyond[centring] = dict(zip(known, table, strict=True))
        return self._beyond[centring]

    def _with_exact_rows(self, head: int, centring: int, below: int) -> list[Choice]:
        """Return choices of lower degrees, in which the rows with B_i beyond the limit are computed exactly."""
        groups, n = self.problem.q.shape[1:3]
        choices = []
        for degree, counts in self._rows_beyond(centring).items():
            beyond = counts[head]
            if degree < below and 0 < beyond <= MOST_EXACT_ROWS * groups * n:
                p = at_index(degree, self.chooser.limit(degree))
                choices.append(self._beside_exact_rows(p, centring, beyond, groups * n))
        return choices

    def _beside_exact_rows(self, p: Minimax, centring: int, beyond: int, rows: int) -> Choice:
        def why() -> str:
            return f"{beyond} of {rows} rows exceed B = {p.bound:.3g} and are computed exactly"

        return Choice(p, centring, p.bound, beyond, self.chooser.cost(p.degree, beyond), why)

    def rounding(self, head: int) -> float:
        """Return the rounding allowance of a head on the polynomial path, as a fraction of range(v)."""
        return self._allowance(self.choices[head], [head])

    def _allowance(self, choice: Choice, heads: Sequence[int]) -> float:
        """Return the largest rounding allowance of heads that share a choice, or infinity if sums leave their range."""
        if choice.polynomial is None:
            return 0.0
        if not self._holds(choice, heads):
            return math.inf
        spread = max(self.survey.spread[head] for head in heads) if choice.centring == 2 else 0.0
        return self.chooser.allowance(choice, spread)

    def _holds(self, choice: Choice, heads: Sequence[int]) -> bool:
        s, backend = self.survey, self.backend(choice.degree())
        return all(backend.holds(s.scale, s.query[head], s.key[head], s.value_size[head]) for head in heads)

    def plan(self, request: Request, notes: Sequence[str], fixed: Fixed | str) -> AttentionPlan:
        """Return the choices as a AttentionPlan. `fixed` is what later calls need to follow it."""
        shape, chooser, sizes = request.k.shape[:-2], self.chooser, self.chooser.sizes
        heads = []
        for head, index in enumerate(every(*map(range, shape))):
            c = self.choices[head]
            p = c.polynomial
            before, _, after = self.bounds(head)
            degree = p.degree if p else None
            backend = self.backend(p.degree if p else 2)
            heads.append(
                HeadPlan(
                    index=index, path="polynomial" if p else "exact", why=c.why(), bound_before=before,
                    bound_after=after, centring=CENTRINGS[c.centring] if p else "none", degree=degree,
                    features=feature_count(sizes.d, degree) if degree is not None else 0, exact_rows=c.exact_rows,
                    cost_exact=exact_cost(sizes, backend.rates), cost_polynomial=c.cost,
                    guarantee=output_error(p.error) if p else 0.0, rounding=self.rounding(head),
                    gradient=gradient_error(p) if p and chooser.gradients else None, backend=backend.name,
                )
            )  # fmt: skip
        return AttentionPlan(request.options.tolerance, request.q.dtype, tuple(heads), tuple(notes), fixed)


def survey_of(problem: Problem, chooser: Chooser) -> Survey:
    """Return the survey of a problem, computed by the backend of degree 2."""
    return chooser.backend(2).survey(problem)


def decide(request: Request, problem: Problem) -> Decision:
    """Survey the problem and choose a path for every head."""
    n, m = request.q.shape[-2], request.k.shape[-2]
    chooser = chooser_for(request.rules, n, m, request.needs_gradients, problem.keep is not None)
    problem = problem.detach()
    return Decision(problem, survey_of(problem, chooser), chooser)


def decided(problem: Problem, chooser: Chooser) -> Decision | None:
    """Survey the problem and return a decision in which some head has a polynomial, or None if there is none."""
    problem = problem.detach()
    survey = survey_of(problem, chooser)
    if chooser.force is None and chooser.is_beyond(survey.least_product):
        return None
    decision = Decision(problem, survey, chooser)
    return decision if any(choice.polynomial is not None for choice in decision.choices) else None
