"""Write the page of a result."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, OutputError, optional, require_path, require_type
from depthgauge.base.io import is_special, write_text
from depthgauge.base.journal import Journal
from depthgauge.report.page import Shown, render, render_page
from depthgauge.results.evaluate_record import EVALUATE_SCHEMA, EvaluateRecord, check_evaluate
from depthgauge.results.gauge_record import ADVICE, GaugeRecord, check_result
from depthgauge.results.monitor_record import MONITOR_ADVICE, MonitorRecord, read_log
from depthgauge.results.record import ResultError, load_document
from depthgauge.results.recover_record import RECOVER_SCHEMA, RecoverRecord, check_recover
from depthgauge.results.shrink_document import shrink_document
from depthgauge.results.shrink_record import PLAN_SCHEMA, SHRINK_ADVICE, SHRINK_SCHEMA, ShrinkRecord, check_shrink

_ADVICE = f"{ADVICE}, {SHRINK_ADVICE.removeprefix('give ')}, or {MONITOR_ADVICE.removeprefix('give ')}"


def write_report(result: Shown | dict[str, Any] | str | Path, out: str | Path) -> Path:
    """Write a self-contained HTML page about a result of `gauge`, `shrink` or `evaluate`, or a log (extra `report`).

    The page opens from disk and makes no network requests. It is written atomically.

    Args:
        result: the result, its JSON document, or the file it was saved to: what `gauge --out` or `evaluate --out`
            wrote, or `depthgauge.json` in the directory that `shrink --out` wrote, or the log directory of a `Monitor`.
        out: the page to write.

    Returns:
        The path of the page.

    Raises:
        MissingPackageError: plotly or jinja2 is not installed.
        ResultError: the document is not a result; the message names the place that does not fit.
    """
    record: Shown
    if isinstance(result, str | Path) and Path(result).is_dir():
        record = read_log(result)
    elif isinstance(result, str | Path):
        record = _check(load_document(result, _ADVICE), str(result))
        if require_path("out", out).resolve() == Path(result).resolve():
            raise InputError(f"the page would replace its own result, {result}; give another --out")
    else:
        expected = "a result of gauge, shrink or evaluate, a log of Monitor, the document of one, or the path of one"
        require_type(
            "result", result, (dict, GaugeRecord, ShrinkRecord, RecoverRecord, MonitorRecord, EvaluateRecord), expected
        )
        record = _check(result, "the result") if isinstance(result, dict) else result
    write_text(out, page_text(record))
    return Path(out)


def page_text(record: Shown) -> str:
    """Return the page of a record as HTML."""
    return render(record, plotly_code())


def sizes_page_text(records: Sequence[ShrinkRecord]) -> str:
    """Return one page about the sizes that a run of `shrink` made, as HTML."""
    return render_page(shrink_document(*records), plotly_code())


def write_outputs(
    result: Any,
    out: str | Path | None,
    report: str | Path | None,
    overwrite: bool,
    message: Callable[[str], None],
    journal: Journal | None = None,
) -> None:
    """Write the document and the page of a result, where they are wanted, and say so.

    Raises:
        OutputError: a file cannot be written; its attribute `result` is the result.
    """
    journal = journal or Journal()
    try:
        if out is not None:
            journal.write(out, result.dump(), overwrite)
            message(f"result written to {out}")
        if report is not None:
            journal.write(report, page_text(result), overwrite)
            message(f"page written to {report}")
    except OutputError as error:
        error.result = result
        raise


def _check(document: Any, name: str) -> GaugeRecord | ShrinkRecord | RecoverRecord | EvaluateRecord:
    """Return a parsed document as the record of its schema."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema == PLAN_SCHEMA:
        raise ResultError(f"{name} is a plan, which has nothing to show yet; {SHRINK_ADVICE}")
    family = schema.rpartition("/")[0] if isinstance(schema, str) else ""
    checks = {SHRINK_SCHEMA: check_shrink, RECOVER_SCHEMA: check_recover, EVALUATE_SCHEMA: check_evaluate}
    check = {known.rpartition("/")[0]: one for known, one in checks.items()}.get(family, check_result)
    return check(document, name)  # type: ignore[no-any-return, operator]


def check_page(path: str | Path) -> None:
    """Raise unless a page can be made and `path` is the name of one; a browser shows other files as text."""
    plotly_code()
    if Path(path).suffix.lower() not in (".html", ".htm") and not is_special(path):
        raise InputError(f"--report writes a page, and {path} is not the name of one; give a name that ends with .html")


def plotly_code() -> str:
    """Return the source code of plotly.js, which the page contains; raise if a package of the extra is missing."""
    optional("jinja2", "the page", "report")  # `render` needs it
    return str(optional("plotly.offline", "the page", "report").get_plotlyjs())
