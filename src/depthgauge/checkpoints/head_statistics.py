"""Statistics of every attention head on text, streamed over blocks of rows.

Each layer is processed in two passes. The first computes the output, the measures and the mean attention pattern. The
second compares the output with the outputs of static patterns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.interface import AttentionCall, RowBlock
from depthgauge.measures.heads import entropy

STATIC = ("uniform", "first", "previous", "mean")
"""Attention patterns that do not depend on the text.

- `uniform`: equal weights on all visible keys
- `first`: the first visible key
- `previous`: the key before the query, or the first visible key if that one is masked
- `mean`: the head's mean attention on the first visible key and on each other distance i − j, normalized
"""


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

    def to_json(self) -> dict[str, list[float] | list[list[float]]]:
        """Return the fields as lists, by name."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    @classmethod
    def from_json(cls, document: dict[str, list[float]]) -> "HeadStatistics":
        """Restore the statistics from the output of `to_json`."""
        return cls(**{name: torch.tensor(values, dtype=torch.float64) for name, values in document.items()})


def combine(windows: Sequence[HeadStatistics]) -> HeadStatistics:
    """Combine the statistics of one layer over several windows of the same length.

    Largest values are combined by maximum, means by mean, and sums by sum.
    """
    stacked = {f.name: torch.stack([getattr(w, f.name) for w in windows]) for f in fields(HeadStatistics)}
    largest, sums = ("score_range", "tv_max"), ("energy", "static")
    return HeadStatistics(
        **{
            name: value.amax(dim=0) if name in largest else value.sum(dim=0) if name in sums else value.mean(dim=0)
            for name, value in stacked.items()
        }
    )


def _all_rows(call: AttentionCall) -> Bool[Tensor, "batch n"]:
    batch, _, n, _ = call.query.shape
    return torch.ones(batch, n, dtype=torch.bool, device=call.query.device)


class HeadWatch:
    """A `Watch` that collects the statistics of every layer; `rows` is False for padding tokens."""

    def __init__(self, rows: Bool[Tensor, "batch n"] | None = None) -> None:
        self.rows = rows
        self.layers: list[HeadStatistics] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        """Append the statistics of one layer and return its output."""
        output, statistics = head_statistics(call, self.rows)
        self.layers.append(statistics)
        return output


def head_statistics(
    call: AttentionCall, rows: Bool[Tensor, "batch n"] | None = None
) -> tuple[Float[Tensor, "batch heads n v"], HeadStatistics]:
    """Compute the output of one layer and the statistics of its heads.

    Args:
        call: the arguments of the layer's attention.
        rows: the queries to count; by default all.
    """
    _, heads, n, _ = call.query.shape
    rows = _all_rows(call) if rows is None else rows
    first_pass, outputs = _FirstPass(call, n), []
    for block in call.blocks():
        first_pass.add(block, _Visible.of(block, rows))
        outputs.append(block.p @ call.value)
    output = torch.cat(outputs, dim=-2)
    pattern = first_pass.mean_pattern()
    errors = torch.zeros(len(STATIC), heads, dtype=torch.float64, device=output.device)
    energy = torch.zeros(heads, dtype=torch.float64, device=output.device)
    for block in call.blocks():
        visible, here = _Visible.of(block, rows), output[..., block.start : block.stop, :]
        static = _static_outputs(call, block, visible, pattern)
        weight = visible.counted[:, None, :, None]
        energy += (here.double().square() * weight).sum(dim=(0, 2, 3))
        errors += torch.stack([((out - here).double().square() * weight).sum(dim=(0, 2, 3)) for out in static])
    return output, first_pass.statistics(energy.cpu(), errors.cpu())


@dataclass(frozen=True)
class _Visible:
    """Which keys the rows of a block can attend to.

    - `mask`: whether a row can attend to a key
    - `count`: number of visible keys, at least 1 to allow division
    - `first`: index of the first visible key
    - `previous`: index of the key before the query, or `first` if that key is not visible
    - `counted`: whether the row enters the statistics: it is no padding and sees at least one key
    """

    mask: Bool[Tensor, "batch rows keys"]
    count: Float[Tensor, "batch rows"]
    first: Int[Tensor, "batch rows"]
    previous: Int[Tensor, "batch rows"]
    counted: Bool[Tensor, "batch rows"]

    @classmethod
    def of(cls, block: RowBlock, rows: Bool[Tensor, "batch n"]) -> "_Visible":
        batch, _, here, keys = block.p.shape
        if block.visible is None:
            mask = torch.ones(batch, here, keys, dtype=torch.bool, device=block.p.device)
        else:
            mask = block.visible[:, 0]  # all heads have the same mask in every family
        first = mask.to(torch.uint8).argmax(dim=-1)
        position = torch.arange(block.start, block.stop, device=block.p.device)
        before = (position - 1).clamp(min=0).expand(batch, -1)
        before = torch.where(mask.gather(-1, before[..., None])[..., 0], before, first)
        count = mask.sum(dim=-1)
        counted = rows[:, block.start : block.stop] & (count > 0)
        return cls(mask, count.clamp(min=1).to(block.p.dtype), first, before, counted)


