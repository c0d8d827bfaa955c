"""The header of a GGUF file: whether the file is complete, in a fraction of the time that gguf-py takes to parse it."""

import mmap
from math import prod
from pathlib import Path

from depthgauge.base.errors import missing_extra
from depthgauge.checkpoints.library import CheckpointError

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
    try:
        import gguf
    except ImportError as error:
        raise missing_extra("a GGUF file", "models") from error
    return {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
