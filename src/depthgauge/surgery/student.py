"""The shrunk model while it is being made: the dense model with some blocks left out and some weights changed.

The dense model's states on the calibration windows are kept on the GPU, in memory or on disk, whichever has room.
"""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge._journal import Journal
from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.load import Checkpoint, free_memory
from depthgauge.checkpoints.model_output import model_output, relative_distance, token_losses
from depthgauge.progress import Durations, Step, silent
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.surgery.certify import windows_needed
from depthgauge.surgery.extract import extract, require_supported
from depthgauge.surgery.verify_removal import require_same_output

STATES_SHARE = 0.35
"""The share of free memory that states may take, of one set of windows or of all sets of blocks in a pass."""


@dataclass(frozen=True)
class Effort:
    """Numbers of windows, candidates and training steps.

    - `fit`, `select`, `certify`: windows of each part
    - `ranking`: selection windows on which the search ranks blocks
    - `breadth`: blocks that are ranked at each removal, and runs of adjacent blocks
    - `swaps`: exchanges of a removed and a kept block that are tried after the search
    - `finalists`: sets of blocks that are repaired and compared as finished models
    - `steps`, `tokens`: training steps of the repair, and tokens per step
    - `window`: tokens per window, unless the model's context is shorter
    """

    fit: int
    select: int
    certify: int
    ranking: int
    breadth: int
    swaps: int
    finalists: int
    steps: int
    tokens: int
    window: int = 512


EFFORT: Mapping[str, Effort] = {
    "quick": Effort(48, 24, 60, 8, 6, 0, 1, 80, 512, window=256),
    "default": Effort(192, 64, 120, 16, 8, 12, 3, 150, 2048),
    "high": Effort(384, 128, 240, 32, 10**6, 48, 6, 400, 4096),
}


def effort_of(settings: ShrinkOptions) -> Effort:
    """Return the effort, with enough certify windows for the requested confidence."""
    effort = EFFORT[settings.effort]
    return replace(effort, certify=max(effort.certify, windows_needed(confidence=settings.confidence)))


class DenseStates:
    """Token ids `ids`, and the dense model's states X_0 … X_L on them; `at` returns one of them.

    With `all_layers=False`, only the first and the last are kept.
    """

    def __init__(
        self, runner: BlockRunner, ids: Int[Tensor, "windows n"], *, all_layers: bool = True, progress: Step = silent
    ) -> None:
        self.ids, self.layers = ids, len(runner)
        first = runner.embed(ids)
        self._kept = list(range(self.layers + 1)) if all_layers else [0, self.layers]
        self._room = self._memory(first, len(self._kept), runner.device)
        self._room[0].copy_(first)
        current = self._room[0]
        for layer in range(self.layers):
            progress(layer, self.layers, f"dense model, layer {layer}")
            place = self._room[layer + 1 if all_layers else 1]
            place.copy_(runner.through([layer], current))
            current = place

    def at(self, layer: int) -> Float[Tensor, "windows n d"]:
        """Return X_ℓ."""
        return self._room[self._kept.index(layer)]

    @property
    def final(self) -> Float[Tensor, "windows n d"]:
        """X_L, the states after the last block."""
        return self._room[-1]

    def _memory(self, state: Tensor, count: int, device: torch.device) -> Tensor:
        """Return memory for `count` states: on the GPU, in main memory, or in a temporary file."""
        shape, needed = (count, *state.shape), count * state.numel() * state.itemsize
        for place in (*([device] if device.type == "cuda" else []), torch.device("cpu")):
            if needed < STATES_SHARE * free_memory(place):
                return torch.empty(shape, dtype=state.dtype, device=place)
        self._folder = tempfile.TemporaryDirectory(prefix="depthgauge-")
        path = Path(self._folder.name) / "states"
        flat = torch.from_file(str(path), shared=True, size=count * state.numel(), dtype=state.dtype)
        return flat.reshape(shape)


