"""What-ifs: remove or simplify layers, or parts of them, and measure what the model loses.

All edited models advance together, block by block, so that the weights are read once, however many models there are.

The names of the what-ifs are the keys of `results.labels.WHAT_IFS`.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.block_runner import BlockRunner
from depthgauge.checkpoints.dense_states import DenseStates, Objective, states_in_memory
from depthgauge.checkpoints.experts import ExpertWhatIfs
from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.samples import Inputs
from depthgauge.results.labels import EXPERT


class Edit(NamedTuple):
    """A change of one layer ℓ.

    - `layer`: ℓ
    - `kind`: the what-if:
        - `block`: X_{ℓ+1} = X_ℓ
        - `attention`, `mlp`: the sublayer adds nothing to the residual stream
        - `uniform`: every score of the layer's attention is 0
        - `expert`: an expert of the MLP adds nothing
        - `parallel`: X_{ℓ+2} = X_ℓ + (B_ℓ(X_ℓ) − X_ℓ) + (B_{ℓ+1}(X_ℓ) − X_ℓ), where B_ℓ is block ℓ; it is not combined
          with other edits
    - `expert`: the index of the expert
    """

    layer: int
    kind: str
    expert: int = 0


Edits = tuple[Edit, ...]
"""The edits of one model, at most one for a layer, in the order of the layers."""


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


def edited_losses(
    objective: Objective,
    dense: DenseStates,
    models: Sequence[Edits],
    windows: slice = slice(None),
    *,
    experts: ExpertWhatIfs | None = None,
    progress: Step = silent,
    label: str = "",
) -> Iterator[dict[Edits, Float[Tensor, " windows"]]]:
    """Yield the objective of edited models on some windows, for as many models at a time as fit into memory.

    `experts` is needed for the what-if `expert`. `progress` is called at every block, with `label` and the block.
    """
    ordered, count = sorted(models), states_in_memory(dense.final[windows])
    for start in range(0, len(ordered), count):
        some = ordered[start : start + count]
        states = edited_states(dense, some, windows, experts=experts, progress=progress, label=label)
        yield dict(zip(some, objective.each([states[edits] for edits in some], windows), strict=True))


@torch.no_grad()
def edited_states(
    dense: DenseStates,
    models: Sequence[Edits],
    windows: slice = slice(None),
    *,
    experts: ExpertWhatIfs | None = None,
    progress: Step = silent,
    label: str = "",
) -> dict[Edits, Float[Tensor, "windows n d"]]:
    """Return the states after the last block of edited models, on windows of this process; see `edited_losses`.

    Every block is applied once, to the states of all models that do not change it, and then with the changes of the
    others. Models that agree on the edits so far share their states; before the first edit these are the dense states.
    """
    runner, layers, inputs = dense.runner, dense.layers, dense.inputs[windows]
    states: dict[Edits, Tensor] = {}
    runner.session.begin()
    first = min((edits[0].layer for edits in models if edits), default=layers)
    for layer in range(first, layers):
        progress(layer - first, layers - first, f"{label}, block {layer}")
        states[()] = dense.at(layer)[windows]
        until = {edits: tuple(edit for edit in edits if edit.layer <= layer) for edits in models}
        reached = {now for now in until.values() if now}
        kept = sorted(now for now in reached if now[-1].layer < layer)
        with runner.checkpoint.resident(layer):
            after = dict(zip(kept, _advanced(runner, layer, [states[now] for now in kept], inputs), strict=True))
            for now in sorted(reached.difference(kept)):
                after[now] = _applied(runner, now[-1], states[now[:-1]], inputs, experts)
        for now in kept:
            if now[-1] == (layer - 1, "parallel", 0):
                after[now] += (states[()] - dense.at(layer - 1)[windows]).to(after[now].device)
        states = after
    states[()] = dense.final[windows]
    return {edits: states[edits] for edits in models}


def _advanced(
    runner: BlockRunner, layer: int, several: Sequence[Float[Tensor, "windows n d"]], inputs: Inputs
) -> Sequence[Float[Tensor, "windows n d"]]:
    """Apply a block to several states on the same windows."""
    if not several:
        return []
    together = torch.cat([*several])
    rows = inputs[torch.arange(len(inputs)).repeat(len(several))] if runner.needs_inputs else None
    return torch.chunk(runner.through([layer], together, rows), len(several))


def _applied(
    runner: BlockRunner,
    edit: Edit,
    states: Float[Tensor, "windows n d"],
    inputs: Inputs,
    experts: ExpertWhatIfs | None,
) -> Float[Tensor, "windows n d"]:
    """Return the states after the layer that an edit changes."""
    if edit.kind in ("block", "parallel"):
        return states
    if edit.kind == EXPERT:
        assert experts is not None
        return experts.without(edit.layer, edit.expert, states, inputs)
    if edit.kind == "uniform":
        runner.session.begin(uniform=edit.layer)
        found = runner.through([edit.layer], states, inputs)
        runner.session.begin()
        return found
    sublayer = runner.blocks[edit.layer].get_submodule(getattr(runner.checkpoint.families[edit.layer], edit.kind))
    with runner.silenced(sublayer):
        return runner.through([edit.layer], states, inputs)
