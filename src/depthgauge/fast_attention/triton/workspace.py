"""Everything that the Triton backend keeps between calls, except its routes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from depthgauge.fast_attention.triton.kernels import programs
from depthgauge.fast_attention.triton.launch import Launch
from depthgauge.fast_attention.triton.launches import LaunchSizes
from depthgauge.fast_attention.triton.readback import Readbacks
from depthgauge.fast_attention.triton.tuning import CAUSAL_BLOCK, split_length


class Workspace:
    """Prepared launches, index tables on the device and readback buffers of one backend, and its block size.

    Values of the dtypes `centred_after` are exact in the kernels and are centred after the sums. Values of other dtypes
    are centred before the sums.
    """

    _MOST = 4096

    def __init__(
        self, causal_block: int = CAUSAL_BLOCK, centred_after: tuple[torch.dtype, ...] = (torch.bfloat16,)
    ) -> None:
        self.causal_block, self.centred_after = causal_block, centred_after
        self.readbacks = Readbacks()
        self._launches: dict[tuple[type, LaunchSizes], Launch] = {}
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

    def per_split(self, heads: int, d: int, m: int, is_causal: bool, device: torch.device) -> int:
        """Return how many keys one program sums."""
        return self.causal_block if is_causal else split_length(m, heads, len(programs(d)), device)
