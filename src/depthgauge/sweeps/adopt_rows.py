"""Take rows from a CSV file of another run into a store, so that they are not computed again."""

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from depthgauge.errors import InputError
from depthgauge.sweeps.cells import Cell, CellOutcome
from depthgauge.sweeps.store import Store, run_lock

_HEAD = ("identity", "task", "version", "repetition", "error_text")


def adopt_rows(source: str | Path, store: str | Path, cells: Sequence[Cell], document: dict[str, Any]) -> int:
    """Record the rows of a CSV file that belong to the given cells, and return their number.

    Args:
        source: a file that `depthgauge sweep --export` wrote; it may be compressed with gzip (`.gz`).
        store: the store; created if it does not exist.
        cells: the cells whose rows are wanted. A row belongs to a cell if its identity is that of the cell.
        document: describes the grid of the cells; the store keeps it.

    Raises:
        InputError: the file cannot be read, or no row belongs to any of the cells.
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
