"""`depthgauge sweep`: any grid, resumable."""

from pathlib import Path
from typing import Annotated, Any

import typer

from depthgauge.cli.output import print_json, progress_bar, talk
from depthgauge.errors import InputError

_EXAMPLES = """
**Examples**

`depthgauge sweep grid.toml --store results.db` computes what is missing; stop it any way you like and run it again.

`depthgauge sweep --status results.db` says how far it is, also while it runs; `--export rows.csv` writes the rows.

`depthgauge sweep grid.toml --store results.db --engine dask --scheduler tcp://10.0.0.1:8786` computes on a cluster
(`dask scheduler` on one machine, `dask worker tcp://10.0.0.1:8786 --nthreads 1` on any number of others).

**A grid**

`task = "collapse-error"`, `repetitions = 3`, and under `[parameters]` a list for each: `method = ["mean-field"]`,
`eta = [0.001, 0.01]`, `layers = [4, 12]`, `heads = [2]`, `dim = [16]`, `tokens = [64]`.
Tasks: collapse-error, certificate, effective-depth, rank-collapse, fast-attention, separation.
"""


def command(
    grid: Annotated[Path | None, typer.Argument(metavar="GRID.toml", help="The grid.", show_default=False)] = None,
    store: Annotated[Path | None, typer.Option(help="The file that keeps the rows; made where there is none.")] = None,
    status: Annotated[Path | None, typer.Option(metavar="STORE", help="Say how far a store is.")] = None,
    export: Annotated[Path | None, typer.Option(metavar="CSV", help="Write the rows as CSV.")] = None,
    engine: Annotated[str, typer.Option(help="local: processes here; dask: a running cluster.")] = "local",
    scheduler: Annotated[str | None, typer.Option(help="The address of the Dask scheduler.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes of the local engine  [default: every core].")] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Compute failed cells again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say where the store stands as JSON.")] = False,
) -> None:
    """Compute every cell of a grid, each kept as soon as it is done."""
    from depthgauge.sweeps.run import export as write_rows
    from depthgauge.sweeps.run import status as read_status

    place = _place(grid, store, status, export)
    if grid is not None:
        _run(grid, place, engine, scheduler, jobs, retry_failed)
    if export is not None:
        rows = write_rows(place, export)
        talk.print(f"{rows} rows written to {export}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json(read_status(place))
    elif status is not None or grid is not None:
        _say(read_status(place), aloud=status is not None)


def _place(grid: Path | None, store: Path | None, status: Path | None, export: Path | None) -> Path:
    """The store that is meant; exactly one must be."""
    if grid is not None and status is not None:
        raise InputError("give a grid to run it or --status to look at a store, not both")
    if grid is not None and store is None:
        raise InputError(f"give --store FILE.db, where the rows of {grid} are kept")
    if store is not None and status is not None and store != status:
        raise InputError(f"--store {store} and --status {status} name two stores; give one")
    place = store if status is None else status
    if place is None:
        raise InputError("give a grid and --store, or --status STORE to look at one; see `depthgauge sweep --help`")
    if grid is None and status is None and export is None:
        raise InputError(f"nothing to do with {place}: give a grid to run, --status {place}, or --export FILE.csv")
    return place


def _run(grid: Path, store: Path, engine: str, scheduler: str | None, jobs: int | None, retry_failed: bool) -> None:
    from depthgauge.sweeps.engines import choose_engine
    from depthgauge.sweeps.grid import read_grid
    from depthgauge.sweeps.run import run_grid

    wanted, chosen = read_grid(grid), choose_engine(engine, scheduler, jobs)
    with progress_bar("computing") as step:
        done = run_grid(wanted, store, engine=chosen, retry_failed=retry_failed, step=step)
    rate = f", {done.computed / done.seconds:.3g} cells/s" if done.computed else ""
    talk.print(
        f"{done.computed} cells computed in {done.seconds:.1f} s{rate}; the grid has {done.count.done} done, "
        f"{done.count.failed} failed, {done.count.missing} missing",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _say(found: dict[str, Any], aloud: bool) -> None:
    """The status for a reader: asked for, it is the result and goes to standard output; after a run it is talk."""
    lines = [
        f"{found['store']}: {found['done']} done, {found['failed']} failed, {found['missing']} missing; "
        f"rows {found['rows_sha256'][:16]}…"
    ]
    if aloud:
        lines += [
            f"  {grid['name'] or 'grid'}: {grid['done']} done, {grid['failed']} failed, {grid['missing']} missing"
            for grid in found["grids"]
        ]
        if found["running"] is not None:
            lines.append("  running: process {pid} on {host}, since {since}".format(**found["running"]))
    for failure in found["errors"][:3]:
        lines.append(f"  failed: {failure['error']} (retry with --retry-failed)")
    for line in lines:
        typer.echo(line, err=not aloud)


command.__doc__ = (command.__doc__ or "") + "\n\n" + _EXAMPLES
