"""The parts of a page section, and those that networks and checkpoints share: heat maps of the heads, the residual."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge.base.format import number
from depthgauge.report.charts import Chart, HeatMap, View, figure, hovering, log_axis, names_axis
from depthgauge.report.markup import Table, percent
from depthgauge.results.checkpoint_subject import CheckpointLayer
from depthgauge.results.gauge_record import Subject
from depthgauge.results.labels import CENTERS, HEAD_MEASURES, NORMS
from depthgauge.results.network_subject import NetworkLayer, NetworkSubject, Residual

Layers = Sequence[NetworkLayer | CheckpointLayer]


@dataclass(frozen=True)
class Measure:
    """The values of a heat map, per layer and head, with their name, explanation and format.

    `top` is the natural maximum of the values, if there is one. The menu lists the measure under `group`.
    """

    name: str
    note: str
    rows: Sequence[Sequence[float | None]]
    show: Callable[[float | None], str] = number
    group: str = "Measured"
    top: float = 0.0


def head_measures(layers: Layers) -> list[str]:
    """Return the names of the head measures that at least one head has, in the order of the labels."""
    return [
        name
        for name in HEAD_MEASURES
        if any(getattr(head, name, None) is not None for layer in layers for head in layer.heads)
    ]


def head_map(layers: Layers, more: Sequence[Measure] = ()) -> Chart | None:
    """Return layer × head heat maps: one view per head measure, and the given ones after them."""
    heads = max((len(layer.heads) for layer in layers), default=0)
    if heads == 0:
        return None
    measures = [
        Measure(
            name=HEAD_MEASURES[name].label,
            note=HEAD_MEASURES[name].sentence,
            rows=[[getattr(head, name, None) for head in layer.heads] for layer in layers],
            show=percent if name == "first_mass" else number,
            top=HEAD_MEASURES[name].top,
        )
        for name in head_measures(layers)
    ]
    height = 116 + heads * max(16, min(44, 320 // heads))
    views = tuple(heat_map(layers, heads, measure) for measure in [*measures, *more])
    return Chart(views, height, "Measure") if views else None


def heat_map(layers: Layers, heads: int, measure: Measure, noun: str = "head") -> View:
    """Return one measure of every head, layers from left to right, with a gap where a layer has fewer heads.

    `noun` is what a layer has `heads` of.
    """
    rows = [*measure.rows, *[[]] * len(layers)][: len(layers)]
    z = [[row[h] if h < len(row) else None for row in rows] for h in range(heads)]

    def place(h: int, ell: int, between: str) -> str:
        return f"layer {layers[ell].index}{between}{noun} {h}"

    heat = HeatMap(measure.name, z, [str(layer.index) for layer in layers], place, measure.top, measure.show)
    extremes = heat.extremes(f"No {noun} has a value.")
    alt = f"Heat map of {measure.name} by layer and {noun}. {extremes}"
    note = " ".join(filter(None, (measure.note, extremes, heat.scale.note)))
    y = {"type": "category", "title": noun, "showgrid": False, "autorange": "reversed"}
    drawn = figure(heat.trace(2), x=names_axis("layer", heat.columns), y=y, left=44, right=28, top=52)
    return View(measure.name, note, alt, drawn, measure.group)


def residual_states(subject: Subject) -> list[tuple[str, Residual]]:
    """Return the states that have a residual: the input, named `in`, and the state after each layer."""
    states = [("in", subject.input.residual), *((str(layer.index), layer.residual) for layer in subject.layers)]
    return [(name, residual) for name, residual in states if residual is not None]


def residual_curve(subject: Subject) -> Chart | None:
    """Return ‖Res X‖/‖X‖ from the input to the output, in every norm, with one view per centre."""
    states = residual_states(subject)
    # For checkpoints the mean comes first: about the mid-range, one token with a huge entry dominates every state.
    centers = CENTERS if isinstance(subject, NetworkSubject) else reversed(list(CENTERS))
    return Chart(tuple(_residual_view(states, center) for center in centers), 330, "Centre") if states else None


_STYLES = (("@blue", "circle", "solid"), ("@vermilion", "square", "dash"), ("@green", "diamond", "dot"))


def _residual_view(states: Sequence[tuple[str, Residual]], center: str) -> View:
    names, traces, ratios = [name for name, _ in states], list[dict[str, Any]](), list[float]()
    for norm, (color, symbol, dash) in zip(NORMS, _STYLES, strict=True):
        found = [residual[center][norm] for _, residual in states]
        ratios += [size.ratio for size in found if size.ratio is not None and size.ratio > 0]
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": NORMS[norm], "x": names,
            "y": [size.ratio for size in found],
            "line": {"color": color, "width": 2, "dash": dash}, "marker": {"color": color, "symbol": symbol, "size": 7},
            "error_y": {"type": "data", "array": [size.ratio_std or 0.0 for size in found], "width": 0,
                        "thickness": 1.5, "color": color},
            **hovering([
                f"{'input' if name == 'in' else f'after layer {name}'}<br>{NORMS[norm]} "
                f"<b>{number(size.ratio)}</b> ± {number(size.ratio_std, 2)}"
                for name, size in zip(names, found, strict=True)
            ]),
        })  # fmt: skip
    falls = bool(ratios) and min(ratios) < 0.1 * max(ratios)
    flat = bool(ratios) and max(ratios) - min(ratios) < 0.25 * max(ratios)
    scale = log_axis(ratios) if falls else {} if flat else {"rangemode": "tozero"}
    y = {"title": "‖Res X‖ / ‖X‖", **scale}
    first, last = (number(residual[center].max.ratio) for _, residual in (states[0], states[-1]))
    alt = f"Line chart of the differences between tokens, by layer, in the largest entry: from {first} to {last}."
    note = (
        "The part of a state that differs between tokens: 0 if all tokens are equal. It exceeds 1 where the centre is "
        "further from the tokens than the origin is, in that norm."
    )
    return View(CENTERS[center], note, alt, figure(*traces, x=names_axis("after layer", names), y=y, top=36))


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
    if (chart := residual_curve(subject)) is None:
        return None
    pairs = [(center, norm) for center in CENTERS for norm in NORMS]
    columns = ("after layer", *(f"{center}, {NORMS[norm]}" for center, norm in pairs))
    rows = tuple(
        (name, *(residual[center][norm].ratio for center, norm in pairs)) for name, residual in residual_states(subject)
    )
    caption = "Mean over the inputs, with one standard deviation; “in” is the input."
    table = Table("‖Res X‖ / ‖X‖ by layer, centre and norm", columns, rows)
    return PagePart("residual", "What still differs between tokens", caption, chart, table, half=True)
