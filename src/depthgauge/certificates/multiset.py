"""Networks on inputs of few distinct tokens: token j occurs counts_j times.

Equal tokens stay equal in every layer of a network that is not causal, so only the distinct tokens are computed.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.network.layer import Layer
from depthgauge.network.network import AttentionFunction, SelfAttentionNetwork

Evaluate = Callable[[Float[Tensor, "starts r d"], Float[Tensor, "starts r"]], Float[Tensor, "starts r d"]]
"""Maps distinct tokens and the logarithms of their multiplicities to S(X) at these tokens."""


def multiset_attention(counts: Float[Tensor, " r"]) -> AttentionFunction:
    """Return softmax attention over distinct tokens with multiplicities: p_j ∝ counts_j · exp(s_j)."""
    return partial(_attend, counts.log())


def _attend(bias: Tensor, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
    scores = (query @ key.mT) * scale + bias
    if is_causal:
        scores = scores + _causal_mask(scores)
    return torch.softmax(scores, dim=-1) @ value


def _causal_mask(like: Tensor) -> Float[Tensor, "r r"]:
    """Return −∞ where column j is later than row i, and 0 elsewhere."""
    r = like.shape[-1]
    return torch.full((r, r), -math.inf, dtype=like.dtype, device=like.device).triu(1)


def difference(
    network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, x: Float[Tensor, "*batch r d"], counts: Tensor
) -> Float[Tensor, "*batch r d"]:
    """Return S(X) − S'(X) at the distinct tokens x, where token j occurs counts_j times."""
    attention = multiset_attention(counts.to(x.dtype))
    gap: Tensor = network(x, attention) - surrogate(x, attention)
    return gap


def prepare(network: SelfAttentionNetwork, device: torch.device) -> Evaluate:
    """Return a fast S(X) for batches of small inputs, each with its own multiplicities.

    Multiplicity 0, whose logarithm is −∞, hides a token from all others.

    The scores are x_i A_h x_jᵀ with A_h = scale · Q_h K_hᵀ, so X itself is the keys and the values of all heads: two
    batched products per layer serve all heads. The weights have no gradients.
    """
    frozen = network.copy().requires_grad_(False).to(device)
    if frozen.norm != "none" or any(2 * layer.key_dim < frozen.dim for layer in frozen):
        return lambda x, bias: frozen(x, partial(_attend, bias[:, None, None, :]))
    combined = [(frozen.scale * layer.query @ layer.key.mT).transpose(0, 1).flatten(1) for layer in frozen]
    return partial(_run, frozen, list(zip(frozen, combined, strict=True)))


def _run(network: SelfAttentionNetwork, layers: list[tuple[Layer, Tensor]], x: Tensor, bias: Tensor) -> Tensor:
    """Compute S(X); each layer comes with its A of shape [d, H·d]."""
    starts, r, d = x.shape
    shown = bias[:, None, None, :]  # [starts, query token, head, key token]
    if network.causal:
        shown = shown + _causal_mask(bias)[:, None, :]
    for layer, combined in layers:
        scores = ((x @ combined).reshape(starts, -1, d) @ x.mT).reshape(starts, r, layer.heads, r)
        weights = torch.softmax(scores + shown, dim=-1).reshape(starts, -1, r)
        y = (weights @ x).reshape(starts, r, -1) @ layer.value.flatten(0, 1)
        x = x + y if network.skip else y
        if layer.mlp is not None:
            z = layer.mlp(x, network.activation)
            x = x + z if network.mlp_skip else z
    return x
