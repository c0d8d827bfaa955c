"""Draw the charts of a document for plotly.js. Colours are roles such as `@blue`, which the page's theme resolves."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge.base.format import interval_text, number, printable, short
from depthgauge.results.document import Axis, Heat, Line, Plot, Series

Figure = dict[str, Any]

LEGEND: Figure = {
    "orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12},
    "itemclick": False, "itemdoubleclick": False,
}  # fmt: skip
"""The legend above a chart."""
_FONT: Figure = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "@ink"}
_LOOK: Figure = {
    "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "dragmode": False, "hovermode": "closest",
    "font": _FONT, "legend": LEGEND,
    "hoverlabel": {"bgcolor": "@raised", "bordercolor": "@rule-strong", "font": _FONT, "align": "left"},
}  # fmt: skip
"""What all charts have in common."""
_FAINT: Figure = {"color": "@faint", "size": 12}
_AXES: Figure = {
    "gridcolor": "@rule", "linecolor": "@rule-strong", "zerolinecolor": "@rule", "tickcolor": "@rule-strong",
    "tickfont": _FAINT, "fixedrange": True, "ticks": "", "showline": False,
}  # fmt: skip
"""What all axes have in common."""
_AXIS, _DIGIT, _SPACE = 255, 7, 3
"""Widths in pixels: of an axis on a phone, of a digit, and between two labels."""
_LEGEND, _MARK, _LETTER, _LINE = 280, 45, 6, 20
"""Sizes in pixels of the legend on a phone: its width, that of a mark and of a letter, and the height of a line."""
_LOSS, _GAP, _MARGINS = 110, 60, 96
"""Heights in pixels: of a plot below a heat map, between both (two lines of legend), and of the margins."""


def label(text: str) -> str:
    """Return a text as plotly shows it literally: plotly interprets `<`, `>` and `&` as markup."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _names(names: Sequence[str]) -> Figure:
    """Label as many layers or steps of an axis as fit on a phone, at most fifteen."""
    room = _AXIS // (_DIGIT * max((len(name) for name in names), default=1) + _SPACE)
    named = list(names)[:: -(-len(names) // max(1, min(15, room))) or 1]
    return {"type": "category", "tickvals": named, "tickangle": 0, "showgrid": False}


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


@dataclass(frozen=True)
class ColorScale:
    """The range of values that the colours of a heat map cover, linear or logarithmic."""

    low: float
    high: float
    logarithmic: bool = False

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


def draw(plot: Plot, height: int) -> Figure:
    """Return a view of a chart of a height as the page's script reads it: its words, and the figure of plotly."""
    heat = plot.heat
    traces = ([] if heat is None else _heat_traces(heat, plot)) + [_trace(series, plot) for series in plot.series]
    base, value = _axis(plot.base, plot), _axis(plot.value, plot)
    x, y = (value, base) if plot.flat else (base, value)
    named = [series.name for series in plot.series if series.legend] + [line.name for line in plot.lines]
    named += [] if heat is None else [name for name, _ in heat.states]
    lines = -(-sum(_MARK + _LETTER * min(40, len(name)) for name in named if name) // _LEGEND)
    top = 52 if heat is not None and not heat.states else 16 + _LINE * lines
    left, right = (16, 16) if plot.flat else (48, 28) if heat is not None else (60, 60 if plot.second else 12)
    layout = _LOOK | {
        "xaxis": x, "yaxis": y, "margin": {"l": left, "r": right, "t": top, "b": 44}, "bargap": 0.35,
        "barmode": "group", "shapes": [_line(line, plot) for line in plot.lines],
    }  # fmt: skip
    if plot.second is not None:
        layout["yaxis2"] = _axis(plot.second, plot)
        if heat is None:
            layout["yaxis2"] |= {"overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto"}
        else:  # another plot below the map, with the same columns
            area = height - _MARGINS
            layout["yaxis2"] |= {"domain": [0.0, _LOSS / area], "anchor": "x"}
            layout["legend"] = {**LEGEND, "y": (_LOSS + 4) / area}
            y["domain"] = [(_LOSS + _GAP) / area, 1.0]
            x |= {"anchor": "y2", "range": [-0.5, len(plot.base.names) - 0.5]}
    if plot.remarks:
        layout["annotations"] = [{
            "xref": "paper", "x": 1, "xanchor": "right", "yref": "y", "y": row, "text": label(words),
            "showarrow": False, "font": _FAINT, "bgcolor": "@raised", "borderpad": 2,
        } for row, words in plot.remarks]  # fmt: skip
    is_log = heat is not None and not heat.states and _scale(heat).logarithmic
    note = f"{plot.note} The colours are logarithmic." if is_log else plot.note
    return {"note": note, "alt": plot.alt, "data": traces, "layout": layout}


def _trace(series: Series, plot: Plot) -> Figure:
    """Return the marks of one series."""
    along, up = ("y", "x") if plot.flat else ("x", "y")
    name = label(short(series.name, 40))
    trace: Figure = {
        "type": "bar" if series.kind == "bar" else "scatter", "name": name,
        along: list(series.at), up: list(series.values),
        "marker": {"color": series.color if isinstance(series.color, str) else list(series.color)},
        "showlegend": series.legend and bool(name), **_hover(series, plot),
    }  # fmt: skip
    if series.kind == "bar":
        trace |= {"orientation": "h" if plot.flat else "v"}
        trace["marker"] |= {"pattern": {"shape": "" if series.dash == "solid" else "/"}}
    else:
        trace["mode"] = "markers" if series.kind == "points" else "lines+markers" if series.size else "lines"
        trace["line"] = {"color": series.color, "width": series.width, "dash": series.dash}
        trace["line"] |= {"shape": "hv"} if series.kind == "steps" else {}
        trace["marker"] |= {"size": series.size, "symbol": series.symbol}
        if series.symbol.endswith("-open"):
            trace["marker"] |= {"line": {"width": series.width, "color": series.color}}
    if series.labels:
        beside = (
            {"textposition": "outside", "cliponaxis": False} if series.kind == "bar" else {"textposition": "top center"}
        )
        trace |= {"text": list(series.labels), "textfont": {"size": 11, "color": "@faint"}, **beside}
        trace |= {} if series.kind == "bar" else {"mode": "markers+text"}
    if series.is_second:
        trace["yaxis"] = "y2"
    if series.ends:
        halves = [_halves(value, *ends) for value, ends in zip(series.values, series.ends, strict=True)]
        trace[f"error_{up}"] = {
            "type": "data", "symmetric": False, "width": 0, "thickness": 1.5,
            "color": "@ink" if series.kind == "bar" else series.color,
            "array": [above for _, above in halves], "arrayminus": [below for below, _ in halves],
        }  # fmt: skip
    return trace


def _halves(value: float | None, low: float | None, high: float | None) -> tuple[float, float]:
    """Return the lengths of the two halves of an error bar."""
    if value is None or low is None or high is None:
        return 0.0, 0.0
    return min(value - low, sys.float_info.max), min(high - value, sys.float_info.max)  # infinity is not JSON


def _hover(series: Series, plot: Plot) -> Figure:
    """Return the words for each mark: its place, the name of the series, and the value with its interval."""
    if not series.name:
        return {"hoverinfo": "skip"}
    names, title = plot.base.names, plot.base.title
    places = series.places or [names[at] if plot.base.kind == "rows" else f"{title} {at}" for at in series.at]
    ends = series.ends or [(None, None)] * len(series.values)
    texts = series.texts or [interval_text(value, *pair) for value, pair in zip(series.values, ends, strict=True)]
    said = [_words(place, series.name, text) for place, text in zip(places, texts, strict=True)]
    return {"hoverinfo": "text", "hovertext": said}


def _words(place: str, name: str, text: str) -> str:
    """Return the place, which may have several lines, and below it the name with the value."""
    return "<br>".join([*map(label, place.split("\n")), f"{label(name)} <b>{label(text)}</b>".strip()])


def _line(line: Line, plot: Plot) -> Figure:
    """Return a dashed line across the chart."""
    on_x = line.is_base != plot.flat
    at, across = ("x", "y") if on_x else ("y", "x")
    whole = "y2 domain" if plot.heat is not None else "paper"
    place = {f"{at}0": line.at, f"{at}1": line.at, f"{across}ref": whole, f"{across}0": 0, f"{across}1": 1}
    named = {"showlegend": True, "name": line.name} if line.name else {}
    return {"type": "line", "line": {"color": line.color, "width": 1.5, "dash": "dash"}, **place, **named}


def _axis(axis: Axis, plot: Plot) -> Figure:
    """Return the settings of one axis."""
    settings = _AXES | {"title": {"font": _FAINT, "text": axis.title}}
    values = [v for series in plot.series for v in (series.at if axis is plot.base else series.values) if v is not None]
    if axis.kind == "names":
        settings |= _names(axis.names)
    elif axis.kind == "rows":
        settings |= {
            "tickvals": list(range(len(axis.names))), "ticktext": [label(short(name, 36)) for name in axis.names],
            "range": [len(axis.names) - 0.5, -0.5], "automargin": True, "showgrid": False, "ticklabelstandoff": 6,
        }  # fmt: skip
    elif axis.kind == "down":
        settings |= {"type": "category", "showgrid": False, "range": [len(axis.names) - 0.5, -0.5]}
    elif axis.kind == "log":
        settings |= log_axis([v for v in values if v > 0])
    elif axis.kind == "zero":
        settings["rangemode"] = "tozero"
    elif axis is plot.value and plot.lines:  # plotly does not make room for lines
        known = [0.0, *(line.at for line in plot.lines), *values]
        low, high = min(known), max(known)
        margin = min(0.1 * (high / 2 - low / 2), sys.float_info.max - max(high, -low))
        settings["range"] = [low - margin if low else 0.0, high + margin or 1.0]
    if axis is plot.base:
        settings["showgrid"] = axis.kind == "log"
    if axis.range is not None:
        settings["range"] = list(axis.range)
    if axis.step is not None:
        settings["dtick"] = axis.step
    return settings


def _heat_traces(heat: Heat, plot: Plot) -> list[Figure]:
    """Return a heat map with the scale of its colours above it, or with an entry of the legend for each state."""
    texts = [
        [_words(heat.place(i, k, " · "), heat.name, heat.show(v)) for k, v in enumerate(row)]
        for i, row in enumerate(heat.z)
    ]
    trace = {
        "type": "heatmap", "x": list(heat.columns), "y": list(plot.value.names), "hoverongaps": False,
        "hoverinfo": "text", "hovertext": texts,
        "xgap": heat.gap, "ygap": 10 if heat.states else heat.gap,
    }  # fmt: skip
    if heat.states:
        colors = [(k, end, color) for k, (_, color) in enumerate(heat.states) for end in (0, 1)]
        trace |= {
            "z": [list(row) for row in heat.z], "zmin": 0, "zmax": len(heat.states) - 1, "showscale": False,
            "colorscale": [[(k + end) / len(heat.states), color] for k, end, color in colors],
        }  # fmt: skip
        legend = [{
            "type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "hoverinfo": "skip",
            "marker": {"color": color, "size": 11, "symbol": "square"}, "showlegend": True,
        } for k, (name, color) in enumerate(heat.states) if k in heat.known.values()]  # fmt: skip
        return [trace, *legend]
    scale = _scale(heat)
    ends = [scale.color(scale.low), scale.color(scale.high)]
    return [trace | {
        "z": [[scale.color(value) for value in row] for row in heat.z], "zmin": ends[0], "zmax": ends[1],
        "colorscale": [[k / 4, f"@shade-{k}"] for k in range(5)],
        "colorbar": {
            "orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom", "ypad": 8, "len": 0.4,
            "thickness": 8, "outlinewidth": 0, "ticks": "", "tickfont": {"size": 12, "color": "@faint"},
            "tickvals": ends, "ticktext": [heat.show(scale.low), heat.show(scale.high)],
            "ticklabelposition": "outside top",
        },
    }]  # fmt: skip


def _scale(heat: Heat) -> ColorScale:
    return color_scale(list(heat.known.values()), heat.top)
