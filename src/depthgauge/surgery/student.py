"""The shrunk model while it is being made: the dense model with some blocks left out and some weights changed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted, number
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Durations, Step, silent
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.blocks.model_output import model_output
from depthgauge.checkpoints.blocks.probe import (
    NotDerivedError,
    kind_of,
    relative_difference,
    rounding_tolerance,
    traced_runner,
)
from depthgauge.checkpoints.blocks.what_if import DenseStates, Edit, Objective, edited_losses, encoded
from depthgauge.checkpoints.inputs.windows import Inputs, Samples, as_samples, shortened
from depthgauge.checkpoints.source.library import CheckpointError, quiet, short
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.results.shrink_record import ShrinkOptions
from depthgauge.surgery.certify import windows_needed
from depthgauge.surgery.extract import extract, require_supported
from depthgauge.surgery.fresh_process import generations, prompt_of

# --- Verify that blocks can be removed from a model: what is left computes what the other blocks compute -------------

TRIED = 8
"""How many of the first blocks are tried until one can be removed; ModernBERT builds its first block differently."""


def first_removable(checkpoint: Checkpoint, inputs: Inputs) -> tuple[int, str]:
    """Return the first block whose removal is verified, and why those before it cannot be removed.

    A model is extracted without the block, which shifts the indices of all later ones. It must have the blocks that its
    configuration gives it, and compute what the blocks of the dense model compute one by one. If the blocks are of
    different kinds, each set of blocks is verified by the search, and the result is 0 if any block can be removed.

    Raises:
        CheckpointError: the model is not supported, or the removal of none of the tried blocks is verified.
    """
    require_supported(checkpoint)
    try:
        runner, _ = traced_runner(checkpoint, inputs)
    except (NotDerivedError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"blocks cannot be removed from {checkpoint.name}: {short(error)}") from error
    reasons: list[str] = []
    layers, mixed = checkpoint.layers, is_mixed(runner)
    # Without its last block, a model has all others at their places.
    for layer in dict.fromkeys([*range(min(TRIED, layers)), *([layers - 1] if mixed else [])]):
        reason = None if layers == 1 else why_not_removed(runner, (layer,), inputs[:1])
        if reason is None:
            return (0, "") if mixed else (layer, next(iter(reasons), ""))
        reasons.append(reason)
    raise CheckpointError(reasons[-1 if mixed else 0])


def is_mixed(runner: BlockRunner) -> bool:
    """Return whether the blocks are of different kinds; some sets of them may then not be removed together."""
    return len(set(map(kind_of, runner.blocks))) > 1


@torch.no_grad()
def why_not_removed(runner: BlockRunner, removed: Collection[int], inputs: Inputs) -> str | None:
    """Return why no model can be built without these blocks that runs and computes what the others do, or None.

    The model is also run as its users run it, with a cache: LFM2, for example, needs a layer of attention for that. An
    encoder–decoder model generates two tokens: the cache of T5 needs as many blocks in the encoder as in the decoder.
    """
    checkpoint, kept = runner.checkpoint, [layer for layer in range(len(runner)) if layer not in removed]
    samples = as_samples(shortened(inputs, 2), checkpoint.reads)
    try:
        with quiet():
            made = extract(checkpoint, kept, copies=False)
            require_same_output(made, runner, kept, inputs)
            made(**samples.keywords(runner.device, made.dtype))
            if checkpoint.stack is not None and checkpoint.objective == "loss" and checkpoint.reads in samples.inputs:
                _require_generation(replace(checkpoint, model=made, config=made.config), samples)
    except InputError as error:
        return str(error)
    except Exception as error:  # a library refuses a configuration or fails in a forward pass in many ways
        return f"without the blocks {sorted(removed)}, {checkpoint.name} cannot be built or run: {short(error)}"
    return None


def _require_generation(checkpoint: Checkpoint, samples: Samples) -> None:
    """Raise unless an encoder–decoder model generates two tokens."""
    try:
        generations(checkpoint.model, prompt_of(samples.inputs, None), 2)
    except Exception as error:  # a library fails in many ways
        stacks = zip(checkpoint.roots, checkpoint.spans, strict=True)
        numbers = " and ".join(f"{counted(len(span), 'block')} in its {name}" for name, span in stacks)
        raise CheckpointError(
            f"with {numbers}, {checkpoint.name} cannot generate in transformers: {short(error)}; keep other blocks"
        ) from error


@torch.no_grad()
def require_same_output(model: Any, runner: BlockRunner, kept: Sequence[int], inputs: Inputs) -> None:
    """Raise unless an extracted model computes what the blocks `kept` of the dense model compute one by one.

    The tokens are as many as those of the runner's example.
    """
    checkpoint = runner.checkpoint
    expected = runner.output(runner.through(kept, runner.embed(inputs), inputs).to(runner.device), inputs)
    found = model_output(replace(checkpoint, model=model), inputs)
    off = relative_difference(found, expected)
    if not off <= rounding_tolerance(expected.dtype):
        removed = [layer for layer in range(checkpoint.layers) if layer not in kept]
        raise CheckpointError(
            f"blocks {removed} cannot be removed from {checkpoint.name}: the model without them should compute what "
            f"its other blocks compute, but its output differs by {number(off, 2)} of the largest entry"
        )


Removed = tuple[int, ...]
"""Blocks to remove, in increasing order."""


@dataclass(frozen=True)
class Effort:
    """Numbers of windows, candidates and training steps.

    - `fit`, `select`, `certify`: windows of each part
    - `ranking`: selection windows on which the search ranks blocks
    - `breadth`: blocks that are ranked at each removal, and runs of adjacent blocks
    - `swaps`: exchanges of a removed and a kept block that are tried after the search
    - `finalists`: sets of blocks that are compared after least squares
    - `steps`: training steps of the repair
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
    window: int = 512


