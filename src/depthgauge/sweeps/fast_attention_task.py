"""What fast attention would do in every layer of a network, for the task `fast-attention`."""

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
"""Beyond this no degree is worth naming."""


def plans_of(network: SelfAttentionNetwork, x: Tensor, tolerance: float, length: int) -> list[HeadPlan]:
    """The plan of every head of every layer on an input [n, d], whose tokens are repeated to `length` of them.

    Repeating tokens changes neither the scores nor what is proved of them, only the number of tokens that costs are
    predicted for.
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
    """The least degree that meets the tolerance for scores up to a bound; beyond 4 about it, None beyond reach."""
    for degree in range(HIGHEST_DEGREE + 1):
        index = limit_index(degree, tolerance)
        if index is not None and bound <= grid_bound(index):
            return degree
    return degree_it_would_take(bound, tolerance) if bound <= LARGEST_BOUND else None


def summary(heads: list[HeadPlan], dim: int, tolerance: float) -> dict[str, Any]:
    """The largest proved B, the least degree and features it takes, and the predicted speed-up over exact attention.

    `degree` and `features` are None where the scores are beyond any degree; `polynomial` is the share of heads on the
    fast path.
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
