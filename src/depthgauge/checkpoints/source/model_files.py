"""Checkpoints on disk: which files they consist of, and what these say without being loaded.

Importing transformers takes seconds. A wrong path, a damaged file and a config.json that cannot be used are reported
before that.
"""

import hashlib
import json
import mmap
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module, metadata, util
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from depthgauge.base.errors import missing_extra, optional
from depthgauge.base.format import counted
from depthgauge.checkpoints.source.library import CheckpointError, attempt, short
from depthgauge.results.gauge_record import HubModel

# --- The header of a GGUF file ----------------------------------------------------------------------------------------

_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by the number of its type; strings and arrays have their own length."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_ALIGNMENT = 32
MOST_BLOCKS = 10_000
"""transformers would make lists of so many entries."""


class _Cursor:
    """A place in a file that moves forward; EOFError at its end."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.place = content, 4

    def skip(self, count: int) -> None:
        """Move forward."""
        self.place += count
        if self.place > len(self.content):
            raise EOFError

    def number(self, width: int) -> int:
        """Read a number of `width` bytes."""
        self.skip(width)
        return int.from_bytes(self.content[self.place - width : self.place], "little")

    def string(self) -> bytes:
        """Read a string, which comes after its length."""
        length = self.number(8)
        self.skip(length)
        return self.content[self.place - length : self.place]

    def value(self, kind: int) -> int | None:
        """Read a value of the metadata; return it if it is neither a string nor an array."""
        if kind in _WIDTHS:
            return self.number(_WIDTHS[kind])
        if kind == _STRING:
            self.skip(self.number(8))
        elif kind == _ARRAY:
            kind, count = self.number(4), self.number(8)
            if kind in _WIDTHS:
                self.skip(count * _WIDTHS[kind])
            else:
                for _ in range(count):
                    self.value(kind)
        else:
            raise EOFError
        return None


def check_gguf(path: Path, name: str) -> None:
    """Raise unless a file is a GGUF file of a version that can be read, and as long as its header says.

    `name` is what errors call the file.
    """
    size = path.stat().st_size
    with open(path, "rb") as handle:
        if handle.read(4) != b"GGUF":
            raise CheckpointError(
                f"{name} is not a GGUF file: it does not start with the bytes GGUF; download it again"
            )
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                needed = _needed(_Cursor(content), name)
            except (EOFError, RecursionError):  # lists of lists of lists
                raise CheckpointError(
                    f"{name} is cut off or damaged: its {size:,} bytes end within its header; download it again"
                ) from None
    if needed > size:
        raise CheckpointError(
            f"{name} is cut off: it has {size:,} bytes, and the last {needed - size:,} of its tensors are missing; "
            "download it again"
        )


def _needed(cursor: _Cursor, name: str) -> int:
    """Return the number of bytes of a file whose tensors are complete."""
    version, tensors, fields = cursor.number(4), cursor.number(8), cursor.number(8)
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{name} has version {version} of the GGUF format; versions 2 and 3 with little-endian numbers can be "
            "read: convert it with llama.cpp"
        )
    alignment = _ALIGNMENT
    for _ in range(fields):
        key, value = cursor.string(), cursor.value(cursor.number(4))
        if key == b"general.alignment":
            alignment = value or _ALIGNMENT
        if key.endswith(b".block_count") and (value or 0) > MOST_BLOCKS:
            raise CheckpointError(
                f"{name} says that it has {value:,} blocks, and no model has more than {MOST_BLOCKS:,}; download it "
                "again"
            )
    sizes, end = _type_sizes(), 0
    for _ in range(tensors):
        cursor.string()
        entries = prod([cursor.number(8) for _ in range(cursor.number(4))])
        kind, offset = cursor.number(4), cursor.number(8)
        if kind not in sizes:
            raise CheckpointError(
                f"{name} has a tensor of the type {kind}, which the installed gguf does not know; update gguf, or "
                "download the file again"
            )
        per_block, width = sizes[kind]
        end = max(end, offset + entries // per_block * width)
    return -(-cursor.place // alignment) * alignment + end


def _type_sizes() -> dict[int, tuple[int, int]]:
    """Return entries and bytes per block by the number of a tensor type."""
    gguf = optional("gguf", "a GGUF file", "models")
    return {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}


# --- config.json ------------------------------------------------------------------------------------------------------

_LISTS = ("auto_mappings.py", "configuration_auto.py")
"""Files of transformers.models.auto that name all model types."""

_MOST = ((r"layers?$", MOST_BLOCKS), (r"^(num|n)_", 100_000_000))
"""The most that a number in config.json can be, by its key; transformers would make a list of so many entries."""

DEQUANTIZED = ("fp8", "mxfp4")
"""Methods of quantization that transformers undoes when it loads the weights, without a GPU or another package."""


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of the checkpoint called `name`."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError too
        raise CheckpointError(f"cannot read {path.name} of {name}: {short(error)}; download it again") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise CheckpointError(f"{path.name} of {name} must be a JSON object, got a {kind}; download it again")
    return document


def quantization_method(raw: Mapping[str, Any]) -> str | None:
    """Return the name of the method with which the weights of a configuration are quantized; None if they are not."""
    section = raw.get("quantization_config") or raw.get("compression_config")
    if not section:
        return None
    return str(section.get("quant_method", "an unnamed method")) if isinstance(section, dict) else "an unnamed method"


def check_config(path: Path, name: str, trust_remote_code: bool) -> None:
    """Check that the config.json at `path`, of the checkpoint called `name`, is one of a model that can be loaded.

    Raises:
        CheckpointError: it is not JSON, has no model type, or one that transformers does not know; or the model is
            defined by code in its directory, and that code may not run.
    """
    raw = read_json(path, name)
    named = raw.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        raise CheckpointError(
            f"architectures in config.json of {name} must be a list with the name of a class, got {named!r}; correct it"
        )
    if (method := quantization_method(raw)) is not None and method not in DEQUANTIZED:
        raise CheckpointError(
            f"{name} is quantized with {method}, and only {' and '.join(DEQUANTIZED)} can be dequantized without "
            "further packages; give the checkpoint that it was made from, or a GGUF file of it"
        )
    for key, value in _numbers(raw):
        most = next((most for pattern, most in _MOST if re.search(pattern, key)), value)
        if value > most:
            raise CheckpointError(
                f"{key} in config.json of {name} is {value:,}, and no model has more than {most:,}; correct it"
            )
    kind, brings_code = raw.get("model_type"), bool(raw.get("auto_map"))
    if is_known(kind) or (brings_code and trust_remote_code):
        return
    if brings_code:
        raise CheckpointError(
            f"{name} needs to run the Python code in its directory; if you have read and trust that code, use "
            "--allow code"
        )
    if not kind or not isinstance(kind, str):
        raise CheckpointError(
            f"config.json of {name} has no model_type, so it is not a checkpoint of transformers; add the model_type, "
            "or give another checkpoint"
        )
    raise CheckpointError(
        f"{name} is a {kind!r} model, which transformers {metadata.version('transformers')} does not know; correct the "
        "model_type in its config.json, or install a version of transformers that knows it"
    )


def _numbers(raw: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the keys and values of all whole numbers in a configuration and in those that it contains."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int):
            yield key, value


def is_known(kind: object) -> bool:
    """Return whether transformers may know a model type.

    Until transformers is imported, nobody can have registered further types, and all types are in its source.
    """
    if not isinstance(kind, str) or not kind:
        return False
    if (library := sys.modules.get("transformers")) is not None:
        return kind in library.CONFIG_MAPPING
    return any(f'"{kind}"' in text for text in _type_lists())


def _type_lists() -> list[str]:
    """Return the files of transformers that name the model types, without importing it."""
    spec = util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise missing_extra("a checkpoint", "models")
    folder = Path(spec.origin).parent / "models" / "auto"
    return [(folder / name).read_text("utf-8") for name in _LISTS if (folder / name).is_file()]


# --- Checkpoints on disk: which files they consist of, and what these say without being loaded -----------------------

PICKLED = "pytorch_model*.bin"
"""The files in which older checkpoints keep their weights."""
SAFETENSORS, PICKLES = "model.safetensors", "pytorch_model.bin"
"""The file with all weights; `.index.json` after it names the file with the names of several."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""Files of which a directory with a tokenizer has one."""
_PIECE = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.(?i:gguf))")


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk.

    - `folder`: its directory
    - `gguf`: the name of the GGUF file in `folder`, or of the first of its pieces; None for other files
    - `pickled`: whether the weights are in `pytorch_model*.bin` files instead of safetensors
    - `tokenizer`: the directory of the tokenizer that replaces its own, or None
    - `hub`: what it is on the hub, or None if the user gave a path
    """

    folder: Path
    gguf: str | None = None
    pickled: bool = False
    tokenizer: Path | None = None
    hub: HubModel | None = None

    @property
    def path(self) -> Path:
        """The directory, or the GGUF file."""
        return self.folder if self.gguf is None else self.folder / self.gguf

    @property
    def target(self) -> str:
        """The path, or the name on the hub with the commit: what to give to a command to use the same files."""
        return str(self.path) if self.hub is None else self.hub.target

    @property
    def name(self) -> str:
        """The last part of the path, or the name on the hub with the first digits of the commit."""
        if self.hub is not None:
            return self.hub.short
        return self.gguf or self.folder.resolve().name

    @property
    def tokenizer_folder(self) -> Path | None:
        """The directory with the files of the tokenizer; None if the tokenizer is in the GGUF file."""
        return self.tokenizer or (self.folder if self.gguf is None else None)

    @cached_property
    def reader(self) -> Any:
        """The GGUF file, parsed; a split one as if it were whole.

        For 260,000 tokens, parsing takes half a minute and the result 0.3 GB.
        """
        import gguf

        return _joined([gguf.GGUFReader(path) for path in weight_files(self)], self.target)

    @contextmanager
    def parsed_once(self, part: Any = None) -> Iterator[None]:
        """Let transformers parse a GGUF file once, and not each time it reads from it.

        The same holds for the table of the names of tensors, which transformers makes for every module. `part` is given
        to it in place of `reader`: an object with the fields and a part of the tensors.
        """
        if self.gguf is None:
            yield
            return
        library: Any = import_module("gguf")
        parse, names, reader = library.GGUFReader, library.get_tensor_name_map, part or self.reader
        library.GGUFReader, library.get_tensor_name_map = lambda *_: reader, cache(names)
        try:
            yield
        finally:
            library.GGUFReader, library.get_tensor_name_map = parse, names

    def close(self) -> None:
        """Free the memory of `reader`."""
        self.__dict__.pop("reader", None)

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments common to all calls of `from_pretrained`."""
        return {"local_files_only": True} | ({} if self.gguf is None else {"gguf_file": self.gguf})


