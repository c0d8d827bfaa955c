"""Statistics of every attention head on text, computed in blocks of rows.

Each layer is processed in two passes. The first computes the output, the measures and the mean attention pattern. The
second compares the output with the outputs of static patterns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.checkpoints.interface import AttentionCall, RowBlock
from depthgauge.theory.measures.quantities import VisibleKeys, row_measures

STATIC = ("uniform", "first", "previous", "mean")
"""Attention patterns that do not depend on the text.

- `uniform`: equal weights on all visible keys
- `first`: the first visible key
- `previous`: the key before the query, or the first visible key if that one is masked
- `mean`: the head's mean attention on the first visible key and on each other distance i − j, normalized
"""
_LARGEST, _SUMS = ("score_range", "tv_max"), ("energy", "static")
"""Statistics that are combined over windows by their maximum and by their sum; all others by their mean."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadStatistics(ArrayRecord):
    """Statistics per head over the rows p of the attention matrices of one or more windows.

    A row belongs to one query token. A key is visible to a row if the mask lets the row attend to it.

    - `score_range`: largest over rows of max − min of the visible scores
    - `tv_mean`, `tv_max`: mean and largest total variation distance of a row to the uniform row over its visible keys
    - `first_mass`: mean attention on the first visible key
    - `entropy`: mean of −Σ_j p_j log p_j, in nats
    - `energy`: Σ over rows of ‖Σ_j p_j v_j‖²
    - `static`: Σ over rows of ‖Σ_j (p_j − p'_j) v_j‖² for each static pattern p', in the order of STATIC
    """

    score_range: Float[Tensor, " heads"]
    tv_mean: Float[Tensor, " heads"]
    tv_max: Float[Tensor, " heads"]
    first_mass: Float[Tensor, " heads"]
    entropy: Float[Tensor, " heads"]
    energy: Float[Tensor, " heads"]
    static: Float[Tensor, "patterns heads"]

    def static_errors(self) -> Float[Tensor, "patterns heads"]:
        """Return √(Σ‖(P − P')v‖² / Σ‖Pv‖²), the relative error of the head's output with each static pattern P'."""
        return (self.static / self.energy).sqrt()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as lists, by name."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}


def combine(windows: Sequence[Mapping[str, Any]]) -> HeadStatistics:
    """Combine the statistics of one layer over several windows of the same length, each from `to_json`."""
    stacked = {name: torch.tensor([window[name] for window in windows], dtype=torch.float64) for name in windows[0]}
    return HeadStatistics(
        **{
            name: value.amax(dim=0) if name in _LARGEST else value.sum(dim=0) if name in _SUMS else value.mean(dim=0)
            for name, value in stacked.items()
        }
    )


def visible_keys(
    call: AttentionCall, start: int, stop: int, counted: Bool[Tensor, "batch n"] | None = None
) -> VisibleKeys:
    """Return the keys that the rows from `start` to `stop` can attend to; `counted` is False for padding tokens."""
    visible, shape = call.visible(start, stop), (len(call.query), 1, stop - start, call.key.shape[-2])
    # All heads have the same mask in every family.
    shown = torch.ones(shape, dtype=torch.bool, device=call.query.device) if visible is None else visible[:, :1]
    rows = None if counted is None else counted[:, start:stop].to(call.query.device)
    return VisibleKeys.of(shown, call.query.dtype, rows, masked=visible is not None)


