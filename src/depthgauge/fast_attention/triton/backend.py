"""The Triton backend: polynomial attention of degrees 1 and 2 on the GPU (extra `gpu`)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.fast_attention.problem import Problem, Sizes
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.theory import bounds
from depthgauge.fast_attention.theory.bounds import LARGEST_LOG_RANGE, Survey, unit
from depthgauge.fast_attention.theory.cost import GPU_TRITON
from depthgauge.fast_attention.theory.minimax import Minimax
from depthgauge.fast_attention.triton.forward import ForwardLaunches, PassSizes, forward, forward_launches
from depthgauge.fast_attention.triton.gradient import backward
from depthgauge.fast_attention.triton.survey import outward, survey, surveyed
from depthgauge.fast_attention.triton.tuning import CAUSAL_BLOCK, LONGEST_SPLIT, is_addressable, is_supported

LARGEST_LOG_RANGE_FLOAT16 = 6.0
"""The largest spread of log w in float16. The kernels store w k and w e^t in it, and it loses numbers below 6e-5."""
ZERO_NORM = 2.0**-58
"""Norms below this number are zeros that were rounded up."""


@dataclass(frozen=True)
class TritonBackend:
    """Polynomial attention of degrees 1 and 2 in fused Triton kernels.

    Values of the dtypes `centred_after` are exact in the kernels and are centred after the sums. Values of other dtypes
    are centred before the sums. A backward pass holds at most `turned_bytes` of turned states, or one of them.
    """

    causal_block: int = CAUSAL_BLOCK
    centred_after: tuple[torch.dtype, ...] = (torch.bfloat16,)
    turned_bytes: int = 2**28

    name = "triton"
    rates = GPU_TRITON

    def supports(self, problem: Problem, degree: int) -> bool:
        """Return whether the kernels support the shapes, the dtype and the degree."""
        (heads, groups, n, d), (m, e) = problem.q.shape, problem.v.shape[1:]
        return is_supported(problem.q.dtype, d, e, degree) and is_addressable(
            heads * groups, max(groups * n, m), max(d, e)
        )

    def survey(self, problem: Problem) -> Survey:
        """Return proved bounds on the norms of q, k and v. The kernel does not support padding."""
        return survey(problem) if problem.keep is None else bounds.survey(problem)

    def is_outside(self, problem: Problem, bound: float) -> Tensor:
        """Return a bool tensor []: whether scores may exceed `bound`, or q, k or v is out of the range of `holds`.

        Nothing is copied to the host.
        """
        query, key, _, _, values, *_ = surveyed(problem)[: 8 * problem.heads].view(8, -1).double().unbind()
        up, lost = outward(problem.q.shape[-1])
        scores = (up * query.sqrt() + lost) * (up * key.sqrt() + lost) * (abs(problem.scale) * (1 + 2.0**-40))
        sizes = torch.stack((query, key, values))
        is_held = (sizes == 0) | ((sizes >= 2.0**-40) & (sizes <= 2.0**40))
        return ~((scores <= bound).all() & is_held.all())

    def forward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool = True
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return out [N, G, n, e], Z [N, G, n] if needed, and the tensors for `backward`."""
        return forward(self._sizes(spec, q, v, needs_z), spec, q, k, v)

    def backward(
        self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        return backward(self._sizes(spec, q, v, True), spec, q, k, v, saved, grad)

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
        per_split = self.causal_block if problem.causal else LONGEST_SPLIT
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
        if dtype not in self.centred_after:
            above += unit(dtype)
        grown = math.exp(bound) / (1 - p.error)
        above, below = 1.01 * above * grown + log_error, 1.01 * below * grown + log_error
        return (above + below) / (1 - below) if below < 0.5 else math.inf

    def is_capturable(self, problem: Problem) -> bool:
        """Return whether a CUDA graph can capture `forward` and `is_outside`: they copy nothing to the host."""
        return problem.q.dtype in self.centred_after and problem.keep is None

    def plain_launches(self, sizes: Sizes, degree: int, needs_z: bool) -> ForwardLaunches:
        """Return the forward pass of one polynomial for all heads, which reads q and k of the caller."""
        heads, groups, n, m, d, e, dtype, device, _, causal, _ = sizes
        block = self.causal_block if causal else 0
        return forward_launches(
            PassSizes(
                heads, groups, n, m, d, e, dtype, degree, block, True, False, False, False, True, needs_z,
                self.turned_bytes, device,
            )
        )  # fmt: skip

    def _sizes(self, spec: Spec, q: Tensor, v: Tensor, needs_z: bool) -> PassSizes:
        (heads, groups, n, d), (m, e) = q.shape, v.shape[1:]
        block, is_weighted, is_padded = self.causal_block if spec.causal else 0, spec.is_weighted, spec.keep is not None
        is_changed = spec.is_centred or is_padded or spec.exact_rows is not None
        is_plain = not is_changed and q.dtype != torch.float16  # the range of float16 is small, so q and k are scaled
        return PassSizes(
            heads, groups, n, m, d, e, q.dtype, spec.degree, block, is_plain, v.dtype not in self.centred_after,
            is_weighted or is_padded, is_weighted, spec.is_alike, needs_z, self.turned_bytes, q.device,
        )  # fmt: skip
