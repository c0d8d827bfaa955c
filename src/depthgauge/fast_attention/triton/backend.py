"""The fast path on the GPU: degrees 1 and 2 in fused Triton kernels (the extra `gpu`).

Where nothing is centred, padded or done exactly, the kernels read q, k and v as they are, and the scale goes into p's
coefficients. Otherwise q̃ and k̃ are made first, in the tensors' own dtype, and w multiplies one of the two factors of
every product of keys. Values are centred after the sums in bfloat16, before them in other dtypes (README, Rounding).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthgauge.fast_attention.decide.bounds import unit
from depthgauge.fast_attention.decide.minimax import Minimax
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec, weights
from depthgauge.fast_attention.triton import launches
from depthgauge.fast_attention.triton.kernels import programs, slots
from depthgauge.fast_attention.triton.tuning import (
    CAUSAL_BLOCK,
    LONGEST_SPLIT,
    padded_length,
    program_table,
    second_table,
    slot_table,
    split_length,
)


@dataclass(frozen=True)
class Tokens:
    """Keys ready for the kernels: x and y = w x as [N, D, padded], values [N, m, E], w [N, m] float32 or None."""

    x: Tensor
    y: Tensor
    v: Tensor
    w: Tensor | None


@dataclass(frozen=True)
class State:
    """The sums over keys, finished, in two tensors so that little has to be allocated.

    big [states, N, …] in the tensors' dtype: S [slots, 256, E], L as a sum of two [2, D, E], C [D, D].
    small [states, N, …] in float32: z1 [D], z0, n0 [E], the values' mean [E], 1 / total weight.
    """

    big: Tensor
    small: Tensor
    slots: int
    dim: int
    width: int

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """S [N, slots, 256, E], L [N, 2, D, E] and C [N, D, D] of the first state."""
        heads, d, e = self.big.shape[1], self.dim, self.width
        sizes = [self.slots * 256 * e, 2 * d * e, d * d]
        s, linear, square = torch.split(self.big[0], sizes, dim=-1)
        return s.reshape(heads, -1, 256, e), linear.reshape(heads, 2, d, e), square.reshape(heads, d, d)

    def lower(self) -> tuple[Tensor, Tensor, Tensor]:
        """z1 [N, D], the values' mean [N, E] and 1 / total weight [N, 1] of the first state."""
        d, e = self.dim, self.width
        small = self.small[0]
        return small[:, :d], small[:, d + 1 + e : d + 1 + 2 * e], small[:, -1:]


def is_plain(spec: Spec) -> bool:
    """Whether the kernels can read q and k as they are; float16 is scaled first, for its exponents are few."""
    is_changed = spec.is_centred or spec.keep is not None or spec.exact_rows is not None
    return not is_changed and spec.problem.q.dtype != torch.float16


