"""The backward pass in Triton: the kernels of the forward pass, applied to queries and to other matrices.

Let dN = ∂out/Z′ and dZ = −∂out·(out − mean)/Z′, where Z′ and all sums are divided by W, and p(t) = a0 + a1 t + a2 t².
Then

    ∂q = Σ_j w_j p′(t) s k_j (dN·ṽ_j + dZ) = L dN + 2 S(q, ·, dN) + dZ (z1 + 2 C q)
    ∂v = w Σ_i p(t) dN_i,   ∂k = w Σ_i p′(t) s q_i (dN_i·ṽ + dZ_i)

L, S, C and z1 are the sums over keys of the forward pass. The same sums over queries, with dN in place of v, give ∂v
and ∂k. ∂v is quadratic in one vector, so it is `evaluate` with two equal factors. ∂q and ∂k are bilinear, so they need
S with its axes in another order (`turned`). Causal gradients are in `causal_gradient`.
"""

import torch
from torch import Tensor

from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton import causal_gradient
from depthgauge.fast_attention.triton.causal_gradient import turned_slots
from depthgauge.fast_attention.triton.forward import (
    State,
    coefficient_table,
    finished,
    first_moments,
    gradient_rows,
    is_plain,
    kernel_inputs,
    scaled_coefficients,
    second_moments,
    tokens,
)
from depthgauge.fast_attention.triton.kernels import TILE, slots
from depthgauge.fast_attention.triton.workspace import Workspace


def turned(workspace: Workspace, state: State, z1: Tensor, square: Tensor) -> State:
    """Return a State for bilinear rows: 2 S_abc for all a and b, as slots of 256 products c·b, and L transposed.

    S holds every unordered pair of tiles once, and pairs of different tiles doubled. z1 [N, D] and square [N, D, D]
    replace z1 and C; n0 is 0.
    """
    s, linear, _ = state.parts()
    heads, dim, width = s.shape[0], state.dim, state.width
    tiles = dim // TILE
    parts = [linear.transpose(-1, -2).reshape(heads, -1), square.reshape(heads, -1)]
    table, count = state.table, 0
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
        table, count = workspace.table(turned_slots, s.device, dim, width), tiles * (width // TILE)
    small = z1.new_zeros(heads, dim + 2 * dim + 2)
    small[:, :dim] = z1
    return State(torch.cat(parts, dim=1)[None], small[None], count, dim, dim, table)


def backward(
    workspace: Workspace, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from `grad`, the gradient of out."""
    grad = grad.contiguous()
    if spec.causal:
        return causal_gradient.backward(workspace, spec, q, k, v, saved, grad)
    (heads, groups, n, d), e, degree = q.shape, v.shape[-1], spec.degree
    out, z, big, small = saved
    table = workspace.table(slots, q.device, d)
    forward = State(big, small, len(slots(d)) if degree > 1 else 0, d, e, table)
    z1, mean, share = forward.lower()
    qt, kt, w, scale = kernel_inputs(spec, q, k)
    coefficients = scaled_coefficients(spec.coefficients, scale)
    a = coefficient_table(coefficients, q.device)
    shift = spec.middle if workspace.centres_before(v.dtype) else mean
    if spec.exact_rows is not None:
        grad = grad.masked_fill(spec.exact_rows[..., None], 0)
    dz = (grad * (out - shift[:, None, None])).sum(-1, dtype=torch.float32).div_(z).neg_().view(heads, groups * n)
    dn = (grad / z[..., None]).to(q.dtype).view(heads * groups, n, e)
    rows = qt.view(heads * groups, n, d)
    dq = gradient_rows(workspace, rows, dn, turned(workspace, forward, z1, 2 * forward.parts()[2]), dz)

    queries, dn = rows.view(heads, groups * n, d), dn.view(heads, groups * n, e)
    length = workspace.per_split(heads, d, groups * n, False, q.device)
    over = tokens(workspace, queries, dn, None)
    second_of = second_moments(workspace, over, length, False) if degree > 1 else None
    first_of = first_moments(workspace, over, length)
    sums = finished(workspace, over, first_of, second_of, coefficients, False, False)
    dv = gradient_rows(workspace, kt, kt, sums)
    weighted = (queries * dz[..., None]).to(q.dtype)
    per_query = 1 / (groups * n)
    second = torch.bmm(weighted.transpose(1, 2), queries).float() * (a[:, 2] * per_query)[:, None, None]
    first = weighted.sum(1, dtype=torch.float32) * (a[:, 1] * per_query)[:, None]
    vt = (v - shift[:, None]).to(v.dtype).contiguous()
    ones = dz.new_ones(heads, k.shape[1])
    dk = gradient_rows(workspace, kt, vt, turned(workspace, sums, first, (2 * second).to(q.dtype)), ones)

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
