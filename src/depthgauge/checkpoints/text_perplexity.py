"""The perplexity of a language model on a text, in windows that do not overlap.

The protocol: the text is converted to tokens at once and cut into windows of n tokens from its start; the rest is left
out. Every window is read alone. If windows start with the BOS token, it takes the place of one token. The first token
of a window is not predicted, so n − 1 tokens are. The perplexity is exp of the mean loss of all predicted tokens.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.format import counted, duration
from depthgauge.base.progress import Step
from depthgauge.checkpoints.inputs.text_files import TextFile
from depthgauge.checkpoints.layers import batch_size
from depthgauge.checkpoints.library import quiet
from depthgauge.checkpoints.load import Checkpoint, context_length
from depthgauge.checkpoints.mean_interval import mean_interval
from depthgauge.checkpoints.model_output import model_output, token_losses
from depthgauge.checkpoints.start_token import Start
from depthgauge.checkpoints.window_batches import WindowBatches
from depthgauge.checkpoints.windows import Windows, body_length, require_rows, surround, tokenize_text, too_short
from depthgauge.results.evaluate_record import PerplexityRecord
from depthgauge.results.record import finite

WINDOW = 2048
"""Tokens per window by default, as in most published tables."""


@dataclass(frozen=True, eq=False, repr=False)
class WindowLosses(ArrayRecord):
    """The windows of a text, the mean loss of each, and the bytes of the text that was predicted."""

    windows: Windows
    losses: tuple[float, ...]
    size: int

    def record(self, first: "WindowLosses | None") -> PerplexityRecord:
        """Return the perplexity, and the increase of the loss over that of the first model on the same windows."""
        count, n = self.windows.ids.shape
        predicted, own = count * (n - 1), mean_interval(self.losses)
        found = PerplexityRecord(
            loss=own.loss,
            perplexity=finite(math.exp(min(own.loss, 700.0))),
            bits_per_byte=own.loss * predicted / math.log(2) / max(1, self.size),
            windows=count,
            tokens=predicted,
            low=own.low,
            high=own.high,
        )
        if first is None or not torch.equal(first.windows.ids, self.windows.ids):
            return found
        pairs = zip(self.losses, first.losses, strict=True)
        more = mean_interval([ours - theirs for ours, theirs in pairs])
        return msgspec.structs.replace(found, increase=more.loss, increase_low=more.low, increase_high=more.high)


def text_windows(tokenizer: Any, text: TextFile, window: int | None, config: Any, start: Start) -> Windows:
    """Cut a text into windows of `window` tokens, by default `WINDOW` or the context of the model if it is shorter."""
    context = context_length(config)
    n = min(WINDOW, context or WINDOW) if window is None else window
    length = body_length(n, context or n, len(start.before))
    found = tokenize_text(tokenizer, text, wanted=1, length=length, seed=0, whole=True)
    bodies = found.bodies(length)
    if not len(bodies):
        raise too_short(found, length, n - length)
    unread = found.tokens - bodies.numel()
    return Windows(surround(bodies, start.before, ()), found.source, found.digest, unread)


@torch.no_grad()
def window_losses(
    checkpoint: Checkpoint, tokenizer: Any, windows: Windows, progress: Step, message: Callable[[str], None]
) -> WindowLosses:
    """Measure the mean loss of every window, in nats per predicted token."""
    ids = windows.ids
    require_rows(checkpoint, [ids])
    batches, started = WindowBatches(batch_size(checkpoint.model, ids.shape[1], loss=True)), time.perf_counter()

    def measure(these: slice) -> Tensor:
        progress(these.start, len(ids), f"windows of {windows.source}")
        part = ids[these]
        losses = token_losses(model_output(checkpoint, part), part).double().mean(dim=1)
        if these.start == 0:
            left = (time.perf_counter() - started) * len(ids) / len(part)
            message(f"about {duration(left)} for {checkpoint.name} on {windows.source}: {counted(len(ids), 'window')}")
        return losses.cpu()

    found = torch.cat(batches.map(measure, len(ids)))
    return WindowLosses(windows, tuple(found.tolist()), _predicted_bytes(tokenizer, ids))


def _predicted_bytes(tokenizer: Any, ids: Int[Tensor, "windows n"]) -> int:
    with quiet():
        return sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in ids)
