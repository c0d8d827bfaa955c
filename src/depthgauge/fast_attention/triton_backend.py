"""The Triton backend: polynomial attention of degrees 1 and 2 on the GPU (extra `gpu`).

**Forward.** Sums over the keys, the state that rows read, and the rows. If nothing is centred, padded or computed
exactly, the kernels read q, k and v directly and the scale is part of the coefficients. Otherwise q̃ and k̃ are
computed first, in the dtype of the tensors, and w multiplies one of the two factors of every product of keys. bfloat16
values are centred after the sums, values of other dtypes before them (section Rounding of
docs/concepts/fast-attention-derivation.md).

**Backward.** Let p(t) = a0 + a1 t + a2 t², level = −∂out·(out − shift) and dN = ∂out/Z′, where Z′ and all sums over
keys are divided by W. Then

    ∂q_i = 1/Z′ · Σ_j w_j p′(t) s k_j (∂out·ṽ_j + level) = 1/Z′ · (L ∂out + 2 S(q, ·, ∂out) + level (z1 + 2 C q))
    ∂v_j = w_j Σ_i p(t) dN_i,   ∂k_j = w_j Σ_i p′(t) s q_i (dN_i·ṽ_j + level_i/Z′)

L, S, C and z1 are the sums over keys of the forward pass. The same sums over queries, with dN in place of v, give ∂v
and ∂k. ∂v is quadratic in one vector. ∂q and ∂k are bilinear, so they need S with its axes in another order (`turn`).

Causal row i of block b reads earlier blocks through state b of the forward pass, and its own block through exact
exponentials: p and p′ become e^t there. The keys of block b read the sums over the queries of all blocks after b. The
rows of a block enter these sums with dN = ∂out · floor/Z′, where floor is the smallest Z′ of the block: early rows
attend to few keys, and 1/Z′ would overflow short dtypes. State b is divided by the weight of all rows after b, the sum
of 1/floor. Turned states are large and are computed a few at a time. float16 gradients are scaled by a power of two,
because the range of the dtype is small.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.fast_attention.bounds import LARGEST_LOG_RANGE, Minimax, Survey, glance_factor, survey, unit
from depthgauge.fast_attention.call import GPU_TRITON, Call, Tensors, is_capturing
from depthgauge.fast_attention.launches import (
    CAUSAL_BLOCK,
    LONGEST_SPLIT,
    KernelPass,
    forward_launches,
    glance_launch,
    gradient_launches,
    is_addressable,
    is_supported,
    survey_launch,
)
from depthgauge.fast_attention.polynomial_path import Backend, Batch, Gradients, Saved, centred, weights

LOG2_E = math.log2(math.e)
LARGEST_LOG_RANGE_FLOAT16 = 6.0
"""The largest spread of log w in float16. The kernels store w k and w e^t in it, and it loses numbers below 6e-5."""
ZERO_NORM = 2.0**-58
"""Norms below this number are zeros that were rounded up."""


@dataclass(frozen=True)
class TritonBackend(Backend):
    """Polynomial attention of degrees 1 and 2 in fused Triton kernels.

    Values of the dtypes `centred_after` are exact in the kernels and are centred after the sums. Values of other dtypes
    are centred before the sums. A backward pass holds at most `turned_bytes` of turned states, or one of them.
    """

    causal_block: int = CAUSAL_BLOCK
    centred_after: tuple[torch.dtype, ...] = (torch.bfloat16,)
    turned_bytes: int = 2**28

    name = "triton"
    rates = GPU_TRITON

    def supports(self, call: Call, degree: int) -> bool:
        """Return whether the kernels support the shapes, the dtype and the degree."""
        longest, widest = max(call.groups * call.n, call.m), max(call.d, call.e)
        is_known = is_supported(call.dtype, call.d, call.e, degree)
        return is_known and is_addressable(call.heads * call.groups, longest, widest)

    def survey(self, call: Call, tensors: Tensors) -> Survey:
        """Return proved bounds on the norms of q, k and v. The kernel does not support padding."""
        return kernel_survey(call, tensors) if tensors.padding is None else survey(call, tensors)

    def look(self, call: Call, tensors: Tensors, bound: float) -> Callable[[], float]:
        """Launch one kernel that computes the share of `share_beyond`, for any q and k that it can read.

        The result is copied to pinned memory, so what is launched before it is asked for does not have to end.
        """
        q, k, _, padding, _ = tensors
        if padding is not None or not (q.is_contiguous() and k.is_contiguous()):
            return super().look(call, tensors, bound)
        launch, size = glance_launch(call.heads, call.groups * call.n, call.m, call.d, call.e, call.device)
        factor, found = glance_factor(call.scale, bound), q.new_empty(size, dtype=torch.float32)
        launch((q, k, found), (factor * factor,))
        if not q.is_cuda:
            return lambda: float(min(found.tolist()))
        host, copied = torch.empty(size, pin_memory=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
        host.copy_(found, non_blocking=True)
        copied.record()

        def share() -> float:
            copied.synchronize()
            return float(min(host.tolist()))

        return share

    def is_outside(self, call: Call, tensors: Tensors, bound: float) -> Tensor:
        """Return a bool tensor []: whether scores may exceed `bound`, or q, k or v is out of the range of `holds`.

        Nothing is copied to the host.
        """
        query, key, _, _, values, _ = surveyed(call, tensors)[: 6 * call.heads].view(6, -1).double().unbind()
        up, lost = outward(call.d)
        scores = (up * query.sqrt() + lost) * (up * key.sqrt() + lost) * (abs(call.scale) * (1 + 2.0**-40))
        sizes = torch.stack((query, key, values))
        is_held = (sizes == 0) | ((sizes >= 2.0**-40) & (sizes <= 2.0**40))
        return ~((scores <= bound).all() & is_held.all())

    def forward(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, needs_z: bool = True
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Return out, Z if needed, and the tensors for `backward`: out, Z′ and the two parts of the states of keys.

        If the kernels read the tensors of the caller, these may have any shape with the same order of entries. The keys
        are transposed to x, and the weighted keys to y [N, d, padded]. Tensors are dropped before later ones are
        allocated.
        """
        s, c = self.sizes(batch, needs_z), batch.call
        p = forward_launches(s)
        q, k, w, scale = kernel_inputs(s, batch, q, k)
        v = (v.to(c.working) - batch.middle[:, None]).to(v.dtype).contiguous() if s.is_shifted else v.contiguous()
        own, shared = kernel_coefficients(s, batch, scale)
        x = y = q.new_empty(p.transposed_shape)
        p.transpose((k, x))
        if w is not None:
            y = torch.empty_like(x)
            p.transpose(((k.float() * w[..., None]).to(k.dtype), y))
        second = None if p.second_moments is None else p.second_moments(x, y, v)  # first, because it takes longest
        first, weight = q.new_empty(p.first_shape, dtype=torch.float32), v if w is None else w
        p.first_moments((x, y, v, weight, first))
        big, small = q.new_empty(p.big_shape), q.new_empty(p.small_shape, dtype=torch.float32)
        second = first if second is None else second
        p.finish((second, first, small if own is None else own, p.slots, big, small), shared)
        del y, first, second
        out = q.new_empty(*q.shape[:-1], c.e, dtype=torch.float32 if s.is_shifted else c.dtype)
        z = q.new_empty(q.shape[:-1], dtype=torch.float32) if needs_z else out
        p.evaluate((q, big, small, x, v, weight, p.slots, out, z), (scale * LOG2_E,))
        if s.is_shifted:
            out = (out + batch.middle[:, None, None]).to(c.dtype)
        return (out, z, (out, z, big, small)) if needs_z else (out, None, ())

    def backward(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, saved: Saved, grad: Tensor) -> Gradients:
        """Return the gradients of q, k and v from `grad`, the gradient of out.

        Tensors are dropped before later ones are allocated. Where a kernel ignores a tensor, it gets Z′.
        """
        s = self.sizes(batch, True)
        p, c = gradient_launches(s), s.call
        out, z, key_big, key_small = (x.contiguous() for x in saved)  # hooks of autograd may have moved them
        q, k, w, scale = kernel_inputs(s, batch, q, k)
        v = v.contiguous()
        if batch.exact_rows is not None:
            grad = grad.masked_fill(batch.exact_rows[..., None], 0)
        grad, size = normalised(grad.contiguous())
        shift = batch.middle.float().contiguous() if s.is_shifted else key_small
        # If q and k are those of the caller, the only factor is 1 / weight in the small state.
        query_factor, key_factor, value_factor = (
            (key_small,) * 3 if s.is_plain else head_factors(batch, key_small, size)
        )
        own, shared = kernel_coefficients(s, batch, scale)
        exponents = scale * LOG2_E, scale

        def wide(shape: tuple[int, ...], is_needed: bool = True) -> Tensor:
            return q.new_empty(shape, dtype=torch.float32) if is_needed else z

        # The sums over queries, and the states that keys read.
        values, level, first = torch.empty_like(v), wide((p.row_heads, p.n)), wide(p.first_shape)
        floor, after = wide(p.floor_shape, p.is_causal), wide((c.heads, p.states), p.is_causal)
        queries = z if p.second_moments is None else q.new_empty(p.transposed_shape)
        dn = q.new_empty(p.row_heads, p.n, c.e)
        p.prepare((q, v, shift, queries, values))
        p.moments((q, grad, out, z, shift, floor, dn, level, first))
        second = z if p.second_moments is None else p.second_moments(queries, queries, dn)
        del queries, dn
        big, small = q.new_empty(p.big_shape), wide(p.small_shape)
        p.finish((second, first, small if own is None else own, floor, p.slots, big, small, after), shared)
        del first, second

        # The rows ∂q, from the states of keys and the exact blocks.
        turned = q.new_empty(p.turned_shape) if s.degree > 1 else z
        exact = wide((p.row_heads, p.n, c.d), p.is_causal)
        weight = z if w is None else w
        if p.is_causal:
            p.exact_queries((q, grad, level, k, values, weight, key_small, exact), exponents)
        dq = torch.empty_like(q)
        for part in p.queries:
            if part.turn is not None:
                part.turn((key_big[part.first_state :], p.pairs, turned))
            states = turned, key_big, key_small
            part.rows((q, grad, *states, level, exact, z, query_factor, p.turned_slots, dq), (part.first_state,))
        del exact

        # The rows ∂v, ∂k and, if the weights depend on the keys, w ∂w, from the states of queries and the exact blocks.
        exact_k, exact_v = (
            wide((c.heads, c.m, c.d), p.is_causal),
            wide((c.heads, c.m, c.e), p.is_causal),
        )
        dw = wide((c.heads, c.m), s.is_weighted)
        if p.is_causal:
            p.exact_keys((q, grad, level, z, k, values, floor, after, exact_k, exact_v, dw), exponents)
        dtype = torch.float32 if s.is_weighted else c.dtype
        dv = torch.empty_like(v, dtype=dtype)
        by_rows = 1.0 if p.is_causal else float(p.n)  # sums over queries are divided by after, or by the number of rows
        p.values((k, big, small, exact_v, weight, value_factor, after, p.slots, dv, dw), (by_rows,))
        del exact_v
        dk = torch.empty_like(k, dtype=dtype)
        for part in p.keys:
            if part.turn is not None:
                part.turn((big[part.first_state :], p.pairs, turned))
            given = k, values, turned, big, small, exact_k, weight, key_factor, after, p.turned_slots, dk
            part.rows(given, (part.first_state, by_rows))
        if s.is_weighted:  # through w_j = exp(s μ·(k_j − c))
            through = (dv * values).sum(-1) + dw
            dk = dk + batch.call.scale * through[..., None] * batch.query_centre[:, None]
        if batch.padding is not None:
            dk = dk.masked_fill(batch.padding[..., None], 0)
        return dq, dk.to(c.dtype), dv.to(c.dtype)

    def holds(self, scale: float, query: float, key: float, value: float) -> bool:
        """Return whether s² k k v and q q, which the kernels compute, stay far inside the range of float32.

        >>> holds = TritonBackend().holds
        >>> holds(0.125, 8.0, 8.0, 1.0), holds(1e-24, 1e12, 1e12, 1.0), holds(1.0, 0.0, 8.0, 1.0)
        (True, False, True)
        """
        sizes = [(abs(scale), 20), (query, 20), (key, 20), (value, 40)]
        return all(size < ZERO_NORM or 2.0**-power <= size <= 2.0**power for size, power in sizes)

    def largest_log_range(self, call: Call) -> float:
        """Return the largest spread of log w for which no weight is lost to underflow."""
        if call.dtype == torch.float16:
            return LARGEST_LOG_RANGE_FLOAT16
        return LARGEST_LOG_RANGE if call.causal else math.inf

    def rounding(self, call: Call, p: Minimax, bound: float, centring: int, spread: float) -> float:
        """Return the most that rounding can add to an output entry, as a fraction of range(v).

        `above` and `below` bound the relative errors of numerator and denominator: roundings of the terms of degree 1
        and 2, of the sums, and of the exact block. Section Rounding of docs/concepts/fast-attention-derivation.md lists
        them.
        """
        dtype, d = call.dtype, call.d
        u = 2.0**-18 if dtype == torch.float32 else unit(dtype)
        key = 1 if centring or call.is_padded else 0
        query = 1 if key or dtype == torch.float16 else 0
        weight = 2 if centring == 2 else 0
        a = [abs(c) * bound**g for g, c in enumerate(p.coefficients)] + [0.0]
        per_split = self.causal_block if call.causal else LONGEST_SPLIT
        sums = (LONGEST_SPLIT / 8 + call.m / per_split + d * d / 8 + 32) * 2.0**-23 * sum(a)
        # Below its normal range, float16 has absolute error 2⁻²⁵: in coordinates, their products, and w times both.
        small = d * 2.0**-22 * math.exp(spread if centring == 2 else 0.0) if dtype == torch.float16 else 0.0
        log_error = math.expm1(min(1.0, (d + 6) * 2.0**-53 * spread))
        linear, square = u * a[1], u * a[2]
        above = linear * (key + weight + query + 4 * u) + square * (2 * key + weight + 2 * query + 5) + sums + small
        below = linear * (key + weight + query) + square * (2 * key + weight + 2 * query + 1) + sums + small
        if call.causal:
            above += u * math.exp(bound) * (1 + (key + query) * bound)
            below += u * math.exp(bound) * (1 + (key + query) * bound)
        if dtype not in self.centred_after:
            above += unit(dtype)
        grown = math.exp(bound) / (1 - p.error)
        above, below = 1.01 * above * grown + log_error, 1.01 * below * grown + log_error
        return (above + below) / (1 - below) if below < 0.5 else math.inf

    def is_capturable(self, call: Call) -> bool:
        """Return whether a CUDA graph can capture `forward` and `is_outside`: they copy nothing to the host."""
        return call.dtype in self.centred_after and not call.is_padded

    def sizes(self, batch: Batch, needs_z: bool) -> KernelPass:
        """Return what fixes the launches of a batch."""
        call, is_padded = batch.call, batch.padding is not None
        block, is_weighted = self.causal_block if call.causal else 0, batch.is_weighted
        is_changed = batch.is_centred or is_padded or batch.exact_rows is not None
        is_plain = not is_changed and call.dtype != torch.float16  # the range of float16 is small, so q, k are scaled
        return KernelPass(
            call, batch.degree, block, is_plain, call.dtype not in self.centred_after, is_weighted or is_padded,
            is_weighted, batch.is_alike, needs_z, self.turned_bytes,
        )  # fmt: skip


