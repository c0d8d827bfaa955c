"""What a recovery trains on: windows of the user's texts, and about as many of a general text.

A model that is trained on one kind of text only is good there and worse elsewhere. The general text is a file, a data
set on the hub, or what the dense model writes itself, as a continuation of prefixes from the user's texts and from the
built-in text. No window contains text of the selection and certify windows.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt64
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.base.format import counted
from depthgauge.base.progress import Step, no_message, silent
from depthgauge.checkpoints.blocks.model_output import WindowBatches, batch_size, model_output, token_losses
from depthgauge.checkpoints.inputs.text_files import HubData, TextFile, find_general, hub_documents
from depthgauge.checkpoints.inputs.windows import (
    Inputs,
    chat_text,
    derived_seed,
    drop_repeated,
    surround,
    tokenize_text,
)
from depthgauge.checkpoints.source.library import CheckpointError, quiet
from depthgauge.checkpoints.tasks.language import MOST_ROWS, Start, sample_windows
from depthgauge.checkpoints.weights.load import Checkpoint

# --- Find text that must not be trained on, wherever it starts --------------------------------------------------------
# Runs of r tokens are compared by hash(x_1 … x_r) = Σ_j x_j B^(j−1) mod 2^64. Equal runs have equal hashes, so every
# run of a held window is found. If different runs have equal hashes, a little too much is left out.

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
        hashes = [_hashes(rows.numpy(), run).reshape(-1) for rows in held]
        return cls(run, np.unique(np.concatenate([np.empty(0, np.uint64), *hashes])))

    def cover(self, ids: Int[Tensor, "*rows n"]) -> Bool[Tensor, "*rows n"]:
        """Return whether each token belongs to a run of a held window."""
        if ids.shape[-1] < self.run or not len(self.hashes):
            return torch.zeros(ids.shape, dtype=torch.bool)
        hashes = _hashes(ids.numpy(), self.run)
        place = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        sides = [(0, 0)] * (ids.dim() - 1) + [(self.run, self.run - 1)]
        counts = np.pad(self.hashes[place] == hashes, sides).cumsum(axis=-1, dtype=np.int32)
        # Token i belongs to the runs that start at i − r + 1 … i.
        return torch.from_numpy(counts[..., self.run :] > counts[..., : -self.run])


def _hashes(ids: Int[np.ndarray, "*rows n"], run: int) -> UInt64[np.ndarray, "*rows starts"]:
    """Return the hashes of all runs, one for each start: differences of the sums of x_i B^i, divided by B^start."""
    powers, inverse = (np.cumprod(np.full(ids.shape[-1], base, np.uint64)) for base in (_BASE, pow(_BASE, -1, 2**64)))
    sums = np.pad((ids.astype(np.uint64) * powers).cumsum(axis=-1), [*[(0, 0)] * (ids.ndim - 1), (1, 0)])
    hashes: UInt64[np.ndarray, "*rows starts"] = (sums[..., run:] - sums[..., :-run]) * inverse[: sums.shape[-1] - run]
    return hashes


# --- The windows to train on ------------------------------------------------------------------------------------------

PREFIX_SHARE, LEAST_PREFIX = 8, 8
"""A prefix is one part of this many of a window, and at least this many tokens."""
SAMPLING_SHARE = 5
"""Sampling takes one part of this many of a limited time."""
PIECE_WINDOWS = 8
"""Windows that a piece of a large text gives, at least, if tokens have 8 bytes at most."""
_TOGETHER = {"cpu": 32}
"""Windows that are sampled together if the time is limited; those not finished are lost. On a GPU fewer are not
faster."""
_FENCE = 1.5
"""Tukey's fences: so many interquartile ranges below the first and above the third quartile."""