def find(
    target: str | Path,
    allow_pickle: bool = False,
    tokenizer: str | None = None,
    hub: HubModel | None = None,
    weights: bool = True,
) -> Source:
    """Return the checkpoint in a directory or a `.gguf` file; raise if something is missing.

    `allow_pickle` accepts weights in `pytorch_model*.bin` files. They are read with `torch.load(weights_only=True)`,
    which does not run code from the file. `tokenizer` is the directory of another tokenizer. Every piece of a split
    GGUF file stands for the whole. `hub` is what the files are on the hub, if they are in its cache. Without `weights`,
    a directory may have a config.json alone.
    """
    path, other = Path(target), require_tokenizer(tokenizer)
    name = path if hub is None else hub.name
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return _find_gguf(path, str(name), Source(path.parent, piece_names(path.name)[0], tokenizer=other, hub=hub))
    if not path.is_dir():
        raise CheckpointError(f"cannot read {name}: no such directory")
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{name} is a directory but not a checkpoint: it contains no config.json; give one that does"
        )
    source, pickled = (Source(path, pickled=pickled, tokenizer=other, hub=hub) for pickled in (False, True))
    if weight_files(source) or (not weights and not weight_files(pickled)):
        return source
    hint = "download the complete checkpoint"
    if weight_files(pickled):
        if allow_pickle or not weights:
            return pickled
        hint = "its weights are pickled (*.bin): use --allow pickle to read them, or convert them to safetensors"
    raise CheckpointError(
        f"{name} contains no weights that transformers reads: neither model.safetensors nor "
        f"model.safetensors.index.json; {hint}"
    )


