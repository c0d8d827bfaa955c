"""Causal gradients of the Triton backend: what a block reads comes before it, what is read of it comes after.

Row i of block b reads earlier blocks through the forward's state b, its own by exact exponentials, with one Z′. With
level = −∂out·(out − shift), and all sums over keys divided by W,

    ∂q_i = 1/Z′ · (Σ_earlier w_j p′(t) s k_j + Σ_own w_j e^t s k_j)(∂out·ṽ_j + level)
    ∂v_j = w_j Σ_i … ∂out/Z′,   ∂k_j = w_j Σ_i … s q_i (∂out·ṽ_j + level)/Z′,   … = p, p′ (later blocks) or e^t (own).

So keys of block b read a state too, the sums over the queries of all blocks after b. A block's rows go into these with
dN = ∂out · floor/Z′, floor its smallest Z′ (early rows see few keys, and 1/Z′ would leave short dtypes), and state b is
divided by the weight of all rows after b, Σ rows/floor. float16 gradients are scaled by a power of two, for the same
reason. What is bilinear takes its state turned; turned states are large, and made a few at a time.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton.backend import (
    State,
    centred,
    coefficient_table,
    is_plain,
    scaled_coefficients,
    second_sums,
    splitting,
    tokens,
    uses_middle,
)
from depthgauge.fast_attention.triton.gradient_kernels import gradient_kernels
from depthgauge.fast_attention.triton.kernels import TILE, programs, slots
from depthgauge.fast_attention.triton.tuning import precision, slot_table, tuning

TURNED_BYTES = 2**28
"""How much of the turned states is held at once."""


@dataclass(frozen=True)
class Tiles:
    """Tokens and warps of a program: the sums over queries; own tokens, others at once and warps of exact blocks."""

    moments: tuple[int, int]
    rows: tuple[int, int, int]
    keys: tuple[int, int, int]


@lru_cache(maxsize=64)
def tiles(dtype: torch.dtype, width: int) -> Tiles:
    """What fits the registers and the shared memory of an H200."""
    if dtype == torch.float32:
        wide = Tiles((16, 8), (32, 32, 8), (32, 16, 8))
        return wide if width > 64 else Tiles((32, 8), (64, 32, 8), (64, 32, 8))
    return Tiles((32, 8), (128, 64, 8), (128, 32, 8)) if width > 64 else Tiles((32, 8), (64, 64, 4), (64, 64, 4))


@dataclass(frozen=True)
class Given:
    """What all parts read: q̃, ∂out [N·G, n, ·], Z′, level [N·G, n]; k̃, ṽ [N, m, ·], w [N, m] or None; s and the block.

    floor [N, blocks] is the smallest Z′ of a block of rows, of all query heads of a key head; `level` is filled in by
    `query_sums`.
    """

    q: Tensor
    grad: Tensor
    z: Tensor
    level: Tensor
    k: Tensor
    v: Tensor
    w: Tensor | None
    floor: Tensor
    scale: float
    block: int

    @property
    def groups(self) -> int:
        """Query heads of a key head."""
        return self.q.shape[0] // self.k.shape[0]

    @property
    def tiles(self) -> Tiles:
        """The tiles of these shapes."""
        return tiles(self.q.dtype, max(self.q.shape[-1], self.v.shape[-1]))


@lru_cache(maxsize=64)
def turned_table(dim: int, width: int, device: torch.device) -> Tensor:
    """The tiles of the turned slots: (slot, tile of c, tile of b)."""
    others = dim // TILE
    rows = [(c * others + b, c, b) for c in range(width // TILE) for b in range(others)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def pair_table(dim: int, device: torch.device) -> Tensor:
    """For tiles a and b: where their products' sums are kept, and whether b is the first factor: [tiles, tiles, 2]."""
    table = torch.zeros(dim // TILE, dim // TILE, 2, dtype=torch.int32)
    for slot, (_, first, second) in enumerate(slots(dim)):
        table[second, first] = torch.tensor([slot, 1], dtype=torch.int32)
        table[first, second] = torch.tensor([slot, 0], dtype=torch.int32)
    return table.to(device)


def normalised(grad: Tensor) -> tuple[Tensor, Tensor]:
    """∂out [N, G, n, e] times a power of two, and what takes it back [N]: float16 has few exponents, others enough."""
    if grad.dtype != torch.float16:
        return grad, grad.new_ones(grad.shape[0], dtype=torch.float32)
    exponent = torch.frexp(grad.abs().amax(dim=(1, 2, 3)).float()).exponent
    one = torch.ones_like(exponent, dtype=torch.float32)
    return (grad * torch.ldexp(one, -exponent)[:, None, None, None]).to(grad.dtype), torch.ldexp(one, exponent)


def floors(z: Tensor, block: int) -> Tensor:
    """The smallest Z′ [N, G, n] of every block of rows: [N, blocks]."""
    heads, _, n = z.shape
    blocks = math.ceil(n / block)
    padded = pad(z.amin(dim=1), (0, blocks * block - n), value=math.inf)
    return padded.view(heads, blocks, block).amin(dim=-1)


def weights_after(x: Given, states: int) -> Tensor:
    """Σ rows/floor over all blocks after each of the first `states`: [N, states]; 1 where there are none."""
    counts = torch.full_like(x.floor, x.groups * x.block)
    counts[:, -1] = x.groups * (x.q.shape[1] - (x.floor.shape[1] - 1) * x.block)
    later = pad((counts / x.floor)[:, 1:], (0, 1))
    after = later.flip(1).cumsum(1).flip(1)[:, :states]
    return torch.where(after > 0, after, 1.0).contiguous()


def query_sums(x: Given, out: Tensor, shift: Tensor, after: Tensor, coefficients: Tensor, degree: int) -> State:
    """The states that keys read: [blocks of keys, N, …], `small` without mean and total weight; fills x.level in."""
    (row_heads, n, d), e, blocks = x.q.shape, x.v.shape[-1], x.floor.shape[1]
    (heads, states), (tile, warps) = after.shape, x.tiles.moments
    dn = torch.empty_like(x.grad)
    first = torch.empty(blocks, row_heads, d * e + d * d + d + e + 1, dtype=torch.float32, device=out.device)
    gradient_kernels().query_moments[(blocks, row_heads, 1)](
        x.q, x.grad, out, x.z, shift, x.floor, dn, x.level, first, n, x.groups, x.block, d, e, tile,
        degree > 1, precision(x.q.dtype), num_warps=warps,
    )  # fmt: skip
    second = second_sums(tokens(x.q, dn, None), x.block, True) if degree > 1 else first
    parts = len(slots(d)) if degree > 1 else 0
    big = x.q.new_empty(states, heads, parts * 256 * e + 2 * d * e + d * d)
    small = torch.empty(states, heads, d + e + 1, dtype=torch.float32, device=out.device)
    gradient_kernels().suffixes[(parts + 1, heads, 1)](
        second, first, coefficients, x.floor, after, slot_table(d, out.device), big, small, blocks, states, heads,
        x.groups, len(programs(d)), parts, d, e, num_warps=8,
    )  # fmt: skip
    return State(big, small, parts, d, e)


def exact_rows(x: Given, factor: Tensor) -> Tensor:
    """The own blocks' share of ∂q, times Z′: [N·G, n, d] in float32; factor [N]."""
    (row_heads, n, d), (m, e), (own, other, warps) = x.q.shape, x.v.shape[1:], x.tiles.rows
    found = torch.empty_like(x.q, dtype=torch.float32)
    gradient_kernels().exact_queries[(math.ceil(n / own), row_heads, 1)](
        x.q, x.grad, x.level, x.k, x.v, x.z if x.w is None else x.w, factor, found, n, m, x.groups, x.block,
        x.scale * math.log2(math.e), d, e, own, other, x.w is not None, precision(x.q.dtype), 2, num_warps=warps,
    )  # fmt: skip
    return found


def exact_keys(x: Given, factor: Tensor, needs_weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The own blocks' share of ∂k, ∂v and, where needed, ∂w [N, m], all but their weight; factor [N, blocks]."""
    (heads, m, d), e, n, (own, other, warps) = x.k.shape, x.v.shape[-1], x.q.shape[1], x.tiles.keys
    dk, dv = torch.empty_like(x.k, dtype=torch.float32), torch.empty_like(x.v, dtype=torch.float32)
    dw = dk.new_empty(heads, m) if needs_weights else dk
    gradient_kernels().exact_keys[(math.ceil(m / own), heads, 1)](
        x.q, x.grad, x.level, x.z, x.k, x.v, x.floor, factor, dk, dv, dw, n, m, x.groups, x.floor.shape[1],
        factor.shape[1], x.block, x.scale * math.log2(math.e), x.scale, d, e, own, other, needs_weights,
        precision(x.q.dtype), 2, num_warps=warps,
    )  # fmt: skip
    return dk, dv, dw


def added(
    x: Tensor, y: Tensor, state: State, exact: Tensor, factor: Tensor, block: int, dtype: torch.dtype,
    *, is_turned: bool, g: Tensor | None = None, z: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """factor (exact + what the rows x, y [H, n, ·] read in the states of their blocks): [H, n, ·] in `dtype`.

    Turned: bilinear in x and y, with g [H, n] or 1 for the part of Z. Otherwise y = x, and z [H, n] takes that part.
    """
    (row_heads, n, d), heads, e = x.shape, state.big.shape[1], state.width
    count = min(math.ceil(n / block), state.big.shape[0])
    tune, width = tuning(x.dtype, max(d, e)), exact.shape[-1]
    out = torch.empty_like(exact, dtype=dtype)
    parts, table, s, at_once = state.slots, slot_table(d, x.device), state.big, count
    if is_turned and parts:
        parts, table = d * e // TILE**2, turned_table(d, e, x.device)
        at_once = min(count, max(1, TURNED_BYTES // (heads * parts * 256 * d * x.element_size())))
        s = x.new_empty(at_once, heads, parts * 256 * d)
    for start in range(0, count, at_once):
        end = min(start + at_once, count)
        if is_turned and parts:
            gradient_kernels().turn[(parts, (end - start) * heads, 1)](
                state.big[start:], pair_table(d, x.device), s, state.big.shape[-1], d, e, num_warps=4
            )  # fmt: skip
        rows = (n if end == count else end * block) - start * block
        gradient_kernels().add_rows[(math.ceil(rows / tune.rows), row_heads, 1)](
            x, y, s, state.big, state.small, x if g is None else g, exact, factor, table, out, out if z is None else z,
            n, row_heads // heads, heads, start, count - 1, block, s.shape[-1], state.big.shape[-1],
            state.small.shape[-1], state.slots * 256 * e, parts, d, y.shape[-1], width, tune.rows, tune.rows_part,
            is_turned, g is not None, z is not None, precision(x.dtype), tune.rows_stages, num_warps=tune.rows_warps,
            **tune.rows_limit,
        )  # fmt: skip
    return out


def backward(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    (heads, groups, n, d), (m, e) = q.shape, v.shape[1:]
    block = splitting(heads, d, m, True, q.device)
    out, z, big, small = saved
    before = State(big, small, len(slots(d)) if spec.degree > 1 else 0, d, e)
    _, mean, share = before.lower()
    qt, kt, w, scale = centred(spec, q, k)
    shift = (spec.middle if uses_middle(v.dtype) else mean).float().contiguous()
    if spec.exact_rows is not None:
        grad = grad.masked_fill(spec.exact_rows[..., None], 0)
    up, size = normalised(grad)
    flat = heads * groups
    x = Given(
        qt.view(flat, n, d), up.view(flat, n, e), z.view(flat, n), torch.empty_like(z).view(flat, n), kt,
        torch.sub(v, shift[:, None], out=torch.empty_like(v, memory_format=torch.contiguous_format)),
        None if w is None else w.float().contiguous(), floors(z, block), scale, block,
    )  # fmt: skip
    states = math.ceil(m / block)
    after = weights_after(x, states)
    a = coefficient_table(scaled_coefficients(spec.coefficients, scale), q.device)
    behind = query_sums(x, out, shift, after, a, spec.degree)

    per_query = size[:, None, None] / z
    per_key = (after * (size[:, None] * share)).repeat_interleave(block, dim=1)[:, :m]
    per_key = (per_key if x.w is None else per_key * x.w).contiguous()
    query_factor, key_factor = (None, None) if is_plain(spec) else (f.float() for f in spec.factors)
    by_query = per_query if query_factor is None else per_query * query_factor[:, None, None]
    own = exact_rows(x, share[:, 0] * scale)
    dq = added(x.q, x.grad, before, own, by_query, block, q.dtype, is_turned=True, g=x.level)
    del own

    wide = torch.float32 if spec.is_weighted else q.dtype
    dk, dv, dw = exact_keys(x, 1 / (after * x.floor[:, :states]), spec.is_weighted)
    dv = added(x.k, x.k, behind, dv, per_key, block, wide, is_turned=False, z=dw if spec.is_weighted else None)
    by_key = per_key if key_factor is None else per_key * key_factor[:, None]
    dk = added(x.k, x.v, behind, dk, by_key, block, wide, is_turned=True)
    if spec.is_weighted:  # through w_j = exp(s μ·(k_j − c))
        through = (dv * x.v).sum(-1) + per_key * dw
        dk = dk + spec.scale * through[..., None] * spec.query_centre[:, None]
    if spec.keep is not None:
        dk = dk.masked_fill(~spec.keep[..., None], 0)
    return dq.view(heads, groups, n, d), dk.to(k.dtype), dv.to(v.dtype)
