"""Run what is missing: cells in, rows in a store, resumable at any moment."""

import csv
import io
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from depthgauge._io import write_text
from depthgauge.errors import DepthgaugeError
from depthgauge.progress import Step, silent
from depthgauge.sweeps.cells import Cell, canonical_json
from depthgauge.sweeps.engines import Engine, EngineError, Local
from depthgauge.sweeps.grid import Grid
from depthgauge.sweeps.lock import holder_of, run_lock
from depthgauge.sweeps.store import Count, Row, Store

SCHEMA = "depthgauge.sweep/1"


class InterruptedRunError(DepthgaugeError):
    """A run stopped from the keyboard; what was done is kept."""


@dataclass(frozen=True)
class Summary:
    """What a run did: cells computed now, and how far the grid is."""

    computed: int
    count: Count
    seconds: float


def run_grid(
    grid: Grid, store: str | Path, *, engine: Engine | None = None, retry_failed: bool = False, step: Step = silent
) -> Summary:
    """Compute the cells of a grid that its store does not hold yet."""
    return run_cells(
        grid.name, grid.document(), grid.cells(), store, engine=engine, retry_failed=retry_failed, step=step
    )


def run_cells(
    name: str,
    document: dict[str, Any],
    cells: Sequence[Cell],
    store: str | Path,
    *,
    engine: Engine | None = None,
    retry_failed: bool = False,
    step: Step = silent,
) -> Summary:
    """Compute the cells that the store does not hold yet, each committed as soon as it is done.

    `name` and `document` say what the cells belong to, and are kept beside them.
    """
    path, begun, engine = Path(store), time.perf_counter(), engine or Local()
    engine.check()
    with run_lock(path), Store.open(path, create=True) as opened:
        grid = opened.plan(name, document, cells)
        settled = opened.settled((cell.identity for cell in cells), failed=not retry_failed)
        missing = [cell for cell in cells if cell.identity not in settled]
        computed = 0
        try:
            computed = _compute(opened, missing, engine, step)
        except KeyboardInterrupt as error:
            raise InterruptedRunError(f"interrupted: {_kept(opened, grid, cells)}") from error
        except EngineError as error:
            raise EngineError(f"{error}; {_kept(opened, grid, cells)}") from error
        return Summary(computed, opened.count(grid), time.perf_counter() - begun)


def _kept(store: Store, grid: str, cells: Sequence[Cell]) -> str:
    done = store.count(grid).done
    return f"{done} of {len(cells)} cells are done and kept in {store.path}; run the same command again to resume"


def _compute(store: Store, missing: Sequence[Cell], engine: Engine, step: Step) -> int:
    step(0, len(missing), "")
    begun, done = time.perf_counter(), 0
    if missing:
        with closing(engine.outcomes(missing)) as outcomes:  # type: ignore[type-var]
            for outcome in outcomes:
                store.record(outcome)
                done += 1
                step(done, len(missing), f"{done / (time.perf_counter() - begun):.3g} cells/s")
    return done


def status(path: str | Path) -> dict[str, Any]:
    """How far a store is, read without disturbing a run on it."""
    with Store.open(path) as store:
        count, holder = store.count(), holder_of(store.path)
        failures = [row for row in store.results().values() if row.error is not None]
        return {
            "schema": SCHEMA,
            "store": str(path),
            **asdict(count),
            "rows_sha256": store.rows_sha256(),
            "seconds": store.seconds(),
            "running": None if holder is None else asdict(holder),
            "grids": [{"name": name, **document, **asdict(part)} for name, document, part in store.grids()],
            "errors": [
                {"task": row.cell.task, "parameters": dict(row.cell.parameters), "error": row.error} for row in failures
            ],
        }


def export(path: str | Path, target: str | Path) -> int:
    """Write every row of a store as CSV and return their number; lists are written as JSON, times are left out."""
    with Store.open(path) as store:
        rows = [row for row in store.results().values() if row.result is not None or row.error is not None]
    write_text(target, to_csv([_flat(row) for row in rows]))
    return len(rows)


def _flat(row: Row) -> dict[str, Any]:
    cell = row.cell
    head = {"identity": cell.identity, "task": cell.task, "version": cell.version, "repetition": cell.repetition}
    return head | dict(cell.parameters) | (row.result or {}) | {"error_text": row.error}


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV with a header of every name that occurs; a number is written so that reading it gives it again."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _plain(value: Any) -> Any:
    return canonical_json(value) if isinstance(value, list | dict | bool) else value
