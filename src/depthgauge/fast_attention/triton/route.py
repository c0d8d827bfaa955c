"""Repeated calls with little work on the host.

At a few thousand tokens the kernels take a third of a millisecond. Validating arguments, deciding and describing the
work would take as long. A `Route` belongs to one kind of call: the same sizes, dtype and options. Its launches are
prepared. It starts the sums while the numbers of the survey are copied to the host, and continues only if they lead to
a polynomial of the same degree for all heads. Otherwise it returns None, and the call is decided from the start.
"""

import math
from functools import cached_property
from operator import mul

import torch
from torch import Tensor

from depthgauge.fast_attention.autograd import Computed, ComputedAttention
from depthgauge.fast_attention.decide.minimax import grid_index
from depthgauge.fast_attention.spec import Repeatable
from depthgauge.fast_attention.triton.forward import Coefficients, exponents, scaled_coefficients
from depthgauge.fast_attention.triton.forward_pass import ForwardPass, ForwardSizes
from depthgauge.fast_attention.triton.gradient import plain_backward
from depthgauge.fast_attention.triton.gradient_launches import GradientSizes
from depthgauge.fast_attention.triton.gradient_pass import GradientPass
from depthgauge.fast_attention.triton.survey import outward
from depthgauge.fast_attention.triton.workspace import Workspace

Known = tuple[Coefficients, int]


class Route:
    """One kind of call in which all heads use one polynomial of `degree`, without centring and without exact rows.

    `known` maps the grid index of every B met so far to the coefficients, with the scale included, and to the lowest
    grid index that B may have with centring. Below this index a lower degree would meet the tolerance.
    """

    def __init__(self, workspace: Workspace, repeatable: Repeatable) -> None:
        problem, degree, self._at = repeatable
        (heads, groups, n, d), (m, e), device = problem.q.shape, problem.v.shape[1:], problem.q.device
        self.workspace, self.degree, self.known = workspace, degree, dict[int, Known | None]()
        self.heads, self.d, self.e, self.device, self.scale = heads, d, e, device, problem.scale
        block = workspace.causal_block if problem.causal else 0
        sizes = heads, groups, n, m, d, e, problem.q.dtype, degree, block
        self.forward_sizes = ForwardSizes(
            *sizes, is_shifted=False, has_w=False, is_alike=True, is_kept=False, is_surveyed=True, device=device
        )
        self.gradient_sizes = GradientSizes(
            *sizes, workspace.turned_bytes, is_shifted=False, is_plain=True, has_w=False, is_weighted=False,
            is_alike=True, device=device,
        )  # fmt: skip

    def _decide(self, index: int) -> Known | None:
        """Return the decision for B with this grid index, or None if it is not one polynomial of this degree."""
        if index not in self.known:
            shared = self._at(index)
            self.known[index] = None
            if shared is not None:
                (scaled,) = scaled_coefficients([shared.coefficients], self.scale)
                self.known[index] = scaled, shared.least_index
        return self.known[index]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Return the output [..., heads, n, e], or None if the call has to be decided from the start."""
        is_trained = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        found = self._follow(q, k, v, is_trained)
        if found is None or not is_trained:
            return None if found is None else found.out
        out: Tensor = ComputedAttention.apply(q, k, v, found, self)  # type: ignore[no-untyped-call]
        return out

    def backward(
        self, spec: Coefficients, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. `spec` holds the coefficients with the scale included."""
        return plain_backward(self.gradients, spec, self.scale, (q, k, v), saved, grad)

    @cached_property
    def forward(self) -> ForwardPass:
        """The forward pass of calls without gradients."""
        return self.workspace.forward(self.forward_sizes)

    @cached_property
    def trained(self) -> ForwardPass:
        """The forward pass of calls with gradients."""
        return self.workspace.forward(self.forward_sizes._replace(is_kept=True))

    @cached_property
    def gradients(self) -> GradientPass:
        """The backward pass."""
        return self.workspace.gradients(self.gradient_sizes)

    def _follow(self, q: Tensor, k: Tensor, v: Tensor, is_trained: bool) -> Computed | None:
        p = self.trained if is_trained else self.forward
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = q.new_empty(*q.shape[:-1], self.e)
        kept = p.keep() if is_trained else ()
        readback = self.workspace.readbacks.get(self.heads, self.device)
        call = p.start((q, k, v, readback.numbers, out), kept)
        try:
            readback.expect()
            call.run(p.KEYS)
            call.run(p.SUMS)
            numbers = readback.read()
        except BaseException:  # numbers may still be on their way: no other call may read them as its own
            self.workspace.readbacks.abandon(readback)
            raise
        coefficients = self.decided(numbers)
        if coefficients is None:
            return None
        call.run(p.ROWS, {"coefficients": coefficients, "exponent": exponents(self.scale)[:1]})
        return Computed(out, (out, *kept) if is_trained else (), coefficients)

    def decided(self, numbers: list[list[float]]) -> Coefficients | None:
        """Return the coefficients for the numbers of a survey, or None if the call has to be decided from the start.

        B is the largest of all heads, as in `Decision`. With a = √max‖q‖² and b = √max‖k‖² of a head, the outward
        rounded product satisfies (up a + lost)(up b + lost) ≤ up² a b + lost (up (max a + max b) + lost).
        """
        q0, k0, q1, k1, values, _ = numbers
        if not math.isfinite(sum(map(sum, numbers))):
            return None
        # The condition of `holds`, for squared norms.
        longest_q, longest_k, shortest_q, shortest_k = max(q0), max(k0), min(q0), min(k0)
        if max(longest_q, longest_k, max(values)) > 2.0**40:
            return None
        if min(shortest_q, shortest_k, min(values)) < 2.0**-40 and any(0 < x < 2.0**-40 for x in (*q0, *k0, *values)):
            return None
        up, lost = outward(self.d)
        longest = math.sqrt(longest_q) + math.sqrt(longest_k)
        bound = up * up * math.sqrt(max(map(mul, q0, k0))) + lost * (up * longest + lost)
        known = self._decide(grid_index(abs(self.scale) * bound * (1 + 2.0**-50)))
        if known is None:
            return None
        coefficients, least = known
        # With centring, no head may have a B for which a lower degree is enough. First a bound for all heads at once.
        lowest = min(shortest_q, min(q1)) * min(shortest_k, min(k1))
        if self._index(lowest) < least:
            lowest = min(map(mul, map(min, q0, q1), map(min, k0, k1)))
        return coefficients if self._index(lowest) >= least else None

    def _index(self, squared: float) -> int:
        """Return the grid index of the scores for a squared product of norms."""
        return grid_index(abs(self.scale) * math.sqrt(squared))
