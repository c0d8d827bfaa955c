"""Tables that fit the terminal: numbers are never cut; columns that do not fit go into a second table below."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_BORDER = 3
"""Characters that a column adds to its content: one space on each side and a line."""
_TEXT_MIN = 16
"""The smallest width at which a column of text is still readable."""


@dataclass
class Column:
    """A column: its heading and its cells. Cells of a `text` column may wrap at spaces, numbers never wrap."""

    name: str
    cells: list[str] = field(default_factory=list)
    text: bool = False

    @property
    def least(self) -> int:
        """The smallest width at which no cell is cut and the heading breaks at spaces only."""
        words = max((cell_len(word) for word in self.name.split()), default=0)
        longest = max((_shown(cell) for cell in self.cells), default=0)
        return max(words, min(longest, _TEXT_MIN) if self.text else longest)

    @property
    def most(self) -> int:
        """The width at which nothing wraps."""
        return max(cell_len(self.name), *(_shown(cell) for cell in self.cells)) if self.cells else cell_len(self.name)


def _shown(cell: str) -> int:
    return cell_len(Text.from_markup(cell).plain)


def stacked(
    title: str, key: Column, columns: Sequence[Column], width: int, *, caption: str = "", dim: Sequence[int] = ()
) -> Iterator[RenderableType]:
    """Yield one table, or several below each other if the columns do not fit into the width, then the caption.

    The column `key` is the first of every table. The rows with the indices `dim` are printed dim.
    """
    groups: list[list[Column]] = [[key]]
    for column in columns:
        if len(groups[-1]) > 1 and _width([*groups[-1], column]) > width:
            groups.append([key])
        groups[-1].append(column)
    if title:
        yield Text.from_markup(title, style="bold")
    for group in groups:
        table = Table()
        slack = width - _width(group)
        for column in group:
            more = max(0, min(column.most - column.least, slack))
            slack -= more
            justify: Literal["left", "right"] = "left" if column.text else "right"
            table.add_column(column.name, justify=justify, overflow="fold", width=column.least + more)
        for row in range(len(key.cells)):
            table.add_row(*(column.cells[row] for column in group), style="dim" if row in dim else None)
        yield table
    if caption:
        yield Text(caption, style="italic")


def _width(columns: Sequence[Column]) -> int:
    return sum(column.least + _BORDER for column in columns) + 1
