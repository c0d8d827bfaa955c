"""Network files: safetensors files with metadata. Reading validates everything; writing is atomic."""

import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from depthgauge.base.errors import InputError, NetworkFileError, OutputError, require_path
from depthgauge.base.format import one_line
from depthgauge.base.io import write_atomically
from depthgauge.theory.network.network import ACTIVATIONS, NORMS, Layer, Mlp, SelfAttentionNetwork, require_network

FORMAT = "depthgauge.network"
VERSION, VERSION_WITH_BIASES = "1", "2"
"""Files of both versions are read. The second one is written only for networks with biases in the attention."""
HEADER_LIMIT = 16 * 2**20
"""The largest accepted header, in bytes. A network of 100,000 tensors needs less."""

_FLAGS = ("true", "false")
_ATTENTION = ("query", "key", "value")
_MLP = ("mlp.in", "mlp.in_bias", "mlp.out", "mlp.out_bias")
_NORM = ("norm.weight", "norm.bias")
_BIASES = ("query_bias", "output_bias", "position_bias")
_TENSOR_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,6})\.(.+)", re.ASCII)
_RANKS = {"query": 3, "key": 3, "value": 3, "mlp.in": 2, "mlp.in_bias": 1, "mlp.out": 2, "mlp.out_bias": 1}
_RANKS |= dict.fromkeys(_NORM, 2) | {"query_bias": 2, "output_bias": 1, "position_bias": 3}
_OWN_KEYS = frozenset(
    {"format", "version", "scale", "skip", "causal", "activation", "norm", "mlp_skip", "name", "provenance"}
)


def save_network(network: SelfAttentionNetwork, path: str | Path) -> None:
    """Write a network to a safetensors file, atomically.

    `load_network` reads the file back bit for bit. The file contains the weights, the settings, `name`, `provenance`
    and `other_metadata`.

    Args:
        network: The network. All weights must be finite.
        path: The file to write. Its folder must exist; an existing file is replaced.

    Raises:
        InputError: A weight is NaN or infinite, or `provenance` is not plain JSON.
        OutputError: The file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(require_network(network)):
        parts: dict[str, Tensor | None] = {"query": layer.query, "key": layer.key, "value": layer.value}
        if layer.mlp is not None:
            mlp = layer.mlp
            parts |= dict(zip(_MLP, (mlp.w_in, mlp.b_in, mlp.w_out, mlp.b_out), strict=True))
        if network.norm != "none":
            parts |= dict(zip(_NORM, (layer.norm_weight, layer.norm_bias), strict=True))
        parts |= {name: bias for name in _BIASES if (bias := getattr(layer, name)) is not None}
        for part, tensor in parts.items():
            assert tensor is not None
            name = f"layers.{index}.{part}"
            if not bool(tensor.isfinite().all()):
                raise InputError(f"{name} holds NaN or infinity; a network file can hold finite weights only")
            # Copy each tensor: safetensors rejects tensors that share memory, and layers may share a matrix.
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    try:
        provenance = json.dumps(network.provenance, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"provenance must be plain JSON: {one_line(error)}; use strings and numbers") from error
    metadata = network.other_metadata | {
        "format": FORMAT,
        "version": VERSION_WITH_BIASES if network.has_attention_bias else VERSION,
        "scale": repr(network.scale),
        "activation": network.activation,
        "norm": network.norm,
        "name": network.name,
        "provenance": provenance,
    }
    metadata |= {name: str(getattr(network, name)).lower() for name in ("skip", "causal", "mlp_skip")}

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # safetensors raises this if the disk is full
            raise OutputError(f"cannot write {path}: {one_line(error)}") from error

    write_atomically(path, write)


def load_network(path: str | Path, *, dtype: torch.dtype = torch.float64) -> SelfAttentionNetwork:
    """Read a network from a file written by `save_network`.

    Args:
        path: The network file.
        dtype: The dtype of the loaded weights, `torch.float64` or `torch.float32`. float32 weights convert to float64
            exactly.

    Returns:
        The network. Its tensors do not share memory with the file.

    Raises:
        NetworkFileError: The file cannot be read or is not a valid network. The message names the file and the tensor
            or metadata key, and says how to fix it.
    """
    path = require_path("path", path)
    if dtype not in (torch.float64, torch.float32):
        raise InputError(f"dtype must be torch.float64 or torch.float32, got {dtype!r}")
    _check_container(path)
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = dict(handle.metadata() or {})
            settings = _read_settings(path, metadata)
            layers = _sort_names(path, list(handle.keys()), settings["norm"])
            loaded = [
                {part: _checked(path, f"layers.{i}.{part}", handle.get_tensor(f"layers.{i}.{part}")) for part in parts}
                for i, parts in enumerate(layers)
            ]
    except (SafetensorError, OSError, RuntimeError, ValueError, MemoryError) as error:
        if isinstance(error, NetworkFileError):
            raise
        raise NetworkFileError(
            f"{path} is not a readable safetensors file ({one_line(error)}); copy it again or write it again"
        ) from error
    try:
        network = SelfAttentionNetwork([_layer(path, i, parts, dtype) for i, parts in enumerate(loaded)], **settings)
    except NetworkFileError:
        raise
    except InputError as error:
        raise NetworkFileError(f"{path}: {error}; write the file again with save_network") from error
    network.other_metadata = {key: value for key, value in metadata.items() if key not in _OWN_KEYS}
    return network


def _check_container(path: Path) -> None:
    """Reject files that cannot be safetensors files before parsing them."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise NetworkFileError(f"{path} is a directory; give the network file itself")
        if not stat.S_ISREG(status.st_mode):
            raise NetworkFileError(f"{path} is a pipe or a device; give a network file")
        with open(path, "rb") as handle:
            start = handle.read(8)
    except OSError as error:
        raise NetworkFileError(
            f"cannot read {path}: {error.strerror or error}; `depthgauge random --out {path.name}` writes one"
        ) from error
    size = status.st_size
    if start[:1] == b"\x80" or start[:4] == b"PK\x03\x04":
        raise NetworkFileError(f"{path} is a pickle, which can run code when it is opened; convert it to safetensors")
    header = int.from_bytes(start, "little")
    if size < 8 or header > size - 8:
        raise NetworkFileError(
            f"{path} ends too early: {size} bytes, but its header needs {header + 8}; "
            "it is truncated or not a safetensors file, copy it again"
        )
    if header > HEADER_LIMIT:
        raise NetworkFileError(
            f"{path} has a header of {header} bytes, more than the limit of {HEADER_LIMIT}; it is damaged"
        )


