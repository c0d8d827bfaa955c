"""Verify that blocks can be removed from a model: what is left computes what the other blocks compute."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from depthgauge._format import number
from depthgauge.checkpoints.derive_family import NotDerivedError, traced_runner
from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.library import CheckpointError, short
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.model_output import model_output
from depthgauge.checkpoints.probe import relative_difference, rounding_tolerance
from depthgauge.checkpoints.samples import Inputs
from depthgauge.surgery.extract import extract, require_supported

TRIED = 8
"""How many of the first blocks are tried until one can be removed; ModernBERT builds its first block differently."""


def first_removable(checkpoint: Checkpoint, inputs: Inputs) -> tuple[int, str]:
    """Return the first block whose removal is verified, and why those before it cannot be removed.

    A model is extracted without the block, which shifts the indices of all later ones. It must have the blocks that its
    configuration gives it, and compute what the blocks of the dense model compute one by one.

    Raises:
        CheckpointError: the model is not supported, or the removal of none of the first blocks is verified.
    """
    require_supported(checkpoint)
    reason = ""
    try:
        runner, _ = traced_runner(checkpoint, inputs)
    except (NotDerivedError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"blocks cannot be removed from {checkpoint.name}: {short(error)}") from error
    for layer in range(min(TRIED, checkpoint.layers)):
        kept = [other for other in range(checkpoint.layers) if other != layer]
        try:
            if kept:
                require_same_output(extract(checkpoint, kept), runner, kept, inputs[:1])
            return layer, reason
        except CheckpointError as error:
            reason = reason or str(error)
    raise CheckpointError(reason)


@torch.no_grad()
def require_same_output(model: Any, runner: BlockRunner, kept: Sequence[int], inputs: Inputs) -> None:
    """Raise unless an extracted model computes what the blocks `kept` of the dense model compute one by one.

    The tokens are as many as those of the runner's example.
    """
    checkpoint = runner.checkpoint
    expected = runner.output(runner.through(kept, runner.embed(inputs), inputs).to(runner.device), inputs)
    found = model_output(replace(checkpoint, model=model), inputs)
    off = relative_difference(found, expected)
    if not off <= rounding_tolerance(expected.dtype):
        removed = [layer for layer in range(checkpoint.layers) if layer not in kept]
        raise CheckpointError(
            f"blocks {removed} cannot be removed from {checkpoint.name}: the model without them should compute what "
            f"its other blocks compute, but its output differs by {number(off, 2)} of the largest entry"
        )
