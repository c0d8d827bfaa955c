"""How the models of a shrink continue the same prompts, for a reader of the page."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.checkpoints.inputs.windows import as_samples
from depthgauge.checkpoints.tasks.language import continue_greedily
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.results.shrink_record import ExampleRecord
from depthgauge.surgery.calibration import Calibration
from depthgauge.surgery.open_model import OpenedModel

EXAMPLES, PROMPT, NEW = 3, 32, 32
"""The number of examples, and the tokens of each prompt and of each continuation, at most."""


@dataclass(eq=False)
class TextExamples:
    """Continuations by the dense model and by the smaller one, before its recovery and at the end.

    - `opened`: the dense model, a causal language model, with its tokenizer
    - `windows`: the windows of the run; the prompts begin those that select
    """

    opened: OpenedModel
    windows: Calibration
    _unrecovered: Int[Tensor, "rows new"] | None = field(default=None, init=False)

    def observe(self, smaller: Checkpoint) -> None:
        """Let the shrunk model continue the prompts before its recovery."""
        self._unrecovered = self._continued(smaller.model)

    def record(self, model: Any) -> tuple[ExampleRecord, ...]:
        """Return what each model writes; nothing if one of them has no KV cache."""
        made = [self._continued(self.opened.checkpoint.model), self._continued(model)]
        made += [] if self._unrecovered is None else [self._unrecovered]
        if not all(rows.shape[1] for rows in made):
            return ()
        shown = [self._prompts[:, len(self.opened.start.before) :], *made]
        texts = zip(*map(self.opened.tokenizer.batch_decode, shown), strict=True)
        return tuple(ExampleRecord(**dict(zip(ExampleRecord.__struct_fields__, row, strict=False))) for row in texts)

    @property
    def _prompts(self) -> Int[Tensor, "rows prompt"]:
        """The beginnings of selection windows of the text that the result is about."""
        kinds = [source.kind for source in self.windows.record.sources]
        about = torch.tensor([kind == self.windows.guaranteed_kind for kind in kinds])
        select = self.windows.select
        rows = as_samples(select.inputs).main[about[select.source]]
        return rows[:EXAMPLES, : min(PROMPT, rows.shape[1] // 2)]

    def _continued(self, model: Any) -> Int[Tensor, "rows new"]:
        left = self.windows.record.window - self._prompts.shape[1]
        return continue_greedily(replace(self.opened.checkpoint, model=model), self._prompts, min(NEW, left))
