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
from depthgauge.fast_attention.triton.kernels import programs, second_programs, slots
from depthgauge.fast_attention.triton.launches import (
    FinishSizes,
    FirstMomentSizes,
    RowSizes,
    SecondMomentSizes,
    TransposeSizes,
)
from depthgauge.fast_attention.triton.tuning import padded_length
from depthgauge.fast_attention.triton.workspace import Workspace

Coefficients = tuple[float, ...]


@dataclass(frozen=True)
class Tokens:
    """Keys in the layout of the kernels: x and y = w x [N, D, padded], values [N, m, E], w [N, m] float32 or None."""

    x: Tensor
    y: Tensor
    v: Tensor
    w: Tensor | None


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

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return S [N, slots, 256, E], L [N, 2, D, E] and C [N, D, D] of the first state."""
        heads, d, e = self.big.shape[1], self.dim, self.width
        sizes = [self.slots * 256 * e, 2 * d * e, d * d]
        s, linear, square = torch.split(self.big[0], sizes, dim=-1)
        return s.reshape(heads, -1, 256, e), linear.reshape(heads, 2, d, e), square.reshape(heads, d, d)

    def lower(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return z1 [N, D], the mean of the values [N, E] and 1 / total weight [N, 1] of the first state."""
        d, e = self.dim, self.width
        small = self.small[0]
        return small[:, :d], small[:, d + 1 + e : d + 1 + 2 * e], small[:, -1:]


@dataclass(frozen=True)
class CausalKeys:
    """What causal rows need for the exact block on the diagonal: the keys, the block size, and s·log₂(e)."""

    tokens: Tokens
    block: int
    scale: float


def is_plain(spec: Spec) -> bool:
    """Return whether the kernels can read q and k directly. float16 is scaled first because its range is small."""
    is_changed = spec.is_centred or spec.keep is not None or spec.exact_rows is not None
    return not is_changed and spec.problem.q.dtype != torch.float16


