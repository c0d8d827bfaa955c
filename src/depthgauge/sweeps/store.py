"""The store of a sweep: an SQLite file with one row for each finished cell, committed as soon as the cell is done.

The database uses a write-ahead log with synchronous=FULL: a committed row survives a killed process or a power cut, and
readers never block. The store also keeps the grids and their cells, so it can report what is missing. Its status and
its rows can be read while a run is writing. `to_json` and `to_csv` of the records serialise; they compute nothing.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from depthgauge.base.errors import InputError, OutputError, require_path
from depthgauge.base.format import counted, short
from depthgauge.base.frames import frame, html_table
from depthgauge.base.io import require_folder, write_atomically, write_text
from depthgauge.base.lock import Holder, file_lock, holder_of
from depthgauge.sweeps.grid import Cell, CellOutcome, canonical_json

APPLICATION_ID = 0x64677377  # "dgsw"
FORMAT = 1

_SCHEMA = """
CREATE TABLE grids (grid TEXT PRIMARY KEY, name TEXT NOT NULL, document TEXT NOT NULL);
CREATE TABLE cells (
    identity TEXT PRIMARY KEY, task TEXT NOT NULL, version INTEGER NOT NULL, parameters TEXT NOT NULL,
    repetition INTEGER NOT NULL);
CREATE TABLE grid_cells (grid TEXT NOT NULL, position INTEGER NOT NULL, identity TEXT NOT NULL,
    PRIMARY KEY (grid, position)) WITHOUT ROWID;
CREATE TABLE rows (identity TEXT PRIMARY KEY, result TEXT, error TEXT, seconds REAL NOT NULL,
    CHECK ((result IS NULL) != (error IS NULL))) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class StoredRow:
    """A cell with its result or its error; both are None if the cell has not been computed yet."""

    cell: Cell
    result: dict[str, Any] | None
    error: str | None


@dataclass(frozen=True)
class Count:
    """How many cells are done, failed and missing."""

    done: int
    failed: int
    missing: int

    def __str__(self) -> str:
        return f"{self.done} done, {self.failed} failed, {self.missing} missing"


def lock_path(store: Path) -> Path:
    """Return the path of the lock file, beside the store."""
    return store.with_name(store.name + ".lock")


def run_lock(store: Path) -> AbstractContextManager[None]:
    """Return the lock of a store. The store may be missing; its folder must exist."""
    require_folder(store)
    return file_lock(lock_path(store), str(store), f" (`depthgauge sweep --status {store}` works while it runs)")


