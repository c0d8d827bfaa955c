"""Which blocks published methods would remove, from the dense model's states alone."""

from collections.abc import Callable, Mapping

from depthgauge.checkpoints.scores import angular_distance, block_influence
from depthgauge.surgery.states import DenseStates


def by_influence(dense: DenseStates, count: int) -> tuple[int, ...]:
    """Return the `count` blocks with the smallest block influence (ShortGPT)."""
    layers = range(len(dense.states) - 1)
    influence = [block_influence(dense.at(k), dense.at(k + 1)) for k in layers]
    return tuple(sorted(sorted(layers, key=lambda k: influence[k])[:count]))


def by_angle(dense: DenseStates, count: int) -> tuple[int, ...]:
    """Return the `count` adjacent blocks with the smallest angular distance between X_ℓ and X_{ℓ+count} (UIDL)."""
    starts = range(len(dense.states) - count)
    angle = [angular_distance(dense.at(k), dense.at(k + count)) for k in starts]
    first = min(starts, key=lambda k: angle[k])
    return tuple(range(first, first + count))


PEERS: Mapping[str, Callable[[DenseStates, int], tuple[int, ...]]] = {
    "block influence (ShortGPT)": by_influence,
    "angular distance (UIDL)": by_angle,
}
"""Name → choice of blocks."""
