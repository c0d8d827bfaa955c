"""The what-if of single experts: the model without one of them, and the share of tokens that are routed to it.

The weights of all experts of a block are tensors with one entry per expert. An expert whose weights are 0 adds nothing.
The router and its weights stay as they are, so that the other experts add what they added before.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.checkpoints.block_runner import BlockRunner
from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.hooks import changed
from depthgauge.checkpoints.samples import Inputs


def expert_weights(mlp: nn.Module) -> list[nn.Parameter]:
    """Return the weights of an MLP whose first index is the expert; none if it is not a mixture of experts.

    They are tensors with three dimensions, and the biases beside them. Those of a convolution are not.
    """
    found: list[nn.Parameter] = []
    for module in mlp.modules():
        own = [] if isinstance(module, nn.modules.conv._ConvNd) else list(module.parameters(recurse=False))
        experts = {len(weight) for weight in own if weight.dim() == 3}
        found += [weight for weight in own if weight.dim() > 1 and len(weight) in experts]
    is_one_mixture = len({len(weight) for weight in found}) == 1 and not any(weight.is_meta for weight in found)
    return found if is_one_mixture else []


def expert_layers(blocks: Sequence[nn.Module], families: Sequence[Family | None]) -> list[int]:
    """Return every layer as often as its MLP has experts: [0, 0, 1, 1] for two layers with two experts each."""
    return [
        layer
        for layer, (block, family) in enumerate(zip(blocks, families, strict=True))
        if family is not None and family.mlp is not None
        for weight in expert_weights(block.get_submodule(family.mlp))[:1]
        for _ in range(len(weight))
    ]


@contextmanager
def without_expert(weights: Sequence[nn.Parameter], expert: int) -> Iterator[None]:
    """Set the weights of one expert to 0 within this context."""
    parts = [weight.data[expert] for weight in weights]
    kept = [part.clone() for part in parts]
    try:
        for part in parts:
            part.zero_()
        yield
    finally:
        for part, value in zip(parts, kept, strict=True):
            part.copy_(value)


class ExpertWhatIfs:
    """Windows without single experts; `shares` has, for every layer and expert, the share of tokens in each window.

    A token is routed to an expert if the output of the MLP at the token changes without it. Where two passes of the
    intact block differ, because the device adds in another order, only larger changes count.
    """

    def __init__(self, runner: BlockRunner) -> None:
        self.runner, self.shares = runner, dict[tuple[int, int], list[float]]()
        self._intact: tuple[int, Tensor, Tensor] | None = None  # the last layer, its output, and what is rounding

    def without(
        self, layer: int, expert: int, states: Float[Tensor, "windows n d"], inputs: Inputs
    ) -> Float[Tensor, "windows n d"]:
        """Return the states after a layer without an expert; `states` are X_ℓ of the dense model on the windows."""
        family = self.runner.checkpoint.families[layer]
        assert family is not None
        mlp = self.runner.blocks[layer].get_submodule(str(family.mlp))
        if self._intact is None or self._intact[0] != layer:
            (_, again), (_, intact) = (self._applied(layer, mlp, states, inputs) for _ in range(2))
            self._intact = layer, intact, 4 * (intact - again).abs().max()
        with without_expert(expert_weights(mlp), expert):
            made, output = self._applied(layer, mlp, states, inputs)
        _, intact, rounding = self._intact
        change = (output - intact).abs().amax(dim=-1) > rounding
        self.shares[layer, expert] = change.reshape(len(states), -1).double().mean(dim=1).tolist()
        return made

    def _applied(
        self, layer: int, mlp: nn.Module, states: Float[Tensor, "windows n d"], inputs: Inputs
    ) -> tuple[Float[Tensor, "windows n d"], Float[Tensor, "tokens d"]]:
        """Return the states after a layer, and the output of its MLP, one row per token."""
        outputs: list[Tensor] = []

        def keep(output: Tensor) -> Tensor:
            outputs.append(output.reshape(-1, output.shape[-1]).clone())
            return output

        with changed(mlp, keep):
            made = self.runner.through([layer], states, inputs)
        return made, torch.cat(outputs)
