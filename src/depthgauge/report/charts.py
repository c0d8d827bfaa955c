"""Every chart of the page as data for plotly.js; colours are roles such as `@blue`, which the page's theme resolves."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthgauge._format import number
from depthgauge.report.document import CENTERS, HEAD_MEASURES, NORMS
from depthgauge.report.markup import percent, printable, short

Figure = dict[str, Any]

PROVED, SEEN = "@blue", "@vermilion"
"""What holds for every input, and what was found on some: the same two colours throughout."""
MEASURES = {
    "tv_mean": ("distance from averaging", "Total variation between a row of attention and uniform attention, mean "
                "over rows: 0, the head averages; near 1, it picks one token."),
    "tv_max": ("distance from averaging, worst row", "Total variation between a row of attention and uniform "
               "attention, largest over rows."),
    "entropy": ("entropy", "Entropy of a row of attention in nats, mean over rows; averaging over n tokens has log n."),
    "score_range": ("score range θ", "The largest range (max − min) of any row of scores."),
    "balance": ("centred score range", "The range of the scores once what all tokens share is taken away."),
    "contraction": ("contraction", "How much of the differences between tokens the head hands on, in the "
                    "largest entry."),
    "contraction_bound": ("bound on the contraction", "tanh(centred score range / 2) · ‖V‖col, which the contraction "
                          "cannot exceed."),
    "eta": ("largest weight η", "The largest entry in size of the head's query, key and value matrices."),
    "value_col": ("size of V", "‖V‖col, the largest column sum of sizes."),
    "l1": ("sum of weights", "The largest of ‖Q‖₁, ‖K‖₁ and ‖V‖₁, sums of all entries in size."),
    "dong_beta": ("Dong's β", "‖QKᵀ‖col · ‖V‖₁,∞, the product in the rate of Dong et al."),
}  # fmt: skip
"""Head measures: their names for people and what they say."""
TOPS = {"tv_mean": 1.0, "tv_max": 1.0}
"""Measures with a natural largest value: their shades mean the same in every network."""
CENTER_NAMES = {"midrange": "differences from the midrange", "mean": "differences from the mean token"}
NORM_NAMES = {"max": "largest entry", "frobenius": "Frobenius", "composite": "√(column · row sum)"}
assert set(MEASURES) == set(HEAD_MEASURES)


@dataclass(frozen=True)
class Choice:
    """One view of a chart: what the reader picks, what it means, what it shows in words, and the figure."""

    name: str
    note: str
    alt: str
    figure: Figure
    group: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the page's script reads it."""
        return {"note": self.note, "alt": self.alt, **self.figure}


@dataclass(frozen=True)
class Chart:
    """A chart with one view or several, of a fixed height in pixels; `pick` names what the reader picks."""

    choices: tuple[Choice, ...]
    height: int
    pick: str = ""


def label(text: str) -> str:
    """A text as plotly shows it: it reads `<`, `>` and `&` as markup, entities as themselves."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def measure_name(key: str) -> str:
    """A head measure for people; one without a name of its own is called by its key."""
    return MEASURES[key][0] if key in MEASURES else printable(key.replace("_", " "))


def head_measures(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The measures that the heads carry, the ones we know first, whatever else is a number after them."""
    found = {
        key: None
        for layer in layers
        for head in layer.get("heads", [])
        for key, value in head.items()
        if key != "index" and isinstance(value, int | float | None) and not isinstance(value, bool)
    }
    return [key for key in MEASURES if key in found] + [key for key in found if key not in MEASURES]


