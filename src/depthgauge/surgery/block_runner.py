"""Run the blocks of a checkpoint one at a time, on batches of windows.

A block is called with the arguments that the model itself passes to it: masks, rotary embeddings and positions are
recorded once, on one window, and broadcast over the batch. All windows therefore have the same length. The embeddings,
the final norm and the output head are computed by the model's own forward pass.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.layers import find_blocks, hidden_in, hidden_out, replaced
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import Checkpoint

_LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Largest size of the logits of one batch, by type of device."""


class _Reached(Exception):  # noqa: N818
    """Ends a forward pass at the first block, whose input is all that is needed."""


class BlockRunner:
    """The blocks of a checkpoint as functions of the residual stream.

    - `blocks`: the blocks, in order
    - `batch`: how many windows are computed together
    """

    def __init__(self, checkpoint: Checkpoint, example: Int[Tensor, "1 n"]) -> None:
        self.checkpoint = checkpoint
        self.blocks = find_blocks(checkpoint.model, checkpoint.layers)
        if not self.blocks:
            raise CheckpointError(
                f"{checkpoint.name} has no list of {checkpoint.layers} blocks; shrinking needs a model whose layers "
                "are separate modules in one list"
            )
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._tuples = False
        self._record(example)
        vocabulary = int(getattr(checkpoint.config, "vocab_size", 1)) if checkpoint.objective == "loss" else 1
        wide = max(vocabulary, 8 * int(checkpoint.config.hidden_size))
        limit = _LOGIT_BYTES.get(self.device.type, 2**28)
        self.batch = max(1, limit // (4 * example.shape[1] * wide))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        """The device that expects the token ids."""
        return self.checkpoint.device

    @torch.no_grad()
    def embed(self, ids: Int[Tensor, "windows n"]) -> Float[Tensor, "windows n d"]:
        """Return X_0, the input of the first block."""
        found: list[Tensor] = []

        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(hidden_in(args, kwargs))
            raise _Reached

        handle = self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            for start in range(0, len(ids), self.batch):
                try:
                    self._forward(ids[start : start + self.batch])
                except _Reached:
                    continue
        finally:
            handle.remove()
        return torch.cat(found)

    def block(self, layer: int, states: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        """Return B_ℓ(X) for one batch."""
        args, kwargs = self._calls[layer]
        return hidden_out(self.blocks[layer](states, *args, **kwargs))

    @torch.no_grad()
    def run(self, layers: Sequence[int], states: Float[Tensor, "windows n d"]) -> Float[Tensor, "windows n d"]:
        """Return the states after the given layers, in batches; the result is stored where `states` is stored."""
        if not layers:
            return states
        made = torch.empty_like(states)
        for index, part in self.batches(states):
            for layer in layers:
                part = self.block(layer, part)
            made[index : index + len(part)] = part.to(made.device, made.dtype)
        return made

    def batches(self, states: Float[Tensor, "windows n d"]) -> Iterator[tuple[int, Float[Tensor, "batch n d"]]]:
        """Yield batches of states on the model's device, each with the index of its first window."""
        dtype = self.checkpoint.model.dtype
        for start in range(0, len(states), self.batch):
            yield start, states[start : start + self.batch].to(self.device, dtype)

    def output(self, states: Float[Tensor, "batch n d"]) -> Tensor:
        """Return the logits, or the final states of a model without a head, for the states after the last block."""
        ids = torch.zeros(states.shape[:2], dtype=torch.long)

        def passing(given: Tensor | None) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                out = hidden_in(args, kwargs) if given is None else given
                return (out,) if self._tuples else out

            return forward

        with ExitStack() as patches:
            for layer, block in enumerate(self.blocks):
                patches.enter_context(replaced(block, passing(states if layer == len(self) - 1 else None)))
            out = self._forward(ids)
        made: Tensor = out.logits if self.checkpoint.objective == "loss" else out.last_hidden_state
        return made

    def _forward(self, ids: Int[Tensor, "batch n"]) -> Any:
        model = self.checkpoint.measured
        cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        return model(input_ids=ids.to(self.device), **cache)

    @torch.no_grad()
    def _record(self, example: Int[Tensor, "1 n"]) -> None:
        """Record the arguments of every block, apart from the states, in one forward pass."""

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._calls.append((args[1:], others))

        def after(module: Any, args: tuple[Any, ...], out: Any) -> None:
            self._tuples = isinstance(out, tuple)

        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(self.blocks[-1].register_forward_hook(after).remove)
            self._forward(example)
