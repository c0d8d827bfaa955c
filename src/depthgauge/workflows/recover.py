"""`recover`: distil a smaller model towards the model that it was made from, and write the result."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgauge.base.io import check_outputs
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Step, no_message, silent
from depthgauge.checkpoints.inputs.text_files import find_general, find_texts, input_paths
from depthgauge.checkpoints.source.hub import parse_hub_name
from depthgauge.report.page import check_page, page_text, write_report
from depthgauge.results.recover_record import RecoverOptions, RecoverRecord, make_recover_options
from depthgauge.surgery.write_model import check_output_directory, remove_unfinished
from depthgauge.workflows.target import require_checkpoint, resolved


@dataclass(frozen=True, eq=False)
class RecoverResult:
    """The result of `recover`: the `record` of everything that was measured, and the recovered transformers `model`."""

    record: RecoverRecord
    model: Any

    def __repr__(self) -> str:
        return f"RecoverResult({self.record.name!r})"

    def to_json(self) -> dict[str, Any]:
        """Return the result document."""
        return self.record.to_json()

    def report(self, path: str | Path) -> Path:
        """Write the result as one self-contained HTML page (extra `report`), and return its path."""
        return write_report(self.record, path)


def recover(
    model: str | Path,
    options: RecoverOptions | None = None,
    *,
    out: str | Path | None = None,
    report: str | Path | None = None,
    overwrite: bool = False,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
    **fields: Any,
) -> RecoverResult:
    """Train a smaller model towards its source: to predict what the source predicts, on all of your text.

    Args:
        model: the smaller model: a checkpoint directory, a GGUF file, or a name on the Hugging Face hub. It may have
            been made by any program; it must have the vocabulary of its source.
        options: what to do; see `RecoverOptions`.
        out: the directory to write the recovered model to; None keeps it in memory.
        report: a file to write a page with charts to (extra `report`).
        overwrite: replace a checkpoint at `out` and a file at `report`, and an interrupted run with other options.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell.
        **fields: any option of `RecoverOptions` by name, such as `teacher="model"`, `text="corpus.txt"`,
            `tokens="2M"`; overrides `options`.

    Returns:
        A `RecoverResult`: `record`, `model`, `report()`, `to_json()`.

    Raises:
        InputError: a model or an option cannot be used.
    """
    settings = make_recover_options(options, fields)
    settings.check()
    teacher = settings.teacher
    assert teacher is not None
    for path in (model, teacher):
        require_checkpoint(path, "recover")
    if report is not None:
        check_page(report)
    texts = find_texts(settings.text)
    find_general(settings.general)  # raises before a download
    with Journal(out, overwrite=overwrite, message=message) as journal:
        inputs = {"MODEL": _path(model), "--teacher": _path(teacher)} | input_paths(settings)
        check_outputs({"--report": report}, inputs, overwrite=overwrite, is_own=journal.has_written)
        small, source = (resolved(path, settings, message) for path in (model, teacher))
        if out is not None:
            for model_source in (small, source):
                check_output_directory(out, model_source, overwrite or journal.has_written(out))
            if journal.is_continued:
                remove_unfinished(out)
        from depthgauge.workflows.recover_run import run_recovery  # torch and transformers take seconds

        made, record = run_recovery(small, source, settings, texts, out, overwrite, journal, progress, message)
        if report is not None:
            journal.write(report, page_text(record), overwrite)
            message(f"page written to {report}")
    return RecoverResult(record, made)


def _path(model: str | Path) -> str | Path | None:
    """Return a path; None for a name on the hub, which no output can replace."""
    return model if parse_hub_name(model) is None else None
