"""The trained-depth experiment: which models figures T1 to T4 train.

This module needs torch alone, so that the models can be trained on a machine that cannot prove or draw anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from depthgauge.papers.trained_depth.bounded_models import ModelShape
from depthgauge.papers.trained_depth.bounded_training import TrainingOptions, stream_seed

UNBOUNDED = "none"
"""The value of `eta` that stands for no bound."""
_OPTIONS = ("key_dim", "skip", "norm", "mlp", "causal", "steps", "batch", "rate", "test")
DEFAULTS: Mapping[str, Any] = {name: getattr(TrainingOptions, name) for name in _OPTIONS} | {
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
    """The models of figures T1 to T4 at one scale.

    T1 and T2 have the tasks `problems` and the values `etas` of η, T3 has the tasks `contrasted` and the values `few`,
    and T4 the tasks `decoded` and the depths `decoder_layers`. `shape` holds heads, width and training options; `seeds`
    is the number of models at every setting.
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
    decoded: tuple[str, ...] = ()
    decoder_layers: tuple[int, ...] = (2, 4)

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

    def decoder_grids(self) -> list[Lists]:
        """Return the grids of T4: causal blocks with LayerNorm before attention and MLP."""
        if not self.decoded:
            return []
        etas: list[Eta] = [*self.etas, UNBOUNDED]
        kind: Lists = {"causal": [True], "norm": ["pre"], "mlp": [2 * int(self.shape["dim"])], "depths": [False]}
        return [self._lists(problem=list(self.decoded), layers=list(self.decoder_layers), eta=etas, **kind)]

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
    decoded=("recall-3", "1-hop"),
)
QUICK = ExperimentPlan(
    problems=("recall-2", "pointer-2", "majority"),
    contrasted=("pointer-2",),
    etas=(0.001, 0.03, 0.2, 1.0),
    few=(0.03, 0.2, 1.0),
    layers=(1, 2, 4, 8),
    shape={"heads": 2, "dim": 32, "key_dim": 16, "steps": 400, "batch": 32, "rate": 0.05, "test": 500},
    seeds=2,
    decoded=("recall-2",),
)


def member_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of `count` models; a larger count extends the list."""
    return [stream_seed(seed, _MEMBERS, index) for index in range(count)]


def options_of(parameters: Mapping[str, Any], device: str = "cpu") -> TrainingOptions:
    """Return the training options of a cell of the task `trained-depth`."""
    return TrainingOptions(**{name: parameters[name] for name in _OPTIONS}, device=device)


def shape_of(parameters: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the models of a cell."""
    return options_of(parameters).shape(parameters["layers"], parameters["heads"], parameters["dim"])
