"""Read a store, also while a run is writing to it: its status, and the table of its rows."""

from collections.abc import Iterable
from pathlib import Path

from depthgauge._io import write_text
from depthgauge._lock import holder_of
from depthgauge.sweeps.store import Store, lock_path
from depthgauge.sweeps.sweep_records import FailedCell, GridProgress, SweepRows, SweepStatus


def read_status(path: str | Path) -> SweepStatus:
    """Return the status of a store: its grids, its failures, and the process that runs on it, if any."""
    with Store.open(path) as store:
        failures = [row for row in store.results().values() if row.error is not None]
        return SweepStatus(
            store=str(path),
            count=store.count(),
            rows_sha256=store.rows_sha256(),
            seconds=store.seconds(),
            running=holder_of(lock_path(store.path)),
            grids=tuple(GridProgress(name, document, count) for name, document, count in store.grids()),
            errors=tuple(FailedCell(row.cell.task, row.cell.parameters, row.error or "") for row in failures),
        )


def read_rows(path: str | Path, identities: Iterable[str] | None = None) -> SweepRows:
    """Return the rows of a store that are done or failed: all of them, or those of the given cells in their order."""
    with Store.open(path) as store:
        found = store.results()
    wanted = found if identities is None else identities
    rows = (found[identity] for identity in wanted)
    return SweepRows(tuple(row for row in rows if row.result is not None or row.error is not None))


def export_rows(path: str | Path, target: str | Path, replace: bool = True) -> int:
    """Write all rows of a store to a CSV file and return their number; computing times are not written.

    With `replace=False`, a file that exists is an error.
    """
    rows = read_rows(path)
    write_text(target, rows.to_csv(), replace)
    return len(rows)
