"""The launches of the backward pass: everything that depends on sizes alone, prepared once.

Without causality, all query heads of a key head read one state and contribute to one. They are treated as one query
head with G·n rows.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from depthgauge.fast_attention.triton.forward import PassSizes, SecondMoments
from depthgauge.fast_attention.triton.gradient_kernels import gradient_kernels, pair_slots, turned_slots
from depthgauge.fast_attention.triton.kernels import TILE, programs, slots
from depthgauge.fast_attention.triton.launch import Launch, table
from depthgauge.fast_attention.triton.tuning import BLOCK, LONGEST_SPLIT, padded_length, precision, split_length, tuning


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

    def __init__(self, s: PassSizes) -> None:
        self.sizes, self.is_causal = s, s.block > 0
        self.slots, self.pairs = (table(rows, s.device, s.d) for rows in (slots, pair_slots))
        self.turned_slots = table(turned_slots, s.device, s.d, s.e)
        self.groups, self.n = (s.groups, s.n) if self.is_causal else (1, s.groups * s.n)
        self.row_heads, self.query_small_size = s.heads * self.groups, s.d + s.e + 1
        self.read_states = self.states = 1
        if self.is_causal:
            self.read_states, self.states = min(math.ceil(s.n / s.block), s.states), math.ceil(s.m / s.block)
        self._sums()
        # Turned, S has one part for every pair of a tile of values and a tile of queries or keys.
        self.turned_parts = s.d * s.e // TILE**2 if s.degree > 1 else 0
        state_bytes = s.heads * self.turned_parts * 256 * s.d * s.dtype.itemsize
        at_once = max(self.read_states, self.states)
        if state_bytes:
            at_once = min(at_once, max(1, s.turned_bytes // state_bytes))
        self.turned_shape = at_once, s.heads, self.turned_parts * 256 * s.d
        self.queries = self._bilinear(self.n, self.read_states, at_once, is_query=True)
        self.keys = self._bilinear(s.m, self.states, at_once, is_query=False)
        self.values = self._add_rows(0, s.m, is_query=False, is_turned=False)
        if self.is_causal:
            self._exact()

    def _sums(self) -> None:
        """Prepare the sums over queries and the states that keys read."""
        s, kernels = self.sizes, gradient_kernels()
        is_second = s.degree > 1
        shift = (s.e, 0) if s.is_shifted else (s.small_size, s.d + 1 + s.e)
        padded = padded_length(self.n) if is_second else 0
        self.transposed_shape = self.row_heads, s.d, padded
        grid = max(padded // BLOCK, math.ceil(s.m / BLOCK)), self.row_heads, 1
        self.prepare = Launch(
            kernels.prepare, grid, (self.n, s.m, padded, self.groups, *shift), (s.d, s.e, BLOCK, is_second),
            num_warps=4,
        )  # fmt: skip
        per_block = s.block or rows_per_program(self.n, s.heads)
        blocks = math.ceil(self.n / per_block)
        self.first_shape, self.floor_shape = (blocks, self.row_heads, s.first_size), (s.heads, blocks)
        (tokens, warps), _, _ = tiles(s.dtype, max(s.d, s.e))
        self.moments = Launch(
            kernels.query_moments, (blocks, self.row_heads, 1), (self.n, self.groups, per_block, *shift),
            (s.d, s.e, tokens, is_second, self.is_causal, precision(s.dtype)), num_warps=warps,
        )  # fmt: skip
        per_split = s.block or split_length(self.n, s.heads, len(programs(s.d)), s.device)
        self.second_moments = SecondMoments(s, self.row_heads, self.n, per_split) if is_second else None
        splits = math.ceil(self.n / per_split)
        self.finish = Launch(
            kernels.finish_queries, (s.parts + 1, s.heads, 1),
            (splits, blocks, self.states, s.heads, self.groups, self.n, per_block),
            (len(programs(s.d)), s.parts, s.d, s.e, self.is_causal, s.is_alike), num_warps=8,
        )  # fmt: skip

    def _bilinear(self, n: int, states: int, at_once: int, is_query: bool) -> tuple[RowLaunches, ...]:
        """Prepare the bilinear rows of n queries or keys, with at most `at_once` turned states at a time."""
        s, found = self.sizes, []
        for start in range(0, states, at_once):
            end, turn = min(start + at_once, states), None
            length = n - start * s.block if end == states else (end - start) * s.block
            if self.turned_parts:
                grid = self.turned_parts, (end - start) * s.heads, 1
                turn = Launch(gradient_kernels().turn, grid, (s.big_size,), (s.d, s.e), num_warps=4)
            found.append(RowLaunches(start, turn, self._add_rows(start, length, is_query, is_turned=True)))
        return tuple(found)

    def _add_rows(self, first_state: int, length: int, is_query: bool, is_turned: bool) -> Launch:
        """Prepare `add_rows` for `length` rows from the block of `first_state` on, for queries or for keys."""
        s, tune = self.sizes, tuning(self.sizes.dtype, max(self.sizes.d, self.sizes.e))
        groups, n, row_heads = (self.groups, self.n, self.row_heads) if is_query else (1, s.m, s.heads)
        small, states = (s.small_size, self.read_states) if is_query else (self.query_small_size, self.states)
        y, width, s_size, parts = s.d, s.e, s.big_size, s.parts
        if is_turned:
            y, width, s_size, parts = s.e, s.d, self.turned_shape[2], self.turned_parts
        head = (s.small_size, s.small_size - 1) if s.is_plain else (1, 0)
        integers = (
            n, groups, s.heads, first_state, states - 1, s.block or BLOCK, s_size, s.big_size, small,
            s.parts * 256 * s.e, *head,
        )  # fmt: skip
        has_z = s.is_weighted and not is_query and not is_turned
        has_head, has_after = not is_query or not s.is_plain, self.is_causal and not is_query
        constants = (
            parts, s.d, y, width, tune.rows, tune.rows_part, is_turned, self.is_causal, is_query, has_z, has_head,
            has_after, s.has_w and not is_query, is_query, precision(s.dtype), tune.rows_stages,
        )  # fmt: skip
        grid = math.ceil(length / tune.rows), row_heads, 1
        kernel = gradient_kernels().add_rows
        return Launch(kernel, grid, integers, constants, num_warps=tune.rows_warps, **tune.rows_limit)

    def _exact(self) -> None:
        """Prepare the exact blocks of causal gradients."""
        s, kernels = self.sizes, gradient_kernels()
        _, (own, other, warps), keys = tiles(s.dtype, max(s.d, s.e))
        self.exact_queries = Launch(
            kernels.exact_queries, (math.ceil(self.n / own), self.row_heads, 1),
            (self.n, s.m, self.groups, s.block, s.small_size),
            (s.d, s.e, own, other, s.has_w, precision(s.dtype), 2), num_warps=warps,
        )  # fmt: skip
        own, other, warps = keys
        self.exact_keys = Launch(
            kernels.exact_keys, (math.ceil(s.m / own), s.heads, 1),
            (self.n, s.m, self.groups, self.floor_shape[1], self.states, s.block),
            (s.d, s.e, own, other, s.is_weighted, precision(s.dtype), 2), num_warps=warps,
        )  # fmt: skip


gradient_launches = lru_cache(maxsize=1024)(GradientLaunches)
