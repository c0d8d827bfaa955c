"""Measured effective depth: blocks removed one by one, the least missed first, measured anew each time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from depthgauge.checkpoints.bootstrap import Interval, bootstrap
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.what_if import objective
from depthgauge.progress import Step, silent


@dataclass(frozen=True)
class Removal:
    """A block that was removed, and what the model then lost in all, window by window."""

    layer: int
    losses: tuple[float, ...]

    def interval(self, seed: int) -> Interval:
        """The mean loss and its interval."""
        return bootstrap(self.losses, seed)


@dataclass(frozen=True)
class MeasuredDepth:
    """The fewest layers that greedy removal found to keep the loss within `increase`.

    `steps` are the removals that were kept; `stopped` says why there is no further one: the `increase` would be
    exceeded, `max_removed` was reached, or one layer is left.
    """

    increase: float
    layers: int
    steps: tuple[Removal, ...]
    stopped: str

    def to_json(self, seed: int) -> dict[str, Any]:
        """As in the result JSON."""
        last = self.steps[-1].interval(seed).to_json() if self.steps else {"loss": 0.0, "low": 0.0, "high": 0.0}
        return {
            "increase": self.increase,
            "layers": self.layers,
            "removed": [step.layer for step in self.steps],
            **last,
            "steps": [{"removed": step.layer, **step.interval(seed).to_json()} for step in self.steps],
            "stopped": self.stopped,
        }


def passes(layers: int, removed: int, known: int = 0) -> float:
    """What `removed` steps of greedy removal cost at most, in whole forward passes, if the first `known` are known."""
    return 1 + sum(left * (left + 1) / 2 / layers for left in range(layers - known, layers - removed, -1))


def next_removal(
    stack: Stack,
    windows: Sequence[Int[Tensor, "1 n"]],
    lost: Sequence[Callable[[Tensor], float]],
    removed: Sequence[int],
    progress: Step = silent,
) -> Removal:
    """The block that is missed least when those `removed` are gone already, each candidate measured on every window.

    `lost` says of an output how much is lost, window by window.
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
    """The layer with the least mean loss."""
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
    """Every removal tried, the last of which may exceed `increase`; `known` are first ones, measured before."""
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
    """What the removals tried amount to."""
    kept = [step for step in tried if sum(step.losses) / len(step.losses) <= increase]
    limit = "one layer left" if len(kept) == layers - 1 else "max_removed"
    stopped = "increase" if len(kept) < len(tried) else limit
    return MeasuredDepth(increase, layers - len(kept), tuple(kept), stopped)
