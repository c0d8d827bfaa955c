"""What is known of the weights of a checkpoint besides their values: digests and the dtype on disk."""

import hashlib
import math
from typing import Any

import torch

from depthgauge.checkpoints.source import Source, weight_files

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Names of dtypes in safetensors files."""


def file_digests(source: Source) -> dict[str, str]:
    """Return the SHA-256 of every weight file, by name."""
    found = {}
    for path in weight_files(source):
        with open(path, "rb") as handle:
            found[path.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return found


def weights_digest(model: Any) -> str:
    """Return a digest of the weights of a model in memory: names, shapes and sums of the tensors."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total = "" if tensor.is_meta else repr(float(tensor.detach().double().sum()))
        found.update(f"{name} {tuple(tensor.shape)} {total}".encode())
    return found.hexdigest()


def stored_dtype(config: Any, source: Source) -> torch.dtype | None:
    """Return the dtype of a checkpoint: the one that its config names, or that of its largest tensor.

    Args:
        config: the config of the model.
        source: the checkpoint. If it is pickled and its config names no dtype, the result is None.
    """
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if isinstance(found, torch.dtype):
        return found
    return None if source.pickled else _largest_tensor_dtype(source)


def _largest_tensor_dtype(source: Source) -> torch.dtype | None:
    from safetensors import safe_open

    largest, name = 0, ""
    for path in weight_files(source):
        with safe_open(path, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118  # not a dict
                part = handle.get_slice(key)
                if (size := math.prod(part.get_shape())) > largest:
                    largest, name = size, part.get_dtype()
    return _FLOATS.get(name)
