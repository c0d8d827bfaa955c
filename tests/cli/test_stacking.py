"""Tables at 60, 80 and 120 columns: no number is cut, and every column is shown."""

import io
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from depthgauge.cli.print_document import Column, section_lines, stacked
from depthgauge.results.gauge_document import gauge_document
from depthgauge.results.gauge_record import read_result

DATA = Path(__file__).parents[1] / "data" / "documents"


def printed(parts: object, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    for part in parts:
        console.print(part, highlight=False)
    return console.file.getvalue()


def numbers(text: str) -> list[str]:
    """Return every number of the tables, in order."""
    rows = [line for line in text.splitlines() if line.startswith("│")]
    return sorted(re.findall(r"-?\d[\d.]*(?:e-?\d+)?", " ".join(rows)))


@pytest.mark.parametrize("name", ["gauge-decoder", "gauge-encoder", "gauge-weights", "gauge-network", "gauge-norm"])
def test_narrow_terminals_show_the_numbers_of_wide_ones(name: str) -> None:
    (section,) = gauge_document(read_result(DATA / f"{name}.json")).sections
    wide = printed(section_lines(section, 200), 200)
    for width in (60, 80, 120):
        text = printed(section_lines(section, width), width)
        assert max(map(cell_len, text.splitlines())) <= width
        assert "…" not in text
        # A stacked table repeats its key column, so compare sets.
        assert set(numbers(text)) == set(numbers(wide))


def test_refused_methods_print_their_reason_once() -> None:
    record = read_result(DATA / "gauge-norm.json")
    (subject,), (section,) = record.subjects, gauge_document(record).sections
    text = " ".join(printed(section_lines(section, 80), 80).split())
    reason = next(str(row.refused) for row in subject.collapse if row.refused)
    assert text.count(f"does not apply, because {reason}") == 1


def test_columns_that_do_not_fit_go_below() -> None:
    key = Column("layer", ["0", "1"])
    columns = [Column(f"measure {k}", [f"{k}.123456e-10", "1"]) for k in range(5)]
    tables = list(stacked("title", key, columns, 40))
    assert len(tables) == 1 + 3  # the title, then two measures per table
    text = printed(tables, 40)
    assert all(f"{k}.123456e-10" in text for k in range(5))
    assert text.count("layer") == 3
    assert len(list(stacked("title", key, columns, 120))) == 2


def test_text_wraps_at_spaces_and_numbers_do_not() -> None:
    columns = [Column("value", ["1.23456789e-100"]), Column("how", ["a long explanation in words"], text=True)]
    text = printed(stacked("t", Column("k", ["x"], text=True), columns, 44), 44)
    assert "1.23456789e-100" in text
    assert "explanation" in text
