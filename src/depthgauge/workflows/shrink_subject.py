"""Open the model of `shrink`: check every option and file, load the weights, and prepare the calibration windows."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from depthgauge._format import counted
from depthgauge.checkpoints.load import (
    Checkpoint,
    Placement,
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    loader_of,
    refuse_infinite,
    wrap,
)
from depthgauge.checkpoints.source import Source, find
from depthgauge.checkpoints.start_token import Start, measure_start, plan_start
from depthgauge.checkpoints.text_files import find_text
from depthgauge.checkpoints.windows import require_rows
from depthgauge.errors import InputError, require_count, require_positive, require_seed, unknown_name
from depthgauge.progress import Step
from depthgauge.results.shrink_options import EFFORTS, GUARANTEES, OBJECTIVES, ShrinkOptions
from depthgauge.results.shrink_record import CalibrationRecord, PlanRecord, SourceRecord
from depthgauge.surgery.calibration import Calibration, prepare_calibration
from depthgauge.surgery.cut_texts import CalibrationRequest, CalibrationSizes, CutTexts, cut_texts
from depthgauge.surgery.effort import Effort, effort
from depthgauge.surgery.extract import require_supported
from depthgauge.surgery.guarantee import windows_needed
from depthgauge.surgery.stored_weights import file_digests, stored_dtype
from depthgauge.workflows.target import is_transformers_model, resolve_target

CONFIDENCE = 0.95
"""Default confidence of the guarantee."""
SAMPLED = 0.5
"""Default share of calibration windows that are sampled from the model."""
ABOUT_FILES = ("dtype", "device", "device_map", "trust_remote_code", "allow_pickle", "ignore_unused")
"""Options about how a model is loaded; they may differ from those of the plan."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The model to shrink and how.

    - `checkpoint`, `tokenizer`: the loaded model
    - `settings`: the options with their defaults filled in
    - `files`: SHA-256 of the weight files by name; empty for a model from memory
    - `stored`: dtype of the stored weights, in which the result is written; None keeps the dtype of the loaded ones
    - `start`: the special tokens around every window
    - `texts`: the windows of the texts, without special tokens
    - `fresh`: about how many seconds a new process takes to load it
    """

    checkpoint: Checkpoint
    tokenizer: Any
    settings: ShrinkOptions
    files: dict[str, str]
    stored: torch.dtype | None
    start: Start
    texts: CutTexts
    fresh: float = 0.0

    @property
    def decoder(self) -> bool:
        """Whether the model predicts tokens."""
        return self.checkpoint.objective == "loss"

    @property
    def effort(self) -> Effort:
        """The effort, with enough certify windows for the requested confidence."""
        return effort_of(self.settings)

    def calibrate(self, progress: Step, message: Callable[[str], None]) -> Calibration:
        """Sample calibration windows, and add those of the texts."""
        special = (self.start.before, self.start.after)
        return prepare_calibration(
            self.checkpoint, self.tokenizer, self.texts, special, progress=progress, message=message
        )

    def calibration_record(self, calibration: Calibration) -> CalibrationRecord:
        """Describe the calibration windows."""
        return CalibrationRecord(
            window=calibration.window,
            bos=self.start.bos,
            bos_reason=self.start.reason,
            sources=tuple(
                SourceRecord(
                    kind=source.kind,
                    name=source.name,
                    sha256=source.digest,
                    fit=source.fit,
                    select=source.select,
                    certify=source.certify,
                )
                for source in calibration.sources
            ),
            sha256=calibration.digest(),
        )


def effort_of(settings: ShrinkOptions) -> Effort:
    """Return the effort, with enough certify windows for the requested confidence."""
    chosen = effort(settings.effort or "default")
    least = windows_needed(confidence=settings.confidence or CONFIDENCE)
    return chosen if chosen.certify >= least else chosen.with_certify(least)


def window_of(settings: ShrinkOptions, config: Any) -> int:
    """Return the tokens per window: those asked for, or those of the effort, at most the model's context."""
    if settings.window is not None:
        return settings.window
    usual = effort_of(settings).window
    return min(usual, context_length(config) or usual)