def kernel_inputs(spec: Spec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return q̃, k̃, w and the scale that remains for the coefficients; (q, k, None, s) if nothing has to be changed."""
    if is_plain(spec):
        return q.contiguous(), k.contiguous(), None, spec.scale
    qt, kt = centred(spec, slice(None), q, k)
    return qt.to(q.dtype).contiguous(), kt.to(q.dtype).contiguous(), weights(spec, slice(None), k), 1.0


def transposed(workspace: Workspace, x: Tensor, padded: int) -> Tensor:
    """Return [N, n, D] as [N, D, padded], with zeros after the last token."""
    heads, n, d = x.shape
    out = x.new_empty(heads, d, padded)
    workspace.launch(TransposeSizes(heads, n, d, padded, 0, True, x.device))((x, x, out, x))
    return out


def tokens(workspace: Workspace, k: Tensor, v: Tensor, w: Tensor | None) -> Tokens:
    """Return keys and values in the layout of the kernels."""
    padded = padded_length(k.shape[1])
    x = transposed(workspace, k, padded)
    y = x if w is None else transposed(workspace, (k.float() * w[..., None]).to(k.dtype), padded)
    return Tokens(x, y, v.contiguous(), None if w is None else w.float().contiguous())


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


def first_moments(workspace: Workspace, t: Tokens, per_split: int) -> Tensor:
    """Return Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w of every split: [splits, N, …] in float32."""
    (heads, d, padded), (m, e), device = t.x.shape, t.v.shape[1:], t.v.device
    first = first_buffer(math.ceil(padded / per_split), heads, d, e, device)
    sizes = FirstMomentSizes(heads, m, padded, per_split, d, e, t.v.dtype, t.w is not None, device)
    workspace.launch(sizes)((t.x, t.y, t.v, t.v if t.w is None else t.w, first))
    return first


def second_moments(workspace: Workspace, t: Tokens, per_split: int, is_causal: bool) -> Tensor:
    """Return Σ (y ⊗ x) v of every split: [splits, N, programs, 512, E]."""
    (heads, d, padded), (m, e), device = t.x.shape, t.v.shape[1:], t.v.device
    sums = second_buffer(math.ceil(padded / per_split), heads, e, is_causal, t.v, d)
    sizes = SecondMomentSizes(heads, m, padded, per_split, d, e, t.v.dtype, device)
    launch = workspace.launch(sizes)
    launch((t.x, t.y, t.v, workspace.table(programs, device, d), sums))
    if sizes.is_narrow:
        launch((t.x, t.y, t.v, workspace.table(second_programs, device, d), sums[..., 256:, :]))
    return sums


def state_buffer(states: int, heads: int, parts: int, like: Tensor, table: Tensor, d: int) -> State:
    """Allocate a State for values `like` [N, m, E]."""
    e = like.shape[-1]
    big = like.new_empty(states, heads, parts * 256 * e + 2 * d * e + d * d)
    small = torch.empty(states, heads, d + 2 * e + 2, dtype=torch.float32, device=like.device)
    return State(big, small, parts, d, e, table)


def finished(
    workspace: Workspace,
    t: Tokens,
    first: Tensor,
    second: Tensor | None,
    coefficients: list[Coefficients],
    is_causal: bool,
    is_mean_centred: bool,
) -> State:
    """Return the State from the moments of all splits. There are three coefficients per head, scale included."""
    (heads, d, _), e, device = t.x.shape, t.v.shape[2], t.v.device
    splits, is_alike = first.shape[0], len(set(coefficients)) == 1
    parts = len(slots(d)) if second is not None else 0
    state = state_buffer(splits + 1 if is_causal else 1, heads, parts, t.v, workspace.table(slots, device, d), d)
    own = state.small if is_alike else coefficient_table(coefficients, device)
    sums = first if second is None else second
    sizes = FinishSizes(heads, splits, d, e, parts > 0, is_causal, is_mean_centred, is_alike, device)
    workspace.launch(sizes)((sums, first, own, state.table, state.big, state.small), coefficients[0])
    return state


def row_sizes(x: Tensor, y: Tensor, state: State) -> RowSizes:
    """Return the sizes of rows x [H, n, ·] and y [H, n, ·] that read one state and need no exact block."""
    return RowSizes(
        row_heads=x.shape[0], n=x.shape[1], heads=state.big.shape[1], states=state.big.shape[0], per_state=1, m=0,
        padded=0, parts=state.slots, x=x.shape[-1], y=y.shape[-1], width=state.width, dtype=x.dtype, is_causal=False,
        has_w=False, is_forward=False, has_g=False, needs_z=True, device=x.device,
    )  # fmt: skip


def causal_sizes(sizes: RowSizes, keys: CausalKeys) -> RowSizes:
    """Return the sizes of causal rows."""
    t = keys.tokens
    m, padded = t.v.shape[1], t.x.shape[2]
    return sizes._replace(per_state=keys.block, m=m, padded=padded, is_causal=True, has_w=t.w is not None)


def forward_rows(
    workspace: Workspace, q: Tensor, state: State, keys: CausalKeys | None, dtype: torch.dtype, needs_z: bool
) -> tuple[Tensor, Tensor]:
    """Return out [H, n, E] in `dtype`, and Z [H, n] if needed, of the rows q [H, n, D]."""
    row_heads, n = q.shape[:2]
    out = q.new_empty(row_heads, n, state.width, dtype=dtype)
    z = torch.empty(row_heads, n, dtype=torch.float32, device=q.device) if needs_z else out
    sizes = row_sizes(q, q, state)._replace(is_forward=True, needs_z=needs_z)
    kt, v, w, scale = q, q, q, 0.0
    if keys is not None:
        sizes, t, scale = causal_sizes(sizes, keys), keys.tokens, keys.scale
        kt, v, w = t.x, t.v, q if t.w is None else t.w
    workspace.launch(sizes)((q, q, state.big, state.small, q, kt, v, w, state.table, out, z), (scale,))
    return out, z


def gradient_rows(workspace: Workspace, x: Tensor, y: Tensor, state: State, g: Tensor | None = None) -> Tensor:
    """Return Σ (y ⊗ x) S + y L + n0 + g (x C + z1) for x, y [H, n, ·]: [H, n, width] in float32. g is [H, n]."""
    out = x.new_empty(*x.shape[:2], state.width, dtype=torch.float32)
    sizes = row_sizes(x, y, state)._replace(has_g=g is not None)
    tensors = (x, y, state.big, state.small, x if g is None else g, x, x, x, state.table, out, out)
    workspace.launch(sizes)(tensors, (0.0,))
    return out


def scaled_coefficients(coefficients: Sequence[Coefficients], scale: float) -> list[Coefficients]:
    """Return a_g s^g, three coefficients for every head; the third is 0 at degree 1.

    >>> scaled_coefficients([(1.0, 1.0)], 0.5)
    [(1.0, 0.5, 0.0)]
    """
    return [tuple(c * scale**g for g, c in enumerate((*a, 0.0)[:3])) for a in coefficients]


def coefficient_table(coefficients: list[Coefficients], device: torch.device) -> Tensor:
    """Return the coefficients on the device: [N, 3]. Pinned memory keeps the copy from waiting for earlier work."""
    if device.type != "cuda":
        return torch.tensor(coefficients, dtype=torch.float32)
    return torch.tensor(coefficients, dtype=torch.float32, pin_memory=True).to(device, non_blocking=True)


def forward(
    workspace: Workspace, spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Return out [N, G, n, e] in the dtype of q, Z [N, G, n] if needed, and the tensors for the backward pass."""
    heads, groups, n, d = q.shape
    qt, kt, w, scale = kernel_inputs(spec, q, k)
    shifted = workspace.centres_before(v.dtype)
    values = (v.to(spec.problem.working) - spec.middle[:, None]).to(v.dtype) if shifted else v
    t = tokens(workspace, kt, values, w)
    per_split = workspace.per_split(heads, d, k.shape[1], spec.causal, q.device)
    first = first_moments(workspace, t, per_split)
    second = second_moments(workspace, t, per_split, spec.causal) if spec.degree > 1 else None
    coefficients = scaled_coefficients(spec.coefficients, scale)
    state = finished(workspace, t, first, second, coefficients, spec.causal, not shifted)
    keys = CausalKeys(t, per_split, scale * math.log2(math.e)) if spec.causal else None
    rows = qt.view(heads * groups, n, d)
    out, z = forward_rows(workspace, rows, state, keys, torch.float32 if shifted else q.dtype, needs_z)
    out = out.view(heads, groups, n, -1)
    if shifted:
        out = (out + spec.middle[:, None, None]).to(v.dtype)
    if not needs_z:
        return out, None, ()
    z = z.view(heads, groups, n)
    return out, z, (out, z, state.big, state.small)