def _read_settings(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """Read the keyword arguments of `SelfAttentionNetwork` from the metadata."""
    if metadata.get("format") != FORMAT:
        raise _unexpected(path, "format", metadata.get("format"), f"{FORMAT!r}; write it with save_network")
    if metadata.get("version") not in (VERSION, VERSION_WITH_BIASES):
        raise NetworkFileError(
            f"{path} has version={_quoted(metadata.get('version'))}, "
            f"this depthgauge reads versions {VERSION!r} and {VERSION_WITH_BIASES!r}; upgrade depthgauge"
        )
    try:
        scale = float(metadata["scale"])
    except (KeyError, ValueError):
        scale = math.nan
    if not (math.isfinite(scale) and scale > 0):
        expected = "a positive decimal number; it is β, the factor of the scores"
        raise _unexpected(path, "scale", metadata.get("scale"), expected)
    try:
        provenance = json.loads(metadata.get("provenance", "{}"))
    except (ValueError, RecursionError):
        provenance = None
    if not isinstance(provenance, dict):
        raise NetworkFileError(f"{path} has a provenance that is not a JSON object; remove the key or repair it")
    return {
        "scale": scale,
        "skip": _read_choice(path, metadata, "skip", _FLAGS, None) == "true",
        "causal": _read_choice(path, metadata, "causal", _FLAGS, None) == "true",
        "mlp_skip": _read_choice(path, metadata, "mlp_skip", _FLAGS, "false") == "true",
        "activation": _read_choice(path, metadata, "activation", ACTIVATIONS, ACTIVATIONS[0]),
        "norm": _read_choice(path, metadata, "norm", NORMS, NORMS[0]),
        "name": metadata.get("name", path.stem),
        "provenance": provenance,
    }


def _read_choice(path: Path, metadata: Mapping[str, str], key: str, known: tuple[str, ...], default: str | None) -> str:
    value = metadata.get(key, default)
    if value not in known:
        expected = " or ".join(map(repr, known)) if known == _FLAGS else f"one of {', '.join(known)}"
        raise _unexpected(path, key, value, expected)
    return value


def _unexpected(path: Path, key: str, value: str | None, expected: str) -> NetworkFileError:
    return NetworkFileError(f"{path} has {key}={_quoted(value)}, expected {expected}")


def _sort_names(path: Path, names: list[str], norm: str) -> list[tuple[str, ...]]:
    """Return the names of each layer's tensors in order; raise `NetworkFileError` if one is unknown or missing."""
    found: dict[int, set[str]] = {}
    for name in names:
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or match[2] not in _RANKS:
            raise NetworkFileError(
                f"{path} contains an unknown tensor {_quoted(name)}; a layer has the tensors {', '.join(_RANKS)}"
            )
        if match[2] in _NORM and norm == "none":
            raise NetworkFileError(
                f"{path} contains {name!r} although norm='none'; set norm to one of {', '.join(NORMS[1:])}"
            )
        found.setdefault(int(match[1]), set()).add(match[2])
    layers = []
    for index in range(max(len(found), 1)):
        present = found.get(index, set())
        expected = _ATTENTION + (_MLP if present & set(_MLP) else ()) + (_NORM if norm != "none" else ())
        expected += tuple(name for name in _BIASES if name in present)
        missing = [part for part in expected if part not in present]
        if missing:
            raise NetworkFileError(f"{path} lacks the tensor layers.{index}.{missing[0]}; write the file again")
        layers.append(expected)
    return layers


def _checked(path: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.float64):
        raise NetworkFileError(f"{path}: {name} is {tensor.dtype}, expected float32 or float64; convert it")
    rank = _RANKS[name.split(".", 2)[2]]
    if tensor.ndim != rank or 0 in tensor.shape:
        raise NetworkFileError(f"{path}: {name} has shape {list(tensor.shape)}, expected {rank} non-empty dimensions")
    if not bool(tensor.isfinite().all()):
        raise NetworkFileError(f"{path}: {name} holds NaN or infinity; repair the weights and write the file again")
    return tensor


def _layer(path: Path, index: int, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Layer:
    # Copy: a tensor from safetensors may be a view of the memory-mapped file, which can change or be truncated.
    converted = {part: tensor.to(dtype, copy=True) for part, tensor in parts.items()}
    for part, tensor in converted.items():
        if not bool(tensor.isfinite().all()):
            raise NetworkFileError(f"{path}: layers.{index}.{part} overflows {dtype}; load the network in float64")
    mlp = Mlp(*(converted[part] for part in _MLP)) if "mlp.in" in converted else None
    query, key, value = (converted[part] for part in _ATTENTION)
    return Layer(query, key, value, mlp, *(converted.get(part) for part in (*_NORM, *_BIASES)))


def _quoted(value: str | None) -> str:
    """Return a metadata value in quotes, shortened to 60 characters."""
    return repr(value) if value is None or len(value) <= 60 else repr(value[:57]) + "…"
