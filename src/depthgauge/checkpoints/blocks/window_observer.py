"""What is observed on a window: the loss, the residuals of the states, the heads, and the scores of the layers.

The statistics of heads are computed in blocks of rows, in two passes of each layer: the first one computes the output,
the measures and the mean attention pattern; the second one compares the output with the outputs of static patterns.

A published score predicts, from one forward pass, how much a layer matters. It is one number per layer; a larger score
means that the layer changes its input more. All scores use the states before the final norm, the input of layer 0
included. Their names and the what-if that each predicts are in `results.labels.SCORES`.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.progress import Step
from depthgauge.checkpoints.blocks.attention_calls import AttentionCall, RowBlock, layer_plan
from depthgauge.checkpoints.blocks.block_runner import Change, Stack, changed, hidden_in, unusual_states
from depthgauge.checkpoints.blocks.model_output import accuracy, window_losses
from depthgauge.checkpoints.blocks.what_if import DenseStates
from depthgauge.checkpoints.inputs.windows import Inputs
from depthgauge.checkpoints.weights.families import Family
from depthgauge.checkpoints.weights.load import BY_TARGETS
from depthgauge.theory.measures.quantities import VisibleKeys, residual_sizes, row_measures

# --- Published scores that predict, from one forward pass, how much a layer matters ----------------------------------


def block_influence(before: Float[Tensor, "batch n d"], after: Float[Tensor, "batch n d"]) -> float:
    """Return 1 − mean over tokens of cos(x_ℓ, x_{ℓ+1}), ShortGPT's score of a block."""
    return float(1 - _cosine(before, after).mean())


def angular_distance(before: Float[Tensor, "batch n d"], after: Float[Tensor, "batch n d"]) -> float:
    """Return arccos(cos(x_ℓ, x_{ℓ+1}))/π at the last token, UIDL's score of a single block."""
    return float(_cosine(before[:, -1:], after[:, -1:]).clamp(-1, 1).arccos().mean() / math.pi)


def added_influence(before: Float[Tensor, "batch n d"], added: Float[Tensor, "batch n d"]) -> float:
    """Return 1 − mean over tokens of cos(y, y + f(y)), LLM-Drop's score of a sublayer f that reads y and adds f(y)."""
    return float(1 - _cosine(before, before + added).mean())


