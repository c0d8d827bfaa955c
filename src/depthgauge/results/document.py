"""What a reader is shown of a result: sections with facts, sentences, tables and charts as data.

Each result has a module that makes its document from its record: `recover_document`, `evaluate_document` and so on. The
terminal, the HTML page and the model card are three renderers of a document; none of them decides what is shown.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Flag, auto
from functools import cached_property
from itertools import groupby
from typing import Any

from depthgauge.base.format import interval_text, number, printable

PROVED, MEASURED = "@blue", "@vermilion"
"""The colours of what is proved for every input and of what was measured on some; the page's theme resolves them."""


class Place(Flag):
    """Where a part or a table is shown."""

    TERMINAL = auto()
    CARD = auto()
    PAGE = auto()


SCREENS, EVERYWHERE = Place.TERMINAL | Place.PAGE, Place.TERMINAL | Place.CARD | Place.PAGE

Plain = str | int | float | None


@dataclass(frozen=True)
class Brief:
    """A cell that the terminal and the model card show as one text, and the page as `values`, one per column."""

    text: str
    values: tuple[Plain, ...]
    wraps: bool = False


Cell = Plain | Brief
Headings = Sequence[str | tuple[str, ...]]
Rows = Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Table:
    """A table; the first cell of a row is its heading. Numbers are shown with three digits.

    A column is its heading. Where its cells are `Brief`, it can be a tuple: the heading of the text, then those of the
    values. `is_open` says whether the page shows the table without being asked. The terminal prints the rows with the
    indices `dim` dim.
    """

    title: str
    columns: Headings
    rows: Rows
    is_open: bool = False
    place: Place = EVERYWHERE
    dim: tuple[int, ...] = ()

    @cached_property
    def headings(self) -> list[str]:
        """The headings on the page."""
        return [name for column in self.columns for name in (column[1:] if isinstance(column, tuple) else (column,))]

    @cached_property
    def values(self) -> list[list[Plain]]:
        """The rows on the page."""
        return [
            [plain for cell in row for plain in (cell.values if isinstance(cell, Brief) else (cell,))]
            for row in self.rows
        ]

    @property
    def numeric(self) -> list[bool]:
        """Whether each column of the page has numbers and no strings."""
        columns = [{type(row[k]) for row in self.values} for k in range(len(self.headings))]
        return [bool(types & {int, float}) and str not in types for types in columns]

    def brief(self) -> dict[str, list[str]]:
        """Return the columns of texts, for the terminal and the model card."""
        names = [column[0] if isinstance(column, tuple) else column for column in self.columns]
        rows = [[cell.text if isinstance(cell, Brief) else shown(cell) for cell in row] for row in self.rows]
        return {name: [row[k] for row in rows] for k, name in enumerate(names)}

    def upto(self, count: int) -> "Table":
        """Return the table with its first columns."""
        return replace(self, columns=self.columns[:count], rows=[row[:count] for row in self.rows])

    @property
    def wraps(self) -> list[bool]:
        """Whether the cells of each column of texts may wrap at spaces; numbers do not."""
        return [
            all(cell.wraps if isinstance(cell, Brief) else isinstance(cell, str) for cell in cells)
            for cells in (zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns))
        ]


def shown(cell: Plain) -> str:
    """Return a text, or a number with three digits."""
    return cell if isinstance(cell, str) else number(cell)


def fixed(text: str) -> Brief:
    """Return the cell of a text that does not wrap."""
    return Brief(text, (text,))