def outward(d: int) -> tuple[float, float]:
    """Return (up, lost) with ‖x − c‖ ≤ up·√S + lost for the kernel's float32 sum of squares S, as in `norm_up`."""
    return 1 + 2 * (d + 8) * 2.0**-24, 2 * math.sqrt(d * torch.finfo(torch.float32).tiny)


def surveyed(call: Call, tensors: Tensors) -> Tensor:
    """Return on the device, in float32, six numbers of every head, [6, N], and behind them the centres μ and c.

    The numbers are the largest ‖q‖², ‖k‖², ‖q−μ‖², ‖k−c‖² and Σ|v| of a token, and ‖μ‖². No number is NaN. The centres
    are [2, N, d].
    """
    q, k, v = tensors.q.contiguous(), tensors.k.contiguous(), tensors.v.contiguous()
    out = q.new_zeros(call.heads * (6 + 2 * call.d), dtype=torch.float32)
    survey_launch(call.heads, call.groups * call.n, call.m, call.d, call.e, call.device)((q, k, v, out))
    return out


def kernel_survey(call: Call, tensors: Tensors) -> Survey:
    """Return the bounds of `bounds.survey`, computed by one kernel.

    The centres are means of a sample of tokens. Any centres are valid, because the bounds hold for those that are used.
    """
    if is_capturing(tensors.q):
        raise InputError(
            "attention cannot be captured in a CUDA graph: it chooses a path by numbers that are not known during "
            "the capture; pass a plan that attention_plan made of similar tensors before, or leave force unset: "
            "the call is then exact"
        )
    return survey_of_numbers(call, surveyed(call, tensors))


