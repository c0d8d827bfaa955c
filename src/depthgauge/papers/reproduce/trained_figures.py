"""Figures T1 to T4: does depth pay in models that are trained under a weight bound?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from depthgauge.papers.reproduce import style
from depthgauge.papers.reproduce.study import GridStudy, Results
from depthgauge.papers.trained_depth.bounded_training import FULL, QUICK, UNBOUNDED, ExperimentPlan, Lists
from depthgauge.papers.trained_depth.output_bound import WITHIN, TrainedRecord
from depthgauge.sweeps.grid import Grid

PER_MODEL = tuple(field.name for field in fields(TrainedRecord))
"""Results that are lists over the models of a cell."""
_NAMES = {
    "recall-2": "recall, 2 pairs",
    "recall-3": "recall, 3 pairs",
    "1-hop": "induction (1 hop)",
    "2-hop": "induction (2 hops)",
    "pointer-2": "pointer, 2 steps",
    "pointer-4": "pointer, 4 steps",
    "s3": "product in S₃",
    "s5": "product in S₅",
    "majority": "majority (control)",
    "parity": "parity (control)",
}
_SHADES = ("#E3EDDD", "#C3D9B7")
"""The colours of what is proved for all sequences, and for all inputs of the box."""
_STYLES = tuple(zip((*style.ORDERED, style.FAINT), (*style.MARKERS, "v"), strict=True))
"""Colours and markers of the curves of T1 and T3."""
_DEPTH_LINES: tuple[tuple[str, int, dict[str, Any]], ...] = tuple(
    (name, row, {"label": label, "color": colour, "marker": marker, "markersize": 3.2, "linewidth": 1.4})
    for name, row, label, colour, marker in (
        ("certified_depth", 0, f"proved within {WITHIN:g} in probability", style.GREEN, "s"),
        ("measured_depth", 0, f"measured within {WITHIN:g} in accuracy", style.INK, "^"),
        ("at_bound", 1, "share of weights at the bound", style.VERMILION, "o"),
        ("largest", 1, "largest |w| / η", style.BLUE, "D"),
    )
)
"""The curves of T2: the result, the row of the panel, and the line."""
EtaCurve = tuple[str, style.Spread, float | None, int, bool]
"""A label, the accuracy against η over models, its median without a weight bound or None, the index of the colour, and
whether the line is dashed."""
Proved = tuple[float | None, float | None]
"""The largest η up to which one layer is proved to suffice, for all sequences and for all inputs of the box; or
None."""
TaskPanel = tuple[str, Sequence[EtaCurve], float, Proved]
"""A title, the curves, the accuracy of a guess, and what is proved."""


@dataclass(frozen=True)
class TrainedStudy(GridStudy):
    """A study of trained models; `quick` selects the small version."""

    quick: bool = False
    within: ClassVar[float] = WITHIN
    repetitions = FULL.seeds

    @property
    def plan(self) -> ExperimentPlan:
        """The models of the figure."""
        return QUICK if self.quick else FULL

    @property
    def repeats(self) -> int:
        """Number of models at each setting."""
        return self.models or self.plan.seeds

    def _grids(self, lists: list[Lists]) -> list[Grid]:
        return [self._grid("trained-depth", **one) for one in lists]

    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""
        return {"quick": self.quick, **super().settings()}

    def table(self, results: Results) -> list[dict[str, Any]]:
        """Return one row for each trained model; `eta` is inf without a weight bound, `seed` numbers the models."""
        rows = []
        for cell, result in self.found(results):
            p = cell.parameters
            names = ("heads", "dim", "key_dim", "norm", "mlp", "causal", "steps", "batch", "rate")
            fixed = {name: p[name] for name in names}
            for index in range(cell.repetition):
                eta = math.inf if p["eta"] == UNBOUNDED else p["eta"]
                row = {"task": p["problem"], "layers": p["layers"], "eta": eta, "seed": index, "skip": p["skip"]}
                found = {name: result[name][index] for name in PER_MODEL}
                rows.append({**row, "chance": result["chance"], **found, **fixed})
        return rows

    def curve(self, results: Results, name: str, etas: Sequence[float], **parameters: Any) -> style.Spread:
        """Return the spread of a result over the models, for each η."""
        return style.Spread.over([self._values(results, name, eta=eta, **parameters) for eta in etas])

    def proved(self, results: Results, etas: Sequence[float], **parameters: Any) -> Proved:
        """Return up to which η every model is proved to be one layer within 0.01, on sequences and on the box."""
        sequences, box = (self._proved_up_to(results, name, etas, parameters) for name in ("probability", "box"))
        return sequences, box

    def _proved_up_to(
        self, results: Results, name: str, etas: Sequence[float], parameters: Mapping[str, Any]
    ) -> float | None:
        last = None
        for eta in etas:
            bounds = [value for row in self.where(results, eta=eta, **parameters) for value in row[name]]
            if any(value is None or value > WITHIN for value in bounds):
                break
            last = eta
        return last

    def panel(
        self,
        results: Results,
        title: str,
        etas: Sequence[float],
        kinds: Sequence[tuple[str, int, dict[str, int]]],
        proved_at: Mapping[str, int],
        **at: Any,
    ) -> TaskPanel:
        """Return the accuracies of the models `at` some parameters.

        Each of `kinds` is a curve: its label, the index of its colour, and further parameters. `proved_at` are those of
        the models for which it is shown what is proved.
        """
        curves: list[EtaCurve] = []
        for label, order, own in kinds:
            spread = self.curve(results, "accuracy", etas, **at, **own)
            free = self._values(results, "accuracy", eta=UNBOUNDED, **at, **own)
            curves.append((label, spread, median(free) if free else None, order, not free and own["layers"] == 1))
        (chance,) = {row["chance"] for row in self.where(results, **at)}
        return title, curves, chance, self.proved(results, etas, **at, **proved_at)

    def _values(self, results: Results, name: str, **parameters: Any) -> list[float]:
        rows = self.where(results, **parameters)
        return [value for row in rows for value in row[name] if value is not None]

    @property
    def setup(self) -> str:
        """How the models are built and trained, for the caption."""
        shape = self.plan.shape
        return (
            f"Models with H = {shape['heads']} heads, width d = {shape['dim']}, without MLP, embeddings with entries "
            f"at most ½ and a readout with entries at most 1, trained for {shape['steps']} steps of AdamW with every "
            f"weight of the attention layers projected onto [−η, η]; {self.repeats} repetitions (seed {self.seed})."
        )


class DepthPays(TrainedStudy):
    """T1: accuracy against η for networks of different depth."""

    title = "Depth pays only above a weight size"

    about = (
        "Accuracy of trained attention models against the bound η on their weights. "
        "{self.setup} Lines are medians over the models, bands the minimum to the maximum. The grey line is "
        "one layer with {self.plan.wide} heads, as many as L = {self.plan.deepest} has in total. Dashed black: chance. "
        "Dotted: the same models without a weight bound. Shaded: the values of η at which the certificate proves, "
        "for every trained model with {self.plan.deepest} layers, that one layer in place of all layers changes no "
        "class probability by more than {self.within:g}: light on every sequence of tokens, dark on every input "
        "with entries up to 1."
    )

    def grids(self) -> list[Grid]:
        """Return the grids: every task, depth and η, and one wide layer."""
        return self._grids(self.plan.depth_grids())

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure."""
        plan, width = self.plan, int(self.plan.shape["heads"])
        kinds = [(f"L = {layers}", k, {"layers": layers, "heads": width}) for k, layers in enumerate(plan.layers)]
        kinds.append((f"L = 1, {plan.wide} heads", len(plan.layers), {"layers": 1, "heads": plan.wide}))
        deepest = {"layers": plan.deepest}
        panels = [self.panel(results, _NAMES[name], plan.etas, kinds, deepest, problem=name) for name in plan.problems]
        half = 3 if len(panels) > 4 else len(panels)
        return draw_accuracy(plan.etas, [panels[i : i + half] for i in range(0, len(panels), half)])


