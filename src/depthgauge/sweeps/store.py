"""The store of a sweep: an SQLite file in which every finished cell is one row, on the disk before the next is begun.

Write-ahead log with synchronous=FULL: a committed row survives a killed process and a power cut, and readers never
wait. Grids and their cells are kept beside the rows, so a store alone says what is missing.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from depthgauge._io import write_atomically
from depthgauge.errors import InputError, OutputError
from depthgauge.sweeps.cells import Cell, Outcome, canonical_json

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
class Row:
    """A cell and what became of it; both `result` and `error` are None where it is still missing."""

    cell: Cell
    result: dict[str, Any] | None
    error: str | None


@dataclass(frozen=True)
class Count:
    """How many cells are done, failed and missing."""

    done: int
    failed: int
    missing: int


class Store:
    """An open store; `with Store.open(path) as store`. Rows are written by one run at a time (see `lock`)."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self.path = connection, path

    @classmethod
    def open(cls, path: str | Path, *, create: bool = False) -> "Store":
        """The store in a file; `create`, for who holds its lock, makes one where there is none, whole or not at all."""
        path = Path(path)
        if path.is_dir():
            raise InputError(f"{path} is a directory; name the store's file")
        if not path.exists():
            if not create:
                raise InputError(f"there is no store at {path}")
            with _said(path):
                write_atomically(path, _make)
        mode = "rw" if os.access(path, os.W_OK) else "ro"
        with _said(path):
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=30
            )
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
        with _said(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def plan(self, name: str, document: dict[str, Any], cells: Sequence[Cell]) -> str:
        """Keep a grid and its cells, and return the grid's key; planning it again changes nothing."""
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

    def record(self, outcome: Outcome) -> None:
        """Commit one finished cell, at once; a cell that is done stays as it is, a failed one may be replaced."""
        result = None if outcome.result is None else canonical_json(outcome.result)
        with self._transaction():
            self._connection.execute(
                "INSERT INTO rows VALUES (?, ?, ?, ?) ON CONFLICT (identity) DO UPDATE SET result = excluded.result, "
                "error = excluded.error, seconds = excluded.seconds WHERE rows.error IS NOT NULL",
                (outcome.identity, result, outcome.error, outcome.seconds),
            )

    def settled(self, identities: Iterable[str], *, failed: bool = True) -> set[str]:
        """Those of the cells that have a row; with `failed` false only those that are done."""
        wanted = set(identities)
        condition = "" if failed else " WHERE error IS NULL"
        return {row[0] for row in self._read(f"SELECT identity FROM rows{condition}") if row[0] in wanted}

    def results(self) -> dict[str, Row]:
        """Every planned cell by its identity, in the order planned, with what became of it."""
        found = self._read(
            "SELECT c.identity, c.task, c.version, c.parameters, c.repetition, r.result, r.error "
            "FROM cells c LEFT JOIN rows r ON r.identity = c.identity ORDER BY c.rowid"
        )
        return {
            identity: Row(
                Cell(task, version, json.loads(parameters), repetition),
                None if result is None else json.loads(result),
                error,
            )
            for identity, task, version, parameters, repetition, result, error in found
        }

    def grids(self) -> list[tuple[str, dict[str, Any], Count]]:
        """Every grid kept: its name, its document, and how far it is."""
        found = []
        for grid, name, document in self._read("SELECT grid, name, document FROM grids ORDER BY rowid"):
            found.append((name, json.loads(document), self.count(grid)))
        return found

    def count(self, grid: str | None = None) -> Count:
        """How far one grid is, or all of them together (a cell in two grids counts once)."""
        where, values = ("WHERE g.grid = ?", [grid]) if grid is not None else ("", [])
        (done, failed, total) = self._read(
            "SELECT COUNT(r.result), COUNT(r.error), COUNT(*) FROM (SELECT DISTINCT g.identity AS identity "
            f"FROM grid_cells g {where}) AS c LEFT JOIN rows r ON r.identity = c.identity",
            values,
        )[0]
        return Count(done, failed, total - done - failed)

    def seconds(self) -> float:
        """The time all rows took together."""
        return float(self._read("SELECT COALESCE(SUM(seconds), 0) FROM rows")[0][0])

    def rows_sha256(self) -> str:
        """The SHA-256 of every row's identity and result in order of identity; of a failed one the result is null."""
        digest = hashlib.sha256()
        for identity, result in self._read("SELECT identity, result FROM rows ORDER BY identity"):
            digest.update(f"{identity} {'null' if result is None else result}\n".encode())
        return digest.hexdigest()

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with _said(self.path):
            return self._connection.execute(query, values).fetchall()


def _make(path: Path) -> None:
    """An empty store."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"BEGIN; {_SCHEMA} COMMIT")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")
    finally:
        connection.close()  # which folds the log into the file


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Check that the file is a store of ours, and set what is set for each connection."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        raise InputError(f"{path} is not the store of a sweep; name another file")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > FORMAT:
        raise InputError(f"{path} has format {version}, newer than this version reads ({FORMAT}); upgrade depthgauge")
    connection.execute("PRAGMA synchronous = FULL")


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """What SQLite and the system say, as one sentence of ours."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the extended codes refine the low byte
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise InputError(f"{path} is not the store of a sweep ({error}); name another file") from error
        advice = ""
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            advice = "; make room and run the same command again, no row that was kept is lost"
        raise OutputError(f"cannot use the store {path}: {error}{advice}") from error
    except OSError as error:
        raise OutputError(f"cannot use the store {path}: {error.strerror or error}") from error
