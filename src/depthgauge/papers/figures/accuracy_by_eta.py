"""Figures T1 to T3: accuracy, effective depth and use of the weight bound of trained models against η."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from depthgauge.papers.figures.style import (
    BLUE,
    DASHED,
    DOTTED,
    ETA,
    FAINT,
    GREEN,
    INK,
    MARKERS,
    ORDERED,
    VERMILION,
    Spread,
    draw_spread,
    figure_style,
    legend_below,
)

_SHADE = "#D9E7D2"
_COLOURS = (*ORDERED, FAINT)
_ALL_MARKERS = (*MARKERS, "v")


@dataclass(frozen=True)
class EtaCurve:
    """A quantity against η over seeds, and its median without a weight bound or None."""

    label: str
    spread: Spread
    unbounded: float | None = None
    dashed: bool = False
    colour: int = 0


@dataclass(frozen=True)
class TaskPanel:
    """One task: its curves, the accuracy of a guess, and the largest η at which one layer is proved to suffice."""

    title: str
    etas: Sequence[float]
    curves: Sequence[EtaCurve]
    chance: float
    proved: float | None = None


def draw_accuracy(rows: Sequence[Sequence[TaskPanel]], note: str) -> Figure:
    """Draw accuracy against η, one panel for each task."""
    with figure_style():
        columns = max(map(len, rows))
        size = (2.05 * columns + 0.5, 2.0 * len(rows) + 0.75)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.05, wspace=0.03))
        grid = figure.subplots(len(rows), columns, squeeze=False, sharey=True)
        for r, row in enumerate(rows):
            for c in range(columns):
                if c >= len(row):
                    grid[r][c].set_axis_off()
                    continue
                _draw_panel(grid[r][c], row[c])
                if c == 0:
                    grid[r][c].set_ylabel("accuracy")
                if r == len(rows) - 1 or c >= len(rows[r + 1]):
                    grid[r][c].set_xlabel(ETA)
        _accuracy_legend(figure, rows[0][0], note, any(p.proved is not None for row in rows for p in row))
    return figure


def _draw_panel(axes: Axes, panel: TaskPanel) -> None:
    left = panel.etas[0] / 1.35
    if panel.proved is not None:
        axes.axvspan(left, panel.proved, color=_SHADE, linewidth=0, zorder=0)
    axes.axhline(panel.chance, color=INK, linestyle=DASHED, linewidth=0.8, zorder=2)
    for curve in panel.curves:
        colour = _COLOURS[curve.colour]
        if curve.unbounded is not None:
            axes.axhline(curve.unbounded, color=colour, linestyle=DOTTED, linewidth=0.9, zorder=1)
        draw_spread(axes, panel.etas, curve.spread, **_line(curve))
    _eta_axis(axes, panel.etas)
    axes.set_ylim(0, 1.03)
    axes.set_title(panel.title, color=INK)


def _eta_axis(axes: Axes, etas: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(etas[0] / 1.35, etas[-1] * 1.35)
    decades = [10.0**k for k in range(-4, 3) if etas[0] / 1.35 <= 10.0**k <= etas[-1] * 1.35]
    axes.xaxis.set_major_locator(FixedLocator(decades))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _line(curve: EtaCurve) -> dict[str, Any]:
    style = {"linestyle": DASHED if curve.dashed else "-", "markersize": 3.0, "linewidth": 1.3}
    return {"color": _COLOURS[curve.colour], "marker": _ALL_MARKERS[curve.colour], **style}


def _accuracy_legend(figure: Figure, panel: TaskPanel, note: str, shaded: bool) -> None:
    lines = [{**_line(curve), "label": curve.label} for curve in panel.curves]
    lines.append({"color": INK, "linestyle": DASHED, "linewidth": 0.8, "label": "chance"})
    if any(curve.unbounded is not None for curve in panel.curves):
        lines.append({"color": FAINT, "linestyle": DOTTED, "linewidth": 0.9, "label": "no weight bound"})
    legend_below(figure, lines, 4, 1.3, Patch(color=_SHADE, label=note) if shaded else None)


@dataclass(frozen=True)
class TrainedDepthPanel:
    """One task: certified and measured depth, share of weights at the bound, and max|w|/η, against η."""

    title: str
    etas: Sequence[float]
    certified: EtaCurve
    measured: EtaCurve
    at_bound: EtaCurve
    largest: EtaCurve
    layers: int


_DEPTH_LINES: dict[tuple[str, int], dict[str, Any]] = {
    ("certified", 0): {"color": GREEN, "marker": "s", "markersize": 3.2, "linewidth": 1.4},
    ("measured", 0): {"color": INK, "marker": "^", "markersize": 3.2, "linewidth": 1.4},
    ("at_bound", 1): {"color": VERMILION, "marker": "o", "markersize": 3.2, "linewidth": 1.4},
    ("largest", 1): {"color": BLUE, "marker": "D", "markersize": 3.2, "linewidth": 1.4},
}
"""The lines of the curves of a panel, by attribute and row."""


def draw_trained_depths(panels: Sequence[TrainedDepthPanel]) -> Figure:
    """Draw the depths in the first row and the use of the bound in the second, one column for each task."""
    with figure_style():
        size = (2.05 * len(panels) + 0.5, 4.4)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.05, wspace=0.03))
        grid = figure.subplots(2, len(panels), squeeze=False, sharey="row")
        for c, panel in enumerate(panels):
            for (name, row), line in _DEPTH_LINES.items():
                draw_spread(grid[row][c], panel.etas, getattr(panel, name).spread, **line)
            grid[0][c].set_ylim(0, panel.layers + 0.7)
            grid[0][c].yaxis.set_major_locator(MultipleLocator(2))
            grid[1][c].set_ylim(0, 1.06)
            grid[0][c].set_title(panel.title, color=INK)
            for row in range(2):
                _eta_axis(grid[row][c], panel.etas)
            grid[1][c].set_xlabel(ETA)
        grid[0][0].set_ylabel("layers needed")
        grid[1][0].set_ylabel("use of the weight bound")
        labels = [getattr(panels[0], name).label for name, _ in _DEPTH_LINES]
        lines = [{**line, "label": label} for line, label in zip(_DEPTH_LINES.values(), labels, strict=True)]
        legend_below(figure, lines, 2, 1.6)
    return figure
