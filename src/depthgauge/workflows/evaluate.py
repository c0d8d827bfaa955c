"""`evaluate`: run tasks and measure perplexities on one or several checkpoints, on the same items and texts for all."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, OutputError
from depthgauge.base.io import check_outputs, write_text
from depthgauge.base.progress import Step, no_message, silent
from depthgauge.checkpoints.inputs.text_files import find_text, input_paths, split_field
from depthgauge.checkpoints.tasks.known_tasks import task_folders
from depthgauge.report.write import check_page, page_text
from depthgauge.results.evaluate_options import CLOZE, EvaluateOptions, make_evaluate_options
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.workflows.target import require_checkpoint, resolved


def evaluate(
    models: str | Path | Sequence[str | Path],
    options: EvaluateOptions | None = None,
    *,
    out: str | Path | None = None,
    report: str | Path | None = None,
    overwrite: bool = False,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
    **fields: Any,
) -> EvaluateRecord:
    """Run tasks of lm-eval, and measure perplexities, on one or several checkpoints.

    All models answer the same items. The others are compared with the first, item by item.

    Args:
        models: a checkpoint directory, a GGUF file or a name on the hub, or a list of them; others are compared with
            the first one.
        options: what to do; see `EvaluateOptions`.
        out: a file to write the result document to.
        report: a file to write a page with charts to (extra `report`).
        overwrite: replace files at `out` and `report`.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell, such as the expected duration.
        **fields: any option of `EvaluateOptions` by name, such as `tasks="piqa,arc_easy"`; overrides `options`.

    Returns:
        An `EvaluateRecord`: `tasks`, `mean`, `texts`, `to_frame()`, `to_json()`.

    Raises:
        InputError: a model, a task or an option cannot be used. Nothing was loaded or written then.
        OutputError: a file cannot be written; the attribute `result` of the error is the result.
    """
    settings = make_evaluate_options(options, fields)
    paths = _paths(models)
    settings.check(len(paths))
    if report is not None:
        check_page(report)
    inputs = input_paths(settings) | {f"MODEL {path}": Path(path) for path in paths}
    inputs |= {f"--perplexity {one}": split_field(_split_name(one)[1])[0] for one in settings.perplexity}
    check_outputs({"--out": out, "--report": report}, inputs, overwrite=overwrite)
    named = [_split_name(given) for given in settings.perplexity]
    for name, _ in named:
        if not name or [one for one, _ in named].count(name) > 1:
            raise InputError(f"--perplexity has the name {name!r} twice, or none; give each text its own, NAME:FILE")
    texts = tuple((name, find_text(file)) for name, file in named)
    if CLOZE in settings.task_names:
        find_text(settings.text)
    for name in settings.task_names:
        task_folders(name)
    sources = {path: resolved(path, settings, message) for path in paths}
    from depthgauge.workflows.evaluate_models import evaluate_models  # torch and transformers take seconds

    record = evaluate_models(sources, settings, texts, progress, message)
    try:
        if out is not None:
            write_text(out, record.dump(), replace=overwrite)
            message(f"result written to {out}")
        if report is not None:
            write_text(report, page_text(record), replace=overwrite)
            message(f"page written to {report}")
    except OutputError as error:
        error.result = record
        raise
    return record


def _paths(models: Any) -> list[str | Path]:
    """Return the models as a list of paths; raise if there is none or one is something else."""
    given = [models] if isinstance(models, str | Path) else models
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str | Path) for one in given):
        raise InputError(f"models must be the path of a checkpoint or a list of paths, got {type(models).__name__}")
    for path in given:
        if given.count(path) > 1:
            raise InputError(f"models has {path} twice; give every model once")
        require_checkpoint(path, "evaluate")
    return list(given)


def _split_name(given: str) -> tuple[str, str]:
    """Return the name and the file of `NAME:FILE`, or of `FILE`, which is named after the file.

    A file may be a field of a JSONL file, as in `NAME:FILE.jsonl:FIELD`.
    """
    name, colon, rest = given.partition(":")
    if colon and not os.path.exists(split_field(given)[0]):
        return name, rest
    return split_field(given)[0].name, given
