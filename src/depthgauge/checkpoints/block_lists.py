"""Find the blocks of a model: one list, or the two lists of an encoder–decoder model."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from depthgauge.checkpoints.find_blocks import find_blocks
from depthgauge.checkpoints.library import CheckpointError, attempt
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.results.gauge_options import BOTH


def with_stack(checkpoint: Checkpoint, stack: str) -> Checkpoint:
    """Return an encoder–decoder model of which one stack is gauged or shrunk, `encoder` or `decoder`, or `both`.

    The key of the configuration that has its number of layers is the one that changes this stack alone.

    Raises:
        CheckpointError: there is no such key.
    """
    if stack == BOTH:
        one, two = with_stack(checkpoint, "encoder"), with_stack(checkpoint, "decoder")
        return replace(
            one, stack=stack, layer_keys=one.layer_keys + two.layer_keys, families=one.families + two.families
        )
    kind: Any = type(checkpoint.model)
    other = "encoder" if stack == "decoder" else "decoder"
    lengths = {name: _stack_length(replace(checkpoint, stack=name)) for name in (stack, other)}
    values = checkpoint.config.to_dict().items()
    for key in [key for key, value in values if type(value) is int and value == lengths[stack] and "layer" in key]:
        config = copy.deepcopy(checkpoint.config)
        setattr(config, key, lengths[stack] + 1)
        try:
            with torch.device("meta"):
                built = attempt(checkpoint.name, "model", partial(kind, config), verb="build")
        except CheckpointError:  # transformers compares the numbers of layers with other settings
            continue
        trial = replace(checkpoint, model=built)
        found = {name: _stack_length(replace(trial, stack=name)) for name in (stack, other)}
        if found == lengths | {stack: lengths[stack] + 1}:
            families = (None,) * lengths[stack]
            return replace(checkpoint, stack=stack, layer_keys=(key,), families=families)
    raise CheckpointError(
        f"no key of the configuration of {checkpoint.name} has the number of layers of its {stack} alone; this model "
        "is not supported"
    )


def _stack_length(checkpoint: Checkpoint) -> int:
    """Return the number of blocks of a stack, the outermost list of modules in it."""
    (root,) = checkpoint.roots.values()
    return next((len(one) for one in root.modules() if isinstance(one, nn.ModuleList)), 0)


def blocks_of(checkpoint: Checkpoint) -> list[nn.Module]:
    """Return the blocks of all stacks of a checkpoint, or an empty list if those of one are not found."""
    found = [
        find_blocks(root, len(span)) for root, span in zip(checkpoint.roots.values(), checkpoint.spans, strict=True)
    ]
    return [block for blocks in found for block in blocks] if all(found) else []
