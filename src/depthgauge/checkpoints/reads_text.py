"""Check that a causal language model can read its text.

A model with a wrong tokenizer loads without an error and predicts almost nothing. Nats per token do not show it,
because tokenizers have tokens of different lengths. Bits per byte can be compared between tokenizers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.format import number
from depthgauge.checkpoints.library import CheckpointError, quiet
from depthgauge.checkpoints.load import Checkpoint, context_length
from depthgauge.checkpoints.model_output import model_output, require_output, token_losses
from depthgauge.checkpoints.start_token import Start, measure_start
from depthgauge.checkpoints.windows import Windows, require_rows

MOST_BITS = 2.5
"""The most bits per byte. Language models need about 1 for text that they know, gzip 2.4 to 3.3 for English texts."""
MOST_OF_UNIFORM = 0.7
"""The largest loss, as a share of ln(vocabulary), which is the loss of the uniform distribution."""
LEAST_WINDOW = 32
"""Shorter windows have too little context to tell: SmolLM2 needs up to 2.2 bits per byte in windows of 16 tokens."""
MOST_TOKENS = 1024
"""Windows are measured until they have this many tokens."""


class UnreadableTextError(CheckpointError):
    """A language model predicts its text hardly better than chance, usually because of a wrong tokenizer."""


def require_readable(
    checkpoint: Checkpoint,
    tokenizer: Any,
    start: Start,
    bodies: Sequence[Int[Tensor, " _"]],
    force: bool,
    message: Callable[[str], None],
) -> None:
    """Raise `UnreadableTextError` if a causal language model cannot read its text; with `force`, only say so.

    `start` has the special tokens around the windows, and `bodies` are the windows without them. The first ones are
    measured, unless they are shorter than `LEAST_WINDOW`.
    """
    if checkpoint.objective != "loss" or len(bodies[0]) < LEAST_WINDOW:
        return
    loss, bits, vocabulary = reading_loss(checkpoint, tokenizer, start, bodies)
    uniform = math.log(vocabulary)
    if bits <= MOST_BITS and loss <= MOST_OF_UNIFORM * uniform:
        return
    found = (
        f"{checkpoint.name} cannot read its text: it needs {number(bits)} bits per byte and {number(loss)} nats per "
        f"token, expected at most {MOST_BITS:g} bits per byte and {number(MOST_OF_UNIFORM * uniform)} nats per token "
        f"({100 * MOST_OF_UNIFORM:g} % of the loss of a uniform guess among its {vocabulary:,} tokens)"
    )
    if not force:
        raise UnreadableTextError(
            f"{found}; the likely cause is a tokenizer that does not belong to the model: give the right one with "
            "--tokenizer DIR, or use --allow unread to go on, for example with an untrained model"
        )
    message(f"{found}; continuing because of --allow unread")


def started_windows(
    checkpoint: Checkpoint,
    windows: Windows,
    start: Start,
    tokenizer: Any,
    force: bool,
    message: Callable[[str], None],
) -> tuple[Windows, Start]:
    """Decide about the BOS token, add it if it helps, and check that the model can read the text."""
    require_rows(checkpoint, [windows.ids, torch.tensor([start.candidate or 0])])
    require_output(checkpoint, windows.ids)
    n = windows.ids.shape[1]
    bodies = list(windows.ids[:, len(start.before) : n - len(start.after)])
    decided = measure_start(start, checkpoint, tokenizer)
    require_readable(checkpoint, tokenizer, decided, bodies, force, message)
    if decided.before != start.before:
        windows = windows.with_first(decided.before[0], len(start.after))
    return windows, decided


@torch.no_grad()
def reading_loss(
    checkpoint: Checkpoint, tokenizer: Any, start: Start, bodies: Sequence[Int[Tensor, " _"]]
) -> tuple[float, float, int]:
    """Return nats per token and bits per byte on the first windows, and the size of the vocabulary.

    Bits per byte are Σ −log₂ p(token) / (bytes of the text), where the text is what the predicted tokens decode to.
    """
    room = (context_length(checkpoint.config) or math.inf) - len(start.before) - len(start.after)
    nats, tokens, size, vocabulary = 0.0, 0, 0, 0
    for body in bodies:
        if tokens >= MOST_TOKENS:
            break
        text = body.tolist()[: int(min(room, len(body)))]
        ids = torch.tensor([[*start.before, *text, *start.after]])
        first = max(1, len(start.before))  # without special tokens, the first token is not predicted
        predicted = slice(first, ids.shape[1] - len(start.after))
        logits = model_output(checkpoint, ids)
        losses = token_losses(logits, ids)[0, predicted.start - 1 : predicted.stop - 1]
        with quiet():
            decoded = tokenizer.decode(ids[0, predicted].tolist())
        nats, tokens, size = nats + float(losses.sum()), tokens + len(losses), size + len(decoded.encode())
        vocabulary = logits.shape[-1]
    return nats / max(1, tokens), nats / math.log(2) / max(1, size), max(1, vocabulary)
