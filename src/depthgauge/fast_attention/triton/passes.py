"""A pass: launches in a fixed order, on tensors that have names.

A launch by tensors takes the host some 15 microseconds and an allocation another 5 to 10, which is more than most
kernels need at a few thousand tokens. Once all kernels of a pass are compiled, its own memory is one allocation, and
the kernels get addresses in it.
"""

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthgauge.fast_attention.triton.launch import ALIGNMENT, Launch

PLACE_BYTES = 256
"""Tensors in the memory of a pass start at multiples of this number of bytes."""
Argument = str | tuple[str, int]
"""The name of a tensor, or its name and the number of its first entries that are left out."""
Floats = tuple[float, ...]
Memory = tuple[Tensor, ...]
"""The memory of a `Layout`."""
NONE: Mapping[str, Floats] = {}
NO_ROOMS: Mapping[str, "Room"] = {}


def is_pooled() -> bool:
    """Return whether tensors may share an allocation. If torch's pool of memory is switched off, none do."""
    return "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


class LaunchStep(NamedTuple):
    """A launch, its tensors by name, and its numbers: these, or those that a call gives under this name."""

    launch: Launch
    arguments: tuple[Argument, ...]
    floats: Floats | str = ()

    def names(self) -> set[str]:
        """Return the names of its tensors."""
        return {_name(argument) for argument in self.arguments}


def _name(argument: Argument) -> str:
    return argument if isinstance(argument, str) else argument[0]


def aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy whose address is a multiple of ALIGNMENT."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


class Room(NamedTuple):
    """The shape and the dtype of a tensor in the memory of a pass."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The size in bytes, as a multiple of PLACE_BYTES."""
        used = math.prod(self.shape) * self.dtype.itemsize
        return (used + PLACE_BYTES - 1) // PLACE_BYTES * PLACE_BYTES


class Layout:
    """The memory of a pass: where tensors start. Tensors whose times of use do not overlap share memory.

    A tensor is in use from the first step that names it to the last. Launches on a stream run one after the other. If
    torch's pool of memory is switched off, every tensor is an allocation of its own.

    >>> rooms = {name: Room((100,), torch.float32) for name in "xyz"}
    >>> layout = Layout(rooms, [{"x", "y"}, {"y"}, {"y", "z"}])
    >>> layout.places, layout.size
    ({'x': 0, 'y': 512, 'z': 0}, 1024)
    """

    def __init__(self, rooms: Mapping[str, Room], used: Sequence[Collection[str]]) -> None:
        """Place the rooms, the largest first, each at the lowest place that is free while it is used.

        Args:
            rooms: the tensors.
            used: the names that every step uses, in the order of the steps.
        """
        self.rooms = dict(rooms)
        lives = {}
        for name in rooms:
            steps = [at for at, names in enumerate(used) if name in names]
            lives[name] = range(min(steps), max(steps) + 1)
        found: dict[str, int] = {}
        for name in sorted(rooms, key=lambda name: -rooms[name].size):
            others = [x for x in found if lives[x].start < lives[name].stop and lives[name].start < lives[x].stop]
            taken = sorted((found[x], found[x] + rooms[x].size) for x in others)
            place = 0
            for start, end in taken:
                if place + rooms[name].size <= start:
                    break
                place = max(place, end)
            found[name] = place
        self.places = {name: found[name] for name in rooms}
        self.size = max((found[name] + room.size for name, room in rooms.items()), default=0)
        self._offsets, self._is_pooled = list(self.places.values()), is_pooled()

    def allocate(self, device: torch.device) -> Memory:
        """Allocate the memory: one tensor, or all tensors if they must not share an allocation."""
        if self._is_pooled:
            return (torch.empty(self.size, dtype=torch.uint8, device=device),)
        return tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.rooms.values()])

    def addresses(self, memory: Memory) -> list[int]:
        """Return where the tensors start."""
        if self._is_pooled:
            base = memory[0].data_ptr()
            return [base + offset for offset in self._offsets]
        return [x.data_ptr() for x in memory]

    def view(self, memory: Memory, name: str) -> Tensor:
        """Return one of the tensors in their memory."""
        if not self._is_pooled:
            return memory[list(self.rooms).index(name)]
        (shape, dtype), start = self.rooms[name], self.places[name]
        used: Tensor = memory[0][start : start + math.prod(shape) * dtype.itemsize]
        return used.view(dtype).view(shape)

    def views(self, memory: Memory) -> dict[str, Tensor]:
        """Return all tensors in their memory."""
        return {name: self.view(memory, name) for name in self.rooms}


class _BoundStep(NamedTuple):
    """A step by addresses: `pick` takes those of its tensors from the addresses of a call."""

    run: Callable[..., object]
    grid: tuple[int, int, int]
    fixed: tuple[object, ...]
    pick: Callable[[list[int]], tuple[int, ...]]
    integers: tuple[int, ...]
    floats: Floats | str
    constants: tuple[object, ...]


class _Bound(NamedTuple):
    """A pass whose kernels are compiled.

    The addresses of a call are those of the given tensors, of those that are kept and of its own, then `tables`, then
    those of tensors whose first bytes are left out, as the number of an address and these bytes.
    """

    tables: list[int]
    shifted: list[tuple[int, int]]
    parts: tuple[tuple[_BoundStep, ...], ...]
    stream: Callable[[int], int]
    device: int


