"""Figures T1 to T3: accuracy, effective depth and use of the weight bound of trained models against η."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from depthgauge.papers.figures.style import BLUE, FAINT, GREEN, INK, MARKERS, ORDERED, VERMILION, figure_style

_SHADE = "#D9E7D2"
_DASHED, _DOTTED = (0, (4, 1.8)), (0, (1, 1.4))
_COLOURS = (*ORDERED, FAINT)
_ALL_MARKERS = (*MARKERS, "v")


@dataclass(frozen=True)
class EtaCurve:
    """A quantity against η: median, minimum and maximum over seeds, and its median without a weight bound or None."""

    label: str
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
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
                    grid[r][c].set_xlabel("largest |weight| $\\eta$")
        _accuracy_legend(figure, rows[0][0], note, any(p.proved is not None for row in rows for p in row))
    return figure


def _draw_panel(axes: Axes, panel: TaskPanel) -> None:
    left = panel.etas[0] / 1.35
    if panel.proved is not None:
        axes.axvspan(left, panel.proved, color=_SHADE, linewidth=0, zorder=0)
    axes.axhline(panel.chance, color=INK, linestyle=_DASHED, linewidth=0.8, zorder=2)
    for curve in panel.curves:
        colour = _COLOURS[curve.colour]
        style = _DASHED if curve.dashed else "-"
        if curve.unbounded is not None:
            axes.axhline(curve.unbounded, color=colour, linestyle=_DOTTED, linewidth=0.9, zorder=1)
        axes.fill_between(panel.etas, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(
            panel.etas, curve.middle, color=colour, linestyle=style, marker=_ALL_MARKERS[curve.colour], markersize=3.0,
            linewidth=1.3, zorder=4,
        )  # fmt: skip
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


def _accuracy_legend(figure: Figure, panel: TaskPanel, note: str, shaded: bool) -> None:
    handles: list[Line2D | Patch] = [
        Line2D(
            [], [], color=_COLOURS[curve.colour], marker=_ALL_MARKERS[curve.colour], markersize=3.0, linewidth=1.3,
            linestyle=_DASHED if curve.dashed else "-", label=curve.label,
        )
        for curve in panel.curves
    ]  # fmt: skip
    handles.append(Line2D([], [], color=INK, linestyle=_DASHED, linewidth=0.8, label="chance"))
    if any(curve.unbounded is not None for curve in panel.curves):
        handles.append(Line2D([], [], color=FAINT, linestyle=_DOTTED, linewidth=0.9, label="no weight bound"))
    if shaded:
        handles.append(Patch(color=_SHADE, label=note))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, handletextpad=0.5, columnspacing=1.3)


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


def draw_trained_depths(panels: Sequence[TrainedDepthPanel]) -> Figure:
    """Draw the depths in the first row and the use of the bound in the second, one column for each task."""
    with figure_style():
        size = (2.05 * len(panels) + 0.5, 4.4)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.05, wspace=0.03))
        grid = figure.subplots(2, len(panels), squeeze=False, sharey="row")
        for c, panel in enumerate(panels):
            for curve, colour, marker in ((panel.certified, GREEN, "s"), (panel.measured, INK, "^")):
                _draw_curve(grid[0][c], panel.etas, curve, colour, marker)
            for curve, colour, marker in ((panel.at_bound, VERMILION, "o"), (panel.largest, BLUE, "D")):
                _draw_curve(grid[1][c], panel.etas, curve, colour, marker)
            grid[0][c].set_ylim(0, panel.layers + 0.7)
            grid[0][c].yaxis.set_major_locator(MultipleLocator(2))
            grid[1][c].set_ylim(0, 1.06)
            grid[0][c].set_title(panel.title, color=INK)
            for row in range(2):
                _eta_axis(grid[row][c], panel.etas)
            grid[1][c].set_xlabel("largest |weight| $\\eta$")
        grid[0][0].set_ylabel("layers needed")
        grid[1][0].set_ylabel("use of the weight bound")
        handles = [
            Line2D([], [], color=colour, marker=marker, markersize=3.2, linewidth=1.4, label=label)
            for label, colour, marker in (
                (panels[0].certified.label, GREEN, "s"),
                (panels[0].measured.label, INK, "^"),
                (panels[0].at_bound.label, VERMILION, "o"),
                (panels[0].largest.label, BLUE, "D"),
            )
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, handletextpad=0.5, columnspacing=1.6)
    return figure


def _draw_curve(axes: Axes, etas: Sequence[float], curve: EtaCurve, colour: str, marker: str) -> None:
    axes.fill_between(etas, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(etas, curve.middle, color=colour, marker=marker, markersize=3.2, linewidth=1.4, zorder=4)
