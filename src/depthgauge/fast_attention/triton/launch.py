"""A kernel launch with little work on the host.

Triton inspects every argument of every launch to find the compiled kernel. At a few thousand tokens this takes longer
than the kernel runs. A `Launch` fixes everything except tensors and floats, and keeps the compiled kernel. It is valid
for every launch whose tensors have the same dtypes and are aligned to 16 bytes; any other launch goes through Triton.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, dtype

ALIGNMENT = 16


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
        self._compiled: tuple[list[dtype], Any] | None = None

    def __call__(self, tensors: Sequence[Tensor], floats: Sequence[float] = ()) -> None:
        """Launch the kernel. All tensors are on the current device or in host memory that it can write to."""
        addresses = 0
        dtypes: list[dtype] = []
        for tensor in tensors:
            addresses |= tensor.data_ptr()
            dtypes.append(tensor.dtype)
        is_aligned = addresses % ALIGNMENT == 0
        known = self._compiled
        if is_aligned and known is not None and known[0] == dtypes:
            known[1](*tensors, *self.integers, *floats, *self.constants)
            return
        compiled = self.kernel[self.grid](*tensors, *self.integers, *floats, *self.constants, **self.options)
        if is_aligned and compiled is not None:  # the interpreter compiles nothing
            self._compiled = dtypes, compiled[self.grid]
