"""What each head does on text: streamed over blocks of rows, one layer at a time, in two passes.

The first pass computes the output and gathers the measures and the mean pattern; the second compares the output with
what static patterns would have given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge.checkpoints.interface import AttentionCall, RowBlock
from depthgauge.measures.heads import entropy

STATIC = ("uniform", "first", "previous", "mean")
"""Patterns that do not look at the text: average what is seen, the first token seen, the token before, the mean."""


@dataclass(frozen=True)
class HeadStatistics:
    """Per head, over the rows of one or more windows. A row is a token as query; it sees what its mask leaves it.

    - `score_range`: the largest row range of the scores
    - `tv_mean`, `tv_max`: TV of attention rows to uniform over what the row sees
    - `first_mass`: mean attention on the first token the row sees
    - `entropy`: mean over rows of −Σ p log p, in nats
    - `energy`: Σ over rows ‖Σ_j p_j v_j‖², to which the errors relate
    - `static`: Σ over rows ‖Σ_j (p_j − p'_j) v_j‖² for each static pattern p', in the order of STATIC
    """

    score_range: Float[Tensor, " heads"]
    tv_mean: Float[Tensor, " heads"]
    tv_max: Float[Tensor, " heads"]
    first_mass: Float[Tensor, " heads"]
    entropy: Float[Tensor, " heads"]
    energy: Float[Tensor, " heads"]
    static: Float[Tensor, "patterns heads"]

    def static_errors(self) -> Float[Tensor, "patterns heads"]:
        """√(Σ‖(P − P')v‖² / Σ‖Pv‖²): how far the head's output is off if it ran on a static pattern."""
        return (self.static / self.energy).sqrt()

    def to_json(self) -> dict[str, list[float] | list[list[float]]]:
        """Plain lists, by name."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    @classmethod
    def from_json(cls, document: dict[str, list[float]]) -> "HeadStatistics":
        """From what `to_json` gave."""
        return cls(**{name: torch.tensor(values, dtype=torch.float64) for name, values in document.items()})


def combine(windows: Sequence[HeadStatistics]) -> HeadStatistics:
    """One layer over several windows of the same length: largest of the largest, mean of the means, sum of the sums."""
    stacked = {f.name: torch.stack([getattr(w, f.name) for w in windows]) for f in fields(HeadStatistics)}
    largest, sums = ("score_range", "tv_max"), ("energy", "static")
    return HeadStatistics(
        **{
            name: value.amax(dim=0) if name in largest else value.sum(dim=0) if name in sums else value.mean(dim=0)
            for name, value in stacked.items()
        }
    )


class HeadWatch:
    """A watcher that keeps the statistics of every layer it sees; `rows` marks the tokens that are no padding."""

    def __init__(self, rows: Bool[Tensor, "batch n"] | None = None) -> None:
        self.rows = rows
        self.layers: list[HeadStatistics] = []

    def __call__(self, call: AttentionCall) -> Tensor:
        """Measure one layer and return its output."""
        output, statistics = head_statistics(call, self.rows)
        self.layers.append(statistics)
        return output


def head_statistics(
    call: AttentionCall, rows: Bool[Tensor, "batch n"] | None = None
) -> tuple[Float[Tensor, "batch heads n v"], HeadStatistics]:
    """The output of one layer and the statistics of its heads."""
    batch, heads, n, _ = call.query.shape
    if rows is None:
        rows = torch.ones(batch, n, dtype=torch.bool, device=call.query.device)
    gather, outputs = _Gathered(call, n), []
    for block in call.blocks():
        gather.add(block, _Seen.of(block, rows))
        outputs.append(block.p @ call.value)
    output = torch.cat(outputs, dim=-2)
    pattern = gather.mean_pattern()
    errors = torch.zeros(len(STATIC), heads, dtype=torch.float64, device=output.device)
    energy = torch.zeros(heads, dtype=torch.float64, device=output.device)
    for block in call.blocks():
        seen, here = _Seen.of(block, rows), output[..., block.start : block.stop, :]
        static = _static_outputs(call, block, seen, pattern)
        weight = seen.counted[:, None, :, None]
        energy += (here.double().square() * weight).sum(dim=(0, 2, 3))
        errors += torch.stack([((out - here).double().square() * weight).sum(dim=(0, 2, 3)) for out in static])
    return output, gather.statistics(energy.cpu(), errors.cpu())


@dataclass(frozen=True)
class _Seen:
    """What the rows of a block see: `visible` keys, how many, the first of them, and whether the row is counted."""

    visible: Bool[Tensor, "batch rows keys"]
    count: Float[Tensor, "batch rows"]
    first: Int[Tensor, "batch rows"]
    previous: Int[Tensor, "batch rows"]
    counted: Bool[Tensor, "batch rows"]

    @classmethod
    def of(cls, block: RowBlock, rows: Bool[Tensor, "batch n"]) -> "_Seen":
        batch, _, here, keys = block.p.shape
        if block.visible is None:
            visible = torch.ones(batch, here, keys, dtype=torch.bool, device=block.p.device)
        else:
            visible = block.visible[:, 0]  # one mask serves all heads in every family
        first = visible.to(torch.uint8).argmax(dim=-1)
        position = torch.arange(block.start, block.stop, device=block.p.device)
        before = (position - 1).clamp(min=0).expand(batch, -1)
        before = torch.where(visible.gather(-1, before[..., None])[..., 0], before, first)
        count = visible.sum(dim=-1)
        counted = rows[:, block.start : block.stop] & (count > 0)
        return cls(visible, count.clamp(min=1).to(block.p.dtype), first, before, counted)


class _Gathered:
    """The first pass over one layer: running measures, and attention by distance."""

    def __init__(self, call: AttentionCall, n: int) -> None:
        heads, device = call.query.shape[1], call.query.device
        zeros = torch.zeros(heads, dtype=torch.float64, device=device)
        self.score_range, self.tv_max = zeros.clone(), zeros.clone()
        self.tv, self.first, self.entropy = zeros.clone(), zeros.clone(), zeros.clone()
        self.rows = 0
        self.keys = call.key.shape[-2]
        # Distance i − j, from −(keys − 1) to n − 1, shifted to start at 0.
        self.mass = torch.zeros(heads, n + self.keys - 1, dtype=torch.float64, device=device)
        self.times = torch.zeros(n + self.keys - 1, dtype=torch.float64, device=device)

    def add(self, block: RowBlock, seen: _Seen) -> None:
        """Take in a block of rows."""
        p, visible, counted = block.p, seen.visible[:, None], seen.counted[:, None]
        least = block.scores.masked_fill(~visible, float("inf")).amin(dim=-1)
        most = block.scores.masked_fill(~visible, float("-inf")).amax(dim=-1)
        # Σ_j |p_j − u_j|/2 over what is seen; what is not seen has neither.
        tv = ((p - visible / seen.count[:, None, :, None]).abs().sum(dim=-1)) / 2
        first = p.gather(-1, seen.first[:, None, :, None].expand(-1, p.shape[1], -1, 1))[..., 0]
        for name, value in (("score_range", most - least), ("tv_max", tv)):
            largest = value.masked_fill(~counted, 0.0).amax(dim=(0, 2)).double()
            setattr(self, name, torch.maximum(getattr(self, name), largest))
        self.tv += (tv * counted).double().sum(dim=(0, 2))
        self.first += (first * counted).double().sum(dim=(0, 2))
        self.entropy += (entropy(p) * counted).double().sum(dim=(0, 2))
        self.rows += int(seen.counted.sum())
        self._add_distances(block, seen)

    def _add_distances(self, block: RowBlock, seen: _Seen) -> None:
        elsewhere = seen.visible & seen.counted[..., None]
        elsewhere = elsewhere.scatter(-1, seen.first[..., None], False)
        distance = _distance(block, self.keys).reshape(-1)
        mass = (block.p * elsewhere[:, None]).sum(dim=0).reshape(block.p.shape[1], -1)
        self.mass.index_add_(1, distance, mass.double())
        self.times.index_add_(0, distance, elsewhere.sum(dim=0).reshape(-1).double())

    def mean_pattern(self) -> tuple[Float[Tensor, "heads distances"], Float[Tensor, " heads"]]:
        """Mean attention by distance, and on the first token seen."""
        return self.mass / self.times.clamp(min=1), self.first / max(self.rows, 1)

    def statistics(self, energy: Float[Tensor, " heads"], static: Float[Tensor, "patterns heads"]) -> HeadStatistics:
        """The measures of the rows taken in."""
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
    """i − j + keys − 1 for the rows i and keys j of a block."""
    device = block.p.device
    rows = torch.arange(block.start, block.stop, device=device)
    return rows[:, None] - torch.arange(keys, device=device) + keys - 1


def _static_outputs(
    call: AttentionCall,
    block: RowBlock,
    seen: _Seen,
    pattern: tuple[Float[Tensor, "heads distances"], Float[Tensor, " heads"]],
) -> list[Float[Tensor, "batch heads rows v"]]:
    """What the rows of a block would have got from each static pattern, in the order of STATIC."""
    value = call.value
    uniform = (seen.visible / seen.count[..., None]).to(value.dtype)
    by_distance, on_first = (part.to(value.dtype) for part in pattern)
    mean = by_distance[:, _distance(block, value.shape[-2])] * seen.visible[:, None]
    place = seen.first[:, None, :, None].expand(-1, mean.shape[1], -1, 1)
    mean = mean.scatter(-1, place, on_first[None, :, None, None].expand(place.shape))
    total = mean.sum(dim=-1, keepdim=True)
    mean = torch.where(total > 0, mean / total, uniform[:, None])

    def picked(index: Int[Tensor, "batch rows"]) -> Float[Tensor, "batch heads rows v"]:
        return value.gather(-2, index[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[-1]))

    return [uniform[:, None] @ value, picked(seen.first), picked(seen.previous), mean @ value]