def head_statistics(
    call: AttentionCall, rows: Bool[Tensor, "batch n"] | None = None
) -> tuple[Float[Tensor, "batch heads n v"], HeadStatistics]:
    """Compute the output of one layer and the statistics of its heads over the queries `rows`, by default all."""
    _, heads, n, _ = call.query.shape
    distances = n + call.key.shape[-2] - 1

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=call.query.device)

    largest, sums, count = zeros(2, heads), zeros(3, heads), 0
    mass, times = zeros(heads, distances), zeros(distances)
    outputs = []
    for block in call.blocks():
        keys = visible_keys(call, block.start, block.stop, rows)
        found = row_measures(block.scores, block.p, keys)
        ends = torch.stack([found.score_range, found.tv]).masked_fill(~keys.counted, 0.0).amax(dim=(1, 3))
        largest = torch.maximum(largest, ends.double())
        for place, value in enumerate((found.tv, found.first_mass, found.entropy)):
            sums[place] += (value * keys.counted).double().sum(dim=(0, 2))
        count += int(keys.counted.sum())
        _add_distances(block, keys, mass, times)
        outputs.append(block.p @ call.value)
    output, means = torch.cat(outputs, dim=-2), sums / max(count, 1)
    by_distance, energy, errors = mass / times.clamp(min=1), zeros(heads), zeros(len(STATIC), heads)
    for block in call.blocks():
        keys, here = visible_keys(call, block.start, block.stop, rows), output[..., block.start : block.stop, :]
        weight = keys.counted[..., None]
        energy += (here.double().square() * weight).sum(dim=(0, 2, 3))
        for place, out in enumerate(_static_outputs(call, block, keys, by_distance, means[1])):
            errors[place] += ((out - here).double().square() * weight).sum(dim=(0, 2, 3))
    (score_range, tv_max), (tv, first, entropy) = largest.cpu(), means.cpu()
    return output, HeadStatistics(score_range, tv, tv_max, first, entropy, energy.cpu(), errors.cpu())


def _shown(block: RowBlock, keys: VisibleKeys) -> Bool[Tensor, "batch rows keys"]:
    """Return whether a row can attend to a key."""
    return torch.ones_like(block.p[:, 0], dtype=torch.bool) if keys.hidden is None else ~keys.hidden[:, 0]


def _distance(block: RowBlock) -> Int[Tensor, "rows keys"]:
    """Return i − j + keys − 1 ≥ 0 for the rows i and keys j of a block."""
    device, keys = block.p.device, block.p.shape[-1]
    return torch.arange(block.start, block.stop, device=device)[:, None] - torch.arange(keys, device=device) + keys - 1


def _add_distances(block: RowBlock, keys: VisibleKeys, mass: Tensor, times: Tensor) -> None:
    """Add the attention on every distance except the first visible key to `mass`, and the number of rows to `times`."""
    not_first = (_shown(block, keys) & keys.counted[:, 0, :, None]).scatter(-1, keys.first[:, 0], False)
    distance = _distance(block).reshape(-1)
    on_distance = (block.p * not_first[:, None]).sum(dim=0).reshape(block.p.shape[1], -1)
    mass.index_add_(1, distance, on_distance.double())
    times.index_add_(0, distance, not_first.sum(dim=0).reshape(-1).double())


def _static_outputs(
    call: AttentionCall,
    block: RowBlock,
    keys: VisibleKeys,
    by_distance: Float[Tensor, "heads distances"],
    on_first: Float[Tensor, " heads"],
) -> list[Float[Tensor, "batch heads rows v"]]:
    """Return the outputs of a block of rows with each static pattern, in the order of STATIC.

    `by_distance` and `on_first` are the mean attention on each distance and on the first visible key.
    """
    value, shown = call.value, _shown(block, keys)
    uniform = keys.uniform.to(value.dtype)
    mean = by_distance.to(value.dtype)[:, _distance(block)] * shown[:, None]
    place = keys.first.expand(-1, mean.shape[1], -1, 1)
    mean = mean.scatter(-1, place, on_first.to(value.dtype)[None, :, None, None].expand(place.shape))
    total = mean.sum(dim=-1, keepdim=True)
    mean = torch.where(total > 0, mean / total, uniform)
    before = torch.arange(block.start - 1, block.stop - 1, device=value.device).clamp(min=0)
    before = before[:, None].expand(keys.first[:, 0].shape)
    previous = torch.where(shown.gather(-1, before), before, keys.first[:, 0])[:, None]

    def picked(index: Int[Tensor, "batch 1 rows 1"]) -> Float[Tensor, "batch heads rows v"]:
        return value.gather(-2, index.expand(-1, value.shape[1], -1, value.shape[-1]))

    return [uniform @ value, picked(keys.first), picked(previous), mean @ value]
