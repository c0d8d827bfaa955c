"""Reproduce figures: from an id to the computed rows, the drawing, and the files beside each other."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgauge._version import __version__
from depthgauge.base.errors import InputError, OutputError, require_count, require_seed
from depthgauge.base.format import counted
from depthgauge.base.io import require_folder, write_text
from depthgauge.base.progress import Step, silent
from depthgauge.papers.reproduce.catalog import DEFAULT_FIGURES, find_figure
from depthgauge.papers.reproduce.study import Computing, Study
from depthgauge.sweeps.run import Engine
from depthgauge.sweeps.store import to_csv

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
    return figure.build(asked, models, seed, quick)


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
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create the folder {out}: {error.strerror or error}") from error
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
    return json.dumps(describe(study), indent=2, ensure_ascii=False) + "\n"


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


def describe(study: Study) -> dict[str, Any]:
    """Return the settings of a figure: everything needed to compute it again."""
    head = {"schema": SCHEMA, "version": __version__, "figure": study.id, "title": study.title, "seed": study.seed}
    return head | study.settings()
