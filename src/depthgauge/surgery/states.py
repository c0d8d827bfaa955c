"""The states of a model on calibration windows, kept on the GPU, in memory or on disk, whichever has room."""

import tempfile
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.load import free_memory
from depthgauge.progress import Step, silent

_SHARE = 0.35
"""The share of free memory that the states of one set of windows may take."""


class DenseStates:
    """Token ids and the dense model's states X_0 … X_L on them.

    - `ids`: token ids
    - `states`: X_0 … X_L; with `all_layers=False` only the first and the last are kept, the others are None
    """

    def __init__(
        self, runner: BlockRunner, ids: Int[Tensor, "windows n"], *, all_layers: bool = True, progress: Step = silent
    ) -> None:
        """Run the dense model.

        Args:
            runner: the blocks of the model, with their original weights.
            ids: token ids.
            all_layers: keep every state.
            progress: called before every layer.
        """
        self.ids = ids
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        layers = len(runner)
        first = runner.embed(ids)
        count = layers + 1 if all_layers else 2
        room = self._room(first, count, runner.device)
        room[0].copy_(first)
        current = room[0]
        states: list[Tensor | None] = [current] + [None] * layers
        for layer in range(layers):
            progress(layer, layers, f"dense model, layer {layer}")
            place = room[layer + 1] if all_layers else room[1]
            place.copy_(runner.through([layer], current))
            states[layer + 1] = current = place
        if not all_layers:
            states[1:-1] = [None] * (layers - 1)
        self.states = states

    def at(self, layer: int) -> Float[Tensor, "windows n d"]:
        """Return X_ℓ."""
        state = self.states[layer]
        assert state is not None
        return state

    @property
    def final(self) -> Float[Tensor, "windows n d"]:
        """X_L, the states after the last block."""
        return self.at(len(self.states) - 1)

    def _room(self, state: Tensor, count: int, device: torch.device) -> Tensor:
        """Return memory for `count` states: on the GPU, in main memory, or in a temporary file."""
        shape, needed = (count, *state.shape), count * state.numel() * state.itemsize
        if device.type == "cuda" and needed < _SHARE * torch.cuda.mem_get_info(device)[0]:
            return torch.empty(shape, dtype=state.dtype, device=device)
        if needed < _SHARE * free_memory():
            return torch.empty(shape, dtype=state.dtype)
        self._folder = tempfile.TemporaryDirectory(prefix="depthgauge-")
        path = Path(self._folder.name) / "states"
        flat = torch.from_file(str(path), shared=True, size=count * state.numel(), dtype=state.dtype)
        return flat.reshape(shape)
