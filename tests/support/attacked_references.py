"""What an attacked call is compared with: exact attention in float64, and torch's own attention."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from drawn_calls import Drawn
from torch import Tensor

from depthgauge.fast_attention.exact_path import is_paired, paired, readable

ENTRIES = 2**22
"""The largest number of scores that are computed in float64 for one call. With more, some rows are compared."""
FEWEST_ROWS = 16


@dataclass(frozen=True)
class Reference:
    """Exact attention in float64 of some rows, its weights P, and its gradients if the call has gradients.

    `is_spoilt` marks entries that depend on a NaN or an infinity. Hidden keys do not count: torch multiplies their
    values by 0, which spoils the entry or not, depending on the kernel. `has_nan` marks the heads with a NaN: a row
    whose scores are all −∞ is NaN or 0, depending on the kernel.
    """

    rows: Tensor
    out: Tensor
    is_spoilt: Tensor
    has_nan: Tensor
    weights: Tensor
    up: Tensor
    gradients: tuple[Tensor, Tensor, Tensor] | None


def checked_rows(drawn: Drawn) -> Tensor:
    """Return the rows that are compared: all of them if this is affordable, else some, with the first and the last."""
    kind = drawn.kind
    most = max(FEWEST_ROWS, ENTRIES // (kind.batch * kind.heads * kind.groups * kind.m))
    if kind.n <= most:
        return torch.arange(kind.n, device=drawn.q.device)
    generator = torch.Generator().manual_seed(kind.n)
    inner = torch.randperm(kind.n - 2, generator=generator)[: most - 2] + 1
    return torch.cat([torch.tensor([0, kind.n - 1]), inner]).sort().values.to(drawn.q.device)


def reference(drawn: Drawn) -> Reference:
    """Compute the call in float64. Gradients are those of Σ up·out over the rows that are compared."""
    kind, rows = drawn.kind, checked_rows(drawn)
    q, k, v = (x.detach().double() for x in (drawn.q[..., rows, :], drawn.k, drawn.v))
    is_bad = (~torch.isfinite(v)).double().repeat_interleave(kind.groups, dim=1)
    v = v.masked_fill(~torch.isfinite(v), 0.0)
    leaves = [x.requires_grad_(kind.gradients) for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(kind.groups, dim=1) for x in leaves[1:])
    hidden = torch.zeros(len(rows), kind.m, dtype=torch.bool, device=rows.device)
    if kind.causal:
        hidden = torch.arange(kind.m, device=rows.device) > rows[:, None]
    if drawn.padding is not None:
        hidden = hidden | drawn.padding[:, None, None, :]
    scores = kind.used_scale * (leaves[0] @ wide_k.transpose(-1, -2))
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    first = wide_v.detach()[..., :1, :]  # weights sum to 1; without it, large equal values would lose small differences
    out = weights @ (wide_v - first) + first
    generator = torch.Generator(rows.device).manual_seed(kind.n + kind.m)
    up = torch.randn(out.shape, generator=generator, device=rows.device, dtype=torch.float64).to(kind.dtype)
    gradients = None
    if kind.gradients:
        gradients = torch.autograd.grad(out, leaves, up.double())
    weights = weights.detach()
    is_spoilt = torch.isnan(weights).any(-1, keepdim=True) | (weights @ is_bad > 0)
    nans = [torch.isnan(x).flatten(2).any(-1) for x in (drawn.q, drawn.k, drawn.v)]
    has_nan = nans[0] | (nans[1] | nans[2]).repeat_interleave(kind.groups, dim=1)
    return Reference(rows, out.detach(), is_spoilt, has_nan[..., None, None], weights, up, gradients)  # type: ignore[arg-type]


def torch_attention(drawn: Drawn, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return torch's own attention for the same arguments. Its causal rows may be NaN at a negative scale."""
    kind = drawn.kind
    q, scale = (-q, -kind.used_scale) if kind.used_scale < 0 else (q, kind.used_scale)
    mask, is_causal = None, kind.causal
    if drawn.padding is not None:
        mask = ~drawn.padding[:, None, None, :]
        if is_causal:
            mask = mask & torch.ones(kind.n, kind.m, dtype=torch.bool, device=q.device).tril()
        is_causal = False
        mask = mask if is_paired(mask) else paired(mask, q.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=kind.groups > 1)


def own_copy(x: Tensor) -> Tensor:
    """Return a copy in memory of its own that torch's kernels can read: the order of the axes in memory is kept."""
    found = readable(x.detach())
    return found.clone() if found.stride(-1) == 1 else found.clone(memory_format=torch.contiguous_format)
