"""Refit one block by the method that its family needs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.surgery.repair import Change, output_maps, refit, shape_of
from depthgauge.surgery.repair_normed import follows_norm, normed_maps, refit_normed

RIDGE = 0.05
"""Smallest λ, relative to the mean squares of the features. On SmolLM2, 0.01 and 0.001 were worse on unseen text."""
RIDGE_PER_RATIO = 1.2
"""λ for as many features as tokens. On MiniLM with 1,536 features and 6,144 tokens, 0.3 was better than 0.05."""


def repair_block(
    runner: BlockRunner,
    layer: int,
    states: Float[Tensor, "windows n d"],
    targets: Float[Tensor, "windows n d"],
    *,
    joint: bool,
    iterations: int = 12,
) -> Change:
    """Return `refit_block` with the usual ridge as one change, for a line search along it."""
    family = runner.checkpoint.family
    assert family is not None
    width = shape_of(runner.blocks[layer].get_submodule(family.down))[0]
    ridge = usual_ridge(width, states.shape[0] * states.shape[1])
    return combined(refit_block(runner, layer, states, targets, ridge, joint=joint, iterations=iterations))


def usual_ridge(features: int, tokens: int) -> float:
    """Return λ = max(0.05, 1.2 · features/tokens): few tokens need a larger penalty."""
    return max(RIDGE, RIDGE_PER_RATIO * features / tokens)


def refit_block(
    runner: BlockRunner,
    layer: int,
    states: Float[Tensor, "windows n d"],
    targets: Float[Tensor, "windows n d"],
    ridge: float,
    *,
    joint: bool,
    iterations: int = 12,
) -> list[Change]:
    """Return the changes that bring the output of a block close to a target.

    - no norm follows the maps: ridge regression (`repair.refit`). With `joint`, both maps are changed together, as if
      the output projection of attention did not change the MLP's inputs. Where it does (order `pre`), a second change
      refits the last map of the MLP to the inputs that result from the first.
    - a norm follows: one change by `repair_normed.refit_normed`

    The parameters are the same afterwards as before. Apply the changes in order, and undo them in reverse order.

    Args:
        runner: the model's blocks.
        layer: the block.
        states: inputs of the block, from the shrunk model.
        targets: T, the dense model's states at the matching depth.
        ridge: λ, relative to the mean square of the features.
        joint: refit the output projection of attention too, not only the last map of the MLP.
        iterations: most steps where a norm follows; 4 give most of the improvement.
    """
    family = runner.checkpoint.family
    assert family is not None
    block = runner.blocks[layer]
    if follows_norm(family):
        pairs = normed_maps(block, family)
        maps = pairs if joint else pairs[1:]
        return [refit_normed(runner, layer, states, targets, ridge, iterations, maps=maps)]
    both = output_maps(block, family)
    first = refit(runner, layer, both if joint else both[1:], states, targets, ridge)
    if not joint or family.order == "parallel":
        return [first]
    first.apply(1.0)
    try:
        return [first, refit(runner, layer, both[1:], states, targets, ridge)]
    finally:
        first.apply(0.0)


def combined(changes: Sequence[Change]) -> Change:
    """Return one change with the effect of several at step length 1, for a line search along all of them.

    Args:
        changes: changes in the order in which they are applied; each starts where the one before it ends.
    """
    before: dict[torch.nn.Parameter, Tensor] = {}
    deltas: dict[torch.nn.Parameter, Tensor] = {}
    for change in changes:
        for parameter, old, delta in zip(change.parameters, change.before, change.deltas, strict=True):
            before.setdefault(parameter, old)
            deltas[parameter] = old.double() - before[parameter].double() + delta
    return Change(tuple(before), tuple(before.values()), tuple(deltas[parameter] for parameter in before))
