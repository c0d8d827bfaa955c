"""Figures A1 to A6 and D2: rank collapse, how well shallower networks replace random ones, the cost of attention."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any, ClassVar

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from depthgauge.base.errors import MissingPackageError
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.blocks.what_if import VARIANTS, residual_by_depth
from depthgauge.checkpoints.inputs.windows import drawn_windows
from depthgauge.checkpoints.source.library import quiet, transformers
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_config, load_model, load_tokenizer, wrap
from depthgauge.papers.reproduce.catalog import MINILM
from depthgauge.papers.reproduce.study import Computing, GridStudy, Results, Study, per_layer
from depthgauge.papers.reproduce.style import (
    BLUE,
    DASHED,
    DOTTED,
    ETA,
    FAINT,
    FIVE,
    GREEN,
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
from depthgauge.sweeps.grid import Grid
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS

_DEEPEST, _TOP = -3000.0, 0.45
"""The vertical axis of A1."""
_FLOOR = 1e-9
"""The lower end of the vertical axis of A4."""
RankCurve = tuple[str, Spread, Sequence[float] | None, Sequence[float] | None]
"""A label, log₁₀ of the residual ratio by layer, and log₁₀ of the contraction bound and of the rate of Dong et al."""
CollapsePanel = tuple[str, str, Spread, Spread, float]
"""The kind of network, the verdict, residual ratio, error of one layer, log₁₀ of the median ratio at the last layer."""


class RankByLayer(GridStudy):
    """A1: the residual ratio by layer, without and with skip connections."""

    title = "Without skip connections all tokens become equal, doubly exponentially; with them they do not"
    repetitions = 24
    ETAS: ClassVar = [0.003, 0.03, 0.3, 3.0]
    SHAPE: ClassVar = {"layers": 6, "heads": 2, "dim": 16, "tokens": 32}

    about = (
        "Residual ratio ‖Res(X_ℓ)‖max/‖X_ℓ‖max after each layer of random networks (weights "
        "uniform in [−η, η], L = 6, H = 2, d = 16) on 32 tokens uniform in [−1, 1]. Lines show the median over "
        "{self.repeats} repetitions (a new network and input each, seed {self.seed}), bands the minimum to the "
        "maximum. The vertical axis is logarithmic in the exponent, so a doubly exponential decrease is a straight "
        "line. The residual is computed separately from the common row, so rounding sets no floor. Dashed: the "
        "contraction bound ‖Res(X_ℓ₊₁)‖max ≤ Σ_h tanh(θ_ℓh/2)‖V_ℓh‖col‖Res(X_ℓ)‖max with "
        "θ_ℓh = 2β‖W_ℓh‖_{{∞→1}}‖Res(X_ℓ)‖max², iterated from the residual of the input. Dotted: the rate of Dong et "
        "al. (2021), in their composite norm about the token mean. Both bounds are medians over the networks "
        "without skip connections, divided by the measured ‖X_ℓ‖ in the same norm. Bounds above 1 are not shown."
    )

    def grids(self) -> list[Grid]:
        """Return one grid: both kinds of network at every η."""
        return [self._grid("rank-collapse", eta=self.ETAS, skip=[False, True], **self.SHAPE)]

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure."""

        def curve(eta: float, skip: bool) -> RankCurve:
            rows = self.where(results, eta=eta, skip=skip)
            bound, dong = (
                None if skip else [median(layer) for layer in per_layer(rows, name)]
                for name in ("log10_bound", "log10_dong")
            )
            return f"η = {eta:g}", Spread.over(per_layer(rows, "log10_ratio")), bound, dong

        panels = [("without skip connections", False), ("with skip connections", True)]
        return draw_rank([(name, [curve(eta, skip) for eta in self.ETAS]) for name, skip in panels])


def draw_rank(panels: Sequence[tuple[str, Sequence[RankCurve]]]) -> Figure:
    """Draw one panel for each kind of network, with a common vertical axis."""
    with figure_style():
        figure = Figure(figsize=(7.3, 3.4), layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05, wspace=0.04))
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
        for axes, (name, curves) in zip(grid[0], panels, strict=True):
            _draw_ranks(axes, name, curves)
        grid[0][0].set_ylabel("residual ratio  $\\|\\mathrm{Res}(X_\\ell)\\|_{\\max}/\\|X_\\ell\\|_{\\max}$")
        lines = [{**_line(i), "label": label} for i, (label, *_) in enumerate(panels[0][1])]
        lines.append({"color": INK, "linestyle": DASHED, "linewidth": 1.1, "label": "contraction bound (corrected)"})
        lines.append({"color": INK, "linestyle": DOTTED, "linewidth": 1.3, "label": "rate of Dong et al."})
        legend_below(figure, lines, 6, 1.3)
    return figure


