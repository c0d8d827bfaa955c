"""Windows of text for a shrink, in three disjoint parts: to fit the repair, to select the plan, to certify the result.

The windows come from the user's texts and from the dense model itself. A model that is calibrated on one kind of text
only is good there and bad elsewhere. The built-in text is an additional check: it is evaluated in the certify part and
used nowhere else.

Every content occurs once: a window whose content has occurred before is dropped, so that no part contains a window of
another part, even if a text repeats itself or two files are equal.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.tensor_record import TensorRecord
from depthgauge.checkpoints.windows import body_length, surround, tokenize_text
from depthgauge.errors import InputError, require_count, require_seed
from depthgauge.progress import Step, silent
from depthgauge.surgery.distinct_windows import distinct_windows, drop_repeated
from depthgauge.surgery.model_samples import ordinary_tokens, sample_windows

Kind = Literal["text", "sampled", "built-in"]
KINDS: tuple[Kind, ...] = ("text", "sampled", "built-in")
PARTS = ("fit", "select", "certify")
WINDOW = 512
"""Tokens per window by default."""
SHOWN_WINDOWS = 24
"""The most sampled windows in the certify part where the guarantee is about the user's text."""
SHOWN_SHARE = 5
"""One sampled window for this many certify windows of text, at most `SHOWN_WINDOWS`."""
BUILT_IN_WINDOWS = 32
"""The most windows of the built-in text in the certify part."""
SAMPLING_ROUNDS = 8
"""How often samples are drawn until enough of them are different."""


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

    def cut(self, windows: Int[Tensor, "windows n"]) -> list[Int[Tensor, "_ n"]]:
        """Return the first `fit`, the next `select` and the next `certify` windows."""
        ends = accumulate((self.fit, self.select, self.certify), initial=0)
        return [windows[first:last] for first, last in pairwise(ends)]


@dataclass(frozen=True)
class SourceInfo:
    """Where windows come from, and how many of them are in each part.

    - `kind`: the user's `text`, `sampled` from the dense model, or the `built-in` text
    - `name`: path of the text, or a description
    - `digest`: SHA-256 of the bytes that were read, or of the sampled token ids
    - `fit`, `select`, `certify`: numbers of windows
    """

    kind: Kind
    name: str
    digest: str
    fit: int
    select: int
    certify: int

    def to_json(self) -> dict[str, Any]:
        """Return the result JSON."""
        return asdict(self)


@dataclass(frozen=True, eq=False, repr=False)
class Part(TensorRecord):
    """The windows of one part, in random order.

    - `ids`: token ids, special tokens included
    - `source`: index of each window's source
    - `kinds`: kind of each source
    """

    ids: Int[Tensor, "windows n"]
    source: Int[Tensor, " windows"]
    kinds: tuple[Kind, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, kind: Kind) -> Int[Tensor, "chosen n"]:
        """Return the token ids of the windows whose source has this kind."""
        matches = torch.tensor([one == kind for one in self.kinds])
        return self.ids[matches[self.source]]