def survey_of_numbers(call: Call, on_device: Tensor, numbers: list[float] | None = None) -> Survey:
    """Return the survey with the numbers and centres of `surveyed`. `numbers` are on the host already, if given."""
    h, (up, lost) = call.heads, outward(call.d)
    numbers = on_device[: 6 * h].tolist() if numbers is None else numbers
    q0, k0, q1, k1, values, mean = (numbers[at : at + h] for at in range(0, 6 * h, h))
    found = Survey(call)
    found.query, found.key, found.query_centred, found.key_centred, found.query_mean = (
        [math.sqrt(x) * up + lost for x in squares] for squares in (q0, k0, q1, k1, mean)
    )
    found.value_width = found.value_size = values
    found.is_finite = [True] * h  # otherwise a norm or a width is infinite
    found.query_centre, found.key_centre = on_device[6 * h :].view(2, h, -1).unbind()
    return found


def kernel_inputs(s: KernelPass, batch: Batch, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return q̃, k̃, w and the scale that remains for the coefficients; (q, k, None, s) if nothing has to be changed."""
    if s.is_plain:
        return q.contiguous(), k.contiguous(), None, batch.call.scale
    qt, kt = centred(batch, slice(None), q, k)
    w = weights(batch, slice(None), k)
    return qt.to(q.dtype).contiguous(), kt.to(q.dtype).contiguous(), None if w is None else w.contiguous(), 1.0


def scaled_coefficients(coefficients: Sequence[tuple[float, ...]], scale: float) -> list[tuple[float, ...]]:
    """Return a_g s^g, three coefficients for every head; the third is 0 at degree 1.

    >>> scaled_coefficients([(1.0, 1.0)], 0.5)
    [(1.0, 0.5, 0.0)]
    """
    return [tuple([c * scale**g for g, c in enumerate((*a, 0.0)[:3])]) for a in coefficients]


def kernel_coefficients(s: KernelPass, batch: Batch, scale: float) -> tuple[Tensor | None, tuple[float, ...]]:
    """Return the scaled coefficients of every head on the device [N, 3], and of the first head.

    If all heads have the same polynomial, the kernels get the numbers, and there is no tensor. Pinned memory keeps the
    copy of the tensor from waiting for earlier work.
    """
    own = scaled_coefficients(batch.coefficients[:1] if s.is_alike else batch.coefficients, scale)
    if s.is_alike:
        return None, own[0]
    pinned = torch.tensor(own, dtype=torch.float32, pin_memory=s.call.device.type == "cuda")
    return pinned.to(s.call.device, non_blocking=True), own[0]


def normalised(grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ∂out [N, G, n, e] times a power of two, and the inverse factor [N]. Only float16 needs a factor."""
    if grad.dtype != torch.float16:
        return grad, None
    exponent = torch.frexp(grad.abs().amax(dim=(1, 2, 3)).float()).exponent
    one = torch.ones_like(exponent, dtype=torch.float32)
    return (grad * torch.ldexp(one, -exponent)[:, None, None, None]).to(grad.dtype), torch.ldexp(one, exponent)


def head_factors(batch: Batch, small: Tensor, size: Tensor | None) -> tuple[Tensor, ...]:
    """Return the factors of ∂q, ∂k and ∂v [N]: those of q̃ and k̃, times `size` and, for keys and values, 1 / weight."""
    query, key = (x.float() for x in batch.factors)
    share = small[0, :, -1].contiguous()
    if size is not None:
        query, share = query * size, share * size
    return query, share * key, share
