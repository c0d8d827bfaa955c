"""Figures T1 to T3: does depth pay in models that are trained under a weight bound?"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, ClassVar

from depthgauge.papers.reproduce.study import GridStudy, Results
from depthgauge.papers.trained_depth.experiment import FULL, QUICK, UNBOUNDED, ExperimentPlan, Lists
from depthgauge.papers.trained_depth.trained_records import WITHIN, TrainedRecord
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

    @abstractmethod
    def lists(self) -> list[Lists]:
        """Return the grids as lists of values."""

    def grids(self) -> list[Grid]:
        """Return the grids of the figure."""
        return [self._grid("trained-depth", **lists) for lists in self.lists()]

    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""
        return {"quick": self.quick, **super().settings()}

    def table(self, results: Results) -> list[dict[str, Any]]:
        """Return one row for each trained model; `eta` is inf without a weight bound, `seed` numbers the models."""
        rows = []
        for cell, result in self.found(results):
            p = cell.parameters
            fixed = {name: p[name] for name in ("heads", "dim", "key_dim", "norm", "mlp", "steps", "batch", "rate")}
            for index in range(cell.repetition):
                rows.append(
                    {
                        "task": p["problem"],
                        "layers": p["layers"],
                        "eta": math.inf if p["eta"] == UNBOUNDED else p["eta"],
                        "seed": index,
                        "skip": p["skip"],
                        "chance": result["chance"],
                        **{name: result[name][index] for name in PER_MODEL},
                        **fixed,
                    }
                )
        return rows

    def curve(self, results: Results, name: str, etas: Sequence[float], **parameters: Any) -> Any:
        """Return the spread of a result over the models, for each η."""
        from depthgauge.papers.figures.style import Spread

        return Spread.over([self._values(results, name, eta=eta, **parameters) for eta in etas])

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
        "for every trained model with {self.plan.deepest} layers and every input, that one layer in place of all "
        "layers changes no class probability by more than {self.within:g}."
    )

    def lists(self) -> list[Lists]:
        """Return the grids: every task, depth and η, and one wide layer."""
        return self.plan.depth_grids()

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.accuracy_by_eta import draw_accuracy

        panels = [self._panel(results, problem) for problem in self.plan.problems]
        half = 3 if len(panels) > 4 else len(panels)
        rows = [panels[i : i + half] for i in range(0, len(panels), half)]
        return draw_accuracy(rows, f"one layer proved within {WITHIN:g}")

    def _panel(self, results: Results, problem: str) -> Any:
        from depthgauge.papers.figures.accuracy_by_eta import EtaCurve, TaskPanel

        plan, etas = self.plan, self.plan.etas
        heads = int(plan.shape["heads"])
        kinds = [(f"L = {layers}", layers, heads) for layers in plan.layers]
        kinds.append((f"L = 1, {plan.wide} heads", 1, plan.wide))
        curves = []
        for order, (label, layers, width) in enumerate(kinds):
            at = {"problem": problem, "layers": layers, "heads": width}
            free = self._values(results, "accuracy", eta=UNBOUNDED, **at)
            found = self.curve(results, "accuracy", etas, **at)
            curves.append(EtaCurve(label, found, unbounded=median(free), colour=order))
        (chance,) = {row["chance"] for row in self.where(results, problem=problem)}
        return TaskPanel(_NAMES[problem], etas, curves, chance, self.proved_up_to(results, problem))

    def proved_up_to(self, results: Results, problem: str) -> float | None:
        """Return the largest η up to which every deepest model is proved to be one layer within 0.01, or None."""
        last = None
        for eta in self.plan.etas:
            rows = self.where(results, problem=problem, layers=self.plan.deepest, eta=eta)
            bounds = [value for row in rows for value in row["probability"]]
            if any(value is None or value > WITHIN for value in bounds):
                break
            last = eta
        return last


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

    def lists(self) -> list[Lists]:
        """Return the cells of T1 with the deepest networks."""
        deepest = self.plan.depth_grids()[1]
        return [{**deepest, "eta": list(self.plan.etas)}]

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.accuracy_by_eta import EtaCurve, TrainedDepthPanel, draw_trained_depths
        from depthgauge.papers.figures.style import Spread

        def curve(name: str, label: str, problem: str) -> EtaCurve:
            return EtaCurve(label, self.curve(results, name, self.plan.etas, problem=problem))

        panels = []
        for problem in self.plan.problems:
            largest = [
                [value / eta for value in self._values(results, "largest", eta=eta, problem=problem)]
                for eta in self.plan.etas
            ]
            panels.append(
                TrainedDepthPanel(
                    title=_NAMES[problem],
                    etas=self.plan.etas,
                    certified=curve("certified_depth", f"proved within {WITHIN:g} in probability", problem),
                    measured=curve("measured_depth", f"measured within {WITHIN:g} in accuracy", problem),
                    at_bound=curve("at_bound", "share of weights at the bound", problem),
                    largest=EtaCurve("largest |w| / η", Spread.over(largest)),
                    layers=self.plan.deepest,
                )
            )
        return draw_trained_depths(panels)


class SkipOrNorm(TrainedStudy):
    """T3: accuracy against η with and without skip connections and LayerNorm."""

    title = "Skip connections, LayerNorm and the weight size at which depth pays"

    about = (
        "Accuracy of trained models with {self.plan.contrast_layers} layers (solid) and one "
        "layer (dashed) against η, with and without skip connections, with and without LayerNorm before the "
        "attention. {self.setup} Lines are medians over the models, bands the minimum to the maximum."
    )

    def lists(self) -> list[Lists]:
        """Return the grid of variants."""
        return self.plan.variant_grids()

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.accuracy_by_eta import EtaCurve, TaskPanel, draw_accuracy

        plan, rows = self.plan, []
        for problem in plan.contrasted:
            row = []
            for skip, norm in ((True, "none"), (False, "none"), (True, "pre"), (False, "pre")):
                at: Mapping[str, Any] = {"problem": problem, "skip": skip, "norm": norm}
                curves = [
                    EtaCurve(
                        f"L = {layers}",
                        self.curve(results, "accuracy", plan.few, layers=layers, **at),
                        colour=order,
                        dashed=layers == 1,
                    )
                    for order, layers in ((0, 1), (2, plan.contrast_layers))
                ]
                (chance,) = {found["chance"] for found in self.where(results, **at)}
                kind = f"{'skip' if skip else 'no skip'}, {'LayerNorm' if norm == 'pre' else 'no LayerNorm'}"
                row.append(TaskPanel(f"{_NAMES[problem]}\n{kind}", plan.few, curves, chance))
            rows.append(row)
        return draw_accuracy(rows, "")
