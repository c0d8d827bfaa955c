"""`shrink`: remove blocks from a checkpoint, repair the rest, bound what it costs, and write the smaller model."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from depthgauge._format import counted
from depthgauge._io import check_outputs
from depthgauge._journal import Journal
from depthgauge._version import __version__
from depthgauge.checkpoints.library import transformers
from depthgauge.checkpoints.load import parameter_count
from depthgauge.checkpoints.source import Source, find, weight_bytes, weights_digest
from depthgauge.checkpoints.text_files import split_field
from depthgauge.errors import InputError
from depthgauge.progress import Step, no_message, silent
from depthgauge.report.write import page_of, plotly_code, write_report
from depthgauge.results.record import take_directory
from depthgauge.results.shrink_options import ABOUT_FILES, ShrinkOptions, make_shrink_options
from depthgauge.results.shrink_record import BeforeAfter, CurvePoint, PlanRecord, ShrinkRecord, TestedSize, read_plan
from depthgauge.surgery.calibration import Calibration, prepare_calibration
from depthgauge.surgery.certify import Certifier, as_dtype
from depthgauge.surgery.open_model import OpenedModel, open_model
from depthgauge.surgery.shrinker import Shrinker
from depthgauge.surgery.shrunk_model import ShrunkModel, largest_within, make_model
from depthgauge.surgery.speed import compare_speed
from depthgauge.surgery.student import effort_of
from depthgauge.surgery.write_model import check_output_directory, remove_unfinished
from depthgauge.surgery.write_shrunk import write_shrunk
from depthgauge.workflows.shrink_estimate import time_left
from depthgauge.workflows.target import is_transformers_model, resolve_target


@dataclass(frozen=True, eq=False)
class ShrinkResult:
    """The result of `shrink`.

    - `record`: everything that was decided and measured
    - `model`: the shrunk transformers model; None if no size is within `max_increase`
    - `opened`, `certifier`: the source model and the certify windows, which `save` needs
    """

    record: ShrinkRecord
    model: Any
    opened: OpenedModel
    certifier: Certifier

    def __repr__(self) -> str:
        record = self.record
        return f"ShrinkResult({record.name!r}, {record.layers_before} → {counted(record.layers_after, 'layer')})"

    @property
    def plan(self) -> PlanRecord:
        """Which blocks were removed and how they were chosen."""
        return self.record.plan

    def to_json(self) -> dict[str, Any]:
        """Return the result document."""
        return self.record.to_json()

    def save(self, out: str | Path, overwrite: bool = False) -> ShrinkRecord:
        """Write the model to a new directory, load it in a fresh process and compare.

        Args:
            out: the directory to create.
            overwrite: replace a checkpoint that exists.

        Returns:
            The record with the losses of the reloaded model.
        """
        if self.model is None:
            raise InputError("no size is within max_increase, so there is no model to write; allow a larger increase")
        checkpoint, tokenizer = self.opened.checkpoint, self.opened.tokenizer
        return write_shrunk(self.model, self.record, self.certifier, checkpoint, tokenizer, out, overwrite=overwrite)

    def report(self, path: str | Path) -> Path:
        """Write the result as one self-contained HTML page (extra `report`).

        Args:
            path: the page to write.

        Returns:
            The path of the page.
        """
        return write_report(self.record, path)


def shrink(
    model: Any,
    options: ShrinkOptions | None = None,
    *,
    tokenizer: Any = None,
    plan: PlanRecord | str | Path | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
    **fields: Any,
) -> ShrinkResult:
    """Remove blocks from a checkpoint, repair the rest, and bound how much worse the smaller model is.

    Args:
        model: a checkpoint directory, a GGUF file, or a transformers model in memory.
        options: what to do; see `ShrinkOptions`.
        tokenizer: the tokenizer of a model in memory, or the directory of one that replaces a checkpoint's.
        plan: a plan, or the file of one, that says which blocks to remove; it replaces the search.
        out: the directory to write the smaller model to; None keeps it in memory.
        report: a file to write a page with charts to (extra `report`).
        resume: continue an interrupted run with the same `out`.
        overwrite: replace a checkpoint at `out` and a file at `report`, and start again where an interrupted run has
            stopped. A directory with any file that does not belong to a checkpoint is never replaced.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell, such as the expected duration.
        **fields: any option of `ShrinkOptions` by name, such as `remove=7`; overrides `options`.

    Returns:
        A `ShrinkResult`: `record`, `model`, `plan`, `save()`, `report()`, `to_json()`.

    Raises:
        InputError: the model or an option cannot be used.
    """
    started = time.perf_counter()
    followed = read_plan(plan) if isinstance(plan, str | Path) else plan
    tokenizer = take_directory(tokenizer, fields)
    settings = _settings(options, fields, followed)
    if report is not None:
        plotly_code()  # raises now if the extra is missing
        if out is not None and Path(out).resolve() in Path(report).resolve().parents:
            raise InputError(f"--report {report} is inside --out, which is written as a whole; give a file next to it")
    with Journal(out, resume=resume, overwrite=overwrite, message=message) as journal:
        inputs = _inputs(model, settings) | {"--from-plan": plan if isinstance(plan, str | Path) else None}
        check_outputs({"--report": report}, inputs, overwrite=overwrite, is_own=journal.has_written)
        source = _find_source(model, settings)
        if out is not None:
            overwrite_out = overwrite or journal.has_written(out)
            # A GGUF file is quantized, so the size of what is written is not known yet.
            needed = 0 if source is None or source.gguf is not None else weight_bytes(source)
            check_output_directory(out, source, overwrite_out, needed)
            if resume:
                remove_unfinished(out)
        opened = open_model(model, source, settings, tokenizer, followed, message)
        calibration, shrinker = _calibrate(model, opened, settings, followed, journal, progress, message)
        limit = settings.max_increase if followed is None else None  # a plan has its size
        dense, is_loss = opened.checkpoint.model, opened.checkpoint.objective == "loss"
        with shrinker:
            message(time_left(shrinker, opened, calibration, settings, followed, writes=out is not None))
            certifier = Certifier(dense, calibration, settings.confidence, loss=is_loss, progress=progress)
            shrunk: ShrunkModel | None
            tested: tuple[TestedSize, ...] = ()
            if limit is None:
                removed = _search(shrinker, settings) if followed is None else followed.removed
                shrunk = make_model(shrinker, removed, settings, opened.stored)
            else:
                shrunk, tested = largest_within(shrinker, certifier, limit, settings, opened.stored)
            curve = () if shrunk is None else shrinker.curve(shrunk.removed, shrunk.objective)
        found = followed or _plan(opened, calibration, settings, shrinker, () if shrunk is None else shrunk.removed)
        record = _describe(opened, found, certifier, limit, tested, shrunk, curve, started)
        if shrunk is not None and out is None:
            record = certifier.certified(record, certifier.measure(shrunk.model))
        elif shrunk is not None and out is not None:
            record = write_shrunk(
                shrunk.model, record, certifier, opened.checkpoint, opened.tokenizer, out,
                overwrite=overwrite_out, journal=journal,
            )  # fmt: skip
            message(f"model written to {out}")
        if report is not None:
            journal.write(report, page_of(record), overwrite)
            message(f"page written to {report}")
    return ShrinkResult(record, None if shrunk is None else shrunk.model, opened, certifier)


def plan_shrink(
    model: Any,
    options: ShrinkOptions | None = None,
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
    **fields: Any,
) -> PlanRecord:
    """Search for the blocks to remove, without making the smaller model.

    Args:
        model: a checkpoint directory, a GGUF file, or a transformers model in memory.
        options: what to do; see `ShrinkOptions`. A number of blocks is needed.
        tokenizer: the tokenizer of a model in memory, or the directory of one that replaces a checkpoint's.
        out: a file to write the plan to; the steps of an interrupted search are kept next to it.
        resume: continue an interrupted search.
        overwrite: replace a file at `out`, and start again where an interrupted search has stopped.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell.
        **fields: any option of `ShrinkOptions` by name.

    Returns:
        The plan; `shrink(model, plan=plan)` follows it.
    """
    tokenizer = take_directory(tokenizer, fields)
    settings = _settings(options, fields, None)
    if settings.max_increase is not None:
        raise InputError("a plan needs the number of blocks: --max-increase finds it by testing; use --remove")
    with Journal(out, resume=resume, overwrite=overwrite, message=message) as journal:
        inputs = _inputs(model, settings)
        check_outputs({"--plan-only": out}, inputs, overwrite=overwrite, is_own=journal.has_written)
        opened = open_model(model, _find_source(model, settings), settings, tokenizer, None, message)
        calibration, shrinker = _calibrate(model, opened, settings, None, journal, progress, message)
        with shrinker:
            message(time_left(shrinker, opened, calibration, settings, None, stops=True))
            removed = _search(shrinker, settings)
        found = _plan(opened, calibration, settings, shrinker, removed)
        if out is not None:
            journal.write(out, found.dump(), overwrite)
    return found


def _settings(options: ShrinkOptions | None, fields: dict[str, Any], plan: PlanRecord | None) -> ShrinkOptions:
    """Return the checked options: those given, or those of a plan with the given ones about loading the model."""
    settings = make_shrink_options(options, fields)
    if plan is not None:
        given = settings.given()
        for name in given:
            if name not in (*ABOUT_FILES, "force"):
                raise InputError(
                    f"--{name.replace('_', '-')} cannot be combined with --from-plan, which contains all settings; "
                    "leave it out, or make a new plan"
                )
        settings = msgspec.structs.replace(plan.settings, **given)
    settings.check()
    return settings


def _inputs(model: Any, settings: ShrinkOptions) -> dict[str, str | Path | None]:
    """Return option → path of everything that is read and that no output may replace."""
    path = model if isinstance(model, str | Path) else None
    return {
        "MODEL": path,
        "--tokenizer": settings.tokenizer,
        **{f"--text {text}": split_field(text)[0] for text in settings.text},
    }


def _find_source(model: Any, settings: ShrinkOptions) -> Source | None:
    """Return the checkpoint of a path, or None for a model in memory."""
    if is_transformers_model(model):
        return None
    if not isinstance(model, str | Path):
        raise InputError(
            f"model must be a path or a transformers model, got {type(model).__name__}; load it with AutoModel"
        )
    target = resolve_target(model)
    if not Path(model).exists():
        raise InputError(f"cannot read {model}: no such file or directory")
    if target.kind != "checkpoints" or target.path is None:
        raise InputError(
            f"{model} is not a checkpoint; shrink expects a directory of a transformers model or a .gguf file, and "
            "`depthgauge collapse` is for network files"
        )
    return find(target.path, settings.allow_pickle, settings.tokenizer)


def _calibrate(
    model: Any,
    opened: OpenedModel,
    settings: ShrinkOptions,
    followed: PlanRecord | None,
    journal: Journal,
    progress: Step,
    message: Callable[[str], None],
) -> tuple[Calibration, Shrinker]:
    """Describe the run in its journal, prepare the calibration windows, and run the dense model on them."""
    about = {
        "version": __version__,
        "model": str(model) if isinstance(model, str | Path) else opened.checkpoint.name,
        "files": opened.files,
        "settings": settings.to_json(),
        "removed": None if followed is None else list(followed.removed),
        "window": [list(opened.start.before), list(opened.start.after)],
    }
    if not opened.files:
        about["digest of the weights"] = weights_digest(opened.checkpoint.model)
    journal.begin(about)
    calibration = prepare_calibration(
        opened.checkpoint, opened.tokenizer, opened.texts, opened.start, progress=progress, message=message
    )
    digest = calibration.record.sha256
    journal.describe("digest of the calibration windows", digest)
    if followed is not None and followed.calibration.sha256 != digest:
        message("the calibration windows differ from those of the plan (another text, device or version)")
    fit, select, repair = calibration.fit.ids, calibration.select.ids, not settings.no_repair
    return calibration, Shrinker(
        opened.checkpoint, fit, select, effort=effort_of(settings), repair=repair, journal=journal, progress=progress
    )


def _search(shrinker: Shrinker, settings: ShrinkOptions) -> tuple[int, ...]:
    """Return the blocks to remove."""
    shrinker.remove_until(settings.count(shrinker.checkpoint.layers, shrinker.checkpoint.name))
    shrinker.exchange()
    return shrinker.removed


def _plan(
    opened: OpenedModel, calibration: Calibration, settings: ShrinkOptions, shrinker: Shrinker, removed: tuple[int, ...]
) -> PlanRecord:
    checkpoint = opened.checkpoint
    return PlanRecord(
        version=__version__,
        model=checkpoint.name if checkpoint.source is None else str(checkpoint.source.path),
        family=str(checkpoint.config.model_type),
        files=opened.files,
        layers=checkpoint.layers,
        removed=removed,
        search=shrinker.steps,
        swaps=shrinker.swaps,
        settings=settings,
        calibration=calibration.record,
    )


def _describe(
    opened: OpenedModel,
    plan: PlanRecord,
    certifier: Certifier,
    limit: float | None,
    tested: tuple[TestedSize, ...],
    shrunk: ShrunkModel | None,
    curve: tuple[CurvePoint, ...],
    started: float,
) -> ShrinkRecord:
    """Describe a run before its losses are known; measures the speed of both models.

    There is no shrunk model if no size stays within the limit.
    """
    checkpoint = opened.checkpoint
    made = shrunk or ShrunkModel(None, (), (), None, 0.0)
    after = None if shrunk is None else parameter_count(shrunk.model)
    record = ShrinkRecord(
        version=__version__,
        name=checkpoint.name,
        objective=checkpoint.objective,
        layers_before=checkpoint.layers,
        layers_after=checkpoint.layers - len(made.removed),
        removed=made.removed,
        repaired=made.repaired,
        **certifier.uncertified(limit, tested),
        speed=None,
        parameters=BeforeAfter(before=parameter_count(checkpoint.model), after=after),
        bytes=BeforeAfter(before=None if checkpoint.source is None else weight_bytes(checkpoint.source), after=None),
        memory=None,
        curve=curve,
        repair=made.repair,
        heal=made.heal,
        reload=None,
        plan=plan,
        notes=(),
        versions={
            "depthgauge": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": str(transformers().__version__),
            "machine": platform.machine(),
        },
        seconds=0.0,
        out=None,
    )
    changes: dict[str, Any] = {}
    if shrunk is not None:
        certifier.progress(0, 1, "speed of both models")
        dense = checkpoint.model
        speed, memory, kind = compare_speed(dense, as_dtype(shrunk.model, dense.dtype), certifier.ids[:1])
        changes = {"speed": speed, "memory": memory, "notes": (*_notes(record, opened, shrunk), f"memory: {kind}")}
    return msgspec.structs.replace(record, **changes, seconds=time.perf_counter() - started)


def _notes(record: ShrinkRecord, opened: OpenedModel, shrunk: ShrunkModel) -> list[str]:
    checkpoint, notes = opened.checkpoint, []
    if checkpoint.source is not None and checkpoint.source.gguf is not None:
        notes.append("the source is a quantized GGUF file; its weights were dequantized and written as safetensors")
    if checkpoint.source is not None and checkpoint.source.tokenizer is not None:
        notes.append(f"the tokenizer is that of {checkpoint.source.tokenizer}")
    if checkpoint.objective != "loss":
        notes.append(
            "the model is not a causal language model: the numbers are relative distances of its final states from "
            "the dense model's, and no perplexity is claimed"
        )
        if checkpoint.measured is not checkpoint.model:
            head = type(checkpoint.model).__name__
            notes.append(f"the head of the {head} was kept unchanged; its own loss was not measured")
    if shrunk.repair and not shrunk.repaired:
        notes.append("no repair lowered the objective on the selection windows, so no weight was changed")
    if shrunk.heal is not None and not shrunk.heal.kept:
        notes.append("healing did not lower the objective on the selection windows, so its result was discarded")
    if record.looks > 1 and record.guarantee is not None and not record.guarantee.tested:
        notes.append(
            f"the plan is that of a run with --max-increase, which may have tested {record.looks} sizes on these "
            "windows; the bounds allow for it"
        )
    return notes