def _line(order: int) -> dict[str, Any]:
    return {"color": ORDERED[order], "marker": MARKERS[order], "markersize": 3.6, "linewidth": 1.5}


def _draw_ranks(axes: Axes, name: str, curves: Sequence[RankCurve]) -> None:
    axes.set_yscale("symlog", linthresh=1.0, linscale=0.9)
    for order, (_, spread, *bounds) in enumerate(curves):
        layers = range(len(spread.middle))
        draw_spread(axes, layers, spread, 0.18, **_line(order))
        for bound, dashes, width in zip(bounds, (DASHED, DOTTED), (1.1, 1.3), strict=True):
            if bound is not None:
                (line,) = axes.plot(layers, _below_one(bound), color=ORDERED[order], zorder=3)
                line.set(linestyle=dashes, linewidth=width)
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


class WhatCollapses(GridStudy):
    """A4: rank and depth, with and without skip connections, at small and large weights."""

    title = "Skip connections prevent rank collapse but not layer collapse; large weights prevent both"
    repetitions = 24
    SMALL, LARGE = 0.01, 3.0
    SHAPE: ClassVar = {"layers": 12, "heads": 4, "dim": 32, "tokens": 64}
    COLLAPSED: ClassVar = 0.01
    """A quantity has collapsed if its median at the last layer is below this."""

    about = (
        "Random networks (L = 12, H = 4, d = 32, weights uniform in [−η, η]) on 64 tokens "
        "uniform in [−1, 1]. Rank: the residual ratio ‖Res(X_ℓ)‖max/‖X_ℓ‖max, which falls to 0 as all tokens "
        "become equal. Depth: ‖X_ℓ − S'(X)‖max/‖X_ℓ‖max for the one-layer mean-field surrogate S' of the first ℓ "
        "layers, which is small if one layer can replace them. Lines are medians over {self.repeats} repetitions "
        "(a new network and input each, seed {self.seed}), bands the minimum to the maximum. The heading of a "
        "panel states what is below {self.COLLAPSED:g} at the last layer. Without skip connections and with small "
        "weights the rank collapses. With skip connections and small weights the rank stays, and the layers "
        "collapse. With large weights neither collapses."
    )

    def grids(self) -> list[Grid]:
        """Return one grid: with and without skip connections, small and large weights."""
        return [self._grid("rank-collapse", skip=[True, False], eta=[self.SMALL, self.LARGE], **self.SHAPE)]

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure."""

        def panel(skip: bool, eta: float) -> CollapsePanel:
            rows = self.where(results, skip=skip, eta=eta)
            logs = per_layer(rows, "log10_ratio")
            rank = Spread.over([[10.0 ** max(x, -300.0) for x in layer] for layer in logs])
            depth = Spread.over(per_layer(rows, "one_layer"))
            small = {name for name, curve in (("rank", rank), ("layers", depth)) if curve.middle[-1] < self.COLLAPSED}
            verdict = "rank collapse" if "rank" in small else "layer collapse" if small else "no collapse"
            where = f"{'with' if skip else 'without'} skip connections, η = {eta:g}"
            return where, verdict, rank, depth, median(logs[-1])

        return draw_collapse([[panel(skip, eta) for eta in (self.SMALL, self.LARGE)] for skip in (False, True)])


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
        rank = {
            "color": BLUE,
            "marker": "o",
            "markersize": 3.4,
            "linewidth": 1.5,
            "label": "rank: residual ratio",
        }
        depth = {
            **rank,
            "color": VERMILION,
            "marker": "s",
            "markersize": 3.2,
            "label": "depth: error of one layer",
        }
        legend_below(figure, [rank, depth], 2, 1.6)
    return figure


def _draw_two(axes: Axes, panel: CollapsePanel) -> None:
    where, verdict, rank, depth, last_log10 = panel
    axes.set_yscale("log")
    for spread, first, colour, marker in ((rank, 0, BLUE, "o"), (depth, 1, VERMILION, "s")):
        kept = Spread(*(values[first:] for values in spread))  # the input itself has no error of one layer
        layers = range(first, len(spread.middle))
        draw_spread(axes, layers, kept, 0.18, color=colour, marker=marker, markersize=3.2, linewidth=1.5)
    axes.set_ylim(_FLOOR, 8)
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "1" if y == 1 else f"$10^{{{math.log10(y):.0f}}}$"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_title(verdict, color=INK, fontweight="bold", pad=14)
    axes.text(0, 1.03, where, transform=axes.transAxes, fontsize=7.5, color=FAINT, va="bottom")
    if rank.middle[-1] < _FLOOR:
        last = len(rank.middle) - 1
        digits = f"{round(-last_log10, -3):,.0f}".replace(",", "\u2009")
        value = f"$10^{{-{digits}}}$" if math.isfinite(last_log10) else "0"
        axes.text(2.1, 3e-9, f"falls to {value} at layer {last}", fontsize=7.5, color=BLUE, va="bottom")


# --- Figure D2, the residual ratio by layer of a checkpoint with parts switched off -----------------------------------

FLOOR = 1e-15
"""Ratios below this are rounding errors of float64."""


DepthCurves = Mapping[str, Mapping[str, Tensor]]
"""The residual ratios by model and variant, each [samples, L + 1]."""
_COLOURS = (VERMILION, INK, GREEN, BLUE)


def installed_checkpoint() -> Path:
    """Return the path of the MiniLM checkpoint in its installed package."""
    spec = find_spec(MINILM.module)
    if spec is None or spec.origin is None:
        raise MissingPackageError(f"{MINILM.label} is not installed; install it with `{MINILM.install}`")
    return Path(spec.origin).parent / "model"


@dataclass(frozen=True)
class RankStudy(Study):
    """D2 as `reproduce` draws it; `models` is the number of text samples, `checkpoint` replaces MiniLM."""

    checkpoint: Path | None = None

    title = "Without skip connections the tokens of a real model become equal"
    floor = FLOOR
    SAMPLES: ClassVar[int] = 32
    TOKENS: ClassVar[int] = 128

    about = (
        "Residual ratio ‖X − 1x̄ᵀ‖/‖X‖ after each layer, where x̄ is the token mean and "
        "the norm is √(largest column sum × largest row sum), for the architecture of MiniLM with random initial "
        "weights (top) and with trained weights (bottom). The variants are those of Dong et al. (2021): attention "
        "only, with the MLP, with the skip connection around attention, and the full model. Geometric mean and one "
        "geometric standard deviation over {self.samples} samples of {self.TOKENS} tokens of text (seed "
        "{self.seed}), in float64; values below {self.floor:g} are rounding errors. Variants without the skip "
        "connection around attention keep LayerNorm and the skip connection around the MLP."
    )

    @property
    def samples(self) -> int:
        """Number of text samples."""
        return self.models or self.SAMPLES

    def compute(self, where: Computing) -> DepthCurves:
        """Compute the curves of both models. They are not kept in the store; they take seconds."""
        path = installed_checkpoint() if self.checkpoint is None else self.checkpoint
        return depth_curves(path, self.samples, self.TOKENS, self.seed, where.progress)

    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""
        return {
            "samples": self.samples,
            "tokens": self.TOKENS,
            "checkpoint": MINILM.module if self.checkpoint is None else self.checkpoint.name,
            "variants": {name: vars(variant) for name, variant in VARIANTS.items()},
        }

    def table(self, results: DepthCurves) -> list[dict[str, Any]]:
        """Return one row for each model, variant and layer.

        `ratio` and `factor` are the geometric mean and the geometric standard deviation over samples, `mean` and
        `deviation` the arithmetic ones.
        """
        return [
            {
                "model": model,
                "variant": variant,
                "layer": layer,
                "ratio": float(column.log().mean().exp()),
                "factor": float(column.log().std(correction=0).exp()),
                "mean": float(column.mean()),
                "deviation": float(column.std(correction=0)),
                "samples": len(column),
            }
            for model, curves in results.items()
            for variant, ratios in curves.items()
            for layer, column in enumerate(ratios.unbind(dim=1))
        ]

    def draw(self, results: DepthCurves) -> Figure:
        """Draw one panel for each model on a common logarithmic axis; values below `FLOOR` are rounding errors."""
        with figure_style():
            figure = Figure(figsize=(3.6, 4.6), layout=ConstrainedLayoutEngine(h_pad=0.05, hspace=0.05))
            grid = figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
            for axes, (model, curves) in zip(grid, results.items(), strict=True):
                _draw_model(axes, curves)
                axes.set_title(model, color=INK)
            grid[-1].set_xlabel(LAYER)
            handles, labels = grid[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4, handletextpad=0.4, columnspacing=1.0)
        return figure


def _draw_model(axes: Axes, curves: Mapping[str, Tensor]) -> None:
    """Draw the geometric mean and the geometric standard deviation over samples of every variant."""
    axes.set_yscale("log")
    axes.axhspan(FLOOR / 100, FLOOR, color=FAINT, alpha=0.15, linewidth=0)
    for order, (label, ratios) in enumerate(curves.items()):
        logs, layers = ratios.log(), range(ratios.shape[1])
        mean, factor = logs.mean(dim=0).exp().numpy(), logs.std(dim=0, correction=0).exp().numpy()
        wide = order % 2 == 0  # drawn wider, since the next curve may cover it
        axes.fill_between(layers, mean / factor, mean * factor, color=_COLOURS[order], alpha=0.18, linewidth=0)
        axes.plot(
            layers, mean, color=_COLOURS[order], marker=MARKERS[order], markersize=6.0 if wide else 3.0,
            linewidth=2.6 if wide else 1.2, label=label, zorder=4,
        )  # fmt: skip
    axes.set_ylim(FLOOR / 20, 4)
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=9))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("residual ratio")
    axes.text(0.1, FLOOR / 3, "rounding error", fontsize=7, color=FAINT, va="center")


def depth_curves(checkpoint: Path, samples: int, tokens: int, seed: int, progress: Step = silent) -> DepthCurves:
    """Return the curves of every variant, for the architecture with random weights and for the checkpoint itself."""
    source, placement = find(checkpoint), Placement("float64", "cpu")
    config = load_config(source, placement)
    ids = drawn_windows(load_tokenizer(source, placement), None, windows=samples, window=tokens, seed=seed)
    total, found = 2 * len(VARIANTS), dict[str, dict[str, Tensor]]()
    for name, model in _initialised_and_trained(load_model(source, config, placement), config, seed):
        ratios = found.setdefault(name, {})
        for label, variant in VARIANTS.items():
            progress((len(found) - 1) * len(VARIANTS) + len(ratios), total, f"{name}, {label}")
            ratios[label] = residual_by_depth(model, ids, variant)
    progress(total, total, "")
    return found


def _initialised_and_trained(trained: Checkpoint, config: Any, seed: int) -> Iterator[tuple[str, Checkpoint]]:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        fresh = getattr(transformers(), type(trained.model).__name__)(config)
    yield "initialised", wrap(fresh.double(), "initialised")
    yield "trained", trained


# --- Figures A2, A3 and A6: how well shallower networks replace random networks ---------------------------------------

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

        last = [self.where(results, method="last-layer", eta=eta) for eta in self.ETAS]
        printed = [geometric_mean([row["printed"] for row in rows]) for rows in last]
        applies = [all(row["printed_applies"] for row in rows) for rows in last]
        return draw_orders(self.ETAS, error_bands(self, results), "last-layer", printed, applies)


def error_bands(study: "SurrogateErrors | CausalErrors", results: Results) -> Bands:
    """Return the band of every method, and the slope of its lower edge."""
    bands = {}
    for method in study.ORDER:
        at = [study.where(results, method=method, eta=eta) for eta in study.ETAS]
        lower, upper = ([geometric_mean([row[name] for row in rows]) for rows in at] for name in ("lower", "upper"))
        bands[method] = lower, upper, fitted_slope(study.ETAS, lower, SurrogateErrors.FIT)
    return bands


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
        with figure_style():
            figure = Figure(figsize=(5.0, 4.0), layout="constrained")
            axes = figure.subplots()
            _draw_bands(axes, self.ETAS, error_bands(self, results))
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
