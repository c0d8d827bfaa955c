"""The wide block: all attention layers of a network side by side, then all its MLPs side by side (docs/math.md §3.13).

    y  = X + Σ_ℓ attention_ℓ(X),        S'(X) = y + Σ_ℓ mlp_ℓ(y)

A layer with norms before its sublayers reads n(x)Γ + β, where n is the norm without gain Γ and bias β. These are
folded into the weights, (n Γ + β) Q = n (Γ Q) + β Q, so that all layers read n(x). The product β K adds the same number
to all scores of a row, which does not change the attention, and is left out.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from depthgauge.theory.network.network import Layer, Mlp, SelfAttentionNetwork


def block_obstacle(network: SelfAttentionNetwork) -> str | None:
    """Return why a network has no wide block, or None if it has one."""
    if network.norm_place == "after":
        return "its norms are after the sublayers (post): even without weights it is a chain of norms, not one block"
    if not network.skip or (network.has_mlp and not network.mlp_skip):
        return "it has no skip connections around each sublayer, which this method requires"
    if network.length is not None:
        return "it has position biases"
    return None


def needs_tokens(network: SelfAttentionNetwork) -> bool:
    """Return whether the wide block of a network is certified over tokens alone: norms, MLPs or biases."""
    return network.norm != "none" or network.has_mlp or (network.has_attention_bias and network.length is None)


def side_by_side(layers: Sequence[Layer]) -> Layer:
    """Return one layer with all heads of several layers; Q and K are padded with zero columns to equal width."""
    width = max(layer.key_dim for layer in layers)
    query, key = (_padded([getattr(layer, name) for layer in layers], width) for name in ("query", "key"))
    return Layer(query, key, torch.cat([layer.value.detach() for layer in layers]))


def wide_block(network: SelfAttentionNetwork) -> Layer:
    """Return the one layer that computes S'; its norms have gain 1 and bias 0."""
    layers = [without_gain(layer) for layer in network]
    heads, mlps = side_by_side(layers), [layer.mlp for layer in layers if layer.mlp is not None]
    gain = torch.ones(2 if mlps else 1, network.dim, dtype=network.dtype, device=network.device)
    query_bias = _padded([_present(layer.query_bias) for layer in layers], heads.key_dim)
    return Layer(
        heads.query,
        heads.key,
        heads.value,
        _joined(mlps) if mlps else None,
        norm_weight=gain if network.norm_place == "before" else None,
        norm_bias=torch.zeros_like(gain) if network.norm_place == "before" else None,
        query_bias=_nonzero(query_bias),
        output_bias=_nonzero(torch.stack([_present(layer.output_bias) for layer in layers]).sum(0)),
    )


def without_gain(layer: Layer) -> Layer:
    """Return the layer without norms, gain and bias folded into its weights; both attention biases are present."""
    query, key, value = (getattr(layer, name).detach() for name in ("query", "key", "value"))
    query_bias = query.new_zeros(query.shape[::2]) if layer.query_bias is None else layer.query_bias.detach()
    output_bias = value.new_zeros(value.shape[-1]) if layer.output_bias is None else layer.output_bias.detach()
    mlp = layer.mlp
    if layer.norm_weight is not None and layer.norm_bias is not None:
        gain, bias = layer.norm_weight.detach()[..., None], layer.norm_bias.detach()
        query_bias, output_bias = bias[0] @ query + query_bias, bias[0] @ value.sum(0) + output_bias
        query, key, value = gain[0] * query, gain[0] * key, gain[0] * value
        if mlp is not None:
            w_in, b_in = mlp.w_in.detach(), mlp.b_in.detach()
            mlp = Mlp(gain[1] * w_in, bias[1] @ w_in + b_in, mlp.w_out.detach(), mlp.b_out.detach())
    return Layer(query, key, value, mlp, query_bias=query_bias, output_bias=output_bias)


def _padded(weights: Sequence[Tensor], width: int) -> Tensor:
    return torch.cat([F.pad(w.detach(), (0, width - w.shape[-1])) for w in weights])


def _joined(mlps: Sequence[Mlp]) -> Mlp:
    return Mlp(
        torch.cat([mlp.w_in.detach() for mlp in mlps], 1),
        torch.cat([mlp.b_in.detach() for mlp in mlps]),
        torch.cat([mlp.w_out.detach() for mlp in mlps]),
        torch.stack([mlp.b_out.detach() for mlp in mlps]).sum(0),
    )


def _present(bias: Tensor | None) -> Tensor:
    assert bias is not None
    return bias.detach()


def _nonzero(bias: Tensor) -> Tensor | None:
    return bias if bool(bias.any()) else None