def centred(spec: Spec, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """q̃, k̃, w and the scale that is left: (q, k, None, s) as they are where nothing has to be done."""
    if is_plain(spec):
        return q.contiguous(), k.contiguous(), None, spec.scale
    work = spec.problem.working
    qt = (q.to(work) - spec.query_centre[:, None, None]) * spec.query_factor[:, None, None, None].to(work)
    kt = (k.to(work) - spec.key_centre[:, None]) * spec.key_factor[:, None, None].to(work)
    if spec.exact_rows is not None:
        qt = qt.masked_fill(spec.exact_rows[..., None], 0)
    if spec.keep is not None:
        kt = kt.masked_fill(~spec.keep[..., None], 0)
    return qt.to(q.dtype).contiguous(), kt.to(q.dtype).contiguous(), weights(spec, slice(None), k), 1.0


def transposed(x: Tensor, padded: int) -> Tensor:
    """[N, n, D] → [N, D, padded], zeros at the end."""
    heads, n, d = x.shape
    out = x.new_empty(heads, d, padded)
    launches.transpose(heads, n, d, padded, 0, True, x.device)((x, x, out, x))
    return out


def tokens(k: Tensor, v: Tensor, w: Tensor | None) -> Tokens:
    """Lay keys out for the sums."""
    padded = padded_length(k.shape[1])
    x = transposed(k, padded)
    y = x if w is None else transposed((k.float() * w[..., None]).to(k.dtype), padded)
    return Tokens(x, y, v.contiguous(), None if w is None else w.float().contiguous())


def first_place(splits: int, heads: int, d: int, e: int, device: torch.device) -> Tensor:
    """Room for Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w of every split."""
    return torch.empty(splits, heads, d * e + d * d + d + e + 1, dtype=torch.float32, device=device)


def second_place(splits: int, heads: int, d: int, e: int, is_causal: bool, like: Tensor) -> Tensor:
    """Room for Σ (y ⊗ x) v of every split, by programs.

    Causal sums are many; kept in bfloat16 they cost half, and one more rounding. float16 could not hold them.
    """
    dtype = torch.bfloat16 if is_causal and like.dtype == torch.bfloat16 else torch.float32
    return like.new_empty(splits, heads, len(programs(d)), 512, e, dtype=dtype)


def first_sums(t: Tokens, per_split: int) -> Tensor:
    """Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w of every split: [splits, N, …] in float32."""
    (heads, d, padded), (m, e), device = t.x.shape, t.v.shape[1:], t.v.device
    first = first_place(math.ceil(padded / per_split), heads, d, e, device)
    launch = launches.first_moments(heads, m, padded, per_split, d, e, t.v.dtype, t.w is not None, device)
    launch((t.x, t.y, t.v, t.v if t.w is None else t.w, first))
    return first


def second_sums(t: Tokens, per_split: int, is_causal: bool) -> Tensor:
    """Σ (y ⊗ x) v of every split: [splits, N, programs, 512, E]."""
    (heads, d, padded), (m, e), device = t.x.shape, t.v.shape[1:], t.v.device
    sums = second_place(math.ceil(padded / per_split), heads, d, e, is_causal, t.v)
    ours, *others = launches.second_moments(heads, m, padded, per_split, d, e, t.v.dtype, device)
    ours((t.x, t.y, t.v, program_table(d, device), sums))
    for launch in others:
        launch((t.x, t.y, t.v, second_table(d, device), sums[..., 256:, :]))
    return sums


def state_place(states: int, heads: int, parts: int, d: int, e: int, like: Tensor) -> State:
    """Room for a State."""
    big = like.new_empty(states, heads, parts * 256 * e + 2 * d * e + d * d)
    small = torch.empty(states, heads, d + 2 * e + 2, dtype=torch.float32, device=like.device)
    return State(big, small, parts, d, e)


def finished(
    t: Tokens,
    first: Tensor,
    second: Tensor | None,
    coefficients: list[tuple[float, ...]],
    is_causal: bool,
    is_mean_centred: bool,
) -> State:
    """The State of all splits' sums; three coefficients a head, with the scale in them."""
    (heads, d, _), e, device = t.x.shape, t.v.shape[2], t.v.device
    splits, is_alike = first.shape[0], len(set(coefficients)) == 1
    parts = len(slots(d)) if second is not None else 0
    state = state_place(splits + 1 if is_causal else 1, heads, parts, d, e, t.v)
    own = state.small if is_alike else coefficient_table(coefficients, device)
    sums = first if second is None else second
    launches.finish(heads, splits, d, e, parts > 0, is_causal, is_mean_centred, is_alike, device)(
        (sums, first, own, slot_table(d, device), state.big, state.small), coefficients[0]
    )
    return state


def evaluate_rows(
    x: Tensor, y: Tensor, state: State, table: Tensor, width: int, *, is_forward: bool, g: Tensor | None = None,
    causal: tuple[Tokens, int, float] | None = None, heads: int | None = None, dtype: torch.dtype | None = None,
    needs_z: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ (y ⊗ x) S + … for x, y [H, n, ·]: out [H, n, width], and Z [H, n] (forward only)."""
    row_heads, n = x.shape[:2]
    out = x.new_empty(row_heads, n, width, dtype=dtype)
    z = torch.empty(row_heads, n, dtype=torch.float32, device=x.device) if is_forward and needs_z else out
    t, per_state, scale = causal if causal is not None else (None, 1, 0.0)
    kt, v, w, m, padded = (x, x, None, 0, 0) if t is None else (t.x, t.v, t.w, t.v.shape[1], t.x.shape[2])
    launches.evaluate(
        row_heads, n, row_heads if heads is None else heads, state.big.shape[0], per_state, m, padded, state.slots,
        x.shape[-1], y.shape[-1], width, x.dtype, t is not None, w is not None, is_forward, g is not None, needs_z,
        x.device,
    )(
        (x, y, state.big, state.small, x if g is None else g, kt, v, x if w is None else w, table, out, z), (scale,)
    )  # fmt: skip
    return out, z


def scaled_coefficients(coefficients: Sequence[tuple[float, ...]], scale: float) -> list[tuple[float, ...]]:
    """a_g s^g, three for every head; degree 1 has a third of 0.

    >>> scaled_coefficients([(1.0, 1.0)], 0.5)
    [(1.0, 0.5, 0.0)]
    """
    return [tuple(c * scale**g for g, c in enumerate((*a, 0.0)[:3])) for a in coefficients]


def coefficient_table(coefficients: list[tuple[float, ...]], device: torch.device) -> Tensor:
    """The coefficients on the device: [N, 3]; from pinned memory, or the copy would wait for all work before it."""
    if device.type != "cuda":
        return torch.tensor(coefficients, dtype=torch.float32)
    return torch.tensor(coefficients, dtype=torch.float32, pin_memory=True).to(device, non_blocking=True)


def forward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, needs_z: bool = True
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """out [N, G, n, e] in the dtype of q, Z [N, G, n] if needed, and what the backward pass keeps."""
    heads, groups, n, d = q.shape
    qt, kt, w, scale = centred(spec, q, k)
    shifted = uses_middle(v.dtype)
    t = tokens(kt, (v.to(spec.problem.working) - spec.middle[:, None]).to(v.dtype) if shifted else v, w)
    per_split = splitting(heads, d, k.shape[1], spec.causal, q.device)
    first = first_sums(t, per_split)
    second = second_sums(t, per_split, spec.causal) if spec.degree > 1 else None
    coefficients = scaled_coefficients(spec.coefficients, scale)
    state = finished(t, first, second, coefficients, spec.causal, not shifted)
    causal = (t, per_split, scale * math.log2(math.e)) if spec.causal else None
    flat = qt.view(heads * groups, n, d)
    out, z = evaluate_rows(
        flat, flat, state, slot_table(d, q.device), v.shape[-1], is_forward=True, causal=causal, heads=heads,
        dtype=torch.float32 if shifted else None, needs_z=needs_z,
    )  # fmt: skip
    out = out.view(heads, groups, n, -1)
    if shifted:
        out = (out + spec.middle[:, None, None]).to(v.dtype)
    if not needs_z:
        return out, None, ()
    z = z.view(heads, groups, n)
    return out, z, (out, z, state.big, state.small)


def splitting(heads: int, d: int, m: int, is_causal: bool, device: torch.device) -> int:
    """How many keys one program sums."""
    return CAUSAL_BLOCK if is_causal else split_length(m, heads, len(programs(d)), device)


def uses_middle(dtype: torch.dtype) -> bool:
    """bfloat16 values are exact as they come and are centred after the sums; others before."""
    return dtype != torch.bfloat16


def holds(scale: float, query: float, key: float, value: float) -> bool:
    """Whether s² k k v and q q, which the kernels form of what they are given, stay far inside the range of float32.

    >>> holds(0.125, 8.0, 8.0, 1.0), holds(1e-24, 1e12, 1e12, 1.0), holds(1.0, 0.0, 8.0, 1.0)
    (True, False, True)
    """
    sizes = [(abs(scale), 20), (query, 20), (key, 20), (value, 40)]
    return all(size < _NOTHING or 2.0**-power <= size <= 2.0**power for size, power in sizes)


_NOTHING = 2.0**-58
"""A norm this short was zero before it was rounded up."""


def rounding(problem: Problem, p: Minimax, bound: float, centring: int, spread: float) -> float:
    """What rounding may add to an entry, as a share of its values' range (README, Rounding)."""
    dtype, d = problem.q.dtype, problem.q.shape[-1]
    u = 2.0**-18 if dtype == torch.float32 else unit(dtype)
    key = 1 if centring or problem.keep is not None else 0
    query = 1 if key or dtype == torch.float16 else 0
    weight = 2 if centring == 2 else 0
    a = [abs(c) * bound**g for g, c in enumerate(p.coefficients)] + [0.0]
    per_split = CAUSAL_BLOCK if problem.causal else LONGEST_SPLIT
    sums = (LONGEST_SPLIT / 8 + problem.k.shape[1] / per_split + d * d / 8 + 32) * 2.0**-23 * sum(a)
    # Below its normal range float16 is off by 2⁻²⁵ a number: coordinates, their products, and these times w.
    small = d * 2.0**-22 * math.exp(spread if centring == 2 else 0.0) if dtype == torch.float16 else 0.0
    log_error = math.expm1(min(1.0, (d + 6) * 2.0**-53 * spread))
    linear, square = u * a[1], u * a[2]
    above = linear * (key + weight + query + 4 * u) + square * (2 * key + weight + 2 * query + 5) + sums + small
    below = linear * (key + weight + query) + square * (2 * key + weight + 2 * query + 1) + sums + small
    if problem.causal:
        above += u * math.exp(bound) * (1 + (key + query) * bound)
        below += u * math.exp(bound) * (1 + (key + query) * bound)
    if uses_middle(dtype):
        above += unit(dtype)
    grown = math.exp(bound) / (1 - p.error)
    above, below = 1.01 * above * grown + log_error, 1.01 * below * grown + log_error
    return (above + below) / (1 - below) if below < 0.5 else math.inf
