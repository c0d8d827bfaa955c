"""Cut a text into windows of equal length; if it has more windows than needed, draw some of them by a seed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import counted
from depthgauge.checkpoints.library import quiet
from depthgauge.checkpoints.tensor_record import TensorRecord
from depthgauge.errors import InputError, require_count, require_seed

WHOLE_BYTES = 4 * 2**20
"""Texts up to this size are read completely; of a larger text only pieces are read."""
_PIECE_BYTES = 64
"""Bytes read per token of a window when only pieces are read; tokens are much shorter."""


@dataclass(frozen=True, eq=False, repr=False)
class Windows(TensorRecord):
    """Windows of token ids and their origin.

    - `ids`: token ids, special tokens included
    - `source`: path of the text, or `the built-in text`
    - `digest`: SHA-256 of the bytes that were read
    """

    ids: Int[Tensor, "windows n"]
    source: str
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return the result JSON."""
        windows, n = self.ids.shape
        return {"source": self.source, "sha256": self.digest, "windows": windows, "window": n, "tokens": windows * n}


@dataclass(frozen=True, eq=False, repr=False)
class TokenizedText(TensorRecord):
    """The token ids of a text, or of pieces of a large text.

    - `source`: path of the text, or `the built-in text`
    - `digest`: SHA-256 of the bytes that were read
    - `pieces`: token ids of each piece, in the order of the text; one piece if the text was read at once
    - `complete`: whether the whole text was read
    """

    source: str
    digest: str
    pieces: tuple[Int[Tensor, " _"], ...]
    complete: bool

    @property
    def tokens(self) -> int:
        """The number of tokens that were read."""
        return sum(len(piece) for piece in self.pieces)

    def bodies(self, length: int) -> Int[Tensor, "bodies length"]:
        """Cut the pieces into disjoint runs of `length` tokens; drop the rest of each piece.

        Of a text that was not read completely, every piece gives one run, so that the runs are spread over the text.
        """
        most = None if self.complete or len(self.pieces) == 1 else 1
        return torch.cat([piece[: len(piece) // length * length].view(-1, length)[:most] for piece in self.pieces])


def tokenize_text(tokenizer: Any, text: str | Path | None, *, wanted: int, length: int, seed: int) -> TokenizedText:
    """Read a text and convert it to token ids; of a text above `WHOLE_BYTES`, read about as much as is needed.

    Args:
        tokenizer: the model's tokenizer.
        text: path of a UTF-8 file; None means the built-in text.
        wanted: number of windows that will be cut; one piece per window is read from a large text.
        length: tokens per window without special tokens.
        seed: chooses the pieces.
    """
    name, content, digest, complete = _read(text, wanted, length, seed)
    with quiet():
        pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in content]
    return TokenizedText(name, digest, tuple(torch.tensor(ids, dtype=torch.int64) for ids in pieces), complete)


def read_windows(
    tokenizer: Any,
    text: str | Path | None,
    *,
    tokens: int,
    window: int | None,
    context: int | None,
    seed: int,
    special: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Windows:
    """Cut a text into disjoint windows of token ids.

    Args:
        tokenizer: the model's tokenizer.
        text: path of a UTF-8 file; None means the built-in text.
        tokens: total number of tokens to use; at least one window is used.
        window: tokens per window, special tokens included; by default 512, or fewer if `context` or `tokens` is less.
        context: the longest window the model accepts, or None if unknown.
        seed: chooses the windows if the text has more than needed.
        special: token ids before and after every window; by default those that the tokenizer adds.
    """
    require_count("tokens", tokens, "the total number of tokens of text to use", least=2)
    require_seed(seed)
    if window is None:
        window = min(512, context or 512, tokens)
    before, after = special_tokens(tokenizer) if special is None else special
    length = body_length(window, context, len(before) + len(after))
    wanted = max(1, tokens // window)
    found = tokenize_text(tokenizer, text, wanted=wanted, length=length, seed=seed)
    bodies = found.bodies(length)
    if not len(bodies):
        raise InputError(
            f"{found.source} has {counted(found.tokens, 'token')}, but one window needs {length}; use a longer text or "
            "a smaller --window"
        )
    order = torch.randperm(len(bodies), generator=torch.Generator().manual_seed(seed))
    chosen = bodies[order[:wanted].sort().values]
    return Windows(surround(chosen, before, after), found.source, found.digest)


def body_length(window: int, context: int | None, around: int) -> int:
    """Return the number of tokens of a window that are not special tokens.

    Args:
        window: tokens per window, special tokens included.
        context: the longest window the model accepts; None means 512.
        around: number of special tokens in each window.

    Raises:
        InputError: the window is longer than the context, or holds special tokens only.
    """
    longest = context or 512
    require_count("window", window, "the number of tokens in one window", least=2)
    if window > longest:
        raise InputError(
            f"window must be at most {longest} for this model, got {window}; it is the number of tokens in one window"
        )
    if window <= around:
        raise InputError(
            f"window must be at least {around + 1} for this model, got {window}; "
            f"each window has {counted(around, 'special token')}"
        )
    return window - around


def surround(
    bodies: Int[Tensor, "windows length"], before: Sequence[int], after: Sequence[int]
) -> Int[Tensor, "windows n"]:
    """Add special tokens before and after every window."""
    first, last = (bodies.new_tensor(list(ids)).expand(len(bodies), -1) for ids in (before, after))
    return torch.cat([first, bodies, last], dim=1)


def drawn_windows(
    tokenizer: Any, text: str | Path | None, *, windows: int, window: int, seed: int
) -> Int[Tensor, "windows n"]:
    """Draw windows with random starts from a text; they may overlap, so a short text gives many samples."""
    before, after = special_tokens(tokenizer)
    length = window - len(before) - len(after)
    name, content, *_ = _read(text, windows, length, seed)
    with quiet():
        ids = tokenizer(content[0], add_special_tokens=False)["input_ids"]
    if len(ids) < length:
        raise InputError(f"{name} has {counted(len(ids), 'token')}, but one window needs {length}; use a longer text")
    starts = torch.randint(len(ids) - length + 1, (windows,), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.tensor([[*before, *ids[start : start + length], *after] for start in starts])


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer adds before and after a text."""
    with quiet():
        bare = tokenizer("a b", add_special_tokens=False)["input_ids"]
        full = tokenizer("a b")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _read(text: str | Path | None, wanted: int, length: int, seed: int) -> tuple[str, list[str], str, bool]:
    """Return the name of a text, its content, the digest of the bytes read, and whether the whole text was read.

    The content is one string, or pieces of a large text.

    Args:
        text: path of the text; None means the built-in text.
        wanted: number of pieces to read from a large text, one per window.
        length: tokens per window without special tokens.
        seed: chooses the pieces.
    """
    if text is None:
        default = resources.files("depthgauge.checkpoints").joinpath("text.txt").read_bytes()
        return "the built-in text", [default.decode("utf-8")], hashlib.sha256(default).hexdigest(), True
    path = Path(text)
    try:
        size = path.stat().st_size
        with open(path, "rb") as handle:
            complete = whole = size <= WHOLE_BYTES
            if whole:
                raw = [handle.read()]
            else:
                step = length * _PIECE_BYTES
                places = torch.randperm(max(size // step, 1), generator=torch.Generator().manual_seed(seed))
                complete = wanted > len(places)
                raw = []
                for place in sorted(places[:wanted].tolist()):
                    handle.seek(place * step)
                    raw.append(handle.read(step))
    except OSError as error:
        raise InputError(f"cannot read text {path}: {error.strerror or error}") from error
    digest = hashlib.sha256(b"".join(raw)).hexdigest()
    return str(path), [_decode(piece, path, whole) for piece in raw], digest, complete


def _decode(piece: bytes, path: Path, whole: bool) -> str:
    """Decode UTF-8; from a piece, remove incomplete characters at both ends and the incomplete word at the start."""
    try:
        if whole:
            return piece.decode("utf-8")
        start = next((i for i in range(4) if piece[i : i + 1] and piece[i] & 0xC0 != 0x80), 0)
        stop = max((i for i in range(1, 5) if len(piece) >= i and piece[-i] & 0xC0 == 0xC0), default=0)
        text = piece[start : len(piece) - stop].decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; convert it to UTF-8"
        ) from error
    return text.split(maxsplit=1)[-1] if text.split() else ""
