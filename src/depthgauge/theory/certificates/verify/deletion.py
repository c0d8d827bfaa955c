"""The deletion bound in arb interval arithmetic (docs/math.md §3.9), for causal networks and networks with MLPs."""

import torch
from flint import arb, arb_mat
from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.arb_values import to_arb
from depthgauge.theory.certificates.verify.arb_vectors import (
    Vector,
    absolute,
    add,
    exact,
    sign_norms,
    smaller_of,
    through,
    times,
)
from depthgauge.theory.certificates.verify.expansion import same_head, scores, zeros
from depthgauge.theory.linalg.enclosures import SignBound
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork

STEEPEST = {"relu": "1", "gelu": "1.1290"}
"""Upper bounds on |slope|. The slope of GELU is Φ(z) + zφ(z); its derivative (2 − z²)φ(z) vanishes at ±√2."""


class ArbDeletion:
    """The bound on |S − S'| where S' is S with the attention of some layers deleted, or with all heads in parallel."""

    def __init__(
        self, network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, record: dict[str, SignBound], radius: arb
    ) -> None:
        if network.has_attention_bias or surrogate.has_attention_bias:
            raise VerificationError("the bound does not cover biases in the attention")
        self.network, self.surrogate, self.record, self.radius = network, surrogate, record, radius
        self.W = [scores(network, layer) for layer in network]
        self.V = [[to_arb(value) for value in layer.value] for layer in network]
        self.V_size = [[absolute(value) for value in values] for values in self.V]
        self.V_sum_size = [absolute(sum(values[1:], values[0])) for values in self.V]

    def bound(self) -> Vector:
        """Bound |S − S'| per coordinate."""
        if side_by_side(self.network, self.surrogate):
            return self._side_by_side()
        return self._deleted(kept_layers(self.network, self.surrogate))

    def _deleted(self, kept: set[int]) -> Vector:
        """Propagate δ ≥ |X_ℓ − X'_ℓ|: kept attention adds its difference, deleted attention its size; then f_ℓ."""
        network, start = self.network, [self.radius] * self.network.dim
        state, other, apart = start, start, zeros(network.dim)
        for k, layer in enumerate(network):
            moved = self.apart(k, state, other, apart) if k in kept else self.size(k, state)
            between = add(apart, moved) if network.skip else moved
            apart = through_map(network, layer, between)
            other_mixed = self._mixed(k, other) if k in kept else zeros(network.dim)
            other = map_size(network, layer, add(other, other_mixed) if network.skip else other_mixed)
            mixed = self._mixed(k, state)
            state = map_size(network, layer, add(state, mixed) if network.skip else mixed)
            apart = smaller_of(apart, add(state, other))
        return apart

    def _side_by_side(self) -> Vector:
        """Bound |S − S'| for S' = X + Σ attention_ℓh(X): layer ℓ reads X, and |X_ℓ − X| ≤ Σ_{k<ℓ} |attention_k|."""
        start, total = [self.radius] * self.network.dim, zeros(self.network.dim)
        state, apart = start, zeros(self.network.dim)
        for k in range(len(self.network)):
            total = add(total, self.apart(k, state, start, apart))
            apart, state = add(apart, self.size(k, state)), add(state, self._mixed(k, state))
        return total

    def _mixed(self, k: int, state: Vector) -> Vector:
        """Bound Σ_h s|V_h|."""
        return add(*(through(state, size) for size in self.V_size[k]))

    def size(self, k: int, state: Vector) -> Vector:
        """Bound |Σ_h P_h X V_h| ≤ min(Σ_h s|V_h|, s|ΣV| + Σ_h 2 tanh(θ_h/4)s|V_h|)."""
        uneven = self._uneven(k, state)
        pairs = zip(uneven, self.V_size[k], strict=True)
        together = add(through(state, self.V_sum_size[k]), *(through(times(t, state), size) for t, size in pairs))
        return smaller_of(self._mixed(k, state), together)

    def apart(self, k: int, state: Vector, other: Vector, apart: Vector) -> Vector:
        """Bound |Σ_h (P_h X − P'_h X')V_h| for |X − X'| ≤ δ: head by head, or with P near the average M."""
        by_query = sign_norms(self.record, f"{k}.query", apart, self.W[k], state)
        by_key = sign_norms(self.record, f"{k}.key", other, self.W[k], apart)
        turned = [times(_twice_tanh(2 * (q + w)), other) for q, w in zip(by_query, by_key, strict=True)]
        uneven = [times(t, apart) for t in self._uneven(k, state)]
        both = add(state, other)
        alone = [through(smaller_of(add(apart, t), both), size) for t, size in zip(turned, self.V_size[k], strict=True)]
        each = [through(add(t, u), size) for t, u, size in zip(turned, uneven, self.V_size[k], strict=True)]
        return smaller_of(add(*alone), add(through(apart, self.V_sum_size[k]), *each))

    def _uneven(self, k: int, state: Vector) -> list[arb]:
        """Bound 2 tanh(θ_h/4) with θ_h = 2‖diag(s) W_h diag(s)‖."""
        return [_twice_tanh(2 * norm) for norm in sign_norms(self.record, f"{k}.theta", state, self.W[k], state)]


