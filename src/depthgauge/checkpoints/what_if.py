"""What would be lost without it: each layer, or half of one, left out or simplified, and the loss measured again."""

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.layers import Stack
from depthgauge.errors import unknown_name

KINDS = ("block", "attention", "mlp")
"""By default: skip the whole block, its attention, its MLP."""
ALL_KINDS = (*KINDS, "uniform", "parallel")
"""And: attention made uniform over what each row sees; the layer and the next one both given the layer's input."""
_ENTRIES = 2**22
"""Logits that are made wide at once (16 MB in float32)."""


def chosen_kinds(asked: str) -> tuple[str, ...]:
    """`default`, `all`, `none`, or names with commas between them."""
    named = {"default": KINDS, "all": ALL_KINDS, "none": ()}
    if asked in named:
        return named[asked]
    wanted = [name.strip() for name in asked.split(",")]
    for name in wanted:
        if name not in ALL_KINDS:
            raise unknown_name("what-if", name, [*ALL_KINDS, *named])
    return tuple(kind for kind in ALL_KINDS if kind in wanted)


def available(kinds: Iterable[str], family: Family | None) -> tuple[str, ...]:
    """Those kinds that can be done: the two sublayers need to be in the table of families."""
    return tuple(kind for kind in kinds if family is not None or kind not in ("attention", "mlp"))


def layers_of(kind: str, layers: int) -> range:
    """The layers a kind is asked for; the last one has no neighbour to run beside."""
    return range(layers - 1 if kind == "parallel" else layers)


def passes(kind: str, layers: int) -> float:
    """What a kind costs in whole forward passes: its block evaluations, over L. At most (L + 1)/2."""
    first_run = {"block": 1, "parallel": 1}.get(kind, 0)
    return sum(layers - layer - first_run for layer in layers_of(kind, layers)) / layers


def what_if(
    stack: Stack, ids: Int[Tensor, "1 n"], states: Sequence[Float[Tensor, "1 n d"]], kind: str, layer: int
) -> Tensor:
    """The model's output in one what-if; `states` are X_0 … X_L of the intact pass.

    - `block`: X_{ℓ+1} = X_ℓ
    - `attention`, `mlp`: the sublayer adds nothing
    - `uniform`: every score of the layer's attention is 0
    - `parallel`: X_{ℓ+2} = X_ℓ + (B_ℓ(X_ℓ) − X_ℓ) + (B_{ℓ+1}(X_ℓ) − X_ℓ), B the blocks
    """
    state = states[layer]
    if kind == "block":
        return stack.run(ids, start=layer + 1, state=state)
    if kind == "uniform":
        return stack.run(ids, start=layer, state=state, uniform=layer)
    if kind == "parallel":
        gained = states[layer + 1] - state.to(states[layer + 1].device)
        beside = {stack.blocks[layer + 1]: lambda out: out + gained.to(out.device)}
        return stack.run(ids, start=layer + 1, state=state, changes=beside)
    family = stack.checkpoint.family
    assert family is not None
    sublayer = stack.blocks[layer].get_submodule(family.attention if kind == "attention" else family.mlp)
    return stack.run(ids, start=layer, state=state, silent=sublayer)


def objective(kind: str, ids: Int[Tensor, "1 n"], intact: Tensor) -> Callable[[Tensor], float]:
    """How much an output is worse than the `intact` one: by loss, or by how far the final states moved."""
    if kind == "loss":
        before = cross_entropy(intact, ids)
        return lambda output: cross_entropy(output, ids) - before
    norm = intact.double().norm()
    return lambda output: float((output.double() - intact.double()).norm() / norm)


def cross_entropy(logits: Float[Tensor, "1 n vocabulary"], ids: Int[Tensor, "1 n"]) -> float:
    """Mean over tokens of −log p(next token), in nats; a few rows at a time, so that the logits are never copied."""
    ahead = ids[0, 1:].to(logits.device)
    count = max(1, _ENTRIES // logits.shape[-1])
    total = torch.zeros((), dtype=torch.float64, device=logits.device)  # one number, fetched once
    for start in range(0, len(ahead), count):
        rows, names = logits[0, start : min(start + count, len(ahead))].float(), ahead[start : start + count]
        total += (rows.logsumexp(dim=-1) - rows.gather(-1, names[:, None])[:, 0]).double().sum()
    return float(total) / len(ahead)
