"""Decide whether windows of text, and the items of tasks, start with the model's BOS token (beginning of sequence).

A model that was trained with a BOS token must be measured with it: without the token the loss is higher and the first
token does not attract attention. Tokenizers do not always add it. In particular, transformers ignores the key
`tokenizer.ggml.add_bos_token` of a GGUF file.

`gauge`, `shrink` and `evaluate` take the same decision about a model, because it is measured on the built-in text.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.base.format import number
from depthgauge.checkpoints.layers import batch_size
from depthgauge.checkpoints.load import Checkpoint, context_length
from depthgauge.checkpoints.model_output import model_output, token_losses
from depthgauge.checkpoints.source import Source, gguf_metadata
from depthgauge.checkpoints.window_batches import WindowBatches
from depthgauge.checkpoints.windows import require_rows, special_tokens, surround, tokenize_text

MEASURED_WINDOWS, MEASURED_LENGTH = 8, 128
"""How many windows of the built-in text are measured with and without the BOS token, and their tokens."""


@dataclass(frozen=True)
class Start:
    """The special tokens around every window, and the decision about the BOS token.

    - `before`, `after`: token ids added to every window
    - `bos`: whether `before` contains the BOS token; None if the model has none
    - `reason`: why, as a sentence
    - `candidate`: the BOS token, while it is not decided whether to add it; otherwise None
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    bos: bool | None
    reason: str
    candidate: int | None = None

    def decided(self, token: int, bos: bool, reason: str) -> "Start":
        """Return the decision to add the BOS token, or not to add it."""
        before = (token, *self.before) if bos else tuple(one for one in self.before if one != token)
        return Start(before, self.after, bos, reason)


def plan_start(choice: str, source: Source | None, tokenizer: Any) -> Start:
    """Decide about the BOS token as far as possible without the weights.

    `choice` is `yes`, `no`, or `auto`: what the tokenizer or the GGUF metadata says. If neither adds the token, the
    decision is left to `measure_start`. `source` is None for a model in memory.
    """
    before, after = special_tokens(tokenizer)
    start = Start(tuple(before), tuple(after), None, "the model has no BOS token")
    metadata, token = gguf_metadata(source), tokenizer.bos_token_id
    token = metadata.get("tokenizer.ggml.bos_token_id") if token is None else token
    if token is None:
        if choice == "yes":
            name = "the model" if source is None else source.target
            raise InputError(f"--bos yes needs a BOS token; the tokenizer of {name} has none; use --bos auto")
        return start
    if choice == "no":
        return start.decided(token, False, "--bos no")
    if token in before:
        return replace(start, bos=True, reason="the tokenizer adds it")
    if choice == "yes":
        return start.decided(token, True, "--bos yes")
    if metadata.get("tokenizer.ggml.add_bos_token"):
        return start.decided(token, True, "the GGUF metadata requests it (tokenizer.ggml.add_bos_token)")
    return replace(start, bos=False, reason="the tokenizer does not add it", candidate=int(token))


@torch.no_grad()
def measure_start(start: Start, checkpoint: Checkpoint, tokenizer: Any) -> Start:
    """Measure the loss with and without the BOS token where that is undecided.

    The tokenizer does not add the token then. It is added if this lowers the loss by more than the standard error of
    the difference, and if the losses differ in what is printed. Both are means over the same predicted tokens: those
    after the first token of each window of the built-in text. Models without a loss are left without the token.
    """
    if start.candidate is None or checkpoint.objective != "loss":
        return replace(start, candidate=None)
    longest = (context_length(checkpoint.config) or math.inf) - 1 - len(start.before) - len(start.after)
    length = int(min(MEASURED_LENGTH, longest))
    text = tokenize_text(tokenizer, None, wanted=1, length=MEASURED_LENGTH, seed=0).pieces[0]
    count = min(MEASURED_WINDOWS, len(text) // 2 // max(2, length))  # `shrink` evaluates the second half
    if length < 2 or count < 2:
        return start.decided(start.candidate, False, "windows are too short to measure which is better")
    bodies = text[: count * length].view(count, length)
    require_rows(checkpoint, [bodies, torch.tensor([start.candidate])])

    def losses(*before: int) -> Tensor:
        ids = surround(bodies, before, start.after)
        batches = WindowBatches(batch_size(checkpoint.model, ids.shape[1], loss=True))
        found = batches.map(lambda these: token_losses(model_output(checkpoint, ids[these]), ids[these]).cpu(), count)
        return torch.cat(found)[:, len(before) :].double().mean(dim=1)

    added, bare = losses(start.candidate, *start.before), losses(*start.before)
    gains, means = bare - added, [f"{float(one.mean()):.4f}" for one in (added, bare)]
    gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(count)
    is_tie = abs(gain) <= error or means[0] == means[1]
    reason = (
        f"measured on {count} windows of the built-in text: loss {means[0]} with it and {means[1]} without it, a "
        f"difference of {abs(gain):.4f} ± {number(error, 2)}{'; a tie, so as the tokenizer does' if is_tie else ''}"
    )
    return start.decided(start.candidate, gain > 0 and not is_tie, reason)
