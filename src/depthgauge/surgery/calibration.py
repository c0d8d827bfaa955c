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
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.inputs.read_data import GivenWindows
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.model_samples import ordinary_tokens, sample_windows
from depthgauge.checkpoints.samples import Inputs, as_samples
from depthgauge.checkpoints.start_token import Start
from depthgauge.checkpoints.windows import derived_seed, drop_repeated, surround
from depthgauge.results.shrink_record import GIVEN, CalibrationRecord, SourceRecord
from depthgauge.surgery.cut_texts import PARTS, CalibrationSizes, CutSource, CutTexts

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


def given_calibration(given: GivenWindows, sizes: CalibrationSizes, tokens: int) -> Calibration:
    """Cut different windows, which are in random order, into three parts; each one becomes `tokens` tokens."""
    rows = sizes.cut(torch.arange(sizes.total))
    parts = [CalibrationPart(given.inputs[one], torch.zeros(len(one), dtype=torch.long)) for one in rows]
    source = SourceRecord(
        kind=given.kind, name=given.source, sha256=given.digest,
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
