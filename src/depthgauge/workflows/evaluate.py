"""`evaluate`: run tasks and measure perplexities on one or several checkpoints, on the same items and texts for all."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError
from depthgauge.base.io import check_outputs
from depthgauge.base.progress import Step, no_message, silent
from depthgauge.checkpoints.inputs.text_files import find_text, input_paths, split_field
from depthgauge.checkpoints.tasks.known_tasks import task_folders
from depthgauge.report.page import check_page, write_outputs
from depthgauge.results.evaluate_record import CLOZE, EvaluateOptions, EvaluateRecord, make_evaluate_options
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
        message: called with a sentence where there is something to tell, such as the BOS decision.
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
    named = [_split_name(text) for text in settings.perplexity]
    given = zip(settings.perplexity, named, strict=True)
    inputs |= {f"--perplexity {text}": split_field(file)[0] for text, (_, file) in given}
    check_outputs({"--out": out, "--report": report}, inputs, overwrite=overwrite)
    names = [name for name, _ in named]
    for name in names:
        if not name or names.count(name) > 1:
            raise InputError(f"--perplexity has the name {name!r} twice, or none; give each text its own, NAME:FILE")
    texts = tuple((name, find_text(file)) for name, file in named)
    if CLOZE in settings.task_names:
        find_text(settings.text)
    for name in settings.task_names:
        task_folders(name)
    sources = {path: resolved(path, settings, message) for path in paths}
    from depthgauge.workflows.evaluate_models import evaluate_models  # torch and transformers take seconds

    record = evaluate_models(sources, settings, texts, progress, message)
    write_outputs(record, out, report, overwrite, message)
    return record


def _paths(models: Any) -> list[str | Path]:
    """Return the models as a list of paths; raise if there is none or one is something else."""
    paths = [models] if isinstance(models, str | Path) else models
    if not isinstance(paths, list | tuple) or not paths or not all(isinstance(path, str | Path) for path in paths):
        raise InputError(f"models must be the path of a checkpoint or a list of paths, got {type(models).__name__}")
    for path in paths:
        if paths.count(path) > 1:
            raise InputError(f"models has {path} twice; give every model once")
        require_checkpoint(path, "evaluate")
    return list(paths)


def _split_name(text: str) -> tuple[str, str]:
    """Return the name and the file of `NAME:FILE`, or of `FILE`, which is named after the file.

    A file may be a field of a JSONL file, as in `NAME:FILE.jsonl:FIELD`.
    """
    name, colon, file = text.partition(":")
    if colon and not os.path.exists(split_field(text)[0]):
        return name, file
    return split_field(text)[0].name, text
