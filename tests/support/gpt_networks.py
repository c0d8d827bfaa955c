"""Random networks that are built like GPT-2, and random tokens."""

import math
from typing import Any

import torch
from torch import Tensor, nn

import depthgauge as dg
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.parallel_blocks import WideBlock
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.norms import softm
from depthgauge.theory.network.network import SelfAttentionNetwork


def drawn(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gpt(seed: int = 0, eta: float = 0.05, *, biases: bool = True, **settings: Any) -> SelfAttentionNetwork:
    """Draw a network as GPT-2 is built: pre-norm, causal, attention and MLP, gains near 1, and biases."""
    kind = {"layers": 2, "heads": 2, "dim": 4, "mlp": 6, "activation": "gelu", "norm": "pre", "causal": True}
    net = dg.random_network(**kind | settings, eta=eta, mlp_skip=True, seed=seed)
    for k, layer in enumerate(net if biases else []):
        if layer.norm_weight is not None and layer.norm_bias is not None:
            layer.norm_weight.data += drawn(*layer.norm_weight.shape, seed=seed + k, size=0.1)
            layer.norm_bias.data += drawn(*layer.norm_bias.shape, seed=seed + k + 50, size=eta)
        layer.query_bias = nn.Parameter(drawn(layer.heads, layer.key_dim, seed=seed + k + 100, size=eta))
        layer.output_bias = nn.Parameter(drawn(net.dim, seed=seed + k + 150, size=eta))
    return net


def attention_of(net: SelfAttentionNetwork, k: int, x: Tensor) -> Tensor:
    """The attention of a layer, written out: gain and bias are applied, not folded."""
    layer, read, made = net[k], net.attention_input(k, x), torch.zeros_like(x)
    for h in range(layer.heads):
        bias = 0.0 if layer.query_bias is None else layer.query_bias[h]
        scores = net.scale * (read @ layer.query[h] + bias) @ (read @ layer.key[h]).mT
        hidden = torch.ones_like(scores).triu(1).bool() if net.causal else torch.zeros_like(scores).bool()
        made = made + softm(scores.masked_fill(hidden, -math.inf)) @ read @ layer.value[h]
    return made if layer.output_bias is None else made + layer.output_bias


def mlp_of(net: SelfAttentionNetwork, k: int, y: Tensor) -> Tensor:
    layer = net[k]
    if layer.mlp is None:
        return torch.zeros_like(y)
    made: Tensor = layer.mlp(net.normalize(k, 1, y) if net.norm_place == "before" else y, net.activation)
    return made


def difference(one: SelfAttentionNetwork, other: SelfAttentionNetwork, x: Tensor) -> float:
    with torch.no_grad():
        return float((one(x) - other(x)).abs().max())


def upper(net: SelfAttentionNetwork, small: SelfAttentionNetwork, tokens: Tokens) -> float:
    return float(WideBlock(Comparison(net, small, tokens)).value.max())
