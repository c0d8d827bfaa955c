"""The backward pass of the Triton backend: the forward's two kernels, run over queries and with other matrices.

With dN = ∂out/Z′, dZ = −∂out·(out − mean)/Z′ (Z′ and all sums divided by W) and p(t) = a0 + a1 t + a2 t²,

    ∂q = Σ_j w_j p′(t) s k_j (dN·ṽ_j + dZ) = L dN + 2 S(q, ·, dN) + dZ (z1 + 2 C q)
    ∂v = w Σ_i p(t) dN_i,   ∂k = w Σ_i p′(t) s q_i (dN_i·ṽ + dZ_i)

where L, S, C, z1 are the forward's sums over keys, and the same sums over queries with dN for v give ∂v and ∂k. What is
quadratic in one vector (∂v) is `evaluate` with both factors equal; what is bilinear (∂q, ∂k) takes S with its axes in
another order. Causal attention goes back through the torch backend.
"""

import torch
from torch import Tensor

from depthgauge.fast_attention import torch_backend
from depthgauge.fast_attention.kernels import TILE, programs, slots
from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton_backend import (
    State,
    centred,
    evaluate_rows,
    is_plain,
    scaled_coefficients,
    slot_table,
    split_length,
    sum_state,
    tokens,
    uses_middle,
)


def turned(s: Tensor, dim: int) -> Tensor:
    """2 S_abc for all a and b with c and b first, in slots of 256 products c·b: [N, slots, 256, a] of the dtype of s.

    s [1, N, pairs, 256, E] holds every unordered pair of tiles once, those of different tiles doubled.
    """
    heads, width, tiles = s.shape[1], s.shape[-1], dim // TILE
    dense = s.new_empty(heads, tiles, TILE, tiles, TILE, width)
    for slot, (_, first, second) in enumerate(slots(dim)):
        block = s[0, :, slot].view(heads, TILE, TILE, width)
        if first == second:
            dense[:, first, :, first] = 2 * block
        else:
            dense[:, first, :, second], dense[:, second, :, first] = block, block.transpose(1, 2)
    by_c = dense.view(heads, dim, tiles, TILE, width // TILE, TILE).permute(0, 4, 2, 5, 3, 1)
    return by_c.reshape(1, heads, -1, TILE * TILE, dim)


def turned_table(dim: int, width: int, device: torch.device) -> Tensor:
    """The tiles of `turned`'s slots: (slot, tile of c, tile of b)."""
    tiles, others = width // TILE, dim // TILE
    rows = [(c * others + b, c, b) for c in range(tiles) for b in range(others)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def backward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    if spec.causal:
        _, _, kept = torch_backend.forward(spec, q, k, v)
        return torch_backend.backward(spec, q, k, v, kept, grad)
    out, z, s, linear, square, z1, mean = saved
    (heads, groups, n, d), e, degree = q.shape, v.shape[-1], spec.degree
    qt, kt, w, scale = centred(spec, q, k)
    coefficients = scaled_coefficients(spec, scale, q.device)
    shift = spec.middle if uses_middle(v.dtype) else mean[:, :e]
    if spec.exact_rows is not None:
        grad = grad.masked_fill(spec.exact_rows[..., None], 0)
    dz = (grad * (out - shift[:, None, None])).sum(-1, dtype=torch.float32).div_(z).neg_().view(heads, groups * n)
    dn = (grad / z[..., None]).to(q.dtype).view(heads * groups, n, e)
    rows = qt.view(heads * groups, n, d)
    zero = z1.new_zeros(1, heads, d)

    forward = State(
        turned(s, d) if degree > 1 else s, linear.transpose(-1, -2).contiguous(), 2 * square, z1, z1, zero, mean
    )
    table = turned_table(d, e, q.device)
    dq, _ = evaluate_rows(
        rows, dn, forward, table, d, degree, is_forward=False, g=dz, heads=heads, dtype=torch.float32
    )  # fmt: skip

    queries, dn = rows.view(heads, groups * n, d), dn.view(heads, groups * n, e)
    length = split_length(groups * n, heads, len(programs(d)), q.device)
    sums = sum_state(tokens(queries, dn, None), coefficients, degree, length, False, False)
    dv, _ = evaluate_rows(
        kt, kt, sums, slot_table(d, q.device), e, degree, is_forward=False, dtype=torch.float32
    )  # fmt: skip
    weighted = (queries * dz[..., None]).to(q.dtype)
    per_query = 1 / (groups * n)
    second = torch.bmm(weighted.transpose(1, 2), queries).float() * (coefficients[:, 2] * per_query)[:, None, None]
    first = weighted.sum(1, dtype=torch.float32) * (coefficients[:, 1] * per_query)[:, None]
    vt = (v - shift[:, None]).to(v.dtype)
    toward_keys = State(
        turned(sums.s, d) if degree > 1 else sums.s, sums.linear.transpose(-1, -2).contiguous(),
        (2 * second)[None].to(q.dtype), first[None], first, zero, mean,
    )  # fmt: skip
    ones = dz.new_ones(heads, k.shape[1])
    dk, _ = evaluate_rows(kt, vt, toward_keys, table, d, degree, is_forward=False, g=ones, dtype=torch.float32)

    weight = (groups * n) * mean[:, e:, None]  # Z′ and dN were divided by the total weight, the sums by the queries
    weight = weight if w is None else weight * w.float()[..., None]
    dv, dk = dv * weight, dk * weight
    if not is_plain(spec):
        dq = dq.view(heads, groups, n, d) * spec.query_factor[:, None, None, None].float()
        dk = dk * spec.key_factor[:, None, None].float()
    if spec.is_weighted:
        keys = kt.float()
        level = (dz.sum(1) * (coefficients[:, 0] * per_query))[:, None]
        along = (keys * (keys @ second + first[:, None])).sum(-1) + level
        through = (dv * vt).sum(-1) + weight[..., 0] * along
        dk = dk + spec.scale * through[..., None] * spec.query_centre[:, None]
    if spec.keep is not None:
        dk = dk.masked_fill(~spec.keep[..., None], 0)
    dq = dq.view(heads, groups, n, d)
    if spec.exact_rows is not None:
        dq = dq.masked_fill(spec.exact_rows[..., None], 0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
