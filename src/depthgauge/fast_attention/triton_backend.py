"""The fast path on the GPU: degrees 1 and 2 in fused Triton kernels (the extra `gpu`), forward and backward.

Where nothing is centred, padded or done exactly, the kernels read q, k and v as they are, and the scale goes into p's
coefficients. Otherwise q̃ and k̃ are made first, in the tensors' own dtype, and w multiplies one of the two factors of
every product of keys. Values are centred after the sums in bfloat16, before them in other dtypes (README, Rounding).
"""

import math
import os
import threading
from dataclasses import dataclass
from functools import lru_cache

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
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAUSAL_BLOCK = 1024
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
    rows_registers: int | None = None

    @property
    def rows_limit(self) -> dict[str, int]:
        """What keeps two programs of the rows on a multiprocessor, where that pays."""
        return {} if self.rows_registers is None or IS_INTERPRETED else {"maxnreg": self.rows_registers}


@lru_cache(maxsize=64)
def tuning(dtype: torch.dtype, width: int) -> Tuning:
    """What was fastest on an H200 for heads of 64; wider values and float32 take smaller blocks."""
    if dtype == torch.float32:
        return Tuning(32, 8 if width <= 64 else 16, 2, 64, 4 if width <= 64 else 8, 1, 4)
    if width > 64:
        return Tuning(64, 8, 2, 128, 8, 2, 16)
    return Tuning(128, 16, 3, 128, 8, 2, 16, rows_registers=128)


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
    return min(LONGEST_SPLIT, max(4 * BLOCK, padded_length(math.ceil(padded_length(length) / wanted))))


def first_sums(t: Tokens, per_split: int) -> Tensor:
    """Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w of every split: [splits, N, …] in float32."""
    (heads, d, padded), (m, e) = t.x.shape, t.v.shape[1:]
    splits = math.ceil(padded / per_split)
    first = torch.empty(splits, heads, d * e + d * d + d + e + 1, dtype=torch.float32, device=t.v.device)
    small = 32 if t.v.dtype == torch.float32 else 128 if max(d, e) <= 64 else 64
    kernels().first_moments[(splits, heads)](
        t.x, t.y, t.v, t.v if t.w is None else t.w, first, m, padded, per_split, d, e, small, t.w is not None, True,
        precision(t.v.dtype), num_warps=4 if d < 128 else 8,
    )  # fmt: skip
    return first


def second_sums(t: Tokens, splits: int, per_split: int, is_causal: bool) -> Tensor:
    """Σ (y ⊗ x) v of every split, by programs: [splits, N, programs, 512, E].

    Causal sums are many; kept in the tensors' own dtype they cost half, and one more rounding.
    """
    (heads, d, padded), (m, e), like = t.x.shape, t.v.shape[1:], t.v
    many, tune = len(programs(d)), tuning(like.dtype, max(d, e))
    sums = like.new_empty(splits, heads, many, 512, e, dtype=None if is_causal else torch.float32)
    wide = 32 if e <= 64 and d > TILE and like.dtype != torch.float32 else TILE
    tables = [program_table(d, like.device)] + ([_second_table(d, like.device)] if wide == TILE else [])
    for at, table in enumerate(tables):  # one tile pair a program, then the second ones
        kernels().second_moments[(many, splits, heads)](
            t.x, t.y, t.v, table, sums[..., 256 * at :, :], m, padded, per_split, d, e, tune.moments_tokens, wide,
            precision(like.dtype), tune.moments_stages, num_warps=tune.moments_warps,
        )  # fmt: skip
    return sums


def finished(
    t: Tokens,
    first: Tensor,
    sums: Tensor | None,
    coefficients: list[tuple[float, ...]],
    is_causal: bool,
    is_mean_centred: bool,
) -> State:
    """The State of all splits' sums; three coefficients a head, with the scale in them."""
    heads, d, e, like = t.x.shape[0], t.x.shape[1], t.v.shape[2], t.v
    splits, parts = first.shape[0], len(slots(d)) if sums is not None else 0
    states = splits + 1 if is_causal else 1
    big = like.new_empty(states, heads, parts * 256 * e + 2 * d * e + d * d)
    small = torch.empty(states, heads, d + 2 * e + 2, dtype=torch.float32, device=like.device)
    is_alike = len(set(coefficients)) == 1
    own = small if is_alike else coefficient_table(coefficients, like.device)
    kernels().finish[(parts + 1, heads)](
        first if sums is None else sums, first, own, slot_table(d, like.device), big, small, *coefficients[0], splits,
        heads, len(programs(d)), parts, d, e, is_causal, is_mean_centred, is_alike, num_warps=8,
    )  # fmt: skip
    return State(big, small, parts, d, e)


