"""The launches of the backward pass: everything that depends on sizes alone, prepared once.

Without causality, all query heads of a key head read one state and are added to one. They are treated as one query head
with G·n rows.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from depthgauge.fast_attention.triton.gradient_kernels import gradient_kernels, pair_slots, turned_slots
from depthgauge.fast_attention.triton.kernels import TILE, programs, second_programs, slots
from depthgauge.fast_attention.triton.launch import Launch
from depthgauge.fast_attention.triton.launches import SecondMomentSizes, Table
from depthgauge.fast_attention.triton.tuning import BLOCK, padded_length, precision, split_length, tuning


class GradientSizes(NamedTuple):
    """Everything that fixes the launches of a backward pass.

    N key heads (`heads`) with G query heads each (`groups`), n rows, m keys of width d with values of width e. `block` is
    the size of causal blocks, or 0. At most `turned_bytes` of turned states are held at once. `is_shifted`: values are
    centred before the sums. `is_plain`: queries and keys are those of the caller. `has_w`: keys have weights.
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


class Part(NamedTuple):
    """Rows that are computed by one launch of `add_rows`. `turn` fills in the turned states from `first_state` on."""

    first_state: int
    turn: Launch | None
    rows: Launch


class StateLayout(NamedTuple):
    """The sizes of a state: entries of `big` and `small`, where L starts in `big`, and the number of states."""

    big: int
    small: int
    linear_at: int
    count: int


class GradientLaunches:
    """The prepared launches and the shapes of one kind of backward pass.

    `queries` and `keys` are the parts of the bilinear rows ∂q and ∂k, and `values` computes ∂v. If `turn_both`, it
    turns the states of queries and keys before all of them.
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
        linear_at = self.parts * 256 * s.e
        self.big_size = linear_at + 2 * s.d * s.e + s.d * s.d
        self._sums()
        before = 1 if not self.is_causal else math.ceil(padded_length(s.m) / s.block) + 1
        reach = min(math.ceil(self.n / s.block), before) if self.is_causal else 1
        self._rows(
            StateLayout(self.big_size, self.small_size, linear_at, reach),
            StateLayout(self.big_size, self.query_small_size, linear_at, self.states),
        )
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
        per_block = s.block or split_length(self.n, s.heads, 1, s.device)
        blocks, splits = math.ceil(self.n / per_block), math.ceil(self.n / per_split)
        self.states = math.ceil(s.m / s.block) if self.is_causal else 1
        tokens, warps = tiles(s.dtype, max(s.d, s.e)).moments
        self.moments = Launch(
            kernels.query_moments, (blocks, self.row_heads, 1), (self.n, self.groups, per_block, *shift),
            (s.d, s.e, tokens, self.is_second, self.is_causal, precision(s.dtype)), num_warps=warps,
        )  # fmt: skip
        self.second: tuple[Launch, ...] = ()
        if self.is_second:
            sizes = SecondMomentSizes(self.row_heads, self.n, padded, per_split, s.d, s.e, s.dtype, s.device)
            self.second = (sizes.launch(),) * (2 if sizes.is_narrow else 1)
        self.finish = Launch(
            kernels.finish_queries, (self.parts + 1, s.heads, 1),
            (splits, blocks, self.states, s.heads, self.groups, self.n, per_block),
            (len(programs(s.d)), self.parts, s.d, s.e, self.is_causal, s.is_alike), num_warps=8,
        )  # fmt: skip
        self.transposed_shape = self.row_heads, s.d, padded
        self.first_shape = blocks, self.row_heads, s.d * s.e + s.d * s.d + s.d + s.e + 1
        self.second_shape = splits, self.row_heads, len(programs(s.d)), 512, s.e
        # As in the forward pass, the sums of many causal blocks are stored in bfloat16 for bfloat16 tensors.
        self.second_dtype = s.dtype if self.is_causal and s.dtype == torch.bfloat16 else torch.float32
        self.floor_shape = s.heads, blocks

    def _rows(self, before: StateLayout, behind: StateLayout) -> None:
        """Prepare the rows that read states: ∂q from the states of keys, ∂v and ∂k from those of queries."""
        s = self.sizes
        turned = s.d * s.e // TILE**2 * 256 * s.d if self.is_second else 0
        most = max(1, s.turned_bytes // max(1, s.heads * turned * s.dtype.itemsize))
        self.turn_both: Launch | None = None
        is_joint = self.is_second and before.count == behind.count and 2 * before.count <= most
        if is_joint:
            self.turn_both = self._turn(before.count, 2)
        self.turned_shape = 2 * before.count if is_joint else min(most, max(before.count, behind.count)), s.heads, turned
        self.queries = self._bilinear(before, most, 0, is_joint, is_query=True)
        self.keys = self._bilinear(behind, most, before.count if is_joint else 0, is_joint, is_query=False)
        self.values = self._add_rows(behind, (0, 0, behind.count), s.m, is_query=False, is_turned=False)

    def _turn(self, states: int, sources: int) -> Launch:
        s = self.sizes
        grid = s.d * s.e // TILE**2, states * s.heads, sources
        return Launch(gradient_kernels().turn, grid, (self.big_size,), (s.d, s.e), num_warps=4)

    def _bilinear(
        self, state: StateLayout, most: int, turned_state: int, is_joint: bool, is_query: bool
    ) -> tuple[Part, ...]:
        """Prepare bilinear rows, a few turned states at a time."""
        s, found = self.sizes, []
        n = self.n if is_query else s.m
        step = state.count if is_joint or not self.is_second else min(most, state.count)
        for start in range(0, state.count, step):
            end = min(start + step, state.count)
            length = n - start * s.block if end == state.count else (end - start) * s.block
            turn = self._turn(end - start, 1) if self.is_second and not is_joint else None
            rows = self._add_rows(state, (start, turned_state, state.count), length, is_query, is_turned=True)
            found.append(Part(start, turn, rows))
        return tuple(found)

    def _add_rows(
        self, state: StateLayout, at: tuple[int, int, int], length: int, is_query: bool, is_turned: bool
    ) -> Launch:
        """Prepare `add_rows` for `length` rows; `at` is the first state, its number among turned ones, and their number."""
        s, tune = self.sizes, tuning(self.sizes.dtype, max(self.sizes.d, self.sizes.e))
        first, turned_state, count = at
        groups, n, row_heads = (self.groups, self.n, self.row_heads) if is_query else (1, s.m, s.heads)
        y, width = (s.e, s.d) if is_turned else (s.d, s.e)
        pairs = s.d * s.e // TILE**2
        s_size, parts = (pairs * 256 * s.d, pairs) if is_turned else (state.big, self.parts)
        head = (self.small_size, self.small_size - 1) if s.is_plain else (1, 0)
        integers = (
            n, groups, s.heads, first, turned_state, count - 1, s.block or BLOCK, s_size, state.big, state.small,
            state.linear_at, *head,
        )  # fmt: skip
        constants = (
            parts if self.is_second else 0, s.d, y, width, tune.rows, tune.rows_part, is_turned, self.is_causal,
            is_query, s.is_weighted and not is_query and not is_turned, not is_query or not s.is_plain,
            self.is_causal and not is_query, s.has_w and not is_query, is_query, precision(s.dtype), tune.rows_stages,
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
