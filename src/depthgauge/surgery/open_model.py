"""Open the model of `shrink`: check every option and file, cut the texts into windows, and load the weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted, size_text
from depthgauge.checkpoints.blocks.model_output import require_output
from depthgauge.checkpoints.blocks.probe import derived
from depthgauge.checkpoints.inputs.found_data import TEXT, FoundData, checked_data, class_in_config
from depthgauge.checkpoints.inputs.text_files import find_texts
from depthgauge.checkpoints.inputs.windows import Inputs, Windows, read_data
from depthgauge.checkpoints.source.model_class import (
    context_length,
    longest_window,
    pooling_notes,
)
from depthgauge.checkpoints.source.model_files import Source, file_digests, quantization_method, read_json
from depthgauge.checkpoints.tasks.language import Start, measure_start, plan_start, require_readable
from depthgauge.checkpoints.weights.described import Described, describe, opened
from depthgauge.checkpoints.weights.load import Checkpoint, blocks_of, require_rows
from depthgauge.checkpoints.weights.stored_weights import stored_dtype
from depthgauge.results.gauge_record import BOTH, allows
from depthgauge.results.shrink_record import PlanRecord, ShrinkOptions
from depthgauge.surgery.calibration import CalibrationRequest, CalibrationSizes, CutTexts, cut_texts
from depthgauge.surgery.extract import require_supported
from depthgauge.surgery.gguf_layout import GgufLayout, match_weights, read_layout
from depthgauge.surgery.student import effort_of, first_removable

# --- How many blocks a run of `shrink` removes, known before the weights are loaded ----------------------------------


def check_model(
    settings: ShrinkOptions, whole: Checkpoint, stored: torch.dtype | GgufLayout | None, plan: PlanRecord | None
) -> None:
    """Raise for options that do not fit a model, whose weights are not needed; a plan has blocks of it already."""
    settings.check_model(whole.objective, whole.name)
    settings.check_layers(whole.layers, whole.name)
    if settings.max_bytes is not None and plan is None:
        requested_counts(settings, whole, stored)


def requested_counts(
    settings: ShrinkOptions, checkpoint: Checkpoint, stored: torch.dtype | GgufLayout | None
) -> tuple[int, ...]:
    """Return the numbers of blocks to remove that the options ask for, other than by `max_increase`, in order."""
    layers, name = checkpoint.layers, checkpoint.name
    if settings.max_bytes is not None:
        return (blocks_over(checkpoint, settings.byte_limit(), stored, settings.repairs),)
    return tuple(settings.counts(layers, name))


def written_sizes(
    checkpoint: Checkpoint, stored: torch.dtype | GgufLayout | None, repairs: bool
) -> tuple[int, list[int]]:
    """Return the bytes of all weights and, in increasing order, those of each block, as they are written.

    Weights are counted in the dtype `stored`, in the types that a GGUF file has after `repairs`, or in their own.
    """

    def size(weights: Any) -> int:
        return sum(one.numel() * (stored if isinstance(stored, torch.dtype) else one.dtype).itemsize for one in weights)

    if isinstance(stored, GgufLayout):
        return stored.sizes(repairs)
    return size(checkpoint.model.parameters()), sorted(size(block.parameters()) for block in blocks_of(checkpoint))


def blocks_over(
    checkpoint: Checkpoint, limit: int, stored: torch.dtype | GgufLayout | None, repairs: bool = True
) -> int:
    """Return how many blocks must go until the weights take at most `limit` bytes, whichever blocks they are.

    See `written_sizes`.
    """
    total, blocks = written_sizes(checkpoint, stored, repairs)
    if total <= limit:
        taken = f"{checkpoint.name} takes {size_text(total)}"
        raise InputError(f"--max-bytes {size_text(limit)} removes nothing, because {taken}; give a smaller size")
    for count in range(1, checkpoint.layers):
        if total - sum(blocks[:count]) <= limit:
            return count
    least = total - sum(blocks[:-1])
    raise InputError(
        f"--max-bytes {size_text(limit)} is too small: {checkpoint.name} takes {size_text(total)}, and with one block "
        f"left {size_text(least)}"
    )


SAMPLED = 1 / 3
"""Share of calibration windows that are sampled from the model, where there is a text."""
NO_TOKENS = Start((), (), None, "")
"""No special tokens around the windows."""


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A loaded model and the texts or images that it will be calibrated on.

    - `checkpoint`, `tokenizer`: the model, and its tokenizer or image processor
    - `files`: SHA-256 of the weight files by name; empty for a model from memory
    - `stored`: dtype in which the result is written, or the GGUF file whose types it has; None keeps the dtype of the
      loaded weights
    - `start`: the special tokens around every window
    - `data`, `read`: what was given, and its windows, those of texts without special tokens
    - `fixed`: blocks that cannot be removed
    - `notes`: what cannot be repaired or removed, and why
    """

    checkpoint: Checkpoint
    tokenizer: Any
    files: dict[str, str]
    stored: torch.dtype | GgufLayout | None
    start: Start
    data: FoundData
    read: CutTexts | Windows
    fixed: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ReadModel:
    """A described model, and the texts or images that it will be calibrated on.

    - `model`: the model without its weights
    - `files`, `stored`, `read`: see `OpenedModel`
    """

    model: Described
    files: dict[str, str]
    stored: torch.dtype | GgufLayout | None
    read: CutTexts | Windows


