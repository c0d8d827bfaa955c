"""Charts of the page as data for plotly.js. Colours are roles such as `@blue`, which the page's theme resolves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from depthgauge.base.format import number, printable

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
class View:
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

    views: tuple[View, ...]
    height: int
    pick: str = ""

    @property
    def groups(self) -> list[tuple[str, list[tuple[int, View]]]]:
        """The views with their numbers, by consecutive group."""
        grouped = groupby(enumerate(self.views), key=lambda entry: entry[1].group)
        return [(group, list(views)) for group, views in grouped]


def single(alt: str, height: int, figure: Figure, note: str = "") -> Chart:
    """Return a chart with one view, which has no menu."""
    return Chart((View("", note, alt, figure),), height)


def label(text: str) -> str:
    """Return a text as plotly shows it literally: plotly interprets `<`, `>` and `&` as markup."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def on_log(value: float | None) -> bool:
    """Return whether a value can be shown on a logarithmic axis."""
    return value is not None and value > 0


def names_axis(title: str, names: Any) -> Figure:
    """Return an axis of layers or steps that labels as many of them as fit on a phone, at most fifteen."""
    room = _AXIS // (_DIGIT * max((len(str(name)) for name in names), default=1) + _SPACE)
    named = list(names)[:: -(-len(names) // max(1, min(15, room))) or 1]
    return {"type": "category", "title": title, "tickvals": named, "tickangle": 0, "showgrid": False}


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


def hovering(texts: Sequence[Any]) -> Figure:
    """Return the entries of a trace that shows a text for the mark under the pointer."""
    return {"hoverinfo": "text", "hovertext": texts}


def figure(*traces: Figure, x: Figure, y: Figure, left: int = 60, right: int = 8, top: int = 24, **more: Any) -> Figure:
    """Return a figure of plotly with two axes, whose `title` is a text, and margins in pixels; the legend is above.

    `more` has other settings of the layout; further axes have names such as `yaxis2`.
    """
    axis = {
        "gridcolor": "@rule", "linecolor": "@rule-strong", "zerolinecolor": "@rule", "tickcolor": "@rule-strong",
        "tickfont": {"color": "@faint", "size": 12}, "fixedrange": True, "ticks": "", "showline": False,
    }  # fmt: skip
    more |= {"xaxis": x, "yaxis": y}
    for name in [name for name in more if name.startswith(("xaxis", "yaxis"))]:
        more[name] = axis | more[name]
        if "title" in more[name]:
            more[name]["title"] = {"font": {"color": "@faint", "size": 12}, "text": more[name]["title"]}
    font = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "@ink"}
    look = {
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "dragmode": False, "hovermode": "closest",
        "font": font,
        "hoverlabel": {"bgcolor": "@raised", "bordercolor": "@rule-strong", "font": font, "align": "left"},
        "legend": LEGEND, "margin": {"l": left, "r": right, "t": top, "b": 44},
    }  # fmt: skip
    return {"data": list(traces), "layout": look | more}


@dataclass(frozen=True)
class ColorScale:
    """The range of values that the colours of a heat map cover, linear or logarithmic."""

    low: float
    high: float
    logarithmic: bool = False

    @property
    def note(self) -> str:
        """What a reader must know to compare colours."""
        return "The colours are logarithmic." if self.logarithmic else ""

    def color(self, value: float | None) -> float | None:
        """Return the position of a value on the scale."""
        if value is None or not self.logarithmic:
            return value
        return math.log10(max(value, self.low))


def color_scale(values: Sequence[float], top: float) -> ColorScale:
    """Choose a scale on which differences are visible.

    Positive values over more than two decades get a logarithmic scale. Otherwise the scale is linear: from 0, or from
    the smallest value if all values are within a quarter of the largest; to the natural maximum `top`, or to the
    largest value if that is far below `top`.
    """
    if not values:
        return ColorScale(0.0, top or 1.0)
    least, largest = min(values), max(values)
    if least > 0 and largest > 100 * least:
        return ColorScale(least, largest, logarithmic=True)
    if largest == least:
        return ColorScale(min(0.0, least), max(top, largest) or 1.0)
    low = least if least > 0 and largest - least < 0.25 * largest else min(0.0, least)
    return ColorScale(low, max(largest, top) if largest > 0.05 * top else largest)


@dataclass(frozen=True)
class HeatMap:
    """The values z[row][column] of a heat map; None is a gap.

    `place` returns the words for a row and a column, `show` the text of a value. `top` is the natural maximum of the
    values, if there is one.
    """

    name: str
    z: Sequence[Sequence[float | None]]
    columns: Sequence[str]
    place: Callable[[int, int, str], str]
    top: float = 0.0
    show: Callable[[float | None], str] = number

    @cached_property
    def known(self) -> dict[tuple[int, int], float]:
        """The values that are not gaps, by row and column, in the order of columns."""
        places = ((i, k) for k in range(len(self.columns)) for i in range(len(self.z)))
        return {(i, k): value for i, k in places if (value := self.z[i][k]) is not None}

    @cached_property
    def scale(self) -> ColorScale:
        """The scale of the colours."""
        return color_scale(list(self.known.values()), self.top)

    def extremes(self, nothing: str) -> str:
        """Return the smallest and the largest value with their places, for readers who cannot use the colours."""
        if not self.known:
            return nothing
        found = [choose(self.known, key=self.known.__getitem__) for choose in (min, max)]
        least, largest = (f"{self.show(self.known[at])} ({self.place(*at, ', ')})" for at in found)
        return f"Here from {least} to {largest}."

    def trace(self, gap: int) -> Figure:
        """Return the heat map, with `gap` pixels between cells and the scale of its colours above it."""
        scale, show = self.scale, self.show
        ends = [scale.color(scale.low), scale.color(scale.high)]
        texts = [
            [f"{self.place(i, k, ' · ')}<br>{label(self.name)} <b>{show(value)}</b>" for k, value in enumerate(row)]
            for i, row in enumerate(self.z)
        ]
        return {
            "type": "heatmap", "z": [[scale.color(value) for value in row] for row in self.z],
            "x": list(self.columns), "y": [str(i) for i in range(len(self.z))], **hovering(texts),
            "hoverongaps": False, "xgap": gap, "ygap": gap, "zmin": ends[0], "zmax": ends[1],
            "colorscale": [[k / 4, f"@shade-{k}"] for k in range(5)],
            "colorbar": {
                "orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom", "ypad": 8, "len": 0.4,
                "thickness": 8, "outlinewidth": 0, "ticks": "", "tickfont": {"size": 12, "color": "@faint"},
                "tickvals": ends, "ticktext": [show(scale.low), show(scale.high)], "ticklabelposition": "outside top",
            },
        }  # fmt: skip
