"""Residual by depth of a transformer with skip connections or MLPs switched off, as in Dong et al. (2021).

Switching off skips removes only the residual connection around attention; LayerNorm and the residual connection around
the MLP remain, as in their experiment. States are taken before the final norm.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge.checkpoints.derive_family import derived
from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.hooks import changed, hidden_in
from depthgauge.checkpoints.interface import attending
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.theory.measures.quantities import residual_size


@dataclass(frozen=True)
class Variant:
    """Which parts of every block are on, in addition to attention."""

    skip: bool
    mlp: bool


VARIANTS: Mapping[str, Variant] = {
    "attention only": Variant(skip=False, mlp=False),
    "+ MLP": Variant(skip=False, mlp=True),
    "+ skip": Variant(skip=True, mlp=False),
    "full": Variant(skip=True, mlp=True),
}


@torch.no_grad()
def residual_by_depth(
    checkpoint: Checkpoint, samples: Int[Tensor, "samples n"], variant: Variant
) -> Float[Tensor, "samples states"]:
    """Compute ‖X_ℓ − 1x̄ᵀ‖/‖X_ℓ‖ for ℓ = 0 … L and every sample, in the composite norm, with x̄ the mean token."""
    checkpoint = derived(checkpoint, samples)
    if not all(family and family.attention and not family.between for family in checkpoint.families):
        raise CheckpointError(
            f"parts of {checkpoint.name} cannot be switched off: "
            + (checkpoint.underived or "some of its blocks do not mix tokens, or have more than two sublayers")
        )
    with attending(checkpoint.model) as session:
        stack = Stack(checkpoint, session)
        with switched(stack, variant):
            curves = []
            for ids in samples:
                states = stack.full(ids[None]).states
                curves.append(torch.cat([residual_size(state, "composite", "mean").ratio for state in states]))
    return torch.stack(curves).cpu()


@contextmanager
def switched(stack: Stack, variant: Variant) -> Iterator[None]:
    """Run every block as `variant` within this context."""
    with ExitStack() as hooks:
        for block, family in zip(stack.blocks, stack.checkpoint.families, strict=True):
            assert family is not None
            if not variant.mlp and family.mlp is not None:
                hooks.enter_context(changed(block.get_submodule(family.mlp), torch.zeros_like))
            if not variant.skip:
                hooks.enter_context(_without_skip(block, family))
        yield


@contextmanager
def _without_skip(block: nn.Module, family: Family) -> Iterator[None]:
    """Make attention return a − x/m, so that the block computes x + m(a − x/m) = ma, with the residual multiplier m."""
    read: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read[:] = [hidden_in(args, kwargs)]

    def less_input(added: Tensor) -> Tensor:
        return added - read[0].to(added.device) / family.multiplier

    assert family.attention is not None
    added_only = changed(block.get_submodule(family.attention), less_input)
    with block.register_forward_pre_hook(before, with_kwargs=True), added_only:
        yield
