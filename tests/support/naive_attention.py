"""Reference definitions of exact and polynomial attention, which every backend is tested against."""

import torch
from torch import Tensor


def visible(n: int, m: int, causal: bool, keep: Tensor | None, device: torch.device) -> Tensor:
    """Return the bool mask [..., n, m] of the keys that each row attends to; `keep` is [..., m]."""
    mask = torch.ones(n, m, dtype=torch.bool, device=device)
    mask = mask.tril() if causal else mask
    return mask if keep is None else mask & keep.unsqueeze(-2)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, keep: Tensor | None = None
) -> Tensor:
    """Compute exact attention.

        out_i = Σ_j P_ij v_j,   P_ij = exp(s q_i·k_j) / Σ_j exp(s q_i·k_j)

    q is [..., n, d], k is [..., m, d], v is [..., m, e]; s is `scale`.
    """
    scores = scale * (q @ k.transpose(-1, -2))
    mask = visible(q.shape[-2], k.shape[-2], causal, keep, q.device)
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ v


def polynomial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Tensor,
    scale: float,
    centres: tuple[Tensor, Tensor],
    keep: Tensor | None = None,
    causal_block: int | None = None,
) -> Tensor:
    """Compute attention with w_j p(t_ij) in place of exp(s q_i·k_j).

        t_ij = s (q_i − μ)·(k_j − c),   w_j = exp(s μ·(k_j − c)),   p(t) = Σ_g coefficients[..., g] t^g

    `centres` is (μ, c), both [..., d]. If `causal_block` is given, attention is causal, and the diagonal blocks of that
    size use exp(t_ij) instead of p(t_ij).
    """
    query_centre, key_centre = centres
    kc = k - key_centre.unsqueeze(-2)
    t = scale * (q - query_centre.unsqueeze(-2)) @ kc.transpose(-1, -2)
    log_weight = scale * (kc @ query_centre.unsqueeze(-1)).transpose(-1, -2)
    value = torch.zeros_like(t)
    for g in range(coefficients.shape[-1] - 1, -1, -1):
        value = value * t + coefficients[..., g, None, None]
    n, m = t.shape[-2:]
    if causal_block is not None:
        rows = torch.arange(n, device=q.device) // causal_block
        columns = torch.arange(m, device=q.device) // causal_block
        value = torch.where(rows[:, None] == columns, torch.exp(t), value)
    mask = visible(n, m, causal_block is not None, keep, q.device)
    weights = (torch.exp(log_weight - log_weight.amax(dim=-1, keepdim=True)) * value).masked_fill(~mask, 0)
    return weights @ v / weights.sum(dim=-1, keepdim=True)