def read_model(
    model: Any,
    source: Source | None,
    settings: ShrinkOptions,
    tokenizer: Any,
    plan: PlanRecord | None,
    as_gguf: bool,
    message: Callable[[str], None],
) -> ReadModel:
    """Check everything that can be checked without the weights of a model.

    Without a `source`, which is a checkpoint on disk, `model` is in memory, and `tokenizer` belongs to it. The digests
    of a plan that will be followed must match. `message` is told if the weights must be streamed. With `as_gguf`, a
    model that cannot be written as a GGUF file is refused.
    """
    stored: torch.dtype | GgufLayout | None = None
    if as_gguf:
        stored = read_layout(source, settings.gguf_type, "a model in memory" if source is None else str(source.path))
    data = checked_data(settings, class_in_config(source, model))
    described = describe(model, source, settings, data, tokenizer, message)
    streamed = described.placement.stream
    if source is None:
        require_supported(described.whole)
    elif settings.dtype in (None, "auto") and source.gguf is None and not streamed:
        stored = stored_dtype(described.config, source)
    check_model(settings, described.whole, stored, plan)
    if streamed:
        settings.check_streamed()
        settings = msgspec.structs.replace(settings, sampled=0.0)
    read = _read(settings, described)
    files = {} if source is None else file_digests(source)
    if source is not None and plan is not None and plan.files != files:
        raise InputError(f"the plan was made for other weights than those of {source.target}; make a new plan")
    return ReadModel(described, files, stored, read)


def open_model(
    model: ReadModel, settings: ShrinkOptions, plan: PlanRecord | None, message: Callable[[str], None]
) -> OpenedModel:
    """Load the weights of a model, and decide what of it can be removed and repaired.

    `message` is called with sentences such as the BOS decision. A language model that cannot read its text is refused.
    """
    described, stored, read = model.model, model.stored, model.read
    source, tokenizer, checkpoint = described.source, described.reader, opened(described, message)
    require_supported(checkpoint)
    if isinstance(stored, GgufLayout):
        stored = match_weights(stored, checkpoint)
    if settings.repairs and any(weight.is_meta for weight in checkpoint.model.parameters()):
        raise InputError(
            f"{checkpoint.name} does not fit the memory of its devices, and weights that are loaded on demand cannot "
            "be repaired; use more devices, or --recover none"
        )
    if isinstance(read, CutTexts):
        require_rows(checkpoint, read.ids)
    example = read.example
    described.data.describe(message)
    if source is None and plan is not None:
        _require_plan_of(plan, checkpoint)
    require_output(checkpoint, example)
    fixed, notes = _fixed_blocks(checkpoint, example)
    if checkpoint.stack == BOTH:
        notes = (f"blocks {_numbered(checkpoint)}", *notes)
    if settings.repairs:
        checkpoint = derived(checkpoint, example)
        notes += _unrepaired(checkpoint)
    if checkpoint.objective == "embedding" and source is not None:
        notes += pooling_notes(source.folder)
    notes += _dequantized(source)
    for note in notes:
        message(note)
    start = NO_TOKENS
    if isinstance(read, CutTexts):
        planned = read.request.start
        start = measure_start(planned, checkpoint, tokenizer)
        if planned.candidate is not None and checkpoint.objective == "loss":
            message(f"BOS token {'added' if start.bos else 'not added'}: {start.reason}")
        require_readable(checkpoint, tokenizer, start, read.measured, allows(settings, "unread"), message)
    return OpenedModel(checkpoint, tokenizer, model.files, stored, start, described.data, read, fixed, notes)


