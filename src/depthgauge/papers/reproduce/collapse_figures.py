"""Figures A1 to A4, layer collapse of random networks: their grids, captions, and the numbers that are drawn."""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, ClassVar

from depthgauge.papers.reproduce.study import GridStudy, Results, per_layer
from depthgauge.surrogates.closed_forms import CLOSED_FORMS
from depthgauge.sweeps.grid import Grid


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

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.layer_curves import RankCurve, draw_rank
        from depthgauge.papers.figures.style import Spread

        def curve(eta: float, skip: bool) -> RankCurve:
            rows = self.where(results, eta=eta, skip=skip)
            return RankCurve(
                label=f"η = {eta:g}",
                spread=Spread.over(per_layer(rows, "log10_ratio")),
                bound=None if skip else [median(layer) for layer in per_layer(rows, "log10_bound")],
                dong=None if skip else [median(layer) for layer in per_layer(rows, "log10_dong")],
            )

        panels = [("without skip connections", False), ("with skip connections", True)]
        return draw_rank([(name, [curve(eta, skip) for eta in self.ETAS]) for name, skip in panels])


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

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.surrogate_errors import Band, PrintedCurve, draw_orders

        bands = []
        for method in self.ORDER:
            rows = [self.where(results, method=method, eta=eta) for eta in self.ETAS]
            lower = [geometric_mean([r["lower"] for r in found]) for found in rows]
            bands.append(
                Band(
                    label=method,
                    lower=lower,
                    upper=[geometric_mean([r["upper"] for r in found]) for found in rows],
                    slope=fitted_slope(self.ETAS, lower, self.FIT),
                )
            )
        last = [self.where(results, method="last-layer", eta=eta) for eta in self.ETAS]
        printed = PrintedCurve(
            method="last-layer",
            values=[geometric_mean([r["printed"] for r in found]) for found in last],
            applies=[all(r["printed_applies"] for r in found) for found in last],
        )
        return draw_orders(self.ETAS, bands, printed)


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
    mean_x, mean_y = fmean(a for a, _ in points), fmean(b for _, b in points)
    return sum((a - mean_x) * (b - mean_y) for a, b in points) / sum((a - mean_x) ** 2 for a, _ in points)


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

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.depth_map import PhaseDiagram, draw_phases

        def diagram(kind: str, name: str, values: list[int], fixed: dict[str, int]) -> PhaseDiagram:
            depths = [
                [fmean(r[kind] for r in self.where(results, eta=eta, **{name: value}, **fixed)) for eta in self.ETAS]
                for value in values
            ]
            layers = [fixed.get("layers", value) for value in values]
            return PhaseDiagram(etas=self.ETAS, rows=values, layers=layers, depths=depths)

        kinds = ["certified", "measured"]
        return draw_phases(
            ["certified for every input", "measured on 4 inputs"],
            [
                ("width d", f"L = {self.DEPTH}", [diagram(k, "dim", self.DIMS, {"layers": self.DEPTH}) for k in kinds]),
                ("layers L", f"d = {self.DIM}", [diagram(k, "layers", self.LAYERS, {"dim": self.DIM}) for k in kinds]),
            ],
        )


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

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.layer_curves import CollapsePanel, draw_collapse
        from depthgauge.papers.figures.style import Spread

        def panel(skip: bool, eta: float) -> CollapsePanel:
            rows = self.where(results, skip=skip, eta=eta)
            logs = per_layer(rows, "log10_ratio")
            rank = Spread.over([[10.0 ** max(x, -300.0) for x in layer] for layer in logs])
            depth = Spread.over(per_layer(rows, "one_layer"))
            small = {name for name, curve in (("rank", rank), ("layers", depth)) if curve.middle[-1] < self.COLLAPSED}
            verdict = "rank collapse" if "rank" in small else "layer collapse" if small else "no collapse"
            where = f"{'with' if skip else 'without'} skip connections, η = {eta:g}"
            return CollapsePanel(where, verdict, rank, depth, last_log10=median(logs[-1]))

        return draw_collapse([[panel(skip, eta) for eta in (self.SMALL, self.LARGE)] for skip in (False, True)])
