"""The launches of the Triton kernels: everything that depends on sizes alone, prepared once.

Triton inspects every argument of every launch to find the compiled kernel. At a few thousand tokens this takes longer
than the kernel runs. A `Launch` fixes everything except tensors and a few numbers, and keeps the compiled kernels. They
are valid for launches whose tensors have the same dtypes and are aligned to 16 bytes; others go through Triton.

The compiled kernel gets addresses instead of tensors, because for every tensor Triton's launcher asks the driver where
it is. Hooks around launches, which only profilers of Triton set, are called for launches through Triton alone.

In gradients without causality, all query heads of a key head read one state and contribute to one. They are treated as
one query head with G·n rows.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgauge.fast_attention.call import Call

TILE = 16
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


@cache
def kernels() -> Any:
    """Return the module of the kernels, which Triton compiles on their first launch. The first call imports triton."""
    from depthgauge.fast_attention import kernels

    return kernels


def programs(dim: int) -> tuple[tuple[int, int, int], ...]:
    """Return tile pairs in groups of two with a shared tile: (shared, first, second), where second may be −1 (none).

    Every unordered pair of tiles appears once. Tile b is paired with tiles b, b−1, …, two at a time. If their number is
    odd, the pair with tile 0 is left over; the left-over pairs are grouped with shared tile 0.

    >>> programs(64)
    ((1, 1, 0), (2, 2, 1), (3, 3, 2), (3, 1, 0), (0, 0, 2))
    """
    tiles = dim // TILE
    found, left = [], []
    for b in range(tiles):
        others = list(range(b, -1, -1))
        if len(others) % 2:
            left.append(b)
            others.pop()
        found += [(b, others[i], others[i + 1]) for i in range(0, len(others), 2)]
    left += [-1] * (len(left) % 2)
    found += [(0, left[i], left[i + 1]) for i in range(0, len(left), 2)]
    return tuple(found)


def second_programs(dim: int) -> tuple[tuple[int, int, int], ...]:
    """Return the programs with their second tile in place of the first, for kernels that hold one tile pair."""
    return tuple((shared, max(second, 0), 0) for shared, _, second in programs(dim))


def slots(dim: int) -> tuple[tuple[int, int, int], ...]:
    """Return where the sums of every tile pair are stored: (slot, first tile, second tile)."""
    found = []
    for p, (shared, first, second) in enumerate(programs(dim)):
        found.append((2 * p, first, shared))
        if second >= 0:
            found.append((2 * p + 1, second, shared))
    return tuple(found)


def turned_slots(dim: int, width: int) -> tuple[tuple[int, int, int], ...]:
    """Return the tiles of the turned slots: (slot, tile of c, tile of b)."""
    others = dim // TILE
    return tuple((c * others + b, c, b) for c in range(width // TILE) for b in range(others))


def pair_slots(dim: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return for tiles a and b the slot of their products and whether b is the first factor: [tiles, tiles, 2]."""
    count = dim // TILE
    table = [[(0, 0)] * count for _ in range(count)]
    for slot, (_, first, second) in enumerate(slots(dim)):
        table[second][first] = slot, 1
        table[first][second] = slot, 0
    return tuple(tuple(row) for row in table)


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for: the widths d and e, and the sizes and switches that it reads."""

    D: int
    E: int
    T: int = BLOCK  # rows or keys of a tile
    TK: int = 0  # keys or rows of a tile that they are compared with
    STEPS: int = 0
    SLOTS: int = 0  # tile pairs in S
    WIDE: int = 0
    SUB: int = 0
    CAUSAL: bool = False
    BY_PRODUCTS: bool = False
    CENTRE: bool = False
    ALIKE: bool = False
    PLAIN: bool = False
    HAS_W: bool = False
    HAS_Z: bool = False
    PRECISION: str = ""
    STAGES: int = 1

    @property
    def first_size(self) -> int:
        """The number of sums of degree 0 and 1 of a split: Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w."""
        return self.D * self.E + self.D * self.D + self.D + self.E + 1

    @property
    def big_size(self) -> int:
        """The size of the part of a state in the dtype of the tensors: S [slots, 256, e], L [2, d, e], C [d, d]."""
        return self.SLOTS * 256 * self.E + 2 * self.D * self.E + self.D * self.D

    @property
    def small_size(self) -> int:
        """The size of the float32 part of a state: z1 [d], z0, n0 [e], mean of the values [e], 1 / total weight."""
        return self.D + 2 * self.E + 2

    @property
    def query_small_size(self) -> int:
        """The size of the float32 part of a state of queries: z1 [d], z0, n0 [e]."""
        return self.D + self.E + 1

    @property
    def kept_slots(self) -> int:
        """The tile pairs that the programs of `second_moments` sum: two each, of which the last may be none."""
        return (self.SLOTS + 1) // 2 * 2

    @property
    def turned_slots(self) -> int:
        """The tile pairs in the turned S: one for every pair of a tile of values and a tile of queries or keys."""
        return self.D * self.E // TILE**2 if self.SLOTS else 0


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
    """kernel[grid](*tensors, sizes, *numbers, config, **options), with the parameters in this order.

    A launch belongs to one device.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], sizes: tuple[int, ...], config: Config, **options: int
    ) -> None:
        self.kernel, self.grid, self.sizes, self.config, self.options = kernel, grid, sizes, config, options
        self._compiled: dict[tuple[torch.dtype, ...], Callable[[list[int], Sequence[float]], object]] = {}

    def __call__(self, tensors: Sequence[Tensor], numbers: Sequence[float] = ()) -> None:
        """Launch the kernel. All tensors are contiguous and on the current device."""
        addresses = [x.data_ptr() for x in tensors]
        dtypes = tuple([x.dtype for x in tensors])
        is_aligned = reduce(or_, addresses) % ALIGNMENT == 0
        if is_aligned and (run := self._compiled.get(dtypes)) is not None:
            run(addresses, numbers)
            return
        compiled = self.kernel[self.grid](*tensors, self.sizes, *numbers, self.config, **self.options)
        if is_aligned and compiled is not None:  # the interpreter compiles nothing
            self._compiled[dtypes] = self._by_address(compiled, tensors[0].device.index or 0)

    def _by_address(self, compiled: Any, device: int) -> Callable[[list[int], Sequence[float]], object]:
        """Return the function that launches a compiled kernel with the addresses of tensors, and numbers."""
        from triton.runtime import driver

        run, stream, grid = compiled.run, driver.active.get_current_stream, self.grid
        # The kernel, its metadata, the metadata for hooks, the hook before a launch and the hook after it.
        fixed, sizes, config = (compiled.function, compiled.packed_metadata, None, None, None), self.sizes, self.config
        return lambda addresses, numbers: run(*grid, stream(device), *fixed, *addresses, sizes, *numbers, config)


