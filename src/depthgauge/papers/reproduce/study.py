"""Studies: how a figure is computed, tabulated, captioned and drawn."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from depthgauge.base.errors import DepthgaugeError
from depthgauge.base.progress import Step, silent
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import Cell, Grid
from depthgauge.sweeps.run import Engine, run_cells
from depthgauge.sweeps.store import Store, adopt_rows

Results = Mapping[str, Mapping[str, Any]]
"""The results of cells by identity."""


@dataclass(frozen=True)
class Computing:
    """Where a study is computed: the store of its rows, the engine, the progress callback, and rows to take over."""

    store: Path
    engine: Engine | None = None
    progress: Step = silent
    rows: Path | None = None
    """A CSV file with rows of an earlier run; they are not computed again."""


@dataclass(frozen=True)
class Study(ABC):
    """A figure as it is computed and drawn; `models` replaces the default number of repetitions.

    `results` is what `compute` returned.
    """

    id: str
    models: int | None
    seed: int

    about: ClassVar[str]
    """The caption after the id and the title, as a format string of `self`."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The statement that the figure shows."""

    @abstractmethod
    def compute(self, where: Computing) -> Any:
        """Compute everything the figure shows."""

    @abstractmethod
    def table(self, results: Any) -> list[dict[str, Any]]:
        """Return the rows of the CSV file."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""

    @abstractmethod
    def draw(self, results: Any) -> Any:
        """Return the matplotlib figure."""

    def caption(self) -> str:
        """Return the caption, including the number of repetitions and the seed."""
        return f"{self.id}. {self.title}. {self.about.format(self=self)}"


@dataclass(frozen=True)
class CellStudy(Study):
    """A study whose results are cells of a sweep."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """Return every cell of the figure."""

    def compute(self, where: Computing) -> dict[str, dict[str, Any]]:
        """Return the results by identity; compute the cells that the store does not hold or that failed."""
        cells = list({cell.identity: cell for cell in self.cells()}.values())
        document = {"figure": self.id, "models": self.models, "seed": self.seed}

        def progress(done: int, total: int, label: str) -> None:
            where.progress(done, total, f"{self.id} {label}".strip())

        if where.rows is not None:
            adopt_rows(where.rows, where.store, cells, document)
        run_cells(self.id, document, cells, where.store, engine=where.engine, retry_failed=True, progress=progress)
        with Store.open(where.store) as store:
            rows = store.results()
        results = {}
        for cell in cells:
            row = rows[cell.identity]
            if row.result is None:
                raise DepthgaugeError(
                    f"{self.id} could not be computed: {row.error} (all other rows are kept in {where.store})"
                )
            results[cell.identity] = row.result
        return results


@dataclass(frozen=True)
class GridStudy(CellStudy):
    """A study of one or more grids of random networks."""

    title: ClassVar[str]
    repetitions: ClassVar[int]
    """Default number of repetitions of each setting."""

    @property
    def repeats(self) -> int:
        """Number of repetitions of each setting."""
        return self.models or self.repetitions

    @abstractmethod
    def grids(self) -> list[Grid]:
        """Return the grids of the figure."""

    def _grid(self, task: str, **parameters: Any) -> Grid:
        lists = {name: value if isinstance(value, list) else [value] for name, value in parameters.items()}
        return Grid(TASKS[task], {**lists, "seed": [self.seed]}, self.repeats)

    def cells(self) -> list[Cell]:
        """Return every cell of every grid."""
        return [cell for grid in self.grids() for cell in grid.cells()]

    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""
        return {"repetitions": self.repeats, "grids": [grid.document() for grid in self.grids()]}

    def table(self, results: Results) -> list[dict[str, Any]]:
        """Return one row for each cell: its parameters, then its results."""
        rows = {
            cell.identity: {"task": cell.task, **cell.parameters, "repetition": cell.repetition, **result}
            for cell, result in self.found(results)
        }
        return list(rows.values())

    def found(self, results: Results) -> list[tuple[Cell, Mapping[str, Any]]]:
        """Return every cell with its result."""
        return [(cell, results[cell.identity]) for cell in self.cells()]

    def where(self, results: Results, **parameters: Any) -> list[Mapping[str, Any]]:
        """Return the results of all cells with the given parameter values, one for each repetition."""
        return [
            result
            for cell, result in self.found(results)
            if all(cell.parameters.get(name) == value for name, value in parameters.items())
        ]


def per_layer(results: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """Transpose a result that is a list over layers: for each layer, the values of all repetitions.

    None, which stands for the logarithm of zero, becomes −∞.
    """
    layers = zip(*(r[name] for r in results), strict=True)
    return [[-math.inf if value is None else value for value in layer] for layer in layers]
