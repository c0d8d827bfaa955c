"""Windows of text for a shrink, in three disjoint parts: to fit the repair, to select the plan, to certify the result.

The windows come from the user's texts and from the dense model itself. A model that is calibrated on one kind of text
only is good there and bad elsewhere. The built-in text is an additional check: what is evaluated of it in the certify
part is used nowhere else.

Every content occurs once: a window whose content has occurred before is dropped, so that no part contains a window of
another part, even if a text repeats itself or two files are equal.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.base.format import counted
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.inputs.text_files import TextFile
from depthgauge.checkpoints.inputs.windows import (
    Inputs,
    TokenizedText,
    Windows,
    as_samples,
    body_length,
    derived_seed,
    drop_repeated,
    longer_text,
    surround,
    tokenize_text,
)
from depthgauge.checkpoints.tasks.language import Start, ordinary_tokens, sample_windows
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.results.labels import GIVEN
from depthgauge.results.shrink_record import CalibrationRecord, SourceRecord

# --- Read the texts of a shrink and cut them into windows, before the special tokens are known -----------------------
# Whether windows start with the BOS token is measured when the weights are loaded, on the start of the built-in text.
# The windows are therefore cut first and get their special tokens afterwards. If the BOS token is added, the last token
# of every window makes room for it. Windows are then compared without their last token, so that they are different in
# both cases.

PARTS = ("fit", "select", "certify")
SHOWN_WINDOWS = 24
"""The most sampled windows in the certify part where the guarantee is about the user's text."""
SHOWN_SHARE = 5
"""One sampled window for this many certify windows of text, at most `SHOWN_WINDOWS`."""
LEAST_BODY = 8
"""The shortest window, without special tokens, that is recommended or used for a short text."""
_REREADS = (1, 4, 16)
"""How much of a large text is read while its windows repeat, as multiples of what is needed."""
_READ = 3
"""Windows on which it is checked that the model can read the text."""


@dataclass(frozen=True)
class CalibrationSizes:
    """Numbers of windows in the three parts."""

    fit: int
    select: int
    certify: int

    @property
    def total(self) -> int:
        """The number of windows in all parts."""
        return self.fit + self.select + self.certify

    def cut(self, windows: Int[Tensor, "windows ..."]) -> list[Int[Tensor, "_ ..."]]:
        """Return the first `fit`, the next `select` and the next `certify` windows."""
        ends = accumulate((self.fit, self.select, self.certify), initial=0)
        return [windows[first:last] for first, last in pairwise(ends)]


