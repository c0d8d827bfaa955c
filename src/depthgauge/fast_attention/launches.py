"""The launches of the Triton kernels: everything that depends on sizes alone, prepared once.

Triton inspects every argument of every launch to find the compiled kernel. At a few thousand tokens this takes longer
than the kernel runs. A `Launch` fixes everything except tensors and floats, and keeps the compiled kernels. They are
valid for launches whose tensors have the same dtypes and are aligned to 16 bytes; others go through Triton.

The compiled kernel gets addresses instead of tensors, because for every tensor Triton's launcher asks the driver where
it is. Hooks around launches, which only profilers of Triton set, are called for launches through Triton alone.

In gradients without causality, all query heads of a key head read one state and contribute to one. They are treated as
one query head with G·n rows.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgauge.fast_attention.call import Call
from depthgauge.fast_attention.kernels import (
    TILE,
    gradient_kernels,
    kernels,
    pair_slots,
    programs,
    second_programs,
    slots,
    turned_slots,
)

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


ALIGNMENT = 16


class Launch:
    """kernel[grid](*tensors, *integers, *floats, *constants, **options), with the parameters in this order.

    A launch belongs to one device.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        constants: tuple[object, ...],
        **options: int,
    ) -> None:
        self.kernel, self.grid, self.integers, self.constants = kernel, grid, integers, constants
        self.options = options
        self._compiled: dict[tuple[torch.dtype, ...], Callable[[list[int], Sequence[float]], object]] = {}

    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float] = ()) -> None:
        """Launch the kernel. All tensors are contiguous and on the current device."""
        addresses = [x.data_ptr() for x in tensors]
        dtypes = tuple([x.dtype for x in tensors])
        is_aligned = reduce(or_, addresses) % ALIGNMENT == 0
        if is_aligned and (run := self._compiled.get(dtypes)) is not None:
            run(addresses, floats)
            return
        compiled = self.kernel[self.grid](*tensors, *self.integers, *floats, *self.constants, **self.options)
        if is_aligned and compiled is not None:  # the interpreter compiles nothing
            self._compiled[dtypes] = self._by_address(compiled, tensors[0].device.index or 0)

    def _by_address(self, compiled: Any, device: int) -> Callable[[list[int], Sequence[float]], object]:
        """Return the function that launches a compiled kernel with the addresses of tensors, and floats."""
        from triton.runtime import driver

        run, stream, grid = compiled.run, driver.active.get_current_stream, self.grid
        # The kernel, its metadata, the metadata for hooks, the hook before a launch and the hook after it.
        fixed, others = (compiled.function, compiled.packed_metadata, None, None, None), self.integers
        return lambda addresses, floats: run(
            *grid, stream(device), *fixed, *addresses, *others, *floats, *self.constants
        )


@cache
def table(rows: Callable[..., Sequence[object]], device: torch.device, *sizes: int) -> Tensor:
    """Return the integers rows(*sizes) as a tensor on the device. It is never freed: CUDA graphs keep its address."""
    return torch.tensor(rows(*sizes), dtype=torch.int32, device=device)


@lru_cache(maxsize=1024)
def survey_launch(heads: int, rows: int, m: int, d: int, e: int, device: torch.device) -> Launch:
    """Prepare `survey`. Tensors: q [N, rows, d], k [N, m, d], v [N, m, e], out [8·N + 2·N·d]."""
    steps = survey_steps(max(rows, m))
    grid = math.ceil(max(rows, m) / (BLOCK * steps)), heads, 3
    return Launch(kernels().survey, grid, (rows, m, heads), (d, e, BLOCK, steps), num_warps=4)


