"""Render the page: one HTML file with its style, scripts and data inside, which makes no network requests."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from depthgauge._format import number
from depthgauge.report.markup import printable
from depthgauge.report.sections import page_of
from depthgauge.results.gauge_record import GaugeRecord
from depthgauge.results.monitor_record import MonitorRecord
from depthgauge.results.shrink_record import ShrinkRecord


def render(result: GaugeRecord | ShrinkRecord | MonitorRecord, plotly: str) -> str:
    """Return the page of a result.

    Args:
        result: the result.
        plotly: the source code of plotly.js.
    """
    page = page_of(result)
    library, script = _for_script(plotly), _for_script(_asset("page.js"))
    data = {
        f"s{k}-{part.name}": [view.to_json() for view in part.chart.views]
        for k, section in enumerate(page.sections)
        for part in section.parts
        if part.chart is not None
    }
    shown = {"policy": _policy(library, script), "style": _asset("page.css"), "plotly": library, "script": script}
    return str(templates().get_template("page.html").render(page=page, data=data, **shown))


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
