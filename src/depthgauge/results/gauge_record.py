"""The result of `gauge` as a record, its schema, and the reader of saved results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthgauge.base.errors import unknown_name
from depthgauge.base.frames import frame, html_facts
from depthgauge.results.checkpoint_subject import CheckpointSubject
from depthgauge.results.gauge_options import GaugeSettings
from depthgauge.results.network_subject import NetworkSubject
from depthgauge.results.record import Number, Record, ResultError, check_schema, load_document, read

SCHEMA = "depthgauge.gauge/1"
ADVICE = "give the file that `depthgauge gauge --out FILE` wrote"
TABLES = ("layers", "heads")

Subject = NetworkSubject | CheckpointSubject


class GaugeRecord(Record, frozen=True, kw_only=True):
    """What `gauge` found: one subject per network or checkpoint (docs/formats.md names every key).

    - `seconds`: how long a run on a checkpoint took
    """

    schema: str = SCHEMA
    version: str
    settings: GaugeSettings
    subjects: tuple[Subject, ...]
    seconds: Number | None = None

    def summary(self) -> Mapping[str, str]:
        """Return the verdict of each subject, by its name."""
        return {subject.name: subject.verdict for subject in self.subjects}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'; '.join(f'{name}: {verdict}' for name, verdict in self.summary().items())})"

    def _repr_html_(self) -> str:
        return html_facts(type(self).__name__, self.summary(), ("subject", "verdict"))

    def to_frame(self, table: str = "layers") -> Any:
        """Return a `pandas.DataFrame` with one row per layer, or per head.

        Args:
            table: `layers` or `heads`.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        if table not in TABLES:
            raise unknown_name("table", table, TABLES)
        return frame([row for subject in self.subjects for row in subject.rows(table)])


def read_result(path: str | Path) -> GaugeRecord:
    """Read and check the file that `gauge --out` or `GaugeResult.save` wrote."""
    return check_result(load_document(path, ADVICE), str(path))


def check_result(document: Any, name: str = "the result") -> GaugeRecord:
    """Return a parsed result document as a record; keys that the schema does not know are ignored.

    A ResultError calls the document `name` and names the place that does not fit.
    """
    check_schema(document, SCHEMA, name, ADVICE)
    record = read(document, GaugeRecord, name, ADVICE)
    if not record.subjects:
        raise ResultError(f"{name} has no subjects, so there is nothing to show; {ADVICE}")
    return record
