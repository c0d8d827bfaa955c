"""Cut a text into windows of equal length; if it has more windows than needed, draw some of them by a seed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.base.format import counted, one_line
from depthgauge.checkpoints.inputs.samples import Windows
from depthgauge.checkpoints.inputs.text_files import TextFile, find_text, read_text
from depthgauge.checkpoints.source.library import quiet

WINDOW = 512
"""The longest window by default."""
WINDOWS = 8
"""The least number of windows by default: an interval over that many windows covers as often as it says."""
SHORT_WINDOW = 64
"""Windows are not made shorter than this in order to have more of them."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenizedText(ArrayRecord):
    """The token ids of a text, or of pieces of a large text.

    - `source`: name of the text: its path, `path:field`, or `the built-in text`
    - `digest`: SHA-256 of the bytes that were read
    - `pieces`: token ids of each piece; one piece if the text was read at once
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


def tokenize_text(
    tokenizer: Any, text: str | Path | TextFile | None, *, wanted: int, length: int, seed: int, whole: bool = False
) -> TokenizedText:
    """Read a text (see `find_text`) and convert it to token ids; of a large text, read about as much as is needed.

    `wanted` windows of `length` tokens without special tokens will be cut; `seed` chooses the pieces of a large text.
    With `whole`, all of a large text is read.
    """
    found = find_text(text)
    content = read_text(
        found, lambda chat: chat_text(tokenizer, chat), wanted=wanted, length=length, seed=seed, whole=whole
    )
    with quiet():
        pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in content.pieces]
    ids = tuple(torch.tensor(one, dtype=torch.int64) for one in pieces)
    return TokenizedText(found.name, content.digest, ids, content.complete)


def chat_text(tokenizer: Any, messages: list[Any]) -> str:
    """Convert the messages of a chat to text by the tokenizer's chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError(
            "the tokenizer has no chat template; use the tokenizer of a chat model, or name a field with plain text"
        )
    try:
        with quiet():
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # templates raise errors of jinja2, KeyError, TypeError and others
        raise InputError(f"the chat template failed: {one_line(error)}") from error


def read_windows(
    tokenizer: Any,
    text: str | Path | TextFile | None,
    *,
    tokens: int,
    window: int | None,
    context: int | None,
    seed: int,
    special: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Windows:
    """Cut a text (see `find_text`) into disjoint windows of token ids, at least one and about `tokens` in total.

    A window has `window` tokens with the special ones, by default `usual_window`; `context` is the longest that the
    model accepts, if that is known. The seed chooses windows if the text has more than needed. `special` are the token
    ids before and after every window, by default those that the tokenizer adds.
    """
    if window is None:
        window = usual_window(tokens, context)
    before, after = special_tokens(tokenizer) if special is None else special
    length = body_length(window, context, len(before) + len(after))
    wanted = max(1, tokens // window)
    found = tokenize_text(tokenizer, text, wanted=wanted, length=length, seed=seed)
    bodies = found.bodies(length)
    if not len(bodies):
        raise too_short(found, length, len(before) + len(after))
    order = torch.randperm(len(bodies), generator=torch.Generator().manual_seed(seed))
    chosen = bodies[order[:wanted].sort().values]
    return Windows(surround(chosen, before, after), found.source, found.digest)


def too_short(found: TokenizedText, length: int, around: int) -> InputError:
    """Return the error for a text without a window of `length` tokens, beside which it has `around` special ones."""
    advice = longer_text(found, max(map(len, found.pieces)) + around)
    return InputError(f"{found.source} has {counted(found.tokens, 'token')}, but one window needs {length}; {advice}")


def longer_text(found: TokenizedText, window: int) -> str:
    """Return what to do about a text that has windows of `window` tokens at most; short ones say too little."""
    needed = "give a text" if found.source == TextFile().name else "use a longer text"
    return needed + (f", or --window {window}" if window >= SHORT_WINDOW else "")


def usual_window(tokens: int, context: int | None) -> int:
    """Return the tokens per window where none is requested: `WINDOW`, or fewer so that there are `WINDOWS` windows.

    `tokens` is the total number of tokens, and `context` the longest window the model accepts, if that is known.

    >>> [usual_window(tokens, 8192) for tokens in (2**20, 2048, 256, 32)]
    [512, 256, 64, 32]
    """
    return min(WINDOW, context or WINDOW, max(tokens // WINDOWS, SHORT_WINDOW), tokens)


def body_length(window: int, context: int | None, around: int) -> int:
    """Return the number of tokens of a window that are not special tokens, of which each window has `around`.

    Raises:
        InputError: the window is longer than the context (512 if that is None), or holds special tokens only.
    """
    longest = context or 512
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
    tokenizer: Any, text: str | Path | TextFile | None, *, windows: int, window: int, seed: int
) -> Int[Tensor, "windows n"]:
    """Draw windows with random starts from a text; they may overlap, so a short text gives many samples."""
    before, after = special_tokens(tokenizer)
    length = window - len(before) - len(after)
    found = tokenize_text(tokenizer, text, wanted=windows, length=length, seed=seed)
    ids = found.pieces[0]
    if len(ids) < length:
        raise too_short(found, length, len(before) + len(after))
    starts = torch.randint(len(ids) - length + 1, (windows,), generator=torch.Generator().manual_seed(seed)).tolist()
    return surround(torch.stack([ids[start : start + length] for start in starts]), before, after)


def drop_repeated(windows: Int[Tensor, "windows n"], seen: set[bytes], compared: int) -> Int[Tensor, "kept n"]:
    """Return the windows whose content is not in `seen`, each content once, in order; add them to `seen`.

    The content of a window are its first `compared` tokens.
    """
    kept = []
    for index, row in enumerate(windows[:, :compared].contiguous().numpy()):
        content = hashlib.sha256(row.tobytes()).digest()
        if content not in seen:
            seen.add(content)
            kept.append(index)
    return windows[kept]


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed from 0 to 2⁶³ − 1 for one purpose, so that two purposes do not use the same random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "big") >> 1


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that the tokenizer adds before and after a text."""
    with quiet():
        bare = tokenizer("a b", add_special_tokens=False)["input_ids"]
        full = tokenizer("a b")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []
