"""The trained-depth experiment: which models figures T1 to T3 train, and how all models of equal shape train at once.

This module needs torch alone, so that the models can be trained on a machine that cannot prove or draw anything. Their
weights are kept in files; the sweep task `trained-depth` gives the same rows from these files as it would by training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgauge.papers.trained_depth.bounded_models import ModelShape
from depthgauge.papers.trained_depth.bounded_training import BatchTrainer, TrainingOptions, stream_seed
from depthgauge.papers.trained_depth.generated_tasks import find_task
from depthgauge.progress import Step, silent

UNBOUNDED = "none"
"""The value of `eta` that stands for no bound."""
DEFAULTS: Mapping[str, Any] = {
    "key_dim": None,
    "skip": True,
    "norm": "none",
    "mlp": None,
    "steps": 2000,
    "batch": 64,
    "rate": 0.05,
    "test": 1000,
    "depths": True,
}
"""Defaults of the optional parameters of a cell of `trained-depth`."""
_MEMBERS = 4
"""The use of random numbers from which the seeds of models are drawn."""

Lists = dict[str, list[Any]]
"""A grid: a list of values for each parameter."""
Eta = float | str


@dataclass(frozen=True)
class ExperimentPlan:
    """The models of figures T1 to T3 at one scale.

    Attributes:
        problems: the tasks of T1.
        contrasted: the tasks of T3.
        etas: the values of η of T1 and T2.
        few: the values of η of T3.
        layers: the numbers of layers of T1.
        shape: heads, width and training options.
        seeds: the number of models at every setting.
    """

    problems: tuple[str, ...]
    contrasted: tuple[str, ...]
    etas: tuple[float, ...]
    few: tuple[float, ...]
    layers: tuple[int, ...]
    shape: Mapping[str, Any]
    seeds: int
    contrast_layers: int = 4
    """The larger number of layers in T3."""

    @property
    def deepest(self) -> int:
        """The largest number of layers."""
        return max(self.layers)

    @property
    def wide(self) -> int:
        """The number of heads of one layer with as many heads as the deepest network."""
        return self.deepest * int(self.shape["heads"])

    def depth_grids(self) -> list[Lists]:
        """Return the grids of T1: every task, depth and η; and one layer with the heads of the deepest network.

        Depths are computed for the deepest networks alone, in the second grid; T2 draws these.
        """
        etas: list[Eta] = [*self.etas, UNBOUNDED]
        problems, fewer = list(self.problems), [layers for layers in self.layers if layers != self.deepest]
        return [
            self._lists(problem=problems, layers=fewer, eta=etas, depths=[False]),
            self._lists(problem=problems, layers=[self.deepest], eta=etas, depths=[True]),
            self._lists(problem=problems, layers=[1], heads=[self.wide], eta=etas, depths=[False]),
        ]

    def variant_grids(self) -> list[Lists]:
        """Return the grids of T3: with and without skips and LayerNorm, one layer and several."""
        if not self.contrasted:
            return []
        variants: Lists = {"skip": [True, False], "norm": ["none", "pre"], "depths": [False]}
        layers = [1, self.contrast_layers]
        return [self._lists(problem=list(self.contrasted), layers=layers, eta=list(self.few), **variants)]

    def _lists(self, **lists: list[Any]) -> Lists:
        return {name: [value] for name, value in self.shape.items()} | lists


FULL = ExperimentPlan(
    problems=("recall-3", "pointer-2", "1-hop", "s3", "majority", "parity"),
    contrasted=("recall-3", "pointer-2"),
    etas=(0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0),
    few=(0.01, 0.03, 0.1, 0.2, 0.5, 1.0),
    layers=(1, 2, 4, 8),
    shape={"heads": 2, "dim": 32, "key_dim": 16, "steps": 3000, "batch": 64, "rate": 0.05},
    seeds=5,
)
QUICK = ExperimentPlan(
    problems=("recall-2", "pointer-2", "majority"),
    contrasted=("pointer-2",),
    etas=(0.001, 0.03, 0.2, 1.0),
    few=(0.03, 0.2, 1.0),
    layers=(1, 2, 4, 8),
    shape={"heads": 2, "dim": 32, "key_dim": 16, "steps": 400, "batch": 32, "rate": 0.05, "test": 500},
    seeds=2,
)


def member_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of `count` models; a larger count extends the list."""
    return [stream_seed(seed, _MEMBERS, index) for index in range(count)]


def options_of(parameters: Mapping[str, Any], device: str = "cpu") -> TrainingOptions:
    """Return the training options of a cell of the task `trained-depth`."""
    names = ("key_dim", "skip", "norm", "mlp", "steps", "batch", "rate", "test")
    return TrainingOptions(**{name: parameters[name] for name in names}, device=device)


def shape_of(parameters: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the models of a cell."""
    return options_of(parameters).shape(parameters["layers"], parameters["heads"], parameters["dim"])


@dataclass(frozen=True)
class ModelFamily:
    """Models that are trained at once: one task and shape, every η and seed.

    Attributes:
        parameters: the parameters of a cell, without `eta`.
        etas: the values of η, in order; `"none"` is no bound.
        seeds: the seeds, in order.
    """

    parameters: Mapping[str, Any]
    etas: tuple[Eta, ...]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the file that keeps the weights."""
        p = self.parameters
        skip = "skip" if p["skip"] else "noskip"
        return f"{p['problem']}-L{p['layers']}-H{p['heads']}-d{p['dim']}-{skip}-{p['norm']}-mlp{p['mlp'] or 0}.pt"

    def trainer(self, device: str = "cpu") -> BatchTrainer:
        """Return the training run at its start: one model for each η and seed."""
        pairs = [(None if isinstance(eta, str) else eta, seed) for eta in self.etas for seed in self.seeds]
        etas, seeds = [eta for eta, _ in pairs], [seed for _, seed in pairs]
        task, options = find_task(self.parameters["problem"]), options_of(self.parameters, device)
        return BatchTrainer(task, shape_of(self.parameters), etas, seeds, options)

    def train(self, folder: Path, device: str, progress: Step = silent) -> list[float]:
        """Train the models, keep their weights in `folder`, and return their accuracies."""
        trainer = self.trainer(device)
        return [model.accuracy for model in trainer.run(folder / self.name, progress)]

    def load(self, folder: Path) -> BatchTrainer:
        """Return the run that `train` kept in `folder`, on the CPU."""
        trainer = self.trainer()
        trainer.resume(folder / self.name)
        return trainer


def families(cells: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[ModelFamily]:
    """Group the parameters of cells into batches, which share everything but `eta`; equal cells are trained once."""
    groups: dict[tuple[tuple[str, Any], ...], list[Eta]] = {}
    for cell in cells:
        full = {**DEFAULTS, **cell}
        full["key_dim"] = shape_of(full).key_dim
        key = tuple((name, value) for name, value in sorted(full.items()) if name not in ("eta", "depths", "seed"))
        groups.setdefault(key, []).append(full["eta"])
    return [ModelFamily(dict(key), tuple(dict.fromkeys(etas)), tuple(seeds)) for key, etas in groups.items()]
