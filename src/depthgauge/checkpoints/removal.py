"""Measured effective depth: greedy removal of blocks, where every step measures all remaining candidates again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.what_if import objective
from depthgauge.progress import Step, silent


@dataclass(frozen=True)
class Removal:
    """One step of greedy removal.

    - `layer`: the block removed in this step
    - `losses`: total loss of the model after this step relative to the intact model, one value per window
    """

    layer: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class MeasuredDepth:
    """The smallest number of layers that greedy removal found to keep the loss within `increase`.

    - `increase`: largest mean loss allowed
    - `layers`: number of layers that remain
    - `steps`: the removals that stay within `increase`
    - `stopped`: why there is no further step: `increase` (the next one exceeds it), `max_removed` or `one layer left`
    """

    increase: float
    layers: int
    steps: tuple[Removal, ...]
    stopped: str


def passes(layers: int, removed: int, known: int = 0) -> float:
    """Return an upper bound on the cost of `removed` greedy steps in forward passes, if the first `known` cost nothing.

    A step that starts with m blocks runs one pass over m blocks and the suffixes after each: m(m + 1)/2 blocks.
    """
    return 1 + sum(left * (left + 1) / 2 / layers for left in range(layers - known, layers - removed, -1))


def next_removal(
    stack: Stack,
    windows: Sequence[Int[Tensor, "batch n"]],
    lost: Sequence[Callable[[Tensor], float]],
    removed: Sequence[int],
    progress: Step = silent,
) -> Removal:
    """Return the block whose removal, in addition to those already `removed`, costs least.

    Args:
        stack: the model's blocks.
        windows: token ids of every window; each candidate is measured on all of them.
        lost: for every window, a function that returns the loss of an output relative to the intact model.
        removed: blocks that are already removed.
        progress: called before every measurement.
    """
    gone, left = frozenset(removed), [layer for layer in range(len(stack)) if layer not in removed]
    losses: dict[int, list[float]] = {layer: [] for layer in left}
    for index, ids in enumerate(windows):
        base = stack.full(ids, skipped=gone)
        for place, layer in enumerate(left):
            label = f"depth, step {len(gone) + 1}, window {index}"
            progress(index * len(left) + place, len(windows) * len(left), label)
            output = stack.run(ids, start=layer + 1, state=base.states[layer], skipped=gone)
            losses[layer].append(lost[index](output))
    return least_missed(losses)


def least_missed(losses: Mapping[int, Sequence[float]]) -> Removal:
    """Return the layer with the smallest mean loss; each layer has one loss per window."""
    layer = min(losses, key=lambda layer: sum(losses[layer]))
    return Removal(layer, tuple(losses[layer]))


def remove_greedily(
    stack: Stack,
    windows: Sequence[Int[Tensor, "1 n"]],
    increase: float,
    max_removed: int | None = None,
    known: Sequence[Removal] = (),
    progress: Step = silent,
) -> Iterator[Removal]:
    """Yield the steps of greedy removal until one exceeds `increase`; that step is yielded too.

    Args:
        stack: the model's blocks.
        windows: token ids of every window.
        increase: largest mean loss allowed.
        max_removed: largest number of steps; by default all blocks but one may be removed.
        known: first steps that were measured before; they are yielded again without measuring.
        progress: called before every measurement.
    """
    most = len(stack) - 1 if max_removed is None else min(max_removed, len(stack) - 1)
    steps: list[Removal] = []
    lost: list[Callable[[Tensor], float]] = []
    while len(steps) < most:
        if len(steps) < len(known):
            step = known[len(steps)]
        else:
            lost = lost or [objective(stack.checkpoint.objective, ids, stack.run(ids)) for ids in windows]
            step = next_removal(stack, windows, lost, [step.layer for step in steps], progress)
        steps.append(step)
        yield step
        if sum(step.losses) / len(step.losses) > increase:
            return


def measured_depth(tried: Sequence[Removal], layers: int, increase: float) -> MeasuredDepth:
    """Summarize the steps of `remove_greedily` on a model with `layers` layers."""
    kept = [step for step in tried if sum(step.losses) / len(step.losses) <= increase]
    limit = "one layer left" if len(kept) == layers - 1 else "max_removed"
    stopped = "increase" if len(kept) < len(tried) else limit
    return MeasuredDepth(increase, layers - len(kept), tuple(kept), stopped)
