"""`shrink`: remove blocks from a checkpoint, repair the rest, bound what it costs, and write the smaller model."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgauge._format import counted
from depthgauge._io import write_text
from depthgauge._version import __version__
from depthgauge.errors import InputError
from depthgauge.progress import Step, silent
from depthgauge.report.write import write_report
from depthgauge.results.shrink_options import ShrinkOptions, make_shrink_options
from depthgauge.results.shrink_record import PlanRecord, ShrinkRecord, read_plan
from depthgauge.surgery.journal import Journal, journal_folder
from depthgauge.surgery.speed import weight_bytes
from depthgauge.surgery.stored_weights import weights_digest
from depthgauge.surgery.write_model import check_output_directory, remove_unfinished
from depthgauge.workflows.partial import no_message
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
        resume: continue an interrupted run with the same `out`.
        overwrite: replace a checkpoint at `out`.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell, such as the expected duration.
        **fields: any option of `ShrinkOptions` by name, such as `remove=7`; overrides `options`.

    Returns:
        A `ShrinkResult`: `record`, `model`, `plan`, `save()`, `report()`, `to_json()`.

    Raises:
        InputError: the model or an option cannot be used.
    """
    started = time.perf_counter()
    work = _prepare(model, options, fields, tokenizer, plan, out, resume, overwrite, progress, message)
    with work.shrinker(writes=out is not None) as shrinker:
        made = work.from_limit(shrinker) if work.limit is not None else work.from_count(shrinker)
    if made.model is None:
        work.journal.delete()
        return ShrinkResult(unreached(work.subject, made, work.calibration, started), None, None)
    finished = finish(work.subject, made, work.calibration, started, progress)
    record = finished.record(finished.measured(), None) if out is None else write_result(finished, out, overwrite)
    work.journal.delete()
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
        overwrite: start again where an interrupted search left its steps.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell.
        **fields: any option of `ShrinkOptions` by name.

    Returns:
        The plan; `shrink(model, plan=plan)` follows it.
    """
    asked = make_shrink_options(options, fields)
    if asked.max_increase is not None:
        raise InputError("a plan needs the number of blocks: --max-increase finds it by testing; use --remove")
    work = _prepare(model, asked, {}, tokenizer, None, None, resume, overwrite, progress, message, journal_at=out)
    with work.shrinker(stops=True) as shrinker:
        removed = work.search(shrinker)
        found = work.plan_record(shrinker, removed)
    if out is not None:
        write_text(Path(out), found.dump())
    work.journal.delete()
    return found


def _prepare(
    model: Any,
    options: ShrinkOptions | None,
    fields: dict[str, Any],
    tokenizer: Any,
    plan: PlanRecord | str | Path | None,
    out: str | Path | None,
    resume: bool,
    overwrite: bool,
    progress: Step,
    message: Callable[[str], None],
    journal_at: str | Path | None = None,
) -> Work:
    """Check everything, load the model and prepare the calibration windows."""
    asked = make_shrink_options(options, fields)
    followed = read_plan(plan) if isinstance(plan, str | Path) else plan
    settings = asked if followed is None else with_plan(followed, asked)
    check_shrink_options(settings)
    if settings.remove is None and settings.max_increase is None:
        raise InputError("say how much to remove: a number or a share with --remove, or a limit with --max-increase")
    place = out if journal_at is None else journal_at
    if resume and place is None:
        raise InputError("--resume needs the output of the interrupted run; give the same --out as before")

    def check(source: Any) -> None:
        if out is not None:
            # A GGUF file is quantized, so the size of what is written is not known yet.
            needed = 0 if source is None or source.gguf is not None else weight_bytes(source)
            check_output_directory(out, source, overwrite, needed)
            if resume:
                remove_unfinished(out)
        if place is not None and journal_folder(place).exists() and not resume and not overwrite:
            raise InputError(
                f"{journal_folder(place)} belongs to an interrupted run; continue it with --resume, or use --overwrite "
                "to start again"
            )

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
    journal = Journal(None if place is None else journal_folder(place), about, resume)
    calibration = subject.calibrate(progress, message)
    journal.describe("digest of the calibration windows", calibration.digest())
    if followed is not None and followed.calibration.sha256 != calibration.digest():
        message("the calibration windows differ from those of the plan (another text, device or version)")
    return Work(subject, calibration, journal, followed, progress, message)
