"""`shrink`: remove blocks from a checkpoint, repair the rest, bound what it costs, and write the smaller model."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted
from depthgauge.base.io import check_outputs
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Step, no_message, silent
from depthgauge.checkpoints.inputs.found_data import check_files, checked_data, class_in_config
from depthgauge.checkpoints.inputs.text_files import find_general, input_paths
from depthgauge.checkpoints.source.hub import parse_hub_name
from depthgauge.checkpoints.source.model_files import Source, weight_bytes
from depthgauge.checkpoints.tasks.known_tasks import task_folders
from depthgauge.report.page import check_page, sizes_page_text, write_report
from depthgauge.results.evaluate_record import split_tasks
from depthgauge.results.gauge_record import ABOUT_FILES
from depthgauge.results.record import take_directory
from depthgauge.results.shrink_record import PlanRecord, ShrinkOptions, ShrinkRecord, make_shrink_options, read_plan
from depthgauge.surgery.write_model import (
    check_gguf_output,
    check_output_directory,
    has_written,
    is_gguf_name,
    output_folders,
    record_file,
    remove_unfinished,
)
from depthgauge.workflows.target import is_transformers_model, require_checkpoint, resolved

if TYPE_CHECKING:
    from depthgauge.surgery.certify import Certifier
    from depthgauge.surgery.open_model import OpenedModel

PLAN_ENDING = ".json"
"""What the name of a plan ends with."""


@dataclass(frozen=True, eq=False)
class ShrinkResult:
    """The result of `shrink`.

    - `record`: everything that was decided and measured
    - `model`: the shrunk transformers model; None if no size is within `max_increase`
    - `opened`, `certifier`: the source model and the certify windows, which `save` needs
    - `sizes`: with several numbers in `remove`, the results of all of them, this one last; otherwise this one alone
    """

    record: ShrinkRecord
    model: Any
    opened: "OpenedModel"
    certifier: "Certifier"
    sizes: tuple["ShrinkResult", ...] = ()

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
        if is_gguf_name(out):
            raise InputError(
                f"{out} is a GGUF file, whose rounded weights must be measured; give it to shrink() as out, or give a "
                "directory"
            )
        if self.model is None:
            raise InputError("no size is within max_increase, so there is no model to write; allow a larger increase")
        from depthgauge.surgery.write_shrunk import checked_directory, write_documents

        opened, certifier, record = self.opened, self.certifier, self.record
        limit, tested = (None, ()) if record.guarantee is None else (record.guarantee.limit, record.guarantee.tested)
        with checked_directory(
            self.model,
            certifier,
            opened.checkpoint,
            opened.tokenizer,
            out,
            overwrite=overwrite,
            is_spread=record.plan.settings.is_spread,
        ) as checked:
            losses = certifier.run(self.model) if checked.found is None else checked.found
            certified = certifier.certified(losses, record.plan.looks(tested), limit, tested)
            size = msgspec.structs.replace(record.bytes, after=checked.size)
            record = msgspec.structs.replace(
                record, loss=certified.loss, texts=certified.texts, accuracy=certified.accuracy,
                guarantee=certified.guarantee, bytes=size, reload=checked.reload, out=str(out),
            )  # fmt: skip
            write_documents(checked, record, opened.checkpoint, Journal(), overwrite)
        return record

    def report(self, path: str | Path) -> Path:
        """Write the result as one self-contained HTML page (extra `report`), and return its path."""
        return write_report(self.record, path)


def shrink(
    model: Any,
    options: ShrinkOptions | None = None,
    *,
    tokenizer: Any = None,
    plan: PlanRecord | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    overwrite: bool = False,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
    **fields: Any,
) -> ShrinkResult:
    """Remove blocks from a checkpoint, repair the rest, and bound how much worse the smaller model is.

    Args:
        model: a checkpoint directory, a GGUF file, a name on the Hugging Face hub, or a transformers model in memory.
        options: what to do; see `ShrinkOptions`.
        tokenizer: the tokenizer of a model in memory, or its image processor if it reads images; or the directory of a
            tokenizer that replaces a checkpoint's.
        plan: a plan in memory, which says which blocks to remove; the file of one is given as `remove="plan.json"`.
        out: the directory to write the smaller model to, or, if the model is a GGUF file, a name that ends with
            `.gguf`; None keeps it in memory. With several numbers in `remove`, the outputs are `OUT-2`, `OUT-4`, ….
        report: a file to write a page with charts to (extra `report`).
        overwrite: replace a checkpoint at `out` and a file at `report`, and an interrupted run with other options. A
            directory with any file that does not belong to a checkpoint is never replaced.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell, such as the memory that is needed.
        **fields: any option of `ShrinkOptions` by name, such as `remove=7`; overrides `options`.

    Returns:
        A `ShrinkResult`: `record`, `model`, `plan`, `save()`, `report()`, `to_json()`. With several numbers
        in `remove`, it is the result with the most blocks removed, and its `sizes` has all of them.

    Raises:
        InputError: the model or an option cannot be used.
    """
    tokenizer = take_directory(tokenizer, fields)
    settings, followed, plan_file = _settings(options, fields, plan)
    if report is not None:
        check_page(report)
        if out is not None and Path(out).resolve() in Path(report).resolve().parents:
            raise InputError(f"--report {report} is inside --out, which is written as a whole; give a file next to it")
    if out is not None and Path(out).suffix.lower() == PLAN_ENDING:
        raise InputError(f"{out} is the name of a plan, which plan_shrink() writes; give a directory or a .gguf file")
    as_gguf = is_gguf_name(out)
    if settings.gguf_type is not None and not as_gguf:
        raise InputError(f"--dtype {settings.dtype} is a type of GGUF files; give --out a name that ends with .gguf")
    with Journal(out, overwrite=overwrite, message=message) as journal:
        inputs = _inputs(model, settings) | {"--remove": plan_file}
        check_outputs({"--report": report}, inputs, overwrite=overwrite, is_own=journal.has_written)
        places = output_folders(out, settings) if out is not None else []
        for place in places:  # before a download
            if as_gguf:
                files = {"--out": place, "the record of --out": record_file(place)}
                written = has_written(journal, place)
                check_outputs(files, inputs, overwrite=overwrite or written, is_own=journal.has_written)
            elif parse_hub_name(model) is not None:
                check_output_directory(place, None, overwrite or journal.has_written(place))
        source = _find_source(model, settings, message, places)
        if as_gguf:
            check_gguf_output(source, settings.gguf_type, "a model in memory" if source is None else str(source.path))
        for place in [] if as_gguf else places:
            # A GGUF file is quantized, so the size of what is written is not known yet.
            needed = 0 if source is None or source.gguf is not None else weight_bytes(source)
            check_output_directory(place, source, overwrite or journal.has_written(place), needed)
            if journal.is_continued:
                remove_unfinished(place)
        # torch and transformers take seconds
        from depthgauge.workflows.shrink_run import make_models
        from depthgauge.workflows.shrink_stages import DIRECTORY, GGUF, MEMORY, Run

        makes = MEMORY if out is None else GGUF if as_gguf else DIRECTORY
        run = Run(settings, followed, journal, progress, message)
        made = make_models(run, model, source, tokenizer, makes, out, overwrite)
        if report is not None:
            journal.write(report, sizes_page_text([finished.record for finished in made]), overwrite)
            message(f"page written to {report}")
    results = tuple(
        ShrinkResult(finished.record, finished.model, finished.work.opened, finished.certifier) for finished in made
    )
    return replace(results[-1], sizes=results)


def plan_shrink(
    model: Any,
    options: ShrinkOptions | None = None,
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
    **fields: Any,
) -> PlanRecord:
    """Search for the blocks to remove, without making the smaller model.

    Args:
        model: a checkpoint directory, a GGUF file, a name on the Hugging Face hub, or a transformers model in memory.
        options: what to do; see `ShrinkOptions`. A number of blocks is needed.
        tokenizer: the tokenizer of a model in memory, or its image processor if it reads images; or the directory of a
            tokenizer that replaces a checkpoint's.
        out: a file to write the plan to; the steps of an interrupted search are kept next to it.
        overwrite: replace a file at `out`, and an interrupted search with other options.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell.
        **fields: any option of `ShrinkOptions` by name.

    Returns:
        The plan; `shrink(model, plan=plan)` follows it.
    """
    tokenizer = take_directory(tokenizer, fields)
    settings = make_shrink_options(options, fields)
    settings.check()
    if settings.max_increase is not None or len(settings.removals) > 1:
        raise InputError("a plan has one number of blocks; use --remove 7, --remove-layers or --max-bytes")
    with Journal(out, overwrite=overwrite, message=message) as journal:
        inputs = _inputs(model, settings)
        check_outputs({"--out": out}, inputs, overwrite=overwrite, is_own=journal.has_written)
        source = _find_source(model, settings, message)
        from depthgauge.workflows.shrink_run import make_plan
        from depthgauge.workflows.shrink_stages import Run

        plan = make_plan(Run(settings, None, journal, progress, message), model, source, tokenizer)
        if out is not None:
            journal.write(out, plan.dump(), overwrite)
    return plan


def _settings(
    options: ShrinkOptions | None, fields: dict[str, Any], plan: PlanRecord | None
) -> tuple[ShrinkOptions, PlanRecord | None, str | None]:
    """Return the checked options, the plan that is followed, and its file.

    With a plan, they are those of the plan, with the given ones about loading the model.
    """
    settings, file = make_shrink_options(options, fields), None
    if plan is None and settings.remove is not None and settings.remove.lower().endswith(PLAN_ENDING):
        file = settings.remove
        plan, settings = read_plan(file), msgspec.structs.replace(settings, remove=None)
    if plan is not None:
        chosen = settings.given()
        for name in chosen:
            if name not in (*ABOUT_FILES, "allow", "evaluate"):
                raise InputError(
                    f"--{name.replace('_', '-')} cannot be combined with a plan, which contains all settings; leave it "
                    "out, or make a new plan"
                )
        settings = msgspec.structs.replace(plan.settings, **chosen)
    settings.check()
    return settings, plan, file


def _inputs(model: Any, settings: ShrinkOptions) -> dict[str, str | Path | None]:
    """Return option → path of everything that is read and that no output may replace."""
    path = model if isinstance(model, str | Path) and parse_hub_name(model) is None else None
    return {"MODEL": path} | input_paths(settings)


def _find_source(
    model: Any, settings: ShrinkOptions, message: Callable[[str], None], outputs: Iterable[Path] = ()
) -> Source | None:
    """Return the checkpoint of a path or of a name on the hub, or None for a model in memory.

    A model on the hub is not downloaded if it does not fit into memory, or what is made of it onto the disk.
    """
    if is_transformers_model(model):
        return None
    require_checkpoint(model, "shrink")
    checked_data(settings)  # raises before a download
    find_general(settings.general)
    for name in () if settings.evaluate is None else split_tasks(settings.evaluate):
        task_folders(name)
    source = resolved(model, settings, message, outputs, reads_data=True)
    check_files(source, checked_data(settings, class_in_config(source)))
    return source