class Store:
    """An open store, used as `with Store.open(path) as store`. Only the holder of `run_lock` may write."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self.path = connection, path

    @classmethod
    def open(cls, path: str | Path, *, create: bool = False) -> "Store":
        """Open the store in a file; with `create`, which requires the lock, create it atomically if it is missing."""
        path = require_path("store", path)
        if path.is_dir():
            raise InputError(f"{path} is a directory; give the path of the store file")
        if not path.exists():
            if not create:
                raise InputError(f"there is no store at {path}; check the path")
            with _translated_errors(path):
                write_atomically(path, _make)
        mode = "rw" if os.access(path, os.W_OK) else "ro"
        with _translated_errors(path):
            place = f"{path.absolute().as_uri()}?mode={mode}"
            connection = sqlite3.connect(place, uri=True, isolation_level=None, timeout=30)
            try:
                _prepare(connection, path)
            except BaseException:
                connection.close()
                raise
        return cls(connection, path)

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with _translated_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def plan(self, name: str, document: dict[str, Any], cells: Sequence[Cell]) -> str:
        """Store a grid with its cells and return its key; planning the same grid again changes nothing."""
        text = canonical_json(document)
        grid = hashlib.sha256(text.encode()).hexdigest()
        with self._transaction():
            self._connection.execute("INSERT OR IGNORE INTO grids VALUES (?, ?, ?)", (grid, name, text))
            self._connection.execute("DELETE FROM grid_cells WHERE grid = ?", (grid,))
            self._connection.executemany(
                "INSERT OR IGNORE INTO cells VALUES (?, ?, ?, ?, ?)",
                ((c.identity, c.task, c.version, canonical_json(dict(c.parameters)), c.repetition) for c in cells),
            )
            self._connection.executemany(
                "INSERT INTO grid_cells VALUES (?, ?, ?)", ((grid, i, c.identity) for i, c in enumerate(cells))
            )
        return grid

    def record(self, outcome: CellOutcome) -> None:
        """Commit the outcome of one cell; a row that is done is never replaced, a failed row may be."""
        result = None if outcome.result is None else canonical_json(outcome.result)
        with self._transaction():
            self._connection.execute(
                "INSERT INTO rows VALUES (?, ?, ?, ?) ON CONFLICT (identity) DO UPDATE SET result = excluded.result, "
                "error = excluded.error, seconds = excluded.seconds WHERE rows.error IS NOT NULL",
                (outcome.identity, result, outcome.error, outcome.seconds),
            )

    def settled(self, identities: Iterable[str], *, failed: bool = True) -> set[str]:
        """Return the identities that have a row; with `failed=False` only those whose cell is done."""
        wanted = set(identities)
        condition = "" if failed else " WHERE error IS NULL"
        return {row[0] for row in self._read(f"SELECT identity FROM rows{condition}") if row[0] in wanted}

    def results(self) -> dict[str, StoredRow]:
        """Return the row of every planned cell by identity, in the order in which the cells were planned."""
        found = self._read(
            "SELECT c.identity, c.task, c.version, c.parameters, c.repetition, r.result, r.error "
            "FROM cells c LEFT JOIN rows r ON r.identity = c.identity ORDER BY c.rowid"
        )
        return {
            identity: StoredRow(
                Cell(task, version, json.loads(parameters), repetition),
                None if result is None else json.loads(result),
                error,
            )
            for identity, task, version, parameters, repetition, result, error in found
        }

    def grids(self) -> list[tuple[str, dict[str, Any], Count]]:
        """Return the name, document and progress of every grid in the store."""
        found = self._read("SELECT grid, name, document FROM grids ORDER BY rowid")
        return [(name, json.loads(document), self.count(grid)) for grid, name, document in found]

    def count(self, grid: str | None = None) -> Count:
        """Count the cells of one grid, or of all grids together (a cell in two grids counts once)."""
        where, values = ("WHERE g.grid = ?", [grid]) if grid is not None else ("", [])
        (done, failed, total) = self._read(
            "SELECT COUNT(r.result), COUNT(r.error), COUNT(*) FROM (SELECT DISTINCT g.identity AS identity "
            f"FROM grid_cells g {where}) AS c LEFT JOIN rows r ON r.identity = c.identity",
            values,
        )[0]
        return Count(done, failed, total - done - failed)

    def seconds(self) -> float:
        """Return the total computing time of all rows."""
        return float(self._read("SELECT COALESCE(SUM(seconds), 0) FROM rows")[0][0])

    def rows_sha256(self) -> str:
        """Return the SHA-256 of all identities and results in order of identity; a failed row has the result null."""
        digest = hashlib.sha256()
        for identity, result in self._read("SELECT identity, result FROM rows ORDER BY identity"):
            digest.update(f"{identity} {'null' if result is None else result}\n".encode())
        return digest.hexdigest()

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with _translated_errors(self.path):
            return self._connection.execute(query, values).fetchall()


def _make(path: Path) -> None:
    """Create an empty store."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:  # closing merges the log into the file
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"BEGIN; {_SCHEMA} COMMIT")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Check that the file is a sweep store of a known format, and configure the connection."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        raise InputError(f"{path} is not a sweep store; choose another file")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > FORMAT:
        raise InputError(f"{path} has format {version}, newer than this version reads ({FORMAT}); upgrade depthgauge")
    connection.execute("PRAGMA synchronous = FULL")


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    """Convert errors of SQLite and of the operating system into one-sentence errors of depthgauge."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # extended codes have the primary code in the low byte
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise InputError(f"{path} is not a sweep store ({error}); choose another file") from error
        advice = ""
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            advice = "; free some disk space and run the same command again, no committed row is lost"
        raise OutputError(f"cannot use the store {path}: {error}{advice}") from error
    except OSError as error:
        raise OutputError(f"cannot use the store {path}: {error.strerror or error}") from error


SCHEMA = "depthgauge.sweep/1"
_HTML_ROWS = 10
"""Number of rows shown in a notebook."""


@dataclass(frozen=True)
class RunSummary:
    """What one run did: the cells it computed, the progress of the grid after it, and its duration in seconds."""

    computed: int
    count: Count
    seconds: float

    def __str__(self) -> str:
        rate = f", {self.computed / self.seconds:.3g} cells/s" if self.computed else ""
        return f"{counted(self.computed, 'cell')} computed in {self.seconds:.1f} s{rate}; the grid has {self.count}"


@dataclass(frozen=True, repr=False)
class SweepRows:
    """The table of rows of a sweep: one row for each cell that is done or failed."""

    rows: tuple[StoredRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_json())

    def __repr__(self) -> str:
        failed = sum(row.error is not None for row in self.rows)
        return f"SweepRows({counted(len(self.rows), 'row')}, {failed} failed)"

    def to_json(self) -> list[dict[str, Any]]:
        """Return each row as a flat dictionary: identity, task, parameters, results, and `error_text`."""
        head = ("identity", "task", "version", "repetition")
        return [
            {name: getattr(row.cell, name) for name in head}
            | dict(row.cell.parameters)
            | (row.result or {})
            | {"error_text": row.error}
            for row in self.rows
        ]

    def to_csv(self) -> str:
        """Return the table as CSV; lists and booleans are written as JSON, and numbers round-trip."""
        return to_csv(self.to_json())

    def to_frame(self) -> Any:
        """Return the table as a `pandas.DataFrame` with the columns of `to_json`."""
        return frame(self.to_json())

    def _repr_html_(self) -> str:
        rows = self.to_json()
        names = [name for name in _names(rows) if name not in ("identity", "version")]
        cells = [{name: _csv_value(row.get(name)) for name in names} for row in rows[:_HTML_ROWS]]
        shown = [{name: short(v, 40) if isinstance(v, str) else v for name, v in row.items()} for row in cells]
        more = f", the first {_HTML_ROWS} shown" if len(rows) > _HTML_ROWS else ""
        return html_table(f"{counted(len(rows), 'row')}{more}", shown)


@dataclass(frozen=True, repr=False)
class SweepResult:
    """What `sweep` returns: the summary of the run, and the rows of the grid."""

    store: str | None
    """Path of the store, or None if the sweep used a temporary one."""
    summary: RunSummary
    rows: SweepRows

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        where = f" in {self.store}" if self.store is not None else ""
        return f"SweepResult({self.summary.count}{where}; {self.summary.computed} computed in this run)"

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON document with the rows under `rows`."""
        return {
            "schema": SCHEMA,
            "store": self.store,
            "computed": self.summary.computed,
            **asdict(self.summary.count),
            "seconds": self.summary.seconds,
            "rows": self.rows.to_json(),
        }

    def to_frame(self) -> Any:
        """Return the rows as a `pandas.DataFrame` with one column for each parameter and each result."""
        return self.rows.to_frame()

    def _repr_html_(self) -> str:
        return f"<p>{escape(str(self.summary))}</p>{self.rows._repr_html_()}"


