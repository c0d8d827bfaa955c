"""What-ifs: remove or simplify one layer, or one part of it, and measure what the model loses.

Their names are the keys of `results.labels.WHAT_IFS`.
"""

from collections.abc import Callable, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.model_output import token_losses, window_losses
from depthgauge.checkpoints.samples import Inputs


def layers_of(kind: str, families: Sequence[Family | None], observable: bool = True) -> list[int]:
    """Return the layers on which a what-if can be measured, given the families of the blocks, declared or derived.

    `attention` and `mlp` need a block with both sublayers: a block with one of them is measured by `block`. `uniform`
    needs `observable` attention, and `parallel` excludes the last layer, which has no successor.
    """
    if kind in ("attention", "mlp"):
        return [layer for layer, family in enumerate(families) if family and family.attention and family.mlp]
    if kind == "uniform" and not observable:
        return []
    return list(range(len(families) - (kind == "parallel")))


def passes(kind: str, on: Sequence[int], layers: int) -> float:
    """Return the cost of a what-if on some of L layers in forward passes, (block evaluations)/L ≤ (L + 1)/2."""
    first_run = {"block": 1, "parallel": 1}.get(kind, 0)
    return sum(layers - layer - first_run for layer in on) / layers


def what_if(
    stack: Stack, inputs: Inputs, states: Sequence[Float[Tensor, "batch n d"]], kind: str, layer: int
) -> Tensor:
    """Return the model's output in one what-if.

    - `block`: X_{ℓ+1} = X_ℓ
    - `attention`, `mlp`: the sublayer adds nothing to the residual stream
    - `uniform`: every score of the layer's attention is 0
    - `parallel`: X_{ℓ+2} = X_ℓ + (B_ℓ(X_ℓ) − X_ℓ) + (B_{ℓ+1}(X_ℓ) − X_ℓ), where B_ℓ is block ℓ

    Here ℓ is `layer`, and `states` are X_0 … X_L of the intact pass.
    """
    state = states[layer]
    if kind == "block":
        return stack.run(inputs, start=layer + 1, state=state)
    if kind == "uniform":
        return stack.run(inputs, start=layer, state=state, uniform=layer)
    if kind == "parallel":
        gained = states[layer + 1] - state.to(states[layer + 1].device)
        add_gained = {stack.blocks[layer + 1]: lambda out: out + gained.to(out.device)}
        return stack.run(inputs, start=layer + 1, state=state, changes=add_gained)
    sublayer = stack.blocks[layer].get_submodule(getattr(stack.checkpoint.families[layer], kind))
    return stack.run(inputs, start=layer, state=state, silent=sublayer)


def objective(kind: str, inputs: Inputs, intact: Tensor) -> Callable[[Tensor], float]:
    """Return a function that measures how much worse an output is than the output of the intact model.

    It is the difference of `window_losses`. That of the intact model is 0 where outputs are compared with it.
    """
    before = window_losses(kind, intact, inputs, intact)
    return lambda output: float((window_losses(kind, output, inputs, intact) - before).mean())


def cross_entropy(logits: Float[Tensor, "1 n vocabulary"], ids: Int[Tensor, "1 n"]) -> float:
    """Return the mean over tokens of −log p(next token), in nats."""
    return float(token_losses(logits, ids).double().mean())