def check_shrink_options(options: ShrinkOptions) -> None:
    """Raise for options that contradict each other or are out of range, before anything is read."""
    if options.effort is not None and options.effort not in EFFORTS:
        raise unknown_name("effort", options.effort, EFFORTS)
    if options.objective is not None and options.objective not in OBJECTIVES:
        raise unknown_name("objective", options.objective, OBJECTIVES)
    if options.guarantee is not None and options.guarantee not in GUARANTEES:
        raise unknown_name("guarantee", options.guarantee, GUARANTEES)
    if options.max_increase is not None:
        require_positive("max-increase", options.max_increase, "the largest increase of the loss in nats per token")
        if options.remove is not None:
            raise InputError("--remove and --max-increase exclude each other: give the size or the limit, not both")
    elif options.guarantee is not None:
        raise InputError("--guarantee says what --max-increase limits; give --max-increase too, or leave it out")
    if options.confidence is not None and not 0.5 <= options.confidence <= 0.9999:
        raise InputError(
            f"confidence must be a number from 0.5 to 0.9999, got {options.confidence!r}; it is the probability that "
            "the guarantee is true"
        )
    if options.heal is not None:
        require_count("heal", options.heal, "the number of training steps after the repair")
        if options.no_repair:
            raise InputError("--heal trains the weights and --no-repair keeps them; leave one of them out")
    if options.sampled is not None and not 0 <= options.sampled <= 1:
        raise InputError(f"sampled must be a share from 0 to 1, got {options.sampled!r}")
    require_seed(options.seed or 0)


def parse_remove(remove: str, layers: int, name: str) -> int:
    """Return the number of blocks that `--remove` stands for.

    It is a number such as `7`, or a share of all blocks such as `25%`, rounded down, at least 1.

    >>> parse_remove("25%", 30, "model"), parse_remove("10%", 4, "model")
    (7, 1)
    """
    if layers == 1:
        raise InputError(f"{name} has one block, and at least one must stay, so no block can be removed")
    if re.fullmatch(r"\d+", remove.strip()):
        count = int(remove)
    elif match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", remove.strip()):
        share = round(float(match[1]) * layers / 100, 6)  # 33.3333333333% of 12 blocks are 4
        count = max(1, math.floor(share)) if float(match[1]) > 0 else 0
    else:
        raise InputError(f"remove must be a whole number or a percentage, such as 7 or 25%, got {remove!r}")
    if not 1 <= count < layers:
        raise InputError(
            f"remove must be from 1 to {counted(layers - 1, 'block')}, got {remove}; {name} has {layers} blocks and at "
            "least one must stay"
        )
    return count


def with_plan(plan: PlanRecord, asked: ShrinkOptions) -> ShrinkOptions:
    """Return the settings of a plan, with the options that say where the model runs."""
    for name in asked.given():
        if name not in ABOUT_FILES:
            raise InputError(
                f"--{name.replace('_', '-')} cannot be combined with --from-plan, which contains all settings; leave "
                "it out, or make a new plan"
            )
    placed = {name: getattr(asked, name) for name in ABOUT_FILES if getattr(asked, name) is not None}
    return msgspec.structs.replace(plan.settings, **placed)


def open_subject(
    model: Any,
    settings: ShrinkOptions,
    tokenizer: Any,
    plan: PlanRecord | None,
    message: Callable[[str], None],
    check: Callable[[Source | None], None],
) -> Subject:
    """Load a model, after checking everything that can be checked without its weights.

    Args:
        model: a path, or a transformers model that is already in memory.
        settings: the options.
        tokenizer: the tokenizer of a model in memory.
        plan: the plan that will be followed; its digests must match.
        message: called with sentences such as the BOS decision.
        check: called with the source before the weights are read, to check the output.
    """
    # A new process imports the libraries again and loads the model. The CPU time of this process so far stands for the
    # imports; it is limited by the time of opening, because a long-running process has spent it on other work.
    before, started = time.process_time(), time.perf_counter()
    if not isinstance(model, str | Path):
        return _from_memory(model, settings, tokenizer, plan, check)
    target = resolve_target(model)
    if not Path(model).exists():
        raise InputError(f"cannot read {model}: no such file or directory")
    if target.network is not None or target.kind != "checkpoints" or target.path is None:
        raise InputError(
            f"{model} is not a checkpoint; shrink expects a directory of a transformers model or a .gguf file, and "
            "`depthgauge collapse` is for network files"
        )
    placement = Placement(
        dtype=settings.dtype or "auto",
        device=settings.device,
        device_map=settings.device_map,
        trust_remote_code=bool(settings.trust_remote_code),
        ignore_unused=bool(settings.ignore_unused),
    )
    source = find(target.path, bool(settings.allow_pickle))
    config = load_config(source, placement)
    decoder = loader_of(config)[1] == "loss"
    _check_kind(settings, decoder, str(model))
    if settings.remove is not None:
        parse_remove(settings.remove, int(config.get_text_config().num_hidden_layers), str(model))
    check(source)
    tokenizer = load_tokenizer(source, placement)
    start = plan_start(settings.bos or "auto", source, tokenizer)
    texts = _cut_texts(tokenizer, settings, config, start, decoder)
    files = file_digests(source)
    if plan is not None and plan.files != files:
        raise InputError(f"the plan was made for other weights than those of {model}; make a new plan")
    message(f"loading {source.path}")
    checkpoint = load_model(source, config, placement)
    require_supported(checkpoint)
    _require_in_memory(checkpoint.model, settings, str(model))
    stored = None if settings.dtype or source.gguf else stored_dtype(config, source)
    opened = time.perf_counter() - started
    subject = Subject(checkpoint, tokenizer, settings, files, stored, start, texts, opened + min(before, opened))
    return _decided(subject, message)


