"""Text as windows of tokens: a budget of tokens, cut into equal windows, chosen by a seed where there are more."""

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.checkpoints.library import quiet
from depthgauge.errors import InputError, require_count, require_seed

WHOLE_BYTES = 4 * 2**20
"""Texts up to this size are read whole; of a larger one only pieces are."""
_PIECE_BYTES = 64
"""Bytes read for every token of a window, when only pieces are: far more than a token has."""


@dataclass(frozen=True)
class Windows:
    """Windows of token ids `[windows, n]`, special tokens included, and where they came from."""

    ids: Int[Tensor, "windows n"]
    source: str
    digest: str

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        windows, n = self.ids.shape
        return {"source": self.source, "sha256": self.digest, "windows": windows, "window": n, "tokens": windows * n}


def read_windows(
    tokenizer: Any, text: str | Path | None, *, tokens: int, window: int | None, context: int | None, seed: int
) -> Windows:
    """Cut a text file, or with None the built-in text, into windows for a tokenizer.

    `tokens` is the budget, `window` the length of one window (512, or what the model's `context` allows). A budget of
    less than one window is one window.
    """
    require_count("tokens", tokens, "how many tokens of text to use in all", least=2)
    require_seed(seed)
    longest = context or 512
    window = min(512, longest, tokens) if window is None else require_count("window", window, "its tokens", least=2)
    if window > longest:
        raise InputError(f"window must be at most {longest} for this model, got {window}; it has no further positions")
    before, after = special_tokens(tokenizer)
    room = window - len(before) - len(after)
    if room < 1:
        raise InputError(f"window must be more than {len(before) + len(after)}, got {window}: special tokens fill it")
    wanted = max(1, tokens // window)
    name, content, digest = _read(text, wanted, room, seed)
    bodies: list[list[int]] = []
    count = 0
    for piece in content:
        with quiet():
            ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
        count += len(ids)
        most = None if len(content) == 1 else 1
        bodies += [ids[i : i + room] for i in range(0, len(ids) - room + 1, room)][:most]
    if not bodies:
        raise InputError(f"{name} has {count} tokens, one window has {room}; give more text, or a smaller --window")
    order = torch.randperm(len(bodies), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = [bodies[i] for i in sorted(order[:wanted])]
    return Windows(torch.tensor([[*before, *body, *after] for body in chosen]), name, digest)


def drawn_windows(
    tokenizer: Any, text: str | Path | None, *, windows: int, window: int, seed: int
) -> Int[Tensor, "windows n"]:
    """Windows that begin anywhere in a text, and may overlap: for short texts and many samples."""
    before, after = special_tokens(tokenizer)
    room = window - len(before) - len(after)
    name, content, _ = _read(text, windows, room, seed)
    with quiet():
        ids = tokenizer(content[0], add_special_tokens=False)["input_ids"]
    if len(ids) < room:
        raise InputError(f"{name} has {len(ids)} tokens, one window has {room}; give more text")
    starts = torch.randint(len(ids) - room + 1, (windows,), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.tensor([[*before, *ids[start : start + room], *after] for start in starts])


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    with quiet():
        bare = tokenizer("a b", add_special_tokens=False)["input_ids"]
        full = tokenizer("a b")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _read(text: str | Path | None, wanted: int, room: int, seed: int) -> tuple[str, list[str], str]:
    """The name of a text, its content whole or in pieces, and a digest of what was read."""
    if text is None:
        default = resources.files("depthgauge.checkpoints").joinpath("text.txt").read_bytes()
        return "the built-in text", [default.decode("utf-8")], hashlib.sha256(default).hexdigest()
    path = Path(text)
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            if size <= WHOLE_BYTES:
                raw = [handle.read()]
            else:
                length = room * _PIECE_BYTES
                places = torch.randperm(max(size // length, 1), generator=torch.Generator().manual_seed(seed))
                raw = []
                for place in sorted(places[:wanted].tolist()):
                    handle.seek(place * length)
                    raw.append(handle.read(length))
    except OSError as error:
        raise InputError(f"cannot read text {path}: {error.strerror or error}") from error
    digest = hashlib.sha256(b"".join(raw)).hexdigest()
    return str(path), [_decode(piece, path, whole=len(raw) == 1 and size <= WHOLE_BYTES) for piece in raw], digest


def _decode(piece: bytes, path: Path, whole: bool) -> str:
    """UTF-8; a piece out of the middle loses the broken letter at either end, and the broken word at its start."""
    try:
        if whole:
            return piece.decode("utf-8")
        start = next((i for i in range(4) if piece[i : i + 1] and piece[i] & 0xC0 != 0x80), 0)
        stop = max((i for i in range(1, 5) if len(piece) >= i and piece[-i] & 0xC0 == 0xC0), default=0)
        text = piece[start : len(piece) - stop].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; convert it first") from error
    return text.split(maxsplit=1)[-1] if text.split() else ""