def ranged(value: float | None, low: float | None, high: float | None, digits: int = 3) -> Brief:
    """Return the cell of a value with its interval."""
    return Brief(interval_text(value, low, high, digits), (value, low, high))


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    `kind` is `names`, the `names` from left to right; `rows` or, of a heat map, `down`, the `names` from top to bottom;
    `log`; `zero`, which includes 0; or empty. `step` is the distance of its ticks.
    """

    title: str = ""
    kind: str = ""
    names: Sequence[str] = ()
    range: tuple[float, float] | None = None
    step: float | None = None


@dataclass(frozen=True)
class Series:
    """The marks of one name and colour: `bar`, `line`, `steps` (a line that turns at right angles), or `points`.

    - `at`, `values`: where each mark is along the base axis, and its value; an `at` of `rows` is a number of a row
    - `ends`: the ends of the interval of each value
    - `places`, `texts`: what is said of the place and of the value of each mark; by default, what the axes say
    - `labels`: words beside the marks; `color`: a role, or one per mark; `dash`: of a line; a dashed bar is hatched
    - `legend`: whether the legend has the name; `is_second`: whether the second axis of values has the values
    """

    kind: str
    name: str
    at: Sequence[Any]
    values: Sequence[Any]
    color: str | Sequence[str] = MEASURED
    ends: Sequence[tuple[float | None, float | None]] = ()
    places: Sequence[str] = ()
    texts: Sequence[str] = ()
    labels: Sequence[str] = ()
    legend: bool = True
    is_second: bool = False
    width: float = 2
    size: float = 6
    dash: str = "solid"
    symbol: str = "circle"


@dataclass(frozen=True)
class Heat:
    """The values z[row][column] of a heat map; None is a gap.

    `place` returns the words for a row and a column, `show` the text of a value. `top` is the natural maximum of the
    values, if there is one. Where the values are indices of `states`, these have the name and the colour of each.
    """

    name: str
    z: Sequence[Sequence[float | None]]
    columns: Sequence[str]
    place: Callable[[int, int, str], str]
    top: float = 0.0
    show: Callable[[float | None], str] = number
    states: Sequence[tuple[str, str]] = ()
    gap: int = 2

    @cached_property
    def known(self) -> dict[tuple[int, int], float]:
        """The values that are not gaps, by row and column, in the order of columns."""
        places = ((i, k) for k in range(len(self.columns)) for i in range(len(self.z)))
        return {(i, k): value for i, k in places if (value := self.z[i][k]) is not None}

    def extremes(self, nothing: str) -> str:
        """Return the smallest and the largest value with their places, for readers who cannot use the colours."""
        if not self.known:
            return nothing
        ends = [choose(self.known, key=self.known.__getitem__) for choose in (min, max)]
        least, largest = (f"{self.show(self.known[at])} ({self.place(*at, ', ')})" for at in ends)
        return f"Here from {least} to {largest}."


@dataclass(frozen=True)
class Line:
    """A dashed line across a chart at a value, or with `is_base` at a place of the base axis."""

    at: float
    name: str = ""
    color: str = "@ink"
    is_base: bool = False


@dataclass(frozen=True)
class Plot:
    """One view of a chart: its description for screen readers, its marks, its name in the menu, its explanation.

    `base` is the axis of places, `value` that of values; of a `heat` map, these are the columns and the rows, and
    the `second` axis belongs to a plot below it. `remarks` are words in rows.
    """

    alt: str
    base: Axis
    value: Axis
    series: Sequence[Series] = ()
    name: str = ""
    note: str = ""
    group: str = ""
    heat: Heat | None = None
    second: Axis | None = None
    lines: Sequence[Line] = ()
    remarks: Sequence[tuple[int, str]] = ()

    @property
    def flat(self) -> bool:
        """Whether the places are rows, and their values go to the right."""
        return self.base.kind == "rows"


@dataclass(frozen=True)
class Chart:
    """A chart with one view or several, of a height in pixels; `pick` is the label of the menu.

    `sketch` draws it in characters on the terminal, for a width.
    """

    views: tuple[Plot, ...]
    height: int
    pick: str = ""
    sketch: Callable[[int], str] | None = None

    @property
    def groups(self) -> list[tuple[str, list[tuple[int, Plot]]]]:
        """The views with their numbers, by consecutive group."""
        grouped = groupby(enumerate(self.views), key=lambda entry: entry[1].group)
        return [(group, list(views)) for group, views in grouped]


@dataclass(frozen=True)
class Part:
    """A titled part of a section: sentences, a chart, the numbers behind it, and a caption.

    The page shows a part that is `half` beside the next one. The terminal has the title of the table alone.
    """

    name: str
    title: str
    caption: str = ""
    chart: Chart | None = None
    table: Table | None = None
    statements: tuple[str, ...] = ()
    half: bool = False
    place: Place = EVERYWHERE

    def table_at(self, place: Place) -> Table | None:
        """Return the table if it is shown at a place."""
        return self.table if self.table is not None and place in self.table.place else None


@dataclass(frozen=True)
class Section:
    """One subject: its name, what it is in a line for the terminal, the verdict, facts for the page, and the parts."""

    name: str
    headline: str
    verdict: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[Part, ...]

    def parts_at(self, place: Place) -> Iterator[Part]:
        """Yield the parts that are shown at a place."""
        return (part for part in self.parts if place in part.place)


@dataclass(frozen=True)
class Document:
    """What is shown of a result, whatever verb made it.

    - `version`: the version of depthgauge that made the result
    - `heading`, `lead`: the title of the page and the sentence below it
    - `sections`: one per subject
    - `command`, `settings`: the command that reproduces the result, and its settings
    - `preparation`: what to do before the command, as sentences with code between backticks; usually empty
    - `how`: replaces the sentence before the command, with code between backticks; usually empty
    """

    version: str
    heading: str
    lead: str
    sections: tuple[Section, ...]
    command: str
    settings: Table
    preparation: str = ""
    how: str = ""


def present(*parts: Part | None) -> tuple[Part, ...]:
    """Return the parts that are not None."""
    return tuple(part for part in parts if part is not None)


def command_line(verb: str, options: Mapping[str, Any], *targets: str | None) -> str:
    """Return a command, every word quoted for a shell.

    In `options`, True is a flag, and a tuple is an option that is repeated. `targets` are the arguments of the verb.

    >>> command_line("gauge", {"tokens": 8}, "my net.st")
    "depthgauge gauge --tokens 8 'my net.st'"
    >>> command_line("shrink", {"max_increase": 0.1, "text": ("a", "b"), "trace": True}, "model")
    'depthgauge shrink --max-increase 0.1 --text a --text b --trace model'
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
    given_targets = [target for target in targets if target is not None]
    words += ["--"] if any(target.startswith("-") for target in given_targets) else []
    words += given_targets
    return " ".join(shlex.quote(printable(word)) for word in words)


def settings_table(settings: Mapping[str, Any]) -> Table:
    """Return the settings of a run as a table."""
    return Table("Settings", ("setting", "value"), tuple((name, _setting(value)) for name, value in settings.items()))


def _setting(value: Any) -> Plain:
    if value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    return json.dumps(value, ensure_ascii=False)
