"""Round the changed weights of a shrunk model to the types of a GGUF file, with as little effect as possible.

A linear map W with inputs u is rounded to Q such that Σ_t w_t ‖(W − Q) u_t‖² = tr((W − Q) H (W − Q)ᵀ) is small, with
H = Σ_t w_t u_t u_tᵀ. The columns are rounded in groups, from left to right, because each 32 columns of a row have their
own scale. The columns to the right of a group then correct its rounding error as far as they can: with the upper
triangular U, UᵀU = H⁻¹, they change by −(W_g − Q_g) U_gg⁻¹ U_g,rest. (GPTQ does this for single columns.)

Blocks are rounded in order. Where the output of a block is affine in its output maps, each of them is refitted first,
so that the block, with the inputs of the rounded blocks before it, returns what it returned without rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout, encode
from depthgauge.surgery.repair import is_linear, output_maps, refit, ridge_for
from depthgauge.surgery.student import Student

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
