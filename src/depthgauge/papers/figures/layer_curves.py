"""Figures A1 and A4: the residual ratio and the error of one layer, by layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from depthgauge.papers.figures.style import (
    BLUE,
    DASHED,
    DOTTED,
    FAINT,
    INK,
    LAYER,
    MARKERS,
    ORDERED,
    VERMILION,
    Spread,
    draw_spread,
    figure_style,
    legend_below,
)

_DEEPEST = -3000.0
_TOP = 0.45


@dataclass(frozen=True)
class RankCurve:
    """log₁₀ of the residual ratio by layer (median, minimum, maximum), and of its two bounds or None."""

    label: str
    spread: Spread
    bound: Sequence[float] | None
    dong: Sequence[float] | None


def draw_rank(panels: Sequence[tuple[str, Sequence[RankCurve]]]) -> Figure:
    """Draw one panel for each kind of network, with a common vertical axis."""
    with figure_style():
        figure = Figure(figsize=(7.3, 3.4), layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05, wspace=0.04))
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
        for axes, (name, curves) in zip(grid[0], panels, strict=True):
            _draw_ranks(axes, name, curves)
        grid[0][0].set_ylabel("residual ratio  $\\|\\mathrm{Res}(X_\\ell)\\|_{\\max}/\\|X_\\ell\\|_{\\max}$")
        lines = [{**_line(i), "label": curve.label} for i, curve in enumerate(panels[0][1])]
        for label, style, width in (
            ("contraction bound (corrected)", DASHED, 1.1),
            ("rate of Dong et al.", DOTTED, 1.3),
        ):
            lines.append({"color": INK, "linestyle": style, "linewidth": width, "label": label})
        legend_below(figure, lines, 6, 1.3)
    return figure


def _line(order: int) -> dict[str, Any]:
    return {"color": ORDERED[order], "marker": MARKERS[order], "markersize": 3.6, "linewidth": 1.5}


def _draw_ranks(axes: Axes, name: str, curves: Sequence[RankCurve]) -> None:
    axes.set_yscale("symlog", linthresh=1.0, linscale=0.9)
    for order, curve in enumerate(curves):
        colour = ORDERED[order]
        layers = range(len(curve.spread.middle))
        draw_spread(axes, layers, curve.spread, 0.18, **_line(order))
        for bound, style, width in ((curve.bound, DASHED, 1.1), (curve.dong, DOTTED, 1.3)):
            if bound is not None:
                axes.plot(layers, _below_one(bound), color=colour, linestyle=style, linewidth=width, zorder=3)
    axes.set_ylim(_DEEPEST, _TOP)
    axes.yaxis.set_major_locator(FixedLocator([-1000, -100, -10, -1, 0]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "1" if y == 0 else f"$10^{{{y:.0f}}}$"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(LAYER)
    axes.set_title(name, color=INK)


def _below_one(bound: Sequence[float]) -> list[float]:
    """Replace a bound by NaN where it is above 1, except at the point just before it falls below 1."""
    return [
        value if value <= 0 or (k + 1 < len(bound) and bound[k + 1] <= 0 and value < _TOP) else math.nan
        for k, value in enumerate(bound)
    ]


@dataclass(frozen=True)
class CollapsePanel:
    """One panel: residual ratio (rank) and error of one layer (depth).

    `last_log10` is log₁₀ of the median residual ratio at the last layer.
    """

    where: str
    verdict: str
    rank: Spread
    depth: Spread
    last_log10: float


_FLOOR = 1e-9


def draw_collapse(panels: Sequence[Sequence[CollapsePanel]]) -> Figure:
    """Draw the panels in rows and columns, each with its verdict as heading."""
    with figure_style():
        figure = Figure(figsize=(5.6, 4.9), layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05, hspace=0.06))
        grid = figure.subplots(len(panels), len(panels[0]), squeeze=False, sharex=True, sharey=True)
        for r, row in enumerate(panels):
            for c, panel in enumerate(row):
                _draw_two(grid[r][c], panel)
                if c == 0:
                    grid[r][c].set_ylabel("relative to $\\|X_\\ell\\|_{\\max}$")
                if r == len(panels) - 1:
                    grid[r][c].set_xlabel(LAYER)
        rank = {"color": BLUE, "marker": "o", "markersize": 3.4, "linewidth": 1.5, "label": "rank: residual ratio"}
        depth = {**rank, "color": VERMILION, "marker": "s", "markersize": 3.2, "label": "depth: error of one layer"}
        legend_below(figure, [rank, depth], 2, 1.6)
    return figure


def _draw_two(axes: Axes, panel: CollapsePanel) -> None:
    axes.set_yscale("log")
    for spread, colour, marker in ((panel.rank, BLUE, "o"), (panel.depth, VERMILION, "s")):
        first = 0 if spread is panel.rank else 1  # the input itself has no error
        kept = Spread(spread.middle[first:], spread.low[first:], spread.high[first:])
        layers = range(first, len(spread.middle))
        draw_spread(axes, layers, kept, 0.18, color=colour, marker=marker, markersize=3.2, linewidth=1.5)
    axes.set_ylim(_FLOOR, 8)
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "1" if y == 1 else f"$10^{{{math.log10(y):.0f}}}$"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_title(panel.verdict, color=INK, fontweight="bold", pad=14)
    axes.text(0, 1.03, panel.where, transform=axes.transAxes, fontsize=7.5, color=FAINT, va="bottom")
    if panel.rank.middle[-1] < _FLOOR:
        last = len(panel.rank.middle) - 1
        digits = f"{round(-panel.last_log10, -3):,.0f}".replace(",", "\u2009")
        value = f"$10^{{-{digits}}}$" if math.isfinite(panel.last_log10) else "0"
        shown = f"falls to {value} at layer {last}"
        axes.text(2.1, 3e-9, shown, fontsize=7.5, color=BLUE, va="bottom")
