"""The backward pass of the Triton backend: the forward's two kernels, run over queries and with other matrices.

With dN = ∂out/Z′, dZ = −∂out·(out − mean)/Z′ (Z′ and all sums divided by W) and p(t) = a0 + a1 t + a2 t²,

    ∂q = Σ_j w_j p′(t) s k_j (dN·ṽ_j + dZ) = L dN + 2 S(q, ·, dN) + dZ (z1 + 2 C q)
    ∂v = w Σ_i p(t) dN_i,   ∂k = w Σ_i p′(t) s q_i (dN_i·ṽ + dZ_i)

where L, S, C, z1 are the forward's sums over keys, and the same sums over queries with dN for v give ∂v and ∂k. What is
quadratic in one vector (∂v) is `evaluate` with both factors equal; what is bilinear (∂q, ∂k) takes S with its axes in
another order. Causal gradients have a file of their own.
"""

import torch
from torch import Tensor

from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton import causal_gradient as triton_causal_gradient
from depthgauge.fast_attention.triton.backend import (
    State,
    centred,
    coefficient_table,
    evaluate_rows,
    finished,
    first_sums,
    is_plain,
    scaled_coefficients,
    second_sums,
    splitting,
    tokens,
    uses_middle,
)
from depthgauge.fast_attention.triton.causal_gradient import turned_table
from depthgauge.fast_attention.triton.kernels import TILE, slots
from depthgauge.fast_attention.triton.tuning import slot_table


def turned(state: State, z1: Tensor, square: Tensor) -> State:
    """A State for bilinear rows: 2 S_abc for all a and b, as slots of 256 products c·b, and L transposed.

    S holds every unordered pair of tiles once, those of different tiles doubled. z1 [N, D] and square [N, D, D] take
    the places of z1 and C; there is no n0.
    """
    s, linear, _ = state.parts()
    heads, dim, width = s.shape[0], state.dim, state.width
    tiles = dim // TILE
    parts = [linear.transpose(-1, -2).reshape(heads, -1), square.reshape(heads, -1)]
    if state.slots:
        dense = s.new_empty(heads, tiles, TILE, tiles, TILE, width)
        for slot, (_, first, second) in enumerate(slots(dim)):
            block = s[:, slot].view(heads, TILE, TILE, width)
            if first == second:
                dense[:, first, :, first] = 2 * block
            else:
                dense[:, first, :, second], dense[:, second, :, first] = block, block.transpose(1, 2)
        by_c = dense.view(heads, dim, tiles, TILE, width // TILE, TILE).permute(0, 4, 2, 5, 3, 1)
        parts.insert(0, by_c.reshape(heads, -1))
    small = z1.new_zeros(heads, dim + 2 * dim + 2)
    small[:, :dim] = z1
    return State(torch.cat(parts, dim=1)[None], small[None], tiles * (width // TILE) if state.slots else 0, dim, dim)


def backward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    grad = grad.contiguous()
    if spec.causal:
        return triton_causal_gradient.backward(spec, q, k, v, saved, grad)
    (heads, groups, n, d), e, degree = q.shape, v.shape[-1], spec.degree
    out, z, big, small = saved
    forward = State(big, small, len(slots(d)) if degree > 1 else 0, d, e)
    z1, mean, share = forward.lower()
    qt, kt, w, scale = centred(spec, q, k)
    coefficients = scaled_coefficients(spec.coefficients, scale)
    a = coefficient_table(coefficients, q.device)
    shift = spec.middle if uses_middle(v.dtype) else mean
    if spec.exact_rows is not None:
        grad = grad.masked_fill(spec.exact_rows[..., None], 0)
    dz = (grad * (out - shift[:, None, None])).sum(-1, dtype=torch.float32).div_(z).neg_().view(heads, groups * n)
    dn = (grad / z[..., None]).to(q.dtype).view(heads * groups, n, e)
    rows = qt.view(heads * groups, n, d)
    table = turned_table(d, e, q.device) if degree > 1 else slot_table(d, q.device)
    toward_queries = turned(forward, z1, 2 * forward.parts()[2])
    dq, _ = evaluate_rows(
        rows, dn, toward_queries, table, d, is_forward=False, g=dz, heads=heads, dtype=torch.float32
    )  # fmt: skip

    queries, dn = rows.view(heads, groups * n, d), dn.view(heads, groups * n, e)
    length = splitting(heads, d, groups * n, False, q.device)
    over = tokens(queries, dn, None)
    second_of = second_sums(over, length, False) if degree > 1 else None
    sums = finished(over, first_sums(over, length), second_of, coefficients, False, False)
    dv, _ = evaluate_rows(kt, kt, sums, slot_table(d, q.device), e, is_forward=False, dtype=torch.float32)
    weighted = (queries * dz[..., None]).to(q.dtype)
    per_query = 1 / (groups * n)
    second = torch.bmm(weighted.transpose(1, 2), queries).float() * (a[:, 2] * per_query)[:, None, None]
    first = weighted.sum(1, dtype=torch.float32) * (a[:, 1] * per_query)[:, None]
    vt = (v - shift[:, None]).to(v.dtype).contiguous()
    ones = dz.new_ones(heads, k.shape[1])
    toward_keys = turned(sums, first, (2 * second).to(q.dtype))
    dk, _ = evaluate_rows(kt, vt, toward_keys, table, d, is_forward=False, g=ones, dtype=torch.float32)

    weight = (groups * n) * share[..., None]  # Z′ and dN were divided by the total weight, the sums by the queries
    weight = weight if w is None else weight * w.float()[..., None]
    dv, dk = dv * weight, dk * weight
    if not is_plain(spec):
        dq = dq.view(heads, groups, n, d) * spec.query_factor[:, None, None, None].float()
        dk = dk * spec.key_factor[:, None, None].float()
    if spec.is_weighted:
        keys = kt.float()
        level = (dz.sum(1) * (a[:, 0] * per_query))[:, None]
        along = (keys * (keys @ second + first[:, None])).sum(-1) + level
        through = (dv * vt).sum(-1) + weight[..., 0] * along
        dk = dk + spec.scale * through[..., None] * spec.query_centre[:, None]
    if spec.keep is not None:
        dk = dk.masked_fill(~spec.keep[..., None], 0)
    dq = dq.view(heads, groups, n, d)
    if spec.exact_rows is not None:
        dq = dq.masked_fill(spec.exact_rows[..., None], 0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
