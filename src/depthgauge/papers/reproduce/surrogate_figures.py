"""Figures A2, A3, A5 and A6: how well shallower networks replace random networks, and what attention costs there."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression, median
from typing import ClassVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from depthgauge.papers.reproduce.study import GridStudy, Results
from depthgauge.papers.reproduce.style import (
    BLUE,
    DASHED,
    DOTTED,
    ETA,
    FAINT,
    FIVE,
    GREEN,
    INK,
    VERMILION,
    figure_style,
)
from depthgauge.sweeps.grid import Grid
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS

Bands = Mapping[str, tuple[Sequence[float], Sequence[float], float]]
"""For every method: the lower and the upper bound on its error at every η, and the slope of the lower bound."""
Plane = tuple[str, str, Sequence[int], Sequence[int], Sequence[Sequence[Sequence[float]]]]
"""The vertical axis, the fixed parameter, the value and the number of layers of every row, and for each kind of depth
the mean depth by row and η."""
_LABEL_SPACE = 30.0
"""The η axis of A2 starts at the first η divided by this, which leaves space for the labels."""
_MAP = "cividis"


class SurrogateErrors(GridStudy):
    """A2: the error of every one-layer surrogate against the size of the weights."""

    title = "How fast the error of each one-layer surrogate falls as the weights shrink"
    repetitions = 3
    ETAS: ClassVar = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1]
    ORDER: ClassVar = {"identity": 1, "last-layer": 1, "parallel": 2, "mean-field": 3, "corrected": 4}
    """The proved order in η of the error of each method (docs/math.md, 3.7)."""
    SHAPE: ClassVar = {"layers": 4, "heads": 1, "dim": 16}
    FIT: ClassVar = 0.01
    """Slopes are fitted to the weights up to this size."""

    about = (
        "Worst error sup‖S(X) − S'(X)‖max over all inputs with |entries| ≤ 1 and any number of "
        "tokens, for random networks S (weights uniform in [−η, η], L = 4, H = 1, d = 16) and their one-layer "
        "surrogates S'. The lower edge of a band is the largest error that an attack found (a proved lower bound), "
        "the upper edge is the certified upper bound. Both are geometric means over "
        "{self.repeats} repetitions (one network each, seed {self.seed}). Slopes are fitted to the lower edges up "
        "to η = {self.FIT:g}. Dashed: the explicit bound (C^L + … + 1)δ in the proof of Theorem D.1 of paper A, "
        "for the last-layer surrogate; dotted where the conditions of the proof do not hold. Bottom: the two edges "
        "for the last-layer surrogate divided by that bound; a value above 1 contradicts it."
    )

    def grids(self) -> list[Grid]:
        """Return one grid: every closed-form surrogate at every η."""
        return [self._grid("certificate", method=list(CLOSED_FORMS), eta=self.ETAS, **self.SHAPE)]

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure."""

        def means(name: str, method: str) -> list[float]:
            found = (self.where(results, method=method, eta=eta) for eta in self.ETAS)
            return [geometric_mean([row[name] for row in rows]) for rows in found]

        bands = {}
        for method in self.ORDER:
            lower = means("lower", method)
            bands[method] = lower, means("upper", method), fitted_slope(self.ETAS, lower, self.FIT)
        last = [self.where(results, method="last-layer", eta=eta) for eta in self.ETAS]
        applies = [all(row["printed_applies"] for row in rows) for rows in last]
        return draw_orders(self.ETAS, bands, "last-layer", means("printed", "last-layer"), applies)