class KernelPass(NamedTuple):
    """Everything that fixes the launches of a forward or a backward pass.

    `block` is the size of causal blocks, or 0. `is_plain`: the kernels read q and k of the caller. `is_shifted`: values
    are centred before the sums. `has_w`: keys have weights. `is_weighted`: the weights depend on the keys. `is_alike`:
    all heads have the same polynomial. `needs_z`: Z is returned. A backward pass holds at most `turned_bytes` of turned
    states at once, or one of them.
    """

    call: Call
    degree: int
    block: int
    is_plain: bool
    is_shifted: bool
    has_w: bool
    is_weighted: bool
    is_alike: bool
    needs_z: bool
    turned_bytes: int

    @property
    def parts(self) -> int:
        """The number of tile pairs in S, or 0 at degree 1."""
        return len(slots(self.call.d)) if self.degree > 1 else 0

    @property
    def states(self) -> int:
        """The number of states of keys: one before every causal block and one after the last; or one in all."""
        return math.ceil(padded_length(self.call.m) / self.block) + 1 if self.block else 1

    @property
    def first_size(self) -> int:
        """The number of sums of degree 0 and 1 of a split: Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w."""
        return self.call.d * self.call.e + self.call.d * self.call.d + self.call.d + self.call.e + 1

    @property
    def big_size(self) -> int:
        """The size of the part of a state in the dtype of the tensors: S [parts, 256, e], L [2, d, e], C [d, d]."""
        return self.parts * 256 * self.call.e + 2 * self.call.d * self.call.e + self.call.d * self.call.d

    @property
    def small_size(self) -> int:
        """The size of the float32 part of a state: z1 [d], z0, n0 [e], mean of the values [e], 1 / total weight."""
        return self.call.d + 2 * self.call.e + 2


