"""The shrunk model while it is being made: the dense model with some blocks left out and some weights changed."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.surgery.block_runner import BlockRunner
from depthgauge.surgery.objective import Objective
from depthgauge.surgery.repair import Change


class Student:
    """A model with some blocks removed and some weights changed.

    The weights are changed in the model itself; `restore` puts the original ones back.

    - `runner`: the model's blocks
    - `kept`: the blocks that remain, in order
    """

    def __init__(self, runner: BlockRunner) -> None:
        self.runner = runner
        self.kept = list(range(len(runner)))
        self._originals: dict[nn.Parameter, Tensor] = {}

    @property
    def removed(self) -> tuple[int, ...]:
        """The removed blocks, in order."""
        return tuple(layer for layer in range(len(self.runner)) if layer not in self.kept)

    def keep_all_but(self, removed: Iterable[int]) -> None:
        """Put all original weights back and remove these blocks."""
        self.restore()
        gone = set(removed)
        self.kept = [layer for layer in range(len(self.runner)) if layer not in gone]

    def following(self, layer: int) -> int:
        """Return the depth at which the dense state matches the output of a kept layer: the next kept layer, or L."""
        later = [other for other in self.kept if other > layer]
        return later[0] if later else len(self.runner)

    def apply(self, change: Change, step: float) -> None:
        """Change weights for good; `restore` can still undo it."""
        for parameter, before in zip(change.parameters, change.before, strict=True):
            self._originals.setdefault(parameter, before)
        change.apply(step)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the original weights back."""
        for parameter, value in self._originals.items():
            parameter.copy_(value)
        self._originals.clear()


def suffix_objective(
    runner: BlockRunner,
    objective: Objective,
    layers: Sequence[int],
    states: Float[Tensor, "windows n d"],
    windows: int | None = None,
) -> float:
    """Return the mean objective after running the given layers from `states`, on the first `windows` windows."""
    part = slice(0, windows)
    return float(objective(runner.run(layers, states[part]), part).mean())
