"""The launches of the Triton kernels: one record per kernel with everything that fixes a launch except its tensors.

Sizes are named as in `Problem`: N key heads (`heads`), n rows, m keys of width d with values of width e. `padded` is m
rounded up to BLOCK, and `per_split` is the number of keys that one program sums.
"""

import math
from typing import NamedTuple

import torch

from depthgauge.fast_attention.triton.kernels import TILE, kernels, programs, slots
from depthgauge.fast_attention.triton.launch import Launch
from depthgauge.fast_attention.triton.tuning import BLOCK, SURVEY_STEPS, precision, tuning


def survey_blocks(rows: int, m: int) -> int:
    """Return the number of programs that survey one head."""
    return math.ceil(max(rows, m) / (BLOCK * SURVEY_STEPS))


class SurveySizes(NamedTuple):
    """Sizes of `survey`. Tensors: q [N, rows, d], k, v, centres [2, N, d], found [N, blocks, 6]."""

    heads: int
    rows: int
    m: int
    d: int
    e: int
    device: torch.device

    def launch(self) -> Launch:
        """Prepare the launch."""
        constants = self.d, self.e, BLOCK, SURVEY_STEPS
        grid = survey_blocks(self.rows, self.m), self.heads, 3
        return Launch(kernels().survey, grid, (self.rows, self.m, self.heads), constants, num_warps=8)


class TransposeSizes(NamedTuple):
    """Sizes of `transpose`. Tensors: x [N, n, d], found [N, blocks, 6], out [N, d, padded], readback [6, N].

    The kernel writes `out` if `writes_out`, and `readback` if `blocks` is positive.
    """

    heads: int
    n: int
    d: int
    padded: int
    blocks: int
    writes_out: bool
    device: torch.device

    def launch(self) -> Launch:
        """Prepare the launch."""
        grid = self.padded // BLOCK if self.writes_out else 1, self.heads, 1
        constants = self.d, BLOCK, self.writes_out, self.blocks > 0
        return Launch(kernels().transpose, grid, (self.n, self.padded, self.blocks), constants, num_warps=4)


class FirstMomentSizes(NamedTuple):
    """Sizes of `first_moments`. Tensors: x, y [N, d, padded], v, w, the first moments of every split."""

    heads: int
    m: int
    padded: int
    per_split: int
    d: int
    e: int
    dtype: torch.dtype
    has_w: bool

    def launch(self) -> Launch:
        """Prepare the launch."""
        by_products = self.dtype != torch.float32 and min(self.d, self.e) >= 64
        tokens = tuning(self.dtype, max(self.d, self.e)).moments_tokens
        stages = 3 if by_products else 1
        constants = self.d, self.e, tokens, self.has_w, by_products, precision(self.dtype), stages
        grid = math.ceil(self.padded / self.per_split), self.heads, 1
        sizes = self.m, self.padded, self.per_split
        return Launch(kernels().first_moments, grid, sizes, constants, num_warps=4 if self.d < 128 else 8)


class SecondMomentSizes(NamedTuple):
    """Sizes of `second_moments`. Tensors: x, y [N, d, padded], v, a table of programs, the second moments of splits.

    If `is_narrow`, a program holds one pair of tiles. A second launch then computes the other pairs: it takes the table
    of `second_programs` and the second half of the moments.
    """

    heads: int
    m: int
    padded: int
    per_split: int
    d: int
    e: int
    dtype: torch.dtype

    @property
    def is_narrow(self) -> bool:
        """Whether a program holds one pair of tiles instead of two."""
        return self.e > 64 or self.d <= TILE or self.dtype == torch.float32

    def launch(self) -> Launch:
        """Prepare the launch."""
        tune = tuning(self.dtype, max(self.d, self.e))
        wide = TILE if self.is_narrow else 2 * TILE
        constants = self.d, self.e, tune.moments_tokens, wide, precision(self.dtype), tune.moments_stages
        grid = len(programs(self.d)), math.ceil(self.padded / self.per_split), self.heads
        sizes = self.m, self.padded, self.per_split
        return Launch(kernels().second_moments, grid, sizes, constants, num_warps=tune.moments_warps)


class FinishSizes(NamedTuple):
    """Sizes of `finish`. Tensors: second and first moments, coefficients [N, 3], table of slots, big and small state.

    The coefficients are passed as floats, and the tensor is ignored, if all heads have the same (`is_alike`).
    """

    heads: int
    splits: int
    d: int
    e: int
    has_second: bool
    is_causal: bool
    is_centred: bool
    is_alike: bool

    def launch(self) -> Launch:
        """Prepare the launch."""
        parts = len(slots(self.d)) if self.has_second else 0
        constants = len(programs(self.d)), parts, self.d, self.e, self.is_causal, self.is_centred, self.is_alike
        return Launch(kernels().finish, (parts + 1, self.heads, 1), (self.splits, self.heads), constants, num_warps=8)


class RowSizes(NamedTuple):
    """Sizes of `evaluate`. Tensors: q, big and small state, keys, v, w, table of slots, out, Z. Float: the scale.

    The rows are q [row_heads, n, d], and the output is [row_heads, n, e].
    """

    row_heads: int
    n: int
    heads: int
    states: int
    per_state: int
    m: int
    padded: int
    parts: int
    d: int
    e: int
    dtype: torch.dtype
    is_causal: bool
    has_w: bool
    needs_z: bool

    def launch(self) -> Launch:
        """Prepare the launch."""
        tune = tuning(self.dtype, max(self.d, self.e))
        constants = (
            self.parts, self.d, self.e, tune.rows, 64 if self.dtype != torch.float32 else 32, tune.rows_part,
            self.is_causal, self.has_w, self.needs_z, precision(self.dtype), tune.rows_stages,
        )  # fmt: skip
        sizes = self.n, self.m, self.padded, self.row_heads // self.heads, self.heads, self.states, self.per_state
        grid = math.ceil(self.n / tune.rows), self.row_heads, 1
        return Launch(kernels().evaluate, grid, sizes, constants, num_warps=tune.rows_warps, **tune.rows_limit)


LaunchSizes = SurveySizes | TransposeSizes
"""Launches that are not part of a pass."""
