"""Random damage to network files: changed, removed and added bytes, edited lengths and headers, renamed tensors."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Header = dict[str, Any]


def split(content: bytes) -> tuple[Header, bytes]:
    """Split a safetensors file into its header and its data."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: Any, data: bytes) -> bytes:
    """Join header and data with the correct length. A header given as bytes is used unchanged."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text)) + text + data


def _flip_bytes(rng: random.Random, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _flip_header_byte(rng: random.Random, content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 3))):
        damaged[8 + rng.randrange(length)] = rng.choice((rng.randrange(256), ord(rng.choice('0123456789[]{}":,.-eEN'))))
    return bytes(damaged)


def _truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def _extend(rng: random.Random, content: bytes) -> bytes:
    return content + rng.randbytes(rng.choice((1, 8, 100)))


def _cut_out(rng: random.Random, content: bytes) -> bytes:
    start, stop = sorted(rng.randrange(len(content)) for _ in range(2))
    return content[:start] + content[stop:]


def _edit_length(rng: random.Random, content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    edited = rng.choice((0, 1, length - 1, length + 1, length + 8, 2**24, 2**32, 2**63, 2**64 - 1, rng.getrandbits(64)))
    return struct.pack("<Q", edited % 2**64) + content[8:]


def _edit_header(rng: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    for _ in range(rng.choice((1, 1, 2))):
        rng.choice(_HEADER_EDITS)(rng, header)
    return join(header, data)


def _garble_json(rng: random.Random, content: bytes) -> bytes:
    header, data = split(content)
    text = rng.choice((b"null", b"[]", b"{}", b'"x"', b"1e999", b"{" * 5000, b"[" * 100_000, b"\xff\xfe{}", b" ",
                       json.dumps(header).encode()[:-1], json.dumps([header]).encode()))  # fmt: skip
    return join(text, data)


def _edit_floats(rng: random.Random, content: bytes) -> bytes:
    """Replace a weight by NaN, infinity, a subnormal number or a huge number."""
    header, data = split(content)
    damaged = bytearray(data)
    value = rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, 0.0))
    position = 8 * rng.randrange(len(damaged) // 8)
    damaged[position : position + 8] = struct.pack("<d", value)
    return join(header, bytes(damaged))


def _tensor(rng: random.Random, header: Header) -> tuple[str, Header]:
    name = rng.choice([key for key in header if key != "__metadata__"] or ["__metadata__"])
    entry = header.get(name)
    return name, entry if isinstance(entry, dict) else {}


def _rename(rng: random.Random, header: Header) -> None:
    name, entry = _tensor(rng, header)
    header.pop(name, None)
    header[rng.choice(_NAMES)] = entry


def _drop(rng: random.Random, header: Header) -> None:
    header.pop(_tensor(rng, header)[0], None)


def _retype(rng: random.Random, header: Header) -> None:
    _tensor(rng, header)[1]["dtype"] = rng.choice(_DTYPES)


def _reshape(rng: random.Random, header: Header) -> None:
    _, entry = _tensor(rng, header)
    shape = entry.get("shape")
    shape = list(shape) if isinstance(shape, list) else []
    edits: list[Callable[[], Any]] = [
        lambda: shape[::-1],
        lambda: [*shape, 1],
        lambda: shape[1:],
        lambda: [1, *shape],
        lambda: [],
        lambda: [rng.choice((0, 1, 2, 3, 7, 2**31, 2**62, 2**64 - 1, 2**70, -1)) for _ in shape],
        lambda: [0, 2**40, 2**40],
        lambda: rng.choice((None, "shape", 3, [1.5], ["1"], [None], {})),
    ]
    entry["shape"] = rng.choice(edits)()


def _move(rng: random.Random, header: Header) -> None:
    _, entry = _tensor(rng, header)
    numbers = (0, 1, 8, 16, 100, 2**40, 2**63, 2**64 - 1, 2**64, -8)
    entry["data_offsets"] = rng.choice(
        ([rng.choice(numbers), rng.choice(numbers)], [0, 8, 16], [], None, "0", [0.5, 1], [rng.choice(numbers)])
    )


def _edit_metadata(rng: random.Random, header: Header) -> None:
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict):
        return
    metadata[rng.choice(_KEYS)] = rng.choice(_VALUES)


def _drop_metadata(rng: random.Random, header: Header) -> None:
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not metadata or rng.random() < 0.2:
        header.pop("__metadata__", None)
    else:
        metadata.pop(rng.choice(list(metadata)))


def _replace_entry(rng: random.Random, header: Header) -> None:
    header[rng.choice([*header, "extra"])] = rng.choice((None, 1, "x", [], {}, {"dtype": "F64"}))


_HEADER_EDITS = [_rename, _drop, _retype, _reshape, _move, _edit_metadata, _drop_metadata, _replace_entry]
_NAMES = ["layers.0.query", "layers.1.key", "layers.2.value", "layers.00.query", "layers.-1.query", "layers.0.quary",
          "layers.0.mlp.in", "layers.0.mlp.out_bias", "layers.0.norm.weight", "layers.0.norm.bias", "layers", "",
          "layers.9999999.query", "layers.99999999999999999999.query", "x", "../../etc/passwd", "layers.٠.query",
          "layers.0.query\n", "a" * 10_000, "\ud800", "layers.1.norm.weight"]  # fmt: skip
_DTYPES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "U16", "U32", "U64", "BOOL", "F8_E4M3", "F8_E5M2",
           "F8_E8M0", "F4", "F6_E2M3", "C64", "", "f64", None, 64]  # fmt: skip
_KEYS = [
    "format",
    "version",
    "scale",
    "skip",
    "causal",
    "activation",
    "norm",
    "mlp_skip",
    "name",
    "provenance",
    "other",
]
_VALUES = ["", "true", "false", "True", "1", "0", "-1", "2", "nan", "inf", "1e400", "-0.5", "1e-400", "relu", "gelu",
           "none", "pre", "post", "depthgauge.network", "{}", "[]", "{\"a\": NaN}", "{" * 1000, "[" * 100_000, "null",
           "\u0000", "\ud800", "ℓ", "9" * 6000, None, 1, True, {}, [], "x" * 100_000, "\x1b[31mred"]  # fmt: skip

MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    _flip_bytes, _flip_header_byte, _flip_header_byte, _truncate, _extend, _cut_out, _edit_length, _edit_header,
    _edit_header, _edit_header, _edit_header, _garble_json, _edit_floats,
]  # fmt: skip


def mutated(rng: random.Random, content: bytes) -> bytes:
    """Apply one kind of damage, sometimes two."""
    damaged = rng.choice(MUTATIONS)(rng, content)
    if rng.random() < 0.15 and len(damaged) > 16:
        damaged = rng.choice((_flip_bytes, _truncate, _edit_length))(rng, damaged)
    return damaged
