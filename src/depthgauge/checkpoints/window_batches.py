"""Windows in batches, which become smaller if memory runs out."""

import gc
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from depthgauge.base.errors import is_out_of_memory

Made = TypeVar("Made")
SMALLER = 4
"""The factor by which batches become smaller."""


class WindowBatches:
    """How many windows are computed together: `size`, and a quarter of it from the first failed allocation on.

    The second failure is raised: then the weights, or a single window, are too large.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._is_smaller = False

    def map(self, compute: Callable[[slice], Made], windows: int) -> list[Made]:
        """Return what `compute` returns for each batch of this many windows.

        A failed batch is computed again, so `compute` must not change anything before its last allocation.
        """
        found: list[Made] = []
        start = 0
        while start < windows:
            found.append(self.again(partial(self._one, compute, start, windows), windows - start))
            start += self.size
        return found

    def _one(self, compute: Callable[[slice], Made], start: int, windows: int) -> Made:
        return compute(slice(start, min(windows, start + self.size)))

    def again(self, compute: Callable[[], Made], windows: int) -> Made:
        """Return what `compute` returns for this many windows in batches of `size`; call it again if memory runs out.

        A second call must undo what the first one did.
        """
        try:
            return compute()
        except Exception as error:
            together = min(self.size, windows)
            if self._is_smaller or together == 1 or not is_out_of_memory(error):
                raise
            self.size, self._is_smaller = max(1, together // SMALLER), True
        # Only here, the error does not refer to the tensors of the failed batch any more.
        gc.collect()
        torch.cuda.empty_cache()
        return compute()
