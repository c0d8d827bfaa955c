"""Figure A2: the error of every one-layer surrogate against the size of the weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from depthgauge.papers.figures.style import DASHED, DOTTED, ETA, FAINT, FIVE, INK, figure_style


@dataclass(frozen=True)
class Band:
    """Lower and upper bound on the error of a method at every η, and the slope of the lower bound."""

    label: str
    lower: Sequence[float]
    upper: Sequence[float]
    slope: float


@dataclass(frozen=True)
class PrintedCurve:
    """The bound printed in paper A for one method at every η, and whether its conditions hold there."""

    method: str
    values: Sequence[float]
    applies: Sequence[bool]


def draw_orders(etas: Sequence[float], bands: Sequence[Band], printed: PrintedCurve) -> Figure:
    """Draw the bands on logarithmic axes with labels at their left ends; below, one band over its printed bound."""
    with figure_style():
        figure = Figure(figsize=(5.0, 4.8), layout="constrained")
        main, strip = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 1))
        main.set_xscale("log")
        main.set_yscale("log")
        for colour, band in zip(FIVE, bands, strict=True):
            main.fill_between(etas, band.lower, band.upper, color=colour, alpha=0.3, linewidth=0)
            main.plot(etas, band.upper, color=colour, linewidth=0.7, alpha=0.9)
            main.plot(etas, band.lower, color=colour, linewidth=1.5, marker="o", markersize=3)
        _draw_printed(main, etas, printed)
        _name_bands(main, etas, bands)
        main.set_ylabel("worst error of an output entry, $|X| \\leq 1$")
        main.yaxis.set_major_locator(LogLocator(base=100, numticks=20))
        main.yaxis.set_minor_locator(NullLocator())
        _draw_strip(strip, etas, bands, printed)
        strip.set_xlim(etas[0] / _LABEL_SPACE, etas[-1] * 1.2)
        strip.set_xticks([eta for eta in etas if math.log10(eta) == round(math.log10(eta))])
        strip.xaxis.set_minor_locator(NullLocator())
        strip.set_xlabel(ETA)
        _legend(figure)
    return figure


_LABEL_SPACE = 30.0
"""The η axis starts at the first η divided by this, which leaves space for the labels."""


def _draw_printed(axes: Axes, etas: Sequence[float], printed: PrintedCurve) -> None:
    inside = [value if holds else math.nan for value, holds in zip(printed.values, printed.applies, strict=True)]
    last = max((k for k, holds in enumerate(printed.applies) if holds), default=0)
    axes.plot(etas, inside, color=INK, linestyle=DASHED, linewidth=1.2, zorder=5)
    axes.plot(etas[last:], printed.values[last:], color=INK, linestyle=DOTTED, linewidth=1.2, zorder=5)


def _draw_strip(axes: Axes, etas: Sequence[float], bands: Sequence[Band], printed: PrintedCurve) -> None:
    """Draw the two edges of a band divided by the printed bound, where the conditions of the bound hold."""
    (index,) = (k for k, band in enumerate(bands) if band.label == printed.method)
    holds = [k for k, applies in enumerate(printed.applies) if applies]
    x = [etas[k] for k in holds]
    low, high = ([edge[k] / printed.values[k] for k in holds] for edge in (bands[index].lower, bands[index].upper))
    axes.fill_between(x, low, high, color=FIVE[index], alpha=0.3, linewidth=0)
    axes.plot(x, low, color=FIVE[index], linewidth=1.5, marker="o", markersize=3)
    axes.plot([etas[0], etas[-1]], [1, 1], color=INK, linestyle=DASHED, linewidth=1.2)
    axes.set_ylim(0.6, 1.5)
    axes.set_ylabel("error / bound", fontsize=7)
    text = f"{printed.method}:\nabove 1, the\nprinted bound\nis violated"
    axes.annotate(text, (0.02, 0.5), xycoords="axes fraction", fontsize=7, va="center", color=INK)


def _name_bands(axes: Axes, etas: Sequence[float], bands: Sequence[Band]) -> None:
    """Write the name and slope at the left end of each band; labels that would overlap are moved apart."""
    places: list[float] = []
    for band in bands:
        place = math.log10(band.lower[0])
        place += 0.55 if not places else 0.0
        while any(abs(place - other) < 0.8 for other in places):
            place -= 0.05
        places.append(place)
    for colour, band, place in zip(FIVE, bands, places, strict=True):
        axes.annotate(
            f"{band.label}, slope {band.slope:.2f}", (etas[0], 10**place), xytext=(-6, 0),
            textcoords="offset points", ha="right", va="center", fontsize=7, color=colour,
        )  # fmt: skip


def _legend(figure: Figure) -> None:
    handles = [
        Patch(facecolor=FAINT, alpha=0.35, label="lower bound to certificate"),
        Line2D([], [], color=INK, linestyle=DASHED, linewidth=1.2, label="Theorem D.1 as printed"),
        Line2D([], [], color=INK, linestyle=DOTTED, linewidth=1.2, label="outside its conditions"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, handletextpad=0.5, columnspacing=1.2)
