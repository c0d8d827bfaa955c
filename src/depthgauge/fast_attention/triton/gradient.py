"""The backward pass in Triton: the sums of the forward pass, the same sums over queries, and rows that read them.

Let p(t) = a0 + a1 t + a2 t², level = −∂out·(out − shift) and dN = ∂out/Z′, where Z′ and all sums over keys are divided
by W. Then

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

import torch
from torch import Tensor

from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton.forward import LOG2_E, PassSizes, kernel_coefficients, kernel_inputs
from depthgauge.fast_attention.triton.gradient_launches import gradient_launches


def normalised(grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return ∂out [N, G, n, e] times a power of two, and the inverse factor [N]. Only float16 needs a factor."""
    if grad.dtype != torch.float16:
        return grad, None
    exponent = torch.frexp(grad.abs().amax(dim=(1, 2, 3)).float()).exponent
    one = torch.ones_like(exponent, dtype=torch.float32)
    return (grad * torch.ldexp(one, -exponent)[:, None, None, None]).to(grad.dtype), torch.ldexp(one, exponent)


def head_factors(spec: Spec, small: Tensor, size: Tensor | None) -> tuple[Tensor, ...]:
    """Return the factors of ∂q, ∂k and ∂v [N]: those of q̃ and k̃, times `size` and, for keys and values, 1 / weight."""
    query, key = (x.float() for x in spec.factors)
    share = small[0, :, -1].contiguous()
    if size is not None:
        query, share = query * size, share * size
    return query, share * key, share


def backward(
    s: PassSizes, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from `grad`, the gradient of out.

    `saved` are out, Z′ and the two parts of the states of keys from the forward pass. Tensors are dropped before later
    ones are allocated. Where a kernel ignores a tensor, it gets Z′.
    """
    p = gradient_launches(s)
    out, z, key_big, key_small = (x.contiguous() for x in saved)  # hooks of autograd may have moved them
    q, k, w, scale = kernel_inputs(s, spec, q, k)
    v = v.contiguous()
    if spec.exact_rows is not None:
        grad = grad.masked_fill(spec.exact_rows[..., None], 0)
    grad, size = normalised(grad.contiguous())
    shift = spec.middle.float().contiguous() if s.is_shifted else key_small
    # If q and k are those of the caller, the only factor is 1 / weight in the small state.
    query_factor, key_factor, value_factor = (key_small,) * 3 if s.is_plain else head_factors(spec, key_small, size)
    own, shared = kernel_coefficients(s, spec, scale)
    exponents = scale * LOG2_E, scale

    def wide(shape: tuple[int, ...], is_needed: bool = True) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32) if is_needed else z

    # The sums over queries, and the states that keys read.
    values, level, first = torch.empty_like(v), wide((p.row_heads, p.n)), wide(p.first_shape)
    floor, after = wide(p.floor_shape, p.is_causal), wide((s.heads, p.states), p.is_causal)
    queries = z if p.second_moments is None else q.new_empty(p.transposed_shape)
    dn = q.new_empty(p.row_heads, p.n, s.e)
    p.prepare((q, v, shift, queries, values))
    p.moments((q, grad, out, z, shift, floor, dn, level, first))
    second = z if p.second_moments is None else p.second_moments(queries, queries, dn)
    del queries, dn
    big, small = q.new_empty(p.states, s.heads, s.big_size), wide((p.states, s.heads, p.query_small_size))
    p.finish((second, first, small if own is None else own, floor, p.slots, big, small, after), shared)
    del first, second

    # The rows ∂q, from the states of keys and the exact blocks.
    turned = q.new_empty(p.turned_shape) if p.turned_parts else z
    exact = wide((p.row_heads, p.n, s.d), p.is_causal)
    weight = z if w is None else w
    if p.is_causal:
        p.exact_queries((q, grad, level, k, values, weight, key_small, exact), exponents)
    dq = torch.empty_like(q)
    for part in p.queries:
        if part.turn is not None:
            part.turn((key_big[part.first_state :], p.pairs, turned))
        states = turned, key_big, key_small
        part.rows((q, grad, *states, level, exact, z, query_factor, z, p.turned_slots, dq, z), (1.0,))
    del exact

    # The rows ∂v, ∂k and, if the weights depend on the keys, w ∂w, from the states of queries and the exact blocks.
    exact_k, exact_v = wide((s.heads, s.m, s.d), p.is_causal), wide((s.heads, s.m, s.e), p.is_causal)
    dw = wide((s.heads, s.m), s.is_weighted)
    if p.is_causal:
        p.exact_keys((q, grad, level, z, k, values, floor, after, exact_k, exact_v, dw), exponents)
    dtype = torch.float32 if s.is_weighted else s.dtype
    dv = torch.empty_like(v, dtype=dtype)
    rows = (1.0 if p.is_causal else float(p.n),)  # sums over queries are divided by after, or by the number of rows
    p.values((k, k, big, big, small, z, exact_v, weight, value_factor, after, p.slots, dv, dw), rows)
    del exact_v
    dk = torch.empty_like(k, dtype=dtype)
    for part in p.keys:
        if part.turn is not None:
            part.turn((big[part.first_state :], p.pairs, turned))
        states = turned, big, small
        part.rows((k, values, *states, z, exact_k, weight, key_factor, after, p.turned_slots, dk, z), rows)
    if s.is_weighted:  # through w_j = exp(s μ·(k_j − c))
        through = (dv * values).sum(-1) + dw
        dk = dk + spec.scale * through[..., None] * spec.query_centre[:, None]
    if spec.keep is not None:
        dk = dk.masked_fill(~spec.keep[..., None], 0)
    return dq, dk.to(s.dtype), dv.to(s.dtype)
