"""Text, numbers and tables as HTML. Nothing that comes from a file is interpreted as markup."""

import html
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge._format import DASH, number


def printable(text: str) -> str:
    """Return a text without control characters, line breaks and bidirectional marks."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def escape(text: str) -> str:
    """Return a text escaped for an HTML element or a quoted attribute.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(printable(text), quote=True)


def short(text: str, most: int = 20) -> str:
    """Return a text shortened to fit next to a chart.

    >>> short("mean-field"), short("a name that goes on and on")
    ('mean-field', 'a name that goes on…')
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def capital(text: str) -> str:
    """Return a text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """Return a sentence as HTML in which numbers do not break at the minus sign of an exponent."""
    return re.sub(r"\d[\d.]*e[+-]\d+", r'<span class="whole">\g<0></span>', escape(text))


def percent(value: float | None) -> str:
    """Return a share of 1 in percent, with one decimal.

    >>> percent(0.0433), percent(1e-9)
    ('4.3 %', '< 0.1 %')
    """
    if value is None:
        return DASH
    return "< 0.1 %" if 0 < value < 0.0005 else f"{100 * value:.1f} %"


def span(values: Sequence[int]) -> str:
    """Return the smallest and the largest of a few counts.

    >>> span([2, 2]), span([2, 4, 3])
    ('2', '2–4')
    """
    if not values:
        return DASH
    least, largest = min(values), max(values)
    return str(least) if least == largest else f"{least}–{largest}"


def runs(indices: Sequence[int]) -> str:
    """Return indices with consecutive ones joined to ranges.

    >>> runs([0, 1, 2, 5]), runs([])
    ('0–2, 5', 'none')
    """
    found: list[list[int]] = []
    for index in sorted(indices):
        if found and index == found[-1][-1] + 1:
            found[-1].append(index)
        else:
            found.append([index])
    return ", ".join(span(run) for run in found) or "none"


def with_code(text: str) -> str:
    """Return a text as HTML in which code is between backticks.

    >>> with_code("Run `f(x)` <first>.")
    'Run <code>f(x)</code> &lt;first&gt;.'
    """
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def command_line(verb: str, options: Mapping[str, Any], target: str | None) -> str:
    """Return a command, every word quoted for a shell.

    Args:
        verb: the verb.
        options: option → value; True is a flag, and a tuple is an option that is repeated.
        target: the argument of the verb, if any.

    >>> command_line("gauge", {"tokens": 8}, "my net.st")
    "depthgauge gauge --tokens 8 'my net.st'"
    >>> command_line("shrink", {"max_increase": 0.1, "text": ("a", "b"), "no_repair": True}, "model")
    'depthgauge shrink --max-increase 0.1 --text a --text b --no-repair model'
    """
    words = ["depthgauge", verb]
    for name, given in options.items():
        flag = f"--{name.replace('_', '-')}"
        for value in given if isinstance(given, tuple) else (given,):
            if value is True:
                words.append(flag)
                continue
            plain = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
            words += [f"{flag}={plain}"] if plain.startswith("-") else [flag, plain]
    if target is not None:
        words += ["--", target] if target.startswith("-") else [target]
    return " ".join(shlex.quote(printable(word)) for word in words)


Cell = str | int | float | None
_LONG = 40
"""The number of characters from which a cell of a table gets room for several words in a line."""


@dataclass(frozen=True)
class Table:
    """A table of strings and numbers; the first cell of a row is its heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def html(self, name: str) -> str:
        """Return the table as HTML. Copied cells keep every digit, shown cells have three."""
        numeric = [
            any(_is_number(row[k]) for row in self.rows) and all(not isinstance(row[k], str) for row in self.rows)
            for k in range(len(self.columns))
        ]
        head = "".join(
            f'<th scope="col"{_class(is_numeric)}>{escape(title)}</th>'
            for title, is_numeric in zip(self.columns, numeric, strict=True)
        )
        body = "\n".join(
            "<tr>" + "".join(_cell(cell, k == 0, numeric[k]) for k, cell in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        hint = (
            '<p class="hint" aria-hidden="true">Scroll sideways for more columns →</p>' if len(self.columns) > 2 else ""
        )
        return (
            f'{hint}<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.title)}">'
            f'<table id="{escape(name)}"><caption class="unseen">{escape(self.title)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _class(is_numeric: bool) -> str:
    return ' class="number"' if is_numeric else ""


def _cell(cell: Cell, names_row: bool, is_numeric: bool) -> str:
    tag, scope = ("th", ' scope="row"') if names_row else ("td", "")
    if cell is None:
        return f'<{tag}{scope}{_class(is_numeric)} data-value="">{DASH}</{tag}>'
    if isinstance(cell, str):
        prose = ' class="prose"' if len(cell) > _LONG else ""
        return f"<{tag}{scope}{prose}>{escape(cell)}</{tag}>"
    return f'<{tag}{scope}{_class(is_numeric)} data-value="{cell!r}">{number(cell)}</{tag}>'


def settings_table(settings: Mapping[str, Any]) -> Table:
    """Return the settings of a run as a table."""
    return Table("Settings", ("setting", "value"), tuple((name, _setting(value)) for name, value in settings.items()))


def _setting(value: Any) -> Cell:
    if value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    return json.dumps(value, ensure_ascii=False)
