"""Verify that blocks can be removed from a model: what is left computes what the other blocks compute."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted, number
from depthgauge.checkpoints.block_runner import BlockRunner
from depthgauge.checkpoints.derive_family import NotDerivedError, kind_of, traced_runner
from depthgauge.checkpoints.library import CheckpointError, quiet, short
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.model_output import model_output
from depthgauge.checkpoints.probe import relative_difference, rounding_tolerance
from depthgauge.checkpoints.samples import Inputs, Samples, as_samples, shortened
from depthgauge.surgery.extract import extract, require_supported
from depthgauge.surgery.fresh_process import generations, prompt_of

TRIED = 8
"""How many of the first blocks are tried until one can be removed; ModernBERT builds its first block differently."""


def first_removable(checkpoint: Checkpoint, inputs: Inputs) -> tuple[int, str]:
    """Return the first block whose removal is verified, and why those before it cannot be removed.

    A model is extracted without the block, which shifts the indices of all later ones. It must have the blocks that its
    configuration gives it, and compute what the blocks of the dense model compute one by one. If the blocks are of
    different kinds, each set of blocks is verified by the search, and the result is 0 if any block can be removed.

    Raises:
        CheckpointError: the model is not supported, or the removal of none of the tried blocks is verified.
    """
    require_supported(checkpoint)
    try:
        runner, _ = traced_runner(checkpoint, inputs)
    except (NotDerivedError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"blocks cannot be removed from {checkpoint.name}: {short(error)}") from error
    reasons: list[str] = []
    layers, mixed = checkpoint.layers, is_mixed(runner)
    # Without its last block, a model has all others at their places.
    for layer in dict.fromkeys([*range(min(TRIED, layers)), *([layers - 1] if mixed else [])]):
        reason = None if layers == 1 else why_not_removed(runner, (layer,), inputs[:1])
        if reason is None:
            return (0, "") if mixed else (layer, next(iter(reasons), ""))
        reasons.append(reason)
    raise CheckpointError(reasons[-1 if mixed else 0])


def is_mixed(runner: BlockRunner) -> bool:
    """Return whether the blocks are of different kinds; some sets of them may then not be removed together."""
    return len(set(map(kind_of, runner.blocks))) > 1


@torch.no_grad()
def why_not_removed(runner: BlockRunner, removed: Collection[int], inputs: Inputs) -> str | None:
    """Return why no model can be built without these blocks that runs and computes what the others do, or None.

    The model is also run as its users run it, with a cache: LFM2, for example, needs a layer of attention for that. An
    encoder–decoder model generates two tokens: the cache of T5 needs as many blocks in the encoder as in the decoder.
    """
    checkpoint, kept = runner.checkpoint, [layer for layer in range(len(runner)) if layer not in removed]
    samples = as_samples(shortened(inputs, 2), checkpoint.reads)
    try:
        with quiet():
            made = extract(checkpoint, kept, copies=False)
            require_same_output(made, runner, kept, inputs)
            made(**samples.keywords(runner.device, made.dtype))
            if checkpoint.stack is not None and checkpoint.objective == "loss" and checkpoint.reads in samples.inputs:
                _require_generation(replace(checkpoint, model=made, config=made.config), samples)
    except InputError as error:
        return str(error)
    except Exception as error:  # a library refuses a configuration or fails in a forward pass in many ways
        return f"without the blocks {sorted(removed)}, {checkpoint.name} cannot be built or run: {short(error)}"
    return None


def _require_generation(checkpoint: Checkpoint, samples: Samples) -> None:
    """Raise unless an encoder–decoder model generates two tokens."""
    try:
        generations(checkpoint.model, prompt_of(samples.inputs, None), 2)
    except Exception as error:  # a library fails in many ways
        stacks = zip(checkpoint.roots, checkpoint.spans, strict=True)
        numbers = " and ".join(f"{counted(len(span), 'block')} in its {name}" for name, span in stacks)
        raise CheckpointError(
            f"with {numbers}, {checkpoint.name} cannot generate in transformers: {short(error)}; keep other blocks"
        ) from error


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
