"""Causal gradients in Triton: queries read the sums of earlier keys, keys read the sums of later queries.

Row i of block b reads earlier blocks through state b of the forward pass, and its own block through exact exponentials,
with one Z′. With level = −∂out·(out − shift), and all sums over keys divided by W,

    ∂q_i = 1/Z′ · (Σ_earlier w_j p′(t) s k_j + Σ_own w_j e^t s k_j)(∂out·ṽ_j + level)
    ∂v_j = w_j Σ_i f_ij ∂out/Z′,            f = p(t) for later blocks, e^t for the own block
    ∂k_j = w_j Σ_i f′_ij s q_i (∂out·ṽ_j + level)/Z′,   f′ = p′(t) for later blocks, e^t for the own block.

The keys of block b therefore read a state as well: the sums over the queries of all blocks after b. The rows of a block
enter these sums with dN = ∂out · floor/Z′, where floor is the smallest Z′ of the block: early rows attend to few keys,
and 1/Z′ would overflow short dtypes. State b is divided by the weight of all rows after b, Σ rows/floor. float16
gradients are scaled by a power of two for the same reason. Bilinear terms need a turned state; turned states are large
and are computed a few at a time.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from depthgauge.fast_attention.spec import Spec
from depthgauge.fast_attention.triton.forward import (
    State,
    coefficient_table,
    is_plain,
    kernel_inputs,
    scaled_coefficients,
    second_moments,
    tokens,
)
from depthgauge.fast_attention.triton.gradient_kernels import gradient_kernels
from depthgauge.fast_attention.triton.kernels import TILE, programs, slots
from depthgauge.fast_attention.triton.tuning import precision, tuning
from depthgauge.fast_attention.triton.workspace import Workspace

TURNED_BYTES = 2**28
"""The memory of the turned states that are held at once."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the gradient kernels.

    `moments` is (tokens, warps) of the sums over queries. `rows` and `keys` are (own tokens, other tokens, warps) of
    the exact blocks.
    """

    moments: tuple[int, int]
    rows: tuple[int, int, int]
    keys: tuple[int, int, int]


@lru_cache(maxsize=64)
def tiles(dtype: torch.dtype, width: int) -> Tiles:
    """Return tile sizes that fit into the registers and the shared memory of an H200."""
    if dtype == torch.float32:
        wide = Tiles((16, 8), (32, 32, 8), (32, 16, 8))
        return wide if width > 64 else Tiles((32, 8), (64, 32, 8), (64, 32, 8))
    return Tiles((32, 8), (128, 64, 8), (128, 32, 8)) if width > 64 else Tiles((32, 8), (64, 64, 4), (64, 64, 4))


@dataclass(frozen=True)
class Inputs:
    """What all parts of the backward pass read.

    q̃ and ∂out are [N·G, n, ·]; Z′ and level are [N·G, n]; k̃ and ṽ are [N, m, ·]; w is [N, m] or None. floor [N, blocks]
    is the smallest Z′ of a block of rows, over all query heads of a key head. `query_sums` fills in `level`.
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
        """The number of query heads per key head."""
        return self.q.shape[0] // self.k.shape[0]

    @property
    def tiles(self) -> Tiles:
        """The tile sizes for these shapes."""
        return tiles(self.q.dtype, max(self.q.shape[-1], self.v.shape[-1]))


@dataclass(frozen=True)
class RowSum:
    """The sum factor · (exact + the terms that rows x, y [H, n, ·] read from the states of their blocks).

    If `is_turned`, the terms are bilinear in x and y, and g [H, n], or 1 if None, multiplies the term of Z. Otherwise
    y = x, and the term of Z is added to z [H, n], if given.
    """

    x: Tensor
    y: Tensor
    state: State
    exact: Tensor
    factor: Tensor
    dtype: torch.dtype
    is_turned: bool
    g: Tensor | None = None
    z: Tensor | None = None


