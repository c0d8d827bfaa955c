"""Texts that a language model reads and writes: its start token, whether it can read, its perplexity, its own samples.

`gauge`, `shrink` and `evaluate` take the same decision about the BOS token (beginning of sequence) of a model.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.base.format import number
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.blocks.model_output import (
    WindowBatches,
    batch_size,
    decoded,
    model_output,
    require_output,
    token_losses,
)
from depthgauge.checkpoints.inputs.text_files import TextFile
from depthgauge.checkpoints.inputs.windows import (
    Windows,
    body_length,
    special_tokens,
    surround,
    tokenize_text,
    too_short,
)
from depthgauge.checkpoints.source.library import CheckpointError, quiet, short
from depthgauge.checkpoints.source.model_class import context_length
from depthgauge.checkpoints.source.model_files import Source, gguf_metadata
from depthgauge.checkpoints.tasks.confidence import mean_interval
from depthgauge.checkpoints.weights.load import Checkpoint, require_rows
from depthgauge.checkpoints.weights.stored_weights import free_memory
from depthgauge.results.evaluate_record import PerplexityRecord
from depthgauge.results.record import finite

# --- Whether windows start with the BOS token -------------------------------------------------------------------------
# A model that was trained with a BOS token must be measured with it: without the token the loss is higher and the first
# token does not attract attention. Tokenizers do not always add it. In particular, transformers ignores the key
# `tokenizer.ggml.add_bos_token` of a GGUF file.
#
# `gauge`, `shrink` and `evaluate` take the same decision about a model, because it is measured on the built-in text.

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


def plan_start(choice: str | None, source: Source | None, tokenizer: Any) -> Start:
    """Decide about the BOS token as far as possible without the weights.

    `choice` is `yes`, `no`, or `auto`, the same as None: what the tokenizer or the GGUF metadata says. If neither adds
    the token, the decision is left to `measure_start`. `source` is None for a model in memory.
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


# --- Check that a causal language model can read its text ------------------------------------------------------------
# A model with a wrong tokenizer loads without an error and predicts almost nothing. Nats per token do not show it,
# because tokenizers have tokens of different lengths. Bits per byte can be compared between tokenizers.

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
    problem = (
        f"{checkpoint.name} cannot read its text: it needs {number(bits)} bits per byte and {number(loss)} nats per "
        f"token, expected at most {MOST_BITS:g} bits per byte and {number(MOST_OF_UNIFORM * uniform)} nats per token "
        f"({100 * MOST_OF_UNIFORM:g} % of the loss of a uniform guess among its {vocabulary:,} tokens)"
    )
    if not force:
        raise UnreadableTextError(
            f"{problem}; the likely cause is a tokenizer that does not belong to the model: give the right one with "
            "--tokenizer DIR, or use --allow unread to go on, for example with an untrained model"
        )
    message(f"{problem}; continuing because of --allow unread")


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


# --- The perplexity of a language model on a text, in windows that do not overlap ------------------------------------
# The protocol: the text is converted to tokens at once and cut into windows of n tokens from its start; the rest is
# left out. Every window is read alone. If windows start with the BOS token, it takes the place of one token. The first
# token of a window is not predicted, so n − 1 tokens are. The perplexity is exp of the mean loss of all predicted
# tokens.

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
        perplexity = PerplexityRecord(
            loss=own.loss,
            perplexity=finite(math.exp(min(own.loss, 700.0))),
            bits_per_byte=own.loss * predicted / math.log(2) / max(1, self.size),
            windows=count,
            tokens=predicted,
            low=own.low,
            high=own.high,
        )
        if first is None or not torch.equal(first.windows.ids, self.windows.ids):
            return perplexity
        pairs = zip(self.losses, first.losses, strict=True)
        more = mean_interval([ours - theirs for ours, theirs in pairs])
        return msgspec.structs.replace(perplexity, increase=more.loss, increase_low=more.low, increase_high=more.high)


def text_windows(tokenizer: Any, text: TextFile, window: int | None, config: Any, start: Start) -> Windows:
    """Cut a text into windows of `window` tokens, by default `WINDOW` or the context of the model if it is shorter."""
    context = context_length(config)
    n = min(WINDOW, context or WINDOW) if window is None else window
    length = body_length(n, context or n, len(start.before))
    tokenized = tokenize_text(tokenizer, text, wanted=1, length=length, seed=0, whole=True)
    bodies = tokenized.bodies(length)
    if not len(bodies):
        raise too_short(tokenized, length, n - length)
    unread = tokenized.tokens - bodies.numel()
    return Windows(surround(bodies, start.before, ()), tokenized.source, tokenized.digest, unread=unread)


@torch.no_grad()
def perplexity_losses(checkpoint: Checkpoint, tokenizer: Any, windows: Windows, progress: Step) -> WindowLosses:
    """Measure the mean loss of every window, in nats per predicted token."""
    ids = windows.ids
    require_rows(checkpoint, [ids])
    batches = WindowBatches(batch_size(checkpoint.model, ids.shape[1], loss=True))

    def measure(these: slice) -> Tensor:
        progress(these.start, len(ids), f"windows of {windows.source}")
        part = ids[these]
        return token_losses(model_output(checkpoint, part), part).double().mean(dim=1).cpu()

    found = torch.cat(batches.map(measure, len(ids)))
    return WindowLosses(windows, tuple(found.tolist()), _predicted_bytes(tokenizer, ids))


def _predicted_bytes(tokenizer: Any, ids: Int[Tensor, "windows n"]) -> int:
    with quiet():
        return sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in ids)


# --- Sample text from a checkpoint itself, at temperature 1 ----------------------------------------------------------
# Token t of a window is drawn from the model's distribution p(· | x_1 … x_{t−1}) by inversion: with u_t
# uniform in [0, 1),
#
#     x_t = min {v : p(0) + … + p(v) > u_t}.
#
# All u_t are drawn before the first forward pass. A window therefore depends on the number of windows that are decoded
# together only through the rounding of the logits. That number is fixed, unless memory is short, so that the same seed
# gives the same windows on the same device.

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


@torch.no_grad()
def continue_greedily(
    checkpoint: Checkpoint, prompts: Int[Tensor, "rows prompt"], tokens: int
) -> Int[Tensor, "rows new"]:
    """Return the most likely next token after each prompt, and after that, `tokens` times; none without a KV cache."""
    fed, made = prompts.to(checkpoint.device), [prompts[:, :0]]
    cache: Mapping[str, Any] = {}
    with quiet():
        for _ in range(tokens):
            try:
                out, cache = decoded(checkpoint.model, fed, cache)
            except (AttributeError, LookupError, TypeError, ValueError):  # its cache is of another kind
                cache = {}
            if not cache or out.logits.shape[:2] != fed.shape:
                return made[0]
            fed = out.logits[:, -1:].argmax(dim=-1).to(checkpoint.device)
            made.append(fed.cpu())
    return torch.cat(made, dim=1)


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
    ids: set[int] = set()
    for config in (checkpoint.config, getattr(checkpoint.model, "generation_config", None)):
        value = getattr(config, name, None)
        if value is not None:
            ids |= set(value) if isinstance(value, Iterable) else {int(value)}
    return ids


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