class TrainedDepths(TrainedStudy):
    """T2: certified and measured depth of the trained models, and how much of the weight bound they use."""

    title = "The depth that trained models use, and how much of their weight bound"

    about = (
        "{self.setup} Top: the smallest number of layers of a shallower network that "
        "replaces the {self.plan.deepest} layers of a trained model without further training: proved to change no "
        "class probability by more than {self.within:g} on any input, and measured to lose at most {self.within:g} of "
        "accuracy on test sequences. Bottom: the share of weights with |w| = η, and the largest |w|/η. Lines are "
        "medians over the models, bands the minimum to the maximum."
    )

    def grids(self) -> list[Grid]:
        """Return the cells of T1 with the deepest networks."""
        deepest = self.plan.depth_grids()[1]
        return self._grids([{**deepest, "eta": list(self.plan.etas)}])

    def draw(self, results: Results) -> Figure:
        """Draw the depths in the first row and the use of the bound in the second, one column for each task."""
        plan, etas = self.plan, self.plan.etas
        with style.figure_style():
            figure = _figure(len(plan.problems), 4.4)
            grid = figure.subplots(2, len(plan.problems), squeeze=False, sharey="row")
            for c, problem in enumerate(plan.problems):
                for name, row, line in _DEPTH_LINES:
                    at = [self._values(results, name, eta=eta, problem=problem) for eta in etas]
                    if name == "largest":
                        at = [[value / eta for value in values] for eta, values in zip(etas, at, strict=True)]
                    style.draw_spread(grid[row][c], etas, style.Spread.over(at), **line)
                    _eta_axis(grid[row][c], etas)
                grid[0][c].set_ylim(0, plan.deepest + 0.7)
                grid[0][c].yaxis.set_major_locator(MultipleLocator(2))
                grid[1][c].set_ylim(0, 1.06)
                grid[0][c].set_title(_NAMES[problem], color=style.INK)
                grid[1][c].set_xlabel(style.ETA)
            grid[0][0].set_ylabel("layers needed")
            grid[1][0].set_ylabel("use of the weight bound")
            style.legend_below(figure, [line for _, _, line in _DEPTH_LINES], 2, 1.6)
        return figure


