"""How many blocks must go until the weights of a model fit."""

from typing import Any

import torch

from depthgauge._format import size_text
from depthgauge.checkpoints.block_lists import blocks_of
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.errors import InputError
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.surgery.gguf_layout import GgufLayout


def requested_counts(
    settings: ShrinkOptions, checkpoint: Checkpoint, stored: torch.dtype | GgufLayout | None
) -> tuple[int, ...]:
    """Return the numbers of blocks to remove that the options ask for, other than by `max_increase`, in order."""
    layers, name = checkpoint.layers, checkpoint.name
    if settings.sizes is not None:
        return settings.counts(layers, name)
    if settings.max_bytes is not None:
        return (blocks_over(checkpoint, settings.byte_limit(), stored, not settings.no_repair),)
    return (settings.count(layers, name),)


def blocks_over(
    checkpoint: Checkpoint, limit: int, stored: torch.dtype | GgufLayout | None, repairs: bool = True
) -> int:
    """Return how many blocks must go until the weights take at most `limit` bytes, whichever blocks they are.

    Weights are counted in the dtype `stored`, in the types that a GGUF file has after `repairs`, or in their own.
    """

    def size(weights: Any) -> int:
        return sum(one.numel() * (stored if isinstance(stored, torch.dtype) else one.dtype).itemsize for one in weights)

    if isinstance(stored, GgufLayout):
        total, blocks = stored.sizes(repairs)
    else:
        total = size(checkpoint.model.parameters())
        blocks = sorted(size(block.parameters()) for block in blocks_of(checkpoint))
    for count in range(1, checkpoint.layers):
        if total - sum(blocks[:count]) <= limit:
            return count
    least = total - sum(blocks[:-1])
    raise InputError(
        f"--max-bytes {size_text(limit)} is too small: {checkpoint.name} takes {size_text(total)}, and with one block "
        f"left {size_text(least)}"
    )
