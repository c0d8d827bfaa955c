"""What one probe measures, as tensors; combined over the processes of a distributed run; as a record.

The heads are measured in one pass over the scores, with few operations per layer. On a GPU the time of a small batch is
that of launching operations, not of arithmetic. What depends on the mask alone is therefore computed once for all
layers with the same mask, small layers are measured together, and no result is read before the end of the forward pass.
This halves the processor time of a probe (`benchmarks/monitor.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from depthgauge.checkpoints.blocks.attention_calls import BLOCK_ENTRIES, AttentionCall
from depthgauge.checkpoints.blocks.window_observer import visible_keys
from depthgauge.results.monitor_record import Probe, ProbedHeads, ProbedLayer
from depthgauge.results.record import finite
from depthgauge.theory.measures.quantities import VisibleKeys, row_measures

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


LARGEST = ("score_range",)
"""Measures that are combined over processes by their maximum; all others by their mean."""


@dataclass(frozen=True)
class Measurement:
    """The measures of one probe.

    - `layers`: name → one value per layer
    - `heads`: name → one value per layer and head, NaN where a layer has fewer heads; empty without observation
    - `counts`: number of heads of every layer
    - `loss`: loss on the probe, NaN if the model has none
    - `training_loss`: loss of the training step, NaN if it is unknown
    - `skip`: cost of skipping each block, empty if it was not measured
    - `depth`: measured effective depth, or None
    """

    layers: Mapping[str, Float[Tensor, " layers"]]
    heads: Mapping[str, Float[Tensor, "layers heads"]]
    counts: tuple[int, ...]
    loss: Float[Tensor, ""]
    training_loss: Float[Tensor, ""] | None = None
    skip: tuple[float, ...] = ()
    depth: int | None = None

    def values(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        losses = {"loss": self.loss} | ({} if self.training_loss is None else {"training_loss": self.training_loss})
        return {**self.layers, **self.heads, **losses}

    def with_values(self, values: Mapping[str, Tensor]) -> "Measurement":
        """Return the measurement with other tensors under the same names."""
        return replace(
            self,
            layers={name: values[name] for name in self.layers},
            heads={name: values[name] for name in self.heads},
            loss=values["loss"],
            training_loss=values.get("training_loss"),
        )

    def record(self, step: int, segment: int, seconds: float) -> Probe:
        """Return the record of the probe; values that are not finite become None."""
        layers = {name: values.tolist() for name, values in self.layers.items()}
        heads = {name: values.tolist() for name, values in self.heads.items()}
        made = []
        for index, count in enumerate(self.counts):
            own = {name: tuple(finite(value) for value in rows[index][:count]) for name, rows in heads.items()}
            made.append(
                ProbedLayer(
                    index=index,
                    **{name: finite(values[index]) for name, values in layers.items()},
                    skip_loss=finite(self.skip[index]) if self.skip else None,
                    heads=ProbedHeads(**own) if own else None,
                )
            )
        return Probe(
            step=step,
            segment=segment,
            loss=None if self.training_loss is None else finite(*self.training_loss.reshape(1).tolist()),
            probe_loss=finite(*self.loss.reshape(1).tolist()),
            depth=self.depth,
            seconds=seconds,
            layers=tuple(made),
        )


def moved(found: Measurement, training_loss: float | Tensor | None, device: torch.device) -> Measurement:
    """Return a measurement on the CPU, with the training loss of this process, NaN if it is unknown.

    All values are collected on `device` and moved in one transfer, because each transfer waits for the GPU.
    """
    if isinstance(training_loss, Tensor):
        loss = training_loss.detach().float().mean()  # without a wait for the GPU
    else:
        plain = float("nan") if training_loss is None else float(training_loss)
        loss = torch.full((), plain, dtype=torch.float64, device=device)
    parts = replace(found, training_loss=loss).values()
    flat = torch.cat([value.detach().to(device, torch.float64).reshape(-1) for value in parts.values()]).cpu()
    pieces = torch.split(flat, [value.numel() for value in parts.values()])
    return found.with_values({k: piece.reshape(v.shape) for (k, v), piece in zip(parts.items(), pieces, strict=True)})


def combined(parts: Sequence[Measurement]) -> Measurement:
    """Combine the measurements of all processes: score ranges by their maximum, all others by their mean."""
    if len(parts) == 1:
        return parts[0]
    stacks = {name: torch.stack([part.values()[name] for part in parts]) for name in parts[0].values()}
    return parts[0].with_values(
        {name: stack.amax(dim=0) if name in LARGEST else stack.mean(dim=0) for name, stack in stacks.items()}
    )


_ENTRIES = 2**21
"""Largest number of entries of the states that are measured together (8 MB in float32)."""


def state_measures(states: Sequence[Float[Tensor, "batch n d"]], real: Tensor | None) -> dict[str, Tensor]:
    """Return the measures of every layer that the states X_0 … X_L alone determine, each `[layers]`.

    - `residual_ratio`: ‖Res(X)‖F/‖X‖F about the mean token, mean over the sequences
    - `direction_ratio`: the same after every token is scaled to length 1, so that one token with huge entries, such as
      an attention sink, does not hide that the others are equal
    - `update`: mean over tokens of ‖x_{ℓ+1} − x_ℓ‖/‖x_ℓ‖
    - `block_influence`: 1 − mean over tokens of cos(x_ℓ, x_{ℓ+1})

    `real` says which tokens count, `[batch, n]`; None counts all.
    """
    device, together = states[0].device, max(1, _ENTRIES // states[0].numel())
    found = [
        _some_layers(torch.stack([state.to(device) for state in states[first : first + together + 1]]), real)
        for first in range(0, len(states) - 1, together)
    ]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _some_layers(states: Float[Tensor, "states batch n d"], real: Tensor | None) -> dict[str, Tensor]:
    """Return the measures of consecutive layers."""
    X = states.to(torch.promote_types(states.dtype, torch.float32))
    if real is not None:
        X = X.masked_fill(~real.to(X.device)[..., None], 0.0)
    sizes = torch.linalg.vector_norm(X, dim=-1).clamp(min=torch.finfo(X.dtype).tiny)
    cosines = F.cosine_similarity(X[:-1].double(), X[1:].double(), dim=-1)
    return {
        "residual_ratio": _residual_ratio(X[1:], real),
        "direction_ratio": _residual_ratio(X[1:] / sizes[1:, ..., None], real),
        "update": token_mean(torch.linalg.vector_norm(X[1:] - X[:-1], dim=-1) / sizes[:-1], real),
        "block_influence": 1 - token_mean(cosines, real),
    }


def _residual_ratio(X: Float[Tensor, "layers batch n d"], real: Tensor | None) -> Float[Tensor, " layers"]:
    """Return ‖Res(X)‖F/‖X‖F about the mean token, mean over the sequences; tokens that do not count must be 0."""
    if real is None:
        residual = X - X.mean(dim=-2, keepdim=True)
    else:
        counted = real.to(X.device)[..., None]
        residual = (X - X.sum(dim=-2, keepdim=True) / counted.sum(dim=-2, keepdim=True)) * counted
    ratio: Tensor = torch.linalg.vector_norm(residual, dim=(-2, -1)) / torch.linalg.vector_norm(X, dim=(-2, -1))
    return ratio.mean(dim=-1)


def token_mean(values: Float[Tensor, "layers ..."], real: Tensor | None) -> Float[Tensor, " layers"]:
    """Return the mean over the tokens that count, of all sequences."""
    if real is None:
        return values.flatten(1).mean(dim=1)
    counted = real.to(values.device)
    return values.masked_fill(~counted, 0.0).sum(dim=(1, 2)) / counted.sum()


def token_sizes(state: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Return ‖x‖ of every token, in at least single precision."""
    wide = torch.promote_types(state.dtype, torch.float32)
    sizes: Tensor = torch.linalg.vector_norm(state, dim=-1, dtype=wide)
    return sizes


