"""Which blocks published methods would remove, from the dense model's states alone."""

import math
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from depthgauge.surgery.states import DenseStates


def by_influence(dense: DenseStates, count: int) -> tuple[int, ...]:
    """Return the `count` blocks with the smallest block influence, 1 − mean cos(X_ℓ, X_{ℓ+1}) (ShortGPT)."""
    layers = len(dense.states) - 1
    influence = [1 - float(_cosine(dense.at(k), dense.at(k + 1)).mean()) for k in range(layers)]
    return tuple(sorted(sorted(range(layers), key=lambda k: influence[k])[:count]))


def by_angle(dense: DenseStates, count: int) -> tuple[int, ...]:
    """Return the `count` adjacent blocks with the smallest angle between X_ℓ and X_{ℓ+count}, last token (UIDL)."""
    starts = range(len(dense.states) - count)
    angle = {
        k: float(_cosine(dense.at(k)[:, -1], dense.at(k + count)[:, -1]).clamp(-1, 1).arccos().mean() / math.pi)
        for k in starts
    }
    first = min(starts, key=lambda k: angle[k])
    return tuple(range(first, first + count))


def _cosine(x: Float[Tensor, "... d"], y: Float[Tensor, "... d"]) -> Float[Tensor, "..."]:
    return F.cosine_similarity(x.double(), y.double(), dim=-1)


PEERS: Mapping[str, Callable[[DenseStates, int], tuple[int, ...]]] = {
    "block influence (ShortGPT)": by_influence,
    "angular distance (UIDL)": by_angle,
}
"""Name → choice of blocks."""
