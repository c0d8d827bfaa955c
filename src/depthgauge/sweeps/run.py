"""Run a sweep: compute the cells that a store does not hold yet, and commit each as soon as it is done."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InterruptedRunError
from depthgauge.base.format import counted
from depthgauge.base.progress import Step, silent
from depthgauge.sweeps.cells import Cell
from depthgauge.sweeps.engines import Engine, EngineError, Local
from depthgauge.sweeps.grid import Grid
from depthgauge.sweeps.store import Store, run_lock
from depthgauge.sweeps.sweep_records import RunSummary


def run_grid(
    grid: Grid, store: str | Path, *, engine: Engine | None = None, retry_failed: bool = False, progress: Step = silent
) -> RunSummary:
    """Compute the cells of a grid that its store does not hold yet."""
    return run_cells(
        grid.name, grid.document(), grid.cells(), store, engine=engine, retry_failed=retry_failed, progress=progress
    )


def run_cells(
    name: str,
    document: dict[str, Any],
    cells: Sequence[Cell],
    store: str | Path,
    *,
    engine: Engine | None = None,
    retry_failed: bool = False,
    progress: Step = silent,
) -> RunSummary:
    """Compute the cells that the store does not hold yet, and commit each as soon as it is done.

    `name` and `document` describe the grid that the cells belong to; the store keeps both.
    """
    path, begun, engine = Path(store), time.perf_counter(), engine or Local()
    engine.check()
    with run_lock(path), Store.open(path, create=True) as opened:
        grid = opened.plan(name, document, cells)
        settled = opened.settled((cell.identity for cell in cells), failed=not retry_failed)
        missing = [cell for cell in cells if cell.identity not in settled]
        computed = 0
        try:
            computed = _compute(opened, missing, engine, progress)
        except KeyboardInterrupt as error:
            raise InterruptedRunError(f"interrupted: {_kept(opened, grid, cells)}") from error
        except EngineError as error:
            raise EngineError(f"{error}; {_kept(opened, grid, cells)}") from error
        return RunSummary(computed, opened.count(grid), time.perf_counter() - begun)


def _kept(store: Store, grid: str, cells: Sequence[Cell]) -> str:
    done = store.count(grid).done
    return (
        f"{done} of {counted(len(cells), 'cell')} done and kept in {store.path}; run the same command again to resume"
    )


def _compute(store: Store, missing: Sequence[Cell], engine: Engine, progress: Step) -> int:
    progress(0, len(missing), "")
    begun, done = time.perf_counter(), 0
    if missing:
        with closing(engine.outcomes(missing)) as outcomes:  # type: ignore[type-var]
            for outcome in outcomes:
                store.record(outcome)
                done += 1
                progress(done, len(missing), f"{done / (time.perf_counter() - begun):.3g} cells/s")
    return done
