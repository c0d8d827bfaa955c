"""`shrink`: remove blocks from a checkpoint, repair the rest, bound what it costs, and write the smaller model."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgauge._format import counted
from depthgauge._io import check_outputs
from depthgauge._journal import Journal
from depthgauge._version import __version__
from depthgauge.checkpoints.source import Source
from depthgauge.checkpoints.text_files import split_field
from depthgauge.errors import InputError
from depthgauge.progress import Step, no_message, silent
from depthgauge.report.write import page_of, plotly_code, write_report
from depthgauge.results.shrink_options import ShrinkOptions, make_shrink_options
from depthgauge.results.shrink_record import PlanRecord, ShrinkRecord, read_plan
from depthgauge.surgery.speed import weight_bytes
from depthgauge.surgery.stored_weights import weights_digest
from depthgauge.surgery.write_model import check_output_directory, remove_unfinished
from depthgauge.workflows.shrink_output import Finished, finish, unreached, write_result
from depthgauge.workflows.shrink_subject import check_shrink_options, open_subject, with_plan
from depthgauge.workflows.shrink_work import Work


@dataclass(frozen=True, eq=False)
class ShrinkResult:
    """The result of `shrink`.

    - `record`: everything that was decided and measured
    - `model`: the shrunk transformers model; None if no size is within `max_increase`
    - `finished`: what is needed to write it; None if there is no model
    """

    record: ShrinkRecord
    model: Any
    finished: Finished | None

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
        if self.finished is None:
            raise InputError("no size is within max_increase, so there is no model to write; allow a larger increase")
        return write_result(self.finished, out, overwrite)

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
        tokenizer: the tokenizer of a model in memory.
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
    settings, followed = _settings(options, fields, plan)
    if report is not None:
        plotly_code()  # raises now if the extra is missing
        if out is not None and Path(out).resolve() in Path(report).resolve().parents:
            raise InputError(f"--report {report} is inside --out, which is written as a whole; give a file next to it")
    with Journal(out, resume=resume, overwrite=overwrite, message=message) as journal:
        inputs = _inputs(model, settings) | {"--from-plan": plan if isinstance(plan, str | Path) else None}
        check_outputs({"--report": report}, inputs, overwrite=overwrite, is_own=journal.has_written)

        def check(source: Source | None) -> None:
            if out is not None:
                # A GGUF file is quantized, so the size of what is written is not known yet.
                needed = 0 if source is None or source.gguf is not None else weight_bytes(source)
                check_output_directory(out, source, overwrite or journal.has_written(out), needed)
                if resume:
                    remove_unfinished(out)

        work = _prepare(model, settings, followed, tokenizer, journal, progress, message, check)
        with work.shrinker(writes=out is not None) as shrinker:
            made = work.from_limit(shrinker) if work.limit is not None else work.from_count(shrinker)
        finished = None
        if made.model is None:
            record = unreached(work.subject, made, work.calibration, started)
        else:
            finished = finish(work.subject, made, work.calibration, started, progress)
            if out is None:
                record = finished.record(finished.measured(), None)
            else:
                record = write_result(finished, out, overwrite or journal.has_written(out), journal)
                message(f"model written to {out}")
        if report is not None:
            journal.write(report, page_of(record), overwrite)
            message(f"page written to {report}")
    return ShrinkResult(record, made.model, finished)


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
        tokenizer: the tokenizer of a model in memory.
        out: a file to write the plan to; the steps of an interrupted search are kept next to it.
        resume: continue an interrupted search.
        overwrite: replace a file at `out`, and start again where an interrupted search has stopped.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell.
        **fields: any option of `ShrinkOptions` by name.

    Returns:
        The plan; `shrink(model, plan=plan)` follows it.
    """
    settings, _ = _settings(options, fields, None)
    if settings.max_increase is not None:
        raise InputError("a plan needs the number of blocks: --max-increase finds it by testing; use --remove")
    with Journal(out, resume=resume, overwrite=overwrite, message=message) as journal:
        inputs = _inputs(model, settings)
        check_outputs({"--plan-only": out}, inputs, overwrite=overwrite, is_own=journal.has_written)
        work = _prepare(model, settings, None, tokenizer, journal, progress, message)
        with work.shrinker(stops=True) as shrinker:
            removed = work.search(shrinker)
            found = work.plan_record(shrinker, removed)
        if out is not None:
            journal.write(out, found.dump(), overwrite)
    return found


def _settings(
    options: ShrinkOptions | None, fields: dict[str, Any], plan: PlanRecord | str | Path | None
) -> tuple[ShrinkOptions, PlanRecord | None]:
    """Return the checked options, and the plan that is followed, if any."""
    asked = make_shrink_options(options, fields)
    followed = read_plan(plan) if isinstance(plan, str | Path) else plan
    settings = asked if followed is None else with_plan(followed, asked)
    check_shrink_options(settings)
    if settings.remove is None and settings.max_increase is None:
        raise InputError("say how much to remove: a number or a share with --remove, or a limit with --max-increase")
    return settings, followed


def _inputs(model: Any, settings: ShrinkOptions) -> dict[str, str | Path | None]:
    """Return option → path of everything that is read and that no output may replace."""
    path = model if isinstance(model, str | Path) else None
    return {"MODEL": path, **{f"--text {text}": split_field(text)[0] for text in settings.text or ()}}


def _prepare(
    model: Any,
    settings: ShrinkOptions,
    followed: PlanRecord | None,
    tokenizer: Any,
    journal: Journal,
    progress: Step,
    message: Callable[[str], None],
    check: Callable[[Source | None], None] = lambda source: None,
) -> Work:
    """Load the model and prepare the calibration windows; `check` is called before the weights are read."""
    subject = open_subject(model, settings, tokenizer, followed, message, check)
    about = {
        "version": __version__,
        "model": str(model) if isinstance(model, str | Path) else subject.checkpoint.name,
        "files": subject.files,
        "settings": settings.to_json(),
        "removed": None if followed is None else list(followed.removed),
        "window": [list(subject.start.before), list(subject.start.after)],
    }
    if not subject.files:
        about["digest of the weights"] = weights_digest(subject.checkpoint.model)
    journal.begin(about)
    calibration = subject.calibrate(progress, message)
    journal.describe("digest of the calibration windows", calibration.digest())
    if followed is not None and followed.calibration.sha256 != calibration.digest():
        message("the calibration windows differ from those of the plan (another text, device or version)")
    return Work(subject, calibration, journal, followed, progress, message)