class SecondMoments:
    """Computes Σ (y ⊗ x) v of every split: [splits, heads, programs, 512, e], from x, y [heads, d, padded] and v.

    There are many causal sums. For bfloat16 they are stored in bfloat16, which halves their memory and costs one
    rounding. They would overflow float16. A narrow program holds one pair of tiles instead of two, so that a second
    launch computes the other half.
    """

    def __init__(self, s: KernelPass, heads: int, tokens: int, per_split: int) -> None:
        c = s.call
        padded, tune = padded_length(tokens), tuning(c.dtype, max(c.d, c.e))
        self.shape = math.ceil(padded / per_split), heads, len(programs(c.d)), 512, c.e
        self.dtype = torch.bfloat16 if s.block and c.dtype == torch.bfloat16 else torch.float32
        self.is_narrow = c.e > 64 or c.d <= TILE or c.dtype == torch.float32
        self.programs, self.second_programs = (table(x, c.device, c.d) for x in (programs, second_programs))
        self.launch = Launch(
            kernels().second_moments, (len(programs(c.d)), self.shape[0], heads), (tokens, padded, per_split),
            (c.d, c.e, tune.moments_tokens, TILE if self.is_narrow else 2 * TILE, precision(c.dtype),
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

    def __init__(self, s: KernelPass) -> None:
        self.sizes, c = s, s.call
        kernel, tune, causal = kernels(), tuning(c.dtype, max(c.d, c.e)), s.block > 0
        padded = padded_length(c.m)
        per_split = s.block or split_length(c.m, c.heads, len(programs(c.d)), c.device)
        splits = math.ceil(padded / per_split)
        self.slots = table(slots, c.device, c.d)
        self.transposed_shape, self.first_shape = (c.heads, c.d, padded), (splits, c.heads, s.first_size)
        self.big_shape, self.small_shape = (s.states, c.heads, s.big_size), (s.states, c.heads, s.small_size)
        self.transpose = Launch(
            kernel.transpose, (padded // BLOCK, c.heads, 1), (c.m, padded), (c.d, BLOCK), num_warps=4
        )
        by_products = c.dtype != torch.float32 and min(c.d, c.e) >= 64
        self.first_moments = Launch(
            kernel.first_moments, (splits, c.heads, 1), (c.m, padded, per_split),
            (c.d, c.e, tune.moments_tokens, s.has_w, by_products, precision(c.dtype), 3 if by_products else 1),
            num_warps=4 if c.d < 128 else 8,
        )  # fmt: skip
        self.second_moments = SecondMoments(s, c.heads, c.m, per_split) if s.degree > 1 else None
        self.finish = Launch(
            kernel.finish, (s.parts + 1, c.heads, 1), (splits, c.heads),
            (len(programs(c.d)), s.parts, c.d, c.e, causal, not s.is_shifted, s.is_alike), num_warps=8,
        )  # fmt: skip
        keys = (c.m, padded, c.groups, c.heads, s.states, s.block) if causal else (0, 0, c.groups, c.heads, 1, 1)
        self.evaluate = Launch(
            kernel.evaluate, (math.ceil(c.n / tune.rows), c.heads * c.groups, 1), (c.n, *keys),
            (s.parts, c.d, c.e, tune.rows, 32 if c.dtype == torch.float32 else 64, tune.rows_part, causal,
             s.has_w and causal, s.needs_z, precision(c.dtype), tune.rows_stages),
            num_warps=tune.rows_warps, **tune.rows_limit,
        )  # fmt: skip


forward_launches = lru_cache(maxsize=1024)(ForwardLaunches)


def tiles(dtype: torch.dtype, width: int) -> tuple[tuple[int, int], tuple[int, int, int], tuple[int, int, int]]:
    """Return tile sizes that fit into the registers and the shared memory of an H200.

    They are (tokens, warps) of the sums over queries, and (own tokens, other tokens, warps) of the exact blocks, first
    of queries and then of keys.
    """
    if dtype == torch.float32:
        return ((16, 8), (32, 32, 8), (32, 16, 8)) if width > 64 else ((32, 8), (64, 32, 8), (64, 32, 8))
    return ((32, 8), (128, 64, 8), (128, 32, 8)) if width > 64 else ((32, 8), (64, 64, 4), (64, 64, 4))


class RowLaunches(NamedTuple):
    """Rows that one launch of `add_rows` computes. `turn` computes the turned states from `first_state` on."""

    first_state: int
    turn: Launch | None
    rows: Launch


def rows_per_program(n: int, heads: int) -> int:
    """Return how many of n rows one program of `query_moments` sums: at most 64 parts per head and about 2048 in all.

    >>> rows_per_program(4096, 16), rows_per_program(2**17, 16), rows_per_program(2**17, 256)
    (512, 2048, 8192)
    """
    parts = min(64, math.ceil(2048 / heads))
    return min(LONGEST_SPLIT, max(4 * BLOCK, padded_length(math.ceil(n / parts))))


class GradientLaunches:
    """The launches of a backward pass in their order, and the shapes of its tensors.

    `queries` and `keys` are the parts of the bilinear rows ∂q and ∂k, and `values` computes ∂v. The rows read
    `read_states` states of the forward pass, and keys read `states` states.
    """

    def __init__(self, s: KernelPass) -> None:
        self.sizes, self.is_causal, c = s, s.block > 0, s.call
        self.slots, self.pairs = (table(rows, c.device, c.d) for rows in (slots, pair_slots))
        self.turned_slots = table(turned_slots, c.device, c.d, c.e)
        self.groups, self.n = (c.groups, c.n) if self.is_causal else (1, c.groups * c.n)
        self.row_heads, self.query_small_size = c.heads * self.groups, c.d + c.e + 1
        self.read_states = self.states = 1
        if self.is_causal:
            self.read_states, self.states = min(math.ceil(c.n / s.block), s.states), math.ceil(c.m / s.block)
        self._sums()
        # Turned, S has one part for every pair of a tile of values and a tile of queries or keys.
        self.turned_parts = c.d * c.e // TILE**2 if s.degree > 1 else 0
        state_bytes = c.heads * self.turned_parts * 256 * c.d * c.dtype.itemsize
        at_once = max(self.read_states, self.states)
        if state_bytes:
            at_once = min(at_once, max(1, s.turned_bytes // state_bytes))
        self.turned_shape = at_once, c.heads, self.turned_parts * 256 * c.d
        self.queries = self._bilinear(self.n, self.read_states, at_once, is_query=True)
        self.keys = self._bilinear(c.m, self.states, at_once, is_query=False)
        self.values = self._add_rows(0, c.m, is_query=False, is_turned=False)
        if self.is_causal:
            self._exact()

    def _sums(self) -> None:
        """Prepare the sums over queries and the states that keys read."""
        s, c, kernels = self.sizes, self.sizes.call, gradient_kernels()
        is_second = s.degree > 1
        shift = (c.e, 0) if s.is_shifted else (s.small_size, c.d + 1 + c.e)
        padded = padded_length(self.n) if is_second else 0
        self.transposed_shape = self.row_heads, c.d, padded
        grid = max(padded // BLOCK, math.ceil(c.m / BLOCK)), self.row_heads, 1
        self.prepare = Launch(
            kernels.prepare, grid, (self.n, c.m, padded, self.groups, *shift), (c.d, c.e, BLOCK, is_second),
            num_warps=4,
        )  # fmt: skip
        per_block = s.block or rows_per_program(self.n, c.heads)
        blocks = math.ceil(self.n / per_block)
        self.first_shape, self.floor_shape = (blocks, self.row_heads, s.first_size), (c.heads, blocks)
        (tokens, warps), _, _ = tiles(c.dtype, max(c.d, c.e))
        self.moments = Launch(
            kernels.query_moments, (blocks, self.row_heads, 1), (self.n, self.groups, per_block, *shift),
            (c.d, c.e, tokens, is_second, self.is_causal, precision(c.dtype)), num_warps=warps,
        )  # fmt: skip
        per_split = s.block or split_length(self.n, c.heads, len(programs(c.d)), c.device)
        self.second_moments = SecondMoments(s, self.row_heads, self.n, per_split) if is_second else None
        splits = math.ceil(self.n / per_split)
        self.finish = Launch(
            kernels.finish_queries, (s.parts + 1, c.heads, 1),
            (splits, blocks, self.states, c.heads, self.groups, self.n, per_block),
            (len(programs(c.d)), s.parts, c.d, c.e, self.is_causal, s.is_alike), num_warps=8,
        )  # fmt: skip

    def _bilinear(self, n: int, states: int, at_once: int, is_query: bool) -> tuple[RowLaunches, ...]:
        """Prepare the bilinear rows of n queries or keys, with at most `at_once` turned states at a time."""
        s, c, found = self.sizes, self.sizes.call, []
        for start in range(0, states, at_once):
            end, turn = min(start + at_once, states), None
            length = n - start * s.block if end == states else (end - start) * s.block
            if self.turned_parts:
                grid = self.turned_parts, (end - start) * c.heads, 1
                turn = Launch(gradient_kernels().turn, grid, (s.big_size,), (c.d, c.e), num_warps=4)
            found.append(RowLaunches(start, turn, self._add_rows(start, length, is_query, is_turned=True)))
        return tuple(found)

    def _add_rows(self, first_state: int, length: int, is_query: bool, is_turned: bool) -> Launch:
        """Prepare `add_rows` for `length` rows from the block of `first_state` on, for queries or for keys."""
        s, c = self.sizes, self.sizes.call
        tune = tuning(c.dtype, max(c.d, c.e))
        groups, n, row_heads = (self.groups, self.n, self.row_heads) if is_query else (1, c.m, c.heads)
        small, states = (s.small_size, self.read_states) if is_query else (self.query_small_size, self.states)
        y, width, s_size, parts = c.d, c.e, s.big_size, s.parts
        if is_turned:
            y, width, s_size, parts = c.e, c.d, self.turned_shape[2], self.turned_parts
        head = (s.small_size, s.small_size - 1) if s.is_plain else (1, 0)
        integers = (
            n, groups, c.heads, first_state, states - 1, s.block or BLOCK, s_size, s.big_size, small,
            s.parts * 256 * c.e, *head,
        )  # fmt: skip
        has_z = s.is_weighted and not is_query and not is_turned
        has_head, has_after = not is_query or not s.is_plain, self.is_causal and not is_query
        constants = (
            parts, c.d, y, width, tune.rows, tune.rows_part, is_turned, self.is_causal, is_query, has_z, has_head,
            has_after, s.has_w and not is_query, is_query, precision(c.dtype), tune.rows_stages,
        )  # fmt: skip
        grid = math.ceil(length / tune.rows), row_heads, 1
        kernel = gradient_kernels().add_rows
        return Launch(kernel, grid, integers, constants, num_warps=tune.rows_warps, **tune.rows_limit)

    def _exact(self) -> None:
        """Prepare the exact blocks of causal gradients."""
        s, c, kernels = self.sizes, self.sizes.call, gradient_kernels()
        _, (own, other, warps), keys = tiles(c.dtype, max(c.d, c.e))
        self.exact_queries = Launch(
            kernels.exact_queries, (math.ceil(self.n / own), self.row_heads, 1),
            (self.n, c.m, self.groups, s.block, s.small_size),
            (c.d, c.e, own, other, s.has_w, precision(c.dtype), 2), num_warps=warps,
        )  # fmt: skip
        own, other, warps = keys
        self.exact_keys = Launch(
            kernels.exact_keys, (math.ceil(c.m / own), c.heads, 1),
            (self.n, c.m, self.groups, self.floor_shape[1], self.states, s.block),
            (c.d, c.e, own, other, s.is_weighted, precision(c.dtype), 2), num_warps=warps,
        )  # fmt: skip


gradient_launches = lru_cache(maxsize=1024)(GradientLaunches)
