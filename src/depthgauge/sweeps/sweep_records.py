"""Records of what a sweep returns: the summary of a run, the table of rows, the status of a store.

`to_json` and `to_csv` serialise; they compute nothing.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from depthgauge.base.format import counted, short
from depthgauge.base.frames import frame, html_table
from depthgauge.base.lock import Holder
from depthgauge.sweeps.cells import canonical_json
from depthgauge.sweeps.store import Count, StoredRow

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