def _cosine(x: Float[Tensor, "batch n d"], y: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n"]:
    return F.cosine_similarity(x.double(), y.to(x.device).double(), dim=-1)


class SublayerScores:
    """A score of the attention and of the MLP of every block, recorded with hooks during a forward pass.

    A block has NaN if its family is not known, if it has one sublayer, whose scores are those of the block, or more
    than two.

    `measure` maps y, the stream that a sublayer reads, and f(y), what it adds, to the score. The default is LLM-Drop's.
    f(y) is the output of the sublayer times `Family.multiplier`.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        families: Sequence[Family | None],
        measure: Callable[[Tensor, Tensor], Any] = added_influence,
    ) -> None:
        self.blocks, self.families, self.measure = blocks, families, measure
        self.attention: list[Any] = [math.nan] * len(blocks)
        self.mlp: list[Any] = [math.nan] * len(blocks)

    @contextmanager
    def listening(self, layers: Iterable[int] | None = None) -> Iterator[None]:
        """Score every forward pass of some layers within this context; the scores of the last pass are kept."""
        with ExitStack() as hooks:
            for layer in range(len(self.blocks)) if layers is None else layers:
                family = self.families[layer]
                if family is not None and len(family.sublayers) == 2:
                    self._listen(hooks, layer, self.blocks[layer], family)
            yield

    def _listen(self, hooks: ExitStack, layer: int, block: nn.Module, family: Family) -> None:
        read: list[Tensor] = []  # [y of the attention, y of the MLP]

        def multiplied(output: Tensor, stream: Tensor) -> Tensor:
            output = output.reshape(stream.shape)  # some blocks flatten batch and tokens in between (OPT)
            return output if family.multiplier == 1.0 else family.multiplier * output

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read[:] = [hidden_in(args, kwargs)]

        def attention(output: Tensor) -> Tensor:
            read[0] = read[0].to(output.device)  # with a device map, blocks may be on different devices
            added = multiplied(output, read[0])
            self.attention[layer] = self.measure(read[0], added)
            read.append(read[0] if family.order == "parallel" else read[0] + added)
            return output

        def between(normed: Tensor) -> Tensor:
            read[1] = normed
            return normed

        def mlp(output: Tensor) -> Tensor:
            self.mlp[layer] = self.measure(read[1], multiplied(output, read[1]))
            read.clear()
            return output

        hooks.enter_context(block.register_forward_pre_hook(before, with_kwargs=True))
        listeners: dict[str | None, Change] = {family.attention: attention, family.mlp: mlp}
        if family.order == "post":
            listeners[family.attention_norm] = between
        for path, listener in listeners.items():
            if path is not None:
                hooks.enter_context(changed(block.get_submodule(path), listener))


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation of two lists; None for a constant list, a NaN, or fewer than 3 entries."""
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1 or any(map(math.isnan, (*x, *y))):
        return None
    # Importing scipy.stats takes more time than gauging a tiny model.
    ranks = [[sum(w < v for w in values) + (values.count(v) + 1) / 2 for v in values] for values in (x, y)]
    return statistics.correlation(*ranks)


# --- Statistics of every attention head on text, computed in blocks of rows ------------------------------------------

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


# --- All that is observed on a window ---------------------------------------------------------------------------------


class WindowObserver:
    """One window while it is observed.

    - `sublayers`: the scores of sublayers
    - `record`: what was observed, as JSON
    """

    def __init__(self, stack: Stack, plans: bool) -> None:
        """Prepare for a pass over the blocks; `plans`: make attention plans."""
        self.checkpoint, self.plans = stack.checkpoint, plans
        self.sublayers = SublayerScores(stack.blocks, stack.checkpoint.families)
        self.record: dict[str, Any] = {"heads": [], "fast": []}

    def watch(self, call: AttentionCall) -> Tensor:
        """Observe the attention of the next layer and return its output."""
        if self.plans:
            self.record["fast"].append(layer_plan(call).to_json())
        output, statistics = head_statistics(call)
        self.record["heads"].append(statistics.to_json())
        return output

    def finish(self, window: Inputs, states: tuple[Tensor, ...], output: Tensor) -> None:
        """Add the loss, and what the states X_0 … X_L show."""
        objective, steps = self.checkpoint.objective, list(pairwise(states))
        losses = window_losses(objective, output, window, output) if objective in BY_TARGETS else None
        self.record["loss"] = None if losses is None else float(losses.mean())
        if objective == "labels":
            self.record["accuracy"] = accuracy(output, window)
        self.record["residuals"] = [
            {
                center: {norm: [float(size.value), float(size.ratio)] for norm, size in sizes.items()}
                for center, sizes in residual_sizes(state.float()).items()
            }
            for state in states
        ]
        by_sublayer = {"attention_cosine": self.sublayers.attention, "mlp_cosine": self.sublayers.mlp}
        self.record["scores"] = {
            "block_influence": [block_influence(x, y) for x, y in steps],
            "angular_distance": [angular_distance(x, y) for x, y in steps],
            **{name: found for name, found in by_sublayer.items() if not all(map(math.isnan, found))},
        }


def observe_window(stack: Stack, window: Inputs, *, plans: bool) -> WindowObserver:
    """Observe one window in passes of the model itself, whose blocks cannot be called one by one."""
    observer, base = WindowObserver(stack, plans), stack.full(window)
    with observer.sublayers.listening():
        stack.run(window, watch=observer.watch)
    observer.finish(window, () if unusual_states(base.states, window) else base.states, base.output)
    return observer


@torch.no_grad()
def observe_blocks(dense: DenseStates, *, plans: bool, progress: Step) -> list[WindowObserver]:
    """Observe several windows block by block; `plans`: make attention plans for the first one."""
    runner, windows = dense.runner, [dense.inputs[place : place + 1] for place in range(len(dense.inputs))]
    observers = [WindowObserver(runner, plans and not place) for place in range(len(windows))]
    for layer in range(len(runner)):
        progress(layer, len(runner), f"heads, layer {layer}")
        with runner.checkpoint.resident(layer):
            for place, observer in enumerate(observers):
                runner.session.begin(watch=observer.watch)
                with observer.sublayers.listening([layer]):
                    runner.through([layer], dense.at(layer)[place : place + 1], windows[place])
    for place, observer in enumerate(observers):
        states = tuple(dense.at(k)[place : place + 1] for k in range(len(runner) + 1))
        output = runner.output(runner.on_device(states[-1]), windows[place])
        observer.finish(windows[place], states, output)
    return observers