class SkipOrNorm(TrainedStudy):
    """T3: accuracy against η with and without skip connections and LayerNorm."""

    title = "Skip connections, LayerNorm and the weight size at which depth pays"

    about = (
        "Accuracy of trained models with {self.plan.contrast_layers} layers (solid) and one "
        "layer (dashed) against η, with and without skip connections, with and without LayerNorm before the "
        "attention. {self.setup} Lines are medians over the models, bands the minimum to the maximum. Shaded: the "
        "values of η at which one layer is proved to replace {self.plan.contrast_layers} within {self.within:g} in "
        "probability, light on every sequence of tokens, dark on every input with entries up to 1."
    )

    def grids(self) -> list[Grid]:
        """Return the grid of variants."""
        return self._grids(self.plan.variant_grids())

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure."""
        plan, deepest = self.plan, {"layers": self.plan.contrast_layers}
        curves = [("L = 1", 0, {"layers": 1}), (f"L = {plan.contrast_layers}", 2, deepest)]

        def panel(problem: str, skip: bool, norm: str) -> TaskPanel:
            kind = f"{'skip' if skip else 'no skip'}, {'LayerNorm' if norm == 'pre' else 'no LayerNorm'}"
            title, at = f"{_NAMES[problem]}\n{kind}", {"problem": problem, "skip": skip, "norm": norm}
            return self.panel(results, title, plan.few, curves, deepest, **at)

        kinds = ((True, "none"), (False, "none"), (True, "pre"), (False, "pre"))
        return draw_accuracy(plan.few, [[panel(problem, *kind) for kind in kinds] for problem in plan.contrasted])


class CausalBlocks(TrainedStudy):
    """T4: accuracy against η for causal blocks with LayerNorm and MLPs."""

    title = "Causal blocks with LayerNorm and MLPs"

    about = (
        "Accuracy of trained causal models with LayerNorm before attention and MLP (hidden width twice the width) "
        "against the bound η on the weights of attention and MLP. {self.setup} Lines are medians over the models, "
        "bands the minimum to the maximum. Dotted: without a weight bound. Shaded: the values of η at which one wide "
        "block is proved, for every trained model and every sequence of tokens, to change no class probability by "
        "more than {self.within:g}."
    )

    def grids(self) -> list[Grid]:
        """Return the grid of causal models."""
        return self._grids(self.plan.decoder_grids())

    def draw(self, results: Results) -> Figure:
        """Return the matplotlib figure: one panel for each task."""
        plan = self.plan
        kinds = [(f"{layers} blocks", k, {"layers": layers}) for k, layers in enumerate(plan.decoder_layers, start=1)]
        etas = plan.decoder_etas
        panels = [self.panel(results, _NAMES[name], etas, kinds, {}, problem=name) for name in plan.decoded]
        return draw_accuracy(etas, [panels])


def _figure(columns: int, height: float) -> Figure:
    layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.05, wspace=0.03)
    return Figure(figsize=(2.05 * columns + 0.5, height), layout=layout)


def draw_accuracy(etas: Sequence[float], rows: Sequence[Sequence[TaskPanel]]) -> Figure:
    """Draw accuracy against η, one panel for each task."""
    with style.figure_style():
        columns = max(map(len, rows))
        figure = _figure(columns, 2.0 * len(rows) + 0.75)
        grid = figure.subplots(len(rows), columns, squeeze=False, sharey=True)
        for r, row in enumerate(rows):
            for c in range(columns):
                if c >= len(row):
                    grid[r][c].set_axis_off()
                    continue
                _draw_panel(grid[r][c], etas, row[c])
                if c == 0:
                    grid[r][c].set_ylabel("accuracy")
                if r == len(rows) - 1 or c >= len(rows[r + 1]):
                    grid[r][c].set_xlabel(style.ETA)
        sets = ("every sequence", "every input of the box")
        patches = [
            Patch(color=_SHADES[index], label=f"one layer proved within {WITHIN:g}, {sets[index]}")
            for index in range(2)
            if any(panel[3][index] is not None for row in rows for panel in row)
        ]
        curves = rows[0][0][1]
        lines = [{**_line(curve), "label": curve[0]} for curve in curves]
        lines.append({"color": style.INK, "linestyle": style.DASHED, "linewidth": 0.8, "label": "chance"})
        if any(unbounded is not None for _, _, unbounded, _, _ in curves):
            lines.append(
                {"color": style.FAINT, "linestyle": style.DOTTED, "linewidth": 0.9, "label": "no weight bound"}
            )
        style.legend_below(figure, lines, 4, 1.3, *patches)
    return figure


def _draw_panel(axes: Axes, etas: Sequence[float], panel: TaskPanel) -> None:
    title, curves, chance, proved = panel
    for order, (last, shade) in enumerate(zip(proved, _SHADES, strict=True)):
        if last is not None:
            axes.axvspan(etas[0] / 1.35, last, color=shade, linewidth=0, zorder=order / 10)
    axes.axhline(chance, color=style.INK, linestyle=style.DASHED, linewidth=0.8, zorder=2)
    for curve in curves:
        _, spread, unbounded, order, _ = curve
        if unbounded is not None:
            axes.axhline(unbounded, color=_STYLES[order][0], linestyle=style.DOTTED, linewidth=0.9, zorder=1)
        style.draw_spread(axes, etas, spread, **_line(curve))
    _eta_axis(axes, etas)
    axes.set_ylim(0, 1.03)
    axes.set_title(title, color=style.INK)


def _eta_axis(axes: Axes, etas: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(etas[0] / 1.35, etas[-1] * 1.35)
    decades = [10.0**k for k in range(-4, 3) if etas[0] / 1.35 <= 10.0**k <= etas[-1] * 1.35]
    axes.xaxis.set_major_locator(FixedLocator(decades))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _line(curve: EtaCurve) -> dict[str, Any]:
    *_, order, dashed = curve
    line = {"linestyle": style.DASHED if dashed else "-", "markersize": 3.0, "linewidth": 1.3}
    return {"color": _STYLES[order][0], "marker": _STYLES[order][1], **line}
