"""A second implementation of the network: loops over heads and rows, independent of the package."""

import math

import torch
from torch import Tensor

from depthgauge import SelfAttentionNetwork


def plain_head(x: Tensor, Q: Tensor, K: Tensor, V: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the attention matrix and the output of one head on one input [n, d], computed row by row."""
    scores = scale * (x @ Q) @ (x @ K).T
    P = torch.zeros_like(scores)
    for i in range(len(x)):
        seen = i + 1 if causal else len(x)
        weights = torch.exp(scores[i, :seen] - scores[i, :seen].max())
        P[i, :seen] = weights / weights.sum()
    return P, P @ x @ V


def plain_norm(x: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
    """Apply LayerNorm to each row, or RMSNorm if the kind ends with rms."""
    centred = x if kind.endswith("rms") else x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def plain_forward(network: SelfAttentionNetwork, x: Tensor) -> Tensor:
    """Return S(x) for one input [n, d]."""
    for layer in network:
        read = plain_norm(x, layer.norm_weight[0], layer.norm_bias[0], network.norm) if network.norm[:3] == "pre" else x
        y = x.clone() if network.skip else torch.zeros_like(x)
        for h in range(layer.heads):
            y = y + plain_head(read, layer.query[h], layer.key[h], layer.value[h], network.scale, network.causal)[1]
        y = plain_norm(y, layer.norm_weight[0], layer.norm_bias[0], network.norm) if network.norm[:4] == "post" else y
        if layer.mlp is not None:
            read = (
                plain_norm(y, layer.norm_weight[1], layer.norm_bias[1], network.norm)
                if network.norm[:3] == "pre"
                else y
            )
            hidden = read @ layer.mlp.w_in + layer.mlp.b_in
            if network.activation == "relu":
                hidden = torch.where(hidden > 0, hidden, 0.0)
            else:
                hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            z = hidden @ layer.mlp.w_out + layer.mlp.b_out
            z = y + z if network.mlp_skip else z
            y = (
                plain_norm(z, layer.norm_weight[1], layer.norm_bias[1], network.norm)
                if network.norm[:4] == "post"
                else z
            )
        x = y
    return x
