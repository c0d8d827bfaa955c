"""Checkpoints on disk: which files they consist of, and what these say without being loaded."""

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from depthgauge.checkpoints.library import CheckpointError, attempt

PICKLED = "pytorch_model*.bin"
"""The files in which older checkpoints keep their weights."""
_SAFETENSORS = "model.safetensors"


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk.

    - `folder`: its directory
    - `gguf`: the name of the GGUF file in `folder`, or None for other files
    - `pickled`: whether the weights are in `pytorch_model*.bin` files instead of safetensors
    - `tokenizer`: the directory of the tokenizer that replaces its own, or None
    """

    folder: Path
    gguf: str | None = None
    pickled: bool = False
    tokenizer: Path | None = None

    @property
    def path(self) -> Path:
        """The path the user gave."""
        return self.folder if self.gguf is None else self.folder / self.gguf

    @property
    def tokenizer_folder(self) -> Path | None:
        """The directory with the files of the tokenizer; None if the tokenizer is in the GGUF file."""
        return self.tokenizer or (self.folder if self.gguf is None else None)

    @cached_property
    def reader(self) -> Any:
        """The GGUF file, parsed. For 260,000 tokens, parsing takes half a minute and the result 0.3 GB."""
        import gguf

        return gguf.GGUFReader(self.path)

    @contextmanager
    def parsed_once(self) -> Iterator[None]:
        """Give `reader` to transformers too, which otherwise parses a GGUF file again each time it reads from it."""
        if self.gguf is None:
            yield
            return
        library: Any = import_module("gguf")
        parse, reader = library.GGUFReader, self.reader
        library.GGUFReader = lambda *_: reader
        try:
            yield
        finally:
            library.GGUFReader = parse

    def close(self) -> None:
        """Free the memory of `reader`."""
        self.__dict__.pop("reader", None)

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments common to all calls of `from_pretrained`."""
        return {"local_files_only": True} | ({} if self.gguf is None else {"gguf_file": self.gguf})


def find(target: str | Path, allow_pickle: bool = False, tokenizer: str | None = None) -> Source:
    """Return the checkpoint in a directory or a `.gguf` file; raise if something is missing.

    `allow_pickle` accepts weights in `pytorch_model*.bin` files. They are read with `torch.load(weights_only=True)`,
    which does not run code from the file. `tokenizer` is the directory of another tokenizer.
    """
    path, other = Path(target), None if tokenizer is None else Path(tokenizer)
    if other is not None and not other.is_dir():
        raise CheckpointError(f"--tokenizer must be a directory with the files of a tokenizer, and {other} is none")
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        source = Source(path.parent, path.name, tokenizer=other)
        if not weight_files(source):
            raise CheckpointError(f"cannot read {path}: no such file")
        with open(path, "rb") as handle:
            if handle.read(4) != b"GGUF":
                raise CheckpointError(
                    f"{path} is not a GGUF file: it does not start with the bytes GGUF; download it again"
                )
        return source
    if not path.is_dir():
        raise CheckpointError(f"cannot read {path}: no such directory")
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a directory but not a checkpoint: it contains no config.json; give one that does"
        )
    source, pickled = (Source(path, pickled=pickled, tokenizer=other) for pickled in (False, True))
    if weight_files(source):
        return source
    hint = "download the complete checkpoint"
    if weight_files(pickled):
        if allow_pickle:
            return pickled
        hint = "its weights are pickled (*.bin): use --allow-pickle to read them, or convert them to safetensors"
    raise CheckpointError(
        f"{path} contains no weights that transformers reads: neither model.safetensors nor "
        f"model.safetensors.index.json; {hint}"
    )


def weight_files(source: Source) -> list[Path]:
    """Return the files that transformers reads the weights from; raise if one is missing or cannot be read."""
    single = source.path if source.gguf else source.folder / ("pytorch_model.bin" if source.pickled else _SAFETENSORS)
    index = source.folder / f"{single.name}.index.json"
    paths = [single] if single.is_file() else []
    if not paths and source.gguf is None and index.is_file():
        names = attempt(source.path, "index of the weights", lambda: json.loads(index.read_text("utf-8"))["weight_map"])
        paths = sorted({source.folder / name for name in names.values()})
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except FileNotFoundError as error:
            raise CheckpointError(f"{source.path} lacks the file {path.name}; download it again") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error
    return paths


def weight_bytes(source: Source) -> int:
    """Return the size of the weight files of a checkpoint on disk."""
    return sum(path.stat().st_size for path in weight_files(source))


def gguf_metadata(source: Source | None) -> dict[str, Any]:
    """Return the scalar metadata of a GGUF file by key; nothing for other checkpoints and models in memory."""
    if source is None or source.gguf is None:
        return {}
    import gguf

    fields = attempt(source.path, "metadata", lambda: source.reader).fields
    array = gguf.GGUFValueType.ARRAY
    return {name: field.contents() for name, field in fields.items() if field.types and field.types[0] != array}


def gguf_sliding_blocks(source: Source) -> list[bool] | None:
    """Return which blocks of a GGUF file have a sliding window, if its metadata lists them."""
    fields = attempt(source.path, "metadata", lambda: source.reader).fields
    found = next((field for key, field in fields.items() if key.endswith(".attention.sliding_window_pattern")), None)
    listed = None if found is None else found.contents()
    return list(map(bool, listed)) if isinstance(listed, list) else None


def count_parameters(source: Source) -> tuple[int, int]:
    """Return the number of parameters and their loaded size in bytes, from the headers of the weight files."""
    if source.gguf is not None:
        tensors = attempt(source.path, "weights", lambda: source.reader).tensors
        parameters = sum(int(tensor.n_elements) for tensor in tensors)
        return parameters, 4 * parameters  # the loader unpacks to float32
    tensors = attempt(source.path, "weights", lambda: list(stored_tensors(source)))
    stored = sum(count * (4 if dtype is None else dtype.itemsize) for _, count, dtype in tensors)
    return sum(count for _, count, _ in tensors), stored


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

    The result is None if the config names none and the files are pickled, or the largest tensor is not of a float type.
    """
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if isinstance(found, torch.dtype):
        return found
    if source.pickled:
        return None
    _, _, largest = max(stored_tensors(source), key=lambda one: one[1], default=("", 0, None))
    return largest if largest is not None and largest.is_floating_point else None


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Names of dtypes in safetensors files."""
