"""Figure A5, fast or deep: the cost of attention and the effective depth against the size of the weights."""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from depthgauge.papers.figures.style import BLUE, DASHED, ETA, FAINT, GREEN, INK, VERMILION, figure_style
from depthgauge.papers.reproduce.study import GridStudy, Results
from depthgauge.sweeps.grid import Grid


class FastOrDeepStudy(GridStudy):
    """A5: polynomial degree, number of features, predicted speed-up and effective depth against η."""

    title = "Fast or deep: attention is cheap where depth is not needed"
    repetitions = 3
    ETAS: ClassVar = [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28]
    SHAPE: ClassVar = {"layers": 6, "heads": 2, "dim": 16, "tokens": 128}
    TOLERANCE, LENGTH, ERROR = 1e-3, 65536, 0.01

    about = (
        "Random networks with skip connections (weights uniform in [−η, η], L = {self.SHAPE[layers]}, "
        "H = {self.SHAPE[heads]}, d = {self.SHAPE[dim]}) on 128 "
        "tokens uniform in [−1, 1]. Top: the degree g at which a polynomial can replace exp in every head with an "
        "error of at most {self.TOLERANCE:g} of the range of the values, from the proved bound on the scores; "
        "labels give the number of features C(d + g, g). Middle: cost of exact attention divided by the cost of "
        "the cheaper path, predicted for a CPU and {self.LENGTH:,} tokens (the input repeated); the band shows "
        "the minimum to the maximum. Bottom: the smallest number of layers that reproduces the output within "
        "{self.ERROR:g}, certified for every input with |entries| ≤ 1, and measured on 4 inputs. Degree and "
        "speed-up are medians, depths are means, over {self.repeats} repetitions (a new network and input each, "
        "seed {self.seed})."
    )

    def grids(self) -> list[Grid]:
        """Return two grids: the plans of fast attention in every layer, and the effective depth."""
        fast = self._grid("fast-attention", eta=self.ETAS, tolerance=self.TOLERANCE, length=self.LENGTH, **self.SHAPE)
        return [fast, self._grid("effective-depth", eta=self.ETAS, tolerance=self.ERROR, **self.SHAPE)]

    def draw(self, results: Results) -> Figure:
        """Draw three panels with a common η axis: degree and features, speed-up, effective depth."""
        plans = [self.where(results, eta=eta, tolerance=self.TOLERANCE) for eta in self.ETAS]
        depths = [self.where(results, eta=eta, tolerance=self.ERROR) for eta in self.ETAS]

        def middle(name: str) -> list[float]:
            """Return the median over repetitions; a missing value counts as infinite."""
            return [median(math.inf if r[name] is None else r[name] for r in rows) for rows in plans]

        with figure_style():
            figure = Figure(figsize=(5.0, 5.6), layout="constrained")
            degree, speed, depth = figure.subplots(3, 1, sharex=True, height_ratios=(1.15, 1, 1))
            _draw_degree(degree, self.ETAS, middle("degree"), middle("features"))
            speed.set_title(f"predicted speed-up over exact attention at {self.LENGTH:,} tokens", color=INK)
            low, high = ([pick(r["speedup"] for r in rows) for rows in plans] for pick in (min, max))
            _draw_speed(speed, self.ETAS, middle("speedup"), low, high)
            layers = self.SHAPE["layers"]
            depth.set_title(f"effective depth of networks with {layers} layers", color=INK)
            for name, colour, marker in (("certified", GREEN, "s"), ("measured", INK, "^")):
                means = [fmean(r[name] for r in rows) for rows in depths]
                depth.plot(self.ETAS, means, color=colour, marker=marker, markersize=3.5, linewidth=1.5, label=name)
            depth.set_ylim(0, layers + 0.8)
            depth.set_yticks(range(0, layers + 1, 2))
            depth.set_ylabel("layers needed")
            depth.legend(loc="upper left")
            depth.set_xscale("log")
            depth.xaxis.set_major_locator(FixedLocator(self.ETAS[::2]))
            depth.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            depth.xaxis.set_minor_locator(NullLocator())
            depth.set_xlabel(ETA)
        return figure


def _draw_degree(axes: Axes, etas: Sequence[float], degrees: Sequence[float], features: Sequence[float]) -> None:
    """Draw the degree at every η; infinity means that the scores are too large for any degree."""
    axes.set_title("polynomial degree that replaces exp (labels: number of features)", color=INK)
    axes.set_yscale("symlog", linthresh=1)
    axes.plot(etas, degrees, color=VERMILION, marker="o", markersize=3.5, linewidth=1.5)
    for eta, degree, count in zip(etas, degrees, features, strict=True):
        if math.isfinite(degree):
            axes.annotate(
                _short(count), (eta, degree), textcoords="offset points", xytext=(2, 5), ha="right", fontsize=6,
                color=FAINT,
            )  # fmt: skip
        else:
            axes.annotate(
                "too\nlarge", (eta, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
                xytext=(0, -4), ha="center", va="top", fontsize=6, color=FAINT,
            )  # fmt: skip
    axes.set_ylim(-0.25, max((g for g in degrees if math.isfinite(g)), default=1) * 2.4)
    axes.yaxis.set_major_locator(FixedLocator([0, 1, 2, 4, 10, 30, 100]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylabel("degree g")


def _draw_speed(
    axes: Axes, etas: Sequence[float], middle: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> None:
    axes.set_yscale("log")
    axes.fill_between(etas, low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(etas, middle, color=BLUE, marker="o", markersize=3.5, linewidth=1.5)
    axes.axhline(1, color=FAINT, linestyle=DASHED, linewidth=0.9)
    axes.annotate("exact attention", (etas[0], 1), textcoords="offset points", xytext=(0, 3), fontsize=6.5, color=FAINT)
    axes.set_ylim(0.6, max(high) * 2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("speed-up")


def _short(value: float) -> str:
    """Format a count briefly: 969 → 969, 4845 → 4.8k, 2.1e9 → 2.1e9."""
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.2g}k" if value < 1e5 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