@dataclass(frozen=True)
class GridProgress:
    """A grid in a store: its name, its document, and the count of its cells."""

    name: str
    document: Mapping[str, Any]
    count: Count


@dataclass(frozen=True, repr=False)
class SweepStatus:
    """The status of a store: progress, failures, and the process that runs on it, if any."""

    store: str
    count: Count
    rows_sha256: str
    """Hash of all identities and results. It does not depend on the order, the engine or interruptions."""
    seconds: float
    """Total computing time of all rows."""
    running: Holder | None
    grids: tuple[GridProgress, ...]
    errors: tuple[StoredRow, ...]
    """The rows of the cells that failed."""

    def __repr__(self) -> str:
        running = f", running: {self.running}" if self.running is not None else ""
        return f"SweepStatus({self.store}: {self.count}{running})"

    def to_json(self) -> dict[str, Any]:
        """Return the status document that `depthgauge sweep --status --json` prints."""
        return {
            "schema": SCHEMA,
            "store": self.store,
            **asdict(self.count),
            "rows_sha256": self.rows_sha256,
            "seconds": self.seconds,
            "running": None if self.running is None else asdict(self.running),
            "grids": [{"name": grid.name, **grid.document, **asdict(grid.count)} for grid in self.grids],
            "errors": [
                {"task": row.cell.task, "parameters": dict(row.cell.parameters), "error": row.error}
                for row in self.errors
            ],
        }

    def _repr_html_(self) -> str:
        rows = [{"grid": grid.name, "task": grid.document.get("task"), **asdict(grid.count)} for grid in self.grids]
        return html_table(f"{self.store}: {self.count}", rows)


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return every column name, in order of first occurrence."""
    return list(dict.fromkeys(name for row in rows for name in row))


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header of all names that occur; lists and booleans are written as JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=_names(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _csv_value(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _csv_value(value: Any) -> Any:
    return canonical_json(value) if isinstance(value, list | dict | bool) else value


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
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read rows from {path}: {why}; give a file that `sweep --export` wrote") from error


def _value(text: str) -> Any:
    """Return the value that `SweepRows.to_csv` wrote: JSON, an empty field for None, or a word."""
    if text == "":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
