"""The plan of a call: for every head the lowest degree that meets the tolerance, or exact attention if it is cheaper.

A plan is a function of a call and its tensors. What depends on the call alone, which polynomials pay and their kernel
launches, is `PreparedCall` once. A `Decision` has the choices for all heads of some tensors, and computes them. An
`AttentionPlan` is what a user sees of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import product as every
from operator import mul
from typing import Any

import torch
from torch import Tensor

from depthgauge.base.format import counted, number
from depthgauge.fast_attention import exact_path as exact
from depthgauge.fast_attention.bounds import (
    HIGHEST_DEGREE,
    SMALLEST_INDEX,
    Minimax,
    Survey,
    at_index,
    degree_it_would_take,
    gradient_error,
    grid_bound,
    grid_index,
    limit_index,
    moment_certificate,
    moment_terms,
    norm_up,
    output_error,
    score_bound,
    suited,
    unit,
    value_range,
)
from depthgauge.fast_attention.call import (
    CPU,
    GPU_TORCH,
    Call,
    GuaranteeError,
    Tensors,
    feature_count,
    filled,
)
from depthgauge.fast_attention.polynomial_path import Backend, Batch, TorchBackend, second_moments
from depthgauge.fast_attention.triton_backend import TritonBackend, outward, survey_of_numbers, surveyed

MOST_FEATURES = 2**17
LARGEST_TOLERANCE = 0.5
"""Looser tolerances are replaced by this one, which meets them."""
NEARLY = 1.25
"""A higher degree is chosen if it costs at most this many times the cheapest degree."""
LARGEST_ROUNDING = 0.25
"""The largest rounding allowance of the polynomial path, as a fraction of range(v). Heads beyond it are exact."""
COARSE = 8
"""One polynomial for all heads is computed for every eighth B of the grid only. A new one takes some 15 ms."""
MOST_EXACT_ROWS = 1 / 8
"""The largest fraction of rows that are computed exactly beside a polynomial. With more, the whole head is exact."""
LONGEST_WAIT = 1024
"""The most calls of an `Attention` object that are exact without a survey after one that was."""
CENTRINGS = ("none", "keys", "keys, queries")
TORCH_CPU = TorchBackend(CPU)
TORCH_GPU = TorchBackend(GPU_TORCH)
TRITON = TritonBackend()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether the extra `gpu` is installed."""
    return find_spec("triton") is not None


def backend_for(call: Call, degree: int) -> Backend:
    """Return the Triton backend for GPU tensors that its kernels support, and a torch backend otherwise."""
    if call.device.type != "cuda":
        return TORCH_CPU
    return TRITON if TRITON.supports(call, degree) and has_triton() else TORCH_GPU


def notes(device: torch.device) -> tuple[str, ...]:
    """Return remarks for the user about the choice of backend."""
    if device.type == "cuda" and not has_triton():
        return ("triton is not installed (extra gpu): the torch backend is used on the GPU",)
    return ()


# --- what a user sees -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadPlan:
    """The plan of one key head and the query heads that share it.

    `index` is the position of the head in the leading axes of k. `bound_before` and `bound_after` are the proved bound
    B on |scores| without and with centring. `exact_rows` counts the rows that are computed exactly beside the
    polynomial. Costs are predicted operations. `guarantee` and `rounding` are fractions of range(v); `gradient` is the
    relative bound of the gradients, or None if no gradient is needed.
    """

    index: tuple[int, ...]
    path: str
    why: str
    bound_before: float = math.nan
    bound_after: float = math.nan
    centring: str = "none"
    degree: int | None = None
    features: int = 0
    exact_rows: int = 0
    cost_exact: float = math.nan
    cost_polynomial: float = math.nan
    guarantee: float = 0.0
    rounding: float = 0.0
    gradient: float | None = None
    backend: str = "torch"


