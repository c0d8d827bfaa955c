"""The definitions, written as one would on paper: what every backend must agree with."""

import torch
from torch import Tensor


def visible(n: int, m: int, causal: bool, keep: Tensor | None, device: torch.device) -> Tensor:
    """Which keys a row sees: [..., n, m]; `keep` is [..., m]."""
    seen = torch.ones(n, m, dtype=torch.bool, device=device)
    seen = seen.tril() if causal else seen
    return seen if keep is None else seen & keep.unsqueeze(-2)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, keep: Tensor | None = None
) -> Tensor:
    """out_i = Σ_j P_ij v_j, P_ij = exp(s q_i·k_j) / Σ_j exp(s q_i·k_j): [..., n, d], [..., m, d], [..., m, e]."""
    scores = scale * (q @ k.transpose(-1, -2))
    seen = visible(q.shape[-2], k.shape[-2], causal, keep, q.device)
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1) @ v


def polynomial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Tensor,
    scale: float,
    query_centre: Tensor,
    key_centre: Tensor,
    causal: bool = False,
    keep: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """The same with w_j p(t_ij) for exp(s q_i·k_j).

    t_ij = s (q_i − μ)·(k_j − c),  w_j = exp(s μ·(k_j − c)),  p(t) = Σ_g coefficients[..., g] t^g.
    When causal, exp(t_ij) itself stands on the diagonal blocks of size `block`. Centres are [..., d].
    """
    kc = k - key_centre.unsqueeze(-2)
    t = scale * (q - query_centre.unsqueeze(-2)) @ kc.transpose(-1, -2)
    log_weight = scale * (kc @ query_centre.unsqueeze(-1)).transpose(-1, -2)
    value = torch.zeros_like(t)
    for g in range(coefficients.shape[-1] - 1, -1, -1):
        value = value * t + coefficients[..., g, None, None]
    n, m = t.shape[-2:]
    if causal:
        assert block is not None
        rows = torch.arange(n, device=q.device) // block
        columns = torch.arange(m, device=q.device) // block
        value = torch.where(rows[:, None] == columns, torch.exp(t), value)
    seen = visible(n, m, causal, keep, q.device)
    weights = (torch.exp(log_weight - log_weight.amax(dim=-1, keepdim=True)) * value).masked_fill(~seen, 0)
    return weights @ v / weights.sum(dim=-1, keepdim=True)
