"""`depthgauge sweep`: run a grid, show the status of a store, export its rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted
from depthgauge.cli.output import Overwrite, note, print_json, progress_bar

if TYPE_CHECKING:
    from depthgauge.sweeps.store import SweepStatus


def command(
    grid: Annotated[Path | None, typer.Argument(metavar="GRID.toml", help="The grid.", show_default=False)] = None,
    store: Annotated[
        Path | None, typer.Option(help="File that keeps the rows; created if it is missing, in a folder that exists.")
    ] = None,
    status: Annotated[Path | None, typer.Option(metavar="STORE", help="Show the status of a store.")] = None,
    export: Annotated[Path | None, typer.Option(metavar="CSV", help="Write the rows to a CSV file.")] = None,
    engine: Annotated[str, typer.Option(help="local: processes on this machine; dask: a running cluster.")] = "local",
    scheduler: Annotated[str | None, typer.Option(help="Address of the Dask scheduler.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes of the local engine  [default: one per core].")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Compute failed cells again.")] = False,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status of the store as JSON.")] = False,
) -> None:
    """Compute every cell of a grid, and store each result as soon as it is done.

    **Examples**

    `depthgauge sweep grid.toml --store results.db` computes the cells that are missing in the store. Sweeps are
    crash-safe: run the same command again to resume.

    `depthgauge sweep --status results.db` shows the progress, also while the sweep runs.

    `depthgauge sweep --store results.db --export rows.csv` writes the rows to a CSV file.

    `depthgauge sweep grid.toml --store results.db --engine dask --scheduler tcp://10.0.0.1:8786` computes on a cluster.
    Start it with `dask scheduler` on one machine and `dask worker tcp://10.0.0.1:8786 --nthreads 1` on the others.

    **Format of a grid**

    `task = "collapse-error"`, `repetitions = 3`, and under `[parameters]` a list for each parameter: `method =
    ["mean-field"]`, `eta = [0.001, 0.01]`, `layers = [4, 12]`, `heads = [2]`, `dim = [16]`, `tokens = [64]`. Tasks:
    collapse-error, certificate, causal-certificate, effective-depth, rank-collapse, fast-attention, separation,
    trained-depth.
    """
    from depthgauge.base.io import check_outputs
    from depthgauge.sweeps.store import export_rows
    from depthgauge.workflows.sweep import sweep, sweep_status

    path = _store(grid, store, status, export)
    check_outputs({"--export": export}, {"GRID": grid, "--store": path}, overwrite=overwrite)
    if grid is not None:
        with progress_bar("computing") as step:
            done = sweep(
                grid, path, engine=engine, scheduler=scheduler, jobs=jobs, retry_failed=retry_failed, progress=step
            )
        note(str(done.summary))
    if export is not None:
        rows = export_rows(path, export, replace=overwrite)
        note(f"{counted(rows, 'row')} written to {export}")
    if as_json:
        print_json(sweep_status(path).to_json())
    elif status is not None or grid is not None:
        _print_status(sweep_status(path), asked=status is not None)


def _store(grid: Path | None, store: Path | None, status: Path | None, export: Path | None) -> Path:
    """Return the store that the options name; raise InputError unless they name exactly one and something to do."""
    if grid is not None and status is not None:
        raise InputError("give either a grid to run or --status to show a store, not both")
    if grid is not None and store is None:
        raise InputError(f"give --store FILE.db, the file that keeps the rows of {grid}")
    if store is not None and status is not None and store != status:
        raise InputError(f"--store {store} and --status {status} name two stores; give one of them")
    path = store if status is None else status
    if path is None:
        raise InputError("give a grid and --store, or --status STORE; see `depthgauge sweep --help`")
    if grid is None and status is None and export is None:
        raise InputError(f"nothing to do with {path}: give a grid to run, --status {path}, or --export FILE.csv")
    return path


def _print_status(found: "SweepStatus", asked: bool) -> None:
    """Print the status: to standard output if it was asked for, to standard error after a run."""
    lines = [f"{found.store}: {found.count}; rows {found.rows_sha256[:16]}…"]
    if asked:
        lines += [f"  {grid.name or 'grid'}: {grid.count}" for grid in found.grids]
        if found.running is not None:
            lines.append(f"  running: {found.running}")
    for failure in found.errors[:3]:
        lines.append(f"  failed: {failure.error} (retry with --retry-failed)")
    for line in lines:
        typer.echo(line, err=not asked)
