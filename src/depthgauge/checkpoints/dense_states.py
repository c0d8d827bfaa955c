"""The states of the dense model on many windows, and the objective of models that differ from it.

States are kept on the GPU, in memory or on disk, whichever has room.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import OutputError
from depthgauge.base.format import size_text
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.block_runner import BlockRunner
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import BY_TARGETS, Checkpoint
from depthgauge.checkpoints.memory import free_memory
from depthgauge.checkpoints.model_output import require_output, window_losses
from depthgauge.checkpoints.samples import ENCODED, Inputs, Samples

STATES_SHARE = 0.35
"""The share of free memory that states may take, of the dense model, or of all edited models in a pass."""


def states_in_memory(state: Tensor) -> int:
    """Return how many states like this one fit into memory, while a block is applied to all of them.

    They are kept three times: before the block, as one tensor that it reads, and after it.
    """
    return max(1, int(STATES_SHARE * free_memory(state.device)) // max(1, 3 * state.numel() * state.itemsize))


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

    With `all_layers=False`, only the first and the last are kept. `runner` has the blocks of the model.
    """

    def __init__(
        self, runner: BlockRunner, inputs: Inputs, *, all_layers: bool = True, progress: Step = silent
    ) -> None:
        self.runner, self.layers, self.inputs = runner, len(runner), inputs
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
        # The mapped file has no name any more when the folder is deleted; its space is freed with the tensor.
        with tempfile.TemporaryDirectory(prefix="depthgauge-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "states"
            _reserve(path, needed)
            flat = torch.from_file(str(path), shared=True, size=count * state.numel(), dtype=state.dtype)
        return flat.reshape(shape)


def _reserve(path: Path, needed: int) -> None:
    """Create a file that has its space on the disk: a write to the mapping of one that has not ends the process."""
    try:
        with open(path, "wb") as handle:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(handle.fileno(), 0, needed)
    except OSError as error:
        raise OutputError(
            f"cannot keep the states of the model in {tempfile.gettempdir()}: they need {size_text(needed)}, "
            f"{error.strerror or error}; set TMPDIR to a folder with more space"
        ) from error


class Objective:
    """The objective on fixed windows, one number per window; smaller is better. See `window_losses`.

    `inputs` are the windows, and `dense` has X_L, the states of the dense model after its last block.
    """

    def __init__(self, runner: BlockRunner, inputs: Inputs, dense: Float[Tensor, "windows n d"]) -> None:
        self.runner, self.inputs, self.dense = runner, inputs, dense

    @torch.no_grad()
    def __call__(self, states: Float[Tensor, "windows n d"], windows: slice = slice(None)) -> Float[Tensor, " windows"]:
        """Return the objective of every window, given the states after the last block on these windows."""
        return self.each([states], windows)[0]

    @torch.no_grad()
    def each(
        self, several: Sequence[Float[Tensor, "windows n d"]], windows: slice = slice(None)
    ) -> Float[Tensor, "several windows"]:
        """Return the objective of every window for each of several states after the last block."""
        runner, all_inputs, all_dense = self.runner, self.inputs[windows], self.dense[windows]

        objective = runner.checkpoint.objective

        def measure(these: slice) -> Tensor:
            inputs, reference, made = all_inputs[these], None, list[Tensor]()
            if objective not in BY_TARGETS:  # outputs are compared with those of the dense model
                reference = runner.output(runner.on_device(all_dense[these]), inputs)
            for states in several:
                output = runner.output(runner.on_device(states[these]), inputs)
                made.append(window_losses(objective, output, inputs, output if reference is None else reference).cpu())
            return torch.stack(made, dim=1)

        found = runner.batches.map(measure, len(all_dense))
        return (torch.cat(found) if found else torch.empty(0, len(several))).T
