"""How many blocks a run of `shrink` removes, known before the weights are loaded."""

from typing import Any

import torch

from depthgauge.base.errors import InputError
from depthgauge.base.format import size_text
from depthgauge.checkpoints.block_lists import blocks_of
from depthgauge.checkpoints.load import Checkpoint, Placement, wrap
from depthgauge.checkpoints.source import Source, weight_files
from depthgauge.checkpoints.stored_weights import built_model, stored_dtype
from depthgauge.results.gauge_options import allows
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.results.shrink_record import PlanRecord
from depthgauge.surgery.gguf_layout import GgufLayout


def describe_model(source: Source | None, config: Any, chosen: Any, objective: str, placement: Placement) -> Checkpoint:
    """Return a model on the device `meta`, in the dtype that it would be loaded in."""
    name = str(getattr(config, "name_or_path", "") or config.model_type) if source is None else source.target
    dtype = placement.torch_dtype()
    if not isinstance(dtype, torch.dtype):
        has_files = source is not None and (source.gguf is not None or bool(weight_files(source)))
        found = stored_dtype(config, source) if source is not None and has_files else getattr(config, "dtype", None)
        dtype = found if isinstance(found, torch.dtype) else torch.float32
    model = built_model(name, config, chosen, allows(placement, "code"), dtype=dtype)
    return wrap(model, name, source, objective)


def check_model(
    settings: ShrinkOptions, whole: Checkpoint, stored: torch.dtype | GgufLayout | None, plan: PlanRecord | None
) -> None:
    """Raise for options that do not fit a model, whose weights are not needed; a plan has blocks of it already."""
    settings.check_model(whole.objective, whole.name)
    settings.check_layers(whole.layers, whole.name)
    if settings.max_bytes is not None and plan is None:
        requested_counts(settings, whole, stored)


def requested_counts(
    settings: ShrinkOptions, checkpoint: Checkpoint, stored: torch.dtype | GgufLayout | None
) -> tuple[int, ...]:
    """Return the numbers of blocks to remove that the options ask for, other than by `max_increase`, in order."""
    layers, name = checkpoint.layers, checkpoint.name
    if settings.max_bytes is not None:
        return (blocks_over(checkpoint, settings.byte_limit(), stored, not settings.no_repair),)
    return tuple(settings.counts(layers, name))


def written_sizes(
    checkpoint: Checkpoint, stored: torch.dtype | GgufLayout | None, repairs: bool
) -> tuple[int, list[int]]:
    """Return the bytes of all weights and, in increasing order, those of each block, as they are written.

    Weights are counted in the dtype `stored`, in the types that a GGUF file has after `repairs`, or in their own.
    """

    def size(weights: Any) -> int:
        return sum(one.numel() * (stored if isinstance(stored, torch.dtype) else one.dtype).itemsize for one in weights)

    if isinstance(stored, GgufLayout):
        return stored.sizes(repairs)
    return size(checkpoint.model.parameters()), sorted(size(block.parameters()) for block in blocks_of(checkpoint))


def blocks_over(
    checkpoint: Checkpoint, limit: int, stored: torch.dtype | GgufLayout | None, repairs: bool = True
) -> int:
    """Return how many blocks must go until the weights take at most `limit` bytes, whichever blocks they are.

    See `written_sizes`.
    """
    total, blocks = written_sizes(checkpoint, stored, repairs)
    if total <= limit:
        taken = f"{checkpoint.name} takes {size_text(total)}"
        raise InputError(f"--max-bytes {size_text(limit)} removes nothing, because {taken}; give a smaller size")
    for count in range(1, checkpoint.layers):
        if total - sum(blocks[:count]) <= limit:
            return count
    least = total - sum(blocks[:-1])
    raise InputError(
        f"--max-bytes {size_text(limit)} is too small: {checkpoint.name} takes {size_text(total)}, and with one block "
        f"left {size_text(least)}"
    )
