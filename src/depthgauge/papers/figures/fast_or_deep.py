"""Figure A5: the cost of attention and the effective depth against the size of the weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from depthgauge.papers.figures.style import BLUE, DASHED, ETA, FAINT, GREEN, INK, VERMILION, figure_style


@dataclass(frozen=True)
class FastOrDeep:
    """For every η: degree and features of the polynomial, speed-up, certified and measured effective depth.

    A degree of infinity means that the scores are too large for any degree. `spread` is the minimum and maximum of the
    speed-up over repetitions.
    """

    etas: Sequence[float]
    degree: Sequence[float]
    features: Sequence[float]
    speedup: Sequence[float]
    spread: Sequence[tuple[float, float]]
    certified: Sequence[float]
    measured: Sequence[float]
    layers: int
    tokens: int


def draw_fast_or_deep(found: FastOrDeep) -> Figure:
    """Draw three panels with a common η axis: degree and features, speed-up, effective depth."""
    with figure_style():
        figure = Figure(figsize=(5.0, 5.6), layout="constrained")
        degree, speed, depth = figure.subplots(3, 1, sharex=True, height_ratios=(1.15, 1, 1))
        _draw_degree(degree, found)
        _draw_speed(speed, found)
        _draw_depth(depth, found)
        depth.set_xscale("log")
        depth.xaxis.set_major_locator(FixedLocator(list(found.etas)[::2]))
        depth.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        depth.xaxis.set_minor_locator(NullLocator())
        depth.set_xlabel(ETA)
    return figure


def _draw_degree(axes: Axes, found: FastOrDeep) -> None:
    axes.set_title("polynomial degree that replaces exp (labels: number of features)", color=INK)
    axes.set_yscale("symlog", linthresh=1)
    axes.plot(found.etas, found.degree, color=VERMILION, marker="o", markersize=3.5, linewidth=1.5)
    for eta, degree, features in zip(found.etas, found.degree, found.features, strict=True):
        if math.isfinite(degree):
            axes.annotate(
                _short(features), (eta, degree), textcoords="offset points", xytext=(2, 5), ha="right", fontsize=6,
                color=FAINT,
            )  # fmt: skip
        else:
            axes.annotate(
                "too\nlarge", (eta, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
                xytext=(0, -4), ha="center", va="top", fontsize=6, color=FAINT,
            )  # fmt: skip
    axes.set_ylim(-0.25, max((g for g in found.degree if math.isfinite(g)), default=1) * 2.4)
    axes.yaxis.set_major_locator(FixedLocator([0, 1, 2, 4, 10, 30, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("degree g")


def _draw_speed(axes: Axes, found: FastOrDeep) -> None:
    axes.set_title(f"predicted speed-up over exact attention at {found.tokens:,} tokens", color=INK)
    axes.set_yscale("log")
    low, high = zip(*found.spread, strict=True)
    axes.fill_between(found.etas, low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(found.etas, found.speedup, color=BLUE, marker="o", markersize=3.5, linewidth=1.5)
    axes.axhline(1, color=FAINT, linestyle=DASHED, linewidth=0.9)
    axes.annotate(
        "exact attention", (found.etas[0], 1), textcoords="offset points", xytext=(0, 3), fontsize=6.5, color=FAINT
    )
    axes.set_ylim(0.6, max(high) * 2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("speed-up")


def _draw_depth(axes: Axes, found: FastOrDeep) -> None:
    axes.set_title(f"effective depth of networks with {found.layers} layers", color=INK)
    curves = (("certified", found.certified, GREEN, "s"), ("measured", found.measured, INK, "^"))
    for name, values, colour, marker in curves:
        axes.plot(found.etas, values, color=colour, marker=marker, markersize=3.5, linewidth=1.5, label=name)
    axes.set_ylim(0, found.layers + 0.8)
    axes.set_yticks(range(0, found.layers + 1, 2))
    axes.set_ylabel("layers needed")
    axes.legend(loc="upper left")


def _short(value: float) -> str:
    """Format a count briefly: 969 → 969, 4845 → 4.8k, 2.1e9 → 2.1e9."""
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.2g}k" if value < 1e5 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
