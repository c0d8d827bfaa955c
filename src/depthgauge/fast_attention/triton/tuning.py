"""Block sizes and splits of the Triton kernels, measured on an H200, and the shapes that the kernels support."""

import math
import os
from typing import NamedTuple

import torch

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 128
"""Tokens are padded to a multiple of this number."""
LONGEST_SPLIT = 8192
"""The largest number of tokens that one program sums; the rounding allowance counts them."""
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs the kernels on the CPU. It does not accept a register limit."""
CAUSAL_BLOCK = 1024
"""The size of the exact blocks on a causal diagonal."""


class Tuning(NamedTuple):
    """Block sizes, warps and pipeline stages of `second_moments` and `evaluate`.

    `rows_part` of the 16 coordinates of a tile are multiplied at once.
    """

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
        """The register limit that fits two programs of `evaluate` on a multiprocessor, where this is faster."""
        return {} if self.rows_registers is None or IS_INTERPRETED else {"maxnreg": self.rows_registers}


def tuning(dtype: torch.dtype, width: int) -> Tuning:
    """Return the fastest block sizes on an H200 for heads of 64; wider values and float32 need smaller blocks."""
    if dtype == torch.float32:
        return Tuning(32, 8 if width <= 64 else 16, 2, 64, 4 if width <= 64 else 8, 1, 4)
    if width > 64:
        return Tuning(64, 8, 2, 128, 8, 2, 16)
    return Tuning(128, 16, 3, 128, 8, 2, 16, rows_registers=128)


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products: float32 operands use three TF32 products, which is close to float32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def padded_length(n: int) -> int:
    """Return n rounded up to a multiple of BLOCK."""
    return (n + BLOCK - 1) // BLOCK * BLOCK


def survey_steps(tokens: int) -> int:
    """Return how many blocks of tokens one program of the survey reads.

    >>> survey_steps(1000), survey_steps(16384), survey_steps(2**17)
    (4, 8, 16)
    """
    return 4 if tokens < 2**14 else 8 if tokens < 2**15 else 16


def split_length(length: int, heads: int, per_head: int, device: torch.device) -> int:
    """Return how many tokens one program sums, chosen so that the programs fill all multiprocessors evenly."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = max(1, math.ceil(processors * 2 / (heads * per_head)))
    return min(LONGEST_SPLIT, max(4 * BLOCK, padded_length(math.ceil(padded_length(length) / wanted))))


def is_addressable(heads: int, tokens: int, width: int) -> bool:
    """Return whether offsets within a head fit into 32 bits and the heads fit into one axis of a launch grid.

    >>> is_addressable(16, 2**20, 64), is_addressable(16, 2**25, 64), is_addressable(2**16, 49, 32)
    (True, False, False)
    """
    return (tokens + BLOCK * survey_steps(tokens)) * width < 2**31 and heads < 2**16


def is_supported(dtype: torch.dtype, dim: int, width: int, degree: int) -> bool:
    """Return whether the kernels support this dtype, these widths and this degree.

    float32 needs d = e if either is 16: for other widths, Triton 3.6 compiles the products of a 16-wide and a wider
    operand to reads beyond the shared memory, which abort on an H200.

    >>> is_supported(torch.float32, 16, 16, 2), is_supported(torch.float32, 16, 32, 2)
    (True, False)
    """
    is_mixed = dim != width and min(dim, width) == 16
    is_known = dtype in DTYPES and dim in WIDTHS and width in WIDTHS and degree in (1, 2)
    return is_known and not (dtype == torch.float32 and is_mixed)
