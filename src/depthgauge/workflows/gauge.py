"""`gauge`: measure a network or a checkpoint from end to end and return one result."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from depthgauge._version import __version__
from depthgauge.base.io import check_outputs, write_text
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Step, no_message, silent
from depthgauge.checkpoints.inputs.text_files import input_paths
from depthgauge.report.page import check_page, write_outputs, write_report
from depthgauge.results.gauge_record import CHECKPOINTS, GaugeOptions, GaugeRecord, make_options, read_result
from depthgauge.results.record import take_directory
from depthgauge.workflows.target import check_gauge, resolve_target


class GaugeResult(GaugeRecord, frozen=True, kw_only=True):
    """The result of `gauge`: a record of subjects that can be saved, tabulated and drawn."""

    def save(self, path: str | Path) -> None:
        """Write the result document to a JSON file, atomically; a file that exists is replaced."""
        write_text(path, self.dump())

    def report(self, path: str | Path) -> Path:
        """Write the result as one self-contained HTML page (extra `report`), and return its path."""
        return write_report(self, path)


def gauge(
    target: Any = None,
    options: GaugeOptions | None = None,
    *,
    tokenizer: Any = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    overwrite: bool = False,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
    **fields: Any,
) -> GaugeResult:
    """Measure how much of a network's or a checkpoint's depth does useful work.

    A network is measured on inputs, certified against every one-layer surrogate, and its effective depth is found. A
    checkpoint is measured on text or images: what each head does, and what the model loses without each layer.

    Args:
        target: a network, a network file, a checkpoint (directory, GGUF file or name on the Hugging Face hub), a
            transformers model in memory, or None for a built-in pair. A model in memory is left as it was.
        options: what to do; see `GaugeOptions`.
        tokenizer: the tokenizer of a model in memory, which `text="none"` does not need, or its image processor if it
            reads images; or the directory of a tokenizer that replaces that of a checkpoint.
        out: a file to write the result document to. The finished steps of a checkpoint are kept next to it, so that an
            interrupted run can be continued by the same call.
        report: a file to write a page with charts to (extra `report`).
        overwrite: replace files at `out` and `report`, and an interrupted run with other options.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell, such as the memory that is needed.
        **fields: any option of `GaugeOptions` by name, such as `text="corpus.txt"`; overrides `options`.

    Returns:
        A `GaugeResult`: `subjects`, `settings`, `to_frame()`, `save()`, `report()`, `to_json()`.

    Raises:
        InputError: the target or an option cannot be used; the message says why and what to do.
        OutputError: a file cannot be written; the attribute `result` of the error is the result.

    >>> from depthgauge import random_network
    >>> result = gauge(random_network(layers=2, heads=1, dim=4, eta=0.01), samples=1, tokens=4)
    >>> result.subjects[0].depth[0].layers
    1
    """
    started, tokenizer = time.perf_counter(), take_directory(tokenizer, fields)
    chosen, asked = resolve_target(target), make_options(options, fields)
    asked.check(chosen.kind, chosen.description)
    if report is not None:
        check_page(report)
    with Journal(out, overwrite=overwrite, message=message) as journal:
        inputs = {"TARGET": chosen.path} | input_paths(asked)
        check_outputs({"--out": out, "--report": report}, inputs, overwrite=overwrite, is_own=journal.has_written)
        if chosen.kind == CHECKPOINTS:
            request = check_gauge(chosen, asked, message)
            from depthgauge.workflows.gauge_checkpoint import gauge_checkpoint  # torch and transformers take seconds

            settings, subject = gauge_checkpoint(request, tokenizer, journal, progress, message)
            subjects: tuple[Any, ...] = (subject,)
            seconds: float | None = time.perf_counter() - started
        else:
            from depthgauge.workflows.gauge_network import gauge_networks

            journal.begin({"target": chosen.description, **asked.to_json()})
            settings, subjects = gauge_networks(chosen, asked, progress)
            seconds = None
        result = GaugeResult(version=__version__, settings=settings, subjects=subjects, seconds=seconds)
        write_outputs(result, out, report, overwrite, message, journal)
    return result


def load_result(path: str | Path) -> GaugeResult:
    """Read a result that `GaugeResult.save` or `depthgauge gauge --out` wrote.

    Args:
        path: the JSON file.

    Raises:
        ResultError: the file is not a result; the message names the place that does not fit.
    """
    record = read_result(path)
    return GaugeResult(**{name: getattr(record, name) for name in record.__struct_fields__})
