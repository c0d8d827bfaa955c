"""Render the page of a result: one HTML file with its style, scripts and data inside; it makes no network requests."""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, OutputError, optional, require_path, require_type
from depthgauge.base.format import capital, number, printable
from depthgauge.base.io import is_special, write_text
from depthgauge.base.journal import Journal
from depthgauge.report.charts import draw
from depthgauge.results.document import Document, Place
from depthgauge.results.evaluate_document import evaluate_document
from depthgauge.results.evaluate_record import EVALUATE_SCHEMA, EvaluateRecord, check_evaluate
from depthgauge.results.gauge_document import gauge_document
from depthgauge.results.gauge_record import ADVICE, GaugeRecord, check_result
from depthgauge.results.monitor_document import monitor_document
from depthgauge.results.monitor_record import MONITOR_ADVICE, MonitorRecord, read_log
from depthgauge.results.record import ResultError, load_document
from depthgauge.results.recover_document import recover_document
from depthgauge.results.recover_record import RECOVER_SCHEMA, RecoverRecord, check_recover
from depthgauge.results.shrink_document import shrink_document
from depthgauge.results.shrink_record import PLAN_SCHEMA, SHRINK_ADVICE, SHRINK_SCHEMA, ShrinkRecord, check_shrink

Shown = GaugeRecord | ShrinkRecord | RecoverRecord | MonitorRecord | EvaluateRecord
"""The results that have a page."""


def document_of(result: Shown) -> Document:
    """Return the document of a result."""
    if isinstance(result, EvaluateRecord):
        return evaluate_document(result)
    if isinstance(result, MonitorRecord):
        return monitor_document(result)
    if isinstance(result, RecoverRecord):
        return recover_document(result)
    return shrink_document(result) if isinstance(result, ShrinkRecord) else gauge_document(result)


def render(result: Shown, plotly: str) -> str:
    """Return the page of a result, with `plotly`, the source code of plotly.js, inside."""
    return render_page(document_of(result), plotly)


def render_page(document: Document, plotly: str) -> str:
    """Return the page of a document as HTML, with `plotly`, the source code of plotly.js, inside."""
    library, script = _for_script(plotly), _for_script(_asset("page.js"))
    data = {
        f"s{k}-{part.name}": [draw(plot, part.chart.height) for plot in part.chart.views]
        for k, section in enumerate(document.sections)
        for part in section.parts_at(Place.PAGE)
        if part.chart is not None
    }
    shown = {"policy": _policy(library, script), "style": _asset("page.css"), "plotly": library, "script": script}
    return str(templates().get_template("page.html").render(page=document, data=data, here=Place.PAGE, **shown))


def templates() -> Any:
    """Return the environment of the templates. Values are escaped; characters that do not print are replaced."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup, escape

    def finalize(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    def marked(text: str, pattern: str, replacement: str) -> Markup:
        return Markup(re.sub(pattern, replacement, str(escape(printable(text)))))

    environment = Environment(
        autoescape=True, loader=FunctionLoader(_asset), undefined=StrictUndefined, finalize=finalize,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "number": number,
        "closed": lambda text: capital(text) + "." * (not text.endswith(".")),
        # Numbers do not break at the minus sign of an exponent.
        "sentence": lambda text: marked(text, r"\d[\d.]*e[+-]\d+", r'<span class="whole">\g<0></span>'),
        "with_code": lambda text: marked(text, "`([^`]*)`", r"<code>\1</code>"),
    }
    return environment


def _asset(name: str) -> str:
    return files("depthgauge.report").joinpath(name).read_text(encoding="utf-8")


def _for_script(source: str) -> str:
    """Return a script that is safe inside a page, with the line ends that the browser hashes."""
    plain = source.replace("\r\n", "\n").replace("\r", "\n")
    return plain.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(*scripts: str) -> str:
    """Return a policy that allows these scripts only and forbids every request; plotly.js needs inline styles."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


# --- Write the page of a result ---------------------------------------------------------------------------------------

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
