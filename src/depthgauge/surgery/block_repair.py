"""Repair one block in the way that suits its family."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.surgery.block_runner import BlockRunner
from depthgauge.surgery.repair import Change, output_maps, refit

RIDGE = 0.05
"""λ, relative to the mean squares of the features. On SmolLM2, 0.01 and 0.001 were worse on unseen text."""


def repair_block(
    runner: BlockRunner,
    layer: int,
    states: Float[Tensor, "windows n d"],
    targets: Float[Tensor, "windows n d"],
    *,
    attention: bool,
) -> Change:
    """Return the change that moves a block's output towards the dense model's states.

    The parameters are left as they were.

    Args:
        runner: the model's blocks.
        layer: the block.
        states: its inputs in the shrunk model.
        targets: the dense model's states at the matching depth.
        attention: also change the output projection of attention.
    """
    family = runner.checkpoint.family
    assert family is not None
    output, down = output_maps(runner.blocks[layer], family)
    changes = []
    if attention:
        # The update of both maps neglects that attention changes the input of the MLP; the second step corrects that.
        changes.append(refit(runner, layer, [output, down], states, targets, RIDGE))
        changes[-1].apply(1.0)
    changes.append(refit(runner, layer, [down], states, targets, RIDGE))
    changes[-1].apply(1.0)
    total = combined(changes)
    total.apply(0.0)
    return total


@torch.no_grad()
def combined(changes: list[Change]) -> Change:
    """Return one change with the effect of several that have been applied in order with step 1."""
    before: dict[nn.Parameter, Tensor] = {}
    for change in changes:
        for parameter, value in zip(change.parameters, change.before, strict=True):
            before.setdefault(parameter, value)
    deltas = tuple(parameter.double() - value.double() for parameter, value in before.items())
    return Change(tuple(before), tuple(before.values()), deltas)
