"""A kernel launch with little work on the host.

Triton inspects every argument of every launch to find the compiled kernel. At a few thousand tokens this takes longer
than the kernel runs. A `Launch` fixes everything except tensors and floats, and keeps the compiled kernels. They are
valid for launches whose tensors have the same dtypes and are aligned to 16 bytes; others go through Triton.

The compiled kernel gets addresses instead of tensors, because for every tensor Triton's launcher asks the driver where
it is. Hooks around launches, which only profilers of Triton set, are called for launches through Triton alone.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from torch import Tensor, dtype

ALIGNMENT = 16


def current_streams() -> Callable[[int], int]:
    """Return the function that gives the current stream of a device by its number."""
    from triton.runtime import driver

    streams: Callable[[int], int] = driver.active.get_current_stream
    return streams


class CompiledLaunch(NamedTuple):
    """A compiled kernel with its grid: `run` takes the grid, a stream, `fixed` and the arguments of the kernel."""

    run: Callable[..., object]
    fixed: tuple[object, ...]
    stream: Callable[[int], int]
    device: int


class Launch:
    """kernel[grid](*tensors, *integers, *floats, *constants, **options), with the parameters in this order."""

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
        self._compiled: dict[tuple[dtype, ...], CompiledLaunch] = {}

    def compiled(self, dtypes: Sequence[dtype]) -> CompiledLaunch | None:
        """Return the kernel that is compiled for aligned tensors of these dtypes, or None."""
        return self._compiled.get(tuple(dtypes))

    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float] = ()) -> None:
        """Launch the kernel. All tensors are on the current device or in host memory that it can write to."""
        addresses = [x.data_ptr() for x in tensors]
        dtypes = tuple([x.dtype for x in tensors])
        is_aligned = reduce(or_, addresses) % ALIGNMENT == 0
        known = self._compiled.get(dtypes) if is_aligned else None
        if known is not None:
            stream = known.stream(known.device)
            known.run(*self.grid, stream, *known.fixed, *addresses, *self.integers, *floats, *self.constants)
            return
        compiled = self.kernel[self.grid](*tensors, *self.integers, *floats, *self.constants, **self.options)
        if is_aligned and compiled is not None:  # the interpreter compiles nothing
            # The kernel, its metadata, the metadata for hooks, the hook before a launch and the hook after it.
            fixed = compiled.function, compiled.packed_metadata, None, None, None
            device = tensors[0].device.index or 0
            self._compiled[dtypes] = CompiledLaunch(compiled.run, fixed, current_streams(), device)
