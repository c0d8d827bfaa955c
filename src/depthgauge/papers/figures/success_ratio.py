"""Figures 3, 4, 5 and 7 of paper B and the figure B-degree: success rates in parameter sweeps."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, MultipleLocator, PercentFormatter

from depthgauge.papers.figures.style import BLUE, FAINT, INK, MARKERS, ORDERED, VERMILION, figure_style

_JOINED = (0, (2, 1.5))
_SPARSE = 20
"""Curves with at most this many points get larger markers."""


@dataclass(frozen=True)
class Curve:
    """One curve: the exact probability (None if there is no closed form), and the sampled rate with its interval."""

    label: str
    x: Sequence[float]
    exact: Sequence[float] | None
    ratio: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class PanelDrawing:
    """One panel: its texts and its curves. `whole` marks a swept parameter that takes integer values."""

    title: str
    fixed: str
    xlabel: str
    whole: bool
    curves: Sequence[Curve]


def draw_panel(panel: PanelDrawing, models: str) -> Figure:
    """Draw one panel at the width of a column."""
    return _draw("", [panel], 1, models, width=3.6, height=2.9)


def draw_sheet(title: str, panels: Sequence[PanelDrawing], columns: int, models: str) -> Figure:
    """Draw all panels of a figure in the layout of the paper."""
    rows = -(-len(panels) // columns)
    return _draw(title, panels, columns, models, width=7.3, height=(2.15 if columns > 2 else 2.6) * rows + 0.5)


def _draw(title: str, panels: Sequence[PanelDrawing], columns: int, models: str, width: float, height: float) -> Figure:
    rows = -(-len(panels) // columns)
    with figure_style():
        layout = ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05, wspace=0.03, hspace=0.05)
        figure = Figure(figsize=(width, height), layout=layout)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for index, axes in enumerate(grid.flat):
            if index < len(panels):
                _draw_axes(axes, panels[index], left=index % columns == 0)
            else:
                axes.set_visible(False)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
        _legend(figure, panels, models)
    return figure


def _draw_axes(axes: Axes, panel: PanelDrawing, left: bool) -> None:
    several = len(panel.curves) > 1
    for index, curve in enumerate(panel.curves):
        line, dots = (ORDERED[index], ORDERED[index]) if several else (BLUE, VERMILION)
        marker = MARKERS[index] if several else "o"
        if curve.exact is not None:
            axes.plot(curve.x, curve.exact, color=line, linewidth=1.5, zorder=3, solid_capstyle="round")
        elif several:
            axes.plot(curve.x, curve.ratio, color=line, linewidth=0.8, linestyle=_JOINED, zorder=2)
        sparse = len(curve.x) <= _SPARSE
        width, alpha, order, size = (1.1, 0.8, 4, 3.4) if sparse else (0.7, 0.45, 2, 2)
        axes.vlines(curve.x, curve.low, curve.high, color=dots, linewidth=width, alpha=alpha, zorder=order)
        axes.plot(curve.x, curve.ratio, marker, color=dots, markersize=size, markeredgewidth=0, zorder=5)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_locator(MultipleLocator(0.25))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=" %", decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=panel.whole))
    axes.margins(x=0.03)
    axes.set_xlabel(panel.xlabel)
    if left:
        axes.set_ylabel("success rate")
    axes.set_title(panel.title, pad=15, color=INK)
    fixed = axes.text(0, 1.035, panel.fixed, transform=axes.transAxes, fontsize=5.8, color=FAINT, va="bottom")
    fixed.set_in_layout(False)
    if several:
        _label_curves(axes, panel)


def _label_curves(axes: Axes, panel: PanelDrawing) -> None:
    handles = [
        Line2D([], [], color=ORDERED[i], marker=MARKERS[i], markersize=3.6, linewidth=1.3, label=curve.label)
        for i, curve in enumerate(panel.curves)
    ]
    legend = axes.legend(handles=handles, loc="lower right", fontsize=6.5, handlelength=1.6, labelspacing=0.25)
    legend.set_zorder(6)
    frame = legend.get_frame()
    frame.set(facecolor="white", edgecolor="none", alpha=0.85)
    legend.set_frame_on(True)


def _legend(figure: Figure, panels: Sequence[PanelDrawing], models: str) -> None:
    several = any(len(panel.curves) > 1 for panel in panels)
    line, dots = (INK, INK) if several else (BLUE, VERMILION)
    handles = []
    if any(curve.exact is not None for panel in panels for curve in panel.curves):
        handles.append(Line2D([], [], color=line, linewidth=1.5, label="exact probability"))
    label = f"{models} networks, 95 % interval"
    handles.append(Line2D([], [], color=dots, marker="o", linestyle="none", markersize=3.2, label=label))
    if several and any(curve.exact is None for panel in panels for curve in panel.curves):
        joined = "joins sampled rates (no closed form)"
        handles.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=_JOINED, label=joined))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, handletextpad=0.6, columnspacing=1.6)
