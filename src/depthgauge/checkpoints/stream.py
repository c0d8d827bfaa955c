"""Weights that stay on the disk: the blocks of a model are memory-mapped, and one at a time is brought to the device.

transformers puts everything else on the device and offloads the blocks: for every weight of theirs it names a
safetensors file, which is one of the checkpoint, or a temporary one if the weight had to be converted. Such a file is
mapped privately. Pages that are only read belong to the page cache of the system; a weight that is changed takes memory
of its own, and its file stays as it is.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthgauge.checkpoints.find_blocks import find_blocks
from depthgauge.checkpoints.library import CheckpointError

DISK = "disk"


def stream_map(skeleton: nn.Module, layers: int, device: torch.device, name: str) -> dict[str, str]:
    """Return where transformers puts the parts of a model: the blocks on the disk, everything else on the device.

    Raises:
        CheckpointError: the model called `name` has no list of `layers` blocks.
    """
    blocks = {*find_blocks(skeleton, layers)}
    if not blocks:
        raise CheckpointError(
            f"{name} cannot be streamed: it has no list of {layers} blocks; use --device-map auto or a larger machine"
        )
    places: dict[str, str] = {}

    def place(module: nn.Module, path: str) -> None:
        if module in blocks:
            places[path] = DISK
        elif blocks.isdisjoint(module.modules()):
            places[path] = str(device)
        else:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            places.update({f"{path}.{leaf}".lstrip("."): str(device) for leaf, _ in own})
            for leaf, child in module.named_children():
                place(child, f"{path}.{leaf}".lstrip("."))

    place(skeleton, "")
    return places


def streamed_bytes(skeleton: nn.Module, layers: int) -> int:
    """Return what a streamed model needs on the device: everything outside the blocks, and two blocks."""
    blocks = [sum(weight.nbytes for weight in block.parameters()) for block in find_blocks(skeleton, layers)]
    return sum(weight.nbytes for weight in skeleton.parameters()) - sum(blocks) + 2 * max(blocks, default=0)


class Stream:
    """The blocks of a model whose weights are on the disk or in main memory, and that run on a device.

    `resident` brings the weights of a block to the device; a call of the block does so by itself. The weights of the
    next block are copied meanwhile. On the CPU, nothing is copied: blocks compute with the mapped weights.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self._blocks = list(blocks)
        self._files: dict[nn.Parameter, Callable[[], Tensor]] = {}
        self._held: int | None = None
        self._ahead: tuple[int, list[tuple[int, int]], Future[list[Tensor]]] | None = None
        self._worker = ThreadPoolExecutor(1)
        if self._moves:
            for place, block in enumerate(self._blocks):
                block.forward = _Streamed(self, place, block.forward)

    @classmethod
    def of_offloaded(cls, model: Any, layers: int, device: torch.device, at_end: Callable[[], None]) -> "Stream":
        """Map the blocks of a model that transformers has loaded by `stream_map`; `at_end` is called in the end."""
        from accelerate.hooks import remove_hook_from_submodules

        blocks, files = find_blocks(model, layers), dict[nn.Parameter, Callable[[], Tensor]]()
        for module in (module for block in blocks for module in block.modules()):
            for leaf, weight in module._parameters.items():
                if weight is not None and weight.is_meta:
                    hook: Any = module._hf_hook
                    read = reader(hook.weights_map, leaf)
                    mapped = module._parameters[leaf] = nn.Parameter(read(), requires_grad=weight.requires_grad)
                    files[mapped] = read
        remove_hook_from_submodules(model)
        del model.hf_device_map
        stream = cls(blocks, device)
        stream._files = files
        weakref.finalize(stream, at_end)
        return stream

    @property
    def _moves(self) -> bool:
        return self.device.type != "cpu"

    def original(self, weight: nn.Parameter) -> Tensor:
        """Return the value that a weight has on the disk, mapped anew."""
        return self._files[weight]()

    @contextmanager
    def resident(self, place: int) -> Iterator[None]:
        """Keep the weights of a block on the device; changes of them are lost at the end."""
        if self._held == place or not self._moves:
            yield
            return
        weights = list(self._blocks[place].parameters())
        stored = [weight.data for weight in weights]
        before, self._held = self._held, place
        try:
            for weight, copy in zip(weights, self._copies(place), strict=True):
                weight.data = copy
            yield
        finally:
            for weight, value in zip(weights, stored, strict=True):
                weight.data = value
            self._held = before

    def _copies(self, place: int) -> list[Tensor]:
        """Return the weights of a block on the device, and begin to copy those of the next one."""
        ahead, self._ahead = self._ahead, None
        is_current = ahead is not None and ahead[:2] == (place, self._state(place))
        found = ahead[2].result() if ahead is not None and is_current else self._copy(place)
        if self.device.type == "cuda":
            for tensor in found:  # it belongs to the stream of the copies
                tensor.record_stream(torch.cuda.current_stream(self.device))
        if (after := place + 1) < len(self._blocks):
            self._ahead = after, self._state(after), self._worker.submit(self._copy, after)
        return found

    def _state(self, place: int) -> list[tuple[int, int]]:
        """Return what changes when a weight of a block changes."""
        return [(weight.data_ptr(), weight._version) for weight in self._blocks[place].parameters()]

    @torch.no_grad()
    def _copy(self, place: int) -> list[Tensor]:
        weights = [weight.data for weight in self._blocks[place].parameters()]
        if self.device.type != "cuda":
            return [weight.to(self.device, copy=True) for weight in weights]
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            found = [weight.to(self.device) for weight in weights]
        side.synchronize()
        return found


class _Streamed:
    """The forward method of a block, with its weights on the device."""

    def __init__(self, stream: Stream, place: int, forward: Callable[..., Any]) -> None:
        self.stream, self.place, self.forward = stream, place, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.stream.resident(self.place):
            return self.forward(*args, **kwargs)


def reader(stored: Any, leaf: str) -> Callable[[], Tensor]:
    """Return a function that maps a weight which accelerate has offloaded; accelerate would bring it to the device."""

    def read() -> Tensor:
        loader = stored
        while hasattr(loader, "dataset"):  # the names of a module, in those of the model
            loader = loader.dataset
        loader.device = None
        found: Tensor = stored[leaf]
        return found

    return read