def _twice_tanh(theta: arb) -> arb:
    return (2 * (theta.upper() / 4).tanh()).upper()


def _size(weight: Tensor) -> arb_mat:
    return absolute(to_arb(weight))


def map_size(network: SelfAttentionNetwork, layer: Layer, t: Vector) -> Vector:
    """Bound |f(y)| ≤ (t|W_in| + |b_in|)|W_out| + |b_out| for |y| ≤ t; plus t with an MLP skip."""
    if layer.mlp is None:
        return t
    hidden = add(through(t, _size(layer.mlp.w_in)), exact(layer.mlp.b_in.abs().tolist()))
    out = add(through(hidden, _size(layer.mlp.w_out)), exact(layer.mlp.b_out.abs().tolist()))
    return add(out, t) if network.mlp_skip else out


def through_map(network: SelfAttentionNetwork, layer: Layer, apart: Vector) -> Vector:
    """Bound |f(y) − f(y')| ≤ λ·δ|W_in||W_out|; plus δ with an MLP skip."""
    if layer.mlp is None:
        return apart
    hidden = times(arb(STEEPEST[network.activation]).upper(), through(apart, _size(layer.mlp.w_in)))
    out = through(hidden, _size(layer.mlp.w_out))
    return add(out, apart) if network.mlp_skip else out


def side_by_side(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> bool:
    """Whether S' is one layer with every head of S once and no other head, both with skips and without MLPs."""
    if len(network) == 1 or len(surrogate) > 1 or not (network.skip and surrogate.skip):
        return False
    if network.causal != surrogate.causal or network.scale != surrogate.scale or _has_mlp(network, surrogate):
        return False
    left = list(range(surrogate[0].heads))
    for layer in network:
        for h in range(layer.heads):
            partner = next((g for g in left if same_head(layer, h, surrogate[0], g)), None)
            if partner is None:
                return False
            left.remove(partner)
    return not left


def kept_layers(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> set[int]:
    """Return the layers of S whose attention is unchanged in S'; raise unless all other values are zero.

    A one-layer surrogate of a deeper network without MLPs is compared with its last layer.
    """
    switches = ("skip", "causal", "norm", *(("activation", "mlp_skip") if _has_mlp(network, surrogate) else ()))
    if any(getattr(network, name) != getattr(surrogate, name) for name in switches) or network.norm != "none":
        raise VerificationError("the networks differ in more than deleted attention layers")
    first = 0
    if len(surrogate) == 1 and len(network) > 1 and network.skip and not _has_mlp(network, surrogate):
        first = len(network) - 1
    elif len(network) != len(surrogate):
        raise VerificationError(
            f"the surrogate has {len(surrogate)} layers and the network {len(network)}; they must be equal"
        )
    kept = set()
    for k in range(first, len(network)):
        mine, theirs = network[k], surrogate[k - first]
        if not _same_mlp(mine, theirs):
            raise VerificationError(f"layer {k}: the MLPs differ")
        if bool(theirs.value.any()):
            if not (_same_attention(mine, theirs) and network.scale == surrogate.scale):
                raise VerificationError(f"layer {k}: the surrogate's attention is neither the network's nor deleted")
            kept.add(k)
    return kept


def _has_mlp(*networks: SelfAttentionNetwork) -> bool:
    return any(layer.mlp is not None for network in networks for layer in network)


def _same_attention(mine: Layer, theirs: Layer) -> bool:
    return mine.heads == theirs.heads and all(same_head(mine, h, theirs, h) for h in range(mine.heads))


def _same_mlp(mine: Layer, theirs: Layer) -> bool:
    if mine.mlp is None or theirs.mlp is None:
        return mine.mlp is theirs.mlp
    return all(torch.equal(a, b) for a, b in zip(mine.mlp.parameters(), theirs.mlp.parameters(), strict=True))
