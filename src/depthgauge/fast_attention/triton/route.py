"""Repeated calls with little work on the host.

At a few thousand tokens the kernels take a third of a millisecond. Validating arguments, deciding and describing the
work would take as long. A `Route` belongs to one kind of call: the same sizes, dtype and options. Its launches are
prepared. It starts the sums while the numbers of the survey are copied to the host, and continues only if they lead to
a polynomial of the same degree for all heads. Otherwise it returns None, and the call is decided from the start.
"""

import math
from operator import mul

import torch
from torch import Tensor

from depthgauge.fast_attention.autograd import Computed, ComputedAttention
from depthgauge.fast_attention.decide.minimax import grid_index
from depthgauge.fast_attention.spec import Repeatable
from depthgauge.fast_attention.triton.forward import (
    Coefficients,
    first_buffer,
    scaled_coefficients,
    second_buffer,
    state_buffer,
)
from depthgauge.fast_attention.triton.gradient import plain_backward
from depthgauge.fast_attention.triton.gradient_launches import GradientLaunches, GradientSizes
from depthgauge.fast_attention.triton.kernels import programs, second_programs, slots
from depthgauge.fast_attention.triton.launches import (
    FinishSizes,
    FirstMomentSizes,
    RowSizes,
    SecondMomentSizes,
    SurveySizes,
    TransposeSizes,
    survey_blocks,
)
from depthgauge.fast_attention.triton.survey import outward, survey_buffers
from depthgauge.fast_attention.triton.tuning import padded_length
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
        dtype, is_causal, is_second = problem.q.dtype, problem.causal, degree > 1
        padded, rows = padded_length(m), groups * n
        per_split = workspace.per_split(heads, d, m, is_causal, device)
        splits = math.ceil(padded / per_split)
        parts, states = len(slots(d)) if is_second else 0, splits + 1 if is_causal else 1
        self.workspace, self.degree, self.known = workspace, degree, dict[int, Known | None]()
        self.heads, self.rows, self.m, self.d, self.e, self.device = heads, rows, m, d, e, device
        self.padded, self.splits, self.states, self.parts, self.is_causal = padded, splits, states, parts, is_causal
        self.scale = problem.scale
        self.survey = workspace.launch(SurveySizes(heads, rows, m, d, e, device))
        blocks = survey_blocks(rows, m)
        self.transpose = workspace.launch(TransposeSizes(heads, m, d, padded, blocks, True, device))
        sizes = heads, m, padded, per_split, d, e, dtype
        self.first = workspace.launch(FirstMomentSizes(*sizes, False, device))
        second = SecondMomentSizes(*sizes, device)
        count = 0 if not is_second else 2 if second.is_narrow else 1
        self.second = (workspace.launch(second),) * count
        self.finish = workspace.launch(FinishSizes(heads, splits, d, e, is_second, is_causal, True, True, device))
        rows_of = RowSizes(
            row_heads=heads * groups, n=n, heads=heads, states=states, per_state=per_split if is_causal else 1,
            m=m if is_causal else 0, padded=padded if is_causal else 0, parts=parts, x=d, y=d, width=e,
            dtype=dtype, is_causal=is_causal, has_w=False, is_forward=True, has_g=False, needs_z=False,
            device=device,
        )  # fmt: skip
        self.evaluate, self.evaluate_with_z = (
            workspace.launch(rows_of._replace(needs_z=needs_z)) for needs_z in (False, True)
        )
        self.gradient_sizes = GradientSizes(
            heads, groups, n, m, d, e, dtype, degree, workspace.causal_block if is_causal else 0,
            workspace.turned_bytes, is_shifted=False, is_plain=True, has_w=False, is_weighted=False, is_alike=True,
            device=device,
        )  # fmt: skip
        self._gradients: GradientLaunches | None = None
        self.tables = tuple(workspace.table(table, device, d) for table in (programs, second_programs, slots))

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
        try:
            if not is_trained:
                found = self._follow(q, k, v, False)
                return None if found is None else found.out
            with torch.no_grad():
                found = self._follow(q, k, v, True)
        except BaseException:  # numbers may still be on their way: no other call may read them as its own
            self.workspace.readbacks.forget()
            raise
        if found is None:
            return None
        out: Tensor = ComputedAttention.apply(q, k, v, found, self)  # type: ignore[no-untyped-call]
        return out

    def backward(
        self, spec: Coefficients, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. `spec` holds the coefficients with the scale included."""
        if self._gradients is None:
            self._gradients = self.workspace.gradients(self.gradient_sizes)
        return plain_backward(self._gradients, spec, self.scale, (q, k, v), saved, grad)

    def _follow(self, q: Tensor, k: Tensor, v: Tensor, is_trained: bool) -> Computed | None:
        heads, d, e, device = self.heads, self.d, self.e, self.device
        programs, others, slots = self.tables
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        centres, found = survey_buffers(heads, self.rows, self.m, d, device)
        readback = self.workspace.readbacks.get(heads, device)
        self.survey((q, k, v, centres, found))
        x = k.new_empty(heads, d, self.padded)
        self.transpose((k, found, x, readback.numbers))
        readback.record()
        first = first_buffer(self.splits, heads, d, e, device)
        self.first((x, x, v, v, first))
        second = second_buffer(self.splits, heads, e, self.is_causal, k, d) if self.second else first
        for at, launch in enumerate(self.second):
            table, target = (others, second[..., 256:, :]) if at else (programs, second)
            launch((x, x, v, table, target))
        state = state_buffer(self.states, heads, self.parts, v, slots, d)
        out = q.new_empty(*q.shape[:-1], e)
        coefficients = self.decided(readback.read())
        if coefficients is None:
            return None
        self.finish((second, first, state.small, slots, state.big, state.small), coefficients)
        keys, scale = (x, self.scale * math.log2(math.e)) if self.is_causal else (q, 0.0)
        z = torch.empty(q.shape[:-1], dtype=torch.float32, device=device) if is_trained else out
        evaluate = self.evaluate_with_z if is_trained else self.evaluate
        evaluate((q, q, state.big, state.small, q, keys, v, q, slots, out, z), (scale,))
        return Computed(out, (out, z, state.big, state.small) if is_trained else (), coefficients)

    def decided(self, rows: list[list[float]]) -> Coefficients | None:
        """Return the coefficients for the numbers of a survey, or None if the call has to be decided from the start.

        B is the largest of all heads, as in `Decision`. With a = √max‖q‖² and b = √max‖k‖² of a head, the outward
        rounded product satisfies (up a + lost)(up b + lost) ≤ up² a b + lost (up (max a + max b) + lost).
        """
        q0, k0, q1, k1, values, mean = zip(*rows, strict=True)
        if not math.isfinite(sum(map(sum, (q0, k0, q1, k1, values, mean)))):
            return None
        # The condition of `holds`, for squared norms.
        sizes = q0 + k0 + values
        if max(sizes) > 2.0**40 or min(filter(None, sizes), default=1.0) < 2.0**-40:
            return None
        up, lost = outward(self.d)
        longest = math.sqrt(max(q0)) + math.sqrt(max(k0))
        bound = up * up * math.sqrt(max(map(mul, q0, k0))) + lost * (up * longest + lost)
        known = self._decide(grid_index(abs(self.scale) * bound * (1 + 2.0**-50)))
        lowest = math.sqrt(min(map(mul, map(min, q0, q1), map(min, k0, k1))))
        return known[0] if known is not None and grid_index(abs(self.scale) * lowest) >= known[1] else None
