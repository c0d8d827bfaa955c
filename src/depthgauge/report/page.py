"""Render the page of a result: one HTML file with its style, scripts and data inside; it makes no network requests."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from depthgauge.base.format import counted, number, printable
from depthgauge.report.checkpoint_section import checkpoint_facts, checkpoint_parts
from depthgauge.report.evaluate_section import evaluate_page
from depthgauge.report.markup import command_line, settings_table
from depthgauge.report.monitor_section import monitor_page
from depthgauge.report.network_section import network_facts, network_parts
from depthgauge.report.page_parts import Page, Section
from depthgauge.report.recover_section import recover_page
from depthgauge.report.shrink_section import shrink_page
from depthgauge.results.evaluate_record import EvaluateRecord
from depthgauge.results.gauge_options import GaugeSettings
from depthgauge.results.gauge_record import GaugeRecord, Subject
from depthgauge.results.monitor_record import MonitorRecord
from depthgauge.results.network_subject import NetworkSubject
from depthgauge.results.recover_record import RecoverRecord
from depthgauge.results.shrink_record import ShrinkRecord

SAVED = "network.safetensors"
"""The file name that a page suggests for a network that was gauged in memory."""


Shown = GaugeRecord | ShrinkRecord | RecoverRecord | MonitorRecord | EvaluateRecord
"""The results that have a page."""


def page_of(result: Shown) -> Page:
    """Return what the page of a result shows."""
    if isinstance(result, EvaluateRecord):
        return evaluate_page(result)
    if isinstance(result, MonitorRecord):
        return monitor_page(result)
    if isinstance(result, RecoverRecord):
        return recover_page(result)
    return shrink_page(result) if isinstance(result, ShrinkRecord) else gauge_page(result)


def _is_proved(subject: Subject) -> bool:
    return isinstance(subject, NetworkSubject) and bool(subject.collapse)


def gauge_page(result: GaugeRecord) -> Page:
    """Return the page of a result of `gauge`: one section per network or checkpoint."""
    settings = result.settings
    kinds = {"network" if isinstance(subject, NetworkSubject) else "model" for subject in result.subjects}
    count = counted(len(result.subjects), kinds.pop() if len(kinds) == 1 else "subject")
    proved = ", and what is proved for every input" if any(map(_is_proved, result.subjects)) else ""
    saving = (
        "The network was gauged from Python and has no file. Save it first with "
        f'`depthgauge.save_network(network, "{SAVED}")`.'
    )
    return Page(
        version=result.version,
        heading="How deep is it, really?",
        lead=f"{count} gauged with depthgauge {result.version}: what was measured on inputs{proved}.",
        sections=tuple(section(subject, settings) for subject in result.subjects),
        command=gauge_command(settings),
        settings=settings_table(
            {"target": "the built-in pair" if settings.target is None else settings.target, **settings.given()}
        ),
        preparation=saving if settings.in_memory else "",
    )


def gauge_command(settings: GaugeSettings) -> str:
    """Return the command that reproduces a result of `gauge`.

    A network that was gauged in memory has no file; the command names the file it must be saved to first.

    >>> gauge_command(GaugeSettings(target="some name", tokens=8, in_memory=True))
    'depthgauge gauge --tokens 8 network.safetensors'
    """
    return command_line("gauge", settings.given(), SAVED if settings.in_memory else settings.target)


def section(subject: Subject, settings: GaugeSettings) -> Section:
    """Return the section of one subject, by its kind."""
    if isinstance(subject, NetworkSubject):
        return Section(subject.name, subject.verdict, network_facts(subject, settings), network_parts(subject))
    return Section(subject.name, subject.verdict, checkpoint_facts(subject), checkpoint_parts(subject))


def render(result: Shown, plotly: str) -> str:
    """Return the page of a result, with `plotly`, the source code of plotly.js, inside."""
    return render_page(page_of(result), plotly)


def render_page(page: Page, plotly: str) -> str:
    """Return a page as HTML, with `plotly`, the source code of plotly.js, inside."""
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
