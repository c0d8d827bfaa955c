"""Deleting attention layer by layer, for networks that do not expand: causal ones and ones with MLPs.

Remark D.2 made explicit (docs/math.md §3.9). A layer is X_{ℓ+1} = f_ℓ(X_ℓ + Σ_h P_h X_ℓ V_h) with a token map f_ℓ.
For two inputs of the layer that differ by at most δ, coordinate by coordinate, and are bounded by s and s',

    |P X − P' X'| ≤ δ + 2 tanh(Δθ/4)·s',     Δθ = 2(‖diag(δ) W diag(s)‖_{∞→1} + ‖diag(s') W diag(δ)‖_{∞→1}),

whatever the rows of P see. Near the average M over what they see, all heads act alike: Σ_h P_h X V_h is M X Σ_h V_h up
to Σ_h 2 tanh(θ_h/4) s|V_h|, which is smaller where scores are small and values cancel. f passes differences on through
|W_in||W_out| and the slope of its activation.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.certificates.box import Norms, PartsByLayer, PerHead, Vector, weighted, weighted_per_head
from depthgauge.errors import InputError
from depthgauge.linalg.enclosures import Enclosure
from depthgauge.linalg.rounding import add_up, mul_up, nonnegative_matmul_up, tanh_up
from depthgauge.network.network import Layer, SelfAttentionNetwork
from depthgauge.surrogates.matching import match_heads

STEEPEST = {"relu": 1.0, "gelu": 1.13}
"""Upper bounds on the slope of the activations; GELU's largest is 1.1289…, at √2."""


@dataclass(frozen=True)
class Deletion:
    """An upper bound on |S − S'| per coordinate, and what every head of S contributes where it was deleted.

    `norms` keeps the scalings that prove the sign norms, under names that begin with the layer.
    """

    value: Vector
    head_parts: PartsByLayer
    norms: Norms


def deletion_bound(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, radius: float) -> Deletion:
    """Bound |S − S'| on the box, where S' is S with the attention of some layers deleted, or all heads side by side."""
    if len(surrogate) == 1 and len(network) > 1 and not (_has_mlp(network) or _has_mlp(surrogate)):
        if network.skip and _all_heads_kept(network, surrogate):
            return _parallel(network, radius)
        kept = _kept_without_mlp(network, surrogate)
    else:
        kept = _kept_with_mlp(network, surrogate)
    state = torch.full((network.dim,), radius, dtype=torch.float64)
    other, apart = state, torch.zeros_like(state)
    parts, norms = [], Norms()
    for k, layer in enumerate(network):
        if k in kept:
            moved = _attention_apart(network, k, state, other, apart, norms)
            parts.append(torch.zeros(layer.heads, network.dim, dtype=torch.float64))
        else:
            moved = _attention_size(network, k, state, norms)
            parts.append(weighted_per_head(state.expand(layer.heads, -1), _value(layer)))
        carried = apart if network.skip else torch.zeros_like(apart)
        apart = _token_map_apart(network, layer, add_up(carried, moved))
        state = _grow(network, layer, state)
        if k in kept:
            other = _grow(network, layer, other)
        elif layer.mlp is not None:
            other = _token_map(network, layer, other if network.skip else torch.zeros_like(other))
        apart = torch.minimum(apart, add_up(state, other))
    return Deletion(apart, tuple(parts), norms)


def _parallel(network: SelfAttentionNetwork, radius: float) -> Deletion:
    """S' = X + Σ attention_ℓh(X): every layer reads X instead of X_ℓ, which is off by what the layers before add."""
    start = torch.full((network.dim,), radius, dtype=torch.float64)
    state, apart, value, parts = start, torch.zeros_like(start), torch.zeros_like(start), []
    norms = Norms()
    for k, layer in enumerate(network):
        moved = _attention_apart(network, k, state, start, apart, norms)
        value = add_up(value, moved)
        parts.append(moved.expand(layer.heads, -1) / layer.heads)
        apart, state = add_up(apart, _attention_size(network, k, state, norms)), _grow(network, layer, state)
    return Deletion(value, tuple(parts), norms)


def _attention_size(network: SelfAttentionNetwork, k: int, state: Vector, norms: Norms) -> Vector:
    """|Σ_h P_h X V_h| ≤ min(Σ_h s|V_h|, s|Σ_h V_h| + Σ_h 2 tanh(θ_h/4) s|V_h|), θ_h = 2‖diag(s) W_h diag(s)‖."""
    V, uneven = _value(network[k]), _uneven(network, k, state, norms)
    together = add_up(_row(state, V.sum(0).abs_up()), weighted(mul_up(uneven[:, None], state), V))
    return torch.fmin(weighted(state.expand(network[k].heads, -1), V), together)