@dataclass(frozen=True)
class CalibrationRequest:
    """Which windows a shrink needs.

    - `texts`, `sizes`: the user's texts, and the number of windows in each part
    - `sampled`: share of sampled windows, from 0 to 1; not used for a model that cannot be sampled
    - `window`: n, tokens per window, special tokens included
    - `context`: the longest window the model accepts, or None if unknown
    - `start`: the special tokens; it may be undecided whether the BOS token is one of them
    - `seed`: the same seed gives the same split and, on the same device, the same samples
    - `decoder`: whether the model is a causal language model, which can be sampled

    Raises:
        InputError: there are too few windows for all texts.
    """

    texts: tuple[TextFile, ...]
    sizes: CalibrationSizes
    sampled: float
    window: int
    context: int | None
    start: Start
    seed: int
    decoder: bool

    def __post_init__(self) -> None:
        sampled = self.sampled if self.decoder else 0
        mixed = len(self.texts) * (sampled < 1) + (sampled > 0)
        for part, least in zip(PARTS, (mixed, mixed, len(self.texts)), strict=True):
            if getattr(self.sizes, part) < least:
                found = f"{counted(len(self.texts), 'text')}, and this --effort has {getattr(self.sizes, part)} windows"
                raise InputError(f"{found} to {part}, of which each needs one; give fewer texts, or a higher --effort")

    @property
    def around(self) -> int:
        """The number of special tokens per window that are decided."""
        return len(self.start.before) + len(self.start.after)

    @property
    def spare(self) -> int:
        """The number of tokens at the end of a window that may have to make room for the BOS token."""
        return int(self.decoder and self.start.candidate is not None)

    @property
    def samples(self) -> CalibrationSizes:
        """The number of sampled windows in each part."""
        if not self.decoder or self.sampled == 0:
            return CalibrationSizes(0, 0, 0)
        if not self.texts:
            return self.sizes
        shown = min(SHOWN_WINDOWS, -(-self.sizes.certify // SHOWN_SHARE))
        return CalibrationSizes(self._sampled_of(self.sizes.fit), self._sampled_of(self.sizes.select), shown)

    def _sampled_of(self, windows: int) -> int:
        """Return how many of these windows are sampled: one at least, and one at least of each text, if not 0 or 1."""
        if not self.decoder:
            return 0
        if self.sampled in (0, 1):
            return int(self.sampled * windows)
        return min(max(1, round(self.sampled * windows)), windows - len(self.texts))

    def of_text(self, index: int) -> CalibrationSizes:
        """Return the number of windows of a text in each part; the first texts get the remainder of the division."""
        count = len(self.texts)
        fit, select = (windows - self._sampled_of(windows) for windows in (self.sizes.fit, self.sizes.select))
        return CalibrationSizes(*((all_ + count - 1 - index) // count for all_ in (fit, select, self.sizes.certify)))


@dataclass(frozen=True, eq=False, repr=False)
class CutSource(ArrayRecord):
    """The windows of one source, those of a text without special tokens.

    - `kind`: the user's `text`, `sampled` from the dense model, or the `built-in` text
    - `name`: name of the text, or a description
    - `digest`: SHA-256 of the bytes that were read, or of the sampled token ids
    - `parts`: token ids of the windows in each part
    """

    kind: str
    name: str
    digest: str
    parts: tuple[Int[Tensor, "_ length"], ...]

    def surrounded(self, part: int, window: int, start: Start) -> Int[Tensor, "windows n"]:
        """Return a part with special tokens; the ends of the windows make room. Samples have them already."""
        if self.kind == "sampled":
            return self.parts[part]
        bodies = self.parts[part][:, : window - len(start.before) - len(start.after)]
        return surround(bodies, start.before, start.after)


@dataclass(frozen=True, eq=False, repr=False)
class CutTexts(ArrayRecord):
    """The windows of all texts, without special tokens.

    - `request`: what was asked
    - `window`: n, tokens per window, special tokens included
    - `sources`: the windows of each text
    - `built_in`: windows of the built-in text, which is evaluated beside the texts: of its second half for a decoder
    - `measured`: windows on which the tokenizer is checked; none is in the certify part
    - `seen`: the contents of the windows of `sources`
    """

    request: CalibrationRequest
    window: int
    sources: tuple[CutSource, ...]
    built_in: CutSource
    measured: tuple[Int[Tensor, " _"], ...]
    seen: set[bytes]

    @property
    def example(self) -> Int[Tensor, "1 n"]:
        """One window, to run the model on."""
        return self.measured[0][None, : self.window]

    @property
    def compared(self) -> int:
        """How many tokens of a window decide whether it repeats another one."""
        return self.window - self.request.around - self.request.spare

    @property
    def ids(self) -> list[Int[Tensor, "..."]]:
        """All token ids that the model will read, except those that it samples itself."""
        start = self.request.start
        special = [*start.before, *start.after, *([] if start.candidate is None else [start.candidate])]
        parts = [part for source in (*self.sources, self.built_in) for part in source.parts]
        return [*parts, *self.measured, torch.tensor(special, dtype=torch.int64)]


def cut_texts(tokenizer: Any, request: CalibrationRequest) -> CutTexts:
    """Read the user's texts, or the built-in text for an encoder that has no other, and cut them into windows.

    Raises:
        InputError: A text cannot be read or is too short for three parts, or the window does not fit the model.
    """
    length = body_length(request.window, request.context, request.around)
    alone = not request.texts and not request.decoder
    texts = (TextFile(),) if alone else request.texts
    sizes = [request.sizes] if alone else [request.of_text(index) for index in range(len(request.texts))]
    seen: set[bytes] = set()
    drawn = distinct_windows(tokenizer, request, texts, [one.total for one in sizes], length, seen, may_shorten=alone)
    if drawn:
        length = drawn[0][1].shape[1]
    sources = tuple(
        CutSource("built-in" if alone else "text", text.source, text.digest, tuple(one.cut(bodies)))
        for (text, bodies), one in zip(drawn, sizes, strict=True)
    )
    fits = [source.parts[0] for source in sources]
    turns = (part[turn] for turn in range(_READ) for part in fits if turn < len(part))
    measured = tuple(islice(turns, _READ))  # one of each text in turn
    default = tokenize_text(tokenizer, None, wanted=1, length=length, seed=request.seed)
    ids = default.pieces[0]
    if not measured:
        size = min(length, len(ids) // 2 // _READ)
        measured = tuple(ids[: _READ * size].view(_READ, size))
    bodies = ids[: len(ids) // length * length].view(-1, length)
    if request.decoder:  # what decides about the BOS token, or is continued in a recovery, is not evaluated
        bodies = bodies[-(-len(bodies) // 2) :]
    built_in = CutSource("built-in", default.source, default.digest, (bodies[:0], bodies[:0], bodies))
    return CutTexts(request, length + request.around, sources, built_in, measured, seen)


def distinct_windows(
    tokenizer: Any,
    request: CalibrationRequest,
    texts: Sequence[TextFile],
    needed: Sequence[int],
    length: int,
    seen: set[bytes],
    may_shorten: bool,
) -> list[tuple[TokenizedText, Int[Tensor, "windows length"]]]:
    """Draw disjoint windows from each text such that no content occurs twice, in one text or in two.

    Each text gives `needed` windows of `length` tokens, without special tokens. The contents in `seen` may not be used;
    those of all windows of the texts are added. With `may_shorten`, a text that is too short gives the longest windows
    of which it has enough.

    Returns:
        Each text with its windows, in random order and without special tokens.

    Raises:
        InputError: A text is too short; the message gives the longest window that would work.
    """
    spare, seed = request.spare, request.seed
    tokenized = [
        _read(tokenizer, text, count, length, seed, seen, spare) for text, count in zip(texts, needed, strict=True)
    ]
    fresh = _fresh(tokenized, length, set(seen), spare)
    short = [index for index, (bodies, count) in enumerate(zip(fresh, needed, strict=True)) if len(bodies) < count]
    if short:
        longest = _longest(tokenized, needed, length, seen, spare)
        if longest is None or not may_shorten:
            index = short[0]
            raise _too_short(tokenized[index], len(fresh[index]), needed[index], length, request.around, longest)
        length = longest
    fresh = _fresh(tokenized, length, seen, spare)
    chosen = [
        bodies[torch.randperm(len(bodies), generator=torch.Generator().manual_seed(seed))[:count]]
        for bodies, count in zip(fresh, needed, strict=True)
    ]
    return list(zip(tokenized, chosen, strict=True))


def _read(
    tokenizer: Any, text: TextFile, needed: int, length: int, seed: int, seen: set[bytes], spare: int
) -> TokenizedText:
    """Tokenize a text; if the windows of a large text repeat, read more of it."""
    for factor in _REREADS:
        tokenized = tokenize_text(tokenizer, text, wanted=factor * needed, length=length, seed=seed)
        if tokenized.complete or len(drop_repeated(tokenized.bodies(length), set(seen), length - spare)) >= needed:
            break
    return tokenized


def _fresh(texts: Sequence[TokenizedText], length: int, seen: set[bytes], spare: int) -> list[Tensor]:
    """Return the windows of each text that occur neither in `seen` nor before in the texts."""
    return [drop_repeated(text.bodies(length), seen, length - spare) for text in texts]


def _longest(
    texts: Sequence[TokenizedText], needed: Sequence[int], length: int, seen: set[bytes], spare: int
) -> int | None:
    """Return the greatest length below `length` at which every text has enough windows, or None if there is none.

    Where windows do not repeat, ⌊tokens/needed⌋ is the answer. Where they repeat, shorter lengths are tried in steps of
    at most 2 %.
    """
    trial = min(length - 1, *(text.tokens // count for text, count in zip(texts, needed, strict=True)))
    while trial >= LEAST_BODY:
        fresh = _fresh(texts, trial, set(seen), spare)
        if all(len(bodies) >= count for bodies, count in zip(fresh, needed, strict=True)):
            return trial
        trial -= max(1, trial // 50)
    return None


def _too_short(
    text: TokenizedText, windows: int, needed: int, length: int, around: int, longest: int | None
) -> InputError:
    tokens = counted(text.tokens, "token")
    read = f"{text.source} has {tokens}" if text.complete else f"{tokens} of {text.source}"
    advice = longer_text(text, 0 if longest is None else longest + around)
    return InputError(
        f"{read}, enough for {counted(windows, 'window')} of {length + around} tokens that do not repeat; {needed} are "
        f"needed for the three parts (fit, select, certify), at least {needed * length} tokens; {advice}"
    )


KINDS = (*GIVEN, "sampled", "built-in")
BUILT_IN_WINDOWS = 32
"""The most windows of the built-in text in the certify part."""
SAMPLE_TOKENS = 128
"""A sampled window consists of samples of at most this many tokens, one after the other: drawing many short samples at
once takes fewer steps than drawing few long ones."""
SAMPLING_ROUNDS = 8
"""How often samples are drawn until enough of them are different."""


@dataclass(frozen=True, eq=False, repr=False)
class CalibrationPart(ArrayRecord):
    """The windows of one part, in random order, and the index of each one's source.

    The windows of a text are token ids with special tokens.
    """

    inputs: Inputs
    source: Int[Tensor, " windows"]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(ArrayRecord):
    """The windows of a shrink: their description, three parts without overlap, and what differs from the request."""

    record: CalibrationRecord
    fit: CalibrationPart
    select: CalibrationPart
    certify: CalibrationPart
    notes: tuple[str, ...] = ()

    @property
    def guaranteed_kind(self) -> str:
        """The kind of text that the guarantee is about: the user's, else the model's samples, else the built-in one."""
        return next(kind for kind in KINDS if any(source.kind == kind for source in self.record.sources))


def prepare_calibration(
    checkpoint: Checkpoint,
    tokenizer: Any,
    texts: CutTexts,
    start: Start,
    *,
    progress: Step = silent,
    message: Callable[[str], None],
) -> Calibration:
    """Sample the windows that do not come from texts, add the special tokens, and mix the windows of every part.

    - With texts, a share `sampled` of the fit and select windows is sampled from the model, and the rest is divided
      equally among the texts. The certify part has `sizes.certify` windows of the texts, divided equally, and some
      sampled ones.
    - Without texts, all windows are sampled.
    - A model that cannot be sampled (an encoder) uses the texts alone, or the built-in text if there are none.
    - The certify part also has up to `BUILT_IN_WINDOWS` windows of the built-in text.

    `start` has the special tokens around every window of a text, as decided; samples have those at the start. `message`
    is called with a sentence for each thing that differs from the request.

    Raises:
        InputError: The model repeats itself, so that there are not enough different samples.
    """
    request, seen = texts.request, set(texts.seen)
    if not request.decoder and request.sampled > 0:
        used = "the text alone is used" if request.texts else "the built-in text is used"
        message(f"{checkpoint.name} is not a causal language model, so it cannot be sampled: {used}")
    notes: list[str] = []
    if texts.window < request.window:
        notes.append(
            f"the built-in text is too short for windows of {request.window} tokens, so they have {texts.window}; give "
            "a longer text with --text"
        )
    sources = list(texts.sources)
    if request.samples.total:
        sources.append(_samples(checkpoint, ordinary_tokens(checkpoint, tokenizer), texts, start, seen, progress))
    if request.texts or request.decoder:
        *empty, bodies = texts.built_in.parts
        bodies = drop_repeated(bodies, seen, texts.compared)[:BUILT_IN_WINDOWS]
        if len(bodies):
            sources.append(replace(texts.built_in, parts=(*empty, bodies)))
        else:
            notes.append(f"the built-in text is left out: it has no window of {texts.window} tokens beyond the others")
    parts = []
    for index, name in enumerate(PARTS):
        ids = torch.cat([source.surrounded(index, texts.window, start) for source in sources])
        numbers = torch.cat([torch.full((len(one.parts[index]),), number) for number, one in enumerate(sources)])
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(derived_seed(request.seed, name)))
        parts.append(CalibrationPart(ids[order], numbers[order]))
    record = CalibrationRecord(
        window=texts.window,
        bos=start.bos,
        bos_reason=start.reason,
        sources=tuple(
            SourceRecord(
                kind=source.kind,
                name=source.name,
                sha256=source.digest,
                **{name: len(part) for name, part in zip(PARTS, source.parts, strict=True)},
            )
            for source in sources
        ),
        sha256=windows_digest(parts),
    )
    for note in notes:
        message(note)
    fit, select, certify = parts
    return Calibration(record, fit, select, certify, tuple(notes))


def given_calibration(windows: Windows, sizes: CalibrationSizes, tokens: int) -> Calibration:
    """Cut different windows, which are in random order, into three parts; each one becomes `tokens` tokens."""
    rows = sizes.cut(torch.arange(sizes.total))
    parts = [CalibrationPart(windows.inputs[indices], torch.zeros(len(indices), dtype=torch.long)) for indices in rows]
    source = SourceRecord(
        kind=windows.kind, name=windows.source, sha256=windows.digest,
        fit=sizes.fit, select=sizes.select, certify=sizes.certify,
    )  # fmt: skip
    digest = windows_digest(parts)
    record = CalibrationRecord(window=tokens, bos=None, bos_reason="", sources=(source,), sha256=digest)
    fit, select, certify = parts
    return Calibration(record, fit, select, certify)


def windows_digest(parts: Sequence[CalibrationPart]) -> str:
    """Return the SHA-256 of all windows and their sources, part by part."""
    total = hashlib.sha256()
    for part in parts:
        for value in as_samples(part.inputs).inputs.values():
            total.update(f"{list(value.shape)}".encode())
            total.update(value.numpy().tobytes())
        total.update(part.source.numpy().tobytes())
    return total.hexdigest()


def _samples(
    checkpoint: Checkpoint, starts: list[int], texts: CutTexts, start: Start, seen: set[bytes], progress: Step
) -> CutSource:
    """Sample windows from the model; draw again in place of windows that repeat."""
    sizes, window, before = texts.request.samples, texts.window, start.before
    made = torch.empty(0, window, dtype=torch.int64)
    samples = -(-window // SAMPLE_TOKENS)  # in each window
    for turn in range(SAMPLING_ROUNDS):
        missing = sizes.total - len(made)
        drawn = sample_windows(
            checkpoint,
            windows=samples * missing,
            window=-(-window // samples),
            before=before,
            seed=derived_seed(texts.request.seed, f"samples {turn}"),
            starts=starts,
            progress=progress,
        ).reshape(missing, -1)[:, :window]
        fresh = drop_repeated(drawn[:, len(before) :], seen, texts.compared)
        made = torch.cat([made, surround(fresh, before, ())])
        if len(made) == sizes.total:
            digest = hashlib.sha256(made.numpy().tobytes()).hexdigest()
            return CutSource("sampled", f"sampled from {checkpoint.name}", digest, tuple(sizes.cut(made)))
    raise InputError(
        f"{sizes.total} different windows of {window} tokens are needed, but {checkpoint.name} repeats itself "
        f"and gave {len(made)}; use a larger --window or a text with --text and --sampled 0"
    )
