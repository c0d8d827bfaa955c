"""From a figure's id to its cells, their rows in a store, its drawing, and the files side by side."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from depthgauge._io import write_text
from depthgauge._version import __version__
from depthgauge.errors import DepthgaugeError, require_count, unknown_name
from depthgauge.progress import Step, silent
from depthgauge.separation.panels import PANELS, SHEETS
from depthgauge.sweeps.cells import Cell
from depthgauge.sweeps.engines import Engine
from depthgauge.sweeps.run import run_cells, to_csv
from depthgauge.sweeps.store import Store
from depthgauge.workflows.reproduce import rank_figure as dong
from depthgauge.workflows.reproduce.collapse_figures import COLLAPSE_FIGURES
from depthgauge.workflows.reproduce.fast_figure import A5
from depthgauge.workflows.reproduce.separation_figures import separation_study

SCHEMA = "depthgauge.figure/1"
STORE = "figures.db"
"""The store in the output directory, unless another is named: an interrupted figure is resumed from it."""


@runtime_checkable
class Study(Protocol):
    """A figure as it is computed: which cells, and what to make of their results, given by identity."""

    @property
    def id(self) -> str:
        """The figure's id."""

    @property
    def title(self) -> str:
        """What it shows."""

    def cells(self) -> list[Cell]:
        """What has to be computed."""

    def table(self, results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The rows of the CSV."""

    def settings(self) -> dict[str, Any]:
        """Everything needed to compute it again."""

    def caption(self) -> str:
        """The text beneath the figure, repetitions included."""

    def draw(self, results: Mapping[str, Mapping[str, Any]]) -> Any:
        """The matplotlib figure."""


@dataclass(frozen=True)
class Reproduction:
    """A figure that was written: its id, the number of its rows, and its files."""

    figure: str
    points: int
    files: tuple[Path, ...]


OURS = {**COLLAPSE_FIGURES, A5.id: A5}
FIGURES = (*OURS, *SHEETS)
"""What is drawn when none is named; D2 needs a checkpoint, and is drawn by name."""


def find_study(figure: str, models: int | None = None, seed: int = 0) -> Study:
    """The study behind an id; `models` replaces its number of repetitions."""
    if models is not None:
        require_count("models", models, "how many networks are drawn for every point")
    require_count("seed", seed, "where the random numbers start", least=0)
    if figure in OURS:
        return OURS[figure](models, seed)
    if figure in SHEETS or figure in PANELS:
        return separation_study(figure, models, seed)
    raise unknown_name("figure", figure, [*FIGURES, dong.FIGURE, *PANELS])


def reproduce(
    figure: str,
    out: str | Path,
    models: int | None = None,
    seed: int = 0,
    *,
    store: str | Path | None = None,
    engine: Engine | None = None,
    step: Step = silent,
) -> Reproduction:
    """Compute a figure by its id and write ID.png, ID.svg, ID.csv, ID.json and ID.txt into the directory `out`.

    Its rows are kept in `store` (figures.db in `out` unless named), so what is there already is not computed again.
    """
    from depthgauge.figures.style import save

    if figure == dong.FIGURE:
        return Reproduction(figure, *dong.reproduce_dong(out, models, seed, step=step))
    study = find_study(figure, models, seed)
    results = compute(study, Path(out) / STORE if store is None else Path(store), models, seed, engine, step)
    stem = Path(out) / study.id
    rows = study.table(results)
    documents = {".csv": to_csv(rows), ".json": json.dumps(describe(study, seed), indent=2, ensure_ascii=False) + "\n"}
    documents[".txt"] = study.caption() + "\n"
    written = [stem.with_name(study.id + suffix) for suffix in documents]
    for path, text in zip(written, documents.values(), strict=True):
        write_text(path, text)
    return Reproduction(study.id, len(rows), (*save(study.draw(results), stem), *written))


def compute(
    study: Study, store: Path, models: int | None, seed: int, engine: Engine | None, step: Step
) -> dict[str, dict[str, Any]]:
    """The results of every cell of a figure by identity; those that the store lacks, or that failed, are computed."""
    cells = list({cell.identity: cell for cell in study.cells()}.values())
    document = {"figure": study.id, "models": models, "seed": seed}

    def named(done: int, total: int, label: str) -> None:
        step(done, total, f"{study.id} {label}".strip())

    run_cells(study.id, document, cells, store, engine=engine, retry_failed=True, step=named)
    with Store.open(store) as opened:
        rows = opened.results()
    results = {}
    for cell in cells:
        row = rows[cell.identity]
        if row.result is None:
            raise DepthgaugeError(f"{study.id} could not be computed: {row.error} (the rest is kept in {store})")
        results[cell.identity] = row.result
    return results


def reproduce_all(
    figures: Sequence[str],
    out: str | Path,
    models: int | None = None,
    seed: int = 0,
    *,
    store: str | Path | None = None,
    engine: Engine | None = None,
    step: Step = silent,
) -> list[Reproduction]:
    """`reproduce` for each id, or for every figure when none is named; a wrong id stops before any work."""
    wanted = list(dict.fromkeys(figures or FIGURES))
    for figure in wanted:
        if figure == dong.FIGURE:
            dong.check_dong(models, seed)
        else:
            find_study(figure, models, seed)
    return [reproduce(figure, out, models, seed, store=store, engine=engine, step=step) for figure in wanted]


def describe(study: Study, seed: int) -> dict[str, Any]:
    """The settings of a figure: everything needed to compute it again."""
    head = {"schema": SCHEMA, "version": __version__, "figure": study.id, "title": study.title, "seed": seed}
    return head | study.settings()
