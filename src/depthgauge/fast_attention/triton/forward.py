"""The forward pass in Triton kernels: sums over the keys, the state that rows read, and the rows.

If nothing is centred, padded or computed exactly, the kernels read q, k and v directly and the scale is part of the
coefficients. Otherwise q̃ and k̃ are computed first, in the dtype of the tensors, and w multiplies one of the two factors
of every product of keys. bfloat16 values are centred after the sums, values of other dtypes before them (section
Rounding of docs/concepts/fast-attention-derivation.md).
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from depthgauge.fast_attention.spec import Spec, centred, weights
from depthgauge.fast_attention.triton.kernels import TILE, kernels, programs, second_programs, slots
from depthgauge.fast_attention.triton.launch import Launch, table
from depthgauge.fast_attention.triton.tuning import BLOCK, padded_length, precision, split_length, tuning

LOG2_E = math.log2(math.e)


class PassSizes(NamedTuple):
    """Everything that fixes the launches of a forward or a backward pass.

    N key heads (`heads`) with G query heads each (`groups`), n rows, m keys of width d with values of width e. `block`
    is the size of causal blocks, or 0. `is_plain`: the kernels read q and k of the caller. `is_shifted`: values are
    centred before the sums. `has_w`: keys have weights. `is_weighted`: the weights depend on the keys. `is_alike`: all
    heads have the same polynomial. `needs_z`: Z is returned. A backward pass holds at most `turned_bytes` of turned
    states at once, or one of them.
    """

    heads: int
    groups: int
    n: int
    m: int
    d: int
    e: int
    dtype: torch.dtype
    degree: int
    block: int
    is_plain: bool
    is_shifted: bool
    has_w: bool
    is_weighted: bool
    is_alike: bool
    needs_z: bool
    turned_bytes: int
    device: torch.device

    @property
    def parts(self) -> int:
        """The number of tile pairs in S, or 0 at degree 1."""
        return len(slots(self.d)) if self.degree > 1 else 0

    @property
    def states(self) -> int:
        """The number of states of keys: one before every causal block and one after the last; or one in all."""
        return math.ceil(padded_length(self.m) / self.block) + 1 if self.block else 1

    @property
    def first_size(self) -> int:
        """The number of sums of degree 0 and 1 of a split: Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w."""
        return self.d * self.e + self.d * self.d + self.d + self.e + 1

    @property
    def big_size(self) -> int:
        """The size of the part of a state in the dtype of the tensors: S [parts, 256, e], L [2, d, e], C [d, d]."""
        return self.parts * 256 * self.e + 2 * self.d * self.e + self.d * self.d

    @property
    def small_size(self) -> int:
        """The size of the float32 part of a state: z1 [d], z0, n0 [e], mean of the values [e], 1 / total weight."""
        return self.d + 2 * self.e + 2


class SecondMoments:
    """Computes Σ (y ⊗ x) v of every split: [splits, heads, programs, 512, e], from x, y [heads, d, padded] and v.

    There are many causal sums. For bfloat16 they are stored in bfloat16, which halves their memory and costs one
    rounding. They would overflow float16. A narrow program holds one pair of tiles instead of two, so that a second
    launch computes the other half.
    """

    def __init__(self, s: PassSizes, heads: int, tokens: int, per_split: int) -> None:
        padded, tune = padded_length(tokens), tuning(s.dtype, max(s.d, s.e))
        self.shape = math.ceil(padded / per_split), heads, len(programs(s.d)), 512, s.e
        self.dtype = torch.bfloat16 if s.block and s.dtype == torch.bfloat16 else torch.float32
        self.is_narrow = s.e > 64 or s.d <= TILE or s.dtype == torch.float32
        self.programs, self.second_programs = (table(x, s.device, s.d) for x in (programs, second_programs))
        self.launch = Launch(
            kernels().second_moments, (len(programs(s.d)), self.shape[0], heads), (tokens, padded, per_split),
            (s.d, s.e, tune.moments_tokens, TILE if self.is_narrow else 2 * TILE, precision(s.dtype),
             tune.moments_stages),
            num_warps=tune.moments_warps,
        )  # fmt: skip

    def __call__(self, x: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return the sums."""
        sums = x.new_empty(self.shape, dtype=self.dtype)
        self.launch((x, y, v, self.programs, sums))
        if self.is_narrow:
            self.launch((x, y, v, self.second_programs, sums.flatten()[256 * v.shape[-1] :]))
        return sums


