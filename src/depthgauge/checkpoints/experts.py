"""The what-if of single experts: the model without one of them, and the share of tokens that are routed to it.

The weights of all experts of a block are tensors with one entry per expert. An expert whose weights are 0 adds nothing.
The router and its weights stay as they are, so that the other experts add what they added before.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.hooks import changed
from depthgauge.checkpoints.layers import Stack
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
    """One window without single experts.

    A token is routed to an expert if the output of the MLP at the token changes without it. Where two passes of the
    intact model differ, because the device adds in another order, only larger changes count.
    """

    def __init__(self, stack: Stack, inputs: Inputs) -> None:
        """Run the intact model on the inputs twice."""
        self.stack, self.inputs = stack, inputs
        families = stack.checkpoint.families
        self._mlps = {
            layer: stack.blocks[layer].get_submodule(str(family.mlp))
            for layer in dict.fromkeys(expert_layers(stack.blocks, families))
            if (family := families[layer]) is not None
        }
        self._outputs: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for layer in self._mlps:
                hooks.enter_context(self._listening(layer))
            stack.run(inputs)
            again = dict(self._outputs)
            stack.run(inputs)
        self._intact = dict(self._outputs)
        self._noise = {layer: 4 * (self._intact[layer] - again[layer]).abs().max() for layer in self._mlps}

    @contextmanager
    def _listening(self, layer: int) -> Iterator[None]:
        """Keep the outputs of the MLP of a layer, one row per token."""

        def keep(output: Tensor) -> Tensor:
            self._outputs[layer] = output.reshape(-1, output.shape[-1]).clone()
            return output

        with changed(self._mlps[layer], keep):
            yield

    def without(self, state: Float[Tensor, "1 n d"], layer: int, expert: int) -> tuple[Tensor, float]:
        """Return the model's output without an expert, and the share of tokens that are routed to it.

        `state` is X_ℓ, the input of the layer ℓ in the intact pass.
        """
        with self._listening(layer), without_expert(expert_weights(self._mlps[layer]), expert):
            output = self.stack.run(self.inputs, start=layer, state=state)
        change = (self._outputs[layer] - self._intact[layer]).abs().amax(dim=-1)
        return output, float((change > self._noise[layer]).double().mean())
