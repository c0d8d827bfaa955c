"""Charts by layer that networks and checkpoints share: heat maps of the heads, and the residual curve."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge._format import number
from depthgauge.report.charts import Chart, Choice, figure, label, layout, log_axis, names_axis
from depthgauge.report.markup import percent
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


def head_values(layers: Layers, name: str) -> list[list[float | None]]:
    """Return one head measure per layer and head."""
    return [[getattr(head, name, None) for head in layer.heads] for layer in layers]


def head_map(layers: Layers, more: Sequence[Measure] = ()) -> Chart | None:
    """Return layer × head heat maps: one view per head measure, and the given ones after them."""
    heads = max((len(layer.heads) for layer in layers), default=0)
    if heads == 0:
        return None
    measures = [
        Measure(
            name=HEAD_MEASURES[name].label,
            note=HEAD_MEASURES[name].sentence,
            rows=head_values(layers, name),
            show=percent if name == "first_mass" else number,
            top=HEAD_MEASURES[name].top,
        )
        for name in head_measures(layers)
    ]
    height = 116 + heads * max(16, min(44, 320 // heads))
    choices = tuple(heat_map(layers, heads, measure) for measure in [*measures, *more])
    return Chart(choices, height, "Measure") if choices else None


def heat_map(layers: Layers, heads: int, measure: Measure) -> Choice:
    """Return one measure of every head, layers from left to right, with a gap where a layer has fewer heads."""
    rows, show = measure.rows[: len(layers)], measure.show
    cells = {(ell, h): row[h] for ell, row in enumerate(rows) for h in range(min(heads, len(row)))}
    z = [[cells.get((ell, h)) for ell in range(len(layers))] for h in range(heads)]
    text = [
        [
            f"layer {layer.index} · head {h}<br>{label(measure.name)} <b>{show(z[h][ell])}</b>"
            for ell, layer in enumerate(layers)
        ]
        for h in range(heads)
    ]
    known = {place: value for place, value in cells.items() if value is not None}
    scale = color_scale(list(known.values()), measure.top)
    trace = {
        "type": "heatmap", "z": [[scale.color(value) for value in row] for row in z],
        "x": [str(layer.index) for layer in layers], "y": [str(h) for h in range(heads)],
        "hovertext": text, "hoverinfo": "text", "hoverongaps": False, "xgap": 2, "ygap": 2,
        "zmin": scale.color(scale.low), "zmax": scale.color(scale.high),
        "colorscale": [[k / 4, f"@shade-{k}"] for k in range(5)],
        "colorbar": {
            "orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom", "ypad": 8, "len": 0.4,
            "thickness": 8, "outlinewidth": 0, "ticks": "", "tickfont": {"size": 12, "color": "@faint"},
            "tickvals": [scale.color(scale.low), scale.color(scale.high)],
            "ticktext": [show(scale.low), show(scale.high)], "ticklabelposition": "outside top",
        },
    }  # fmt: skip
    look = layout(
        xaxis=names_axis("layer", trace["x"]),
        yaxis={"type": "category", "title": {"text": "head"}, "showgrid": False, "autorange": "reversed"},
        margin={"l": 44, "r": 28, "t": 52, "b": 44},
    )
    extremes = _extremes(measure, known, layers)
    alt = f"Heat map of {measure.name} by layer and head. {extremes}"
    note = " ".join(filter(None, (measure.note, extremes, scale.note)))
    return Choice(measure.name, note, alt, figure(trace, layout=look), measure.group)


@dataclass(frozen=True)
class ColorScale:
    """The range of values that the colours of a heat map cover, linear or logarithmic."""

    low: float
    high: float
    logarithmic: bool = False

    @property
    def note(self) -> str:
        """What a reader must know to compare colours."""
        return "The colours are logarithmic." if self.logarithmic else ""

    def color(self, value: float | None) -> float | None:
        """Return the position of a value on the scale."""
        if value is None or not self.logarithmic:
            return value
        return math.log10(max(value, self.low))


def color_scale(values: Sequence[float], top: float) -> ColorScale:
    """Choose a scale on which differences are visible.

    Positive values over more than two decades get a logarithmic scale. Otherwise the scale is linear: from 0, or from
    the smallest value if all values are within a quarter of the largest; to the natural maximum `top`, or to the
    largest value if that is far below `top`.
    """
    if not values:
        return ColorScale(0.0, top or 1.0)
    least, largest = min(values), max(values)
    if least > 0 and largest > 100 * least:
        return ColorScale(least, largest, logarithmic=True)
    if largest == least:
        return ColorScale(min(0.0, least), max(top, largest) or 1.0)
    low = least if least > 0 and largest - least < 0.25 * largest else min(0.0, least)
    return ColorScale(low, max(largest, top) if largest > 0.05 * top else largest)


def _extremes(measure: Measure, known: Mapping[tuple[int, int], float], layers: Layers) -> str:
    """Return the smallest and the largest value with their places, for readers who cannot use the colours."""
    if not known:
        return "No head has a value."

    def place(at: tuple[int, int]) -> str:
        return f"{measure.show(known[at])} (layer {layers[at[0]].index}, head {at[1]})"

    least, largest = min(known, key=lambda at: known[at]), max(known, key=lambda at: known[at])
    return f"Here from {place(least)} to {place(largest)}."


def residual_states(subject: Subject) -> list[tuple[str, Residual]]:
    """Return the states that have a residual: the input, named `in`, and the state after each layer."""
    states = [("in", subject.input.residual), *((str(layer.index), layer.residual) for layer in subject.layers)]
    return [(name, residual) for name, residual in states if residual is not None]


def residual_curve(subject: Subject) -> Chart | None:
    """Return ‖Res X‖/‖X‖ from the input to the output, in every norm, with one view per centre."""
    states = residual_states(subject)
    # For checkpoints the mean comes first: about the mid-range, one token with a huge entry dominates every state.
    centers = CENTERS if isinstance(subject, NetworkSubject) else reversed(list(CENTERS))
    return Chart(tuple(_residual_choice(states, center) for center in centers), 330, "Centre") if states else None


_STYLES = (("@blue", "circle", "solid"), ("@vermilion", "square", "dash"), ("@green", "diamond", "dot"))


def _residual_choice(states: Sequence[tuple[str, Residual]], center: str) -> Choice:
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
            "hoverinfo": "text", "hovertext": [
                f"{'input' if name == 'in' else f'after layer {name}'}<br>{NORMS[norm]} "
                f"<b>{number(size.ratio)}</b> ± {number(size.ratio_std, 2)}"
                for name, size in zip(names, found, strict=True)
            ],
        })  # fmt: skip
    falls = bool(ratios) and min(ratios) < 0.1 * max(ratios)
    flat = bool(ratios) and max(ratios) - min(ratios) < 0.25 * max(ratios)
    scale = log_axis(ratios) if falls else {} if flat else {"rangemode": "tozero"}
    look = layout(
        xaxis=names_axis("after layer", names),
        yaxis={"title": {"text": "‖Res X‖ / ‖X‖"}, **scale},
        margin={"l": 60, "r": 8, "t": 36, "b": 44},
    )
    first, last = (number(residual[center].max.ratio) for _, residual in (states[0], states[-1]))
    alt = f"Line chart of the differences between tokens, by layer, in the largest entry: from {first} to {last}."
    note = (
        "The part of a state that differs between tokens: 0 if all tokens are equal. It exceeds 1 where the centre is "
        "further from the tokens than the origin is, in that norm."
    )
    return Choice(CENTERS[center], note, alt, figure(*traces, layout=look))
