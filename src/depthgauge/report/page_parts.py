"""The parts of a page section, and those that networks and checkpoints share."""

from dataclasses import dataclass

from depthgauge.report.charts import Chart
from depthgauge.report.layer_charts import Measure, head_map, head_measures, residual_curve, residual_states
from depthgauge.report.markup import Table
from depthgauge.results.gauge_record import Subject
from depthgauge.results.labels import CENTERS, HEAD_MEASURES, NORMS


@dataclass(frozen=True)
class PagePart:
    """A titled part of a section: a chart, the numbers behind it, and a caption.

    `statements` are sentences that the part is about; each is a paragraph above the chart.
    """

    name: str
    title: str
    caption: str
    chart: Chart | None = None
    table: Table | None = None
    table_open: bool = False
    half: bool = False
    statements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """One subject as the page shows it."""

    name: str
    verdict: str
    facts: tuple[tuple[str, str], ...]
    parts: tuple[PagePart, ...]


@dataclass(frozen=True)
class Page:
    """What a page shows, whatever verb made the result.

    - `version`: the version of depthgauge that made the result
    - `heading`, `lead`: the title of the page and the sentence below it
    - `sections`: one per subject
    - `preparation`: what to do before the command, as sentences with code between backticks; usually empty
    - `how`: replaces the sentence before the command, with code between backticks; usually empty
    - `command`: the command that reproduces the result
    - `settings`: its settings
    """

    version: str
    heading: str
    lead: str
    sections: tuple[Section, ...]
    command: str
    settings: Table
    preparation: str = ""
    how: str = ""


def present(*parts: PagePart | None) -> tuple[PagePart, ...]:
    """Return the parts that are not None."""
    return tuple(part for part in parts if part is not None)


def head_part(subject: Subject, more: tuple[Measure, ...] = ()) -> PagePart | None:
    """Return the layer × head heat map with a menu of measures, and the table of all of them."""
    chart, keys = head_map(subject.layers, more), head_measures(subject.layers)
    if chart is None:
        return None
    rows = tuple(
        (layer.index, head.index, *(getattr(head, key, None) for key in keys))
        for layer in subject.layers
        for head in layer.heads
    )
    columns = ("layer", "head", *(HEAD_MEASURES[key].label for key in keys))
    caption = "Point at a cell, or move through the cells with the arrow keys, to read its value."
    return PagePart("heads", "Layer by head", caption, chart, Table("Every measure of every head", columns, rows))


def residual_part(subject: Subject) -> PagePart | None:
    """Return the residual curve: how much the tokens still differ after each layer."""
    chart = residual_curve(subject)
    if chart is None:
        return None
    pairs = [(center, norm) for center in CENTERS for norm in NORMS]
    columns = ("after layer", *(f"{center}, {NORMS[norm]}" for center, norm in pairs))
    rows = tuple(
        (name, *(residual[center][norm].ratio for center, norm in pairs)) for name, residual in residual_states(subject)
    )
    caption = "Mean over the inputs, with one standard deviation; “in” is the input."
    table = Table("‖Res X‖ / ‖X‖ by layer, centre and norm", columns, rows)
    return PagePart("residual", "What still differs between tokens", caption, chart, table, half=True)
