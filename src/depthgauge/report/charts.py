"""Charts of the page as data for plotly.js. Colours are roles such as `@blue`, which the page's theme resolves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge._format import number
from depthgauge.report.markup import printable

Figure = dict[str, Any]

PROVED, MEASURED = "@blue", "@vermilion"
"""The colours of what is proved for every input and of what was measured on some."""


LEGEND: Figure = {
    "orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12},
    "itemclick": False, "itemdoubleclick": False,
}  # fmt: skip
"""The legend above a chart."""
_AXIS, _DIGIT, _SPACE = 255, 7, 3
"""Widths in pixels: of an axis on a phone, of a digit, and between two labels."""


@dataclass(frozen=True)
class Choice:
    """One view of a chart: its name in the menu, its explanation, its description for screen readers, the figure."""

    name: str
    note: str
    alt: str
    figure: Figure
    group: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the view as the page's script reads it."""
        return {"note": self.note, "alt": self.alt, **self.figure}


@dataclass(frozen=True)
class Chart:
    """A chart with one view or several, of a fixed height in pixels; `pick` is the label of the menu."""

    choices: tuple[Choice, ...]
    height: int
    pick: str = ""


def label(text: str) -> str:
    """Return a text as plotly shows it literally: plotly interprets `<`, `>` and `&` as markup."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def on_log(value: float | None) -> bool:
    """Return whether a value can be shown on a logarithmic axis."""
    return value is not None and value > 0


def figure(*traces: Figure, layout: Figure) -> Figure:
    """Return a figure of plotly."""
    return {"data": list(traces), "layout": layout}


def names_axis(title: str, names: Any) -> Figure:
    """Return an axis of layers or steps that labels as many of them as fit on a phone, at most fifteen."""
    room = _AXIS // (_DIGIT * max((len(str(name)) for name in names), default=1) + _SPACE)
    named = list(names)[:: -(-len(names) // max(1, min(15, room))) or 1]
    return {"type": "category", "title": {"text": title}, "tickvals": named, "tickangle": 0, "showgrid": False}


def log_axis(values: Sequence[float]) -> Figure:
    """Return a logarithmic axis with at most eight ticks, formatted like every number of the page."""
    if not values:
        return {"type": "log"}
    low, high = (math.floor(math.log10(value)) for value in (min(values), max(values)))
    fine = [float(f"{m}e{k}") for k in range(low - 1, high + 2) for m in (1, 2, 5)]
    ticks = [tick for tick in fine if min(values) / 2 <= tick <= max(values) * 2]
    if len(ticks) > 8:
        step = -(-(high - low + 2) // 7)
        ticks = [float(f"1e{k}") for k in range(low - low % step, high + 2, step)]
    ticks = [tick for tick in ticks if 0 < tick < math.inf]
    return {"type": "log", "tickvals": ticks, "ticktext": [number(tick) for tick in ticks]}


def layout(**own: Any) -> Figure:
    """Return the layout that all charts share, extended by the axes, margins and other settings of one chart."""
    axis = {
        "gridcolor": "@rule", "linecolor": "@rule-strong", "zerolinecolor": "@rule", "tickcolor": "@rule-strong",
        "tickfont": {"color": "@faint", "size": 12}, "fixedrange": True, "ticks": "", "showline": False,
    }  # fmt: skip
    for name in [name for name in own if name.startswith(("xaxis", "yaxis"))]:
        title = {"font": {"color": "@faint", "size": 12}}
        own[name] = {**axis, **own[name]}
        if "title" in own[name]:
            own[name]["title"] = {**title, **own[name]["title"]}
    font = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "@ink"}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "dragmode": False, "hovermode": "closest",
        "font": font,
        "hoverlabel": {"bgcolor": "@raised", "bordercolor": "@rule-strong", "font": font, "align": "left"},
        "legend": LEGEND,
        **own,
    }  # fmt: skip
