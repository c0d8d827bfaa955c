"""Norms of the weights of a layer, per head, as used in the theorems."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge._records import ArrayRecord
from depthgauge.linalg.norms import column_norm, composite_norm, entry_sum_norm, max_norm
from depthgauge.network.layer import Layer


@dataclass(frozen=True, eq=False, repr=False)
class WeightSizes(ArrayRecord):
    """Norms of the weights of one layer, per head.

    Attributes:
        eta: η, the largest absolute entry of Q, K and V (paper A).
        value_col: ‖V‖col, the largest factor by which the values can grow.
        l1: max(‖Q‖₁, ‖K‖₁, ‖V‖₁), sums of all absolute entries (β in equation 1 of paper A).
        dong_beta: ‖QKᵀ‖col · ‖V‖₁,∞, the product in the rate of Dong et al. (2021).
    """

    eta: Float[Tensor, " heads"]
    value_col: Float[Tensor, " heads"]
    l1: Float[Tensor, " heads"]
    dong_beta: Float[Tensor, " heads"]


def weight_sizes(layer: Layer) -> WeightSizes:
    """Compute the sizes of the weights of one layer."""
    weights = [w.detach() for w in (layer.query, layer.key, layer.value)]
    query, key, value = weights
    return WeightSizes(
        eta=torch.stack([max_norm(w) for w in weights]).amax(dim=0),
        value_col=column_norm(value),
        l1=torch.stack([entry_sum_norm(w) for w in weights]).amax(dim=0),
        dong_beta=column_norm(query @ key.mT) * composite_norm(value),
    )