def _from_memory(
    model: Any,
    settings: ShrinkOptions,
    tokenizer: Any,
    plan: PlanRecord | None,
    check: Callable[[Source | None], None],
) -> Subject:
    if not is_transformers_model(model):
        raise InputError(
            f"model must be a path or a transformers model, got {type(model).__name__}; load it with AutoModel"
        )
    if tokenizer is None:
        raise InputError("a model in memory needs its tokenizer; give tokenizer=…")
    for name in ABOUT_FILES:
        if getattr(settings, name) is not None:
            raise InputError(f"{name} applies to models that are loaded from disk; the model is in memory already")
    if plan is not None and plan.files:
        raise InputError("the plan was made for a model on disk; give its path")
    checkpoint = wrap(model, resolve_target(model).name or "")
    require_supported(checkpoint)
    refuse_infinite(model, checkpoint.name)
    _require_in_memory(model, settings, checkpoint.name)
    if plan is not None and (plan.layers, plan.family) != (checkpoint.layers, str(checkpoint.config.model_type)):
        raise InputError(
            f"the plan was made for a {plan.family} model of {counted(plan.layers, 'layer')}, and this is a "
            f"{checkpoint.config.model_type} model of {counted(checkpoint.layers, 'layer')}; make a new plan"
        )
    _check_kind(settings, checkpoint.objective == "loss", checkpoint.name)
    if settings.remove is not None:
        parse_remove(settings.remove, checkpoint.layers, checkpoint.name)
    check(None)
    start = plan_start(settings.bos or "auto", None, tokenizer)
    texts = _cut_texts(tokenizer, settings, checkpoint.config, start, checkpoint.objective == "loss")
    return _decided(Subject(checkpoint, tokenizer, settings, {}, None, start, texts), lambda sentence: None)


def _check_kind(settings: ShrinkOptions, decoder: bool, name: str) -> None:
    """Raise for options that do not apply to models that are not causal language models."""
    if decoder:
        if settings.objective == "states":
            raise InputError("objective states is for models that are not causal language models; use loss or kl")
        if settings.sampled is not None and settings.sampled != 1 and not settings.text:
            raise InputError(
                f"--sampled {settings.sampled:g} needs --text: without text, all windows are sampled from the model; "
                "give a text, or leave --sampled out"
            )
        return
    if settings.max_increase is not None:
        raise InputError(
            f"--max-increase limits the loss of a language model, and {name} is none; use --remove, the result shows "
            "how far its final states move"
        )
    if settings.objective in ("loss", "kl"):
        raise InputError(f"objective {settings.objective} needs a language model, and {name} is none; use states")


def _cut_texts(tokenizer: Any, settings: ShrinkOptions, config: Any, start: Start, decoder: bool) -> CutTexts:
    """Read the texts and cut them into windows; nothing here needs the weights."""
    sizes = effort_of(settings)
    request = CalibrationRequest(
        tuple(find_text(text, bool(settings.as_is)) for text in settings.text or ()),
        CalibrationSizes(sizes.fit, sizes.select, sizes.certify),
        sampled=SAMPLED if settings.sampled is None else settings.sampled,
        window=window_of(settings, config),
        context=context_length(config),
        start=start,
        seed=settings.seed or 0,
        decoder=decoder,
    )
    return cut_texts(tokenizer, request)


def _decided(subject: Subject, message: Callable[[str], None]) -> Subject:
    """Decide about the BOS token where it must be measured: on windows that are not in the certify part."""
    require_rows(subject.checkpoint, subject.texts.ids)
    start = measure_start(subject.start, subject.checkpoint, subject.texts.measured)
    if subject.start.candidate is not None and subject.decoder:
        message(f"BOS token {'added' if start.bos else 'not added'}: {start.reason}")
    return replace(subject, start=start)


def _require_in_memory(model: Any, settings: ShrinkOptions, name: str) -> None:
    """Raise if weights that the repair would change are not in memory."""
    if not settings.no_repair and any(weight.is_meta for weight in model.parameters()):
        raise InputError(
            f"{name} does not fit the memory of its devices, and weights that are loaded on demand cannot be repaired; "
            "use more devices, or --no-repair"
        )