class ForwardLaunches:
    """The launches of a forward pass in their order, and the shapes of its tensors."""

    def __init__(self, s: PassSizes) -> None:
        self.sizes = s
        kernel, tune, causal = kernels(), tuning(s.dtype, max(s.d, s.e)), s.block > 0
        padded = padded_length(s.m)
        per_split = s.block or split_length(s.m, s.heads, len(programs(s.d)), s.device)
        splits = math.ceil(padded / per_split)
        self.slots = table(slots, s.device, s.d)
        self.transposed_shape, self.first_shape = (s.heads, s.d, padded), (splits, s.heads, s.first_size)
        self.big_shape, self.small_shape = (s.states, s.heads, s.big_size), (s.states, s.heads, s.small_size)
        self.transpose = Launch(
            kernel.transpose, (padded // BLOCK, s.heads, 1), (s.m, padded), (s.d, BLOCK), num_warps=4
        )
        by_products = s.dtype != torch.float32 and min(s.d, s.e) >= 64
        self.first_moments = Launch(
            kernel.first_moments, (splits, s.heads, 1), (s.m, padded, per_split),
            (s.d, s.e, tune.moments_tokens, s.has_w, by_products, precision(s.dtype), 3 if by_products else 1),
            num_warps=4 if s.d < 128 else 8,
        )  # fmt: skip
        self.second_moments = SecondMoments(s, s.heads, s.m, per_split) if s.degree > 1 else None
        self.finish = Launch(
            kernel.finish, (s.parts + 1, s.heads, 1), (splits, s.heads),
            (len(programs(s.d)), s.parts, s.d, s.e, causal, not s.is_shifted, s.is_alike), num_warps=8,
        )  # fmt: skip
        keys = (s.m, padded, s.groups, s.heads, s.states, s.block) if causal else (0, 0, s.groups, s.heads, 1, 1)
        self.evaluate = Launch(
            kernel.evaluate, (math.ceil(s.n / tune.rows), s.heads * s.groups, 1), (s.n, *keys),
            (s.parts, s.d, s.e, tune.rows, 32 if s.dtype == torch.float32 else 64, tune.rows_part, causal,
             s.has_w and causal, s.needs_z, precision(s.dtype), tune.rows_stages),
            num_warps=tune.rows_warps, **tune.rows_limit,
        )  # fmt: skip


forward_launches = lru_cache(maxsize=1024)(ForwardLaunches)


def kernel_inputs(s: PassSizes, spec: Spec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return q̃, k̃, w and the scale that remains for the coefficients; (q, k, None, s) if nothing has to be changed."""
    if s.is_plain:
        return q.contiguous(), k.contiguous(), None, spec.scale
    qt, kt = centred(spec, slice(None), q, k)
    w = weights(spec, slice(None), k)
    return qt.to(q.dtype).contiguous(), kt.to(q.dtype).contiguous(), None if w is None else w.contiguous(), 1.0


def scaled_coefficients(coefficients: Sequence[tuple[float, ...]], scale: float) -> list[tuple[float, ...]]:
    """Return a_g s^g, three coefficients for every head; the third is 0 at degree 1.

    >>> scaled_coefficients([(1.0, 1.0)], 0.5)
    [(1.0, 0.5, 0.0)]
    """
    return [tuple([c * scale**g for g, c in enumerate((*a, 0.0)[:3])]) for a in coefficients]


def kernel_coefficients(s: PassSizes, spec: Spec, scale: float) -> tuple[Tensor | None, tuple[float, ...]]:
    """Return the scaled coefficients of every head on the device [N, 3], and of the first head.

    If all heads have the same polynomial, the kernels get the numbers, and there is no tensor. Pinned memory keeps the
    copy of the tensor from waiting for earlier work.
    """
    own = scaled_coefficients(spec.coefficients[:1] if s.is_alike else spec.coefficients, scale)
    if s.is_alike:
        return None, own[0]
    pinned = torch.tensor(own, dtype=torch.float32, pin_memory=s.device.type == "cuda")
    return pinned.to(s.device, non_blocking=True), own[0]


def forward(
    s: PassSizes, spec: Spec, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Return out [N, G, n, e] in the dtype of q, Z [N, G, n] if needed, and the tensors for the backward pass."""
    q, k, w, scale = kernel_inputs(s, spec, q, k)
    if s.is_shifted:
        v = (v.to(spec.problem.working) - spec.middle[:, None]).to(v.dtype)
    own, shared = kernel_coefficients(s, spec, scale)
    out, z, big, small = launched(forward_launches(s), scale, q, k, v.contiguous(), w, own, shared)
    if s.is_shifted:
        out = (out + spec.middle[:, None, None]).to(s.dtype)
    return (out, z, (out, z, big, small)) if s.needs_z else (out, None, ())


def launched(
    p: ForwardLaunches, scale: float, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, own: Tensor | None,
    shared: tuple[float, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch a forward pass and return out [..., n, e], Z [..., n] and the two parts of the states, see `PassSizes`.

    The keys are transposed to x, and the weighted keys to y [N, d, padded]. `own` are the coefficients [N, 3] of every
    head, or None if all have the `shared` ones. Tensors are dropped before later ones are allocated.
    """
    s = p.sizes
    x = y = q.new_empty(p.transposed_shape)
    p.transpose((k, x))
    if w is not None:
        y = torch.empty_like(x)
        p.transpose(((k.float() * w[..., None]).to(k.dtype), y))
    second = None if p.second_moments is None else p.second_moments(x, y, v)  # first, because it takes longest
    first, weight = q.new_empty(p.first_shape, dtype=torch.float32), v if w is None else w
    p.first_moments((x, y, v, weight, first))
    big, small = q.new_empty(p.big_shape), q.new_empty(p.small_shape, dtype=torch.float32)
    second = first if second is None else second
    p.finish((second, first, small if own is None else own, p.slots, big, small), shared)
    del y, first, second
    out = q.new_empty(*q.shape[:-1], s.e, dtype=torch.float32 if s.is_shifted else s.dtype)
    z = q.new_empty(q.shape[:-1], dtype=torch.float32) if s.needs_z else out
    p.evaluate((q, big, small, x, v, weight, p.slots, out, z), (scale * LOG2_E,))
    return out, z, big, small
