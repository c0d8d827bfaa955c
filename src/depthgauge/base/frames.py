"""Tables for notebooks: pandas data frames and HTML."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from depthgauge.base.errors import missing_extra
from depthgauge.base.format import number


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a `pandas.DataFrame` with one row per mapping; raise MissingPackageError if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise missing_extra("to_frame()", "frames") from error
    return pandas.DataFrame([dict(row) for row in rows])


def html_table(caption: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table with one row per mapping; the keys of the first row are the column headings.

    >>> html_table("Two numbers", [{"x": 0.12345, "y": None}])
    '<table><caption>Two numbers</caption><tr><th>x</th><th>y</th></tr><tr><td>0.123</td><td>–</td></tr></table>'
    """
    head = "".join(f"<th>{escape(str(name))}</th>" for name in (rows[0] if rows else {}))
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row.values())}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def html_facts(caption: str, facts: Mapping[str, str], columns: tuple[str, str] = ("quantity", "value")) -> str:
    """Return an HTML table with one row per fact."""
    return html_table(caption, [dict(zip(columns, fact, strict=True)) for fact in facts.items()])


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return number(value)
    return escape(str(value))
