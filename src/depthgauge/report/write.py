"""Write the page of a result."""

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from depthgauge._io import write_text
from depthgauge.errors import InputError
from depthgauge.report.document import check_result, read_result
from depthgauge.report.page import render


class MissingExtraError(InputError):
    """The page needs plotly, and it is not installed."""


@runtime_checkable
class Result(Protocol):
    """What `gauge` returns, or anything else that becomes a result document."""

    def to_json(self) -> dict[str, Any]:
        """The versioned result document."""


def write_report(result: Result | dict[str, Any] | str | Path, out: str | Path) -> Path:
    """Write one self-contained page about a result of `gauge`: the object, its document, or the file it was saved to.

    The page opens from disk and asks nothing of any network. It is written whole or not at all.
    """
    if isinstance(result, str | Path):
        document = read_result(result)
        if Path(out).resolve() == Path(result).resolve():
            raise InputError(f"the page would replace its own result, {result}; give another --out")
    else:
        document = check_result(result.to_json() if isinstance(result, Result) else result)
    write_text(out, render(document, _plotly()))
    return Path(out)


def _plotly() -> str:
    """The source of plotly.js, which the page carries along."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("the page needs the extra report: pip install 'depthgauge[report]'") from error
    return str(get_plotlyjs())
