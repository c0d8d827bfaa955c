"""Block sizes, splits and tables of the Triton kernels: what was fastest on an H200, and what they can do at all."""

import math
import os
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from depthgauge.fast_attention.triton.kernels import programs, slots

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 128
"""Tokens are padded to a multiple of this."""
LONGEST_SPLIT = 8192
"""The most tokens one program sums; the rounding allowance counts them."""
SURVEY_STEPS = 4
"""Blocks of tokens that one program of the survey looks at."""
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


@lru_cache(maxsize=64)
def second_table(dim: int, device: torch.device) -> Tensor:
    """The programs with their second tile in place of the first, for kernels that hold one tile pair."""
    rows = [(shared, max(second, 0), 0) for shared, _, second in programs(dim)]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def padded_length(n: int) -> int:
    """The next multiple of BLOCK."""
    return (n + BLOCK - 1) // BLOCK * BLOCK


def processors(device: torch.device) -> int:
    """How many multiprocessors there are to fill."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def split_length(length: int, heads: int, per_head: int, device: torch.device) -> int:
    """How many tokens one program sums, so that all programs fill the chip a whole number of times."""
    wanted = max(1, math.ceil(processors(device) * 2 / (heads * per_head)))
    return min(LONGEST_SPLIT, max(4 * BLOCK, padded_length(math.ceil(padded_length(length) / wanted))))


def is_addressable(heads: int, tokens: int, width: int) -> bool:
    """Whether offsets within a head fit 32 bits, and the heads one axis of a grid.

    >>> is_addressable(16, 2**20, 64), is_addressable(16, 2**25, 64), is_addressable(2**16, 49, 32)
    (True, False, False)
    """
    return (tokens + BLOCK * SURVEY_STEPS) * width < 2**31 and heads < 2**16


def is_supported(dtype: torch.dtype, dim: int, width: int, degree: int) -> bool:
    """Whether the kernels know these shapes."""
    return dtype in DTYPES and dim in WIDTHS and width in WIDTHS and degree in (1, 2)
