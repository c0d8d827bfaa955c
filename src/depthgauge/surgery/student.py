"""The shrunk model while it is being made: the dense model with some blocks left out and some weights changed."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge._journal import Journal
from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.progress import Step, silent
from depthgauge.surgery.effort import Effort
from depthgauge.surgery.extract import extract, require_supported
from depthgauge.surgery.objective import Objective
from depthgauge.surgery.repair import Change
from depthgauge.surgery.states import DenseStates


class Student:
    """A model with some blocks removed and some weights changed.

    The weights are changed in the model itself; `restore` puts the original ones back. Use it as a context manager,
    which calls `restore` at the end.

    - `kept`: the blocks that remain, in order
    - `runner`: the model's blocks
    - `fit`, `select`: the dense model on the windows that repairs are fitted on and choices are compared on
    - `objective`: the objective on the selection windows; `dense` is its value for the dense model
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        fit: Int[Tensor, "fit n"],
        select: Int[Tensor, "select n"],
        *,
        effort: Effort,
        repair: bool = True,
        journal: Journal | None = None,
        progress: Step = silent,
    ) -> None:
        """Run the dense model on the calibration windows.

        Args:
            checkpoint: the model.
            fit: token ids of the windows that repairs are fitted on.
            select: token ids of the windows that candidates and step lengths are compared on, in random order.
            effort: how much work to do.
            repair: whether weights may change.
            journal: finished steps of an interrupted run.
            progress: called as the work advances.
        """
        require_supported(checkpoint)
        self.checkpoint, self.effort, self.repairs = checkpoint, effort, repair
        self.journal, self.progress = journal or Journal(), progress
        self.runner = BlockRunner(checkpoint, select[:1])
        self.fit = DenseStates(self.runner, fit, all_layers=repair, progress=progress)
        self.select = DenseStates(self.runner, select, progress=progress)
        self.objective = Objective(self.runner, select, self.select.final)
        self.dense = float(self.objective(self.select.final).mean())
        self.kept = list(range(len(self.runner)))
        self._originals: dict[nn.Parameter, Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

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
        return next((other for other in self.kept if other > layer), len(self.runner))

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

    def objective_after(
        self, layers: Sequence[int], states: Float[Tensor, "windows n d"], windows: int | None = None
    ) -> float:
        """Return the mean objective after running the given layers from `states`, on the first `windows` windows."""
        part = slice(0, windows)
        return float(self.objective(self.runner.through(layers, states[part]), part).mean())

    def model(self) -> Any:
        """Return the present state of the shrunk model as a new transformers model."""
        return extract(self.checkpoint, self.kept)
