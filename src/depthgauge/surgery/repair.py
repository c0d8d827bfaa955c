"""Refit and round the weights of a shrunk model, map by map, as ridge regressions.

- A repair refits the maps that write into the residual stream, so that the shrunk model follows the dense model.
- Where a GGUF file is written, the changed weights are rounded to its types, with as little effect as possible.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.inputs.windows import Inputs
from depthgauge.checkpoints.weights.families import Family
from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout, encode
from depthgauge.surgery.student import Student

# --- Refit the maps that write into the residual stream ---------------------------------------------------------------
# For a kept block with the dense state T at its matching depth as target, the block's output is y = … + W u, where u is
# the input of the MLP's last map W, times the residual multiplier of the family. The update Δ minimizes
# Σ_t w_t ‖T_t − y_t − Δ u_t‖² + λ‖Δ‖², which is a ridge regression towards the old weights. Every token is used, the
# first one included: its state is hundreds of times larger than the others, and an update that ignores it destroys the
# model. With w_t = 1/‖T_t‖² all tokens count alike.
#
# Where a norm follows W before the residual stream (Gemma 2 and 3, BERT), the problem is not linear, and the norm takes
# the size of W u away. A mixture of experts has no single W. Such blocks are only trained.

RIDGE = 0.05
"""Smallest λ, relative to the mean squares of the features. On SmolLM2, 0.01 and 0.001 were worse on unseen text."""
RIDGE_PER_RATIO = 1.2
"""λ for as many features as tokens: few tokens need a larger penalty."""


def is_linear(family: Family | None) -> bool:
    """Return whether the last maps of a block's sublayers are known, and its output is affine in that of the last."""
    if family is None or family.parts[-1].norm is not None:
        return False
    return all(part.last is not None for part in family.parts)


def output_maps(block: nn.Module, family: Family) -> tuple[nn.Module, ...]:
    """Return the last maps of the sublayers in order, as far as they are known."""
    return tuple(block.get_submodule(part.last) for part in family.parts if part.last is not None)


@torch.no_grad()
def refit_block(
    runner: BlockRunner,
    layer: int,
    states: Float[Tensor, "windows n d"],
    targets: Float[Tensor, "windows n d"],
    inputs: Inputs | None = None,
) -> None:
    """Change the output maps of a block such that its outputs for `states` are close to `targets`.

    All maps are refitted together, as if the earlier did not change the inputs of the later ones. Where they do (order
    `pre`), the later ones are then refitted to the inputs that result: all but the first, and so on.
    """
    family = runner.checkpoint.families[layer]
    assert family is not None
    maps = output_maps(runner.blocks[layer], family)
    ridge = ridge_for(runner, maps[-1], runner.part(layer, states))
    for first in range(1 if family.order == "parallel" else len(maps)):
        for parameter, delta in refit(runner, layer, maps[first:], states, targets, ridge, inputs):
            parameter.copy_(parameter.double() + delta.to(parameter.device))


def ridge_for(runner: BlockRunner, module: nn.Module, states: Float[Tensor, "windows n d"]) -> float:
    """Return λ for a map and as many tokens as the `states` have."""
    return max(RIDGE, RIDGE_PER_RATIO * shape_of(module)[0] / (len(states) * states.shape[1]))


