"""Whether a run fits: the memory and the disk space that it needs, known before weights are downloaded or loaded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from depthgauge.base.format import size_text
from depthgauge.checkpoints.inputs.found_data import FoundData
from depthgauge.checkpoints.source.model_files import Source
from depthgauge.checkpoints.weights.described import describe
from depthgauge.checkpoints.weights.load import Checkpoint, blocks_of, parameter_count
from depthgauge.checkpoints.weights.stored_weights import free_memory, streamed_bytes
from depthgauge.recovery.distillation import TRAINING
from depthgauge.results.shrink_record import ShrinkOptions
from depthgauge.surgery.calibration import CutTexts
from depthgauge.surgery.open_model import ReadModel, calibration_sizes, requested_counts, written_sizes
from depthgauge.surgery.write_model import free_disk, require_room


@dataclass(frozen=True)
class NeededRoom:
    """Bytes that a run needs.

    - `weights`: the weights; of a streamed model, those outside the blocks and two blocks
    - `states`: the states that are kept between the blocks
    - `training`: `TRAINING` for each weight that is trained
    - `disk`: what is written
    """

    weights: int
    states: int
    training: int = 0
    disk: int = 0

    def sentence(self, device: torch.device, out: str | Path | None = None) -> str:
        """Say what is needed, on this device and next to this output, and what is free.

        What is beyond the weights has other ways if memory is short, so the sentence is no error.
        """
        parts = {"weights": self.weights, "states": self.states, "training": self.training}
        needed, free = sum(parts.values()), free_memory(device)
        named = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size)
        fits = "it fits" if needed <= free else "it may not fit"
        disk = ""
        if out is not None and self.disk:
            disk = f"; {size_text(self.disk)} on disk, and {size_text(free_disk(out))} are free"
        return f"{fits}: {size_text(needed)} of memory ({named}), and {size_text(free)} are free{disk}"


def room_of(whole: Checkpoint, is_streamed: bool, windows: int, tokens: int) -> NeededRoom:
    """Return what a model needs that keeps the states of so many windows of so many tokens at once."""
    model = whole.model
    weights = (
        streamed_bytes(model, whole.layers) if is_streamed else sum(weight.nbytes for weight in model.parameters())
    )
    kept = (whole.layers + 1) * windows * tokens
    return NeededRoom(weights, kept * int(whole.config.hidden_size) * model.dtype.itemsize if kept else 0)


def shrink_room(model: ReadModel, settings: ShrinkOptions, removed: Sequence[int] | None) -> NeededRoom:
    """Return what a run of `shrink` needs; `removed` are the blocks of a plan.

    The states are counted for text. What is trained at most are the blocks that are left, and of several sizes that a
    limit on the loss allows, the largest one is written.
    """
    read, whole, repairs = model.read, model.model.whole, settings.repairs
    streamed = model.model.placement.stream
    sizes, windows, tokens = calibration_sizes(settings), 0, 0
    if isinstance(read, CutTexts):
        windows, tokens = sizes.select + sizes.fit * repairs, read.window
    removed = settings.layers_to_remove(whole.layers, whole.name) if removed is None else removed
    if removed is not None:
        counts: tuple[int, ...] = (len(removed),)
    else:
        counts = (1,) if settings.max_increase is not None else requested_counts(settings, whole, model.stored)
    total, blocks = written_sizes(whole, model.stored, repairs)
    trained = sorted(parameter_count(block) for block in blocks_of(whole))[counts[0] :]
    trains = repairs and not streamed and not settings.is_spread
    return replace(
        room_of(whole, streamed, windows, tokens),
        training=TRAINING * sum(trained) * trains,
        disk=sum(total - sum(blocks[:count]) for count in counts),
    )


def check_described(source: Source, asked: Any, data: FoundData | None, outputs: Iterable[str | Path]) -> None:
    """Raise if a model does not fit, of which only the configuration was downloaded.

    The disk of each output must have room for its weights.
    """
    whole = describe(None, source, asked, data, has_reader=False).whole
    for out in outputs:
        require_room(out, room_of(whole, False, 0, 0).weights)
