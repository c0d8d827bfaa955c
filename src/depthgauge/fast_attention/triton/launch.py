"""A kernel launch with little work on the host, and the index tables that kernels read.

Triton inspects every argument of every launch to find the compiled kernel. At a few thousand tokens this takes longer
than the kernel runs. A `Launch` fixes everything except tensors and floats, and keeps the compiled kernels. They are
valid for launches whose tensors have the same dtypes and are aligned to 16 bytes; others go through Triton.

The compiled kernel gets addresses instead of tensors, because for every tensor Triton's launcher asks the driver where
it is. Hooks around launches, which only profilers of Triton set, are called for launches through Triton alone.
"""

from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

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
