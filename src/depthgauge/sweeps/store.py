"""The store of a sweep: an SQLite file with one row for each finished cell, committed as soon as the cell is done.

The database uses a write-ahead log with synchronous=FULL: a committed row survives a killed process or a power cut, and
readers never block. The store also keeps the grids and their cells, so it can report what is missing.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from depthgauge.base.errors import InputError, OutputError, require_path
from depthgauge.base.io import require_folder, write_atomically
from depthgauge.base.lock import file_lock
from depthgauge.sweeps.cells import Cell, CellOutcome, canonical_json

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
