"""The fast path on the GPU: degrees 1 and 2 in fused Triton kernels (the extra `gpu`), forward and backward.

Where nothing is centred, padded or done exactly, the kernels read q, k and v as they are, and the scale goes into p's
coefficients. Otherwise q̃ and k̃ are made first, in the tensors' own dtype, and w multiplies one of the two factors of
every product of keys. Values are centred after the sums in bfloat16, before them in other dtypes (README, Rounding).
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from depthgauge.fast_attention.bounds import Survey, summed_up, unit
from depthgauge.fast_attention.kernels import TILE, kernels, programs, slots
from depthgauge.fast_attention.minimax import Minimax
from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.spec import Spec, weights

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 128
"""Tokens are padded to a multiple of this."""
LONGEST_SPLIT = 8192
"""The most tokens one program sums; the rounding allowance counts them."""
SAMPLE = 1024
"""From about how many tokens a centre is taken."""
CAUSAL_BLOCK = 2048
"""The size of the blocks on the diagonal that are computed exactly."""


@dataclass(frozen=True)
class Tuning:
    """Block sizes and warps of the two kernels that do the work; rows_part of 16 coordinates make features at once."""

    moments_tokens: int
    moments_warps: int
    moments_stages: int
    rows: int
    rows_warps: int
    rows_stages: int
    rows_part: int


@lru_cache(maxsize=64)
def tuning(dtype: torch.dtype, width: int) -> Tuning:
    """What was fastest on an H200 for heads of 64; wider values and float32 take smaller blocks."""
    if dtype == torch.float32:
        return Tuning(32, 8 if width <= 64 else 16, 2, 64, 4 if width <= 64 else 8, 1, 4)
    if width > 64:
        return Tuning(64, 8, 2, 128, 8, 2, 16)
    return Tuning(128, 16, 3, 256, 16, 2, 16)


@dataclass(frozen=True)
class Tokens:
    """Keys ready for the kernels: x and y = w x as [N, D, padded], values [N, m, E], w [N, m] float32 or None."""

    x: Tensor
    y: Tensor
    v: Tensor
    w: Tensor | None


@dataclass(frozen=True)
class State:
    """The sums over keys, finished: what `evaluate` reads. S [states, N, slots, 256, E] and the lower moments."""

    s: Tensor
    linear: Tensor
    square: Tensor
    z1: Tensor
    z0: Tensor
    n0: Tensor
    mean: Tensor


def precision(dtype: torch.dtype) -> str:
    """How products of float32 operands are done: three TF32 products, nearly float32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@lru_cache(maxsize=64)