@cache
def table(rows: Callable[..., Sequence[object]], device: torch.device, *sizes: int) -> Tensor:
    """Return the integers rows(*sizes) as a tensor on the device. It is never freed: CUDA graphs keep its address."""
    return torch.tensor(rows(*sizes), dtype=torch.int32, device=device)


@lru_cache(maxsize=1024)
def survey_launch(heads: int, rows: int, m: int, d: int, e: int, device: torch.device) -> Launch:
    """Prepare `survey`. Tensors: q [N, rows, d], k [N, m, d], v [N, m, e], out [6·N + 2·N·d]."""
    steps = survey_steps(max(rows, m))
    grid = math.ceil(max(rows, m) / (BLOCK * steps)), heads, 3
    return Launch(kernels().survey, grid, (rows, m, heads), Config(d, e, STEPS=steps), num_warps=4)


@lru_cache(maxsize=1024)
def glance_launch(heads: int, rows: int, m: int, d: int, e: int, device: torch.device) -> tuple[Launch, int]:
    """Prepare `glance`, with some 1,024 rows and more for a program, and the size of its result."""
    programs = max(1, rows // (2 * BLOCK * survey_steps(rows)))
    launch = Launch(kernels().glance, (programs, heads, 1), (rows, m, heads), Config(d, e), num_warps=4)
    return launch, programs * heads


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
    def config(self) -> Config:
        """What kernels that read or write states are compiled for."""
        c = self.call
        parts = len(slots(c.d)) if self.degree > 1 else 0
        return Config(c.d, c.e, SLOTS=parts, CAUSAL=self.block > 0, PRECISION=precision(c.dtype))

    @property
    def states(self) -> int:
        """The number of states of keys: one before every causal block and one after the last; or one in all."""
        return math.ceil(padded_length(self.call.m) / self.block) + 1 if self.block else 1


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
            Config(c.d, c.e, tune.moments_tokens, WIDE=TILE if self.is_narrow else 2 * TILE,
                   PRECISION=precision(c.dtype), STAGES=tune.moments_stages),
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
        self.sizes, c, config = s, s.call, s.config
        kernel, tune, causal = kernels(), tuning(c.dtype, max(c.d, c.e)), s.block > 0
        padded = padded_length(c.m)
        per_split = s.block or split_length(c.m, c.heads, len(programs(c.d)), c.device)
        splits = math.ceil(padded / per_split)
        self.slots = table(slots, c.device, c.d)
        self.transposed_shape, self.first_shape = (c.heads, c.d, padded), (splits, c.heads, config.first_size)
        self.big_shape, self.small_shape = (s.states, c.heads, config.big_size), (s.states, c.heads, config.small_size)
        self.transpose = Launch(
            kernel.transpose, (padded // BLOCK, c.heads, 1), (c.m, padded), Config(c.d, c.e), num_warps=4
        )
        by_products = c.dtype != torch.float32 and min(c.d, c.e) >= 64
        self.first_moments = Launch(
            kernel.first_moments, (splits, c.heads, 1), (c.m, padded, per_split),
            Config(c.d, c.e, tune.moments_tokens, HAS_W=s.has_w, BY_PRODUCTS=by_products,
                   PRECISION=precision(c.dtype), STAGES=3 if by_products else 1),
            num_warps=4 if c.d < 128 else 8,
        )  # fmt: skip
        self.second_moments = SecondMoments(s, c.heads, c.m, per_split) if s.degree > 1 else None
        self.finish = Launch(
            kernel.finish, (config.SLOTS + 1, c.heads, 1), (splits, c.heads),
            replace(config, CENTRE=not s.is_shifted, ALIKE=s.is_alike), num_warps=8,
        )  # fmt: skip
        keys = (c.m, padded, c.groups, c.heads, s.states, s.block) if causal else (0, 0, c.groups, c.heads, 1, 1)
        self.evaluate = Launch(
            kernel.evaluate, (math.ceil(c.n / tune.rows), c.heads * c.groups, 1), (c.n, *keys),
            replace(config, T=tune.rows, TK=32 if c.dtype == torch.float32 else 64, SUB=tune.rows_part,
                    HAS_W=s.has_w and causal, HAS_Z=s.needs_z, STAGES=tune.rows_stages),
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
    """Rows that one launch of a kernel computes. `turn` computes the turned states from `first_state` on."""

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
        self.row_heads, self.read_states, self.states = c.heads * self.groups, 1, 1
        if self.is_causal:
            self.read_states, self.states = min(math.ceil(c.n / s.block), s.states), math.ceil(c.m / s.block)
        self.big_shape = self.states, c.heads, s.config.big_size
        self.small_shape = self.states, c.heads, s.config.query_small_size
        self._sums()
        state_size = s.config.turned_slots * 256 * c.d
        at_once = max(self.read_states, self.states)
        if state_size:
            at_once = min(at_once, max(1, s.turned_bytes // (c.heads * state_size * c.dtype.itemsize)))
        self.turned_shape = at_once, c.heads, state_size
        tune = tuning(c.dtype, max(c.d, c.e))
        self.row_config = replace(s.config, T=tune.rows, SUB=tune.rows_part, STAGES=tune.rows_stages, PLAIN=s.is_plain)
        self.key_config = replace(self.row_config, HAS_W=s.has_w)
        self.row_options = {"num_warps": tune.rows_warps, **tune.rows_limit}
        self.queries = tuple(self._turned(self.n, self.read_states, is_query=True))
        self.keys = tuple(self._turned(c.m, self.states, is_query=False))
        self.values = Launch(
            kernels().value_rows, (math.ceil(c.m / tune.rows), c.heads, 1),
            (c.m, c.heads, self.states - 1, s.block or BLOCK), replace(self.key_config, HAS_Z=s.is_weighted),
            **self.row_options,
        )  # fmt: skip
        if self.is_causal:
            self._exact()

    def _sums(self) -> None:
        """Prepare the sums over queries and the states that keys read."""
        s, c, config = self.sizes, self.sizes.call, self.sizes.config
        is_second = s.degree > 1
        shift = (c.e, 0) if s.is_shifted else (config.small_size, c.d + 1 + c.e)
        padded = padded_length(self.n) if is_second else 0
        self.transposed_shape = self.row_heads, c.d, padded
        grid = max(padded // BLOCK, math.ceil(c.m / BLOCK)), self.row_heads, 1
        self.prepare = Launch(
            kernels().prepare, grid, (self.n, c.m, padded, self.groups, *shift),
            config, num_warps=4,
        )  # fmt: skip
        per_block = s.block or rows_per_program(self.n, c.heads)
        blocks = math.ceil(self.n / per_block)
        self.first_shape, self.floor_shape = (blocks, self.row_heads, config.first_size), (c.heads, blocks)
        (tokens, warps), _, _ = tiles(c.dtype, max(c.d, c.e))
        self.moments = Launch(
            kernels().query_moments, (blocks, self.row_heads, 1), (self.n, self.groups, per_block, *shift),
            replace(config, T=tokens), num_warps=warps,
        )  # fmt: skip
        per_split = s.block or split_length(self.n, c.heads, len(programs(c.d)), c.device)
        self.second_moments = SecondMoments(s, self.row_heads, self.n, per_split) if is_second else None
        splits = math.ceil(self.n / per_split)
        self.finish = Launch(
            kernels().finish_queries, (config.SLOTS + 1, c.heads, 1),
            (splits, blocks, self.states, c.heads, self.groups, self.n, per_block),
            replace(config, ALIKE=s.is_alike), num_warps=8,
        )  # fmt: skip

    def _turned(self, n: int, states: int, is_query: bool) -> Iterator[RowLaunches]:
        """Prepare the bilinear rows of n queries or keys, with the turned states that fit into memory at a time."""
        s, c, at_once = self.sizes, self.sizes.call, self.turned_shape[0]
        for start in range(0, states, at_once):
            end, turn = min(start + at_once, states), None
            length = n - start * s.block if end == states else (end - start) * s.block
            if s.config.SLOTS:
                grid = s.config.turned_slots, (end - start) * c.heads, 1
                turn = Launch(kernels().turn, grid, (s.config.big_size,), Config(c.d, c.e), num_warps=4)
            sizes, heads = (c.heads, states - 1, s.block or BLOCK), self.row_heads if is_query else c.heads
            kernel = kernels().query_rows if is_query else kernels().key_rows
            rows = Launch(
                kernel, (math.ceil(length / self.row_config.T), heads, 1),
                (n, self.groups, *sizes) if is_query else (n, *sizes),
                self.row_config if is_query else self.key_config, **self.row_options,
            )  # fmt: skip
            yield RowLaunches(start, turn, rows)

    def _exact(self) -> None:
        """Prepare the exact blocks of causal gradients."""
        s, c = self.sizes, self.sizes.call
        _, (own, other, warps), keys = tiles(c.dtype, max(c.d, c.e))
        config = Config(c.d, c.e, own, other, HAS_W=s.has_w, PRECISION=precision(c.dtype), STAGES=2)
        self.exact_queries = Launch(
            kernels().exact_queries, (math.ceil(self.n / own), self.row_heads, 1),
            (self.n, c.m, self.groups, s.block), config, num_warps=warps,
        )  # fmt: skip
        own, other, warps = keys
        self.exact_keys = Launch(
            kernels().exact_keys, (math.ceil(c.m / own), c.heads, 1),
            (self.n, c.m, self.groups, self.floor_shape[1], self.states, s.block),
            replace(config, T=own, TK=other, HAS_W=False, HAS_Z=s.is_weighted), num_warps=warps,
        )  # fmt: skip


gradient_launches = lru_cache(maxsize=1024)(GradientLaunches)