@dataclass(frozen=True, eq=False, repr=False)
class Calibration(TensorRecord):
    """The windows of a shrink.

    - `sources`: where the windows come from
    - `fit`, `select`, `certify`: the three parts; no window is in two of them
    - `window`: n, tokens per window
    - `seed`: the seed of the split and of the samples
    """

    sources: tuple[SourceInfo, ...]
    fit: Part
    select: Part
    certify: Part
    window: int
    seed: int

    @property
    def guaranteed_kind(self) -> Kind:
        """The kind of text that the guarantee is about: the user's, else the model's samples, else the built-in one."""
        return next(kind for kind in KINDS if any(source.kind == kind for source in self.sources))

    def digest(self) -> str:
        """Return the SHA-256 of all token ids and their sources, part by part."""
        total = hashlib.sha256()
        for part in (self.fit, self.select, self.certify):
            total.update(f"{list(part.ids.shape)}".encode())
            total.update(part.ids.numpy().tobytes())
            total.update(part.source.numpy().tobytes())
        return total.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the result JSON. The digests show whether the same windows were drawn again."""
        return {
            "window": self.window,
            "seed": self.seed,
            "sha256": self.digest(),
            "sources": [source.to_json() for source in self.sources],
        }


def prepare_calibration(
    checkpoint: Checkpoint,
    tokenizer: Any,
    texts: Sequence[Path],
    *,
    sizes: CalibrationSizes,
    sampled: float = 0.5,
    window: int | None = None,
    context: int | None,
    special: tuple[Sequence[int], Sequence[int]],
    seed: int = 0,
    progress: Step = silent,
    message: Callable[[str], None],
) -> Calibration:
    """Read and sample the windows of a shrink and split them at random into three disjoint parts.

    - With texts, a share `sampled` of the fit and select windows is sampled from the model, and the rest is divided
      equally among the texts. The certify part has `sizes.certify` windows of the texts, divided equally, and up to
      `SHOWN_WINDOWS` sampled ones.
    - Without texts, all windows are sampled.
    - A model that cannot be sampled (an encoder) uses the texts alone, or the built-in text if there are none.
    - The certify part also has up to `BUILT_IN_WINDOWS` windows of the built-in text.

    Args:
        checkpoint: the dense model.
        tokenizer: its tokenizer.
        texts: paths of UTF-8 files.
        sizes: windows in each part.
        sampled: share of sampled windows, from 0 to 1.
        window: n, tokens per window, special tokens included; by default 512, or the context if that is shorter.
        context: the longest window the model accepts, or None if unknown.
        special: token ids before and after every window of a text; samples start with the first of the two.
        seed: the same seed gives the same split and, on the same device, the same samples.
        progress: called while windows are sampled.
        message: called with a sentence for each thing that differs from the request.

    Raises:
        InputError: A text cannot be read or is too short for three parts, or a number is out of range.
    """
    decoder = checkpoint.objective == "loss"
    if not decoder and sampled > 0:
        used = "the text alone is used" if texts else "the built-in text is used"
        message(f"{checkpoint.name} is not a causal language model, so it cannot be sampled: {used}")
    request = _Request(tuple(texts), sizes, sampled if decoder else 0.0, window, context, special, seed, decoder)
    found = _read_texts(tokenizer, request, message)
    if request.samples.total:
        found.add_samples(checkpoint, ordinary_tokens(checkpoint, tokenizer), progress)
    if texts or decoder:
        found.add_built_in(tokenizer, message)
    return found.calibration()


def check_texts(
    tokenizer: Any,
    texts: Sequence[Path],
    *,
    sizes: CalibrationSizes,
    sampled: float = 0.5,
    window: int | None = None,
    context: int | None,
    special: tuple[Sequence[int], Sequence[int]],
    seed: int = 0,
    decoder: bool,
) -> None:
    """Raise the errors about texts and numbers that `prepare_calibration` would raise, before the weights are loaded.

    Args:
        tokenizer: the model's tokenizer.
        texts: as in `prepare_calibration`, like all arguments that are not explained here.
        sizes: windows in each part.
        sampled: share of sampled windows.
        window: tokens per window.
        context: the longest window the model accepts.
        special: token ids before and after every window.
        seed: the seed of the split.
        decoder: whether the model is a causal language model.
    """
    request = _Request(tuple(texts), sizes, sampled if decoder else 0.0, window, context, special, seed, decoder)
    _read_texts(tokenizer, request, lambda sentence: None)


@dataclass(frozen=True)
class _Request:
    """The checked arguments of `prepare_calibration`."""

    texts: tuple[Path, ...]
    sizes: CalibrationSizes
    sampled: float
    window: int | None
    context: int | None
    special: tuple[Sequence[int], Sequence[int]]
    seed: int
    decoder: bool

    def __post_init__(self) -> None:
        require_seed(self.seed)
        for part in PARTS:
            require_count(part, getattr(self.sizes, part), f"the number of windows in the {part} part")
        if not 0 <= self.sampled <= 1:
            raise InputError(
                f"sampled must be a number from 0 to 1, got {self.sampled}; it is the share of windows that are "
                "sampled from the model"
            )
        if self.decoder and not self.texts and self.sampled == 0:
            raise InputError("sampled is 0 and there is no text; give a text with --text or leave --sampled out")
        resolved = [text.resolve() for text in self.texts]
        for text, path in zip(self.texts, resolved, strict=True):
            if resolved.count(path) > 1:
                raise InputError(f"the text {text} is given twice; give every file once")
        mixed = len(self.texts) * (self.sampled < 1) + (self.sampled > 0)
        for part, least in zip(PARTS, (mixed, mixed, len(self.texts)), strict=True):
            if getattr(self.sizes, part) < least:
                raise InputError(
                    f"{part} must be at least {least}, got {getattr(self.sizes, part)}; the {part} part has a window "
                    "of every source"
                )

    @property
    def samples(self) -> CalibrationSizes:
        """The number of sampled windows in each part."""
        if not self.decoder:
            return CalibrationSizes(0, 0, 0)
        if not self.texts:
            return self.sizes
        shown = min(SHOWN_WINDOWS, -(-self.sizes.certify // SHOWN_SHARE))
        return CalibrationSizes(self._sampled_of(self.sizes.fit), self._sampled_of(self.sizes.select), shown)

    def _sampled_of(self, windows: int) -> int:
        """Return how many of these windows are sampled: one at least, and one at least of each text, if not 0 or 1."""
        if self.sampled in (0, 1):
            return int(self.sampled * windows)
        return min(max(1, round(self.sampled * windows)), windows - len(self.texts))

    def of_text(self, index: int) -> CalibrationSizes:
        """Return the number of windows of a text in each part; the first texts get the remainder of the division."""
        count = len(self.texts)
        fit, select = (windows - self._sampled_of(windows) for windows in (self.sizes.fit, self.sizes.select))
        return CalibrationSizes(*((all_ + count - 1 - index) // count for all_ in (fit, select, self.sizes.certify)))


@dataclass
class _Found:
    """The windows found so far.

    - `request`: what was asked
    - `window`: n, tokens per window
    - `seen`: the contents of the windows of all sources
    - `sources`: the sources so far
    - `windows`: per source, its windows in each part
    """

    request: _Request
    window: int
    seen: set[bytes]
    sources: list[SourceInfo] = field(default_factory=list)
    windows: list[list[Tensor]] = field(default_factory=list)

    def add(self, kind: Kind, name: str, digest: str, parts: list[Tensor]) -> None:
        """Add a source with its windows in each part."""
        fit, select, certify = (len(part) for part in parts)
        self.sources.append(SourceInfo(kind, name, digest, fit, select, certify))
        self.windows.append(parts)

    def add_samples(self, checkpoint: Checkpoint, starts: list[int], progress: Step) -> None:
        """Sample windows from the model; draw again in place of windows that repeat."""
        sizes, before = self.request.samples, self.request.special[0]
        made = torch.empty(0, self.window, dtype=torch.int64)
        for turn in range(SAMPLING_ROUNDS):
            drawn = sample_windows(
                checkpoint,
                windows=sizes.total - len(made),
                window=self.window,
                before=before,
                seed=_derived_seed(self.request.seed, f"samples {turn}"),
                starts=starts,
                progress=progress,
            )
            fresh = drop_repeated(drawn[:, len(before) :], self.seen)
            made = torch.cat([made, surround(fresh, before, ())])
            if len(made) == sizes.total:
                digest = hashlib.sha256(made.numpy().tobytes()).hexdigest()
                self.add("sampled", f"sampled from {checkpoint.name}", digest, sizes.cut(made))
                return
        raise InputError(
            f"{sizes.total} different windows of {self.window} tokens are needed, but {checkpoint.name} repeats itself "
            f"and gave {len(made)}; use a larger --window or a text with --text and --sampled 0"
        )

    def add_built_in(self, tokenizer: Any, message: Callable[[str], None]) -> None:
        """Add windows of the built-in text to the certify part."""
        before, after = self.request.special
        length = self.window - len(before) - len(after)
        text = tokenize_text(tokenizer, None, wanted=BUILT_IN_WINDOWS, length=length, seed=self.request.seed)
        bodies = drop_repeated(text.bodies(length), self.seen)[:BUILT_IN_WINDOWS]
        if not len(bodies):
            message(f"the built-in text is left out: it has no window of {self.window} tokens beyond the other texts")
            return
        ids = surround(bodies, before, after)
        self.add("built-in", text.source, text.digest, CalibrationSizes(0, 0, len(ids)).cut(ids))

    def calibration(self) -> Calibration:
        """Mix the sources in every part, in random order."""
        kinds = tuple(source.kind for source in self.sources)
        parts = []
        for index, name in enumerate(PARTS):
            ids = [windows[index] for windows in self.windows]
            source = torch.cat([torch.full((len(one),), number) for number, one in enumerate(ids)])
            generator = torch.Generator().manual_seed(_derived_seed(self.request.seed, name))
            order = torch.randperm(len(source), generator=generator)
            parts.append(Part(torch.cat(ids)[order], source[order], kinds))
        fit, select, certify = parts
        return Calibration(tuple(self.sources), fit, select, certify, self.window, self.request.seed)


def _read_texts(tokenizer: Any, request: _Request, message: Callable[[str], None]) -> _Found:
    """Read the windows of the user's texts, or of the built-in text for a model that has no other."""
    window = min(WINDOW, request.context or WINDOW) if request.window is None else request.window
    before, after = request.special
    around = len(before) + len(after)
    length = body_length(window, request.context, around)
    seen: set[bytes] = set()
    built_in = not request.texts and not request.decoder
    if not request.texts and not built_in:
        return _Found(request, window, seen)
    sizes = [request.sizes] if built_in else [request.of_text(index) for index in range(len(request.texts))]
    drawn = distinct_windows(
        tokenizer,
        [None] if built_in else request.texts,
        [one.total for one in sizes],
        length=length,
        around=around,
        seed=request.seed,
        seen=seen,
        may_shorten=built_in,
    )
    used = drawn[0].bodies.shape[1] + around
    if used < window:
        message(
            f"the built-in text is too short for windows of {window} tokens, so they have {used}; give a longer text "
            "with --text"
        )
    found = _Found(request, used, seen)
    for text, one in zip(drawn, sizes, strict=True):
        parts = one.cut(surround(text.bodies, before, after))
        found.add("built-in" if built_in else "text", text.source, text.digest, parts)
    return found


def _derived_seed(seed: int, purpose: str) -> int:
    """Return a seed from 0 to 2⁶³ − 1 for one purpose, so that two purposes do not use the same random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "big") >> 1