EFFORT: Mapping[str, Effort] = {
    "quick": Effort(48, 24, 60, 8, 6, 0, 1, 80, window=256),
    "default": Effort(192, 64, 120, 16, 8, 12, 3, 150),
    "high": Effort(384, 128, 240, 32, 10**6, 48, 6, 400),
}


HEADLESS = 4
"""How many times as many steps the repair of a model without a head trains: it costs a fraction per token. On MiniLM,
more steps lowered the distance on other windows."""


def effort_of(settings: ShrinkOptions) -> Effort:
    """Return the effort, with enough certify windows for the requested confidence in the bound of every size."""
    effort, sizes = EFFORT[settings.effort], len(settings.removals)
    needed = windows_needed(confidence=1 - (1 - settings.confidence) / sizes)
    return replace(effort, certify=max(effort.certify, needed))


class Student:
    """A model with some blocks removed and some weights changed.

    The weights are changed in the model itself; `restore` puts the original ones back. Use it as a context manager,
    which calls `restore` at the end.

    - `kept`: the blocks that remain, in order
    - `runner`: the model's blocks, and the processes that divide the windows
    - `example`: the first selection window
    - `fit`, `select`: the dense model on the windows that repairs are fitted on and choices are compared on
    - `objective`: the objective on the selection windows; `dense_losses` are its values for the dense model
    - `effort`, `repairs`: how much work to do, and whether weights may change
    - `journal`: the finished steps of an interrupted run
    - `durations`: how long search, repair and recovery took
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
        self.example = select[:1]
        self.runner = BlockRunner(checkpoint, self.example)
        self.fit = DenseStates(self.runner, fit, all_layers=repair, progress=progress)
        self.select = DenseStates(self.runner, select, progress=progress)
        self.objective = Objective(self.runner, self.select.inputs, self.select.final)
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

    def keep_all_but(self, removed: Iterable[int]) -> None:
        """Put all original weights back and remove these blocks."""
        self.restore()
        gone = set(removed)
        self.kept = [layer for layer in range(len(self.runner)) if layer not in gone]

    def following(self, layer: int) -> int:
        """Return the depth at which the dense state matches the output of a kept layer: the next kept layer, or L."""
        return next((other for other in self.kept if other > layer), len(self.runner))

    def remember(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give weights that are about to change their own memory, so that `restore` can put the original ones back.

        The original ones of a model on a GPU are kept in main memory.
        """
        stream = self.checkpoint.stream
        for parameter in parameters:
            if parameter not in self._originals:
                self._originals[parameter] = parameter.data.cpu()
                parameter.data = parameter.data.clone() if stream is None else stream.original(parameter)

    def changed(self, layer: int) -> list[str]:
        """Return the names of the weights of a block that differ from the original ones."""
        weights, known = self.runner.blocks[layer].named_parameters(), self._originals
        return [name for name, weight in weights if weight in known and not torch.equal(weight.cpu(), known[weight])]

    def restore(self) -> None:
        """Put the original weights back. A model that was made before keeps the changed ones."""
        for parameter, value in self._originals.items():
            parameter.data = value.to(parameter.device)
        self._originals.clear()

    @property
    def first_gap(self) -> int:
        """The number of kept blocks before the first removed one; the shrunk model equals the dense one up to there."""
        return next((place for place, layer in enumerate(self.kept) if place != layer), len(self.kept))

    def losses(self) -> Float[Tensor, " select"]:
        """Return the objective of the shrunk model on every selection window."""
        place = min(max(0, self.first_gap - 1), self._first_changed)
        return self.objective(self.runner.through(self.kept[place:], self.select.at(place), self.select.inputs))

    @property
    def _first_changed(self) -> int:
        """The number of kept blocks before the first one whose weights may differ: a recovery trains all of them."""
        weights = [self.runner.blocks[layer].parameters() for layer in self.kept]
        return next(
            (place for place, own in enumerate(weights) if not self._originals.keys().isdisjoint(own)), len(weights)
        )

    def model(self) -> Any:
        """Return the present state of the shrunk model as a new transformers model, after checking its output."""
        made = extract(self.checkpoint, self.kept, copies=self.checkpoint.source is None)
        require_same_output(made, self.runner, self.kept, self.example)
        return made

    def losses_without(
        self, sets: Iterable[Removed], windows: int | None = None, label: str = "sets of blocks"
    ) -> dict[Removed, Float[Tensor, " windows"]]:
        """Return the objective without each set of blocks, unrepaired, on the first `windows` selection windows.

        All sets that are not known from the journal are measured in one pass over the blocks, or in as few as memory
        allows.
        """
        on = "" if windows is None else f" on {windows}"
        keys = {removed: ",".join(map(str, removed)) + on for removed in sets}
        known: dict[str, list[float]] = self.journal.get("sets", {})
        new, part = [removed for removed, key in keys.items() if key not in known], slice(0, windows)
        models = {tuple(Edit(layer, "block") for layer in removed): keys[removed] for removed in new}
        if new:
            self.restore()
        for found in edited_losses(self.objective, self.select, [*models], part, progress=self.progress, label=label):
            known = known | {models[edits]: losses.tolist() for edits, losses in found.items()}
            self.journal.put("sets", known)
        return {removed: torch.tensor(known[key], dtype=torch.float64) for removed, key in keys.items()}

    def means_without(
        self, sets: Iterable[Removed], windows: int | None = None, label: str = "sets of blocks"
    ) -> dict[Removed, float]:
        """Return the means of `losses_without`."""
        return {removed: float(losses.mean()) for removed, losses in self.losses_without(sets, windows, label).items()}