@lru_cache(maxsize=64)
def _second_table(dim: int, device: torch.device) -> Tensor:
    """The programs with their second tile in place of the first, for kernels that hold one tile pair."""
    rows = [(shared, max(second, 0), 0) for shared, _, second in programs(dim)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def evaluate_rows(
    x: Tensor, y: Tensor, state: State, table: Tensor, width: int, *, is_forward: bool, g: Tensor | None = None,
    causal: tuple[Tokens, int, float] | None = None, heads: int | None = None, dtype: torch.dtype | None = None,
    needs_z: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Σ (y ⊗ x) S + … for x, y [H, n, ·]: out [H, n, width], and Z [H, n] (forward only)."""
    row_heads, n = x.shape[:2]
    heads = row_heads if heads is None else heads
    tune = tuning(x.dtype, max(x.shape[-1], y.shape[-1], width))
    out = x.new_empty(row_heads, n, width, dtype=dtype)
    z = torch.empty(row_heads, n, dtype=torch.float32, device=x.device) if is_forward and needs_z else out
    t, per_state, scale = causal if causal is not None else (None, 1, 0.0)
    kt, v, w, m, padded = (x, x, None, 0, 0) if t is None else (t.x, t.v, t.w, t.v.shape[1], t.x.shape[2])
    kernels().evaluate[(math.ceil(n / tune.rows), row_heads)](
        x, y, state.big, state.small, x if g is None else g, kt, v, x if w is None else w, table, out, z, n, m, padded,
        row_heads // heads, heads, state.big.shape[0], per_state, scale, state.slots, x.shape[-1], y.shape[-1], width,
        tune.rows, 64 if x.dtype != torch.float32 else 32, tune.rows_part, t is not None, w is not None, is_forward,
        g is not None, needs_z, precision(x.dtype), tune.rows_stages, num_warps=tune.rows_warps, **tune.rows_limit,
    )  # fmt: skip
    return out, z


def scaled_coefficients(spec: Spec, scale: float) -> list[tuple[float, ...]]:
    """a_g s^g, three for every head; degree 1 has a third of 0."""
    padding = (0.0,) * (2 - spec.degree)
    return [tuple(c * scale**g for g, c in enumerate((*a, *padding))) for a in spec.coefficients]


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
    if spec.survey.ahead is not None and is_plain(spec) and len(spec.members) == spec.problem.heads:
        t, first, per_split = spec.survey.ahead
    else:
        t = tokens(kt, (v.to(spec.problem.working) - spec.middle[:, None]).to(v.dtype) if shifted else v, w)
        per_split = splitting(spec.problem, t.x.shape[2])
        first = first_sums(t, per_split)
    sums = second_sums(t, first.shape[0], per_split, spec.causal) if spec.degree > 1 else None
    state = finished(t, first, sums, scaled_coefficients(spec, scale), spec.causal, not shifted)
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


def splitting(problem: Problem, padded: int) -> int:
    """How many keys one program sums."""
    per_head = len(programs(problem.q.shape[-1]))
    return CAUSAL_BLOCK if problem.causal else split_length(padded, problem.heads, per_head, problem.q.device)


@lru_cache(maxsize=64)
def _waiting_place(heads: int, blocks: int, device: torch.device, thread: int) -> tuple[Tensor, torch.cuda.Event]:
    """Pinned memory for what is on its way to the host, and the event of its arrival; each thread has its own."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return torch.empty(heads, blocks, 6, dtype=torch.float32, pin_memory=True), event


def survey(problem: Problem, is_likely: bool) -> Survey:
    """What `bounds.survey` proves, in one kernel; centres are the means of a sample of tokens, as any would do.

    Where the fast path is likely to be taken the keys are laid out and their first moments summed on the way.
    """
    q, k, v = problem.q.flatten(1, 2).contiguous(), problem.k.contiguous(), problem.v.contiguous()
    (heads, rows, d), (m, e) = q.shape, v.shape[1:]
    steps = 4
    blocks = math.ceil(max(rows, m) / (BLOCK * steps))
    memory = torch.empty(heads * (2 * d + blocks * 6), dtype=torch.float32, device=q.device)
    centres, found = memory[: 2 * heads * d], memory[2 * heads * d :]
    kernels().survey[(blocks, heads, 3)](q, k, v, centres, found, rows, m, heads, d, e, BLOCK, steps, num_warps=8)
    largest = found.view(heads, blocks, 6)
    if blocks > 32:  # few are reduced on the host, which saves a launch
        largest = largest.amax(dim=1, keepdim=True)
    there = None
    if q.is_cuda:
        arrived, there = _waiting_place(heads, largest.shape[1], q.device, threading.get_ident())
        largest = arrived.copy_(largest, non_blocking=True)
        there.record()
    ahead = None
    if is_likely and not uses_middle(v.dtype):  # begun before the numbers arrive, or the device would wait for the host
        t = tokens(k, v, None)
        per_split = splitting(problem, t.x.shape[2])
        ahead = t, first_sums(t, per_split), per_split
    if there is not None:
        there.synchronize()
    up, lost = 1 + 2 * (d + 8) * 2.0**-24, 2 * math.sqrt(d * torch.finfo(torch.float32).tiny)
    table = [
        [*(math.sqrt(x) * up + lost for x in (q0, k0, q1, k1, mean)), values, 1.0]
        for q0, k0, q1, k1, values, mean in largest.amax(dim=1).tolist()
    ]
    mu, c = centres.view(2, heads, d)
    return summed_up(problem, table, mu, c, None, ahead)


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


def is_supported(dtype: torch.dtype, dim: int, width: int, degree: int) -> bool:
    """Whether the kernels know these shapes."""
    return dtype in DTYPES and dim in WIDTHS and width in WIDTHS and degree in (1, 2) and dim % TILE == 0
