"""Render the page: one HTML file with its style, scripts and data inside, which makes no network requests."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

from depthgauge.report.charts import Chart, Choice
from depthgauge.report.markup import escape, sentence, with_code
from depthgauge.report.page_parts import Page, Part, Section
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
        f"s{k}-{part.name}": [choice.to_json() for choice in part.chart.choices]
        for k, found in enumerate(page.sections)
        for part in found.parts
        if part.chart is not None
    }
    names = ", ".join(found.name for found in page.sections)
    return Template(_asset("page.html")).substitute(
        policy=_policy(library, script),
        title=escape(f"depthgauge: {names}"),
        style=_asset("page.css"),
        version=escape(page.version),
        heading=escape(page.heading),
        lead=escape(page.lead),
        links="\n".join(_link(k, found) for k, found in enumerate(page.sections)),
        description=escape("; ".join(f"{found.name}: {found.verdict}" for found in page.sections)),
        overview=_overview(page.sections),
        sections="\n".join(_section(k, found) for k, found in enumerate(page.sections)),
        how=_how(page),
        command=escape(page.command),
        settings=page.settings.html("settings"),
        data=_for_data(data),
        plotly=library,
        script=script,
    )


def _how(page: Page) -> str:
    """Return how to use the command that reproduces the result, as HTML."""
    if page.how:
        return with_code(page.how)
    version = f"depthgauge {escape(page.version)}"
    if not page.preparation:
        return f"This command reproduces the result, with {version} and the same target:"
    return f"{with_code(page.preparation)} Then this command reproduces the result, with {version}:"


def _asset(name: str) -> str:
    return files("depthgauge.report").joinpath(name).read_text(encoding="utf-8")


def _for_script(source: str) -> str:
    """Return a script that is safe inside a page, with the line ends that the browser hashes."""
    plain = source.replace("\r\n", "\n").replace("\r", "\n")
    return plain.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _for_data(value: Any) -> str:
    """Return JSON that is safe inside a page: no character in it can end the element or start another.

    >>> _for_data({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(*scripts: str) -> str:
    """Return a policy that allows these scripts only and forbids every request; plotly.js needs inline styles."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _link(k: int, found: Section) -> str:
    return f'<li><a href="#s{k}"><bdi>{escape(found.name)}</bdi></a></li>'


def _overview(sections: Sequence[Section]) -> str:
    """Return the list of verdicts; a single subject shows its verdict in its section only."""
    if len(sections) == 1:
        return ""
    entries = "\n".join(
        f'<li><a href="#s{k}"><bdi>{escape(found.name)}</bdi></a>'
        f'<p class="verdict"><bdi>{sentence(found.verdict)}</bdi></p></li>'
        for k, found in enumerate(sections)
    )
    return f'<ul class="overview">\n{entries}\n</ul>'


def _section(k: int, found: Section) -> str:
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd><bdi>{escape(value)}</bdi></dd></div>" for name, value in found.facts
    )
    parts = "\n".join(_part(f"s{k}-{part.name}", part) for part in found.parts)
    return (
        f'<section id="s{k}" class="subject" aria-labelledby="s{k}-title" tabindex="-1">\n'
        f'<h2 id="s{k}-title"><bdi>{escape(found.name)}</bdi></h2>\n'
        f'<p class="verdict"><bdi>{sentence(found.verdict)}</bdi></p>\n'
        f'<dl class="facts">{facts}</dl>\n<div class="parts">\n{parts}\n</div>\n</section>'
    )


def _part(name: str, part: Part) -> str:
    """Return a figure with title, buttons, statements, chart, caption and the table behind it."""
    copy = "" if part.table is None else _copy_button(f"{name}-table", "Copy table", part.table.title)
    chart = "" if part.chart is None else _chart(name, part.chart)
    statements = "".join(f'<p class="statement"><bdi>{sentence(text)}</bdi></p>\n' for text in part.statements)
    table = ""
    if part.table is not None:
        opened = " open" if part.table_open else ""
        table = (
            f"<details{opened}><summary>Table: {escape(part.table.title)}</summary>"
            f"{part.table.html(f'{name}-table')}</details>"
        )
    return (
        f'<figure id="{name}" class="{"half" if part.half else "full"}" aria-labelledby="{name}-title">\n'
        f'<div class="head"><h3 id="{name}-title">{escape(part.title)}</h3>{copy}</div>\n{statements}{chart}'
        f"<figcaption>{_note(name, part.chart)}<span>{escape(part.caption)}</span></figcaption>\n{table}\n</figure>"
    )


def _note(name: str, chart: Chart | None) -> str:
    if chart is None or not chart.choices[0].note:
        return ""
    return f'<span id="{name}-note">{escape(chart.choices[0].note)}</span> '


def _chart(name: str, chart: Chart) -> str:
    first = chart.choices[0]
    return (
        f"{_picker(name, chart)}"
        f'<div class="chart" id="{name}-chart" data-chart="{name}" style="height:{chart.height}px" tabindex="0" '
        f'role="application" aria-roledescription="chart" aria-label="{escape(first.alt)}"></div>\n'
    )


def _picker(name: str, chart: Chart) -> str:
    """Return the menu of the chart's views, grouped where they have groups."""
    if len(chart.choices) == 1:
        return ""
    groups = []
    for group, entries in groupby(enumerate(chart.choices), key=lambda entry: entry[1].group):
        options = "".join(_option(k, choice) for k, choice in entries)
        groups.append(f'<optgroup label="{escape(group)}">{options}</optgroup>' if group else options)
    return (
        f'<label class="picker">{escape(chart.pick)} '
        f'<select data-for="{name}" autocomplete="off">{"".join(groups)}</select></label>\n'
    )


def _option(k: int, choice: Choice) -> str:
    return f'<option value="{k}"{" selected" if k == 0 else ""}>{escape(choice.name)}</option>'


def _copy_button(target: str, words: str, what: str) -> str:
    return (
        f'<button type="button" class="copy" data-copy="{target}" aria-label="{escape(f"{words}: {what}")}">'
        f"{escape(words)}</button>"
    )
