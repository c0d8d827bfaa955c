"""Measures of every attention head that need one pass over the scores, computed with few operations per layer.

On a GPU the time of a small batch is that of launching operations, not of arithmetic. What depends on the mask alone is
therefore computed once for all layers with the same mask, and no result is read before the end of the forward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.interface import BLOCK_ENTRIES, AttentionCall

_MASKS = 2
"""How many masks are kept: models with windowed layers alternate between two."""


@dataclass(frozen=True, eq=False, repr=False)
class RowMeasures(ArrayRecord):
    """The part of `HeadStatistics` that needs one pass over the scores, and the entropy of uniform attention.

    - `score_range`, `tv_mean`, `first_mass`, `entropy`: as in `HeadStatistics`; NaN where a layer has fewer heads
    - `uniform_entropy`: mean over rows of log(number of visible keys), the largest possible entropy
    """

    score_range: Float[Tensor, "layers heads"]
    tv_mean: Float[Tensor, "layers heads"]
    first_mass: Float[Tensor, "layers heads"]
    entropy: Float[Tensor, "layers heads"]
    uniform_entropy: Float[Tensor, " layers"]


class RowWatch:
    """A `Watch` that measures the heads of every layer; the results stay on the device.

    Args:
        rows: the queries to count; by default all.
    """

    def __init__(self, rows: Bool[Tensor, "batch n"] | None = None) -> None:
        self.rows = rows
        self._masks: list[_Mask] = []
        self._waiting: list[_Waiting] = []
        self._layers: list[_Layer] = []

    def __len__(self) -> int:
        return len(self._layers) + len(self._waiting)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Measure one layer and return its output; small layers wait until several can be measured together."""
        mask, ranges = self._mask(call), call.ranges()
        if len(ranges) == 1:
            return self._one_block(call, mask)
        self._measure_waiting()
        outputs, largest, sums = [], [], []
        for start, stop in ranges:
            scores = call.scores(start, stop)
            p = call.weights(scores)
            outputs.append(p @ call.value)
            one, several = _measure_rows(scores[None], p[None], mask.block(call, start, stop))
            largest.append(one[0])
            sums.append(several[0])
        self._layers.append(_Layer(torch.stack(largest).amax(dim=0), torch.stack(sums).sum(dim=0), mask.totals()))
        return torch.cat(outputs, dim=-2)

    def measures(self) -> RowMeasures:
        """Return the measures of all layers so far, on the device of the first."""
        self._measure_waiting()
        device, most = self._layers[0].sums.device, max(layer.sums.shape[-1] for layer in self._layers)
        largest = _stacked([layer.largest for layer in self._layers], most, device).double()
        sums = _stacked([layer.sums for layer in self._layers], most, device)
        totals = torch.stack([layer.totals.to(device) for layer in self._layers])
        rows = totals[:, 0].clamp(min=1)
        tv, first, entropy = (sums / rows[:, None, None]).unbind(dim=1)
        return RowMeasures(largest, tv / 2, first, entropy, totals[:, 1] / rows)

    def _one_block(self, call: AttentionCall, mask: "_Mask") -> Tensor:
        """Return the output of a layer whose rows fit into one block, and let it wait."""
        n = call.query.shape[-2]
        rows, scores = mask.block(call, 0, n), call.scores(0, n)
        p = call.weights(scores)
        waiting = self._waiting
        if waiting and (waiting[0].rows is not rows or (len(waiting) + 1) * p.numel() > BLOCK_ENTRIES):
            self._measure_waiting()
        self._waiting.append(_Waiting(scores, p, rows, mask.totals()))
        return p @ call.value

    def _measure_waiting(self) -> None:
        """Measure the layers that wait together; all have the same mask."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        scores, p = (
            tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
            for tensors in ([layer.scores for layer in waiting], [layer.p for layer in waiting])
        )
        largest, sums = _measure_rows(scores, p, waiting[0].rows)
        found = zip(largest.unbind(), sums.unbind(), (layer.totals for layer in waiting), strict=True)
        self._layers += [_Layer(*layer) for layer in found]

    def _mask(self, call: AttentionCall) -> "_Mask":
        """Return what depends on the mask of a call alone; the last masks are kept."""
        for known in self._masks:
            if known.fits(call):
                return known
        self._masks = [_Mask(call, self.rows), *self._masks[: _MASKS - 1]]
        return self._masks[0]


@dataclass(frozen=True)
class _Layer:
    """The results of one layer.

    - `largest`: the largest score range
    - `sums`: Σ over rows of 2·TV, first mass and entropy
    - `totals`: the number of rows, and Σ over rows of log(number of visible keys)
    """

    largest: Float[Tensor, " heads"]
    sums: Float[Tensor, "measures heads"]
    totals: Float[Tensor, " 2"]


@dataclass(frozen=True)
class _Waiting:
    """The scores and the attention of a layer that is not measured yet."""

    scores: Float[Tensor, "batch heads n keys"]
    p: Float[Tensor, "batch heads n keys"]
    rows: "_Rows"
    totals: Float[Tensor, " 2"]


@dataclass(frozen=True)
class _Rows:
    """What the mask says about a block of rows; tensors with one head are equal for all heads.

    - `hidden`: whether a row cannot attend to a key; None if every row attends everywhere
    - `uniform`: the weights of uniform attention over the visible keys
    - `first`: index of the first visible key
    - `counted`: whether the row enters the measures: it is no padding and sees at least one key
    - `ignored`: the opposite of `counted`
    - `totals`: the number of the counted rows, and the sum of their log(number of visible keys)
    """

    hidden: Bool[Tensor, "batch 1 rows keys"] | None
    uniform: Float[Tensor, "batch 1 rows keys"]
    first: Int[Tensor, "batch 1 rows 1"]
    counted: Bool[Tensor, "batch 1 rows"]
    ignored: Bool[Tensor, "batch 1 rows"]
    totals: Float[Tensor, " 2"]


class _Mask:
    """What depends on the mask of a call alone, computed once per block of rows."""

    def __init__(self, call: AttentionCall, rows: Bool[Tensor, "batch n"] | None) -> None:
        self.mask, self.rows, self.key = (
            call.mask,
            rows,
            _key(call),
        )  # the mask is kept, so that its memory is not reused
        self._blocks: dict[tuple[int, int], _Rows] = {}
        self._totals: Tensor | None = None

    def fits(self, call: AttentionCall) -> bool:
        """Return whether a call has the same mask, in the same memory, and the same shapes."""
        return self.key == _key(call)

    def block(self, call: AttentionCall, start: int, stop: int) -> _Rows:
        """Return what the mask of the call says about a block of rows."""
        if (start, stop) not in self._blocks:
            self._blocks[start, stop] = self._make(call, start, stop)
        return self._blocks[start, stop]

    def totals(self) -> Float[Tensor, " 2"]:
        """Return the sums of `_Rows.totals` over all blocks."""
        if self._totals is None:
            self._totals = torch.stack([block.totals for block in self._blocks.values()]).sum(dim=0)
        return self._totals

    def _make(self, call: AttentionCall, start: int, stop: int) -> _Rows:
        batch = call.query.shape[0]
        device, wide = call.query.device, torch.promote_types(call.query.dtype, torch.float32)
        visible = call.visible(start, stop)
        if visible is None:
            shown = torch.ones(batch, 1, stop - start, call.key.shape[-2], dtype=torch.bool, device=device)
        else:
            shown = visible[:, :1]  # all heads have the same mask in every family
        count = shown.sum(dim=-1)
        counted = count > 0
        if self.rows is not None:
            counted = counted & self.rows[:, None, start:stop].to(device)
        some = count.clamp(min=1).to(wide)
        return _Rows(
            hidden=None if visible is None else ~shown,
            uniform=shown / some[..., None],
            first=shown.to(torch.uint8).argmax(dim=-1)[..., None],
            counted=counted,
            ignored=~counted,
            totals=torch.stack([counted.sum().double(), (some.log() * counted).double().sum()]),
        )


def _key(call: AttentionCall) -> tuple[Any, ...]:
    """Return what two calls with the same mask have in common: memory, version and layout of the mask, and shapes."""
    common = (call.query.shape, call.key.shape[-2], call.query.device, call.query.dtype)
    mask = call.mask
    return common if mask is None else (*common, mask.data_ptr(), mask._version, mask.shape, mask.stride(), mask.dtype)


def _measure_rows(
    scores: Float[Tensor, "layers batch heads rows keys"],
    p: Float[Tensor, "layers batch heads rows keys"],
    rows: _Rows,
) -> tuple[Float[Tensor, "layers heads"], Float[Tensor, "layers measures heads"]]:
    """Return the largest score range of a block of rows, and Σ over its rows of 2·TV, first mass and entropy."""
    if rows.hidden is None:
        ranges = scores.amax(dim=-1) - scores.amin(dim=-1)
    else:
        greatest = scores.masked_fill(rows.hidden, float("-inf")).amax(dim=-1)
        ranges = greatest - scores.masked_fill(rows.hidden, float("inf")).amin(dim=-1)
    # 2·TV(p, u) = Σ_j |p_j − u_j|; masked keys contribute nothing, because p_j = u_j = 0 there.
    tv = torch.linalg.vector_norm(p - rows.uniform, ord=1, dim=-1)
    first = p.gather(-1, rows.first.expand(*p.shape[:-1], 1))[..., 0].to(tv.dtype)
    entropy = torch.special.entr(p).sum(dim=-1).to(tv.dtype)
    sums = (torch.stack([tv, first, entropy], dim=1) * rows.counted).sum(dim=(2, 4), dtype=torch.float64)
    return ranges.masked_fill(rows.ignored, 0.0).amax(dim=(1, 3)), sums


def _stacked(values: list[Tensor], most: int, device: torch.device) -> Tensor:
    """Return the values of all layers as one tensor, with NaN where a layer has fewer than `most` heads."""
    return torch.stack(
        [
            F.pad(value.to(device), (0, most - value.shape[-1]), value=float("nan")) if value.shape[-1] < most
            else value.to(device)
            for value in values
        ]
    )  # fmt: skip