class CausalErrors(GridStudy):
    """A6: the error of one causal layer against the size of the weights."""

    title = "One causal layer replaces all layers of a causal network"
    repetitions = 3
    ETAS: ClassVar = SurrogateErrors.ETAS
    ORDER: ClassVar = {"last-layer": 1, "parallel": 2, "mean-field": 3, "corrected": 4}
    """The proved order in η of the error of each method (docs/math.md, 3.12)."""
    SHAPE: ClassVar = {"layers": 4, "heads": 1, "dim": 16, "tokens": 16}

    about = (
        "Worst error sup‖S(X) − S'(X)‖max over all inputs of 16 tokens with |entries| ≤ 1, for random causal networks "
        "S (weights uniform in [−η, η], L = 4, H = 1, d = 16) and their one-layer surrogates S'. mean-field has one "
        "head for each power of the average over the visible tokens, given by a position bias. The lower edge of a "
        "band is the largest error that an attack found (a proved lower bound), the upper edge is the certified upper "
        "bound. Both are geometric means over {self.repeats} repetitions (one network each, seed {self.seed}). Slopes "
        "are fitted to the lower edges up to η = 0.01."
    )

    def grids(self) -> list[Grid]:
        """Return one grid: every surrogate at every η."""
        return [self._grid("causal-certificate", method=list(self.ORDER), eta=self.ETAS, **self.SHAPE)]

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure."""
        bands = {}
        for method in self.ORDER:
            at = [self.where(results, method=method, eta=eta) for eta in self.ETAS]
            lower, upper = ([geometric_mean([row[name] for row in rows]) for rows in at] for name in ("lower", "upper"))
            bands[method] = lower, upper, fitted_slope(self.ETAS, lower, SurrogateErrors.FIT)
        with figure_style():
            figure = Figure(figsize=(5.0, 4.0), layout="constrained")
            axes = figure.subplots()
            _draw_bands(axes, self.ETAS, bands)
            _eta_axis(axes, self.ETAS)
            handles = [Patch(facecolor=FAINT, alpha=0.35, label="lower bound to certificate")]
            figure.legend(handles=handles, loc="outside lower center")
        return figure


def geometric_mean(values: Sequence[float | None]) -> float:
    """Return exp of the mean of the logarithms; NaN if a value is missing or not positive."""
    if not values or any(value is None or value <= 0 for value in values):
        return math.nan
    return math.exp(fmean(math.log(value) for value in values if value is not None))


def fitted_slope(x: Sequence[float], y: Sequence[float], upto: float) -> float:
    """Return the least-squares slope of log y against log x over the points with x ≤ upto and y > 0.

    >>> round(fitted_slope([1, 2, 4, 100], [5, 20, 80, 1], upto=10), 12)
    2.0
    """
    points = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True) if a <= upto and b > 0]
    return linear_regression(*zip(*points, strict=True)).slope


def draw_orders(
    etas: Sequence[float], bands: Bands, method: str, printed: Sequence[float], applies: Sequence[bool]
) -> Figure:
    """Draw the bands on logarithmic axes with labels at their left ends; below, one band over its printed bound.

    `printed` is the bound that paper A prints for `method` at every η, `applies` whether its conditions hold there.
    """
    holds = [k for k, holds_here in enumerate(applies) if holds_here]
    with figure_style():
        figure = Figure(figsize=(5.0, 4.8), layout="constrained")
        main, strip = figure.subplots(2, 1, sharex=True, height_ratios=(4.2, 1))
        _draw_bands(main, etas, bands)
        inside = [value if k in holds else math.nan for k, value in enumerate(printed)]
        last = max(holds, default=0)
        main.plot(etas, inside, color=INK, linestyle=DASHED, linewidth=1.2, zorder=5)
        main.plot(etas[last:], printed[last:], color=INK, linestyle=DOTTED, linewidth=1.2, zorder=5)
        low, high = ([edge[k] / printed[k] for k in holds] for edge in bands[method][:2])
        colour, x = FIVE[list(bands).index(method)], [etas[k] for k in holds]
        strip.fill_between(x, low, high, color=colour, alpha=0.3, linewidth=0)
        strip.plot(x, low, color=colour, linewidth=1.5, marker="o", markersize=3)
        strip.set_ylim(0.6, 1.5)
        strip.set_ylabel("error / bound", fontsize=7)
        strip.plot([etas[0], etas[-1]], [1, 1], color=INK, linestyle=DASHED, linewidth=1.2)
        text = f"{method}:\nabove 1, the\nprinted bound\nis violated"
        strip.annotate(text, (0.02, 0.5), xycoords="axes fraction", fontsize=7, va="center", color=INK)
        _eta_axis(strip, etas)
        handles = [
            Patch(facecolor=FAINT, alpha=0.35, label="lower bound to certificate"),
            Line2D([], [], color=INK, linestyle=DASHED, linewidth=1.2, label="Theorem D.1 as printed"),
            Line2D([], [], color=INK, linestyle=DOTTED, linewidth=1.2, label="outside its conditions"),
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, handletextpad=0.5, columnspacing=1.2)
    return figure


def _draw_bands(axes: Axes, etas: Sequence[float], bands: Bands) -> None:
    """Draw the bands on logarithmic axes, with their names."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    for colour, (lower, upper, _) in zip(FIVE, bands.values(), strict=False):
        axes.fill_between(etas, lower, upper, color=colour, alpha=0.3, linewidth=0)
        axes.plot(etas, upper, color=colour, linewidth=0.7, alpha=0.9)
        axes.plot(etas, lower, color=colour, linewidth=1.5, marker="o", markersize=3)
    _name_bands(axes, etas, bands)
    axes.set_ylabel("worst error of an output entry, $|X| \\leq 1$")
    axes.yaxis.set_major_locator(LogLocator(base=100, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())


def _eta_axis(axes: Axes, etas: Sequence[float]) -> None:
    axes.set_xlim(etas[0] / _LABEL_SPACE, etas[-1] * 1.2)
    axes.set_xticks([eta for eta in etas if math.log10(eta) == round(math.log10(eta))])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(ETA)


def _name_bands(axes: Axes, etas: Sequence[float], bands: Bands) -> None:
    """Write the name and slope at the left end of each band; labels that would overlap are moved apart."""
    places: list[float] = []
    for lower, _, _ in bands.values():
        place = math.log10(lower[0]) + (0.55 if not places else 0.0)
        while any(abs(place - other) < 0.8 for other in places):
            place -= 0.05
        places.append(place)
    for colour, (label, (_, _, slope)), place in zip(FIVE, bands.items(), places, strict=False):
        axes.annotate(
            f"{label}, slope {slope:.2f}", (etas[0], 10**place), xytext=(-6, 0),
            textcoords="offset points", ha="right", va="center", fontsize=7, color=colour,
        )  # fmt: skip


class DepthMap(GridStudy):
    """A3: effective depth over the size of the weights and the size of the network."""

    title = "Where one layer is enough: effective depth, certified and measured"
    repetitions = 3
    ETAS: ClassVar = [0.005, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5]
    DIMS: ClassVar = [2, 4, 8, 16]
    LAYERS: ClassVar = [2, 3, 4, 6, 8]
    DIM, DEPTH, TOLERANCE = 8, 6, 0.01

    about = (
        "Smallest number of layers that reproduces the output of a network within "
        "{self.TOLERANCE:g} in every entry, for random networks with skip connections (weights uniform in "
        "[−η, η], H = 2). Top: over η and d with L = {self.DEPTH}. Bottom: over η and L with d = {self.DIM}. "
        "Left: certified for every input with |entries| ≤ 1 and any number of tokens. Right: measured on 4 inputs "
        "of 32 tokens uniform in [−1, 1]. Numbers are means over {self.repeats} repetitions (a new network and "
        "inputs each, seed {self.seed}). The colour shows (depth − 1)/(L − 1)."
    )

    def grids(self) -> list[Grid]:
        """Return two grids, over (η, d) and over (η, L); they share one line of cells."""
        fixed = {"tolerance": self.TOLERANCE, "heads": 2, "tokens": 32}
        return [
            self._grid("effective-depth", dim=self.DIMS, layers=self.DEPTH, eta=self.ETAS, **fixed),
            self._grid("effective-depth", dim=self.DIM, layers=self.LAYERS, eta=self.ETAS, **fixed),
        ]

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure."""

        def depths(name: str, values: list[int], **fixed: int) -> list[list[list[float]]]:
            at = [[self.where(results, eta=eta, **{name: value}, **fixed) for eta in self.ETAS] for value in values]
            return [
                [[fmean(r[kind] for r in rows) for rows in row] for row in at] for kind in ("certified", "measured")
            ]

        wide, deep = depths("dim", self.DIMS, layers=self.DEPTH), depths("layers", self.LAYERS, dim=self.DIM)
        return draw_phases(
            self.ETAS, ["certified for every input", "measured on 4 inputs"],
            [
                ("width d", f"L = {self.DEPTH}", self.DIMS, [self.DEPTH] * len(self.DIMS), wide),
                ("layers L", f"d = {self.DIM}", self.LAYERS, self.LAYERS, deep),
            ],
        )  # fmt: skip


def draw_phases(etas: Sequence[float], columns: Sequence[str], planes: Sequence[Plane]) -> Figure:
    """Draw one row of diagrams for each plane and one column for each kind of depth."""
    with figure_style():
        layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.04, wspace=0.03, hspace=0.06)
        figure = Figure(figsize=(7.3, 4.3), layout=layout)
        heights = [len(values) for _, _, values, _, _ in planes]
        grid = figure.subplots(len(planes), len(columns), squeeze=False, height_ratios=heights)
        for r, (axis, fixed, values, layers, diagrams) in enumerate(planes):
            for c, depths in enumerate(diagrams):
                image = _draw_phase(grid[r][c], np.asarray(depths), np.asarray(layers))
                grid[r][c].set_xticks(range(len(etas)), [f"{eta:g}".removeprefix("0") for eta in etas], fontsize=6.5)
                grid[r][c].set_yticks(range(len(values)), [str(value) for value in values])
                grid[r][c].set_title(f"{columns[c]}, {fixed}", color=INK)
                if c == 0:
                    grid[r][c].set_ylabel(axis)
                if r == len(planes) - 1:
                    grid[r][c].set_xlabel(ETA)
        bar = figure.colorbar(image, ax=grid, fraction=0.035, pad=0.02, ticks=[0, 0.5, 1])
        bar.ax.set_yticklabels(["one layer\nis enough", "half of the\nlayers", "all layers\nneeded"], fontsize=7)
        bar.outline.set_visible(False)
    return figure


def _draw_phase(axes: Axes, depths: np.ndarray, layers: np.ndarray) -> AxesImage:
    share = (depths - 1) / (layers[:, None] - 1)
    image = axes.imshow(share, aspect="auto", origin="lower", cmap=_MAP, norm=Normalize(0, 1))
    shades = matplotlib.colormaps[_MAP](share)[..., :3] @ np.array([0.299, 0.587, 0.114])
    for r, row in enumerate(depths):
        for k, depth in enumerate(row):
            axes.text(
                k, r, f"{depth:.2g}", ha="center", va="center", fontsize=6.5, color="w" if shades[r, k] < 0.5 else INK
            )
    axes.grid(False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return image


# --- Figure A5, fast or deep: the cost of attention and the effective depth -------------------------------------------


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
