"""Upper bounds for networks without the exact expansion, causal or with MLPs, by deleting attention layer by layer.

This makes Remark D.2 of paper A explicit (docs/math.md §3.9). A layer is X_{ℓ+1} = f_ℓ(X_ℓ + Σ_h P_h X_ℓ V_h) and f_ℓ
maps single tokens. Let two inputs X, X' of the layer satisfy |X − X'| ≤ δ, |X| ≤ s and |X'| ≤ s' per coordinate. Then

    |P X − P' X'| ≤ δ + 2 tanh(Δθ/4)·s',     Δθ = 2(‖diag(δ) W diag(s)‖_{∞→1} + ‖diag(s') W diag(δ)‖_{∞→1}),

for every set of visible tokens. With M the average over the visible tokens, Σ_h P_h X V_h differs from M X Σ_h V_h by
at most Σ_h 2 tanh(θ_h/4) s|V_h|, which is smaller where scores are small and values cancel. An MLP with activation of
slope at most λ maps δ to at most λ·δ|W_in||W_out|.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.theory.certificates.box import (
    Norms,
    PartsByLayer,
    PerHead,
    Vector,
    first_lost,
    weighted,
    weighted_per_head,
)
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.rounding import add_up, mul_up, nonnegative_matmul_up, tanh_up
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.expansion import match_heads

STEEPEST = {"relu": 1.0, "gelu": 1.13}
"""Upper bounds λ on the slope of the activations; the largest slope of GELU is 1.1289…, at √2."""


@dataclass(frozen=True, eq=False, repr=False)
class Deletion:
    """An upper bound on |S − S'| per output coordinate, by deleting attention layer by layer.

    `head_parts` has, for each layer, the bound on the contribution of each of its heads alone.
    """

    value: Vector
    head_parts: PartsByLayer
    norms: Norms
    methods = ("deletion",)
    notes: tuple[str, ...] = ()

    @property
    def lost_at(self) -> int:
        """The first layer whose parts are not finite, or the last layer."""
        return first_lost(self.head_parts)


def deletion_bound(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, radius: float) -> Deletion:
    """Bound |S − S'| on the box |X| ≤ φ (`radius`).

    S' must be S with the attention of some layers deleted (values zero), or one layer with all heads of S in parallel.
    """
    kept = _kept_layers(network, surrogate)
    if kept is None:
        return _parallel(network, radius)
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
        # Without skips and MLP the output of a deleted layer is 0; the previous bound of S' is kept, which is larger.
        if k in kept:
            other = _grow(network, layer, other)
        elif layer.mlp is not None:
            other = _token_map(network, layer, other if network.skip else torch.zeros_like(other))
        apart = torch.minimum(apart, add_up(state, other))
    return Deletion(apart, tuple(parts), norms)


def deletion_applies(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> bool:
    """Whether the surrogate is of a kind that `deletion_bound` covers."""
    try:
        _kept_layers(network, surrogate)
    except InputError:
        return False
    return True


def _kept_layers(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> set[int] | None:
    """Return the layers whose attention the surrogate keeps, or None if it has all heads in parallel."""
    if network.has_attention_bias or surrogate.has_attention_bias:
        raise InputError("this certificate does not cover networks with biases in the attention")
    if len(surrogate) == 1 and len(network) > 1 and not (network.has_mlp or surrogate.has_mlp):
        if network.skip and _all_heads_kept(network, surrogate):
            return None
        return _kept_without_mlp(network, surrogate)
    return _kept_with_mlp(network, surrogate)


def _parallel(network: SelfAttentionNetwork, radius: float) -> Deletion:
    """Bound |S − S'| for S' = X + Σ attention_ℓh(X).

    Layer ℓ reads X instead of X_ℓ, and |X_ℓ − X| ≤ Σ_{k<ℓ} |attention_k(X_k)|.
    """
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
    """Bound |Σ_h P_h X V_h| ≤ min(Σ_h s|V_h|, s|Σ_h V_h| + Σ_h 2 tanh(θ_h/4) s|V_h|)."""
    V, uneven = _value(network[k]), _uneven(network, k, state, norms)
    together = add_up(_row(state, V.sum(0).abs_up()), weighted(mul_up(uneven[:, None], state), V))
    return torch.fmin(weighted(state.expand(network[k].heads, -1), V), together)


def _attention_apart(
    network: SelfAttentionNetwork, k: int, state: Vector, other: Vector, apart: Vector, norms: Norms
) -> Vector:
    """Bound |Σ_h (P_h X − P'_h X') V_h|, using P X − P'X' = P(X − X') + (P − P')X'.

    The term P(X − X') is bounded head by head by δ, or for all heads together about M as in `_attention_size`.
    """
    V, W = _value(network[k]), _scores(network, network[k])
    d_theta = 2.0 * add_up(norms(f"{k}.query", apart, W, state), norms(f"{k}.key", other, W, apart))
    turned = mul_up(2.0 * tanh_up(d_theta / 4.0)[:, None], other)
    alone = weighted(torch.fmin(add_up(apart, turned), add_up(state, other)), V)
    uneven = mul_up(_uneven(network, k, state, norms)[:, None], apart)
    together = add_up(_row(apart, V.sum(0).abs_up()), weighted(add_up(turned, uneven), V))
    return torch.fmin(alone, together)


def _uneven(network: SelfAttentionNetwork, k: int, state: Vector, norms: Norms) -> PerHead:
    """Bound 2·TV(row of P_h, row of M) ≤ 2 tanh(θ_h/4) with θ_h = 2‖diag(s) W_h diag(s)‖."""
    return 2.0 * tanh_up(2.0 * norms(f"{k}.theta", state, _scores(network, network[k]), state) / 4.0)


def _scores(network: SelfAttentionNetwork, layer: Layer) -> Enclosure:
    return (Enclosure.exact(layer.query.detach()) @ layer.key.detach().mT) * network.scale


def _value(layer: Layer) -> Enclosure:
    return Enclosure.exact(layer.value.detach())


def _grow(network: SelfAttentionNetwork, layer: Layer, state: Vector) -> Vector:
    """Bound |X_{ℓ+1}| from |X_ℓ| ≤ s."""
    mixed = weighted(state.expand(layer.heads, -1), _value(layer))
    return _token_map(network, layer, add_up(state, mixed) if network.skip else mixed)


def _token_map(network: SelfAttentionNetwork, layer: Layer, t: Vector) -> Vector:
    """Bound |f(y)| ≤ (t|W_in| + |b_in|)|W_out| + |b_out| for |y| ≤ t, as |act(z)| ≤ |z|; plus t with an MLP skip."""
    if layer.mlp is None:
        return t
    mlp = layer.mlp
    hidden = add_up(_row(t, mlp.w_in), mlp.b_in.detach().abs())
    out = add_up(_row(hidden, mlp.w_out), mlp.b_out.detach().abs())
    return add_up(out, t) if network.mlp_skip else out


def _token_map_apart(network: SelfAttentionNetwork, layer: Layer, apart: Vector) -> Vector:
    """Bound |f(y) − f(y')| ≤ λ|y − y'||W_in||W_out|; plus |y − y'| with an MLP skip."""
    if layer.mlp is None:
        return apart
    hidden = mul_up(STEEPEST[network.activation], _row(apart, layer.mlp.w_in))
    out = _row(hidden, layer.mlp.w_out)
    return add_up(out, apart) if network.mlp_skip else out


def _row(t: Float[Tensor, " m"], weight: Float[Tensor, "m n"]) -> Float[Tensor, " n"]:
    return nonnegative_matmul_up(t[None], weight.detach().abs())[0]


def _all_heads_kept(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> bool:
    """Whether the one layer of the surrogate contains every head of the network once and no other head."""
    heads = sum(layer.heads for layer in network)
    matched = sum(len(match.heads) for match in match_heads(network, surrogate))
    return surrogate[0].heads == heads == matched


def _kept_without_mlp(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> set[int]:
    """Return the layers that a one-layer surrogate keeps: none if its values are zero, else the last layer of S."""
    if not bool(surrogate[0].value.detach().any()) and network.skip:
        return set()
    last = len(network) - 1
    if network.skip and _same_attention(network[last], surrogate[0]) and network.scale == surrogate.scale:
        return {last}
    raise InputError(_UNRELATED)


def _kept_with_mlp(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> set[int]:
    """Return the layers whose attention is unchanged; the others must have zero values, and all MLPs must be equal."""
    if len(network) != len(surrogate):
        raise InputError(_UNRELATED)
    switches = ("scale", "skip", "causal", *(("activation", "mlp_skip") if network.has_mlp else ()))
    if any(getattr(network, name) != getattr(surrogate, name) for name in switches):
        raise InputError(_UNRELATED)
    kept = set()
    for k, (mine, theirs) in enumerate(zip(network, surrogate, strict=True)):
        if not _same_mlp(mine, theirs):
            raise InputError(_UNRELATED)
        if _same_attention(mine, theirs):
            kept.add(k)
        elif bool(theirs.value.detach().any()):
            raise InputError(_UNRELATED)
    return kept


_UNRELATED = (
    "a network that is causal or has MLPs is certified only against itself with the attention of some layers deleted, "
    "or with all heads in parallel; make the surrogate with collapse(network, 'identity' | 'last-layer' | 'parallel'); "
    "with MLPs, 'parallel' is certified over tokens alone"
)


def _same_attention(mine: Layer, theirs: Layer) -> bool:
    return all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in ("query", "key", "value"))


def _same_mlp(mine: Layer, theirs: Layer) -> bool:
    if mine.mlp is None or theirs.mlp is None:
        return mine.mlp is theirs.mlp
    return all(torch.equal(a, b) for a, b in zip(mine.mlp.parameters(), theirs.mlp.parameters(), strict=True))
