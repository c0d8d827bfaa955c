"""Print a document on the terminal: tables that fit its width, and sentences."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.markup import escape

from depthgauge.base.format import printable
from depthgauge.cli.stacking import Column, stacked
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