class _FirstPass:
    """Accumulates the measures of one layer and its mean attention by distance, block by block."""

    def __init__(self, call: AttentionCall, n: int) -> None:
        heads, device = call.query.shape[1], call.query.device
        zeros = torch.zeros(heads, dtype=torch.float64, device=device)
        self.score_range, self.tv_max = zeros.clone(), zeros.clone()
        self.tv, self.first, self.entropy = zeros.clone(), zeros.clone(), zeros.clone()
        self.rows = 0
        self.keys = call.key.shape[-2]
        # The distance i − j runs from −(keys − 1) to n − 1; the index is i − j + keys − 1 ≥ 0.
        self.mass = torch.zeros(heads, n + self.keys - 1, dtype=torch.float64, device=device)
        self.times = torch.zeros(n + self.keys - 1, dtype=torch.float64, device=device)

    def add(self, block: RowBlock, visible: _Visible) -> None:
        """Add a block of rows."""
        p, mask, counted = block.p, visible.mask[:, None], visible.counted[:, None]
        smallest = block.scores.masked_fill(~mask, float("inf")).amin(dim=-1)
        greatest = block.scores.masked_fill(~mask, float("-inf")).amax(dim=-1)
        # TV(p, u) = Σ_j |p_j − u_j|/2; masked keys contribute nothing, because p_j = u_j = 0 there.
        tv = ((p - mask / visible.count[:, None, :, None]).abs().sum(dim=-1)) / 2
        first = p.gather(-1, visible.first[:, None, :, None].expand(-1, p.shape[1], -1, 1))[..., 0]
        for name, value in (("score_range", greatest - smallest), ("tv_max", tv)):
            largest = value.masked_fill(~counted, 0.0).amax(dim=(0, 2)).double()
            setattr(self, name, torch.maximum(getattr(self, name), largest))
        self.tv += (tv * counted).double().sum(dim=(0, 2))
        self.first += (first * counted).double().sum(dim=(0, 2))
        self.entropy += (entropy(p) * counted).double().sum(dim=(0, 2))
        self.rows += int(visible.counted.sum())
        self._add_distances(block, visible)

    def _add_distances(self, block: RowBlock, visible: _Visible) -> None:
        not_first = visible.mask & visible.counted[..., None]
        not_first = not_first.scatter(-1, visible.first[..., None], False)
        distance = _distance(block, self.keys).reshape(-1)
        mass = (block.p * not_first[:, None]).sum(dim=0).reshape(block.p.shape[1], -1)
        self.mass.index_add_(1, distance, mass.double())
        self.times.index_add_(0, distance, not_first.sum(dim=0).reshape(-1).double())

    def mean_pattern(self) -> tuple[Float[Tensor, "heads distances"], Float[Tensor, " heads"]]:
        """Return the mean attention by distance, and on the first visible key."""
        return self.mass / self.times.clamp(min=1), self.first / max(self.rows, 1)

    def statistics(self, energy: Float[Tensor, " heads"], static: Float[Tensor, "patterns heads"]) -> HeadStatistics:
        """Return the statistics of the rows added so far."""
        rows = max(self.rows, 1)
        return HeadStatistics(
            score_range=self.score_range.cpu(),
            tv_mean=self.tv.cpu() / rows,
            tv_max=self.tv_max.cpu(),
            first_mass=self.first.cpu() / rows,
            entropy=self.entropy.cpu() / rows,
            energy=energy,
            static=static,
        )


def _distance(block: RowBlock, keys: int) -> Int[Tensor, "rows keys"]:
    """Return i − j + keys − 1 for the rows i and keys j of a block."""
    device = block.p.device
    rows = torch.arange(block.start, block.stop, device=device)
    return rows[:, None] - torch.arange(keys, device=device) + keys - 1


def _static_outputs(
    call: AttentionCall,
    block: RowBlock,
    visible: _Visible,
    pattern: tuple[Float[Tensor, "heads distances"], Float[Tensor, " heads"]],
) -> list[Float[Tensor, "batch heads rows v"]]:
    """Return the outputs of a block of rows with each static pattern, in the order of STATIC."""
    value = call.value
    uniform = (visible.mask / visible.count[..., None]).to(value.dtype)
    by_distance, on_first = (part.to(value.dtype) for part in pattern)
    mean = by_distance[:, _distance(block, value.shape[-2])] * visible.mask[:, None]
    place = visible.first[:, None, :, None].expand(-1, mean.shape[1], -1, 1)
    mean = mean.scatter(-1, place, on_first[None, :, None, None].expand(place.shape))
    total = mean.sum(dim=-1, keepdim=True)
    mean = torch.where(total > 0, mean / total, uniform[:, None])

    def picked(index: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch heads rows v"]:
        return value.gather(-2, index[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[-1]))

    return [uniform[:, None] @ value, picked(visible.first), picked(visible.previous), mean @ value]
