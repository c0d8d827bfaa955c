"""Render the page of a result: one HTML file with its style, scripts and data inside; it makes no network requests."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from depthgauge.base.format import capital, number, printable
from depthgauge.report.charts import draw
from depthgauge.results.document import Document, Place
from depthgauge.results.evaluate_document import evaluate_document
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.gauge_document import gauge_document
from depthgauge.results.gauge_record import GaugeRecord
from depthgauge.results.monitor_document import monitor_document
from depthgauge.results.monitor_record import MonitorRecord
from depthgauge.results.recover_document import recover_document
from depthgauge.results.recover_record import RecoverRecord
from depthgauge.results.shrink_document import shrink_document
from depthgauge.results.shrink_record import ShrinkRecord

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
