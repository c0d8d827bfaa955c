"""The task `fast-attention`: the plan of fast attention in every layer of a network."""

import math
from typing import Any

import torch
from torch import Tensor

from depthgauge.fast_attention.attention import attention_plan
from depthgauge.fast_attention.decide.cost import feature_count
from depthgauge.fast_attention.decide.minimax import HIGHEST_DEGREE, degree_it_would_take, grid_bound, limit_index
from depthgauge.fast_attention.plan import HeadPlan
from depthgauge.network.network import SelfAttentionNetwork, softmax_attention

LARGEST_BOUND = 200.0
"""No degree is reported for score bounds above this."""


def plans_of(network: SelfAttentionNetwork, x: Tensor, tolerance: float, length: int) -> list[HeadPlan]:
    """Return the plan of every head of every layer for an input x [n, d] whose tokens are repeated up to `length`.

    Repeating tokens changes neither the set of scores nor the bounds on them, only the number of tokens for which the
    cost is predicted.
    """
    heads: list[HeadPlan] = []

    def observe(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        q, k, v = (_repeated(t, length) for t in (query, key, value))
        heads.extend(attention_plan(q, k, v, is_causal=is_causal, tolerance=tolerance, scale=scale).heads)
        return softmax_attention(query, key, value, is_causal=is_causal, scale=scale)

    with torch.no_grad():
        network(x, attention=observe)
    return heads


def _repeated(t: Tensor, length: int) -> Tensor:
    times = math.ceil(length / t.shape[-2])
    return t.repeat(*(1 for _ in t.shape[:-2]), times, 1)[..., :length, :]


def degree_needed(bound: float, tolerance: float) -> int | None:
    """Return the least degree that meets the tolerance for scores up to `bound`.

    Above `HIGHEST_DEGREE` the degree is an estimate; above `LARGEST_BOUND` the result is None.
    """
    for degree in range(HIGHEST_DEGREE + 1):
        index = limit_index(degree, tolerance)
        if index is not None and bound <= grid_bound(index):
            return degree
    return degree_it_would_take(bound, tolerance) if bound <= LARGEST_BOUND else None


def summary(heads: list[HeadPlan], dim: int, tolerance: float) -> dict[str, Any]:
    """Summarise the plans of all heads: score bound, degree, number of features, predicted speed-up.

    `bound` is the largest proved score bound B, `degree` and `features` are what it requires (None if B is too large
    for any degree), `polynomial` is the share of heads on the polynomial path, and `speedup` is the predicted cost of
    exact attention over the cost of the chosen paths.
    """
    bound = max(min(head.bound_before, head.bound_after) for head in heads)
    degree = degree_needed(bound, tolerance)
    chosen = sum(head.cost_polynomial if head.path == "polynomial" else head.cost_exact for head in heads)
    return {
        "bound": bound,
        "degree": degree,
        "features": None if degree is None else feature_count(dim, degree),
        "polynomial": sum(head.path == "polynomial" for head in heads) / len(heads),
        "speedup": sum(head.cost_exact for head in heads) / chosen,
    }
