"""Calls that were decided before, done again with as little as possible on the host.

At a few thousand tokens the kernels take a third of a millisecond, and checking arguments, deciding and describing the
work would take as long. A `Route` belongs to one kind of call: the same sizes, dtype and options. It has its launches
prepared, begins with the sums while the numbers of the survey travel, and goes on only where they lead to a decision
that was made before in full; otherwise it gives up, and the call is decided from the start.
"""

import math
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from depthgauge.fast_attention.decide.minimax import grid_index
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.triton import launches
from depthgauge.fast_attention.triton.backend import (
    first_place,
    scaled_coefficients,
    second_place,
    splitting,
    state_place,
    uses_middle,
)
from depthgauge.fast_attention.triton.kernels import slots
from depthgauge.fast_attention.triton.survey import forget_reports, outward, report_place, survey_places
from depthgauge.fast_attention.triton.tuning import padded_length, program_table, second_table, slot_table


class Route:
    """One kind of call, in which all heads take one polynomial of `degree` and nothing is centred or done exactly.

    `known` has, for every grid index of B that was decided, the coefficients with the scale in them, and the lowest
    grid index that B may have with centring: below it a lower degree would do.
    """

    def __init__(self, problem: Problem, degree: int) -> None:
        (heads, groups, n, d), (m, e), device = problem.q.shape, problem.v.shape[1:], problem.q.device
        dtype, is_causal, is_second = problem.q.dtype, problem.causal, degree > 1
        padded, rows = padded_length(m), groups * n
        per_split = splitting(heads, d, m, is_causal, device)
        splits = math.ceil(padded / per_split)
        parts, states = len(slots(d)) if is_second else 0, splits + 1 if is_causal else 1
        self.degree, self.known = degree, dict[int, tuple[tuple[float, ...], int]]()
        self.heads, self.rows, self.m, self.d, self.e, self.device = heads, rows, m, d, e, device
        self.padded, self.splits, self.states, self.parts, self.is_causal = padded, splits, states, parts, is_causal
        self.scale = problem.scale
        self.survey = launches.survey(heads, rows, m, d, e, device)
        blocks = launches.survey_blocks(rows, m)
        self.transpose = launches.transpose(heads, m, d, padded, blocks, True, device)
        sizes = heads, m, padded, per_split, d, e, dtype
        self.first = launches.first_moments(*sizes, False, device)
        self.second = launches.second_moments(*sizes, device) if is_second else ()
        self.finish = launches.finish(heads, splits, d, e, is_second, is_causal, True, True, device)
        self.evaluate = launches.evaluate(
            heads * groups, n, heads, states, per_split if is_causal else 1, m if is_causal else 0,
            padded if is_causal else 0, parts, d, d, e, dtype, is_causal, False, True, False, False, device,
        )  # fmt: skip
        self.tables = program_table(d, device), second_table(d, device), slot_table(d, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """The output, shaped as the caller's [..., heads, n, e]; None where this must be decided anew."""
        try:
            return self._follow(q, k, v)
        except BaseException:  # numbers may be on their way still: nobody else must wait for them in their place
            forget_reports()
            raise

    def _follow(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        heads, d, e, device = self.heads, self.d, self.e, self.device
        programs, others, slots = self.tables
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        centres, found = survey_places(heads, self.rows, self.m, d, device)
        report = report_place(heads, device)
        self.survey((q, k, v, centres, found))
        x = k.new_empty(heads, d, self.padded)
        self.transpose((k, found, x, report.numbers))
        report.sent()
        first = first_place(self.splits, heads, d, e, device)
        self.first((x, x, v, v, first))
        second = second_place(self.splits, heads, d, e, self.is_causal, k) if self.second else first
        for at, launch in enumerate(self.second):
            table, place = (others, second[..., 256:, :]) if at else (programs, second)
            launch((x, x, v, table, place))
        state = state_place(self.states, heads, self.parts, d, e, v)
        out = q.new_empty(*q.shape[:-1], e)
        coefficients = self.decided(report.read())
        if coefficients is None:
            return None
        self.finish((second, first, state.small, slots, state.big, state.small), coefficients)
        keys, scale = (x, self.scale * math.log2(math.e)) if self.is_causal else (q, 0.0)
        self.evaluate((q, q, state.big, state.small, q, keys, v, q, slots, out, out), (scale,))
        return out

    def decided(self, rows: list[list[float]]) -> tuple[float, ...] | None:
        """The coefficients for what the survey found, if this was decided before.

        B is the largest of any head's, as in `Decision`; the product of two norms that are rounded up, (up a + lost)
        (up b + lost), is bounded with a·b and the largest a and b.
        """
        q0, k0, q1, k1, values, mean = zip(*rows, strict=True)
        if not math.isfinite(sum(map(sum, (q0, k0, q1, k1, mean)))):
            return None
        if not all(size == 0 or 2.0**-40 <= size <= 2.0**40 for size in (*q0, *k0, *values)):  # `holds`, in squares
            return None
        up, lost = outward(self.d)
        longest = math.sqrt(max(q0)) + math.sqrt(max(k0))
        bound = up * up * math.sqrt(max(map(mul, q0, k0))) + lost * (up * longest + lost)
        known = self.known.get(grid_index(abs(self.scale) * bound * (1 + 2.0**-50)))
        lowest = math.sqrt(min(map(mul, map(min, q0, q1), map(min, k0, k1))))
        return known[0] if known is not None and grid_index(abs(self.scale) * lowest) >= known[1] else None


Kind = tuple[object, ...]
_routes: dict[Kind, Route] = {}
_MOST_ROUTES = 1024


def is_dual(*tensors: Tensor) -> bool:
    """Whether a tensor carries a tangent of forward-mode differentiation, which no kernel passes on."""
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        for x in tensors
    )


def kind_of(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Kind | None:
    """What calls of one kind have in common, or None where no Route can do this one.

    `options` are the other arguments of `attention`; they are compared by value and type.
    """
    if not type(q) is type(k) is type(v) is Tensor or is_dual(q, k, v):
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    types = tuple(map(type, options))
    if not all(kind in (int, float, bool, str, type(None)) for kind in types):
        return None
    return (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, options, types)


def find(kind: Kind | None) -> Route | None:
    """The Route of a kind of call."""
    return None if kind is None else _routes.get(kind)


def is_possible(problem: Problem) -> bool:
    """Whether a Route can do problems like this: bfloat16, whose values need no centring beforehand, and no padding."""
    return not uses_middle(problem.q.dtype) and problem.keep is None


def learn(kind: Kind, problem: Problem, coefficients: tuple[float, ...], index: int, least: int) -> None:
    """Keep what was decided for B up to 2^(index/GRID): one polynomial for all heads, nothing centred."""
    if not is_possible(problem):
        return
    degree = len(coefficients) - 1
    route = _routes.get(kind)
    if route is None or route.degree != degree:
        if len(_routes) >= _MOST_ROUTES:
            _routes.clear()
        route = _routes[kind] = Route(problem, degree)
    route.known[index] = scaled_coefficients([coefficients], problem.scale)[0], least