def _attention_apart(
    network: SelfAttentionNetwork, k: int, state: Vector, other: Vector, apart: Vector, norms: Norms
) -> Vector:
    """|Σ_h (P_h X − P'_h X') V_h|, by P(X − X') + (P − P')X', the first about the average M as in `_attention_size`."""
    V, W = _value(network[k]), _scores(network, network[k])
    d_theta = 2.0 * add_up(norms(f"{k}.query", apart, W, state), norms(f"{k}.key", other, W, apart))
    turned = mul_up(2.0 * tanh_up(d_theta / 4.0)[:, None], other)
    alone = weighted(torch.fmin(add_up(apart, turned), add_up(state, other)), V)
    uneven = mul_up(_uneven(network, k, state, norms)[:, None], apart)
    together = add_up(_row(apart, V.sum(0).abs_up()), weighted(add_up(turned, uneven), V))
    return torch.fmin(alone, together)


def _uneven(network: SelfAttentionNetwork, k: int, state: Vector, norms: Norms) -> PerHead:
    """2 tanh(θ_h/4): twice the total variation of a row of attention to the average over what it sees."""
    return 2.0 * tanh_up(2.0 * norms(f"{k}.theta", state, _scores(network, network[k]), state) / 4.0)


def _scores(network: SelfAttentionNetwork, layer: Layer) -> Enclosure:
    return (Enclosure.exact(layer.query.detach()) @ layer.key.detach().mT) * network.scale


def _value(layer: Layer) -> Enclosure:
    return Enclosure.exact(layer.value.detach())


def _grow(network: SelfAttentionNetwork, layer: Layer, state: Vector) -> Vector:
    """The bound of X_{ℓ+1} from that of X_ℓ."""
    mixed = weighted(state.expand(layer.heads, -1), _value(layer))
    return _token_map(network, layer, add_up(state, mixed) if network.skip else mixed)


def _token_map(network: SelfAttentionNetwork, layer: Layer, t: Vector) -> Vector:
    """|f(y)| ≤ (t|W_in| + |b_in|)|W_out| + |b_out| for |y| ≤ t, since |act(z)| ≤ |z|; plus t with a skip around it."""
    if layer.mlp is None:
        return t
    mlp = layer.mlp
    hidden = add_up(_row(t, mlp.w_in), mlp.b_in.detach().abs())
    out = add_up(_row(hidden, mlp.w_out), mlp.b_out.detach().abs())
    return add_up(out, t) if network.mlp_skip else out


def _token_map_apart(network: SelfAttentionNetwork, layer: Layer, apart: Vector) -> Vector:
    """|f(y) − f(y')| ≤ slope · |y − y'| |W_in| |W_out|; plus |y − y'| with a skip around it."""
    if layer.mlp is None:
        return apart
    hidden = mul_up(STEEPEST[network.activation], _row(apart, layer.mlp.w_in))
    out = _row(hidden, layer.mlp.w_out)
    return add_up(out, apart) if network.mlp_skip else out


def _row(t: Float[Tensor, " m"], weight: Float[Tensor, "m n"]) -> Float[Tensor, " n"]:
    return nonnegative_matmul_up(t[None], weight.detach().abs())[0]


def _has_mlp(network: SelfAttentionNetwork) -> bool:
    return any(layer.mlp is not None for layer in network)


def _all_heads_kept(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> bool:
    """Whether the surrogate's one layer holds every head of the network and nothing else."""
    heads = sum(layer.heads for layer in network)
    matched = sum(len(match.heads) for match in match_heads(network, surrogate))
    return surrogate[0].heads == heads == matched


def _kept_without_mlp(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> set[int]:
    """Which layer the one-layer surrogate is: none if its values are zero, else the network's last."""
    if not bool(surrogate[0].value.detach().any()) and network.skip:
        return set()
    last = len(network) - 1
    if network.skip and _same_attention(network[last], surrogate[0]) and network.scale == surrogate.scale:
        return {last}
    raise InputError(_UNRELATED)


def _kept_with_mlp(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> set[int]:
    """The layers whose attention stands unchanged in the surrogate; the others must have none, MLPs must be equal."""
    if len(network) != len(surrogate):
        raise InputError(_UNRELATED)
    kept = set()
    switches = ("scale", "skip", "causal", *(("activation", "mlp_skip") if _has_mlp(network) else ()))
    if any(getattr(network, name) != getattr(surrogate, name) for name in switches):
        raise InputError(_UNRELATED)
    for k, (mine, theirs) in enumerate(zip(network, surrogate, strict=True)):
        if not _same_mlp(mine, theirs):
            raise InputError(_UNRELATED)
        if _same_attention(mine, theirs):
            kept.add(k)
        elif bool(theirs.value.detach().any()):
            raise InputError(_UNRELATED)
    return kept


_UNRELATED = (
    "a causal network or one with MLPs is certified only against itself with the attention of some layers deleted, "
    "or with all heads side by side; make the surrogate with collapse(network, 'identity' | 'last-layer' | 'parallel')"
)


def _same_attention(mine: Layer, theirs: Layer) -> bool:
    pairs = ((mine.query, theirs.query), (mine.key, theirs.key), (mine.value, theirs.value))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _same_mlp(mine: Layer, theirs: Layer) -> bool:
    if mine.mlp is None or theirs.mlp is None:
        return mine.mlp is theirs.mlp
    pairs = zip(mine.mlp.parameters(), theirs.mlp.parameters(), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
