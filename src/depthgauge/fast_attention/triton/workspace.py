"""Everything that the Triton backend keeps between calls, except its routes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthgauge.fast_attention.triton.forward_pass import ForwardPass, ForwardSizes
from depthgauge.fast_attention.triton.gradient_launches import GradientSizes
from depthgauge.fast_attention.triton.gradient_pass import GradientPass
from depthgauge.fast_attention.triton.launch import Launch
from depthgauge.fast_attention.triton.launches import LaunchSizes
from depthgauge.fast_attention.triton.readback import Readbacks
from depthgauge.fast_attention.triton.tuning import CAUSAL_BLOCK

TURNED_BYTES = 2**28
"""The memory of the turned states that are held at once."""


class Workspace:
    """Prepared launches, index tables on the device and readback buffers of one backend, and its sizes of blocks.

    Values of the dtypes `centred_after` are exact in the kernels and are centred after the sums. Values of other dtypes
    are centred before the sums. A backward pass holds at most `turned_bytes` of turned states, or one of them.
    """

    _MOST = 4096
    _MOST_PASSES = 1024

    def __init__(
        self,
        causal_block: int = CAUSAL_BLOCK,
        centred_after: tuple[torch.dtype, ...] = (torch.bfloat16,),
        turned_bytes: int = TURNED_BYTES,
    ) -> None:
        self.causal_block, self.centred_after, self.turned_bytes = causal_block, centred_after, turned_bytes
        self.readbacks = Readbacks()
        self._launches: dict[tuple[type, LaunchSizes], Launch] = {}
        self._forward: dict[ForwardSizes, ForwardPass] = {}
        self._gradients: dict[GradientSizes, GradientPass] = {}
        self._tables: dict[tuple[object, ...], Tensor] = {}

    def launch(self, sizes: LaunchSizes) -> Launch:
        """Return the prepared launch of these sizes."""
        key = type(sizes), sizes  # records of two kernels may be equal as tuples
        found = self._launches.get(key)
        if found is None:
            if len(self._launches) >= self._MOST:
                self._launches.clear()
            found = self._launches[key] = sizes.launch()
        return found

    def forward(self, sizes: ForwardSizes) -> ForwardPass:
        """Return the prepared forward pass of these sizes."""
        found = self._forward.get(sizes)
        if found is None:
            if len(self._forward) >= self._MOST_PASSES:
                self._forward.clear()
            found = self._forward[sizes] = ForwardPass(sizes, self.table)
        return found

    def gradients(self, sizes: GradientSizes) -> GradientPass:
        """Return the prepared backward pass of these sizes."""
        found = self._gradients.get(sizes)
        if found is None:
            if len(self._gradients) >= self._MOST_PASSES:
                self._gradients.clear()
            found = self._gradients[sizes] = GradientPass(sizes, self.table)
        return found

    def table(self, rows: Callable[..., Sequence[object]], device: torch.device, *sizes: int) -> Tensor:
        """Return the integers rows(*sizes) as a tensor on the device."""
        key = rows, device, sizes
        found = self._tables.get(key)
        if found is None:
            found = self._tables[key] = torch.tensor(rows(*sizes), dtype=torch.int32, device=device)
        return found

    def centres_before(self, dtype: torch.dtype) -> bool:
        """Return whether values of this dtype are centred at their midpoint before the sums."""
        return dtype not in self.centred_after