@dataclass(frozen=True, eq=False, repr=False)
class RecoveryData(ArrayRecord):
    """The windows that a recovery trains on.

    - `windows`: token ids with special tokens; those of the user's texts come first
    - `own`: how many of them are from the user's texts
    - `sources`: description of each source → its number of tokens, special ones not counted; none is counted twice
    """

    windows: Inputs
    own: int
    sources: dict[str, int]

    def order(self, count: int, seed: int) -> Int[Tensor, " count"]:
        """Return the numbers of `count` windows in training order.

        Windows of the user's texts and of the general text alternate, if there are both. Each of the two parts is
        passed through as often as necessary, in a new random order each time.
        """
        generator = torch.Generator().manual_seed(derived_seed(seed, "order"))
        parts = [part for part in torch.arange(len(self.windows)).tensor_split([self.own]) if len(part)]
        each = -(-count // len(parts))
        turns = []
        for part in parts:
            passes = [part[torch.randperm(len(part), generator=generator)] for _ in range(-(-each // len(part)))]
            turns.append(torch.cat(passes)[:each])
        return torch.stack(turns, dim=1).flatten()[:count]


def training_data(
    teacher: Checkpoint,
    tokenizer: Any,
    texts: Sequence[TextFile],
    general: str | None,
    *,
    start: Start,
    window: int,
    wanted: int,
    held: Sequence[Int[Tensor, "_ _"]] = (),
    seed: int = 0,
    seconds: float | None = None,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
) -> RecoveryData:
    """Read the user's texts and the general text, cut them into windows, and leave out what is held or repeated.

    Args:
        teacher: the dense model.
        tokenizer: its tokenizer.
        texts: the user's texts. They are used completely; large ones give `wanted` windows.
        general: a file like those of `--text`, a data set `ORG/NAME@REVISION[:FIELD]` on the hub, `none`, or None for
            the teacher's continuations.
        start: the special tokens around every window.
        window: n, tokens per window.
        wanted: windows that training takes. Half of them are general, or all if there are no texts.
        held: windows with special tokens that may not be trained on.
        seed: chooses the pieces of large texts, the prefixes, and the samples.
        seconds: the limit for the whole recovery; sampling stops after a fifth of it.
        progress: called with the number of sampled windows.
        message: called with a sentence for each thing that differs from the request.

    Raises:
        InputError: A text cannot be read, or no window is left.
    """
    length = window - len(start.before) - len(start.after)
    bare = [rows[:, len(start.before) : rows.shape[1] - len(start.after)] for rows in held]
    cut = _Cut(tokenizer, length, seed, HeldRuns.of(bare, length))
    by_source = {text.name: cut.text(text, wanted) for text in texts}
    own, count = torch.cat([cut.empty, *by_source.values()]), wanted // 2 if texts else wanted
    name, other = str(general), cut.empty
    if (data := find_general(general)) is not None:
        name = data.name
        other = cut.hub(data, count, progress) if isinstance(data, HubData) else cut.text(data, count)
        if not len(other):
            message(f"{name} has no window of {window} tokens beyond the user's texts; the texts alone are used")
    elif general is None and teacher.objective != "loss":
        message(f"{teacher.name} is not a causal language model and writes no general text; the texts alone are used")
    elif general is None and len(prompts := surround(_prefixes(cut, own, count), start.before, ())):
        name = f"continued by {teacher.name}"
        try:
            rows = _sampled(teacher, prompts, window - len(start.after), seed, seconds, progress, message)
            if len(rows):
                other = cut.fresh(_usual(teacher, rows, prompts.shape[1])[:, len(start.before) :])
        except CheckpointError as error:
            message(f"the texts alone are used: {str(error).partition(';')[0]}")
    if len(other):
        by_source[name] = torch.cat([by_source.get(name, cut.empty), other])
    bodies = torch.cat([own, other])
    if not len(bodies):
        raise InputError(
            f"there is no window of {window} tokens to train on, beyond those that select and certify; give a longer "
            "text with --text, or a general text"
        )
    sources = {name: rows.numel() for name, rows in by_source.items()}
    return RecoveryData(surround(bodies, start.before, start.after), len(own), sources)


@dataclass(frozen=True)
class _Cut:
    """Cuts texts into windows of `length` tokens, without special tokens; none repeats another or what is held.

    `seen` are the contents of all windows so far.
    """

    tokenizer: Any
    length: int
    seed: int
    held: HeldRuns
    seen: set[bytes] = field(default_factory=set)

    @property
    def empty(self) -> Int[Tensor, "0 length"]:
        """No windows."""
        return torch.empty(0, self.length, dtype=torch.int64)

    def text(self, text: TextFile, wanted: int) -> Int[Tensor, "windows length"]:
        """Cut a text; of a large one, read enough for the windows that are wanted."""
        for windows_each in (PIECE_WINDOWS, 1):
            pieces = -(-wanted // windows_each)
            read = tokenize_text(self.tokenizer, text, wanted=pieces, length=self.length, seed=self.seed)
            if read.complete or read.tokens >= wanted * self.length:
                break
        return self.joined(read.pieces)

    def hub(self, data: HubData, wanted: int, progress: Step) -> Int[Tensor, "windows length"]:
        """Cut the first documents of a data set."""
        ids: list[int] = []
        with quiet(), closing(hub_documents(data, partial(chat_text, self.tokenizer))) as documents:
            for document in documents:
                ids += self.tokenizer(document, add_special_tokens=False)["input_ids"]
                progress(min(len(ids) // self.length, wanted), wanted, f"read windows of {data.name}")
                if len(ids) >= wanted * self.length:
                    break
        return self.joined([torch.tensor(ids, dtype=torch.int64)])

    def joined(self, pieces: Iterable[Int[Tensor, " _"]]) -> Int[Tensor, "windows length"]:
        """Remove from each piece what is held, join what is left, and cut it."""
        rows = [self.empty]
        for piece in pieces:
            kept = piece[~self.held.cover(piece)]
            rows.append(kept[: len(kept) // self.length * self.length].view(-1, self.length))
        return self.fresh(torch.cat(rows))

    def fresh(self, windows: Int[Tensor, "windows length"]) -> Int[Tensor, "kept length"]:
        """Leave out windows that repeat others, or that contain what is held."""
        return drop_repeated(windows[~self.held.cover(windows).any(dim=1)], self.seen, self.length)


def _prefixes(cut: _Cut, own: Int[Tensor, "windows length"], count: int) -> Int[Tensor, "prefixes size"]:
    """Draw prefixes at random places, half of them from the built-in text and the rest from the user's texts.

    No place is used twice. Nothing held is used: where the built-in text is held, the user's texts give more prefixes.
    """
    size = max(1, min(max(LEAST_PREFIX, cut.length // PREFIX_SHARE), cut.length - 1))
    draw = torch.Generator().manual_seed(derived_seed(cut.seed, "prefixes"))
    built_in = tokenize_text(cut.tokenizer, None, wanted=1, length=cut.length, seed=cut.seed).pieces[0]
    built_in = built_in[~cut.held.cover(built_in)]
    made = built_in.new_empty(0, size)
    for rows, wanted in ((built_in[None], count // 2 if len(own) else count), (own, count)):
        if rows.shape[1] >= size:
            runs = rows.unfold(1, size, 1)
            places = torch.randperm(runs.shape[0] * runs.shape[1], generator=draw)[: wanted - len(made)]
            made = torch.cat([made, runs[places // runs.shape[1], places % runs.shape[1]]])
    return made[torch.randperm(len(made), generator=draw)]


class _TimeOverError(Exception):
    """Sampling has taken its part of a limited time."""


def _sampled(
    teacher: Checkpoint,
    prompts: Int[Tensor, "windows prompt"],
    window: int,
    seed: int,
    seconds: float | None,
    progress: Step,
    message: Callable[[str], None],
) -> Int[Tensor, "made n"]:
    """Let the teacher continue the prompts to windows, a few at a time, until a part of the `seconds` is over."""
    count, made, begun = len(prompts), [prompts.new_empty(0, window)], time.perf_counter()
    block = _TOGETHER.get(teacher.device.type, MOST_ROWS)

    def advance(done: int, total: int, label: str) -> None:
        if seconds is None:
            progress(first + len(part) * done // total, count, "sample general windows")
            return
        passed, limit = time.perf_counter() - begun, seconds / SAMPLING_SHARE
        progress(min(int(passed), int(limit)), int(limit), "sample general windows, seconds")
        if done < total and passed > limit:
            raise _TimeOverError

    try:
        for first in range(0, count, block):
            part, own_seed = prompts[first : first + block], derived_seed(seed, f"general {first}")
            given: Any = {"windows": len(part), "window": window, "before": (), "prompts": part, "seed": own_seed}
            made.append(sample_windows(teacher, **given, progress=advance))
    except _TimeOverError:
        then = "each is used more often" if first else "the texts alone are used"
        message(
            f"{counted(first, 'window')} of {count} were sampled from {teacher.name} in 1/{SAMPLING_SHARE} of the "
            f"time; {then}; a text given with --general takes no such time"
        )
    return torch.cat(made)


@torch.no_grad()
def _usual(teacher: Checkpoint, windows: Int[Tensor, "windows n"], prompt: int) -> Int[Tensor, "kept n"]:
    """Drop windows whose loss after the prompt is an outlier by Tukey's fences: repetitions are low, junk is high."""

    def measure(these: slice) -> Float[Tensor, " batch"]:
        rows = windows[these]
        return token_losses(model_output(teacher, rows), rows)[:, prompt - 1 :].double().mean(dim=1).cpu()

    losses = torch.cat(WindowBatches(batch_size(teacher.model, windows.shape[1], True)).map(measure, len(windows)))
    low, high = torch.quantile(losses, losses.new_tensor([0.25, 0.75]))
    reach = _FENCE * (high - low)
    return windows[(losses >= low - reach) & (losses <= high + reach)]
