"""Figures A1, A4 and D2: what collapses layer by layer, in random networks and in a checkpoint."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from depthgauge.base.errors import MissingPackageError
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.blocks.what_if import VARIANTS, residual_by_depth
from depthgauge.checkpoints.inputs.windows import drawn_windows
from depthgauge.checkpoints.source.library import quiet, transformers
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_config, load_model, load_tokenizer, wrap
from depthgauge.papers.reproduce import style
from depthgauge.papers.reproduce.catalog import MINILM
from depthgauge.papers.reproduce.study import Computing, GridStudy, Results, Study, per_layer
from depthgauge.papers.reproduce.style import BLUE, FAINT, GREEN, INK, LAYER, MARKERS, VERMILION, figure_style
from depthgauge.sweeps.grid import Grid

_DEEPEST, _TOP = -3000.0, 0.45
"""The vertical axis of A1."""
_FLOOR = 1e-9
"""The lower end of the vertical axis of A4."""
RankCurve = tuple[str, style.Spread, Sequence[float] | None, Sequence[float] | None]
"""A label, log₁₀ of the residual ratio by layer, and log₁₀ of the contraction bound and of the rate of Dong et al."""
CollapsePanel = tuple[str, str, style.Spread, style.Spread, float]
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
            return f"η = {eta:g}", style.Spread.over(per_layer(rows, "log10_ratio")), bound, dong

        panels = [("without skip connections", False), ("with skip connections", True)]
        return draw_rank([(name, [curve(eta, skip) for eta in self.ETAS]) for name, skip in panels])


def draw_rank(panels: Sequence[tuple[str, Sequence[RankCurve]]]) -> Figure:
    """Draw one panel for each kind of network, with a common vertical axis."""
    with style.figure_style():
        figure = Figure(figsize=(7.3, 3.4), layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05, wspace=0.04))
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
        for axes, (name, curves) in zip(grid[0], panels, strict=True):
            _draw_ranks(axes, name, curves)
        grid[0][0].set_ylabel("residual ratio  $\\|\\mathrm{Res}(X_\\ell)\\|_{\\max}/\\|X_\\ell\\|_{\\max}$")
        lines = [{**_line(i), "label": label} for i, (label, *_) in enumerate(panels[0][1])]
        lines.append(
            {"color": style.INK, "linestyle": style.DASHED, "linewidth": 1.1, "label": "contraction bound (corrected)"}
        )
        lines.append({"color": style.INK, "linestyle": style.DOTTED, "linewidth": 1.3, "label": "rate of Dong et al."})
        style.legend_below(figure, lines, 6, 1.3)
    return figure


def _line(order: int) -> dict[str, Any]:
    return {"color": style.ORDERED[order], "marker": style.MARKERS[order], "markersize": 3.6, "linewidth": 1.5}


def _draw_ranks(axes: Axes, name: str, curves: Sequence[RankCurve]) -> None:
    axes.set_yscale("symlog", linthresh=1.0, linscale=0.9)
    for order, (_, spread, *bounds) in enumerate(curves):
        layers = range(len(spread.middle))
        style.draw_spread(axes, layers, spread, 0.18, **_line(order))
        for bound, dashes, width in zip(bounds, (style.DASHED, style.DOTTED), (1.1, 1.3), strict=True):
            if bound is not None:
                (line,) = axes.plot(layers, _below_one(bound), color=style.ORDERED[order], zorder=3)
                line.set(linestyle=dashes, linewidth=width)
    axes.set_ylim(_DEEPEST, _TOP)
    axes.yaxis.set_major_locator(FixedLocator([-1000, -100, -10, -1, 0]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "1" if y == 0 else f"$10^{{{y:.0f}}}$"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(style.LAYER)
    axes.set_title(name, color=style.INK)


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
            rank = style.Spread.over([[10.0 ** max(x, -300.0) for x in layer] for layer in logs])
            depth = style.Spread.over(per_layer(rows, "one_layer"))
            small = {name for name, curve in (("rank", rank), ("layers", depth)) if curve.middle[-1] < self.COLLAPSED}
            verdict = "rank collapse" if "rank" in small else "layer collapse" if small else "no collapse"
            where = f"{'with' if skip else 'without'} skip connections, η = {eta:g}"
            return where, verdict, rank, depth, median(logs[-1])

        return draw_collapse([[panel(skip, eta) for eta in (self.SMALL, self.LARGE)] for skip in (False, True)])


def draw_collapse(panels: Sequence[Sequence[CollapsePanel]]) -> Figure:
    """Draw the panels in rows and columns, each with its verdict as heading."""
    with style.figure_style():
        figure = Figure(figsize=(5.6, 4.9), layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.05, hspace=0.06))
        grid = figure.subplots(len(panels), len(panels[0]), squeeze=False, sharex=True, sharey=True)
        for r, row in enumerate(panels):
            for c, panel in enumerate(row):
                _draw_two(grid[r][c], panel)
                if c == 0:
                    grid[r][c].set_ylabel("relative to $\\|X_\\ell\\|_{\\max}$")
                if r == len(panels) - 1:
                    grid[r][c].set_xlabel(style.LAYER)
        rank = {
            "color": style.BLUE,
            "marker": "o",
            "markersize": 3.4,
            "linewidth": 1.5,
            "label": "rank: residual ratio",
        }
        depth = {
            **rank,
            "color": style.VERMILION,
            "marker": "s",
            "markersize": 3.2,
            "label": "depth: error of one layer",
        }
        style.legend_below(figure, [rank, depth], 2, 1.6)
    return figure


def _draw_two(axes: Axes, panel: CollapsePanel) -> None:
    where, verdict, rank, depth, last_log10 = panel
    axes.set_yscale("log")
    for spread, first, colour, marker in ((rank, 0, style.BLUE, "o"), (depth, 1, style.VERMILION, "s")):
        kept = style.Spread(*(values[first:] for values in spread))  # the input itself has no error of one layer
        layers = range(first, len(spread.middle))
        style.draw_spread(axes, layers, kept, 0.18, color=colour, marker=marker, markersize=3.2, linewidth=1.5)
    axes.set_ylim(_FLOOR, 8)
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "1" if y == 1 else f"$10^{{{math.log10(y):.0f}}}$"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_title(verdict, color=style.INK, fontweight="bold", pad=14)
    axes.text(0, 1.03, where, transform=axes.transAxes, fontsize=7.5, color=style.FAINT, va="bottom")
    if rank.middle[-1] < _FLOOR:
        last = len(rank.middle) - 1
        digits = f"{round(-last_log10, -3):,.0f}".replace(",", "\u2009")
        value = f"$10^{{-{digits}}}$" if math.isfinite(last_log10) else "0"
        axes.text(2.1, 3e-9, f"falls to {value} at layer {last}", fontsize=7.5, color=style.BLUE, va="bottom")


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