def refit(
    runner: BlockRunner,
    layer: int,
    maps: Sequence[nn.Module],
    states: Float[Tensor, "windows n d"],
    targets: Float[Tensor, "windows n d"],
    ridge: float,
    inputs: Inputs | None = None,
) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the ridge update of linear maps whose outputs are added to the residual stream: each parameter with its Δ.

    With several maps, the effect of the earlier on the inputs of the later ones is neglected.

    Args:
        runner: the model's blocks.
        layer: the block.
        maps: the maps to change together.
        states: inputs of the block, from the shrunk model.
        targets: T, the dense model's states at the matching depth.
        ridge: λ, relative to the mean square of the features.
        inputs: the windows of the states, which the blocks of an encoder–decoder model need.
    """
    widths = [shape_of(module)[0] for module in maps]
    family = runner.checkpoint.families[layer]
    multiplier = 1.0 if family is None else family.multiplier
    read: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        read[module] = args[0]

    with torch.no_grad(), runner.checkpoint.resident(layer), ExitStack() as hooks:
        for module in maps:
            hooks.enter_context(module.register_forward_pre_hook(keep))
        weight = next(maps[-1].parameters())
        # The penalty is far above the rounding of float32, and these are the largest matrices of a repair.
        exact = torch.promote_types(weight.dtype, torch.float32)
        gram, cross = (
            torch.zeros(rows, sum(widths), dtype=exact, device=weight.device)
            for rows in (sum(widths), states.shape[-1])
        )

        def add(these: slice) -> None:
            output = runner.block(layer, runner.on_device(states[these]), None if inputs is None else inputs[these])
            output = runner.part(layer, output)
            target = runner.part(layer, targets[these]).to(output.device, exact)
            rows = [with_bias(module, read[module]).reshape(target.shape[0] * target.shape[1], -1) for module in maps]
            features = multiplier * torch.cat(rows, dim=-1).to(exact)
            errors = (target - output).flatten(0, 1)
            weighted = features / target.flatten(0, 1).square().sum(-1, keepdim=True).clamp_min(1e-30)
            gram.addmm_(weighted.T, features)  # these sums take no memory: a batch is added whole or not at all
            cross.addmm_(errors.T, weighted)

        runner.batches.map(add, len(states))
    columns = torch.split(_ridge_solution(gram, cross, ridge), widths, dim=1)
    return [one for pair in zip(maps, columns, strict=True) for one in updates_of(*pair)]


def _ridge_solution(gram: Float[Tensor, "p p"], cross: Float[Tensor, "d p"], ridge: float) -> Float[Tensor, "d p"]:
    """Return Δ = C (G + λ D)⁻¹, with D = diag(G) + mean(diag(G)) and λ = `ridge`.

    G = Σ_t w_t u_t u_tᵀ is `gram`, and C = Σ_t w_t e_t u_tᵀ is `cross`, with the errors e_t of the present weights.
    The penalty is relative to the size of each feature, so that it does not depend on their units; the mean keeps
    features that never occur from being divided by 0. `gram` is changed: it is the largest matrix of a repair.
    """
    diagonal = gram.diagonal()
    if not bool(diagonal.any()):
        return torch.zeros_like(cross)
    diagonal += ridge * (diagonal + diagonal.mean())
    factor = torch.linalg.cholesky(gram.mT, out=gram.mT)  # the transpose has the layout that is factored in place
    half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
    found: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return found.mT


def with_bias(module: Any, inputs: Tensor) -> Tensor:
    """Append the constant feature 1 to the inputs of a map if the map has a bias."""
    if module.bias is None:
        return inputs
    return torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1)


def shape_of(module: Any) -> tuple[int, int]:
    """Return the number of features of a linear map, with the constant 1 if it has a bias, and of its outputs."""
    outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)
    return int(inputs) + (module.bias is not None), int(outputs)


def updates_of(module: Any, update: Float[Tensor, "d p"]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters of a linear map, each with its change; a bias has the last column of the update."""
    weight = update if module.bias is None else update[:, :-1]
    weight = weight if isinstance(module, nn.Linear) else weight.T  # GPT-2's Conv1D stores [in, out]
    return [(module.weight, weight), *([] if module.bias is None else [(module.bias, update[:, -1])])]


# --- Round the changed weights to the types of a GGUF file ------------------------------------------------------------
# A linear map W with inputs u is rounded to Q such that Σ_t w_t ‖(W − Q) u_t‖² = tr((W − Q) H (W − Q)ᵀ) is small, with
# H = Σ_t w_t u_t u_tᵀ. The columns are rounded in groups, from left to right, because each 32 columns of a row have
# their own scale. The columns to the right of a group then correct its rounding error as far as they can: with the
# upper triangular U, UᵀU = H⁻¹, they change by −(W_g − Q_g) U_gg⁻¹ U_g,rest. (GPTQ does this for single columns.)
#
# Blocks are rounded in order. Where the output of a block is affine in its output maps, each of them is refitted first,
# so that the block, with the inputs of the rounded blocks before it, returns what it returned without rounding.

GROUP = 32
"""Columns that are rounded together: the types that gguf-py writes have one scale for 32 columns, or none."""


