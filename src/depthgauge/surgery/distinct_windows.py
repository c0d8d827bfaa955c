"""Cut texts into windows whose contents are all different."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import counted
from depthgauge.checkpoints.text_files import TextFile
from depthgauge.checkpoints.windows import TokenizedText, tokenize_text
from depthgauge.errors import InputError

LEAST_BODY = 8
"""The shortest window, without special tokens, that is recommended or used for a short text."""
_REREADS = (1, 4, 16)
"""How much of a large text is read while its windows repeat, as multiples of what is needed."""


def distinct_windows(
    tokenizer: Any,
    texts: Sequence[TextFile],
    needed: Sequence[int],
    *,
    length: int,
    around: int,
    spare: int = 0,
    seed: int,
    seen: set[bytes],
    may_shorten: bool = False,
) -> list[tuple[TokenizedText, Int[Tensor, "windows length"]]]:
    """Draw disjoint windows from each text such that no content occurs twice, in one text or in two.

    Args:
        tokenizer: the model's tokenizer.
        texts: the texts.
        needed: number of windows of each text.
        length: tokens per window without special tokens.
        around: special tokens per window, for the error message.
        spare: number of tokens at the end of a window that are not compared.
        seed: chooses the windows.
        seen: contents that may not be used; the contents of all windows of the texts are added.
        may_shorten: if a text is too short, use the longest windows that give enough of them.

    Returns:
        Each text with its windows, in random order and without special tokens.

    Raises:
        InputError: A text is too short; the message gives the longest window that would work.
    """
    found = [
        _read(tokenizer, text, count, length, seed, seen, spare) for text, count in zip(texts, needed, strict=True)
    ]
    fresh = _fresh(found, length, set(seen), spare)
    short = [index for index, (bodies, count) in enumerate(zip(fresh, needed, strict=True)) if len(bodies) < count]
    if short:
        longest = _longest(found, needed, length, seen, spare)
        if longest is None or not may_shorten:
            index = short[0]
            raise _too_short(found[index], len(fresh[index]), needed[index], length, around, longest)
        length = longest
    fresh = _fresh(found, length, seen, spare)
    chosen = [
        bodies[torch.randperm(len(bodies), generator=torch.Generator().manual_seed(seed))[:count]]
        for bodies, count in zip(fresh, needed, strict=True)
    ]
    return list(zip(found, chosen, strict=True))


def drop_repeated(windows: Int[Tensor, "windows n"], seen: set[bytes], compared: int) -> Int[Tensor, "kept n"]:
    """Return the windows whose content is not in `seen`, each content once, in order; add them to `seen`.

    Args:
        windows: token ids.
        seen: contents that were used before.
        compared: number of tokens of a window, from its start, that are its content.
    """
    kept = []
    for index, row in enumerate(windows[:, :compared].contiguous().numpy()):
        content = hashlib.sha256(row.tobytes()).digest()
        if content not in seen:
            seen.add(content)
            kept.append(index)
    return windows[kept]


def _read(
    tokenizer: Any, text: TextFile, needed: int, length: int, seed: int, seen: set[bytes], spare: int
) -> TokenizedText:
    """Tokenize a text; if the windows of a large text repeat, read more of it."""
    for factor in _REREADS:
        found = tokenize_text(tokenizer, text, wanted=factor * needed, length=length, seed=seed)
        if found.complete or len(drop_repeated(found.bodies(length), set(seen), length - spare)) >= needed:
            break
    return found


def _fresh(texts: Sequence[TokenizedText], length: int, seen: set[bytes], spare: int) -> list[Tensor]:
    """Return the windows of each text that occur neither in `seen` nor before in the texts."""
    return [drop_repeated(text.bodies(length), seen, length - spare) for text in texts]


def _longest(
    texts: Sequence[TokenizedText], needed: Sequence[int], length: int, seen: set[bytes], spare: int
) -> int | None:
    """Return the greatest length below `length` at which every text has enough windows, or None if there is none.

    Where windows do not repeat, ⌊tokens/needed⌋ is the answer. Where they repeat, shorter lengths are tried in steps of
    at most 2 %.
    """
    trial = min(length - 1, *(text.tokens // count for text, count in zip(texts, needed, strict=True)))
    while trial >= LEAST_BODY:
        fresh = _fresh(texts, trial, set(seen), spare)
        if all(len(bodies) >= count for bodies, count in zip(fresh, needed, strict=True)):
            return trial
        trial -= max(1, trial // 50)
    return None


def _too_short(
    text: TokenizedText, windows: int, needed: int, length: int, around: int, longest: int | None
) -> InputError:
    tokens = counted(text.tokens, "token")
    read = f"{text.source} has {tokens}" if text.complete else f"{tokens} of {text.source}"
    advice = "use a longer text" if longest is None else f"use a longer text or --window {longest + around}"
    return InputError(
        f"{read}, enough for {counted(windows, 'window')} of {length + around} tokens that do not repeat; {needed} are "
        f"needed for the three parts (fit, select, certify), at least {needed * length} tokens; {advice}"
    )
