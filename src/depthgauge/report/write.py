"""Write the page of a result."""

from pathlib import Path
from typing import Any

from depthgauge._io import write_text
from depthgauge.errors import InputError, MissingPackageError
from depthgauge.report.page import render
from depthgauge.results.gauge_record import GaugeRecord, check_result, read_result


def write_report(result: GaugeRecord | dict[str, Any] | str | Path, out: str | Path) -> Path:
    """Write one self-contained HTML page about a result of `gauge` (extra `report`).

    The page opens from disk and makes no network requests. It is written atomically.

    Args:
        result: the result, its JSON document, or the file it was saved to.
        out: the page to write.

    Returns:
        The path of the page.

    Raises:
        MissingPackageError: plotly is not installed.
        ResultError: the document is not a result; the message names the place that does not fit.
    """
    if isinstance(result, str | Path):
        record = read_result(result)
        if Path(out).resolve() == Path(result).resolve():
            raise InputError(f"the page would replace its own result, {result}; give another --out")
    else:
        record = result if isinstance(result, GaugeRecord) else check_result(result)
    write_text(out, render(record, _plotly()))
    return Path(out)


def _plotly() -> str:
    """Return the source code of plotly.js, which the page contains."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingPackageError("the page needs the extra `report`: pip install 'depthgauge[report]'") from error
    return str(get_plotlyjs())