@dataclass(frozen=True)
class AttentionPlan:
    """What `attention` does with some arguments. `str(plan)` is a table with one row per key head.

    Pass it to `attention` as `plan` to use its decision for other tensors of the same shapes: no number is then copied
    to the host, so that the call can be captured in a CUDA graph. `fixed` is the polynomial that such calls use for all
    heads, or why there can be none. Call `check` after them.

    `shapes` are those of q, k and v. `norms` are the largest ‖q‖ and ‖k‖ of every head when the plan was made, and
    `violations` counts on the device the calls whose scores may exceed `fixed.bound`.

    Every output entry of a head differs from exact attention by at most

        (guarantee + rounding) × range(v column) + output_unit × |entry| + output_floor.
    """

    call: Call
    shapes: tuple[tuple[int, ...], ...]
    heads: tuple[HeadPlan, ...]
    notes: tuple[str, ...]
    fixed: Minimax | str = field(compare=False, repr=False)
    norms: tuple[list[float], list[float]] = field(compare=False, repr=False, default=([], []))
    violations: Tensor | None = field(compare=False, repr=False, default=None)

    @property
    def tolerance(self) -> float:
        """The largest error of an output entry, as a fraction of the range of its values."""
        return self.call.tolerance

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k, v and the output."""
        return self.call.dtype

    def check(self) -> None:
        """Raise an error if a call that followed this plan had scores beyond its bound. Waits for the device.

        Raises:
            GuaranteeError: The outputs of at least one call since the last check have no guarantee.
        """
        if isinstance(self.fixed, str) or self.violations is None:
            return  # no call can follow this plan, unless it is exact, and exact attention needs no check
        count = int(self.violations)
        if count:
            self.violations.zero_()
            raise GuaranteeError(
                f"{counted(count, 'call')} that followed this plan may have scores beyond B = {self.fixed.bound:.3g}, "
                "or numbers that are not finite: their outputs have no guarantee; make a new plan from such tensors, "
                "or call attention without plan"
            )

    @property
    def path(self) -> str:
        """`exact`, `polynomial`, or `mixed` if heads take different paths."""
        paths = {head.path for head in self.heads}
        return paths.pop() if len(paths) == 1 else "mixed" if paths else "exact"

    @property
    def guarantee(self) -> float:
        """The largest guaranteed error of any head, as a fraction of range(v)."""
        return max((head.guarantee for head in self.heads), default=0.0)

    @property
    def rounding(self) -> float:
        """The largest rounding allowance of any head on the polynomial path, as a fraction of range(v)."""
        return max((head.rounding for head in self.heads), default=0.0)

    @property
    def output_unit(self) -> float:
        """The relative error of storing an entry in the output dtype, including values with a large mean."""
        return 4 * unit(self.dtype)

    @property
    def output_floor(self) -> float:
        """The absolute error of entries below the normal range of the dtype: its smallest normal number."""
        return float(torch.finfo(self.dtype).tiny)

    def __str__(self) -> str:
        rows = [
            ("head", "path", "B", "centred", "degree", "features", "exact rows", "cost", "exact cost", "error", "why")
        ]
        for h in self.heads:
            is_fast = h.path == "polynomial"
            rows.append((
                ",".join(map(str, h.index)), f"{h.path} ({h.backend})" if is_fast else h.path,
                number(h.bound_before), number(h.bound_after), "-" if h.degree is None else str(h.degree),
                str(h.features) if is_fast else "-", str(h.exact_rows) if is_fast else "-",
                number(h.cost_polynomial, 2), number(h.cost_exact, 2),
                f"{number(h.guarantee, 2)} + {number(h.rounding, 1)}" if is_fast else "0", h.why,
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"attention at tolerance {self.tolerance:g}: {self.path}", *lines, *self.notes])


def shapes_of(given: Tensors) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of q, k and v."""
    return tuple(tuple(x.shape) for x in given[:3])


def exact_plan(call: Call, given: Tensors, why: str) -> AttentionPlan:
    """Return the plan of a call that only the exact path supports, so that nothing has to be bounded."""
    heads = tuple(HeadPlan(at, "exact", why) for at in every(*map(range, given.k.shape[:-2])))
    return AttentionPlan(call, shapes_of(given), heads, (), why)