def _fixed_blocks(checkpoint: Checkpoint, example: Inputs) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the blocks that cannot be removed, and a note; families in the table have none.

    Raises:
        CheckpointError: no block can be removed.
    """
    if None not in checkpoint.families:
        return frozenset(), ()
    first, reason = first_removable(checkpoint, example)
    which = "block 0 is" if first == 1 else f"blocks 0 to {first - 1} are"
    return frozenset(range(first)), (f"{which} not removed: {reason}",) if first else ()


def _numbered(checkpoint: Checkpoint) -> str:
    """Say which numbers the blocks of each stack have."""
    stacks = zip(checkpoint.roots, checkpoint.spans, strict=True)
    return " and ".join(f"{span.start} to {span[-1]} are those of the {name}" for name, span in stacks)


def _dequantized(source: Source | None) -> tuple[str, ...]:
    """Say that the weights of a directory were dequantized, if they were."""
    if source is None or source.gguf is not None:
        return ()
    method = quantization_method(read_json(source.folder / "config.json", source.target))
    if method is None:
        return ()
    return (f"the weights of the source are quantized ({method}); they are dequantized and written unquantized",)


def _unrepaired(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Say which blocks and maps cannot be repaired."""
    families, notes = checkpoint.families, list[str]()
    if not any(families):
        return (f"blocks are removed without repair, because the structure was not verified: {checkpoint.underived}",)
    if unknown := [layer for layer, family in enumerate(families) if family is None]:
        notes.append(
            f"the repair leaves {_blocks(unknown, families)} unchanged, because the structure was not verified: "
            f"{checkpoint.underived}"
        )
    without: dict[str, list[int]] = {"attention": [], "MLP": []}
    for layer, family in enumerate(families):
        for part in () if family is None else family.parts:
            if family is not None and part.last is None:
                name = {family.attention: "attention", family.mlp: "MLP"}.get(part.path, part.path)
                without.setdefault(name, []).append(layer)
    return (
        *notes,
        *(
            f"the repair leaves the matrices of the {name} unchanged in {_blocks(layers, families)}, because no linear "
            "map there writes into the residual stream alone (as in a mixture of experts)"
            for name, layers in without.items()
            if layers
        ),
    )


def _blocks(layers: Sequence[int], families: Sequence[object]) -> str:
    if len(layers) == len(families):
        return "all blocks"
    return f"block {layers[0]}" if len(layers) == 1 else f"blocks {', '.join(map(str, layers))}"


def _require_plan_of(plan: PlanRecord, checkpoint: Checkpoint) -> None:
    """Raise unless a plan may have been made for this model in memory."""
    if plan.files:
        raise InputError("the plan was made for a model on disk; give its path")
    kind, layers = str(checkpoint.config.model_type), checkpoint.layers
    if (plan.layers, plan.family) != (layers, kind):
        raise InputError(
            f"the plan was made for a {plan.family} model of {counted(plan.layers, 'layer')}, and this is a "
            f"{kind} model of {counted(layers, 'layer')}; make a new plan"
        )


def calibration_sizes(settings: ShrinkOptions) -> CalibrationSizes:
    """Return the numbers of windows that the effort asks for."""
    effort = effort_of(settings)
    return CalibrationSizes(effort.fit, effort.select, effort.certify)


def _read(settings: ShrinkOptions, described: Described) -> CutTexts | Windows:
    """Read what was given and cut it into windows; nothing here needs the weights of the model."""
    data, tokenizer, whole = described.data, described.reader, described.whole
    config, sizes = whole.model.config, calibration_sizes(settings)
    if data.kind is not TEXT:
        quick = calibration_sizes(msgspec.structs.replace(settings, effort="quick")).total
        fewer = f", or use --effort quick, which needs {quick}" if quick < sizes.total else ""
        return read_data(
            data, tokenizer, config, wanted=sizes.total, seed=settings.seed, window=settings.window, least=sizes.total,
            advice=fewer,
        )  # fmt: skip
    decoder = whole.objective == "loss"
    return cut_texts(tokenizer, calibration_request(settings, config, described.source, decoder, tokenizer))


def calibration_request(
    settings: ShrinkOptions, config: Any, source: Source | None, decoder: bool, tokenizer: Any = None
) -> CalibrationRequest:
    """Return which windows of text a run needs; without a tokenizer, no special tokens are planned."""
    folder = None if source is None or source.gguf is not None else source.folder
    effort, context = effort_of(settings), longest_window(folder, context_length(config))
    return CalibrationRequest(
        find_texts(settings.text),
        calibration_sizes(settings),
        sampled=SAMPLED if settings.sampled is None else settings.sampled,
        window=min(effort.window, context or effort.window) if settings.window is None else settings.window,
        context=context,
        start=NO_TOKENS if tokenizer is None else plan_start(settings.bos, source, tokenizer),
        seed=settings.seed,
        decoder=decoder,
    )
