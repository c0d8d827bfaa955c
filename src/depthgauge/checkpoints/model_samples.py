"""Sample text from a checkpoint itself, at temperature 1.

Token t of a window is drawn from the model's distribution p(· | x_1 … x_{t−1}) by inversion: with u_t
uniform in [0, 1),

    x_t = min {v : p(0) + … + p(v) > u_t}.

All u_t are drawn before the first forward pass. A window therefore depends on the number of windows that are decoded
together only through the rounding of the logits. That number is fixed, unless memory is short, so that the same seed
gives the same windows on the same device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.library import CheckpointError, quiet, short
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.memory import free_memory
from depthgauge.checkpoints.model_output import decoded
from depthgauge.checkpoints.windows import surround

MEMORY_SHARE = 0.25
"""The share of the free memory that the KV cache and the logits of one batch may take."""
MOST_ROWS = 1024
"""The number of windows that are decoded together; it is halved until they fit into memory."""


def sample_windows(
    checkpoint: Checkpoint,
    *,
    windows: int,
    window: int,
    before: Sequence[int],
    seed: int,
    starts: Sequence[int] | None = None,
    prompts: Int[Tensor, "windows prompt"] | None = None,
    batch: int | None = None,
    progress: Step = silent,
) -> Int[Tensor, "windows n"]:
    """Sample windows of text from a causal language model at temperature 1, with its KV cache.

    A window is `before`, one token drawn uniformly from `starts` or a row of `prompts`, and the model's own
    continuation. It does not end at an EOS token: the model continues after it. The padding token is never drawn,
    unless it is also a BOS or EOS token.
    The same seed gives the same windows on the same device.

    Args:
        checkpoint: the dense model.
        windows: number of windows.
        window: n, tokens per window, `before` included.
        before: token ids at the start of every window, usually the BOS token; may be empty.
        seed: chooses all random numbers.
        starts: token ids; by default all that the model's configuration does not name as special tokens.
        prompts: token ids with which each window continues after `before`, instead of a token of `starts`.
        batch: the most windows that are decoded together; by default as many as fit into memory (`fitting_rows`).
        progress: called after every decoded position.

    Raises:
        CheckpointError: The model has no KV cache, or its logits are not finite.
    """
    vocabulary = int(checkpoint.config.vocab_size)
    uniform = torch.rand(
        windows, window - len(before), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    if prompts is None:
        candidates = torch.tensor(_ordinary(checkpoint, vocabulary) if starts is None else list(starts))
        prompts = candidates[(uniform[:, :1] * len(candidates)).long()]
    given, uniform = surround(prompts, before, ()), uniform[:, prompts.shape[1] :]
    rows = even_rows(windows, batch or fitting_rows(checkpoint, window, _free(checkpoint)))
    allowed = _allowed(checkpoint, vocabulary)
    done, total = 0, -(-windows // rows) * uniform.shape[1]
    made = []
    for first in range(0, windows, rows):
        label = f"sample windows {first + 1}–{min(first + rows, windows)} of {windows}"

        def advance(label: str = label) -> None:
            nonlocal done
            done += 1
            progress(done, total, label)

        part = slice(first, first + rows)
        made.append(_continue(checkpoint, given[part], uniform[part], allowed, advance))
    return torch.cat(made)


def ordinary_tokens(checkpoint: Checkpoint, tokenizer: Any) -> list[int]:
    """Return the token ids that the tokenizer can produce from text: those that are not special tokens."""
    special = set(tokenizer.all_special_ids)
    special |= {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = min(int(checkpoint.config.vocab_size), len(tokenizer))  # the model's is often padded
    return [index for index in _ordinary(checkpoint, known) if index not in special]


def even_rows(windows: int, most: int) -> int:
    """Return the rows per batch for the fewest batches of at most `most` rows, made as equal as possible.

    >>> even_rows(100, 64), even_rows(100, 256), even_rows(96, 32)
    (50, 100, 32)
    """
    batches = -(-windows // max(1, most))
    return -(-windows // batches)


@torch.no_grad()
def _continue(
    checkpoint: Checkpoint,
    prompts: Int[Tensor, "rows prompt"],
    uniform: Float[Tensor, "rows drawn"],
    allowed: Int[Tensor, " tokens"] | None,
    advance: Callable[[], None],
) -> Int[Tensor, "rows n"]:
    """Decode one batch. Column t of `uniform` decides the token at position prompt + t of every row."""
    fed = prompts.to(checkpoint.device)
    cache: Mapping[str, Any] = {}
    made, finite = [fed], []
    with quiet():
        for column in uniform.unbind(dim=1):
            try:
                out, cache = decoded(checkpoint.model, fed, cache)
                reason = f"{type(checkpoint.model).__name__} returns no KV cache"
            except (AttributeError, LookupError, TypeError, ValueError) as error:  # its cache is of another kind
                cache, reason = {}, short(error)
            if not cache:
                raise CheckpointError(
                    f"{checkpoint.name} cannot be sampled: {reason}; give a text with --text and use --sampled 0"
                )
            if out.logits.shape[:2] != fed.shape:  # RWKV, whose states of several rows are broadcast
                raise CheckpointError(
                    f"{checkpoint.name} cannot be sampled: with its cache, {type(checkpoint.model).__name__} returns "
                    f"logits for {list(out.logits.shape[:2])} instead of {list(fed.shape)} windows and tokens; give a "
                    "text with --text and use --sampled 0"
                )
            if allowed is not None:
                allowed = allowed.to(out.logits.device)
            drawn, is_finite = draw(out.logits[:, -1], column, allowed)
            finite.append(is_finite)
            fed = drawn[:, None].to(checkpoint.device)
            made.append(fed)
            advance()
    if finite and not torch.stack(finite).all():
        dtype = str(next(checkpoint.model.parameters()).dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{checkpoint.name} cannot be sampled in {dtype}: its logits are not finite; use another --dtype, such as "
            "bfloat16 or float32"
        )
    return torch.cat(made, dim=1).cpu()


def draw(
    logits: Float[Tensor, "rows vocabulary"],
    uniform: Float[Tensor, " rows"],
    allowed: Int[Tensor, " tokens"] | None = None,
) -> tuple[Int[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """Draw one token per row from softmax(logits) by inversion: min {v : p(0) + … + p(v) > u} for u in [0, 1).

    Only the token ids `allowed`, in increasing order, are drawn; None means all. The second result says whether the
    probabilities of each row are finite.
    """
    if allowed is not None:
        logits = logits[:, allowed]
    cumulative = logits.float().softmax(dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1:]  # 1 up to rounding
    level = uniform.to(total)[:, None] * total
    found = torch.searchsorted(cumulative, level, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return found if allowed is None else allowed[found], total[:, 0].isfinite()


def _ids(checkpoint: Checkpoint, name: str) -> set[int]:
    """Return the token ids under one name in the configuration and the generation configuration."""
    found: set[int] = set()
    for config in (checkpoint.config, getattr(checkpoint.model, "generation_config", None)):
        value = getattr(config, name, None)
        if value is not None:
            found |= set(value) if isinstance(value, Iterable) else {int(value)}
    return found


def _ordinary(checkpoint: Checkpoint, vocabulary: int) -> list[int]:
    """Return the token ids below `vocabulary` that the configuration does not name as special."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
    special = set().union(*(_ids(checkpoint, name) for name in names))
    return [index for index in range(vocabulary) if index not in special]


