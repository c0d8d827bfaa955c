"""The forward pass in Triton kernels: moments of the keys, the state that rows read, and the rows.

If nothing is centred, padded or computed exactly, the kernels read q, k and v directly and the scale is part of the
coefficients. Otherwise q̃ and k̃ are computed first, in the dtype of the tensors, and w multiplies one of the two factors
of every product of keys. bfloat16 values are centred after the sums, values of other dtypes before them (section
Rounding of docs/concepts/fast-attention-derivation.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.fast_attention.spec import Spec, centred, weights
from depthgauge.fast_attention.triton.kernels import programs
from depthgauge.fast_attention.triton.launches import ForwardSizes
from depthgauge.fast_attention.triton.workspace import Workspace

Coefficients = tuple[float, ...]


@dataclass(frozen=True)
class State:
    """The finished sums over keys, in two tensors to save allocations.

    big [states, N, …] in the dtype of the tensors: S [slots, 256, E], L as a sum of two matrices [2, D, E], C [D, D].
    small [states, N, …] in float32: z1 [D], z0, n0 [E], the mean of the values [E], 1 / total weight.
    `table` lists the tiles of every slot.
    """

    big: Tensor
    small: Tensor
    slots: int
    dim: int
    width: int
    table: Tensor


def is_plain(spec: Spec) -> bool:
    """Return whether the kernels can read q and k directly. float16 is scaled first because its range is small."""
    is_changed = spec.is_centred or spec.keep is not None or spec.exact_rows is not None
    return not is_changed and spec.problem.q.dtype != torch.float16


def kernel_inputs(spec: Spec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return q̃, k̃, w and the scale that remains for the coefficients; (q, k, None, s) if nothing has to be changed."""
    if is_plain(spec):
        return q.contiguous(), k.contiguous(), None, spec.scale
    qt, kt = centred(spec, slice(None), q, k)
    w = weights(spec, slice(None), k)
    return qt.to(q.dtype).contiguous(), kt.to(q.dtype).contiguous(), None if w is None else w.contiguous(), 1.0


def first_buffer(splits: int, heads: int, d: int, e: int, device: torch.device) -> Tensor:
    """Allocate Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w of every split."""
    return torch.empty(splits, heads, d * e + d * d + d + e + 1, dtype=torch.float32, device=device)


def second_buffer(splits: int, heads: int, e: int, is_causal: bool, like: Tensor, d: int) -> Tensor:
    """Allocate Σ (y ⊗ x) v of every split, by programs.

    There are many causal sums. For bfloat16 they are stored in bfloat16, which halves their memory and costs one
    rounding. They would overflow float16.
    """
    dtype = torch.bfloat16 if is_causal and like.dtype == torch.bfloat16 else torch.float32
    return like.new_empty(splits, heads, len(programs(d)), 512, e, dtype=dtype)


def state_buffer(states: int, heads: int, parts: int, like: Tensor, table: Tensor, d: int) -> State:
    """Allocate a State for values `like` [N, m, E]."""
    e = like.shape[-1]
    big = like.new_empty(states, heads, parts * 256 * e + 2 * d * e + d * d)
    small = torch.empty(states, heads, d + 2 * e + 2, dtype=torch.float32, device=like.device)
    return State(big, small, parts, d, e, table)


def scaled_coefficients(coefficients: Sequence[Coefficients], scale: float) -> list[Coefficients]:
    """Return a_g s^g, three coefficients for every head; the third is 0 at degree 1.

    >>> scaled_coefficients([(1.0, 1.0)], 0.5)
    [(1.0, 0.5, 0.0)]
    """
    return [tuple(c * scale**g for g, c in enumerate((*a, 0.0)[:3])) for a in coefficients]


def kernel_coefficients(spec: Spec, scale: float, unused: Tensor) -> tuple[Tensor, Coefficients]:
    """Return the coefficients with the scale included: a tensor [N, 3] on the device, and three numbers.

    If all heads have the same polynomial, the kernels read the numbers and ignore the tensor, which is `unused`.
    Otherwise they read the tensor. Pinned memory keeps its copy from waiting for earlier work.
    """
    if spec.is_alike:
        return unused, scaled_coefficients(spec.coefficients[:1], scale)[0]
    own = scaled_coefficients(spec.coefficients, scale)
    table = torch.tensor(own, dtype=torch.float32, pin_memory=unused.is_cuda)
    return table.to(unused.device, non_blocking=True), own[0]


def forward(
    workspace: Workspace, spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Return out [N, G, n, e] in the dtype of q, Z [N, G, n] if needed, and the tensors for the backward pass."""
    (heads, groups, n, d), (m, e), is_causal, device = q.shape, v.shape[1:], spec.causal, q.device
    qt, kt, w, scale = kernel_inputs(spec, q, k)
    is_shifted = workspace.centres_before(v.dtype)
    shifted = (v.to(spec.problem.working) - spec.middle[:, None]).to(v.dtype) if is_shifted else v
    values = shifted.contiguous()
    p = workspace.forward(
        ForwardSizes(
            heads, groups, n, m, d, e, q.dtype, spec.degree, workspace.causal_block if is_causal else 0, is_shifted,
            w is not None, spec.is_alike, needs_z, device,
        )
    )  # fmt: skip
    x = kt.new_empty(heads, d, p.padded)
    p.transpose((kt, kt, x, kt))
    y, own_w = x, values
    if w is not None:
        y, own_w, weighted = torch.empty_like(x), w, (kt.float() * w[..., None]).to(kt.dtype)
        p.transpose((weighted, weighted, y, weighted))
    first = first_buffer(p.splits, heads, d, e, device)
    p.first((x, y, values, own_w, first))
    second = second_buffer(p.splits, heads, e, is_causal, values, d) if p.second else first
    for at, launch in enumerate(p.second):
        table, target = (p.second_programs, second[..., 256:, :]) if at else (p.programs, second)
        launch((x, y, values, table, target))
    state = state_buffer(p.states, heads, p.parts, values, p.slots, d)
    table, numbers = kernel_coefficients(spec, scale, state.small)
    p.finish((second, first, table, p.slots, state.big, state.small), numbers)
    out = q.new_empty(heads, groups, n, e, dtype=torch.float32 if is_shifted else q.dtype)
    z = torch.empty(heads, groups, n, dtype=torch.float32, device=device) if needs_z else out
    keys, exponent = (x, scale * math.log2(math.e)) if is_causal else (qt, 0.0)
    row_w = qt if w is None else w
    p.rows((qt, qt, state.big, state.small, qt, keys, values, row_w, p.slots, out, z), (exponent,))
    if is_shifted:
        out = (out + spec.middle[:, None, None]).to(v.dtype)
    return (out, z, (out, z, state.big, state.small)) if needs_z else (out, None, ())
