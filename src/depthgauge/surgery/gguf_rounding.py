"""Round the changed weights of a shrunk model to the types of a GGUF file, with as little effect as possible.

A linear map W with inputs u is rounded to Q such that Σ_t w_t ‖(W − Q) u_t‖² = tr((W − Q) H (W − Q)ᵀ) is small, with
H = Σ_t w_t u_t u_tᵀ. The columns are rounded in groups, from left to right, because each 32 columns of a row have their
own scale. The columns to the right of a group then correct its rounding error as far as they can: with the upper
triangular U, UᵀU = H⁻¹, they change by −(W_g − Q_g) U_gg⁻¹ U_g,rest. (GPTQ does this for single columns.) Blocks are
rounded in order, each with the inputs that the rounded blocks before it produce.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout, encode
from depthgauge.surgery.student import Student

GROUP = 32
"""Columns that are rounded together: the types that gguf-py writes have one scale for 32 columns, or none."""
DAMPING = 0.01
"""Added to the diagonal of H, relative to its mean, for inputs that hardly occur."""


@torch.no_grad()
def round_changed(student: Student, layout: GgufLayout) -> dict[str, EncodedTensor]:
    """Round all weights that differ from those of the dense model, in place, to what the file will hold.

    Args:
        student: the shrunk model, and the dense model's states on the fit windows.
        layout: the file of the dense model.

    Returns:
        The bytes of the changed tensors, by the names that the dense model's file has for them.
    """
    changes = {layer: student.changed(layer) for layer in student.kept}
    first = next((place for place, layer in enumerate(student.kept) if changes[layer]), None)
    encoded: dict[str, EncodedTensor] = {}
    if first is None:
        return encoded
    runner, start = student.runner, min(first, student.first_gap)
    states = runner.through(student.kept[start:first], student.fit.at(start))
    for place, layer in enumerate(student.kept[first:], first):
        student.progress(place - first, len(student.kept) - first, f"rounding, block {layer}")
        block = runner.blocks[layer]
        grams = _grams(student, layer, changes[layer], states)
        for leaf in changes[layer]:
            parameter, tensor = block.get_parameter(leaf), layout.tensor(layer, leaf)
            arrangement, kind = layout.arrangements[leaf], layout.kind(tensor)
            values = arrangement.stored(parameter.detach().cpu().float())
            made = encode(values, kind) if leaf not in grams else round_map(values, grams[leaf], kind)
            parameter.copy_(arrangement.weight(made.decode()))
            encoded[tensor.name] = made
        states = runner.through([layer], states)
    return encoded


def round_map(values: Float[Tensor, "d p"], gram: Float[Tensor, "p p"], kind: Any) -> EncodedTensor:
    """Round a linear map W to a type, such that its outputs change little.

    Args:
        values: W, in the arrangement of the file.
        gram: H, of its p inputs.
        kind: the type.
    """
    diagonal = gram.diagonal()
    damped = gram + torch.diag(DAMPING * diagonal.mean().clamp_min(1e-30).expand(len(gram)))
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    rest = values.double()
    for start in range(0, rest.shape[1], GROUP):
        group, after = slice(start, start + GROUP), slice(start + GROUP, None)
        error = rest[:, group] - encode(rest[:, group], kind).decode()
        rest[:, group] -= error
        solved = torch.linalg.solve_triangular(upper[group, group], error, upper=True, left=False)
        rest[:, after] -= solved @ upper[group, after]
    return encode(rest, kind)


def _grams(
    student: Student, layer: int, leaves: Sequence[str], states: Float[Tensor, "windows n d"]
) -> Mapping[str, Float[Tensor, "p p"]]:
    """Return H of the linear maps among the changed weights of a block, with w_t = 1/‖output of the block‖²."""
    runner, inputs = student.runner, dict[nn.Module, Tensor]()
    block = runner.blocks[layer]
    matrices = [leaf for leaf in leaves if block.get_parameter(leaf).dim() == 2]
    maps = {leaf: block.get_submodule(leaf.rpartition(".")[0]) for leaf in matrices}
    found: dict[str, Tensor] = {}
    if not maps:
        return found

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[module] = args[0]

    with ExitStack() as hooks:
        for module in maps.values():
            hooks.enter_context(module.register_forward_pre_hook(keep))
        for _, part in runner.batches(states):
            size = runner.block(layer, part).flatten(0, 1).float().square().sum(-1, keepdim=True).clamp_min(1e-30)
            for leaf, module in maps.items():
                rows = inputs[module].flatten(0, 1).float()
                found[leaf] = found.get(leaf, 0) + ((rows / size).T @ rows).double().cpu()
    return found