def head_map(subject: Mapping[str, Any]) -> Chart | None:
    """Layer × head: any head measure, and each head's share of a proved bound."""
    layers = subject["layers"]
    heads = max((len(layer.get("heads", [])) for layer in layers), default=0)
    if heads == 0:
        return None
    measures = [
        Measure(
            name=measure_name(key),
            note=MEASURES[key][1] if key in MEASURES else "",
            rows=[[_plain(head.get(key)) for head in layer.get("heads", [])] for layer in layers],
            top=TOPS.get(key, 0.0),
        )
        for key in head_measures(layers)
    ]
    for entry in subject.get("collapse", []):
        if entry.get("upper") is not None and any(any(row) for row in entry["share"]):
            method = printable(entry["method"])
            note = f"Which heads the proved bound on {method} is made of; all shares add up to 1."
            measures.append(Measure(f"share of the bound, {method}", note, entry["share"], percent, "Proved"))
    height = 116 + heads * max(16, min(44, 320 // heads))
    choices = tuple(heat_map(layers, heads, measure) for measure in measures)
    return Chart(choices, height, "Measure") if choices else None


def _plain(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Measure:
    """What a heat map shows: values per layer, per head, how they are written, and where their shades end.

    Shades end at the largest value, or at `top` where that is larger; the menu lists the measure under `group`.
    """

    name: str
    note: str
    rows: Sequence[Sequence[float | None]]
    show: Callable[[float | None], str] = number
    group: str = "Measured"
    top: float = 0.0


def heat_map(layers: Sequence[Mapping[str, Any]], heads: int, measure: Measure) -> Choice:
    """One measure of every head, layers from left to right, a gap where a layer has fewer heads."""
    rows, show = measure.rows[: len(layers)], measure.show
    cells = {(ell, h): row[h] for ell, row in enumerate(rows) for h in range(min(heads, len(row)))}
    z = [[cells.get((ell, h)) for ell in range(len(layers))] for h in range(heads)]
    text = [
        [
            f"layer {layer['index']} · head {h}<br>{label(measure.name)} <b>{show(z[h][ell])}</b>"
            for ell, layer in enumerate(layers)
        ]
        for h in range(heads)
    ]
    known = {place: value for place, value in cells.items() if value is not None}
    largest = max(measure.top, *known.values()) if known else measure.top
    trace = {
        "type": "heatmap", "z": z, "x": [str(layer["index"]) for layer in layers], "y": [str(h) for h in range(heads)],
        "hovertext": text, "hoverinfo": "text", "hoverongaps": False, "xgap": 2, "ygap": 2,
        "zmin": min(0.0, *known.values()) if known else 0.0, "zmax": largest if largest > 0 else 1.0,
        "colorscale": [[k / 4, f"@shade-{k}"] for k in range(5)],
        "colorbar": {
            "orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom", "ypad": 8, "len": 0.4,
            "thickness": 8, "outlinewidth": 0, "ticks": "", "tickfont": {"size": 12, "color": "@faint"},
            "tickvals": [0, largest], "ticktext": [show(0.0), show(largest)], "ticklabelposition": "outside top",
        },
    }  # fmt: skip
    look = layout(
        xaxis=names_axis("layer", trace["x"]),
        yaxis={"type": "category", "title": {"text": "head"}, "showgrid": False, "autorange": "reversed"},
        margin={"l": 44, "r": 28, "t": 52, "b": 44},
    )
    extremes = _extremes(measure, known, layers)
    alt = f"Heat map of {measure.name} by layer and head. {extremes}"
    note = f"{measure.note} {extremes}".strip()
    return Choice(measure.name, note, alt, {"data": [trace], "layout": look}, measure.group)


def _extremes(measure: Measure, known: Mapping[tuple[int, int], float], layers: Sequence[Mapping[str, Any]]) -> str:
    """From where to where the values run, for those who do not see or trust the shades."""
    if not known:
        return "No head has a value."

    def place(at: tuple[int, int]) -> str:
        return f"{measure.show(known[at])} (layer {layers[at[0]]['index']}, head {at[1]})"

    least, largest = min(known, key=lambda at: known[at]), max(known, key=lambda at: known[at])
    return f"Here from {place(least)} to {place(largest)}."


def residual_curve(subject: Mapping[str, Any]) -> Chart | None:
    """‖Res X‖/‖X‖ from the input to the output, in every norm, around either centre."""
    states = residual_states(subject)
    if not states:
        return None
    return Chart(tuple(_residual_choice(states, center) for center in CENTERS), 330, "Centre")


def residual_states(subject: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The states that have a residual: the input, called `in`, and what each layer hands on."""
    states = [("in", subject.get("input", {}).get("residual"))]
    states += [(str(layer["index"]), layer.get("residual")) for layer in subject["layers"]]
    return [(name, residual) for name, residual in states if residual is not None]


def _residual_choice(states: Sequence[tuple[str, Any]], center: str) -> Choice:
    names, traces, ratios = [name for name, _ in states], [], []
    styles = (("@blue", "circle", "solid"), ("@vermilion", "square", "dash"), ("@green", "diamond", "dot"))
    for norm, (color, symbol, dash) in zip(NORMS, styles, strict=True):
        found = [residual[center][norm] for _, residual in states]
        y = [entry["ratio"] for entry in found]
        ratios += [value for value in y if value is not None and value > 0]
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": NORM_NAMES[norm], "x": names, "y": y,
            "line": {"color": color, "width": 2, "dash": dash}, "marker": {"color": color, "symbol": symbol, "size": 7},
            "error_y": {"type": "data", "array": [entry["ratio_std"] or 0.0 for entry in found], "width": 0,
                        "thickness": 1.5, "color": color},
            "hoverinfo": "text", "hovertext": [
                f"{'input' if name == 'in' else f'after layer {name}'}<br>{NORM_NAMES[norm]} "
                f"<b>{number(entry['ratio'])}</b> ± {number(entry['ratio_std'], 2)}"
                for name, entry in zip(names, found, strict=True)
            ],
        })  # fmt: skip
    falls = bool(ratios) and min(ratios) < 0.1 * max(ratios)
    scale = log_axis(ratios) if falls else {"rangemode": "tozero"}
    look = layout(
        xaxis=names_axis("after layer", names),
        yaxis={"title": {"text": "‖Res X‖ / ‖X‖"}, **scale},
        margin={"l": 60, "r": 8, "t": 36, "b": 44},
    )
    first, last = (number(residual[center]["max"]["ratio"]) for _, residual in (states[0], states[-1]))
    alt = f"Line chart of what differs between tokens, by layer, in the largest entry: from {first} to {last}."
    note = "Of all that a state holds, how much differs between tokens: 1, everything; 0, all tokens are equal."
    return Choice(CENTER_NAMES[center], note, alt, {"data": traces, "layout": look})


def sandwich(collapse: Sequence[Mapping[str, Any]], printed: Mapping[str, Any]) -> Chart | None:
    """Per method, from the error attained by an input that was found to the error proved for every input."""
    bounded = [entry for entry in collapse if "refused" not in entry]
    if not bounded:
        return None
    both = [entry for entry in bounded if _on_log(entry["lower"]) and _on_log(entry["upper"])]
    link = {
        "type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False,
        "x": [x for entry in both for x in (entry["lower"], entry["upper"], None)],
        "y": [y for entry in both for y in (label(entry["method"]), label(entry["method"]), None)],
        "line": {"color": "@rule-strong", "width": 3},
    }  # fmt: skip
    lower = _bounds(bounded, "lower", "attained by an input", {"symbol": "circle-open", "color": SEEN, "size": 12})
    lower["marker"]["line"] = {"width": 2.5, "color": SEEN}
    upper = _bounds(bounded, "upper", "proved for every input", {"symbol": "diamond", "color": PROVED, "size": 10})
    remarks = [(entry, "does not apply") for entry in collapse if "refused" in entry]
    remarks += [(entry, "no finite bound") for entry in bounded if entry["upper"] is None]
    errors = [e[key] for e in bounded for key in ("lower", "upper") if _on_log(e[key])]
    methods = [label(entry["method"]) for entry in collapse]
    look = layout(
        xaxis={"title": {"text": "largest error in any entry"}, **log_axis(errors)},
        yaxis={
            "type": "category", "categoryorder": "array", "automargin": True,
            "categoryarray": methods, "tickvals": methods,
            "ticktext": [label(short(entry["method"])) for entry in collapse],
            "range": [len(collapse) - 0.5, -0.5], "ticklabelstandoff": 6,
        },
        margin={"l": 12, "r": 16, "t": 36, "b": 44},
        annotations=[_remark(entry["method"], words) for entry, words in remarks],
        shapes=[],
    )  # fmt: skip
    if _on_log(printed["printed_bound"]) and errors and printed["printed_bound"] < 1e3 * max(errors):
        _mark_printed(look, printed)
    best = min((entry for entry in bounded if entry["upper"] is not None), key=lambda e: e["upper"], default=None)
    alt = "Sandwich per method on a logarithmic axis, from the error attained to the error proved."
    if best is not None:
        alt += (
            f" The least is proved for {printable(best['method'])}: {number(best['upper'])} proved, "
            f"{number(best['lower'])} attained."
        )
    figure = {"data": [link, lower, upper], "layout": look}
    return Chart((Choice("sandwich", "", alt, figure),), 104 + 42 * len(collapse))


def _on_log(value: float | None) -> bool:
    return value is not None and value > 0


def _bounds(bounded: Sequence[Mapping[str, Any]], key: str, name: str, marker: Figure) -> Figure:
    shown = [entry for entry in bounded if _on_log(entry[key])]
    return {
        "type": "scatter", "mode": "markers", "name": name, "marker": marker, "hoverinfo": "text",
        "x": [entry[key] for entry in shown], "y": [label(entry["method"]) for entry in shown],
        "hovertext": [f"{label(entry['method'])}<br>{name} <b>{number(entry[key])}</b>" for entry in shown],
    }  # fmt: skip


def _remark(method: str, words: str) -> Figure:
    return {
        "xref": "paper", "x": 1, "xanchor": "right", "yref": "y", "y": label(method), "text": words,
        "showarrow": False, "font": {"color": "@faint", "size": 12}, "bgcolor": "@raised", "borderpad": 2,
    }  # fmt: skip


def _mark_printed(look: Figure, printed: Mapping[str, Any]) -> None:
    """A dashed line at the bound that Theorem D.1 prints, in brackets where its conditions fail."""
    bound = printed["printed_bound"]
    name = "Theorem D.1" if printed["printed_applies"] else "(Theorem D.1)"
    line = {"color": "@purple", "width": 1.5, "dash": "dash"}
    place = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": bound, "x1": bound}
    look["shapes"].append({**place, "line": line, "showlegend": True, "name": f"{name}, as printed"})


def depth_bars(depth: Sequence[Mapping[str, Any]], layers: int) -> Chart | None:
    """Layers that are enough, by tolerance: proved for every input beside seen on the inputs measured."""
    if not depth:
        return None
    tolerances = sorted({entry["tolerance"] for entry in depth}, reverse=True)
    traces = []
    for certified, name, color in ((True, "proved for every input", PROVED), (False, "seen on the inputs", SEEN)):
        found = {entry["tolerance"]: entry for entry in depth if entry["certified"] == certified}
        there = [tolerance for tolerance in tolerances if tolerance in found]
        traces.append({
            "type": "bar", "name": name, "marker": {"color": color, "pattern": {"shape": "" if certified else "/"}},
            "x": [number(tolerance) for tolerance in there], "y": [found[tolerance]["layers"] for tolerance in there],
            "text": [str(found[tolerance]["layers"]) for tolerance in there], "textposition": "outside",
            "textfont": {"size": 11}, "cliponaxis": False, "hoverinfo": "text", "hovertext": [
                f"within {number(tolerance)}<br>{name} <b>{found[tolerance]['layers']} of {layers}</b><br>"
                f"error {number(found[tolerance]['error'])}" for tolerance in there
            ],
        })  # fmt: skip
    look = layout(
        xaxis={"type": "category", "title": {"text": "error allowed in any entry"}, "showgrid": False},
        yaxis={"title": {"text": "layers that are enough"}, "range": [0, layers * 1.14], "dtick": -(-layers // 6) or 1},
        margin={"l": 52, "r": 8, "t": 36, "b": 44},
        barmode="group", bargap=0.25, bargroupgap=0.14,
    )  # fmt: skip
    words = "; ".join(
        f"{entry['layers']} within {number(entry['tolerance'])}, {'proved' if entry['certified'] else 'seen'}"
        for entry in depth
    )
    alt = f"Bar chart of the layers that are enough, out of {layers}: {words}."
    return Chart((Choice("depth", "", alt, {"data": traces, "layout": look}),), 330)


def names_axis(title: str, names: Any) -> Figure:
    """An axis of layers, of which a phone has room to name fifteen."""
    named = list(names)[:: -(-len(names) // 15) or 1]
    return {"type": "category", "title": {"text": title}, "tickvals": named, "tickangle": 0, "showgrid": False}


def log_axis(values: Sequence[float]) -> Figure:
    """A logarithmic axis with few ticks, 1-2-5 or every so many decades, written as all numbers of the page are."""
    if not values:
        return {"type": "log"}
    low, high = (math.floor(math.log10(value)) for value in (min(values), max(values)))
    fine = [float(f"{m}e{k}") for k in range(low - 1, high + 2) for m in (1, 2, 5)]
    ticks = [tick for tick in fine if min(values) / 2 <= tick <= max(values) * 2]
    if len(ticks) > 8:
        step = -(-(high - low + 2) // 7)
        ticks = [float(f"1e{k}") for k in range(low - low % step, high + 2, step)]
    ticks = [tick for tick in ticks if 0 < tick < math.inf]
    return {"type": "log", "tickvals": ticks, "ticktext": [number(tick) for tick in ticks]}


def layout(**own: Any) -> Figure:
    """The look all charts share, and what one adds: both axes, margins, whatever else."""
    axis = {
        "gridcolor": "@rule", "linecolor": "@rule-strong", "zerolinecolor": "@rule", "tickcolor": "@rule-strong",
        "tickfont": {"color": "@faint", "size": 12}, "fixedrange": True, "ticks": "", "showline": False,
    }  # fmt: skip
    for name in ("xaxis", "yaxis"):
        title = {"font": {"color": "@faint", "size": 12}}
        own[name] = {**axis, **own[name]}
        if "title" in own[name]:
            own[name]["title"] = {**title, **own[name]["title"]}
    font = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "@ink"}
    return {
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "dragmode": False, "hovermode": "closest",
        "font": font,
        "hoverlabel": {"bgcolor": "@raised", "bordercolor": "@rule-strong", "font": font, "align": "left"},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "font": {"size": 12},
                   "itemclick": False, "itemdoubleclick": False},
        **own,
    }  # fmt: skip