class Call:
    """One call of a pass: where its tensors are. `run` makes the launches of one part after the other."""

    __slots__ = ("_addresses", "_bound", "_memory", "_parts", "_tensors")

    def __init__(
        self, parts: Sequence[Sequence[LaunchStep]], bound: _Bound | None, memory: object, addresses: list[int],
        tensors: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self._parts, self._bound, self._memory = parts, bound, memory
        self._addresses, self._tensors = addresses, tensors

    def run(self, part: int, numbers: Mapping[str, Floats] = NONE) -> None:
        """Make the launches of a part. `numbers` are the floats that its steps name."""
        bound = self._bound
        if bound is None:
            for step in self._parts[part]:
                floats = numbers[step.floats] if isinstance(step.floats, str) else step.floats
                step.launch([self._tensor(x) for x in step.arguments], floats)
            return
        stream, addresses = bound.stream(bound.device), self._addresses
        for run, grid, fixed, pick, integers, own, constants in bound.parts[part]:
            floats = numbers[own] if isinstance(own, str) else own
            run(*grid, stream, *fixed, *pick(addresses), *integers, *floats, *constants)

    def _tensor(self, argument: Argument) -> Tensor:
        if isinstance(argument, str):
            return self._tensors[argument]
        name, first = argument
        return self._tensors[name].flatten()[first:]


class LaunchPass:
    """Launches in a fixed order, in parts, on tensors that have names.

    These are the tensors `given` to every call, `tables`, tensors of its own, and those of `kept`, whose memory the
    caller holds because a later pass reads them. A pass is prepared for given tensors of one shape. They must be
    contiguous.
    """

    def __init__(
        self, parts: Iterable[Iterable[LaunchStep]], given: Sequence[str], tables: Mapping[str, Tensor],
        rooms: Mapping[str, Room], device: torch.device, kept: Mapping[str, Room] = NO_ROOMS,
    ) -> None:  # fmt: skip
        self.parts = tuple(tuple(part) for part in parts)
        self.given, self.tables, self.device = tuple(given), dict(tables), device
        self.own = Layout(rooms, [step.names() for part in self.parts for step in part])
        self.kept = Layout(kept, [kept.keys()])
        self._bound = dict[tuple[torch.dtype, ...], _Bound]()

    def keep(self) -> Memory:
        """Allocate the memory of the tensors that the caller holds."""
        return self.kept.allocate(self.device)

    def start(self, given: Sequence[Tensor], kept: Memory = ()) -> Call:
        """Allocate the memory of a call. `kept` comes from `keep`, of this pass or of one that keeps the same.

        Its address is a multiple of ALIGNMENT.
        """
        addresses = [x.data_ptr() for x in given]
        dtypes = tuple([x.dtype for x in given])
        bound, memory = self._bound.get(dtypes) or self._bind(dtypes), self.own.allocate(self.device)
        if bound is None or reduce(or_, addresses) % ALIGNMENT:
            tensors = self.own.views(memory) | self.tables | dict(zip(self.given, given, strict=True))
            return Call(self.parts, None, memory, [], tensors | self.kept.views(kept))
        if self.kept.rooms:
            addresses += self.kept.addresses(kept)
        addresses += self.own.addresses(memory)
        addresses += bound.tables
        addresses += [addresses[at] + first for at, first in bound.shifted]
        return Call(self.parts, bound, memory, addresses, {})

    def __call__(self, given: Sequence[Tensor], kept: Memory, numbers: Mapping[str, Floats]) -> None:
        """Make all launches."""
        call = self.start(given, kept)
        for part in range(len(self.parts)):
            call.run(part, numbers)

    def _bind(self, given: tuple[torch.dtype, ...]) -> _Bound | None:
        """Return the pass by addresses, or None if a kernel is not compiled for given tensors of these dtypes yet."""
        dtypes = dict(zip(self.given, given, strict=True))
        for rooms in (self.kept.rooms, self.own.rooms):
            dtypes |= {name: room.dtype for name, room in rooms.items()}
        dtypes |= {name: x.dtype for name, x in self.tables.items()}
        order: list[Argument] = list(dtypes)
        shifted, parts, found = [], [], None
        for steps in self.parts:
            bound = []
            for launch, arguments, floats in steps:
                names = [_name(x) for x in arguments]
                found = launch.compiled([dtypes[name] for name in names])
                if found is None:
                    return None
                for name, argument in zip(names, arguments, strict=True):
                    if isinstance(argument, tuple) and argument not in order:
                        shifted.append((order.index(name), argument[1] * dtypes[name].itemsize))
                        order.append(argument)
                pick: Any = itemgetter(*(order.index(x) for x in arguments))
                own = launch.grid, found.fixed, pick, launch.integers, floats, launch.constants
                bound.append(_BoundStep(found.run, *own))
            parts.append(tuple(bound))
        if found is None or any(first % ALIGNMENT for _, first in shifted):
            return None
        tables = [x.data_ptr() for x in self.tables.values()]
        self._bound[given] = _Bound(tables, shifted, tuple(parts), found.stream, found.device)
        return self._bound[given]