class Objective:
    """The objective on fixed windows, one number per window; smaller is better.

    - a causal language model: the mean over tokens of −log p(next token), in nats
    - other models: ‖output − dense output‖F / ‖dense output‖F of the final states

    `dense` has X_L, the states of the dense model after its last block.
    """

    def __init__(self, runner: BlockRunner, ids: Int[Tensor, "windows n"], dense: Float[Tensor, "windows n d"]) -> None:
        self.runner, self.ids, self.dense = runner, ids, dense
        self.is_loss = runner.checkpoint.objective == "loss"

    @torch.no_grad()
    def __call__(self, states: Float[Tensor, "windows n d"], windows: slice = slice(None)) -> Float[Tensor, " windows"]:
        """Return the objective of every window, given the states after the last block on these windows."""
        ids, dense, found = self.ids[windows], self.dense[windows], []
        for start, part in self.runner.batches(states):
            these = slice(start, start + len(part))
            found.append(self._measure(self.runner.output(part), ids[these], dense[these]))
        return torch.cat(found)

    @torch.no_grad()
    def of_model(self, model: Any) -> float:
        """Return the mean objective of a complete transformers model on the same windows."""
        parts = zip(*(torch.split(one, self.runner.batch) for one in (self.ids, self.dense)), strict=True)
        found = [
            self._measure(model_output(model, ids.to(self.runner.device), self.is_loss), ids, dense)
            for ids, dense in parts
        ]
        return float(torch.cat(found).mean())

    def _measure(self, output: Tensor, ids: Tensor, dense: Tensor) -> Float[Tensor, " batch"]:
        if self.is_loss:
            return token_losses(output, ids).double().mean(dim=1).cpu()
        reference = self.runner.output(dense.to(self.runner.device, output.dtype))
        return relative_distance(output, reference).cpu()


class Student:
    """A model with some blocks removed and some weights changed.

    The weights are changed in the model itself; `restore` puts the original ones back. Use it as a context manager,
    which calls `restore` at the end.

    - `kept`: the blocks that remain, in order
    - `runner`: the model's blocks
    - `fit`, `select`: the dense model on the windows that repairs are fitted on and choices are compared on
    - `objective`: the objective on the selection windows; `dense_losses` are its values for the dense model
    - `effort`, `repairs`: how much work to do, and whether weights may change
    - `journal`: the finished steps of an interrupted run
    - `durations`: how long search, repair and healing took
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
        durations: Durations | None = None,
        progress: Step = silent,
    ) -> None:
        require_supported(checkpoint)
        self.durations = durations or Durations()
        self.checkpoint, self.effort = checkpoint, effort
        self.repairs = repair = repair and any(checkpoint.families)
        self.journal, self.progress = journal or Journal(), progress
        self.runner = BlockRunner(checkpoint, select[:1])
        self.fit = DenseStates(self.runner, fit, all_layers=repair, progress=progress)
        self.select = DenseStates(self.runner, select, progress=progress)
        self.objective = Objective(self.runner, select, self.select.final)
        self.dense_losses = self.objective(self.select.final)
        self.kept = list(range(len(self.runner)))
        self._originals: dict[nn.Parameter, Tensor] = {}

    def __enter__(self) -> "Student":
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    @property
    def dense(self) -> float:
        """The mean objective of the dense model on the selection windows."""
        return float(self.dense_losses.mean())

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

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the original values of weights that are about to change, so that `restore` can undo it."""
        for parameter in parameters:
            if parameter not in self._originals:
                self._originals[parameter] = parameter.detach().clone()

    def changed(self, layer: int) -> list[str]:
        """Return the names of the weights of a block that differ from the original ones."""
        weights, known = self.runner.blocks[layer].named_parameters(), self._originals
        return [name for name, weight in weights if weight in known and not torch.equal(weight, known[weight])]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the original weights back."""
        for parameter, value in self._originals.items():
            parameter.copy_(value)
        self._originals.clear()

    @property
    def first_gap(self) -> int:
        """The number of kept blocks before the first removed one; the shrunk model equals the dense one up to there."""
        return next((place for place, layer in enumerate(self.kept) if place != layer), len(self.kept))

    def losses(self) -> Float[Tensor, " select"]:
        """Return the objective of the shrunk model on every selection window."""
        place = max(0, self.first_gap - 1)
        return self.objective(self.runner.through(self.kept[place:], self.select.at(place)))

    def model(self) -> Any:
        """Return the present state of the shrunk model as a new transformers model, after checking its output."""
        made = extract(self.checkpoint, self.kept)
        require_same_output(made, self.runner, self.kept, self.select.ids[:1])
        return made
