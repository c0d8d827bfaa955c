"""Print a document on the terminal: tables that fit its width, and sentences.

Numbers are never cut; columns that do not fit go into a second table below.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from depthgauge.base.format import printable
from depthgauge.results.document import Part, Place, Section


def print_section(section: Section) -> None:
    """Print one section: what it is, its parts, and the verdict."""
    console = Console()
    for line in section_lines(section, console.width):
        console.print(line, highlight=False)
    if section.verdict:
        console.print(f"→ {printable(section.verdict)}\n", style="bold", markup=False, highlight=False)


def section_lines(section: Section, width: int) -> Iterator[RenderableType]:
    """Yield the tables and lines of a section, `width` characters wide, without its verdict."""
    if section.headline:
        yield f"[bold]{_line(section.headline)}[/bold]"
    for part in section.parts_at(Place.TERMINAL):
        yield from part_lines(part, width)


def part_lines(part: Part, width: int) -> Iterator[RenderableType]:
    """Yield the sentences, the table and the caption of one part."""
    yield from map(_line, part.statements)
    if part.chart is not None and part.chart.sketch is not None:
        yield part.chart.sketch(width)
    table, caption = part.table_at(Place.TERMINAL), printable(part.caption)
    if table is None:
        yield from [f"[italic]{escape(caption)}[/italic]"] if caption else []
        return
    columns = [
        Column(name, [_line(cell) for cell in cells], text=wraps)
        for (name, cells), wraps in zip(table.brief().items(), table.wraps, strict=True)
    ]
    key, *others = columns
    if key.text:  # a name that is repeated is shown once
        key.cells = ["" if k and cell == key.cells[k - 1] else cell for k, cell in enumerate(key.cells)]
    yield from stacked(_line(table.title), key, others, width, caption=caption, dim=table.dim)


def _line(sentence: str) -> str:
    return escape(printable(sentence))


# --- Tables that fit the terminal -------------------------------------------------------------------------------------

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
