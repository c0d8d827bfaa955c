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
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.windows import surround
from depthgauge.errors import InputError
from depthgauge.progress import Step, silent
from depthgauge.surgery.cut_texts import PARTS, CalibrationSizes, CutTexts, Kind
from depthgauge.surgery.distinct_windows import drop_repeated
from depthgauge.surgery.model_samples import ordinary_tokens, sample_windows

KINDS: tuple[Kind, ...] = ("text", "sampled", "built-in")
BUILT_IN_WINDOWS = 32
"""The most windows of the built-in text in the certify part."""
SAMPLING_ROUNDS = 8
"""How often samples are drawn until enough of them are different."""


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
class Part(ArrayRecord):
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
class Calibration(ArrayRecord):
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
    texts: CutTexts,
    special: tuple[Sequence[int], Sequence[int]],
    *,
    progress: Step = silent,
    message: Callable[[str], None],
) -> Calibration:
    """Sample the windows that do not come from texts, add the special tokens, and mix the windows of every part.

    - With texts, a share `sampled` of the fit and select windows is sampled from the model, and the rest is divided
      equally among the texts. The certify part has `sizes.certify` windows of the texts, divided equally, and up to
      `SHOWN_WINDOWS` sampled ones.
    - Without texts, all windows are sampled.
    - A model that cannot be sampled (an encoder) uses the texts alone, or the built-in text if there are none.
    - The certify part also has up to `BUILT_IN_WINDOWS` windows of the built-in text.

    Args:
        checkpoint: the dense model.
        tokenizer: its tokenizer.
        texts: the windows of the texts, already in three parts.
        special: token ids before and after every window of a text, as decided; samples start with the first of the two.
        progress: called while windows are sampled.
        message: called with a sentence for each thing that differs from the request.

    Raises:
        InputError: The model repeats itself, so that there are not enough different samples.
    """
    request = texts.request
    if not request.decoder and request.sampled > 0:
        used = "the text alone is used" if request.texts else "the built-in text is used"
        message(f"{checkpoint.name} is not a causal language model, so it cannot be sampled: {used}")
    if texts.window < request.usual_window:
        message(
            f"the built-in text is too short for windows of {request.usual_window} tokens, so they have "
            f"{texts.window}; give a longer text with --text"
        )
    found = _Found(texts, special, set(texts.seen))
    for source in texts.sources:
        found.add(source.kind, source.name, source.digest, [found.surrounded(part) for part in source.parts])
    if request.samples.total:
        found.add_samples(checkpoint, ordinary_tokens(checkpoint, tokenizer), progress)
    if request.texts or request.decoder:
        found.add_built_in(message)
    return found.calibration()


@dataclass
class _Found:
    """The windows found so far.

    - `texts`: the windows of the texts, without special tokens
    - `special`: token ids before and after every window
    - `seen`: the contents of the windows of all sources
    - `sources`: the sources so far
    - `windows`: per source, its windows in each part
    """

    texts: CutTexts
    special: tuple[Sequence[int], Sequence[int]]
    seen: set[bytes]
    sources: list[SourceInfo] = field(default_factory=list)
    windows: list[list[Tensor]] = field(default_factory=list)

    def surrounded(self, bodies: Int[Tensor, "windows length"]) -> Int[Tensor, "windows n"]:
        """Add the special tokens; the ends of the windows make room for them."""
        before, after = self.special
        return surround(bodies[:, : self.texts.window - len(before) - len(after)], before, after)

    def add(self, kind: Kind, name: str, digest: str, parts: list[Tensor]) -> None:
        """Add a source with its windows in each part."""
        fit, select, certify = (len(part) for part in parts)
        self.sources.append(SourceInfo(kind, name, digest, fit, select, certify))
        self.windows.append(parts)

    def add_samples(self, checkpoint: Checkpoint, starts: list[int], progress: Step) -> None:
        """Sample windows from the model; draw again in place of windows that repeat."""
        request, window, before = self.texts.request, self.texts.window, self.special[0]
        sizes = request.samples
        made = torch.empty(0, window, dtype=torch.int64)
        for turn in range(SAMPLING_ROUNDS):
            drawn = sample_windows(
                checkpoint,
                windows=sizes.total - len(made),
                window=window,
                before=before,
                seed=_derived_seed(request.seed, f"samples {turn}"),
                starts=starts,
                progress=progress,
            )
            fresh = drop_repeated(drawn[:, len(before) :], self.seen, self.texts.compared)
            made = torch.cat([made, surround(fresh, before, ())])
            if len(made) == sizes.total:
                digest = hashlib.sha256(made.numpy().tobytes()).hexdigest()
                self.add("sampled", f"sampled from {checkpoint.name}", digest, sizes.cut(made))
                return
        raise InputError(
            f"{sizes.total} different windows of {window} tokens are needed, but {checkpoint.name} repeats itself "
            f"and gave {len(made)}; use a larger --window or a text with --text and --sampled 0"
        )

    def add_built_in(self, message: Callable[[str], None]) -> None:
        """Add windows of the built-in text to the certify part."""
        source = self.texts.built_in
        bodies = drop_repeated(source.parts[-1], self.seen, self.texts.compared)[:BUILT_IN_WINDOWS]
        if not len(bodies):
            message(
                f"the built-in text is left out: it has no window of {self.texts.window} tokens beyond the other texts"
            )
            return
        parts = CalibrationSizes(0, 0, len(bodies)).cut(self.surrounded(bodies))
        self.add(source.kind, source.name, source.digest, parts)

    def calibration(self) -> Calibration:
        """Mix the sources in every part, in random order."""
        kinds = tuple(source.kind for source in self.sources)
        parts = []
        for index, name in enumerate(PARTS):
            ids = [windows[index] for windows in self.windows]
            source = torch.cat([torch.full((len(one),), number) for number, one in enumerate(ids)])
            generator = torch.Generator().manual_seed(_derived_seed(self.texts.request.seed, name))
            order = torch.randperm(len(source), generator=generator)
            parts.append(Part(torch.cat(ids)[order], source[order], kinds))
        fit, select, certify = parts
        return Calibration(tuple(self.sources), fit, select, certify, self.texts.window, self.texts.request.seed)


def _derived_seed(seed: int, purpose: str) -> int:
    """Return a seed from 0 to 2⁶³ − 1 for one purpose, so that two purposes do not use the same random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "big") >> 1