def require_streamable(source: Source, options: Any, config: Any = None) -> None:
    """Raise unless the weights of a checkpoint can be left on the disk, as far as `options` and `config` tell."""
    for given, reason in (
        (
            source.gguf is None and options.dtype not in (None, "auto"),
            "its dtype is the stored one; leave --dtype out",
        ),
        (source.pickled, "its weights are pickled; save them as safetensors first"),
        (getattr(config, "is_encoder_decoder", False), "it has two stacks of blocks; use --device spread"),
    ):
        if given:
            raise CheckpointError(f"{source.target} cannot be streamed: {reason}")


def require_tokenizer(tokenizer: str | None) -> Path | None:
    """Return the directory of another tokenizer, if one is given; raise if it is not a directory."""
    if tokenizer is None:
        return None
    if not any((Path(tokenizer) / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"--tokenizer must be a directory with the files of a tokenizer, and {tokenizer} is none: it has none of "
            f"{', '.join(TOKENIZER_FILES[:3])}"
        )
    return Path(tokenizer)


def _find_gguf(path: Path, name: str, source: Source) -> Source:
    """Return the source of a GGUF file, or of a piece of one, if all pieces are there."""
    pieces = [source.folder / piece for piece in piece_names(path.name)]
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if len(missing) == len(pieces):
        raise CheckpointError(f"cannot read {name}: no such file")
    if missing:
        raise CheckpointError(
            f"{name} is a piece of a GGUF file in {len(pieces)} pieces, and its directory lacks {', '.join(missing)}; "
            "put all pieces into one directory"
        )
    for piece in weight_files(source):
        check_gguf(piece, str(piece if source.hub is None else name))
    return source


def piece_names(name: str) -> list[str]:
    """Return the names of all pieces of a split GGUF file, given one of them; the name itself if the file is whole.

    >>> piece_names("m-00002-of-00002.gguf")
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    parts = _PIECE.fullmatch(name)
    if parts is None or not 1 <= int(parts["number"]) <= int(parts["count"]):
        return [name]
    count = parts["count"]
    return [f"{parts['stem']}-{number:05}-of-{count}{parts['end']}" for number in range(1, int(count) + 1)]


def _joined(readers: list[Any], name: str) -> Any:
    """Return one reader with the tensors of all pieces of a GGUF file, whose metadata is in the first piece."""
    whole = readers[0]
    known = [{key: field.contents() for key in _SPLIT if (field := one.fields.get(key))} for one in readers]
    counts = {pieces.get("split.count") or 1 for pieces in known}  # 0 in a file that was split and joined again
    if counts != {len(readers)}:
        expected = counted(max(counts), "piece")
        raise CheckpointError(
            f"{name} is a GGUF file of {expected} by its metadata, and of {len(readers)} by its name; the names of the "
            f"pieces must end in -00001-of-{max(counts):05}.gguf and so on: rename them, or download them again"
        )
    if len(readers) == 1:
        return whole
    tensors = [tensor for one in readers for tensor in one.tensors]
    if [pieces.get("split.no") for pieces in known] != list(range(len(readers))) or any(
        pieces.get("split.tensors.count", len(tensors)) != len(tensors) for pieces in known
    ):
        raise CheckpointError(f"the pieces of {name} do not belong together; download them again")
    whole.tensors = tensors
    for key in _SPLIT:
        whole.fields.pop(key, None)
    return whole


_SPLIT = ("split.count", "split.no", "split.tensors.count")
"""Metadata of a piece."""


def weight_files(source: Source) -> list[Path]:
    """Return the files that transformers reads the weights from; raise if one is missing or cannot be read."""
    single = PICKLES if source.pickled else SAFETENSORS
    index = source.folder / f"{single}.index.json"
    names = [single] if source.gguf is None else piece_names(source.gguf)
    if source.gguf is None and not (source.folder / single).is_file():
        names = shard_names(index, source.target) if index.is_file() else []
    paths = [source.folder / name for name in names]
    for path in paths:
        try:
            with open(path, "rb"):
                pass
        except FileNotFoundError as error:
            raise CheckpointError(f"{source.target} lacks the file {path.name}; download it again") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error
    return paths


def shard_names(index: Path, name: str) -> list[str]:
    """Return the files that the index of the weights of the model called `name` mentions."""
    return sorted(set(_weight_map(index, name).values()))


def _weight_map(index: Path, name: str) -> dict[str, str]:
    """Return the file of every tensor by the index of the weights of the model called `name`."""
    files = read_json(index, name).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index.name} of {name} has no weight_map with the files of weights; download it again")
    return files


def check_safetensors(source: Source) -> None:
    """Raise if a safetensors file of a checkpoint is cut off or damaged, or lacks a tensor that the index puts there.

    Only the headers are read.
    """
    stored: dict[Path, set[str]] = {}
    for path in weight_files(source):
        try:
            with safe_open(path, framework="np") as handle:
                stored[path] = set(handle.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"cannot read the weights of {source.target}: {path.name} is cut off or damaged ({short(error)}); "
                "download it again"
            ) from error
    index = source.folder / f"{SAFETENSORS}.index.json"
    placed = _weight_map(index, source.target) if index.is_file() and source.folder / SAFETENSORS not in stored else {}
    for tensor, file in placed.items():
        if tensor not in stored[source.folder / file]:
            raise CheckpointError(
                f"{index.name} of {source.target} says that {tensor} is in {file}, which does not have it; download "
                "the files again"
            )


def weight_bytes(source: Source) -> int:
    """Return the size of the weight files of a checkpoint on disk."""
    return sum(path.stat().st_size for path in weight_files(source))


def gguf_metadata(source: Source | None) -> dict[str, Any]:
    """Return the scalar metadata of a GGUF file by key; nothing for other checkpoints and models in memory."""
    if source is None or source.gguf is None:
        return {}
    import gguf

    fields = attempt(source.target, "metadata", lambda: source.reader).fields
    array = gguf.GGUFValueType.ARRAY
    return {name: field.contents() for name, field in fields.items() if field.types and field.types[0] != array}


def gguf_sliding_blocks(source: Source) -> list[bool] | None:
    """Return which blocks of a GGUF file have a sliding window, if its metadata lists them."""
    fields = attempt(source.target, "metadata", lambda: source.reader).fields
    pattern = next((field for key, field in fields.items() if key.endswith(".attention.sliding_window_pattern")), None)
    listed = None if pattern is None else pattern.contents()
    return list(map(bool, listed)) if isinstance(listed, list) else None


def file_digests(source: Source) -> dict[str, str]:
    """Return the SHA-256 of every weight file, by name.

    Several files are hashed at a time: one by one, those of a 7B model took 12 of 120 s of `shrink` (row `resident` of
    benchmarks/scale.py).
    """

    def digest(path: Path) -> str:
        with open(path, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()

    paths = weight_files(source)
    with ThreadPoolExecutor() as pool:
        return dict(zip([path.name for path in paths], pool.map(digest, paths), strict=True))
