"""Read pairs of a source and a target, as an encoder–decoder model reads them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from depthgauge._format import counted
from depthgauge.checkpoints.found_inputs import PairFile
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.library import quiet
from depthgauge.checkpoints.samples import IGNORED, Samples
from depthgauge.errors import InputError

LONGEST = 128
"""The most tokens of a source and of a target by default; longer ones are cut."""


def read_pairs(
    found: PairFile, tokenizer: Any, config: Any, *, wanted: int, longest: int, seed: int, least: int = 1,
    advice: str = "",
) -> GivenWindows:  # fmt: skip
    """Draw up to `wanted` pairs by the seed, and convert them to token ids of at most `longest` tokens each.

    Sources and targets are padded at the end to the longest one. The decoder reads the target after its start token.

    Raises:
        InputError: there are fewer than `least` pairs; `advice` says what else to do.
    """
    if len(found.pairs) < least:
        raise InputError(
            f"{found.path} has {counted(len(found.pairs), 'different pair')}, and {least} are needed; give more pairs"
            f"{advice}"
        )
    order = torch.randperm(len(found.pairs), generator=torch.Generator().manual_seed(seed))[:wanted].tolist()
    chosen = [found.pairs[index] for index in order]
    with quiet():
        sources = [tokenizer(source)["input_ids"][:longest] for source, _ in chosen]
    inputs = {
        "input_ids": _padded(sources, config.pad_token_id or 0),
        "attention_mask": _padded([[1] * len(source) for source in sources], 0),
    }
    samples = target_samples(inputs, [target for _, target in chosen], tokenizer, config, longest)
    digest = hashlib.sha256("\0".join(text for pair in chosen for text in pair).encode()).hexdigest()
    return GivenWindows("pairs", samples, str(found.path), digest)


def target_samples(
    sources: Mapping[str, torch.Tensor], texts: Sequence[str], tokenizer: Any, config: Any, longest: int
) -> Samples:
    """Return the inputs of an encoder–decoder model: sources, and target texts of at most `longest` tokens each.

    The decoder reads a target after its start token. Where the tokenizer writes this token too, as that of Whisper
    does, it is left out of the target.
    """
    pad = config.pad_token_id or 0
    # transformers generates after the first of these that is set.
    starts = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id"))
    start = next((one for one in starts if one is not None), pad)
    with quiet():
        targets = [tokenizer(text_target=text)["input_ids"] for text in texts]
    targets = [(target[1:] if target[:1] == [start] else target)[:longest] for target in targets]
    read = _padded([[start, *target[:-1]] for target in targets], pad)
    return Samples({**sources, "decoder_input_ids": read}, _padded(targets, IGNORED))


def _padded(rows: list[list[int]], pad: int) -> torch.Tensor:
    """Return rows as one tensor, padded at the end."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])
