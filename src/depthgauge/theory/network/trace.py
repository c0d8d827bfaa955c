"""Traces: the states and scores of a network on an input, one layer at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord

BLOCK_ENTRIES = 2**22
"""The default number of scores in one block of `score_blocks` (32 MB in float64)."""


@dataclass(frozen=True, eq=False, repr=False)
class LayerTrace(ArrayRecord):
    """The states of one layer, and its scores on demand.

    `before` and `after` are X_ℓ and X_{ℓ+1}. `attention_input` is the input of the attention, which is LayerNorm(X_ℓ)
    in a pre-norm network and X_ℓ otherwise. `query` and `key` are those of `Layer.project` for this input.
    """

    index: int
    before: Float[Tensor, "*batch n d"]
    after: Float[Tensor, "*batch n d"]
    attention_input: Float[Tensor, "*batch n d"]
    query: Float[Tensor, "*batch heads n k"]
    key: Float[Tensor, "*batch heads n k"]
    scale: float
    causal: bool

    def score_blocks(
        self, query: Float[Tensor, "*batch heads n k"] | None = None, entries: int = BLOCK_ENTRIES
    ) -> Iterator["ScoreBlock"]:
        """Yield the scores β Q Kᵀ of all heads in blocks of rows, with about `entries` numbers per block at most.

        `query` replaces the queries of the trace if given, without position biases if it is narrower. Masked entries
        are −∞.
        """
        query = self.query if query is None else query
        key, n = self.key[..., : query.shape[-1]], self.key.shape[-2]
        rows = max(1, entries // max(1, query[..., :1, :1].numel() * n))
        columns = torch.arange(n, device=query.device)
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            scores = (query[..., start:stop, :] @ key.mT) * self.scale
            visible = None
            if self.causal:
                visible = columns <= columns[start:stop, None]
                scores = scores.masked_fill(~visible, float("-inf"))
            yield ScoreBlock(start, stop, scores, visible)


@dataclass(frozen=True, eq=False, repr=False)
class ScoreBlock(ArrayRecord):
    """Rows `start` to `stop` of the scores of every head. `visible` is the causal mask of these rows, or None."""

    start: int
    stop: int
    scores: Float[Tensor, "*batch heads rows n"]
    visible: Bool[Tensor, "rows n"] | None

    def row_ranges(self) -> Float[Tensor, "*batch heads rows"]:
        """Return max_j − min_j over the visible entries of each row."""
        low = self.scores
        if self.visible is not None:
            low = low.masked_fill(~self.visible, float("inf"))
        return self.scores.amax(dim=-1) - low.amin(dim=-1)
