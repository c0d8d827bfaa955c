"""Verify that blocks can be removed from a model: what is left computes what the other blocks compute."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import number
from depthgauge.checkpoints.derive_family import NotDerivedError, kind_of, traced_runner
from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.library import CheckpointError, quiet, short
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.model_output import model_output
from depthgauge.checkpoints.probe import relative_difference, rounding_tolerance
from depthgauge.surgery.extract import extract, require_supported

TRIED = 8
"""How many of the first blocks are tried until one can be removed; ModernBERT builds its first block differently."""


def first_removable(checkpoint: Checkpoint, ids: Int[Tensor, "windows n"]) -> tuple[int, str]:
    """Return the first block whose removal is verified, and why those before it cannot be removed.

    A model is extracted without the block, which shifts the indices of all later ones. It must have the blocks that its
    configuration gives it, and compute what the blocks of the dense model compute one by one. If the blocks are of
    different kinds, each set of blocks is verified by the search, and the result is 0 if any block can be removed.

    Raises:
        CheckpointError: the model is not supported, or the removal of none of the tried blocks is verified.
    """
    require_supported(checkpoint)
    try:
        runner, _ = traced_runner(checkpoint, ids)
    except (NotDerivedError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"blocks cannot be removed from {checkpoint.name}: {short(error)}") from error
    reasons: list[str] = []
    layers, mixed = checkpoint.layers, is_mixed(runner)
    # Without its last block, a model has all others at their places.
    for layer in dict.fromkeys([*range(min(TRIED, layers)), *([layers - 1] if mixed else [])]):
        reason = None if layers == 1 else why_not_removed(runner, (layer,), ids[:1])
        if reason is None:
            return (0, "") if mixed else (layer, next(iter(reasons), ""))
        reasons.append(reason)
    raise CheckpointError(reasons[0])


def is_mixed(runner: BlockRunner) -> bool:
    """Return whether the blocks are of different kinds; some sets of them may then not be removed together."""
    return len(set(map(kind_of, runner.blocks))) > 1


@torch.no_grad()
def why_not_removed(runner: BlockRunner, removed: Collection[int], ids: Int[Tensor, "1 n"]) -> str | None:
    """Return why no model can be built without these blocks that runs and computes what the others do, or None.

    The model is also run as its users run it, with a cache: LFM2, for example, needs a layer of attention for that.
    """
    kept = [layer for layer in range(len(runner)) if layer not in removed]
    try:
        with quiet():
            made = extract(runner.checkpoint, kept, copies=False)
            require_same_output(made, runner, kept, ids)
            made(input_ids=ids[:, :2].to(runner.device))
    except CheckpointError as error:
        return str(error)
    except Exception as error:  # a library refuses a configuration or fails in a forward pass in many ways
        return f"without the blocks {sorted(removed)}, {runner.checkpoint.name} cannot be built or run: {short(error)}"
    return None


@torch.no_grad()
def require_same_output(model: Any, runner: BlockRunner, kept: Sequence[int], ids: Int[Tensor, "1 n"]) -> None:
    """Raise unless an extracted model computes what the blocks `kept` of the dense model compute one by one.

    The tokens are as many as those of the runner's example.
    """
    checkpoint = runner.checkpoint
    expected = runner.output(runner.through(kept, runner.embed(ids)).to(runner.device))
    found = model_output(model, ids.to(checkpoint.device), checkpoint.objective == "loss")
    off = relative_difference(found, expected)
    if not off <= rounding_tolerance(expected.dtype):
        removed = [layer for layer in range(checkpoint.layers) if layer not in kept]
        raise CheckpointError(
            f"blocks {removed} cannot be removed from {checkpoint.name}: the model without them should compute what "
            f"its other blocks compute, but its output differs by {number(off, 2)} of the largest entry"
        )
