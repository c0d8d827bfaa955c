"""The launches of the backward pass: everything that depends on sizes alone, prepared once.

Without causality, all query heads of a key head read one state and contribute to one. They are treated as one query
head with G·n rows.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from depthgauge.fast_attention.triton.forward_pass import Table, second_moment_room, state_count
from depthgauge.fast_attention.triton.gradient_kernels import gradient_kernels, pair_slots, turned_slots
from depthgauge.fast_attention.triton.kernels import TILE, programs, second_programs, slots
from depthgauge.fast_attention.triton.launch import Launch
from depthgauge.fast_attention.triton.launches import SecondMomentSizes
from depthgauge.fast_attention.triton.tuning import (
    BLOCK,
    LONGEST_SPLIT,
    padded_length,
    precision,
    split_length,
    tuning,
)


class GradientSizes(NamedTuple):
    """Everything that fixes the launches of a backward pass.

    N key heads (`heads`) with G query heads each (`groups`), n rows, m keys of width d with values of width e. `block`
    is the size of causal blocks, or 0. At most `turned_bytes` of turned states are held at once. `is_shifted`: values
    are centred before the sums. `is_plain`: queries and keys are those of the caller. `has_w`: keys have weights.
    `is_weighted`: the weights depend on the keys. `is_alike`: all heads have the same polynomial.
    """

    heads: int
    groups: int
    n: int
    m: int
    d: int
    e: int
    dtype: torch.dtype
    degree: int
    block: int
    turned_bytes: int
    is_shifted: bool
    is_plain: bool
    has_w: bool
    is_weighted: bool
    is_alike: bool
    device: torch.device


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


class RowLaunches(NamedTuple):
    """Rows that are computed by one launch of `add_rows`. `turn` fills in the turned states from `first_state` on."""

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
    """The prepared launches and the shapes of one kind of backward pass.

    `queries` and `keys` are the parts of the bilinear rows ∂q and ∂k, and `values` computes ∂v. `turn_both` turns the
    states of both at once, if they fit into the memory together.
    """

    def __init__(self, s: GradientSizes, table: Table) -> None:
        self.sizes, self.is_causal, self.is_second = s, s.block > 0, s.degree > 1
        self.programs, self.second_programs, self.slots, self.pairs = (
            table(rows, s.device, s.d) for rows in (programs, second_programs, slots, pair_slots)
        )
        self.turned_slots = table(turned_slots, s.device, s.d, s.e)
        self.groups, self.n = (s.groups, s.n) if self.is_causal else (1, s.groups * s.n)
        self.row_heads, self.parts = s.heads * self.groups, len(slots(s.d)) if self.is_second else 0
        self.small_size, self.query_small_size = s.d + 2 * s.e + 2, s.d + s.e + 1
        self.linear_at = self.parts * 256 * s.e
        self.big_size = self.linear_at + 2 * s.d * s.e + s.d * s.d
        # `read_states` are the states of the forward pass that rows read, `states` are those that keys read.
        self.read_states = self.states = 1
        if self.is_causal:
            existing = state_count(s.m, s.block)
            self.read_states, self.states = min(math.ceil(s.n / s.block), existing), math.ceil(s.m / s.block)
        self._sums()
        self._rows()
        if self.is_causal:
            self._exact()

    def _sums(self) -> None:
        """Prepare the sums over queries and the states that keys read."""
        s, kernels = self.sizes, gradient_kernels()
        shift = (s.e, 0) if s.is_shifted else (self.small_size, s.d + 1 + s.e)
        padded = padded_length(self.n) if self.is_second else 0
        grid = max(padded // BLOCK, math.ceil(s.m / BLOCK)), self.row_heads, 1
        self.prepare = Launch(
            kernels.prepare, grid, (self.n, s.m, padded, self.groups, *shift), (s.d, s.e, BLOCK, self.is_second),
            num_warps=4,
        )  # fmt: skip
        per_split = s.block or split_length(self.n, s.heads, len(programs(s.d)), s.device)
        per_block = s.block or rows_per_program(self.n, s.heads)
        blocks, splits = math.ceil(self.n / per_block), math.ceil(self.n / per_split)
        tokens, warps = tiles(s.dtype, max(s.d, s.e)).moments
        self.moments = Launch(
            kernels.query_moments, (blocks, self.row_heads, 1), (self.n, self.groups, per_block, *shift),
            (s.d, s.e, tokens, self.is_second, self.is_causal, precision(s.dtype)), num_warps=warps,
        )  # fmt: skip
        self.second_sizes = SecondMomentSizes(self.row_heads, self.n, padded, per_split, s.d, s.e, s.dtype)
        self.finish = Launch(
            kernels.finish_queries, (self.parts + 1, s.heads, 1),
            (splits, blocks, self.states, s.heads, self.groups, self.n, per_block),
            (len(programs(s.d)), self.parts, s.d, s.e, self.is_causal, s.is_alike), num_warps=8,
        )  # fmt: skip
        self.transposed_shape = self.row_heads, s.d, padded
        self.first_shape = blocks, self.row_heads, s.d * s.e + s.d * s.d + s.d + s.e + 1
        self.second_room = second_moment_room(splits, self.second_sizes, self.is_causal)
        self.floor_shape = s.heads, blocks

    def _rows(self) -> None:
        """Prepare the rows that read states: ∂q from the states of keys, ∂v and ∂k from those of queries."""
        s, before, behind = self.sizes, self.read_states, self.states
        turned = s.d * s.e // TILE**2 * 256 * s.d if self.is_second else 0
        most = max(1, s.turned_bytes // max(1, s.heads * turned * s.dtype.itemsize))
        is_joint = self.is_second and before == behind and 2 * before <= most
        self.turn_both = self._turn(before, 2) if is_joint else None
        self.turned_shape = 2 * before if is_joint else min(most, max(before, behind)), s.heads, turned
        at_once = max(before, behind) if is_joint or not self.is_second else most
        self.queries = self._bilinear(at_once, 0, is_query=True)
        self.keys = self._bilinear(at_once, before if is_joint else 0, is_query=False)
        self.values = self._add_rows(0, 0, s.m, is_query=False, is_turned=False)

    def _turn(self, states: int, sources: int) -> Launch:
        s = self.sizes
        grid = s.d * s.e // TILE**2, states * s.heads, sources
        return Launch(gradient_kernels().turn, grid, (self.big_size,), (s.d, s.e), num_warps=4)

    def _bilinear(self, at_once: int, turned_state: int, is_query: bool) -> tuple[RowLaunches, ...]:
        """Prepare bilinear rows with `at_once` turned states at a time. The first one is number `turned_state`."""
        found, block = [], self.sizes.block
        n, states = (self.n, self.read_states) if is_query else (self.sizes.m, self.states)
        for start in range(0, states, at_once):
            end = min(start + at_once, states)
            length = n - start * block if end == states else (end - start) * block
            turn = self._turn(end - start, 1) if self.is_second and self.turn_both is None else None
            found.append(
                RowLaunches(start, turn, self._add_rows(start, turned_state, length, is_query, is_turned=True))
            )
        return tuple(found)

    def _add_rows(self, first_state: int, turned_state: int, length: int, is_query: bool, is_turned: bool) -> Launch:
        """Prepare `add_rows` for `length` rows from the block of `first_state` on, for queries or for keys."""
        s, tune = self.sizes, tuning(self.sizes.dtype, max(self.sizes.d, self.sizes.e))
        groups, n, row_heads = (self.groups, self.n, self.row_heads) if is_query else (1, s.m, s.heads)
        small, states = (self.small_size, self.read_states) if is_query else (self.query_small_size, self.states)
        y, width, s_size, parts = s.d, s.e, self.big_size, self.parts
        if is_turned:
            parts = s.d * s.e // TILE**2 if self.is_second else 0
            y, width, s_size = s.e, s.d, parts * 256 * s.d
        head = (self.small_size, self.small_size - 1) if s.is_plain else (1, 0)
        integers = (
            n, groups, s.heads, first_state, turned_state, states - 1, s.block or BLOCK, s_size, self.big_size, small,
            self.linear_at, *head,
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
        s, kernels, tile = self.sizes, gradient_kernels(), tiles(self.sizes.dtype, max(self.sizes.d, self.sizes.e))
        own, other, warps = tile.rows
        self.exact_queries = Launch(
            kernels.exact_queries, (math.ceil(self.n / own), self.row_heads, 1),
            (self.n, s.m, self.groups, s.block, self.small_size),
            (s.d, s.e, own, other, s.has_w, precision(s.dtype), 2), num_warps=warps,
        )  # fmt: skip
        own, other, warps = tile.keys
        self.exact_keys = Launch(
            kernels.exact_keys, (math.ceil(s.m / own), s.heads, 1),
            (self.n, s.m, self.groups, self.floor_shape[1], self.states, s.block),
            (s.d, s.e, own, other, s.is_weighted, precision(s.dtype), 2), num_warps=warps,
        )  # fmt: skip
