"""The exact expansion of a network about uniform attention (docs/math.md §3.1), with enclosures of its matrices.

With P_h = U + (P_h − U), U the average over tokens, V_ℓ = Σ_h V_ℓh, A_ℓ = I + V_ℓ (A_ℓ = V_ℓ without skips),
N_{k:ℓ} = A_k ⋯ A_{ℓ−1} and E_ℓ = Σ_h (P_ℓh − U) X_ℓ V_ℓh, a network with skips satisfies exactly

    X_ℓ = X + 1·mean(X)·(N_{0:ℓ} − I) + Σ_{k<ℓ} [ E_k + 1·mean(E_k)·(N_{k+1:ℓ} − I) ].

Heads that occur bitwise equal in a network and in its surrogate have equal leading terms, which cancel exactly.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from depthgauge.base.errors import InputError
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork


class Expansion:
    """The matrices of the expansion, for a network that is not causal and has neither MLP nor LayerNorm.

    `W[ℓ]` is β Q_h K_hᵀ and `V[ℓ]` the values V_h, both of shape [H, d, d], in the arithmetic `A`. With `one_token`,
    the network may be causal: its attention is the identity.
    """

    is_causal = False

    def __init__(self, network: SelfAttentionNetwork, A: BoundArithmetic, *, one_token: bool = False) -> None:
        if network.norm != "none" or network.has_mlp or (network.causal != self.is_causal and not one_token):
            kind = "causal" if self.is_causal else "not causal"
            raise InputError(f"the expansion applies to networks that are {kind} and have neither MLP nor LayerNorm")
        if any(one is not None for layer in network for one in (layer.query_bias, layer.output_bias)):
            raise InputError("the expansion does not cover biases of queries and outputs")
        if network.length is not None and not (self.is_causal or one_token):
            raise InputError("the expansion covers position biases in causal networks alone")
        self.A, self.skip, self.depth, self.dim = A, network.skip, len(network), network.dim
        self.W: list[Enclosed] = []
        self.V: list[Enclosed] = []
        for layer in network:
            weights = (layer.query, layer.key, layer.value)
            query, key, value = (weight.detach().to("cpu", torch.float64, copy=True) for weight in weights)
            self.W.append((A.exact(query) @ key.mT) * network.scale)
            self.V.append(A.exact(value))
        self._drift: dict[tuple[int, int], Enclosed] = {}
        self._carried_out: dict[int, Enclosed] = {}

    @cached_property
    def V_sum(self) -> list[Enclosed]:
        """V_ℓ = Σ_h V_ℓh."""
        return [value.sum(0) for value in self.V]

    def drift(self, k: int, end: int) -> Enclosed:
        """Return Z_{k:ℓ} = N_{k:ℓ} − I, or N_{k:ℓ} without skips; `end` is ℓ.

        The recursion Z_{k:ℓ+1} = Z_{k:ℓ} + V_ℓ + Z_{k:ℓ} V_ℓ avoids the cancellation of subtracting the identity.
        """
        if (k, end) not in self._drift and end == k:
            eye = torch.eye(self.dim, dtype=torch.float64)
            self._drift[k, end] = self.A.exact(torch.zeros_like(eye) if self.skip else eye)
        elif (k, end) not in self._drift:
            before, V = self.drift(k, end - 1), self.V_sum[end - 1]
            self._drift[k, end] = before + V + before @ V if self.skip else before @ V
        return self._drift[k, end]

    def carried(self, k: int, end: int) -> Enclosed:
        """Return V_kh · Z_{k+1:ℓ} for all heads of layer k, the effect of mean((P_kh − U) X_k) on state ℓ."""
        if self.skip and end == k + 1:
            return self.A.exact(torch.zeros(self.V[k].shape, dtype=torch.float64))
        if end != self.depth:
            return self.V[k] @ self.drift(k + 1, end)
        # Only the products for the output are used repeatedly, so only these are cached.
        if k not in self._carried_out:
            self._carried_out[k] = self.V[k] @ self.drift(k + 1, end)
        return self._carried_out[k]


class CausalExpansion(Expansion):
    """The matrices of the expansion of a causal network (docs/math.md §3.12).

    With C the average over the visible tokens, e_m(k:ℓ) = Σ_{k≤ℓ₁<…<ℓ_m<ℓ} V_ℓ₁ ⋯ V_ℓm and
    E_k = Σ_h (P_kh − C) X_k V_kh,

        X_ℓ = Σ_m C^m X e_m(0:ℓ) + Σ_{k<ℓ} Σ_m C^m E_k e_m(k+1:ℓ).
    """

    is_causal = True

    def orders(self, k: int, end: int) -> list[Enclosed]:
        """Return e_1(k:ℓ), …, e_{ℓ−k}(k:ℓ); `end` is ℓ."""
        zero = self.A.exact(torch.zeros(self.dim, self.dim, dtype=torch.float64))
        found = [self.A.eye(self.dim), *(zero for _ in range(end - k))]
        for index, V in enumerate(self.V_sum[k:end], start=1):
            for m in range(index, 0, -1):
                found[m] = found[m] + found[m - 1] @ V
        return found[1:]


@dataclass(frozen=True)
class LayerMatch:
    """Heads `heads` of layer `k` of the network equal heads `others` of layer `other` of the surrogate, in order."""

    k: int
    other: int
    heads: tuple[int, ...]
    others: tuple[int, ...]


def match_heads(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> list[LayerMatch]:
    """Return the heads common to both networks, each used once and with layers in order.

    There are none if the networks scale their scores differently.
    """
    if network.scale != surrogate.scale:
        return []
    available: dict[tuple[bytes, ...], list[tuple[int, int]]] = {}
    for other, layer in enumerate(surrogate):
        for h in range(layer.heads):
            available.setdefault(_signature(layer, h), []).append((other, h))
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    earliest = 0
    for k, layer in enumerate(network):
        used = earliest
        for h in range(layer.heads):
            places = [place for place in available.get(_signature(layer, h), []) if place[0] >= earliest]
            if places:
                place = places[0]
                available[_signature(layer, h)].remove(place)
                found.setdefault((k, place[0]), []).append((h, place[1]))
                used = max(used, place[0])
        # Several layers may match the same layer of the surrogate (parallel heads), but never an earlier one.
        earliest = used
    return [
        LayerMatch(k, other, tuple(h for h, _ in pairs), tuple(o for _, o in pairs))
        for (k, other), pairs in sorted(found.items())
    ]


def _signature(layer: Layer, head: int) -> tuple[bytes, ...]:
    """Return the weights of a head, without columns of Q and K that do not contribute to Q Kᵀ (such as padding)."""
    query, key = layer.query.detach()[head], layer.key.detach()[head]
    used = (query != 0).any(dim=0) & (key != 0).any(dim=0)
    weights = query[:, used], key[:, used], layer.value.detach()[head]
    return tuple(w.to(torch.float64).cpu().contiguous().numpy().tobytes() for w in weights)
