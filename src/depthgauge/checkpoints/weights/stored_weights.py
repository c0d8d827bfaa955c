"""Weights on the disk: their sizes, dtypes and digest, and how they stay there while a model runs.

With `--device stream`, the blocks of a model are memory-mapped, and one at a time is brought to the device. A GGUF file
is unpacked into safetensors files first, block by block.

transformers puts everything else on the device and offloads the blocks: for every weight of theirs it names a
safetensors file, which is one of the checkpoint, or a temporary one if the weight had to be converted. Such a file is
mapped privately. Pages that are only read belong to the page cache of the system; a weight that is changed takes memory
of its own, and its file stays as it is.
"""

import copy
import hashlib
import json
import math
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from depthgauge.base.format import size_text
from depthgauge.checkpoints.source.library import CheckpointError, attempt
from depthgauge.checkpoints.source.model_files import SAFETENSORS, Source, weight_files
from depthgauge.checkpoints.weights.families import find_blocks


def free_memory(device: torch.device | None = None) -> int:
    """Return the free memory of a GPU, or else this process's share of that of the system or its control group."""
    if device is not None and device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        pages = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        limit = used = "max"
    free = pages if limit == "max" else min(pages, max(0, int(limit) - int(used)))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the processes that torchrun has started here


# --- What the files or the model in memory say about the tensors ------------------------------------------------------


def count_parameters(source: Source) -> tuple[int, int]:
    """Return the number of parameters and their loaded size in bytes, from the headers of the weight files."""
    if source.gguf is not None:
        tensors = attempt(source.target, "weights", lambda: source.reader).tensors
        parameters = sum(int(tensor.n_elements) for tensor in tensors)
        return parameters, 4 * parameters  # the loader unpacks to float32
    tensors = attempt(source.target, "weights", lambda: list(stored_tensors(source)))
    stored = sum(count * (4 if dtype is None else dtype.itemsize) for _, count, dtype in tensors)
    return sum(count for _, count, _ in tensors), stored


def built_model(name: str, config: Any, chosen: Any, trust_remote_code: bool, **placed: Any) -> Any:
    """Return a model of the class `chosen` with this configuration and random weights; `name` is what errors call it.

    By default it is on the device `meta`, where it takes no memory: a configuration may describe a model that is larger
    than its files, and than any memory. `placed` may give another `device`, and a `dtype`.
    """

    def build() -> Any:
        copied, dtype = copy.deepcopy(config), {"dtype": placed["dtype"]} if "dtype" in placed else {}
        with torch.device(placed.get("device", "meta")):
            if hasattr(chosen, "from_config"):
                return chosen.from_config(copied, trust_remote_code=trust_remote_code, **dtype)
            return chosen._from_config(copied, **dtype)

    return attempt(name, "configuration", build)


def tensor_count(source: Source) -> int:
    """Return the number of tensors in the weight files."""
    return len(source.reader.tensors) if source.gguf is not None else sum(1 for _ in stored_tensors(source))


def stored_tensors(source: Source) -> Iterator[tuple[str, int, torch.dtype | None]]:
    """Yield name, number of entries and dtype, if it is known, of every tensor in the weight files of a directory."""
    for path in weight_files(source):
        if source.pickled:
            for name, tensor in torch.load(path, map_location="meta", weights_only=True).items():
                yield name, tensor.numel(), tensor.dtype
            continue
        with safe_open(path, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  # not a dict
                part = handle.get_slice(name)
                yield name, math.prod(part.get_shape()), _DTYPES.get(part.get_dtype())


def weights_digest(model: Any) -> str:
    """Return a digest of the weights of a model in memory: names, shapes and sums of the tensors."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total = "" if tensor.is_meta else repr(float(tensor.detach().double().sum()))
        found.update(f"{name} {tuple(tensor.shape)} {total}".encode())
    return found.hexdigest()


def stored_dtype(config: Any, source: Source) -> torch.dtype | None:
    """Return the dtype of a checkpoint: the one that its config names, or that of its largest tensor.

    The result is None if the config names none and the weights are pickled or in a GGUF file, or the largest tensor is
    not of a float type.
    """
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if isinstance(found, torch.dtype):
        return found
    if source.pickled or source.gguf is not None:
        return None
    _, _, largest = max(stored_tensors(source), key=lambda one: one[1], default=("", 0, None))
    return largest if largest is not None and largest.is_floating_point else None


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Names of dtypes in safetensors files."""


# --- GGUF files as safetensors files ----------------------------------------------------------------------------------


def unpack_gguf(source: Source, skeleton: Any, folder: Path, dtype: torch.dtype) -> Source:
    """Write the weights of a GGUF file to safetensors files, one for each block, and return these.

    transformers unpacks all tensors of a file in memory; here it is given those of one block at a time.

    Args:
        source: the GGUF file.
        skeleton: a model of its class, without weights.
        folder: where the files are written.
        dtype: their dtype.

    Raises:
        CheckpointError: the disk has too little space.
    """
    library: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    whole = source.reader
    needed = dtype.itemsize * sum(int(tensor.n_elements) for tensor in whole.tensors)
    if needed > (free := shutil.disk_usage(folder).free):
        smaller = ", or use --dtype bfloat16" if dtype.itemsize > 2 else ""
        raise CheckpointError(
            f"{source.target} cannot be streamed: unpacked, it takes {size_text(needed)}, and {size_text(free)} are "
            f"free in {folder.parent}; set TMPDIR to a directory on a larger disk{smaller}"
        )
    # Parsing hundreds of thousands of tokens takes seconds, and the weights do not depend on them.
    fields = {key: field for key, field in whole.fields.items() if not key.startswith("tokenizer.")}
    files: dict[str, str] = {}
    for number, (_, tensors) in enumerate(groupby(sorted(whole.tensors, key=_part), key=_part)):
        part = SimpleNamespace(fields=fields, tensors=list(tensors))

        def read(part: SimpleNamespace = part) -> dict[str, torch.Tensor]:
            with source.parsed_once(part):
                found = library.load_gguf_checkpoint(
                    str(source.path), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype
                )
            tensors: dict[str, torch.Tensor] = found["tensors"]
            return tensors

        weights = attempt(source.target, "weights", read)
        name = f"unpacked-{number:05}.safetensors"
        save_file(weights, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, name)
    skeleton.config.save_pretrained(folder)
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{SAFETENSORS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return Source(folder)


def _part(tensor: Any) -> str:
    """Return the block of a tensor, such as `blk.3`; the tensors outside of the blocks are one part."""
    return ".".join(tensor.name.split(".")[:2]) if tensor.name.startswith("blk.") else ""


# --- Streamed weights -------------------------------------------------------------------------------------------------

DISK = "disk"


def stream_map(skeleton: nn.Module, layers: int, device: torch.device, name: str) -> dict[str, str]:
    """Return where transformers puts the parts of a model: the blocks on the disk, everything else on the device.

    Raises:
        CheckpointError: the model called `name` has no list of `layers` blocks.
    """
    blocks = {*find_blocks(skeleton, layers)}
    if not blocks:
        raise CheckpointError(
            f"{name} cannot be streamed: it has no list of {layers} blocks; use --device spread or a larger machine"
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
