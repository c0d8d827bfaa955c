"""Studies: how a figure is computed, tabulated, captioned, drawn, and written to files beside each other."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from depthgauge._version import __version__
from depthgauge.base.errors import DepthgaugeError, InputError, require_count, require_seed
from depthgauge.base.format import counted
from depthgauge.base.io import make_folder, require_folder, write_text
from depthgauge.base.progress import Step, silent
from depthgauge.papers.reproduce.catalog import DEFAULT_FIGURES, find_figure
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import Cell, Grid
from depthgauge.sweeps.run import Engine, run_cells
from depthgauge.sweeps.store import Store, adopt_rows, to_csv

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

    `results` is what `compute` returned: by default the results of the cells of a sweep, by identity.
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

    def cells(self) -> list[Cell]:
        """Return every cell of the figure; none if the figure is computed in another way."""
        return []

    def compute(self, where: Computing) -> Any:
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
class GridStudy(Study):
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


# --- From the id of a figure to its files -----------------------------------------------------------------------------

SCHEMA = "depthgauge.figure/1"
STORE = "figures.db"
"""Name of the default store in the output directory."""
SUFFIXES = (".png", ".svg", ".csv", ".json", ".txt")
"""The files of a figure."""


@dataclass(frozen=True)
class Reproduction:
    """A figure that was written: its id, the number of its rows, and its files."""

    figure: str
    points: int
    files: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{self.figure}: {counted(self.points, 'row')}, wrote {', '.join(map(str, self.files))}"

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the list `figures` that `depthgauge reproduce --json` prints."""
        return {"figure": self.figure, "points": self.points, "files": [str(path) for path in self.files]}


def find_study(asked: str, models: int | None = None, seed: int = 0, quick: bool = False) -> Study:
    """Return the study of a figure or panel; raise if the id is unknown or a package is missing."""
    figure = find_figure(asked)
    if models is not None:
        require_count("models", models, "how often every point is repeated")
    require_seed(seed)
    figure.require()
    if quick and not figure.trained:
        raise InputError(f"--quick applies to the figures that train models, T1 to T4; use --models N for {asked}")
    module, name = figure.study.split(":")
    make = getattr(import_module(f"{__package__}.{module}"), name)
    study: Study = make(asked, models, seed, quick) if figure.trained else make(asked, models, seed)
    return study


def reproduce(
    figure: str,
    out: str | Path,
    models: int | None = None,
    seed: int = 0,
    *,
    store: str | Path | None = None,
    engine: Engine | None = None,
    progress: Step = silent,
    overwrite: bool = False,
    quick: bool = False,
    rows: str | Path | None = None,
) -> Reproduction:
    """Compute a figure and write ID.png, ID.svg, ID.csv, ID.json and ID.txt.

    `figure` is the id of a figure or of a panel, such as `A2` or `B4a`. `store` is the file that keeps the rows, by
    default `figures.db` in `out`, and `rows` is a CSV file of an earlier run, from `depthgauge sweep --export`; rows in
    these files are not computed again. `overwrite` replaces the files of a figure that was made with other settings,
    `quick` computes the small version of a figure that trains models.
    """
    study = find_study(figure, models, seed, quick)
    _check_files(study, Path(out), overwrite)
    if store is not None and Path(store).absolute().parent != Path(out).absolute():
        require_folder(store)
    make_folder(Path(out), "--out")
    taken = None if rows is None else Path(rows)
    where = Computing(Path(out) / STORE if store is None else Path(store), engine, progress, taken)
    return write_figure(study, out, where)


def _check_files(study: Study, out: Path, overwrite: bool) -> None:
    """Raise if files of the figure exist that were made with other settings; the same settings may be drawn again."""
    present = [path for suffix in SUFFIXES if (path := out / f"{study.id}{suffix}").exists()]
    settings = out / f"{study.id}.json"
    same = settings.is_file() and settings.read_text(encoding="utf-8") == _settings_text(study)
    if present and not overwrite and not same:
        raise InputError(
            f"{present[0]} exists and was made with other settings; use --overwrite to replace it, or another --out"
        )


def _settings_text(study: Study) -> str:
    """Return the settings of a figure, everything needed to compute it again, as JSON."""
    head = {"schema": SCHEMA, "version": __version__, "figure": study.id, "title": study.title, "seed": study.seed}
    return json.dumps(head | study.settings(), indent=2, ensure_ascii=False) + "\n"


def write_figure(study: Study, out: str | Path, where: Computing) -> Reproduction:
    """Compute and draw a study, and write its files: drawing (.png, .svg), rows, settings and caption."""
    from depthgauge.papers.reproduce.style import save

    results = study.compute(where)
    stem = Path(out) / study.id
    rows = study.table(results)
    documents = {".csv": to_csv(rows), ".json": _settings_text(study), ".txt": study.caption() + "\n"}
    written = [stem.with_name(study.id + suffix) for suffix in documents]
    for path, text in zip(written, documents.values(), strict=True):
        write_text(path, text)
    return Reproduction(study.id, len(rows), (*save(study.draw(results), stem), *written))


def reproduce_all(
    figures: Sequence[str], out: str | Path, models: int | None = None, seed: int = 0, **options: Any
) -> list[Reproduction]:
    """Reproduce several figures, or all default figures if none is named; all ids are checked before any work.

    `options` are the keyword arguments of `reproduce`.
    """
    wanted = list(dict.fromkeys(figures or DEFAULT_FIGURES))
    for figure in wanted:
        study = find_study(figure, models, seed, options.get("quick", False))
        _check_files(study, Path(out), options.get("overwrite", False))
    return [reproduce(figure, out, models, seed, **options) for figure in wanted]
