"""What the weight files of a checkpoint, or a model in memory, say about their tensors: sizes, dtypes, a digest."""

import copy
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open

from depthgauge.checkpoints.library import attempt
from depthgauge.checkpoints.source import Source, weight_files


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
