"""The sizes of a layer's weights, head by head: what the theorems ask for."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.linalg.norms import column_norm, composite_norm, entry_sum_norm, max_norm
from depthgauge.network.network import Layer


@dataclass(frozen=True)
class WeightSizes:
    """Per head.

    - `eta`: η, the largest |entry| of Q, K and V (paper A's measure)
    - `value_col`: ‖V‖col, by which values can grow
    - `l1`: the largest of ‖Q‖₁, ‖K‖₁, ‖V‖₁, sums of all |entries| (the β of equation 1)
    - `dong_beta`: ‖QKᵀ‖col · ‖V‖₁,∞, the product that Dong et al.'s rate is made of
    """

    eta: Float[Tensor, " heads"]
    value_col: Float[Tensor, " heads"]
    l1: Float[Tensor, " heads"]
    dong_beta: Float[Tensor, " heads"]

    @classmethod
    def names(cls) -> list[str]:
        """The names of the sizes."""
        return [field.name for field in fields(cls)]


def weight_sizes(layer: Layer) -> WeightSizes:
    """The sizes of one layer's weights."""
    weights = [w.detach() for w in (layer.query, layer.key, layer.value)]
    query, key, value = weights
    return WeightSizes(
        eta=torch.stack([max_norm(w) for w in weights]).amax(dim=0),
        value_col=column_norm(value),
        l1=torch.stack([entry_sum_norm(w) for w in weights]).amax(dim=0),
        dong_beta=column_norm(query @ key.mT) * composite_norm(value),
    )
