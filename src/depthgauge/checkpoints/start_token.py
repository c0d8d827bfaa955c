"""Decide whether the windows of a text start with the model's BOS token (beginning of sequence).

A model that was trained with a BOS token must be measured with it: without the token the loss is higher and the first
token does not attract attention. Tokenizers do not always add it. In particular, transformers ignores the key
`tokenizer.ggml.add_bos_token` of a GGUF file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import counted, number
from depthgauge.checkpoints.load import Checkpoint, context_length
from depthgauge.checkpoints.source import Source, gguf_metadata
from depthgauge.checkpoints.what_if import cross_entropy
from depthgauge.checkpoints.windows import special_tokens
from depthgauge.errors import InputError

MEASURED_WINDOWS = 3
"""How many windows are measured with and without the BOS token."""


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
def measure_start(
    start: Start, checkpoint: Checkpoint, bodies: Sequence[Int[Tensor, " n"]], least: float = 0.0
) -> Start:
    """Measure the loss with and without the BOS token where that is undecided, and choose the smaller one.

    The token is added if it lowers the loss by more than `least`, in nats per token.
    Both losses are means over the same predicted tokens: those after the first token of each body, which is a window
    without special tokens. Bodies are shortened so that they fit the context with the token. Models without a loss are
    left without the token.
    """
    if start.candidate is None or checkpoint.objective != "loss":
        return replace(start, candidate=None)
    longest = context_length(checkpoint.config)
    room = None if longest is None else max(0, longest - 1 - len(start.before) - len(start.after))
    bodies = [body[:room] for body in bodies[:MEASURED_WINDOWS] if len(body[:room]) > 1]
    if not bodies:
        return start.decided(start.candidate, False, "the windows are too short to measure which is better")
    losses: dict[bool, list[float]] = {True: [], False: []}
    for body in bodies:
        for bos in losses:
            prefix = [*([start.candidate] if bos else []), *start.before]
            ids = torch.tensor([[*prefix, *body.tolist(), *start.after]])
            logits = checkpoint.model(input_ids=ids.to(checkpoint.device)).logits
            losses[bos].append(cross_entropy(logits[:, len(prefix) :], ids[:, len(prefix) :]))
    added, bare = (sum(losses[bos]) / len(losses[bos]) for bos in (True, False))
    reason = f"measured on {counted(len(bodies), 'window')}: loss {number(added)} with it and {number(bare)} without it"
    return start.decided(start.candidate, added < bare - least, reason)
