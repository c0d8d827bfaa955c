"""Read a store, also while a run is writing to it: its status and its rows. Take rows of another run into a store."""

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from depthgauge.base.errors import InputError
from depthgauge.base.io import write_text
from depthgauge.base.lock import holder_of
from depthgauge.sweeps.cells import Cell, CellOutcome
from depthgauge.sweeps.store import Store, lock_path, run_lock
from depthgauge.sweeps.sweep_records import GridProgress, SweepRows, SweepStatus

_HEAD = ("identity", "task", "version", "repetition", "error_text")


def read_status(path: str | Path) -> SweepStatus:
    """Return the status of a store: its grids, its failures, and the process that runs on it, if any."""
    with Store.open(path) as store:
        return SweepStatus(
            store=str(path),
            count=store.count(),
            rows_sha256=store.rows_sha256(),
            seconds=store.seconds(),
            running=holder_of(lock_path(store.path)),
            grids=tuple(GridProgress(name, document, count) for name, document, count in store.grids()),
            errors=tuple(row for row in store.results().values() if row.error is not None),
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


def adopt_rows(source: str | Path, store: str | Path, cells: Sequence[Cell], document: dict[str, Any]) -> int:
    """Record the rows of a CSV file that belong to the given cells, and return their number.

    `depthgauge sweep --export` wrote the file; it may be compressed with gzip (`.gz`). A row belongs to a cell if its
    identity is that of the cell. The store is created if it does not exist; `document` describes the grid of the cells.
    """
    wanted = {cell.identity: cell for cell in cells}
    found = {identity: row for identity, row in _rows(Path(source)) if identity in wanted}
    if not found:
        raise InputError(
            f"{source} has no row for these cells; it must be an export of a sweep with the same settings and version"
        )
    with run_lock(Path(store)), Store.open(store, create=True) as opened:
        opened.plan("", document, cells)
        settled = opened.settled(found, failed=False)
        for identity, row in found.items():
            if identity not in settled:
                names = set(row) - set(_HEAD) - set(wanted[identity].parameters)
                opened.record(CellOutcome(identity, {name: _value(row[name]) for name in sorted(names)}, None, 0.0))
    return len(found)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the identity and the columns of every row that has no error."""
    open_text: Callable[..., IO[str]] = gzip.open if path.suffix == ".gz" else open
    try:
        with open_text(path, "rt", encoding="utf-8", newline="") as handle:
            for row in csv.DictReader(handle):
                if "identity" not in row or None in row:
                    raise InputError(f"{path} is not an export of a sweep; it has no column named identity")
                if not row.get("error_text"):
                    yield row["identity"], row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read rows from {path}: {error}") from error


def _value(text: str) -> Any:
    """Return the value that `SweepRows.to_csv` wrote: JSON, an empty field for None, or a word."""
    if text == "":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
