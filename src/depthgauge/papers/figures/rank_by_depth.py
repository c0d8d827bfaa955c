"""Figure D2: the residual ratio by layer as in Dong et al. (2021), for initial and for trained weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from depthgauge.papers.figures.style import BLUE, FAINT, GREEN, INK, LAYER, MARKERS, VERMILION, figure_style

_COLOURS = (VERMILION, INK, GREEN, BLUE)


@dataclass(frozen=True)
class DepthCurve:
    """One variant: the ratio by layer, as geometric mean and geometric standard deviation over samples."""

    label: str
    mean: Sequence[float]
    factor: Sequence[float]


@dataclass(frozen=True)
class DepthPanel:
    """One model: a title and one curve for each variant."""

    title: str
    curves: Sequence[DepthCurve]


def draw_depths(panels: Sequence[DepthPanel], floor: float) -> Figure:
    """Draw one panel for each model on a common logarithmic axis; values below `floor` are rounding errors."""
    with figure_style():
        figure = Figure(figsize=(3.6, 4.6), layout=ConstrainedLayoutEngine(h_pad=0.05, hspace=0.05))
        grid = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, panel in zip(grid, panels, strict=True):
            _draw(axes, panel, floor)
        grid[-1].set_xlabel(LAYER)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, handletextpad=0.4, columnspacing=1.0)
    return figure


def _draw(axes: Axes, panel: DepthPanel, floor: float) -> None:
    axes.set_yscale("log")
    axes.axhspan(floor / 100, floor, color=FAINT, alpha=0.15, linewidth=0)
    for order, curve in enumerate(panel.curves):
        layers = range(len(curve.mean))
        low = [m / f for m, f in zip(curve.mean, curve.factor, strict=True)]
        high = [m * f for m, f in zip(curve.mean, curve.factor, strict=True)]
        wide = order % 2 == 0  # drawn wider, since the next curve may cover it
        axes.fill_between(layers, low, high, color=_COLOURS[order], alpha=0.18, linewidth=0)
        axes.plot(
            layers, curve.mean, color=_COLOURS[order], marker=MARKERS[order], markersize=6.0 if wide else 3.0,
            linewidth=2.6 if wide else 1.2,
            label=curve.label, zorder=4,
        )  # fmt: skip
    axes.set_ylim(floor / 20, 4)
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=9))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("residual ratio")
    axes.set_title(panel.title, color=INK)
    axes.text(0.1, floor / 3, "rounding error", fontsize=7, color=FAINT, va="center")