@lru_cache(maxsize=64)
def turned_slots(dim: int, width: int) -> tuple[tuple[int, int, int], ...]:
    """Return the tiles of the turned slots: (slot, tile of c, tile of b)."""
    others = dim // TILE
    return tuple((c * others + b, c, b) for c in range(width // TILE) for b in range(others))


@lru_cache(maxsize=16)
def pair_slots(dim: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for tiles a and b the slot of their products and whether b is the first factor: [tiles, tiles, 2]."""
    count = dim // TILE
    table = [[(0, 0)] * count for _ in range(count)]
    for slot, (_, first, second) in enumerate(slots(dim)):
        table[second][first] = slot, 1
        table[first][second] = slot, 0
    return tuple(tuple(row) for row in table)


def normalised(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return ∂out [N, G, n, e] times a power of two, and the inverse factor [N]. Only float16 needs a factor."""
    if grad.dtype != torch.float16:
        return grad, grad.new_ones(grad.shape[0], dtype=torch.float32)
    exponent = torch.frexp(grad.abs().amax(dim=(1, 2, 3)).float()).exponent
    one = torch.ones_like(exponent, dtype=torch.float32)
    return (grad * torch.ldexp(one, -exponent)[:, None, None, None]).to(grad.dtype), torch.ldexp(one, exponent)


def floors(z: Tensor, block: int) -> Tensor:
    """Return the smallest Z′ [N, G, n] of every block of rows: [N, blocks]."""
    heads, _, n = z.shape
    blocks = math.ceil(n / block)
    padded = pad(z.amin(dim=1), (0, blocks * block - n), value=math.inf)
    return padded.view(heads, blocks, block).amin(dim=-1)


def weights_after(x: Inputs, states: int) -> Tensor:
    """Return Σ rows/floor over all blocks after each of the first `states` blocks: [N, states]; 1 if there are none."""
    counts = torch.full_like(x.floor, x.groups * x.block)
    counts[:, -1] = x.groups * (x.q.shape[1] - (x.floor.shape[1] - 1) * x.block)
    later = pad((counts / x.floor)[:, 1:], (0, 1))
    after = later.flip(1).cumsum(1).flip(1)[:, :states]
    return torch.where(after > 0, after, 1.0).contiguous()


def query_sums(
    workspace: Workspace, x: Inputs, out: Tensor, shift: Tensor, after: Tensor, coefficients: Tensor, degree: int
) -> State:
    """Return the states that keys read, [blocks of keys, N, …], and fill in x.level.

    `small` has no mean and no total weight.
    """
    (row_heads, n, d), e, blocks = x.q.shape, x.v.shape[-1], x.floor.shape[1]
    (heads, states), (tile, warps) = after.shape, x.tiles.moments
    dn = torch.empty_like(x.grad)
    first = torch.empty(blocks, row_heads, d * e + d * d + d + e + 1, dtype=torch.float32, device=out.device)
    gradient_kernels().query_moments[(blocks, row_heads, 1)](
        x.q, x.grad, out, x.z, shift, x.floor, dn, x.level, first, n, x.groups, x.block, d, e, tile,
        degree > 1, precision(x.q.dtype), num_warps=warps,
    )  # fmt: skip
    second = first
    if degree > 1:
        second = second_moments(workspace, tokens(workspace, x.q, dn, None), x.block, True)
    parts = len(slots(d)) if degree > 1 else 0
    big = x.q.new_empty(states, heads, parts * 256 * e + 2 * d * e + d * d)
    small = torch.empty(states, heads, d + e + 1, dtype=torch.float32, device=out.device)
    table = workspace.table(slots, out.device, d)
    gradient_kernels().suffixes[(parts + 1, heads, 1)](
        second, first, coefficients, x.floor, after, table, big, small, blocks, states, heads,
        x.groups, len(programs(d)), parts, d, e, num_warps=8,
    )  # fmt: skip
    return State(big, small, parts, d, e, table)


def exact_rows(x: Inputs, factor: Tensor) -> Tensor:
    """Return the contribution of the own blocks to ∂q, times Z′: [N·G, n, d] in float32. factor is [N]."""
    (row_heads, n, d), (m, e), (own, other, warps) = x.q.shape, x.v.shape[1:], x.tiles.rows
    found = torch.empty_like(x.q, dtype=torch.float32)
    gradient_kernels().exact_queries[(math.ceil(n / own), row_heads, 1)](
        x.q, x.grad, x.level, x.k, x.v, x.z if x.w is None else x.w, factor, found, n, m, x.groups, x.block,
        x.scale * math.log2(math.e), d, e, own, other, x.w is not None, precision(x.q.dtype), 2, num_warps=warps,
    )  # fmt: skip
    return found


def exact_keys(x: Inputs, factor: Tensor, needs_weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contributions of the own blocks to ∂k, ∂v and, if needed, ∂w [N, m], before they are weighted.

    factor is [N, blocks].
    """
    (heads, m, d), e, n, (own, other, warps) = x.k.shape, x.v.shape[-1], x.q.shape[1], x.tiles.keys
    dk, dv = torch.empty_like(x.k, dtype=torch.float32), torch.empty_like(x.v, dtype=torch.float32)
    dw = dk.new_empty(heads, m) if needs_weights else dk
    gradient_kernels().exact_keys[(math.ceil(m / own), heads, 1)](
        x.q, x.grad, x.level, x.z, x.k, x.v, x.floor, factor, dk, dv, dw, n, m, x.groups, x.floor.shape[1],
        factor.shape[1], x.block, x.scale * math.log2(math.e), x.scale, d, e, own, other, needs_weights,
        precision(x.q.dtype), 2, num_warps=warps,
    )  # fmt: skip
    return dk, dv, dw


def row_sum(workspace: Workspace, rows: RowSum, block: int) -> Tensor:
    """Compute a RowSum with states of `block` tokens: [H, n, ·]."""
    x, y, state, g, z = rows.x, rows.y, rows.state, rows.g, rows.z
    (row_heads, n, d), heads, e = x.shape, state.big.shape[1], state.width
    count = min(math.ceil(n / block), state.big.shape[0])
    tune, width = tuning(x.dtype, max(d, e)), rows.exact.shape[-1]
    out = torch.empty_like(rows.exact, dtype=rows.dtype)
    parts, table, s, at_once = state.slots, state.table, state.big, count
    is_turned = rows.is_turned and parts > 0
    if is_turned:
        parts, table = d * e // TILE**2, workspace.table(turned_slots, x.device, d, e)
        at_once = min(count, max(1, TURNED_BYTES // (heads * parts * 256 * d * x.element_size())))
        s = x.new_empty(at_once, heads, parts * 256 * d)
    for start in range(0, count, at_once):
        end = min(start + at_once, count)
        if is_turned:
            gradient_kernels().turn[(parts, (end - start) * heads, 1)](
                state.big[start:], workspace.table(pair_slots, x.device, d), s, state.big.shape[-1], d, e, num_warps=4
            )  # fmt: skip
        length = (n if end == count else end * block) - start * block
        gradient_kernels().add_rows[(math.ceil(length / tune.rows), row_heads, 1)](
            x, y, s, state.big, state.small, x if g is None else g, rows.exact, rows.factor, table, out,
            out if z is None else z, n, row_heads // heads, heads, start, count - 1, block, s.shape[-1],
            state.big.shape[-1], state.small.shape[-1], state.slots * 256 * e, parts, d, y.shape[-1], width, tune.rows,
            tune.rows_part, rows.is_turned, g is not None, z is not None, precision(x.dtype), tune.rows_stages,
            num_warps=tune.rows_warps, **tune.rows_limit,
        )  # fmt: skip
    return out


def backward(
    workspace: Workspace, spec: Spec, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    (heads, groups, n, d), (m, e) = q.shape, v.shape[1:]
    block = workspace.causal_block
    out, z, big, small = saved
    parts = len(slots(d)) if spec.degree > 1 else 0
    before = State(big, small, parts, d, e, workspace.table(slots, q.device, d))
    _, mean, share = before.lower()
    qt, kt, w, scale = kernel_inputs(spec, q, k)
    shift = (spec.middle if workspace.centres_before(v.dtype) else mean).float().contiguous()
    if spec.exact_rows is not None:
        grad = grad.masked_fill(spec.exact_rows[..., None], 0)
    up, size = normalised(grad)
    flat = heads * groups
    x = Inputs(
        q=qt.view(flat, n, d),
        grad=up.view(flat, n, e),
        z=z.view(flat, n),
        level=torch.empty_like(z).view(flat, n),
        k=kt,
        v=torch.sub(v, shift[:, None], out=torch.empty_like(v, memory_format=torch.contiguous_format)),
        w=None if w is None else w.float().contiguous(),
        floor=floors(z, block),
        scale=scale,
        block=block,
    )
    states = math.ceil(m / block)
    after = weights_after(x, states)
    a = coefficient_table(scaled_coefficients(spec.coefficients, scale), q.device)
    behind = query_sums(workspace, x, out, shift, after, a, spec.degree)

    per_query = size[:, None, None] / z
    per_key = (after * (size[:, None] * share)).repeat_interleave(block, dim=1)[:, :m]
    per_key = (per_key if x.w is None else per_key * x.w).contiguous()
    query_factor, key_factor = (None, None) if is_plain(spec) else (f.float() for f in spec.factors)
    by_query = per_query if query_factor is None else per_query * query_factor[:, None, None]
    own = exact_rows(x, share[:, 0] * scale)
    dq = row_sum(workspace, RowSum(x.q, x.grad, before, own, by_query, q.dtype, is_turned=True, g=x.level), block)
    del own

    wide = torch.float32 if spec.is_weighted else q.dtype
    dk, dv, dw = exact_keys(x, 1 / (after * x.floor[:, :states]), spec.is_weighted)
    z_of = dw if spec.is_weighted else None
    dv = row_sum(workspace, RowSum(x.k, x.k, behind, dv, per_key, wide, is_turned=False, z=z_of), block)
    by_key = per_key if key_factor is None else per_key * key_factor[:, None]
    dk = row_sum(workspace, RowSum(x.k, x.v, behind, dk, by_key, wide, is_turned=True), block)
    if spec.is_weighted:  # through w_j = exp(s μ·(k_j − c))
        through = (dv * x.v).sum(-1) + per_key * dw
        dk = dk + spec.scale * through[..., None] * spec.query_centre[:, None]
    if spec.keep is not None:
        dk = dk.masked_fill(~spec.keep[..., None], 0)
    return dq.view(heads, groups, n, d), dk.to(k.dtype), dv.to(v.dtype)
