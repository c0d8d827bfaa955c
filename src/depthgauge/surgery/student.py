"""The shrunk model while it is being made: the dense model with some blocks left out and some weights changed.

The dense model's states on the calibration windows are kept on the GPU, in memory or on disk, whichever has room.
"""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge._journal import Journal
from depthgauge.checkpoints.block_runner import BlockRunner
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import BY_TARGETS, Checkpoint, free_memory
from depthgauge.checkpoints.model_output import model_output, require_output, window_losses
from depthgauge.checkpoints.samples import ENCODED, Inputs, Samples
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


@torch.no_grad()
def encoded(checkpoint: Checkpoint, inputs: Inputs) -> Inputs:
    """Return the inputs of an encoder–decoder model with the states of its encoder, if that is not what is shrunk.

    A model that needs more than the states, such as those of its router, keeps its inputs.
    """
    if checkpoint.stack != "decoder" or not isinstance(inputs, Samples):
        return inputs
    sources = Samples(inputs.sources)
    given = {name: value for name, value in inputs.inputs.items() if name != checkpoint.reads}
    states = [
        checkpoint.model.get_encoder()(
            **sources[row : row + 1].keywords(checkpoint.device, checkpoint.model.dtype)
        ).last_hidden_state.cpu()
        for row in range(len(sources))
    ]
    found = Samples({**given, ENCODED: torch.cat(states)}, inputs.targets)
    try:
        require_output(checkpoint, found)
    except CheckpointError:
        return inputs
    return found


class DenseStates:
    """Windows `inputs`, and the dense model's states X_0 … X_L on them; `at` returns one of them.

    With `all_layers=False`, only the first and the last are kept.
    """

    def __init__(
        self, runner: BlockRunner, inputs: Inputs, *, all_layers: bool = True, progress: Step = silent
    ) -> None:
        self.inputs, self.layers = inputs, len(runner)
        first = runner.embed(inputs)
        self._kept = list(range(self.layers + 1)) if all_layers else [0, self.layers]
        self._room = self._memory(first, len(self._kept), runner.device)
        self._room[0].copy_(first)
        current = self._room[0]
        for layer in range(self.layers):
            progress(layer, self.layers, f"dense model, layer {layer}")
            place = self._room[layer + 1 if all_layers else 1]
            place.copy_(runner.through([layer], current, inputs))
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
    """The objective on fixed windows, one number per window; smaller is better. See `window_losses`.

    `dense` has X_L, the states of the dense model after its last block.
    """

    def __init__(self, runner: BlockRunner, inputs: Inputs, dense: Float[Tensor, "windows n d"]) -> None:
        self.runner, self.inputs, self.dense = runner, inputs, dense

    @torch.no_grad()
    def __call__(self, states: Float[Tensor, "windows n d"], windows: slice = slice(None)) -> Float[Tensor, " windows"]:
        """Return the objective of every window, given the states after the last block on these windows."""
        inputs, dense, found = self.inputs[windows], self.dense[windows], []
        for start, part in self.runner.batches(states):
            these = slice(start, start + len(part))
            found.append(self._measure(self.runner.output(part, inputs[these]), inputs[these], dense[these]))
        return torch.cat(found)

    @torch.no_grad()
    def of_model(self, model: Any) -> float:
        """Return the mean objective of a complete transformers model on the same windows."""
        checkpoint, found = replace(self.runner.checkpoint, model=model), []
        for start in range(0, len(self.inputs), self.runner.batch):
            these = slice(start, start + self.runner.batch)
            inputs = self.inputs[these]
            found.append(self._measure(model_output(checkpoint, inputs), inputs, self.dense[these]))
        return float(torch.cat(found).mean())

    def _measure(self, output: Tensor, inputs: Inputs, dense: Tensor) -> Float[Tensor, " batch"]:
        objective, reference = self.runner.checkpoint.objective, output
        if objective not in BY_TARGETS:
            reference = self.runner.output(dense.to(self.runner.device, output.dtype), inputs)
        return window_losses(objective, output, inputs, reference).cpu()


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
        fit: Inputs,
        select: Inputs,
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
        fit, select = encoded(checkpoint, fit), encoded(checkpoint, select)
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
        """Give weights that are about to change their own memory, so that `restore` can put the original ones back."""
        stream = self.checkpoint.stream
        for parameter in parameters:
            if parameter not in self._originals:
                self._originals[parameter] = parameter.data
                parameter.data = parameter.data.clone() if stream is None else stream.original(parameter)

    def changed(self, layer: int) -> list[str]:
        """Return the names of the weights of a block that differ from the original ones."""
        weights, known = self.runner.blocks[layer].named_parameters(), self._originals
        return [name for name, weight in weights if weight in known and not torch.equal(weight, known[weight])]

    def restore(self) -> None:
        """Put the original weights back. A model that was made before keeps the changed ones."""
        for parameter, value in self._originals.items():
            parameter.data = value
        self._originals.clear()

    @property
    def first_gap(self) -> int:
        """The number of kept blocks before the first removed one; the shrunk model equals the dense one up to there."""
        return next((place for place, layer in enumerate(self.kept) if place != layer), len(self.kept))

    def losses(self) -> Float[Tensor, " select"]:
        """Return the objective of the shrunk model on every selection window."""
        place = max(0, self.first_gap - 1)
        return self.objective(self.runner.through(self.kept[place:], self.select.at(place), self.select.inputs))

    def model(self) -> Any:
        """Return the present state of the shrunk model as a new transformers model, after checking its output."""
        made = extract(self.checkpoint, self.kept, copies=self.checkpoint.source is None)
        require_same_output(made, self.runner, self.kept, self.select.inputs[:1])
        return made
