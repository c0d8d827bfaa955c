"""The launches of the Triton kernels: one function per kernel, which fixes everything that sizes and dtypes decide.

Sizes are named as in `Problem`: N key heads (`heads`), n rows, m keys of width d with values of width e; `padded` is m
rounded up to BLOCK, `per_split` how many keys one program sums.
"""

import math
from functools import lru_cache

import torch

from depthgauge.fast_attention.triton.kernels import TILE, kernels, programs, slots
from depthgauge.fast_attention.triton.launch import Launch
from depthgauge.fast_attention.triton.tuning import BLOCK, SURVEY_STEPS, precision, tuning

_MOST = 1024


def survey_blocks(rows: int, m: int) -> int:
    """How many programs survey one head."""
    return math.ceil(max(rows, m) / (BLOCK * SURVEY_STEPS))


@lru_cache(maxsize=_MOST)
def survey(heads: int, rows: int, m: int, d: int, e: int, device: torch.device) -> Launch:
    """Tensors: q [N, rows, d], k, v, centres [2, N, d], found [N, blocks, 6]."""
    constants = d, e, BLOCK, SURVEY_STEPS
    return Launch(kernels().survey, (survey_blocks(rows, m), heads, 3), (rows, m, heads), constants, num_warps=8)


@lru_cache(maxsize=_MOST)
def transpose(heads: int, n: int, d: int, padded: int, blocks: int, lays: bool, device: torch.device) -> Launch:
    """Tensors: x [N, n, d], found [N, blocks, 6], out [N, d, padded], report [N, 6]; blocks of 0 report nothing."""
    grid = padded // BLOCK if lays else 1, heads, 1
    return Launch(kernels().transpose, grid, (n, padded, blocks), (d, BLOCK, lays, blocks > 0), num_warps=4)


@lru_cache(maxsize=_MOST)
def first_moments(
    heads: int, m: int, padded: int, per_split: int, d: int, e: int, dtype: torch.dtype, has_w: bool,
    device: torch.device,
) -> Launch:  # fmt: skip
    """Tensors: x, y [N, d, padded], v, w, the first sums of every split."""
    is_short = dtype != torch.float32
    by_products = is_short and min(d, e) >= 64
    constants = (
        d, e, tuning(dtype, max(d, e)).moments_tokens, has_w, by_products, precision(dtype), 3 if by_products else 1
    )  # fmt: skip
    grid = math.ceil(padded / per_split), heads, 1
    warps = 4 if d < 128 else 8
    return Launch(kernels().first_moments, grid, (m, padded, per_split), constants, num_warps=warps)


@lru_cache(maxsize=_MOST)
def second_moments(
    heads: int, m: int, padded: int, per_split: int, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> tuple[Launch, ...]:
    """Tensors: x, y [N, d, padded], v, a table of programs, the second sums of every split.

    Where a program holds one pair of tiles a second launch does the other ones: it takes `second_table`, and the second
    half of the sums.
    """
    tune = tuning(dtype, max(d, e))
    wide = 32 if e <= 64 and d > TILE and dtype != torch.float32 else TILE
    one = Launch(
        kernels().second_moments, (len(programs(d)), math.ceil(padded / per_split), heads), (m, padded, per_split),
        (d, e, tune.moments_tokens, wide, precision(dtype), tune.moments_stages), num_warps=tune.moments_warps,
    )  # fmt: skip
    return (one, one) if wide == TILE else (one,)


@lru_cache(maxsize=_MOST)
def finish(
    heads: int, splits: int, d: int, e: int, has_second: bool, is_causal: bool, is_centred: bool, is_alike: bool,
    device: torch.device,
) -> Launch:  # fmt: skip
    """Tensors: second and first sums, coefficients [N, 3] unless alike, table of slots, State.big, State.small."""
    parts = len(slots(d)) if has_second else 0
    constants = len(programs(d)), parts, d, e, is_causal, is_centred, is_alike
    return Launch(kernels().finish, (parts + 1, heads, 1), (splits, heads), constants, num_warps=8)


@lru_cache(maxsize=_MOST)
def evaluate(
    row_heads: int, n: int, heads: int, states: int, per_state: int, m: int, padded: int, parts: int, x: int, y: int,
    width: int, dtype: torch.dtype, is_causal: bool, has_w: bool, is_forward: bool, has_g: bool, needs_z: bool,
    device: torch.device,
) -> Launch:  # fmt: skip
    """Tensors: x, y, State.big, State.small, g, keys, v, w, table of slots, out, Z; one float, the scale of exp2."""
    tune = tuning(dtype, max(x, y, width))
    # Of wide gradients half a tile at once: x, y and a whole tile of S would not fit the shared memory.
    part = tune.rows_part if is_forward or max(x, y, width) <= 64 else min(tune.rows_part, 8)
    constants = (
        parts, x, y, width, tune.rows, 64 if dtype != torch.float32 else 32, part, is_causal, has_w, is_forward, has_g,
        needs_z, precision(dtype), tune.rows_stages,
    )  # fmt: skip
    return Launch(
        kernels().evaluate, (math.ceil(n / tune.rows), row_heads, 1),
        (n, m, padded, row_heads // heads, heads, states, per_state), constants, num_warps=tune.rows_warps,
        **tune.rows_limit,
    )  # fmt: skip
