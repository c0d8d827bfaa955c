"""Heads that occur bitwise equal in a network and in its surrogate; their leading terms cancel exactly."""

from dataclasses import dataclass

import torch

from depthgauge.theory.network.network import Layer, SelfAttentionNetwork


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
