"""The workflow of `depthgauge sweep` and `dg.sweep`: run a grid, and read a store."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, InterruptedRunError, require_path
from depthgauge.base.progress import Step, silent
from depthgauge.papers.sweep_tasks import TASKS
from depthgauge.sweeps.grid import Grid, parse_grid, read_grid
from depthgauge.sweeps.run import choose_engine, run_grid
from depthgauge.sweeps.store import SweepResult, SweepStatus, read_rows, read_status


def sweep(
    grid: Grid | Mapping[str, Any] | str | Path,
    store: str | Path | None = None,
    *,
    engine: str = "local",
    scheduler: str | None = None,
    jobs: int | None = None,
    retry_failed: bool = False,
    progress: Step = silent,
) -> SweepResult:
    """Compute every cell of a grid, and return the table of its rows.

    Each finished cell is committed to the store at once. A sweep is crash-safe: call it again with the same store, and
    it computes only the cells that are missing.

    Args:
        grid: A `Grid`, the path of a TOML file, or a dictionary with the keys `task`, `parameters` and `repetitions`.
        store: Path of the SQLite file that keeps the rows; created if it does not exist; its folder must exist.
            With None, the rows are kept in a temporary file for the duration of the call.
        engine: `"local"` for processes on this machine, `"dask"` for a running Dask cluster.
        scheduler: Address of the Dask scheduler, for example `"tcp://10.0.0.1:8786"`; only with `engine="dask"`.
        jobs: Number of processes of the local engine; by default one per core. With 1, cells run in this process.
        retry_failed: Whether to compute cells again that failed in an earlier run.
        progress: Called as `progress(done, total, label)` after each cell.

    Returns:
        The rows of this grid, with `to_frame()`, `to_json()` and the summary of the run.

    Raises:
        InputError: The grid or the engine is invalid, the folder of the store does not exist, or another process is
            running on the store.
        EngineError: A worker process died. Rows in `store` are kept.
        InterruptedRunError: The run was interrupted from the keyboard. Rows in `store` are kept.
    """
    wanted, chosen = _grid(grid), choose_engine(engine, scheduler, jobs)
    identities = [cell.identity for cell in wanted.cells()]

    def run(path: Path, shown: str | None) -> SweepResult:
        summary = run_grid(wanted, path, engine=chosen, retry_failed=retry_failed, progress=progress)
        return SweepResult(shown, summary, read_rows(path, identities))

    if store is not None:
        return run(require_path("store", store), str(store))
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run(Path(folder) / "rows.db", None)
        except InterruptedRunError as error:
            raise InterruptedRunError(
                "interrupted, and the store was temporary; give store=FILE to keep rows"
            ) from error


def _grid(grid: Grid | Mapping[str, Any] | str | Path) -> Grid:
    if isinstance(grid, Grid):
        return grid
    if isinstance(grid, str | Path):
        return read_grid(grid, TASKS)
    if isinstance(grid, Mapping):
        return parse_grid(grid, TASKS)
    raise InputError(f"grid must be a Grid, the path of a TOML file or a dictionary, got {type(grid).__name__}")


def sweep_status(store: str | Path) -> SweepStatus:
    """Return the status of a store, also while a sweep is running on it.

    Args:
        store: Path of the store of a sweep.

    Returns:
        The number of cells that are done, failed and missing, the grids of the store, the errors of failed cells, and
        the process that is running on it, if any.

    Raises:
        InputError: There is no sweep store at this path.
    """
    return read_status(store)
