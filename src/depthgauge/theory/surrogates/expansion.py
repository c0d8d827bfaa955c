"""The exact expansion of a network about uniform attention (docs/math.md §3.1), with enclosures of its matrices.

With P_h = U + (P_h − U), U the average over tokens, V_ℓ = Σ_h V_ℓh, A_ℓ = I + V_ℓ (A_ℓ = V_ℓ without skips),
N_{k:ℓ} = A_k ⋯ A_{ℓ−1} and E_ℓ = Σ_h (P_ℓh − U) X_ℓ V_ℓh, a network with skips satisfies exactly

    X_ℓ = X + 1·mean(X)·(N_{0:ℓ} − I) + Σ_{k<ℓ} [ E_k + 1·mean(E_k)·(N_{k+1:ℓ} − I) ].

Heads that occur bitwise equal in a network and in its surrogate have equal leading terms, which cancel exactly.
"""

import itertools
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
        self.first = [0, *itertools.accumulate(len(layer.value) for layer in network)]
        """The number of heads before each layer, and of all heads."""
        self._drifts: list[Enclosed] = []
        self._carried: dict[int, Enclosed] = {}

    @cached_property
    def V_sum(self) -> list[Enclosed]:
        """V_ℓ = Σ_h V_ℓh."""
        return [value.sum(0) for value in self.V]

    @cached_property
    def every_V(self) -> Enclosed:
        """V of the heads of all layers."""
        every: Enclosed = self.A.cat(self.V)
        return every

    def heads_of(self, k: int) -> slice:
        """Return where the heads of layer k are among those of all layers."""
        return slice(self.first[k], self.first[k + 1])

    def drift(self, k: int, end: int) -> Enclosed:
        """Return Z_{k:ℓ} = N_{k:ℓ} − I, or N_{k:ℓ} without skips; `end` is ℓ."""
        return self.drifts(end)[k]

    def drifts(self, end: int) -> Enclosed:
        """Return Z_{k:ℓ} for all k ≤ ℓ.

        The recursion Z_{k:ℓ+1} = Z_{k:ℓ} + V_ℓ + Z_{k:ℓ} V_ℓ avoids the cancellation of subtracting the identity.
        """
        none = (
            self.A.eye(self.dim)[None] if not self.skip else self.A.exact(torch.zeros(1, self.dim, self.dim).double())
        )
        self._drifts = self._drifts or [none]
        for V in self.V_sum[len(self._drifts) - 1 : end]:
            before = self._drifts[-1]
            self._drifts.append(self.A.cat([before + V + before @ V if self.skip else before @ V, none]))
        return self._drifts[end]

    def carried(self, k: int, end: int) -> Enclosed:
        """Return V_kh · Z_{k+1:ℓ} for all heads of layer k, the effect of mean((P_kh − U) X_k) on state ℓ."""
        return self.every_carried(end)[self.heads_of(k)]

    def every_carried(self, end: int) -> Enclosed:
        """Return `carried` for the heads of all layers before ℓ; only those of the output and of one ℓ are kept."""
        if end not in self._carried:
            self._carried = {kept: found for kept, found in self._carried.items() if kept == self.depth}
            last, V = self.first[end - 1], self.every_V[: self.first[end]]
            after = [k + 1 for k in range(end) for _ in range(self.first[k], self.first[k + 1])]
            if self.skip:  # Z_{ℓ:ℓ} = 0
                zero = self.A.exact(torch.zeros(V.shape, dtype=torch.float64)[last:])
                V = self.A.cat([V[:last] @ self.drifts(end)[after[:last]], zero])
            self._carried[end] = V if self.skip else V @ self.drifts(end)[after]
        return self._carried[end]


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
