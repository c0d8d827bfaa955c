"""Find text of windows that must not be trained on, wherever it starts.

Runs of r tokens are compared by hash(x_1 … x_r) = Σ_j x_j B^(j−1) mod 2^64. Equal runs have equal hashes, so every
run of a held window is found. If different runs have equal hashes, a little too much is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int, UInt64
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord

RUN = 32
"""Tokens that a text may not share with a held window, one after the other; fewer if windows are shorter."""
_BASE = 0x9E3779B97F4A7C15
"""B; it is odd, so that it has an inverse."""


@dataclass(frozen=True, eq=False, repr=False)
class HeldRuns(ArrayRecord):
    """The runs of held windows.

    - `run`: r, the tokens of a run
    - `hashes`: their hashes in increasing order
    """

    run: int
    hashes: UInt64[np.ndarray, " runs"]

    @classmethod
    def of(cls, held: Sequence[Int[Tensor, "_ _"]], length: int) -> "HeldRuns":
        """Return the runs of windows without special tokens; `length` is that of the windows they are kept out of."""
        run = min(RUN, length, *(rows.shape[1] for rows in held))
        found = [_hashes(rows.numpy(), run).reshape(-1) for rows in held]
        return cls(run, np.unique(np.concatenate([np.empty(0, np.uint64), *found])))

    def cover(self, ids: Int[Tensor, "*rows n"]) -> Bool[Tensor, "*rows n"]:
        """Return whether each token belongs to a run of a held window."""
        if ids.shape[-1] < self.run or not len(self.hashes):
            return torch.zeros(ids.shape, dtype=torch.bool)
        found = _hashes(ids.numpy(), self.run)
        place = np.searchsorted(self.hashes, found).clip(max=len(self.hashes) - 1)
        sides = [(0, 0)] * (ids.dim() - 1) + [(self.run, self.run - 1)]
        counts = np.pad(self.hashes[place] == found, sides).cumsum(axis=-1, dtype=np.int32)
        # Token i belongs to the runs that start at i − r + 1 … i.
        return torch.from_numpy(counts[..., self.run :] > counts[..., : -self.run])


def _hashes(ids: Int[np.ndarray, "*rows n"], run: int) -> UInt64[np.ndarray, "*rows starts"]:
    """Return the hashes of all runs, one for each start: differences of the sums of x_i B^i, divided by B^start."""
    powers, inverse = (np.cumprod(np.full(ids.shape[-1], base, np.uint64)) for base in (_BASE, pow(_BASE, -1, 2**64)))
    sums = np.pad((ids.astype(np.uint64) * powers).cumsum(axis=-1), [*[(0, 0)] * (ids.ndim - 1), (1, 0)])
    found: UInt64[np.ndarray, "*rows starts"] = (sums[..., run:] - sums[..., :-run]) * inverse[: sums.shape[-1] - run]
    return found
