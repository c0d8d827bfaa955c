"""Closed-form one-layer surrogates of a deep network (docs/math.md §3.7).

With N_{0:L} = A_0 ⋯ A_{L−1}, A_ℓ = I + Σ_h V_ℓh (without skips A_ℓ = Σ_h V_ℓh), and weights of size η:

    identity     X                                                            error O(η)
    last-layer   layer_{L−1}(X), the construction of Theorem D.1              error O(η)
    parallel     X + Σ_ℓh attention_ℓh(X), and the MLPs of it (§3.13)         error O(η²)
    mean-field   X + 1·mean(X)·(N_{0:L} − I)                                  error O(η³)
    corrected    X + Σ_ℓh attention_ℓh(X) + 1·mean(X)·(N_{0:L} − I − ΣV)      error O(η⁴)

In a causal network the average over the visible tokens, C with C_ij = 1/i for j ≤ i, replaces the mean, and its powers
are different patterns. With e_m = Σ_{ℓ₁<…<ℓ_m} V_ℓ₁ ⋯ V_ℓm and V_ℓ = Σ_h V_ℓh (docs/math.md §3.12):

    mean-field   X + Σ_{m≥1} C^m X e_m                                        error O(η³)
    corrected    X + Σ_ℓh attention_ℓh(X) + Σ_{m≥2} C^m X e_m                 error O(η⁴)

C^m is the attention of a head whose scores are the position bias log (C^m)_ij.

The wide block has all attention layers of a network side by side, then all its MLPs side by side (docs/math.md §3.13):

    y  = X + Σ_ℓ attention_ℓ(X),        S'(X) = y + Σ_ℓ mlp_ℓ(y)

A layer with norms before its sublayers reads n(x)Γ + β, where n is the norm without gain Γ and bias β. These are
folded into the weights, (n Γ + β) Q = n (Γ Q) + β Q, so that all layers read n(x). The product β K adds the same number
to all scores of a row, which does not change the attention, and is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import InputError, unknown_name
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


def averaging_layer(value: Float[Tensor, "d d"]) -> Layer:
    """Return a layer of one head with Q = K = 0, which computes X + 1·mean(X)·V (1·mean(X)·V without skips)."""
    zero = value.new_zeros(1, len(value), 1)
    return Layer(zero, zero.clone(), value[None].clone())


def drift_matrix(network: SelfAttentionNetwork, layers: Sequence[int]) -> Float[Tensor, "d d"]:
    """Return N − I over consecutive layers, by Z ← Z + V_ℓ + Z V_ℓ; without skips N, by Z ← Z V_ℓ."""
    eye = torch.eye(network.dim, dtype=network.dtype, device=network.device)
    Z = torch.zeros_like(eye) if network.skip else eye
    for index in layers:
        V = network[index].value.detach().sum(dim=0)
        Z = Z + V + Z @ V if network.skip else Z @ V
    return Z


def _corrected(network: SelfAttentionNetwork) -> Layer:
    total = sum((layer.value.detach().sum(dim=0) for layer in network), torch.zeros_like(drift_matrix(network, [])))
    return side_by_side([*network, averaging_layer(drift_matrix(network, range(len(network))) - total)])


def drift_orders(network: SelfAttentionNetwork) -> list[Float[Tensor, "d d"]]:
    """Return e_1, …, e_L, by e_m ← e_m + e_{m−1} V_ℓ from the last order to the first."""
    eye = torch.eye(network.dim, dtype=network.dtype, device=network.device)
    orders = [eye, *(torch.zeros_like(eye) for _ in network)]
    for layer in network:
        V = layer.value.detach().sum(dim=0)
        for m in range(len(network), 0, -1):
            orders[m] = orders[m] + orders[m - 1] @ V
    return orders[1:]


def prefix_average(n: int) -> Float[Tensor, "n n"]:
    """Return C: row i is the average over the tokens 0 to i."""
    return torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1.0, n + 1, dtype=torch.float64)[:, None]


def pattern_layer(values: Mapping[int, Float[Tensor, "d d"]], length: int) -> Layer:
    """Return a causal layer with one head for each power m: its pattern is C^m, its value is values[m]."""
    C, like = prefix_average(length), next(iter(values.values()))
    visible = torch.ones_like(C).tril().bool()
    powers = torch.stack([torch.linalg.matrix_power(C, m) for m in values])
    bias = torch.where(visible, powers, 1.0).log().to(like)
    zero = like.new_zeros(len(values), len(like), 1)
    return Layer(zero, zero.clone(), torch.stack(list(values.values())), position_bias=bias)


def _causal_form(network: SelfAttentionNetwork, method: str, length: int) -> Layer:
    """Return the layer of mean-field or corrected for a causal network."""
    orders = dict(enumerate(drift_orders(network), start=1))
    if method == "mean-field":
        return pattern_layer(orders, length)
    later = {m: value for m, value in orders.items() if m >= 2}
    if not later:  # one layer is its own corrected form
        return side_by_side(list(network))
    patterns = pattern_layer(later, length)
    assert patterns.position_bias is not None
    layer = side_by_side([*network, patterns])
    none = patterns.position_bias.detach().new_zeros(layer.heads - len(later), length, length)
    return Layer(layer.query, layer.key, layer.value, position_bias=torch.cat([none, patterns.position_bias.detach()]))


CLOSED_FORMS: Mapping[str, Callable[[SelfAttentionNetwork], Layer]] = {
    "identity": lambda network: averaging_layer(torch.zeros_like(drift_matrix(network, []))),
    "last-layer": lambda network: network[len(network) - 1].copy(),
    "parallel": wide_block,
    "mean-field": lambda network: averaging_layer(drift_matrix(network, range(len(network)))),
    "corrected": _corrected,
}
"""Method → the layer of its network, as listed above."""
METHODS = (*CLOSED_FORMS, "fitted")


def refusal(network: SelfAttentionNetwork, method: str, length: int | None = None) -> str | None:
    """Return why a method does not apply to a network, or None if it does.

    `length` is the largest number of tokens, which some methods need for causal networks.
    """
    works = [name for name in METHODS if _obstacle(network, name, length) is None]
    obstacle = _obstacle(network, method, length)
    if obstacle is None:
        return None
    advice = f"methods that work on it: {', '.join(works)}" if works else "no method works on it"
    return f"{method} does not apply to this network: {obstacle}; {advice}"


def _obstacle(network: SelfAttentionNetwork, method: str, length: int | None) -> str | None:
    if method == "parallel":
        return block_obstacle(network)
    if network.norm != "none":
        return f"it has norms ({network.norm}), which only parallel covers, and only before the sublayers (pre)"
    if network.has_mlp:
        if method in ("identity", "last-layer"):
            return None
        return "it has MLPs between its attention layers, so these cannot be merged into one"
    if network.has_attention_bias:
        return "it has biases in the attention"
    if network.causal and method == "fitted":
        return "it is causal"
    if network.causal and method in ("mean-field", "corrected"):
        if not network.skip:
            return "it is causal and has no skip connections"
        if length is None:
            return "it is causal, so the method needs the largest number of tokens, the length of collapse"
    if not network.skip and method in ("identity", "corrected"):
        return "it has no skip connections, which this method requires"
    return None


def closed_form(network: SelfAttentionNetwork, method: str, length: int | None = None) -> SelfAttentionNetwork:
    """Return the surrogate of a method that needs no training; `length` as in `refusal`."""
    if method not in CLOSED_FORMS:
        raise unknown_name("method", method, CLOSED_FORMS)
    reason = refusal(network, method, length)
    if reason is not None:
        raise InputError(reason)
    if network.has_mlp and method != "parallel":
        kept = [] if method == "identity" else [len(network) - 1]
        return without_attention(network, [k for k in range(len(network)) if k not in kept], method)
    if network.causal and method in ("mean-field", "corrected"):
        assert length is not None
        made = _causal_form(network, method, length)
    else:
        made = CLOSED_FORMS[method](network)
    return SelfAttentionNetwork(
        [made],
        scale=network.scale,
        skip=network.skip,
        causal=network.causal,
        activation=network.activation,
        norm=network.norm,
        mlp_skip=network.mlp_skip,
        name=f"{network.name} ({method})",
        provenance={
            "made_by": "collapse",
            "method": method,
            "of": {"name": network.name, "layers": len(network), "eta": network.eta, **network.provenance},
        },
    )


def without_attention(network: SelfAttentionNetwork, layers: Sequence[int], method: str) -> SelfAttentionNetwork:
    """Return the network with the attention of some layers deleted (values zero) and all MLPs kept (Remark D.2)."""
    copy = network.copy()
    with torch.no_grad():
        for index in layers:
            copy[index].value.zero_()
    copy.name = f"{network.name} ({method})"
    copy.provenance = {"made_by": "collapse", "method": method, "of": network.name, "deleted": list(layers)}
    return copy


def fold(network: SelfAttentionNetwork, kept: Sequence[int]) -> SelfAttentionNetwork:
    """Keep some layers, replace the others by X + 1·mean(X)·V_ℓ, and merge every run of replaced layers into one.

    The averaging layers of a run compose exactly to one averaging layer with value N − I over the run.
    """
    layers: list[Layer] = []
    for is_kept, group in groupby(range(len(network)), key=lambda index: index in kept):
        run = list(group)
        layers += [network[k].copy() for k in run] if is_kept else [averaging_layer(drift_matrix(network, run))]
    return SelfAttentionNetwork(
        layers,
        scale=network.scale,
        skip=network.skip,
        name=f"{network.name} (folded to {len(layers)})",
        provenance={"made_by": "effective_depth", "of": network.name, "kept": sorted(kept)},
    )