def program_table(dim: int, device: torch.device) -> Tensor:
    """`programs` on the device."""
    return torch.tensor(programs(dim), dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def slot_table(dim: int, device: torch.device) -> Tensor:
    """`slots` on the device."""
    return torch.tensor(slots(dim), dtype=torch.int32, device=device)


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
    return qt.to(q.dtype), kt.to(q.dtype), weights(spec, slice(None), k), 1.0


def transposed(x: Tensor, padded: int) -> Tensor:
    """[N, n, D] → [N, D, padded], zeros at the end."""
    heads, n, d = x.shape
    out = x.new_empty(heads, d, padded)
    kernels().transpose[(padded // BLOCK, heads)](x, out, n, padded, d, BLOCK, num_warps=4)
    return out


def padded_length(n: int) -> int:
    """The next multiple of BLOCK."""
    return (n + BLOCK - 1) // BLOCK * BLOCK


def tokens(k: Tensor, v: Tensor, w: Tensor | None) -> Tokens:
    """Lay keys out for the sums."""
    padded = padded_length(k.shape[1])
    x = transposed(k, padded)
    y = x if w is None else transposed((k.float() * w[..., None]).to(k.dtype), padded)
    return Tokens(x, y, v.contiguous(), None if w is None else w.float().contiguous())


def processors(device: torch.device) -> int:
    """How many multiprocessors there are to fill."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def split_length(length: int, heads: int, per_head: int, device: torch.device) -> int:
    """How many tokens one program sums, so that all programs fill the chip a whole number of times."""
    wanted = max(1, math.ceil(processors(device) * 2 / (heads * per_head)))
    return min(LONGEST_SPLIT, max(4 * BLOCK, padded_length(math.ceil(length / wanted))))


def sum_state(
    t: Tokens, coefficients: Tensor, degree: int, per_split: int, is_causal: bool, is_mean_centred: bool
) -> State:
    """All sums over the keys: [N, 3] coefficients with the scale in them."""
    ours = kernels()
    (heads, d, padded), (m, e) = t.x.shape, t.v.shape[1:]
    splits = math.ceil(padded / per_split)
    many, parts = len(programs(d)), len(slots(d))
    tune, how, like = tuning(t.v.dtype, max(d, e)), precision(t.v.dtype), t.v
    first = torch.empty(splits, heads, d * e + d * d + d + e + 1, dtype=torch.float32, device=like.device)
    small = 32 if t.v.dtype == torch.float32 else 128 if max(d, e) <= 64 else 64
    ours.first_moments[(splits, heads)](
        t.x, t.y, t.v, t.v if t.w is None else t.w, first, m, padded, per_split, d, e, small, t.w is not None,
        degree > 1, how, num_warps=4 if d < 128 else 8,
    )  # fmt: skip
    states = splits + 1 if is_causal else 1
    sums = s = first
    if degree > 1:
        sums = torch.empty(splits, heads, many, 512, e, dtype=torch.float32, device=like.device)
        s = like.new_empty(states, heads, parts, 256, e)
        wide = 32 if e <= 64 and d > 16 and t.v.dtype != torch.float32 else 16
        table = program_table(d, like.device)
        for second in range(2 if wide == 16 else 1):  # one tile pair a program, then the second ones
            now = table if second == 0 else _swapped(d, like.device)
            ours.second_moments[(many, splits, heads)](
                t.x, t.y, t.v, now, sums if second == 0 else sums[..., 256:, :], m, padded, per_split, d, e,
                tune.moments_tokens, wide, how, tune.moments_stages, num_warps=tune.moments_warps,
            )  # fmt: skip
    linear = like.new_empty(states, heads, 2, d, e)
    square = like.new_empty(states, heads, d, d)
    z1, z0, n0, mean = (
        torch.empty(*shape, dtype=torch.float32, device=like.device)
        for shape in ((states, heads, d), (states, heads), (states, heads, e), (heads, e + 1))
    )
    ours.finish[((parts if degree > 1 else 0) + 1, heads)](
        sums, first, coefficients, slot_table(d, like.device), s, linear, square, z1, z0, n0, mean, splits, heads,
        many, parts if degree > 1 else 0, d, e, is_causal, is_mean_centred, num_warps=8,
    )  # fmt: skip
    return State(s, linear, square, z1, z0, n0, mean)


@lru_cache(maxsize=64)
def _swapped(dim: int, device: torch.device) -> Tensor:
    """The programs with their second tile first, for kernels that hold one tile pair."""
    rows = [(shared, max(second, 0), 0) for shared, _, second in programs(dim)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def evaluate_rows(
    x: Tensor, y: Tensor, state: State, table: Tensor, width: int, degree: int, *, is_forward: bool,
    g: Tensor | None = None, causal: tuple[Tokens, int, float] | None = None, heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ (y ⊗ x) S + … for x, y [H, n, ·]: out [H, n, width], and Z [H, n] (forward only)."""
    ours = kernels()
    row_heads, n = x.shape[:2]
    heads = row_heads if heads is None else heads
    tune = tuning(x.dtype, max(x.shape[-1], y.shape[-1], width))
    out = x.new_empty(row_heads, n, width, dtype=dtype)
    z = torch.empty(row_heads, n, dtype=torch.float32, device=x.device)
    t, per_state, scale = causal if causal is not None else (None, 1, 0.0)
    has_w = t is not None and t.w is not None
    any_tensor: Any = x
    ours.evaluate[(math.ceil(n / tune.rows), row_heads)](
        x, y, state.s, state.linear, state.square, state.z1, state.z0, state.n0, state.mean,
        any_tensor if g is None else g, any_tensor if t is None else t.x, any_tensor if t is None else t.v,
        t.w if t is not None and has_w else any_tensor, table, out, z, n, 0 if t is None else t.v.shape[1],
        0 if t is None else t.x.shape[2], row_heads // heads, heads, state.z0.shape[0], per_state, scale,
        table.shape[0], x.shape[-1], y.shape[-1], width, tune.rows, 64 if x.dtype != torch.float32 else 32,
        tune.rows_part, degree > 1, causal is not None, has_w, is_forward, g is not None, precision(x.dtype),
        tune.rows_stages, num_warps=tune.rows_warps,
    )  # fmt: skip
    return out, z


def scaled_coefficients(spec: Spec, scale: float, device: torch.device) -> Tensor:
    """a_g s^g as [N, 3] float32; degree 1 has a third of 0."""
    powers = torch.tensor([scale**g for g in range(3)], dtype=torch.float64)
    padded = torch.nn.functional.pad(spec.coefficients, (0, 2 - spec.degree))
    return (padded * powers).to(device, torch.float32)


def forward(spec: Spec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out [N, G, n, e] in the dtype of q, Z [N, G, n], and what the backward pass keeps."""
    heads, groups, n, d = q.shape
    qt, kt, w, scale = centred(spec, q, k)
    shifted = uses_middle(v.dtype)
    vt = (v.to(spec.problem.working) - spec.middle[:, None]).to(v.dtype) if shifted else v
    t = tokens(kt, vt, w)
    coefficients = scaled_coefficients(spec, scale, q.device)
    per_split = CAUSAL_BLOCK if spec.causal else split_length(t.x.shape[2], heads, len(programs(d)), q.device)
    state = sum_state(t, coefficients, spec.degree, per_split, spec.causal, not shifted)
    causal = (t, per_split, scale * math.log2(math.e)) if spec.causal else None
    flat = qt.reshape(heads * groups, n, d)
    out, z = evaluate_rows(
        flat, flat, state, slot_table(d, q.device), v.shape[-1], spec.degree, is_forward=True, causal=causal,
        heads=heads, dtype=torch.float32 if shifted else None,
    )  # fmt: skip
    out = out.view(heads, groups, n, -1)
    if shifted:
        out = (out + spec.middle[:, None, None]).to(v.dtype)
    z = z.view(heads, groups, n)
    return out, z, (out, z, state.s, state.linear, state.square, state.z1, state.mean)


def survey(problem: Problem) -> Survey:
    """What `bounds.survey` proves, in one kernel; centres are the means of at most SAMPLE tokens, as any would do."""
    q, k, v = problem.q.flatten(1, 2).contiguous(), problem.k.contiguous(), problem.v.contiguous()
    (heads, rows, d), (m, e) = q.shape, v.shape[1:]
    mu = q[:, :: max(1, rows // SAMPLE)].mean(dim=1, dtype=torch.float32)
    c = k[:, :: max(1, m // SAMPLE)].mean(dim=1, dtype=torch.float32)
    steps = 4
    blocks = math.ceil(max(rows, m) / (128 * steps))
    found = torch.empty(heads, blocks, 5, dtype=torch.float32, device=q.device)
    kernels().survey[(blocks, heads, 3)](q, k, v, mu, c, found, rows, m, d, e, 128, steps, num_warps=8)
    largest = torch.cat([found.amax(dim=1), (mu * mu).sum(dim=1, keepdim=True)], dim=1).tolist()
    up, lost = 1 + 2 * (d + 8) * 2.0**-24, 2 * math.sqrt(d * torch.finfo(torch.float32).tiny)
    table = []
    for row in largest:
        norms = [math.sqrt(x) * up + lost if x >= 0 else math.nan for x in (*row[:4], row[5])]
        table.append([*norms, row[4], 1.0])
    return summed_up(problem, table, mu, c, None)


def uses_middle(dtype: torch.dtype) -> bool:
    """bfloat16 values are exact as they come and are centred after the sums; others before."""
    return dtype != torch.bfloat16


def rounding(problem: Problem, p: Minimax, bound: float, centring: int, spread: float) -> float:
    """What rounding may add to an entry, as a share of its values' range (README, Rounding)."""
    dtype, d = problem.q.dtype, problem.q.shape[-1]
    u = 2.0**-18 if dtype == torch.float32 else unit(dtype)
    key = 1 if centring or problem.keep is not None else 0
    query = 1 if key or dtype == torch.float16 else 0
    weight = 2 if centring == 2 else 0
    a = [abs(c) * bound**g for g, c in enumerate(p.coefficients)] + [0.0]
    sums = (LONGEST_SPLIT / 8 + problem.k.shape[1] / LONGEST_SPLIT + d * d / 8 + 32) * 2.0**-23 * sum(a)
    small = d * 2.0**-22 if dtype == torch.float16 else 0.0
    log_error = math.expm1(min(1.0, (d + 6) * 2.0**-53 * spread))
    linear, square = u * a[1], u * a[2]
    above = linear * (key + weight + query + 4 * u) + square * (2 * key + weight + 2 * query + 4) + sums + small
    below = linear * (key + weight + query) + square * (2 * key + weight + 2 * query + 1) + sums + small
    if problem.causal:
        above += u * math.exp(bound) * (1 + (key + query) * bound)
        below += u * math.exp(bound) * (1 + (key + query) * bound)
    if uses_middle(dtype):
        above += unit(dtype)
    grown = math.exp(bound) / (1 - p.error)
    above, below = 1.01 * above * grown + log_error, 1.01 * below * grown + log_error
    return (above + below) / (1 - below) if below < 0.5 else math.inf


def is_supported(dtype: torch.dtype, dim: int, width: int, degree: int) -> bool:
    """Whether the kernels know these shapes."""
    return dtype in DTYPES and dim in WIDTHS and width in WIDTHS and degree in (1, 2) and dim % TILE == 0
