"""Measures of every attention head that need one pass over the scores, computed with few operations per layer.

On a GPU the time of a small batch is that of launching operations, not of arithmetic. What depends on the mask alone is
therefore computed once for all layers with the same mask, small layers are measured together, and no result is read
before the end of the forward pass. This halves the processor time of a probe (`benchmarks/monitor.py`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from depthgauge.checkpoints.head_statistics import visible_keys
from depthgauge.checkpoints.interface import BLOCK_ENTRIES, AttentionCall
from depthgauge.theory.measures.heads import VisibleKeys, row_measures

_MASKS = 2
"""How many masks are kept: models with windowed layers alternate between two."""


class RowWatch:
    """A `Watch` that measures the heads of every layer over the queries `rows`, by default all.

    The results stay on the device.
    """

    def __init__(self, rows: Bool[Tensor, "batch n"] | None = None) -> None:
        self.rows = rows
        self._masks: list[_Mask] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []  # scores and attention of layers with the mask `_masks[0]`
        self._layers: list[tuple[Tensor, Tensor]] = []  # sums over the rows of a layer, and totals of its mask

    def __len__(self) -> int:
        return len(self._layers) + len(self._waiting)

    def __call__(self, call: AttentionCall) -> Tensor:
        """Measure one layer and return its output; small layers wait until several can be measured together."""
        mask, outputs, sums = self._mask(call), [], []
        for (start, stop), keys in zip(call.ranges(), mask.blocks, strict=True):
            scores = call.scores(start, stop)
            p = call.weights(scores)
            outputs.append(p @ call.value)
            if len(mask.blocks) == 1:
                if (len(self._waiting) + 1) * p.numel() > BLOCK_ENTRIES:
                    self._measure_waiting()
                self._waiting.append((scores, p))
            else:
                sums.append(_sums(scores[None], p[None], keys)[0])
        if sums:
            several = torch.stack(sums)
            whole = torch.cat([several[:, :1].amax(dim=0), several[:, 1:].sum(dim=0)])
            self._layers.append((whole, mask.totals))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)

    def measures(self) -> tuple[dict[str, Float[Tensor, "layers heads"]], Float[Tensor, " layers"]]:
        """Return the measures of all layers so far, and the entropy of uniform attention, on the device of the first.

        Returns:
            `score_range`, `tv_mean`, `first_mass` and `entropy`, as in `HeadStatistics`, NaN where a layer has fewer
            heads; and the mean over rows of log(number of visible keys), the largest possible entropy.
        """
        self._measure_waiting()
        device, most = self._layers[0][0].device, max(sums.shape[-1] for sums, _ in self._layers)
        padded = [F.pad(sums.to(device), (0, most - sums.shape[-1]), value=torch.nan) for sums, _ in self._layers]
        totals = torch.stack([total.to(device) for _, total in self._layers])
        rows = totals[:, 0].clamp(min=1)
        table = torch.stack(padded)
        tv, first, entropy = (table[:, 1:] / rows[:, None, None]).unbind(dim=1)
        by_head = {"score_range": table[:, 0], "tv_mean": tv, "first_mass": first, "entropy": entropy}
        return by_head, totals[:, 1] / rows

    def _measure_waiting(self) -> None:
        """Measure the layers that wait together; all have the same mask."""
        if self._waiting:
            scores, p = (torch.stack(tensors) for tensors in zip(*self._waiting, strict=True))
            mask = self._masks[0]
            self._layers += [(sums, mask.totals) for sums in _sums(scores, p, mask.blocks[0])]
            self._waiting = []

    def _mask(self, call: AttentionCall) -> "_Mask":
        """Return what depends on the mask of a call alone and make it `_masks[0]`; the last masks are kept."""
        key = _key(call)
        known = next((mask for mask in self._masks if mask.key == key), None)
        if known is None or known is not self._masks[0]:
            self._measure_waiting()
            others = [mask for mask in self._masks if mask is not known]
            self._masks = [known or _Mask(call, self.rows, key), *others[: _MASKS - 1]]
        return self._masks[0]


class _Mask:
    """What depends on the mask of a call alone.

    - `key`: what another call with the same mask has in common
    - `mask`: kept, so that its memory is not used for another mask while `key` is known
    - `blocks`: the visible keys of each block of rows
    - `totals`: the number of counted rows, and the sum of their log(number of visible keys)
    """

    def __init__(self, call: AttentionCall, rows: Bool[Tensor, "batch n"] | None, key: tuple[Any, ...]) -> None:
        self.key, self.mask = key, call.mask
        self.blocks = [visible_keys(call, start, stop, rows) for start, stop in call.ranges()]
        totals = [(keys.counted.sum().double(), (keys.log_count * keys.counted).double().sum()) for keys in self.blocks]
        self.totals = torch.stack([torch.stack(pair) for pair in totals]).sum(dim=0)


def _key(call: AttentionCall) -> tuple[Any, ...]:
    """Return what two calls with the same mask have in common: memory, version and layout of the mask, and shapes."""
    common = (call.query.shape, call.key.shape[-2], call.query.device, call.query.dtype)
    mask = call.mask
    return common if mask is None else (*common, mask.data_ptr(), mask._version, mask.shape, mask.stride(), mask.dtype)


def _sums(
    scores: Float[Tensor, "layers batch heads rows keys"], p: Float[Tensor, "layers batch heads rows keys"],
    keys: VisibleKeys,
) -> Float[Tensor, "layers 4 heads"]:  # fmt: skip
    """Return the largest score range of a block of rows, and Σ over its rows of TV, first mass and entropy."""
    found = row_measures(scores, p, keys)
    largest = found.score_range.masked_fill(~keys.counted, 0.0).amax(dim=(1, 3)).double()
    rows = torch.stack([found.tv, found.first_mass, found.entropy], dim=1) * keys.counted
    return torch.cat([largest[:, None], rows.sum(dim=(2, 4), dtype=torch.float64)], dim=1)