def update_shares(sizes: Sequence[tuple[Tensor, Tensor] | None], real: Tensor | None) -> Float[Tensor, " layers"]:
    """Return the mean over tokens of ‖f(y)‖/‖y‖ per layer, the size of an update relative to what it is added to.

    `sizes` has ‖y‖ of the tokens that a sublayer reads and ‖f(y)‖ of what it adds; None for a layer without the
    sublayer, which gives NaN.
    """
    known = [pair for pair in sizes if pair is not None]
    if not known:
        return torch.full((len(sizes),), float("nan"))
    device = known[0][0].device
    missing = torch.full_like(known[0][0], float("nan"))
    read = torch.stack([missing if pair is None else pair[0].to(device) for pair in sizes])
    added = torch.stack([missing if pair is None else pair[1].to(device) for pair in sizes])
    return token_mean(added / read.clamp(min=torch.finfo(read.dtype).tiny), real)


def layers_left(skip: Sequence[float], increase: float, costs: Callable[[frozenset[int]], Mapping[int, float]]) -> int:
    """Return how many layers are left when the cheapest one is removed again and again, at a cost within `increase`.

    `skip` has the cost of removing each layer alone, and `costs` maps the removed layers to the cost of removing each
    other layer as well.
    """
    gone = frozenset[int]()
    while len(gone) < len(skip) - 1:
        found = costs(gone) if gone else dict(enumerate(skip))
        layer = min(found, key=found.__getitem__)
        if not found[layer] <= increase:  # also if the cost is NaN
            break
        gone |= {layer}
    return len(skip) - len(gone)
