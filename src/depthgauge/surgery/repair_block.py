"""Refit one block by the method that its family needs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.surgery.repair import Change, output_maps, refit, shape_of
from depthgauge.surgery.repair_normed import normed_maps, refit_normed

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
    """Return `refit_block` as one change, for a line search along it.

    The ridge is λ = max(0.05, 1.2 · features/tokens): few tokens need a larger penalty.
    """
    family = runner.checkpoint.family
    assert family is not None
    features = shape_of(runner.blocks[layer].get_submodule(family.down))[0]
    ridge = max(RIDGE, RIDGE_PER_RATIO * features / (states.shape[0] * states.shape[1]))
    return combined(refit_block(runner, layer, states, targets, ridge, joint=joint, iterations=iterations))


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

    The arguments are those of `repair.refit`. With `joint`, the output projection of attention is refitted too, not
    only the last map of the MLP. `iterations` limits the steps where a norm follows; 4 give most of the improvement.
    """
    family = runner.checkpoint.family
    assert family is not None
    block = runner.blocks[layer]
    if family.mlp_norm is not None:
        pairs = normed_maps(block, family)
        return [refit_normed(runner, layer, states, targets, ridge, iterations, maps=pairs if joint else pairs[1:])]
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
    """Return one change with the effect of several at step length 1; each starts where the one before it ends."""
    before: dict[torch.nn.Parameter, Tensor] = {}
    deltas: dict[torch.nn.Parameter, Tensor] = {}
    for change in changes:
        for parameter, old, delta in zip(change.parameters, change.before, change.deltas, strict=True):
            before.setdefault(parameter, old)
            deltas[parameter] = old.double() - before[parameter].double() + delta
    return Change(tuple(before), tuple(before.values()), tuple(deltas[parameter] for parameter in before))
