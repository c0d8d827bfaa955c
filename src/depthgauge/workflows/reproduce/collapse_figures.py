"""Our figures of layer collapse, A1 to A4: their grids, and what the rows become before they are drawn."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar

from depthgauge.surrogates.closed_forms import CLOSED_FORMS
from depthgauge.sweeps.cells import Cell
from depthgauge.sweeps.grid import Grid

Results = Mapping[str, Mapping[str, Any]]
Found = tuple[Cell, Mapping[str, Any]]
"""A cell and its result."""


@dataclass(frozen=True)
class GridStudy(ABC):
    """A figure made of grids; `models` replaces its own number of repetitions."""

    models: int | None
    seed: int

    id: ClassVar[str]
    title: ClassVar[str]
    repetitions: ClassVar[int]
    """How often every setting is repeated unless `models` says otherwise."""

    @property
    def repeats(self) -> int:
        """Repetitions of every setting."""
        return self.models or self.repetitions

    @abstractmethod
    def grids(self) -> list[Grid]:
        """The grids the figure is made of."""

    @abstractmethod
    def caption(self) -> str:
        """The text beneath the figure, repetitions included."""

    @abstractmethod
    def draw(self, results: Results) -> Any:
        """The matplotlib figure."""

    def _grid(self, task: str, **parameters: Any) -> Grid:
        lists = {name: value if isinstance(value, list) else [value] for name, value in parameters.items()}
        return Grid(task, {**lists, "seed": [self.seed]}, self.repeats)

    def cells(self) -> list[Cell]:
        """Every cell of every grid."""
        return [cell for grid in self.grids() for cell in grid.cells()]

    def settings(self) -> dict[str, Any]:
        """Everything needed to compute it again."""
        return {"repetitions": self.repeats, "grids": [grid.document() for grid in self.grids()]}

    def table(self, results: Results) -> list[dict[str, Any]]:
        """One row a cell: its parameters, then what was found."""
        rows = {}
        for cell, result in self.found(results):
            rows[cell.identity] = {
                "task": cell.task,
                **cell.parameters,
                "repetition": cell.repetition,
                **result,
            }
        return list(rows.values())

    def found(self, results: Results) -> list[Found]:
        """Every cell with its result."""
        return [(cell, results[cell.identity]) for cell in self.cells()]

    def where(self, results: Results, **parameters: Any) -> list[Mapping[str, Any]]:
        """The results at one setting of some parameters, one for each repetition."""
        return [
            result
            for cell, result in self.found(results)
            if all(cell.parameters.get(name) == value for name, value in parameters.items())
        ]


def per_layer(results: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """layer → the values over repetitions, of a result that is a list over layers; the logarithm of zero is −∞."""
    layers = zip(*(r[name] for r in results), strict=True)
    return [[-math.inf if value is None else value for value in layer] for layer in layers]


class A1(GridStudy):
    """Rank by layer, without and with skips."""

    id, title, repetitions = (
        "A1",
        "Without skips the tokens become one, doubly exponentially; with them they do not",
        24,
    )
    ETAS: ClassVar = [0.003, 0.03, 0.3, 3.0]
    SHAPE: ClassVar = {"layers": 6, "heads": 2, "dim": 16, "tokens": 32}

    def grids(self) -> list[Grid]:
        """Both kinds of network at every weight bound."""
        return [self._grid("rank-collapse", eta=self.ETAS, skip=[False, True], **self.SHAPE)]

    def caption(self) -> str:
        """As `GridStudy` asks."""
        return (
            f"A1. {self.title}. Residual ratio ‖Res(X_ℓ)‖max/‖X_ℓ‖max after each layer of random networks (weights "
            f"uniform in [−η, η], L = 6, H = 2, d = 16) on 32 tokens uniform in [−1, 1]: median over {self.repeats} "
            f"repetitions (network and input drawn anew, seed {self.seed}), band from the least to the largest. The "
            "scale is logarithmic in the number of digits, so a doubly exponential fall is a straight line; the "
            "residual is carried apart from the common row, so rounding sets no floor. Dashed: the contraction bound "
            "‖Res(X_ℓ₊₁)‖max ≤ Σ_h tanh(θ_ℓh/2)‖V_ℓh‖col‖Res(X_ℓ)‖max, θ_ℓh = 2β‖W_ℓh‖_{∞→1}‖Res(X_ℓ)‖max², iterated "
            "from the input's residual alone. Dotted: the rate of Dong et al. (2021), in their composite norm about "
            "the token mean. Both are medians over the networks without skips, divided by the measured ‖X_ℓ‖ in the "
            "same norm, and left out where they stay above one and say nothing."
        )

    def draw(self, results: Results) -> Any:
        """As `GridStudy` asks."""
        from depthgauge.figures.layer_curves import RankCurve, draw_rank

        def curve(eta: float, skip: bool) -> RankCurve:
            rows = self.where(results, eta=eta, skip=skip)
            ratio = per_layer(rows, "log10_ratio")
            return RankCurve(
                label=f"η = {eta:g}",
                middle=[median(layer) for layer in ratio],
                low=[min(layer) for layer in ratio],
                high=[max(layer) for layer in ratio],
                bound=None if skip else [median(layer) for layer in per_layer(rows, "log10_bound")],
                dong=None if skip else [median(layer) for layer in per_layer(rows, "log10_dong")],
            )

        panels = [("without skips", False), ("with skips", True)]
        return draw_rank([(name, [curve(eta, skip) for eta in self.ETAS]) for name, skip in panels])


class A2(GridStudy):
    """Error of every one-layer network against the size of the weights."""

    id, title, repetitions = "A2", "How fast each one-layer network becomes the deep one as weights shrink", 3
    ETAS: ClassVar = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1]
    ORDER: ClassVar = {"identity": 1, "last-layer": 1, "parallel": 2, "mean-field": 3, "corrected": 4}
    SHAPE: ClassVar = {"layers": 4, "heads": 1, "dim": 16}
    FIT: ClassVar = 0.01
    """Slopes are fitted to the weights up to this."""

    def grids(self) -> list[Grid]:
        """Every closed form at every weight bound."""
        return [self._grid("certificate", method=list(CLOSED_FORMS), eta=self.ETAS, **self.SHAPE)]

    def caption(self) -> str:
        """As `GridStudy` asks."""
        return (
            f"A2. {self.title}. Worst error sup‖S(X) − S'(X)‖max over all inputs with |entries| ≤ 1 and any number of "
            "tokens, for random networks (weights uniform in [−η, η], L = 4, H = 1, d = 16) and their one-layer "
            "surrogates. Bands: from the largest error an attack found, proved at its input, to the certificate; "
            f"geometric means over {self.repeats} repetitions (a network each, seed {self.seed}). The slopes are "
            f"fitted to the lower edges up to η = {self.FIT:g}. Dashed: the explicit bound (C^L + … + 1)δ that the "
            "proof of Theorem D.1 prints for the last-layer network, dotted where the proof's own conditions fail. "
            "Below: the sandwich of that very network over its printed bound; above one, the bound is false."
        )

    def draw(self, results: Results) -> Any:
        """As `GridStudy` asks."""
        from depthgauge.figures.surrogate_errors import Band, PrintedCurve, draw_orders

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
    """exp of the mean of logs; not a number where a value is missing or not positive."""
    if not values or any(value is None or value <= 0 for value in values):
        return math.nan
    return math.exp(fmean(math.log(value) for value in values if value is not None))


def fitted_slope(x: Sequence[float], y: Sequence[float], upto: float) -> float:
    """The least-squares slope of log y over log x, for x up to a limit.

    >>> round(fitted_slope([1, 2, 4, 100], [5, 20, 80, 1], upto=10), 12)
    2.0
    """
    points = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True) if a <= upto and b > 0]
    mean_x, mean_y = fmean(a for a, _ in points), fmean(b for _, b in points)
    return sum((a - mean_x) * (b - mean_y) for a, b in points) / sum((a - mean_x) ** 2 for a, _ in points)


class A3(GridStudy):
    """Effective depth over the size of the weights and of the network."""

    id, title, repetitions = "A3", "Where one layer is enough: effective depth, proved and seen", 3
    ETAS: ClassVar = [0.005, 0.008, 0.012, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5]
    DIMS: ClassVar = [2, 4, 8, 16]
    LAYERS: ClassVar = [2, 3, 4, 6, 8]
    DIM, DEPTH, TOLERANCE = 8, 6, 0.01

    def grids(self) -> list[Grid]:
        """Two planes through one network."""
        fixed = {"tolerance": self.TOLERANCE, "heads": 2, "tokens": 32}
        return [
            self._grid("effective-depth", dim=self.DIMS, layers=self.DEPTH, eta=self.ETAS, **fixed),
            self._grid("effective-depth", dim=self.DIM, layers=self.LAYERS, eta=self.ETAS, **fixed),
        ]

    def caption(self) -> str:
        """As `GridStudy` asks."""
        return (
            f"A3. {self.title}. Fewest layers that do a network's work within {self.TOLERANCE:g} in every output "
            f"entry, for random networks with skips (weights uniform in [−η, η], H = 2): over η and d with L = "
            f"{self.DEPTH} (above), over η and L with d = {self.DIM} (below). Left: certified, for every input with "
            "|entries| ≤ 1 and any number of tokens. Right: measured on 4 inputs of 32 tokens uniform in [−1, 1]. "
            f"Numbers: the mean over {self.repeats} repetitions (network and inputs drawn anew, seed {self.seed}); "
            "colour: the share of layers that cannot be spared, (depth − 1)/(L − 1)."
        )

    def draw(self, results: Results) -> Any:
        """As `GridStudy` asks."""
        from depthgauge.figures.depth_map import PhaseDiagram, draw_phases

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


class A4(GridStudy):
    """What collapses: two by two."""

    id, title, repetitions = "A4", "Skips save the rank, not the layers; only large weights save both", 24
    SMALL, LARGE = 0.01, 3.0
    SHAPE: ClassVar = {"layers": 12, "heads": 4, "dim": 32, "tokens": 64}
    FELL: ClassVar = 0.01
    """A quantity has collapsed where its median at the last layer is below this."""

    def grids(self) -> list[Grid]:
        """Skips or none, small weights or large."""
        return [self._grid("rank-collapse", skip=[True, False], eta=[self.SMALL, self.LARGE], **self.SHAPE)]

    def caption(self) -> str:
        """As `GridStudy` asks."""
        return (
            f"A4. {self.title}. Random networks (L = 12, H = 4, d = 32, weights uniform in [−η, η]) on 64 tokens "
            "uniform in [−1, 1]. Rank: the residual ratio ‖Res(X_ℓ)‖max/‖X_ℓ‖max, which falls when all tokens become "
            "one. Depth: ‖X_ℓ − S'(X)‖max/‖X_ℓ‖max for the one-layer mean-field network S' of the first ℓ layers, "
            f"small when one layer does the work of ℓ. Medians over {self.repeats} repetitions (network and input "
            f"drawn anew, seed {self.seed}), bands from the least to the largest. A heading names what is below "
            f"{self.FELL:g} at the last layer: without skips and with small weights the rank, and with it everything "
            "depth could add; with skips the rank stays and the layers collapse; with large weights neither does."
        )

    def draw(self, results: Results) -> Any:
        """As `GridStudy` asks."""
        from depthgauge.figures.layer_curves import CollapsePanel, Spread, draw_collapse

        def spread(layers: list[list[float]]) -> Spread:
            return Spread(*([pick(layer) for layer in layers] for pick in (median, min, max)))

        def panel(skip: bool, eta: float) -> CollapsePanel:
            rows = self.where(results, skip=skip, eta=eta)
            logs = per_layer(rows, "log10_ratio")
            rank = spread([[10.0 ** max(x, -300.0) for x in layer] for layer in logs])
            depth = spread(per_layer(rows, "one_layer"))
            fell = [name for name, curve in (("rank", rank), ("layers", depth)) if curve.middle[-1] < self.FELL]
            verdict = "rank collapses" if "rank" in fell else "layers collapse" if fell else "nothing collapses"
            where = f"{'with' if skip else 'without'} skips, η = {eta:g}"
            return CollapsePanel(where, verdict, rank, depth, last_log10=median(logs[-1]))

        return draw_collapse([[panel(skip, eta) for eta in (self.SMALL, self.LARGE)] for skip in (False, True)])


COLLAPSE_FIGURES: dict[str, Callable[[int | None, int], GridStudy]] = {study.id: study for study in (A1, A2, A3, A4)}