# --- what depends on the call alone -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Choice:
    """The decision for one key head.

    `degree` is −1 for exact attention. `centring` is 0, 1 or 2 as in `Batch`. `bound` is B, `exact_rows` the number of
    rows computed exactly beside the polynomial, and `cost` the predicted cost of the polynomial path. `why` returns the
    reason; it is called for plans and errors only. `make` returns the polynomial, which may take some 15 ms.
    """

    degree: int
    centring: int
    bound: float
    exact_rows: int
    cost: float
    why: Callable[[], str]
    make: Callable[[], Minimax] | None = None

    @property
    def polynomial(self) -> Minimax | None:
        """The polynomial, or None for exact attention."""
        return None if self.make is None else self.make()

    def group(self) -> tuple[int, bool]:
        """Return what heads computed together have in common: the degree, and whether q or k are changed."""
        return self.degree, self.degree >= 0 and (self.centring > 0 or self.exact_rows > 0)

    def refused(self, why: Callable[[], str]) -> "Choice":
        """Return exact attention in place of this choice."""
        return Choice(-1, self.centring, self.bound, self.exact_rows, self.cost, why)


class PreparedCall:
    """What a call fixes: the polynomials that pay, their launches, and how often an object looks at such calls.

    At 8,192 tokens the kernels take 0.26 ms. To decide for every head takes the host as long again (row `regime,
    forward, n = 8192` of benchmarks/attention_dropin.py). `usual` computes calls in which all heads share one
    polynomial, and leaves all others to `Decision` with the same survey. It never decides otherwise.

    An object looks less often at calls for which exact attention was chosen: r times in a row, and the next 2^(r−1)
    calls, at most LONGEST_WAIT, are exact without a survey.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.tolerance, self.scale = call, min(call.tolerance, LARGEST_TOLERANCE), abs(call.scale)
        self._backends: dict[int, tuple[Backend, float, float]] = {}
        self._shared: dict[tuple[int, int], Batch | None] = {}
        self._left = self._length = 0
        self._is_small = False

    def is_waiting(self) -> bool:
        """Return whether this call is exact without a survey, and count it."""
        self._left -= 1
        return self._left >= 0

    def record(self, is_refused: bool) -> None:
        """Record a look: exact attention was chosen for all heads (`is_refused`), or a polynomial for some."""
        self._is_small = not is_refused
        self._left = self._length = min(LONGEST_WAIT, max(1, 2 * self._length)) if is_refused else 0

    def backend(self, degree: int) -> Backend:
        """Return the backend that computes this degree."""
        return self.with_costs(degree)[0]

    def with_costs(self, degree: int) -> tuple[Backend, float, float]:
        """Return the backend of a degree, its cost for a head without exact rows, and the cost of exact attention."""
        if degree not in self._backends:
            backend = backend_for(self.call, degree)
            cost = self.call.polynomial_cost(degree, 0, backend.rates)
            self._backends[degree] = backend, cost, self.call.exact_cost(backend.rates)
        return self._backends[degree]

    def pays(self, degree: int, cost: float | None = None) -> bool:
        """Return whether a degree is forced, or predicted to cost no more than exact attention."""
        _, least, exact_cost = self.with_costs(degree)
        return self.call.force == "polynomial" or (least if cost is None else cost) <= exact_cost

    @cached_property
    def is_examined(self) -> bool:
        """Whether the numbers of such calls are examined: see `Rates.examined_from`."""
        first = self.backend(2).rates.examined_from
        return any(self.limit(g) >= SMALLEST_INDEX and self.pays(g) for g in range(first, HIGHEST_DEGREE + 1))

    @cached_property
    def largest_bound(self) -> float:
        """The largest B that a polynomial covers whose cost is worth it, or 0 if none is."""
        degrees = [degree for degree in range(HIGHEST_DEGREE + 1) if self.pays(degree)]
        return max((grid_bound(self.limit(g)) for g in degrees if self.limit(g) >= SMALLEST_INDEX), default=0.0)

    def look(self, tensors: Tensors) -> Callable[[], bool] | None:
        """Begin a first look at some numbers; return what waits for it, or None if it is not needed.

        It tells whether the look shows that a survey would end in exact attention for all heads: the scores of too many
        rows are larger than any polynomial covers that pays. If the last survey found a polynomial, the survey is made
        at once: what is decided is the same.
        """
        if self.call.force is not None or self._is_small:
            return None
        share = self.backend(2).look(self.call, tensors, self.largest_bound)
        return lambda: share() > MOST_EXACT_ROWS

    def limit(self, degree: int) -> int:
        """Return the largest grid index at which this degree meets the tolerance, or one below all others."""
        if feature_count(self.call.d, degree) > MOST_FEATURES:
            return SMALLEST_INDEX - 1
        return limit_index(degree, self.tolerance, self.call.gradients)

    def least_degree(self, index: int) -> int | None:
        """Return the lowest degree that meets the tolerance for scores up to 2^(index/GRID), or None."""
        return next((degree for degree in range(HIGHEST_DEGREE + 1) if index <= self.limit(degree)), None)

    def whole(self, indices: tuple[int, ...]) -> Choice | None:
        """Return the lowest degree for all rows, or a higher one of similar cost, with the least centring.

        Args:
            indices: the grid indices of B without centring, with centred keys, and with centred keys and queries.
        """
        degrees = [self.least_degree(index) for index in indices]
        known = [degree for degree in degrees if degree is not None]
        if not known:
            return None
        centring = degrees.index(min(known))
        return self._suited(self._nearly_free(min(known), indices[centring]), indices[centring], centring)

    def _suited(self, degree: int, index: int, centring: int) -> Choice:
        arguments = degree, index, self.call.d, self.tolerance, self.call.gradients
        why, cost = (lambda: "meets the tolerance at this degree"), self.with_costs(degree)[1]
        return Choice(degree, centring, grid_bound(index), 0, cost, why, lambda: suited(*arguments))

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
        return self._suited(degree, min(-(-index // COARSE) * COARSE, self.limit(degree)), 0)

    def allowance(self, choice: Choice, spread: float) -> float:
        """Return the rounding allowance of a head, as a fraction of range(v). `spread` bounds log w_i − log w_j."""
        p = choice.polynomial
        if p is None:
            return 0.0
        return self.backend(choice.degree).rounding(self.call, p, choice.bound, choice.centring, spread)

    def largest(self, degree: int) -> Choice | None:
        """Return the polynomial of a degree for the largest scores that it covers, or None if rounding forbids it."""
        choice = self._suited(degree, self.limit(degree), 0)
        return choice if self.allowance(choice, 0.0) <= LARGEST_ROUNDING else None

    @cached_property
    def kernels(self) -> TritonBackend | None:
        """The backend that `usual` needs: kernels in which values are centred after the sums."""
        backend = self.backend(2)
        return backend if isinstance(backend, TritonBackend) and backend.is_capturable(self.call) else None

    def usual(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | Survey:
        """Return the output, or the survey if `Decision` has to decide.

        q, k and v are contiguous and the keys of the call are all keys of k.
        """
        found = surveyed(self.call, Tensors(q, k, v))
        numbers = found[: 6 * self.call.heads].tolist()
        at = self.indices(numbers)
        batch = None if at is None else self.shared(*at)
        if batch is None:
            return survey_of_numbers(self.call, found, numbers)
        return self.backend(batch.degree).compute(batch, q, k, v, needs_z=False)[0]

    def indices(self, numbers: list[float]) -> tuple[int, int] | None:
        """Return the grid indices of `alike` for the numbers of `surveyed`, or None if they are unusual.

        B is the largest of all heads, as in `Decision`. With a = √max ‖q‖² and b = √max ‖k‖² of a head, the outward
        rounded product satisfies (up a + lost)(up b + lost) ≤ up² a b + lost (up (max a + max b) + lost).
        """
        h, (up, lost), (smallest, largest) = self.call.heads, outward(self.call.d), value_range(self.call)
        query, key, values = numbers[:h], numbers[h : 2 * h], numbers[4 * h : 5 * h]
        long_q, long_k, least_q, least_k = max(query), max(key), min(query), min(key)
        short_q, short_k = min(least_q, *numbers[2 * h : 3 * h]), min(least_k, *numbers[3 * h : 4 * h])  # centred
        is_inside = max(long_q, long_k) <= 2.0**40 and min(least_q, least_k) >= 2.0**-40  # as in `holds`
        is_inside = is_inside and max(smallest, 2.0**-40) <= min(values) and max(values) <= min(largest, 2.0**40)
        if not (is_inside and 2.0**-20 <= self.scale <= 2.0**20 and math.isfinite(sum(numbers))):
            return None
        longest = lost * (up * (math.sqrt(long_q) + math.sqrt(long_k)) + lost)
        bound = up * up * math.sqrt(max(map(mul, query, key))) + longest
        # With centring, no head may have scores for which a lower degree is enough.
        lowest = grid_index(self.scale * math.sqrt(short_q * short_k))
        return grid_index(self.scale * bound * (1 + 2.0**-50)), lowest

    def shared(self, index: int, lowest: int) -> Batch | None:
        """Return all heads with one polynomial that the kernels compute: see `alike`."""
        if (index, lowest) not in self._shared:
            choice, own = self.alike(index, lowest), None
            if choice is not None and choice.degree in (1, 2) and self.pays(choice.degree):
                p, h = choice.polynomial, self.call.heads
                if p is not None and self.allowance(choice, 0.0) <= LARGEST_ROUNDING:
                    own = Batch(self.call, (p.coefficients,) * h, (0,) * h, Survey(self.call), None)
            self._shared[index, lowest] = own
        return self._shared[index, lowest]


@lru_cache(maxsize=1024)
def prepared_for(call: Call, *tokens: Any) -> PreparedCall:
    """Return what is prepared for a call. `tokens` are those of `left_out`, if the call has none: this saves time."""
    return PreparedCall(filled(call, *tokens) if tokens else call)


# --- the choices for tensors ------------------------------------------------------------------------------------------


class Decision:
    """The choices for all heads of some tensors, and the survey behind them.

    Unless `is_explained`, exact attention is chosen where a polynomial costs more, without a look at its rounding.
    """

    def __init__(self, prepared: PreparedCall, tensors: Tensors, survey: Survey, is_explained: bool = True) -> None:
        self.prepared, self.call, self.tensors, self.survey = prepared, prepared.call, tensors, survey
        self.is_explained, self.backend = is_explained or self.call.force == "polynomial", prepared.backend
        self._beyond: dict[int, dict[int, list[int]]] = {}

    @cached_property
    def choices(self) -> list[Choice]:
        """The choice for every head."""
        return self.alike or [self._choose(head) for head in range(self.call.heads)]

    @cached_property
    def alike(self) -> list[Choice] | None:
        """On a GPU, where one polynomial needs no table: the choices if centring cannot lower any degree; else None."""
        s, scale, prepared = self.survey, self.call.scale, self.prepared
        is_wanted = self.call.device.type == "cuda" or self.backend(2).is_capturable(self.call)
        if not (is_wanted and all(s.is_usable)):
            return None
        lowest = min(map(mul, map(min, s.query, s.query_centred), map(min, s.key, s.key_centred)))
        largest = score_bound(scale, max(map(mul, s.query, s.key)), 1.0)
        shared = prepared.alike(grid_index(largest), grid_index(abs(scale) * lowest))
        if shared is None:
            return None
        heads = range(self.call.heads)
        return [self._if_worth_it(shared, heads)] * len(heads)

    @cached_property
    def growth(self) -> float:
        """The growth of B by rounding: centred q and k are rounded once more, and then |t| ≤ (1 + 2u)² B."""
        return (1 + 2 * unit(self.call.dtype)) ** 2

    def bounds(self, head: int) -> tuple[float, float, float]:
        """Return B without centring, with centred keys, and with centred keys and queries."""
        s, scale, grown = self.survey, self.call.scale, self.growth
        keys = s.key_centred[head]
        return (
            score_bound(scale, s.query[head], s.key[head]),
            score_bound(scale, s.query[head], keys) * grown,
            score_bound(scale, s.query_centred[head], keys) * grown,
        )

    def _choose(self, head: int) -> Choice:
        if not self.survey.is_usable[head]:
            return Choice(-1, 0, math.inf, 0, math.inf, lambda: "q, k or v is not finite, or sums of it would overflow")
        bounds, prepared = self.bounds(head), self.prepared
        may_weigh = self.survey.spread[head] <= self.backend(2).largest_log_range(self.call)
        indices = tuple(grid_index(bound) for bound in (bounds if may_weigh else bounds[:2]))
        whole = prepared.whole(indices)
        least = HIGHEST_DEGREE + 1 if whole is None else prepared.least_degree(min(indices))
        if whole is not None and least is not None and least <= 2:
            return self._if_worth_it(whole, [head])
        found = self._with_exact_rows(head, len(indices) - 1, HIGHEST_DEGREE + 1 if least is None else least)
        found += [] if whole is None else [whole]
        if not found:
            return self._none_fits(head, min(bounds[: len(indices)]))
        return self._if_worth_it(min(found, key=lambda choice: choice.cost), [head])

    def _if_worth_it(self, choice: Choice, heads: Sequence[int]) -> Choice:
        """Return the choice, or exact attention if it is cheaper or if the rounding allowance is too large."""
        degree, force = choice.degree, self.call.force
        is_worth_it = self.prepared.pays(degree, choice.cost)
        if not (is_worth_it or self.is_explained):
            return choice.refused(lambda: "exact attention is predicted to be cheaper")
        allowance = self._allowance(choice, heads)
        if not allowance <= LARGEST_ROUNDING:
            is_held = self._holds(choice, heads)

            def why() -> str:
                if not is_held:
                    return f"sums of degree {degree} may leave the range of float32"
                dtype = str(self.call.dtype).removeprefix("torch.")
                return f"rounding in {dtype} may add {allowance:.2g} × range(v) at degree {degree}"

            if force == "polynomial":
                advice = "use a longer dtype" if is_held else "scale q, k and v closer to 1"
                raise GuaranteeError(f'force="polynomial" is not possible: {why()}; {advice}, or leave force unset')
            return choice.refused(why)
        if is_worth_it:
            return choice

        return choice.refused(
            lambda: f"degree {degree} meets the tolerance, but exact attention is predicted to be cheaper"
        )

    def _none_fits(self, head: int, bound: float) -> Choice:
        tolerance = self.prepared.tolerance

        def why() -> str:
            degree = degree_it_would_take(bound, tolerance) if bound < 1e6 else None
            needed = f"about degree {degree}" if degree is not None else "a degree that is out of reach"
            if degree is not None and degree <= HIGHEST_DEGREE:
                features = feature_count(self.call.d, degree)
                needed += f" with {features} features, more than the limit of {MOST_FEATURES}"
            return f"scores up to B = {bound:.3g} need {needed}"

        if self.call.force == "polynomial":
            what = " with gradients" if self.call.gradients else ""
            raise GuaranteeError(
                f"the polynomial path cannot meet tolerance {tolerance:g}{what} for key head {head}: {why()}; "
                "increase the tolerance, scale q or k down, or leave force unset"
            )
        return Choice(-1, 0, bound, 0, math.inf, why)

    @cached_property
    def row_norms(self) -> Tensor:
        """An upper bound on ‖q_i − μ‖ for every row: [N, G, n]."""
        return norm_up(self.tensors.q.to(self.call.working) - self.survey.query_centre[:, None, None])

    def _row_factor(self, head: int, centring: int) -> float:
        """Return the factor with which the norm of a query becomes B_i."""
        s = self.survey
        keys = s.key_centred[head] if centring else s.key[head]
        return score_bound(self.call.scale, 1.0, keys) * (self.growth if centring else 1.0) * (1 + 2.0**-20)

    def row_bounds(self, head: int, centring: int) -> Tensor:
        """Return B_i for every row of a head: [G, n]."""
        norms = self.row_norms[head] if centring == 2 else norm_up(self.tensors.q[head].to(self.call.working))
        return norms * self._row_factor(head, centring)

    def _rows_beyond(self, centring: int) -> dict[int, list[int]]:
        """Return for every degree the number of rows of every head with B_i beyond the limit of the degree.

        All heads are counted at once, with one transfer to the host.
        """
        if centring not in self._beyond:
            degrees = [g for g in range(1, HIGHEST_DEGREE + 1) if self.is_explained or self.prepared.pays(g)]
            limits = {degree: self.prepared.limit(degree) for degree in degrees}
            known = {degree: index for degree, index in limits.items() if index >= SMALLEST_INDEX}
            if not known:
                return {}
            norms = self.row_norms if centring == 2 else norm_up(self.tensors.q.to(self.call.working))
            factors = [self._row_factor(head, centring) for head in range(self.call.heads)]
            rows = norms * norms.new_tensor(factors)[:, None, None]
            counts = [(~(rows <= grid_bound(index))).sum(dim=(1, 2)) for index in known.values()]
            self._beyond[centring] = dict(zip(known, torch.stack(counts).tolist(), strict=True))
        return self._beyond[centring]

    def _with_exact_rows(self, head: int, centring: int, below: int) -> list[Choice]:
        """Return choices of lower degrees, in which the rows with B_i beyond the limit are computed exactly."""
        most = MOST_EXACT_ROWS * self.call.groups * self.call.n
        return [
            self._beside_exact_rows(degree, centring, counts[head])
            for degree, counts in self._rows_beyond(centring).items()
            if degree < below and 0 < counts[head] <= most
        ]

    def _beside_exact_rows(self, degree: int, centring: int, beyond: int) -> Choice:
        index, rates, rows = self.prepared.limit(degree), self.backend(degree).rates, self.call.groups * self.call.n
        bound, cost = grid_bound(index), self.call.polynomial_cost(degree, beyond, rates)

        def why() -> str:
            return f"{beyond} of {rows} rows exceed B = {bound:.3g} and are computed exactly"

        return Choice(degree, centring, bound, beyond, cost, why, lambda: at_index(degree, index))

    def rounding(self, head: int) -> float:
        """Return the rounding allowance of a head on the polynomial path, as a fraction of range(v)."""
        return self._allowance(self.choices[head], [head])

    def _allowance(self, choice: Choice, heads: Sequence[int]) -> float:
        """Return the largest rounding allowance of heads that share a choice, or infinity if sums leave their range."""
        if choice.degree < 0:
            return 0.0
        if not self._holds(choice, heads):
            return math.inf
        spread = max(self.survey.spread[head] for head in heads) if choice.centring == 2 else 0.0
        return self.prepared.allowance(choice, spread)

    def _holds(self, choice: Choice, heads: Sequence[int]) -> bool:
        s, backend = self.survey, self.backend(choice.degree)
        return all(backend.holds(s.scale, s.query[head], s.key[head], s.value_size[head]) for head in heads)

    def plan(self, given: Tensors) -> AttentionPlan:
        """Return the choices as an AttentionPlan of the given tensors."""
        call, heads = self.call, []
        for head, index in enumerate(every(*map(range, given.k.shape[:-2]))):
            c, p = self.choices[head], self.choices[head].polynomial
            before, _, after = self.bounds(head)
            degree = p.degree if p else None
            backend = self.backend(p.degree if p else 2)
            heads.append(
                HeadPlan(
                    index=index, path="polynomial" if p else "exact", why=c.why(), bound_before=before,
                    bound_after=after, centring=CENTRINGS[c.centring] if p else "none", degree=degree,
                    features=feature_count(call.d, degree) if degree is not None else 0, exact_rows=c.exact_rows,
                    cost_exact=call.exact_cost(backend.rates), cost_polynomial=c.cost,
                    guarantee=output_error(p.error) if p else 0.0, rounding=self.rounding(head),
                    gradient=gradient_error(p) if p and call.gradients else None, backend=backend.name,
                )
            )  # fmt: skip
        violations = torch.zeros((), dtype=torch.int64, device=call.device)
        norms, told = (self.survey.query, self.survey.key), notes(call.device)
        return AttentionPlan(call, shapes_of(given), tuple(heads), told, self._fixed(), norms, violations)

    def _fixed(self) -> Minimax | str:
        """Return the polynomial for all heads of later calls, or why there is none."""
        if self.call.is_padded:
            return "it has padding keys"
        if any(choice.degree < 0 for choice in self.choices):
            return "some of its heads are exact"
        largest_score = max(self.bounds(head)[0] for head in range(self.call.heads))
        shared = self.prepared.alike(grid_index(largest_score))
        if shared is None or not self.prepared.allowance(shared, 0.0) <= LARGEST_ROUNDING:
            return f"no polynomial covers its scores, up to {largest_score:.3g}, without centring or exact rows"
        p = (self.prepared.largest(shared.degree) or shared).polynomial
        assert p is not None
        return p

    def batch(self, tensors: Tensors, members: Sequence[int]) -> Batch:
        """Return heads of one degree. `tensors` are those of these heads."""
        choices, rows = [self.choices[head] for head in members], None
        if any(choice.exact_rows for choice in choices):
            none = torch.zeros(tensors.q.shape[1:3], dtype=torch.bool, device=tensors.q.device)
            rows = torch.stack([
                ~(self.row_bounds(head, choice.centring) <= choice.bound) if choice.exact_rows else none
                for head, choice in zip(members, choices, strict=True)
            ])  # fmt: skip
        coefficients = tuple([p.coefficients for choice in choices if (p := choice.polynomial) is not None])
        call, is_all = self.call, len(members) == self.call.heads
        return Batch(
            call=call if is_all else call._replace(heads=len(members)),
            coefficients=coefficients,
            centrings=tuple([choice.centring for choice in choices]),
            survey=self.survey if is_all else self.survey.select(members),
            tensors=tensors.detach(),
            exact_rows=rows,
        )

    def run(self, tensors: Tensors, return_bound: bool) -> tuple[Tensor, Tensor | None]:
        """Return out [N, G, n, e] of the flat tensors and, with `return_bound`, the bounds of the rows [N, G, n].

        Heads of the same degree are computed together, except that heads whose q or k are changed first form a batch of
        their own.
        """
        groups = [choice.group() for choice in self.choices]
        distinct = sorted(set(groups))
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for group in distinct:
            members = [head for head, own in enumerate(groups) if own == group]
            if len(distinct) == 1 and group[0] >= 0:
                return self._polynomial(tensors, members, return_bound)
            at = torch.tensor(members, device=tensors.q.device)
            part = tensors.select(at)
            if group[0] < 0:
                out = exact.heads(self.call, part)
                parts.append((at, out, out.new_zeros(out.shape[:-1], dtype=torch.float64)))
            else:
                parts.append((at, *self._polynomial(part, members, return_bound)))
        order = torch.cat([at for at, _, _ in parts]).argsort()
        out = torch.cat([part for _, part, _ in parts])[order]
        bounds = [bound for _, _, bound in parts if bound is not None]
        return out, torch.cat(bounds)[order] if return_bound else None

    def _polynomial(self, tensors: Tensors, members: Sequence[int], return_bound: bool) -> tuple[Tensor, Tensor | None]:
        """Compute the polynomial path for heads of one degree, and the bounds of their rows if requested."""
        batch = self.batch(tensors, members)
        out, normaliser = self.backend(batch.degree).compute(batch, *tensors[:3], return_bound)
        if batch.exact_rows is not None:
            out = exact.replaced(self.call, tensors, out, batch.exact_rows)
        if not return_bound or normaliser is None:
            return out, None
        with torch.no_grad():
            return out, row_certificate(self, batch, members, normaliser)


def decide(call: Call, tensors: Tensors) -> Decision:
    """Survey flat tensors and choose a path for every head."""
    prepared, tensors = prepared_for(call), tensors.detach()
    return Decision(prepared, tensors, prepared.backend(2).survey(call, tensors))


def decided(prepared: PreparedCall, tensors: Tensors, survey: Survey) -> Decision | None:
    """Return a decision for flat tensors in which some head has a polynomial, or None if there is none."""
    decision = Decision(prepared, tensors.detach(), survey, is_explained=False)
    return decision if any(choice.degree >= 0 for choice in decision.choices) else None


# --- bounds of computed rows ------------------------------------------------------------------------------------------


def row_certificate(decision: Decision, batch: Batch, members: Sequence[int], z: Tensor) -> Tensor:
    """Return an upper bound on |out′ − out| / range(v) for every row, rounding included: [N, G, n].

    For every row it is the smaller of the a-priori bound and the moment certificate.
    """
    second, total = second_moments(batch)
    bounds = []
    for at, head in enumerate(members):
        choice = decision.choices[head]
        p = choice.polynomial
        assert p is not None
        slack = decision.rounding(head)
        normaliser = z[at].double() * (1 - min(slack, 0.5))
        rows = decision.row_bounds(head, choice.centring).double().clamp(max=choice.bound)
        terms = moment_terms(p, not batch.call.causal)
        # The tokens are centred and rounded: the relative error of a second moment is below 2⁻¹⁶ in any working dtype.
        after = moment_certificate(terms, rows, total[at], second[at] * (1 + 2.0**-16), normaliser)
        bounds.append(after.clamp(max=output_error(p.error)) + slack)
    bound = torch.stack(bounds)
    return bound if batch.exact_rows is None else bound.masked_fill(batch.exact_rows, 0)
