"""HTML for notebooks."""

from collections.abc import Sequence
from html import escape


def html_table(caption: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of two columns, names and values, for `_repr_html_`."""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table><caption>{escape(caption)}</caption>{body}</table>"
