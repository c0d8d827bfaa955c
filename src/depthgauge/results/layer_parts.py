"""What is shown of the layers of a network or of a checkpoint: maps of the heads, the residual, ranges over heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge.base.format import number, percent
from depthgauge.results.checkpoint_subject import CheckpointLayer
from depthgauge.results.document import Axis, Brief, Chart, Heat, Part, Place, Plot, Series, Table, fixed
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


def spread(heads: Sequence[Any], value: Callable[[Any], float | None]) -> Brief:
    """Return the minimum and the maximum of a measure over the heads."""
    values = [found for head in heads if (found := value(head)) is not None]
    least, largest = number(min(values, default=None), 2), number(max(values, default=None), 2)
    return fixed(least if least == largest else f"{least}–{largest}")


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
    return heat_maps(layers, heads, [*measures, *more])


def heat_maps(layers: Layers, count: int, measures: Sequence[Measure], noun: str = "head") -> Chart | None:
    """Return one view per measure; `noun` is what a layer has `count` of."""
    views = tuple(_heat_map(layers, count, measure, noun) for measure in measures)
    return Chart(views, 116 + count * max(16, min(44, 320 // count)), "Measure") if views else None


def _heat_map(layers: Layers, count: int, measure: Measure, noun: str) -> Plot:
    """Return one measure of every head, layers from left to right, with a gap where a layer has fewer heads."""
    rows = [*measure.rows, *[[]] * len(layers)][: len(layers)]
    z = [[row[h] if h < len(row) else None for row in rows] for h in range(count)]
    names = [str(layer.index) for layer in layers]

    def place(h: int, ell: int, between: str) -> str:
        return f"layer {names[ell]}{between}{noun} {h}"

    heat = Heat(measure.name, z, names, place, measure.top, measure.show)
    extremes = heat.extremes(f"No {noun} has a value.")
    alt = f"Heat map of {measure.name} by layer and {noun}. {extremes}"
    down = Axis(noun, "down", [str(h) for h in range(count)])
    note = f"{measure.note} {extremes}"
    return Plot(alt, Axis("layer", "names", names), down, (), measure.name, note, measure.group, heat)


def head_part(subject: Subject, more: tuple[Measure, ...] = (), statements: tuple[str, ...] = ()) -> Part | None:
    """Return the layer × head heat map with a menu of measures, and the table of all of them."""
    chart, keys = head_map(subject.layers, more), head_measures(subject.layers)
    if chart is None:
        return Part("heads", "Layer by head", statements=statements, place=Place.PAGE) if statements else None
    rows = tuple(
        (layer.index, head.index, *(getattr(head, key, None) for key in keys))
        for layer in subject.layers
        for head in layer.heads
    )
    columns = ("layer", "head", *(HEAD_MEASURES[key].label for key in keys))
    caption = "Point at a cell, or move through the cells with the arrow keys, to read its value."
    table = Table("Every measure of every head", columns, rows)
    return Part("heads", "Layer by head", caption, chart, table, statements, place=Place.PAGE)


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


def _residual_view(states: Sequence[tuple[str, Residual]], center: str) -> Plot:
    names, series, ratios = [name for name, _ in states], [], list[float]()
    for norm, (color, symbol, dash) in zip(NORMS, _STYLES, strict=True):
        found = [residual[center][norm] for _, residual in states]
        values, spreads = [size.ratio for size in found], [size.ratio_std or 0.0 for size in found]
        ratios += [value for value in values if value is not None and value > 0]
        series.append(
            Series(
                "line", NORMS[norm], names, values, color, symbol=symbol, dash=dash, size=7,
                ends=[(None, None) if v is None else (v - s, v + s) for v, s in zip(values, spreads, strict=True)],
                places=["input" if name == "in" else f"after layer {name}" for name in names],
                texts=[f"{number(size.ratio)} ± {number(size.ratio_std, 2)}" for size in found],
            )
        )  # fmt: skip
    falls = bool(ratios) and min(ratios) < 0.1 * max(ratios)
    flat = bool(ratios) and max(ratios) - min(ratios) < 0.25 * max(ratios)
    first, last = (number(residual[center].max.ratio) for _, residual in (states[0], states[-1]))
    alt = f"Line chart of the differences between tokens, by layer, in the largest entry: from {first} to {last}."
    note = (
        "The part of a state that differs between tokens: 0 if all tokens are equal. It exceeds 1 where the centre is "
        "further from the tokens than the origin is, in that norm."
    )
    down = Axis("‖Res X‖ / ‖X‖", "log" if falls else "" if flat else "zero")
    return Plot(alt, Axis("after layer", "names", names), down, series, CENTERS[center], note)


def residual_part(subject: Subject) -> Part | None:
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
    title = "What still differs between tokens"
    return Part("residual", title, caption, chart, table, half=True, place=Place.PAGE)
