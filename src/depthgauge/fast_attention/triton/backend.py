"""The Triton backend: polynomial attention of degrees 1 and 2 on the GPU (extra `gpu`)."""

import math

import torch
from torch import Tensor

from depthgauge.fast_attention.decide import bounds
from depthgauge.fast_attention.decide.bounds import LARGEST_LOG_RANGE, Survey, unit
from depthgauge.fast_attention.decide.cost import GPU_TRITON
from depthgauge.fast_attention.decide.minimax import Minimax
from depthgauge.fast_attention.problem import Kind, Problem
from depthgauge.fast_attention.spec import Repeatable, Spec
from depthgauge.fast_attention.triton.forward import forward
from depthgauge.fast_attention.triton.gradient import backward
from depthgauge.fast_attention.triton.route import Route
from depthgauge.fast_attention.triton.survey import is_outside, survey
from depthgauge.fast_attention.triton.tuning import LONGEST_SPLIT, is_addressable, is_supported
from depthgauge.fast_attention.triton.workspace import Workspace

LARGEST_LOG_RANGE_FLOAT16 = 6.0
"""The largest spread of log w in float16. The kernels store w k and w e^t in it, and it loses numbers below 6e-5."""
ZERO_NORM = 2.0**-58
"""Norms below this number are zeros that were rounded up."""


class TritonBackend:
    """Polynomial attention of degrees 1 and 2 in fused Triton kernels.

    The backend owns its workspace and `routes`, the decisions that later calls repeat, by kind of call.
    """

    name = "triton"
    rates = GPU_TRITON
    _MOST_ROUTES = 1024

    def __init__(self, workspace: Workspace | None = None) -> None:
        self.workspace = Workspace() if workspace is None else workspace
        self.routes: dict[Kind, Route] = {}

    def supports(self, problem: Problem, degree: int) -> bool:
        """Return whether the kernels support the shapes, the dtype and the degree."""
        (heads, groups, n, d), (m, e) = problem.q.shape, problem.v.shape[1:]
        return is_supported(problem.q.dtype, d, e, degree) and is_addressable(
            heads * groups, max(groups * n, m), max(d, e)
        )

    def survey(self, problem: Problem) -> Survey:
        """Return proved bounds on the norms of q, k and v. The kernel does not support padding."""
        return survey(self.workspace, problem) if problem.keep is None else bounds.survey(problem)

    def is_outside(self, problem: Problem, bound: float) -> Tensor:
        """Return on the device whether scores may exceed `bound`, or q, k or v is unusable."""
        return is_outside(self.workspace, problem, bound)

    def forward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool = True
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return out [N, G, n, e], Z [N, G, n] if needed, and the tensors for `backward`."""
        return forward(self.workspace, spec, q, k, v, needs_z)

    def backward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        return backward(self.workspace, spec, q, k, v, saved, grad)

    def holds(self, scale: float, query: float, key: float, value: float) -> bool:
        """Return whether s² k k v and q q, which the kernels compute, stay far inside the range of float32.

        >>> holds = TritonBackend().holds
        >>> holds(0.125, 8.0, 8.0, 1.0), holds(1e-24, 1e12, 1e12, 1.0), holds(1.0, 0.0, 8.0, 1.0)
        (True, False, True)
        """
        sizes = [(abs(scale), 20), (query, 20), (key, 20), (value, 40)]
        return all(size < ZERO_NORM or 2.0**-power <= size <= 2.0**power for size, power in sizes)

    def largest_log_range(self, problem: Problem) -> float:
        """Return the largest spread of log w for which no weight is lost to underflow."""
        if problem.q.dtype == torch.float16:
            return LARGEST_LOG_RANGE_FLOAT16
        return LARGEST_LOG_RANGE if problem.causal else math.inf

    def rounding(self, problem: Problem, p: Minimax, bound: float, centring: int, spread: float) -> float:
        """Return the most that rounding can add to an output entry, as a fraction of range(v).

        `above` and `below` bound the relative errors of numerator and denominator: roundings of the terms of degree 1
        and 2, of the sums, and of the exact block. Section Rounding of docs/concepts/fast-attention-derivation.md lists
        them.
        """
        dtype, d = problem.q.dtype, problem.q.shape[-1]
        u = 2.0**-18 if dtype == torch.float32 else unit(dtype)
        key = 1 if centring or problem.keep is not None else 0
        query = 1 if key or dtype == torch.float16 else 0
        weight = 2 if centring == 2 else 0
        a = [abs(c) * bound**g for g, c in enumerate(p.coefficients)] + [0.0]
        per_split = self.workspace.causal_block if problem.causal else LONGEST_SPLIT
        sums = (LONGEST_SPLIT / 8 + problem.k.shape[1] / per_split + d * d / 8 + 32) * 2.0**-23 * sum(a)
        # Below its normal range, float16 has absolute error 2⁻²⁵: in coordinates, their products, and w times both.
        small = d * 2.0**-22 * math.exp(spread if centring == 2 else 0.0) if dtype == torch.float16 else 0.0
        log_error = math.expm1(min(1.0, (d + 6) * 2.0**-53 * spread))
        linear, square = u * a[1], u * a[2]
        above = linear * (key + weight + query + 4 * u) + square * (2 * key + weight + 2 * query + 5) + sums + small
        below = linear * (key + weight + query) + square * (2 * key + weight + 2 * query + 1) + sums + small
        if problem.causal:
            above += u * math.exp(bound) * (1 + (key + query) * bound)
            below += u * math.exp(bound) * (1 + (key + query) * bound)
        if self.workspace.centres_before(dtype):
            above += unit(dtype)
        grown = math.exp(bound) / (1 - p.error)
        above, below = 1.01 * above * grown + log_error, 1.01 * below * grown + log_error
        return (above + below) / (1 - below) if below < 0.5 else math.inf

    def can_repeat(self, problem: Problem) -> bool:
        """Return whether a Route can compute problems like this one: no padding, and values centred after the sums."""
        return not self.workspace.centres_before(problem.q.dtype) and problem.keep is None

    def remember(self, kind: Kind, decision: Repeatable) -> None:
        """Keep how to repeat a decision for later calls of the same kind."""
        if not self.can_repeat(decision.problem):
            return
        known = self.routes.get(kind)
        if known is None or known.degree != decision.degree:
            if len(self.routes) >= self._MOST_ROUTES:
                self.routes.clear()
            self.routes[kind] = Route(self.workspace, decision)

    def repeat(self, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Return the output by an earlier decision for a call of this kind, or None."""
        route = self.routes.get(kind)
        return None if route is None else route(q, k, v)