@torch.no_grad()
def round_changed(student: Student, layout: GgufLayout) -> dict[str, EncodedTensor]:
    """Round all weights that differ from those of the dense model, in place, to what the file will hold.

    The result has the bytes of the changed tensors, by the names that the dense model's file, `layout`, has for them.
    """
    changes = {layer: student.changed(layer) for layer in student.kept}
    first = next((place for place, layer in enumerate(student.kept) if changes[layer]), None)
    encoded: dict[str, EncodedTensor] = {}
    if first is None:
        return encoded
    runner, start = student.runner, min(first, student.first_gap)
    exact = states = runner.through(student.kept[start:first], student.fit.at(start))
    for place, layer in enumerate(student.kept[first:], first):
        student.progress(place - first, len(student.kept) - first, f"rounding, block {layer}")
        block = runner.blocks[layer]
        exact = runner.through([layer], exact)
        matrices = [leaf for leaf in changes[layer] if block.get_parameter(leaf).dim() == 2]
        for done, leaf in enumerate(matrices):
            _correct(student, layer, matrices[done:], states, exact)
            gram = _gram(student, layer, leaf, states)
            encoded |= _put(student, layer, leaf, layout, gram)
        for leaf in student.changed(layer):
            if leaf not in matrices:
                encoded |= _put(student, layer, leaf, layout, None)
        states = runner.through([layer], states)
    return encoded


def _put(
    student: Student, layer: int, leaf: str, layout: GgufLayout, gram: Float[Tensor, "p p"] | None
) -> dict[str, EncodedTensor]:
    """Round a weight of a block in place; return its bytes under the name of its tensor."""
    parameter, tensor = student.runner.blocks[layer].get_parameter(leaf), layout.tensor(layer, leaf)
    arrangement, kind = layout.arrangements[leaf], layout.kind(tensor)
    values = arrangement.stored(parameter.detach().cpu().float())
    made = encode(values, kind) if gram is None else round_map(values, gram, kind)
    parameter.copy_(arrangement.weight(made.decode()))
    return {tensor.name: made}


def _correct(
    student: Student,
    layer: int,
    leaves: Sequence[str],
    states: Float[Tensor, "windows n d"],
    targets: Float[Tensor, "windows n d"],
) -> None:
    """Refit the output maps among the weights `leaves`, if the first of them is one, to the outputs `targets`."""
    family, block = student.checkpoint.families[layer], student.runner.blocks[layer]
    if family is None:
        return
    weights = [block.get_parameter(leaf) for leaf in leaves]
    maps = [one for one in output_maps(block, family) if any(one.weight is weight for weight in weights)]
    if is_linear(family) and maps and maps[0].weight is weights[0]:
        ridge = ridge_for(student.runner, maps[-1], states)
        for parameter, delta in refit(student.runner, layer, maps, states, targets, ridge):
            parameter.copy_(parameter.double() + delta.to(parameter.device))


def round_map(values: Float[Tensor, "d p"], gram: Float[Tensor, "p p"], kind: Any) -> EncodedTensor:
    """Round a linear map W to a type, such that its outputs change little.

    Args:
        values: W, in the arrangement of the file.
        gram: H, of its p inputs, positive definite.
        kind: the type.
    """
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)
    rest = values.double()
    for start in range(0, rest.shape[1], GROUP):
        group, after = slice(start, start + GROUP), slice(start + GROUP, None)
        error = rest[:, group] - encode(rest[:, group], kind).decode()
        rest[:, group] -= error
        solved = torch.linalg.solve_triangular(upper[group, group], error, upper=True, left=False)
        rest[:, after] -= solved @ upper[group, after]
    return encode(rest, kind)


def _gram(student: Student, layer: int, leaf: str, states: Float[Tensor, "windows n d"]) -> Float[Tensor, "p p"]:
    """Return H of a linear map of a block, with w_t = 1/‖output of the block‖², plus λ times its mean diagonal entry.

    λ is that of the repair. It matters where there are few tokens: on SmolLM2 without 7 blocks and 6,144 tokens, 0.1
    instead of 0.01 lowered what the rounding to Q4_1 costs from 0.026 to 0.016 nats per token.
    """
    runner, inputs, found = student.runner, list[Tensor](), torch.zeros((), dtype=torch.float64)
    module = runner.blocks[layer].get_submodule(leaf.rpartition(".")[0])

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[:] = args[:1]

    def add(these: slice) -> None:
        nonlocal found
        output = runner.block(layer, runner.on_device(states[these]))
        size = output.flatten(0, 1).float().square().sum(-1, keepdim=True).clamp_min(1e-30)
        rows = inputs[0].reshape(len(size), -1).float()
        found = found + ((rows / size).T @ rows).double().cpu()

    with module.register_forward_pre_hook(keep):
        runner.batches.map(add, len(states))
    damping = ridge_for(runner, module, states) * found.diagonal().mean().clamp_min(1e-30)
    return found + damping * torch.eye(len(found), dtype=found.dtype)