def _allowed(checkpoint: Checkpoint, vocabulary: int) -> Int[Tensor, " tokens"] | None:
    """Return the token ids that may be drawn, all except the padding token; None if there is none to exclude."""
    text = _ids(checkpoint, "bos_token_id") | _ids(checkpoint, "eos_token_id")
    padding = {index for index in _ids(checkpoint, "pad_token_id") - text if 0 <= index < vocabulary}
    if not padding:
        return None
    return torch.tensor([index for index in range(vocabulary) if index not in padding])


def _free(checkpoint: Checkpoint) -> int:
    devices = {parameter.device for parameter in checkpoint.model.parameters() if parameter.device.type != "meta"}
    return min(free_memory(device) for device in devices | {checkpoint.device})


def fitting_rows(checkpoint: Checkpoint, window: int, free: int) -> int:
    """Return `MOST_ROWS`, halved until the KV cache and the logits fit into `MEMORY_SHARE` of the free bytes.

    The result is not the largest number that fits, because it must not depend on small changes of the free memory.
    """
    config, width = checkpoint.config, next(checkpoint.model.parameters()).dtype.itemsize
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, checkpoint.heads)
    cache = 2 * checkpoint.layers * checkpoint.kv_heads * head_dim * window * width
    # Logits, float32 probabilities and their float64 sums, twice.
    logits = int(config.vocab_size) * (2 * width + 2 * 4 + 2 * 8)
    rows = MOST_ROWS
    while rows > 1 and rows * (cache + logits) > MEMORY_SHARE * free:
        rows //= 2
    return rows
