"""The section of a checkpoint: what every layer is worth, which cheap score can be trusted, and what the heads do."""

from collections.abc import Mapping, Sequence
from typing import Any

from depthgauge._format import number
from depthgauge.report import charts
from depthgauge.report.charts import Chart, Choice, Figure, Measure, heat_map, layout
from depthgauge.report.markup import Table, counted, percent
from depthgauge.report.sections import Part, Subject, residual_part

KINDS = {
    "block": ("skip the block", "The layer hands on what it was given."),
    "attention": ("skip the attention", "The layer's attention adds nothing."),
    "mlp": ("skip the MLP", "The layer's MLP adds nothing."),
    "uniform": ("uniform attention", "Every head of the layer averages all it sees."),
    "parallel": ("beside the next layer", "The layer and the next one both read the layer's input."),
}
SCORES = {
    "block_influence": ("block influence (ShortGPT)", "1 − mean cosine of the states before and after the block."),
    "angular_distance": ("angular distance (UIDL)", "Angle between the states before and after, at the last token."),
    "attention_cosine": ("attention cosine (LLM-Drop)", "1 − mean cosine of the stream before and after attention."),
    "mlp_cosine": ("MLP cosine (LLM-Drop)", "1 − mean cosine of the stream before and after the MLP."),
}
HEADS = {
    "first_mass": ("mass on the first token", "Mean attention on the first token a row sees."),
    "static_error": ("error of the best static pattern", "How far the head's output is off if its attention were the "
                     "best of: uniform, first token, previous token, mean by distance; relative to the output."),
    "qk_norm": ("query–key circuit", "Spectral norm of QKᵀ."),
    "qk_stable_rank": ("stable rank of the query–key circuit", "‖QKᵀ‖F²/‖QKᵀ‖₂²."),
    "ov_norm": ("value–output circuit", "Spectral norm of V."),
    "ov_stable_rank": ("stable rank of the value–output circuit", "‖V‖F²/‖V‖₂²."),
}  # fmt: skip
_TOPS = charts.TOPS | {"first_mass": 1.0}


def model_facts(subject: Subject) -> tuple[tuple[str, str], ...]:
    """What the checkpoint is, what it was gauged on, and how far its weights are from small."""
    model = subject["model"]
    shared = "" if model["kv_heads"] == model["heads"] else f", {model['kv_heads']} for keys and values"
    facts = [
        ("architecture", model["architecture"]),
        ("layers", str(model["layers"])),
        ("heads per layer", f"{model['heads']}{shared}"),
        ("token width", str(model["dim"])),
        ("parameters", f"{model['parameters'] / 1e6:.0f} million"),
        ("precision", model["dtype"]),
    ]
    if (text := subject.get("text")) is not None:
        facts.append(("text", f"{counted(text['windows'], 'window')} of {text['window']} tokens of {text['source']}"))
    if (baseline := subject.get("baseline")) is not None:
        facts.append(("loss, intact", f"{number(baseline['loss'])} nats a token"))
    if (regime := subject.get("regime")) is not None:
        facts.append(("largest weight η", number(regime["eta"])))
        facts.append(("from provably one layer", f"{regime['corrected_orders']:.1f} orders of magnitude"))
    return tuple(facts)


def model_parts(subject: Subject) -> tuple[Part, ...]:
    """Everything there is about a checkpoint, the what-ifs first."""
    found = (what_if_part(subject), trust_part(subject), removal_part(subject), residual_part(subject),
             heads_part(subject), notes_part(subject))  # fmt: skip
    return tuple(part for part in found if part is not None)


def unit_of(subject: Subject) -> str:
    """What a what-if is measured in."""
    is_loss = subject.get("model", {}).get("objective") == "loss"
    return "loss added, nats a token" if is_loss else "change of the final states"


def what_if_part(subject: Subject) -> Part | None:
    """Bars with intervals, layer by layer, one view for each kind."""
    layers = subject["layers"]
    kinds = [kind for kind in KINDS if any(kind in layer.get("what_if", {}) for layer in layers)]
    if not kinds:
        return None
    unit, names = unit_of(subject), [str(layer["index"]) for layer in layers]
    choices = tuple(_bars(layers, names, kind, unit) for kind in kinds)
    columns = ("layer", *(f"{KINDS[kind][0]}{end}" for kind in kinds for end in ("", ", low", ", high")))
    rows = tuple(
        (layer["index"], *(layer.get("what_if", {}).get(kind, {}).get(key) for kind in kinds for key in _ENDS))
        for layer in layers
    )
    caption = "Mean over windows of text, with the 95 % bootstrap interval; layers from 0."
    table = Table(f"What if: {unit}", columns, rows)
    return Part("what-if", "What each layer is worth", caption, Chart(choices, 340, "What if"), table)


_ENDS = ("loss", "low", "high")


def _bars(layers: Sequence[Mapping[str, Any]], names: Sequence[str], kind: str, unit: str) -> Choice:
    title, note = KINDS[kind]
    found = [layer.get("what_if", {}).get(kind) for layer in layers]
    means = [None if one is None else one["loss"] for one in found]
    trace = {
        "type": "bar", "x": list(names), "y": means, "marker": {"color": charts.SEEN}, "showlegend": False,
        "error_y": {
            "type": "data", "symmetric": False, "width": 0, "thickness": 1.5, "color": "@ink",
            "array": [0.0 if one is None or one["high"] is None else one["high"] - one["loss"] for one in found],
            "arrayminus": [0.0 if one is None or one["low"] is None else one["loss"] - one["low"] for one in found],
        },
        "hoverinfo": "text",
        "hovertext": [_bar_words(name, title, one) for name, one in zip(names, found, strict=True)],
    }  # fmt: skip
    look = layout(
        xaxis=charts.names_axis("layer", names),
        yaxis={"title": {"text": unit}, "rangemode": "tozero"},
        margin={"l": 60, "r": 8, "t": 24, "b": 44},
        bargap=0.25,
    )
    known = {name: mean for name, mean in zip(names, means, strict=True) if mean is not None}
    least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    words = f"Least at layer {least} ({number(known[least])}), most at layer {most} ({number(known[most])})."
    return Choice(title, f"{note} {words}", f"Bar chart of {unit} by layer, {title}. {words}", _figure(trace, look))


def _bar_words(name: str, title: str, one: Mapping[str, Any] | None) -> str:
    if one is None:
        return f"layer {name}<br>{title} –"
    between = "" if one["low"] is None else f"<br>from {number(one['low'])} to {number(one['high'])}"
    return f"layer {name}<br>{title} <b>{number(one['loss'])}</b>{between}"


def trust_part(subject: Subject) -> Part | None:
    """Each cheap score against what was measured, a point for every layer."""
    rows = [row for row in subject.get("scores", []) if row["score"] in SCORES and row["what_if"] in KINDS]
    if not rows:
        return None
    choices = tuple(_scatter(subject, row) for row in rows)
    table = Table(
        "Rank correlation of cheap scores with what was measured",
        ("score", "against", "rank correlation"),
        tuple((SCORES[row["score"]][0], KINDS[row["what_if"]][0], row["spearman"]) for row in rows),
    )
    caption = "A score to be trusted puts the layers in the order of what was measured; 1 is the same order."
    title = "Which cheap score can be trusted"
    return Part("trust", title, caption, Chart(choices, 340, "Score"), table, table_open=True, half=True)


def _has(layer: Mapping[str, Any], kind: str, score: str) -> bool:
    """Whether a layer has both, as numbers."""
    return kind in layer.get("what_if", {}) and layer.get("scores", {}).get(score) is not None


def _scatter(subject: Subject, row: Mapping[str, Any]) -> Choice:
    (name, note), kind = SCORES[row["score"]], row["what_if"]
    layers = [layer for layer in subject["layers"] if _has(layer, kind, row["score"])]
    x = [layer["scores"][row["score"]] for layer in layers]
    y = [layer["what_if"][kind]["loss"] for layer in layers]
    trace = {
        "type": "scatter", "mode": "markers+text", "x": x, "y": y, "text": [str(layer["index"]) for layer in layers],
        "textposition": "top center", "textfont": {"size": 10, "color": "@faint"}, "showlegend": False,
        "marker": {"color": charts.SEEN, "size": 8}, "hoverinfo": "text", "hovertext": [
            f"layer {layer['index']}<br>{name} <b>{number(a)}</b><br>{KINDS[kind][0]} <b>{number(b)}</b>"
            for layer, a, b in zip(layers, x, y, strict=True)
        ],
    }  # fmt: skip
    look = layout(
        xaxis={"title": {"text": name}, **_axis(x)},
        yaxis={"title": {"text": f"{KINDS[kind][0]}: {unit_of(subject)}"}, **_axis(y)},
        margin={"l": 64, "r": 16, "t": 24, "b": 44},
    )
    words = f"Rank correlation {number(row['spearman'], 2)} over {counted(row['layers'], 'layer')}."
    alt = f"Scatter of {name} against {KINDS[kind][0]}, a point for every layer. {words}"
    return Choice(name, f"{note} {words}", alt, _figure(trace, look))


def _axis(values: Sequence[float]) -> Figure:
    """Logarithmic where the largest would press the others together."""
    return charts.log_axis(values) if values and min(values) > 0 and max(values) > 20 * min(values) else {}


def removal_part(subject: Subject) -> Part | None:
    """The loss after every block that was removed for good."""
    if not subject.get("depth"):
        return None
    depth = subject["depth"][0]
    steps, total = depth["steps"], len(subject["layers"])
    found = f"{depth['layers']} of {counted(total, 'layer')} keep it within {number(depth['increase'])}"
    if not steps:
        return Part("removal", "Effective depth, measured", f"{found}; no layer can go.", half=True)
    left = [str(total - k) for k in range(len(steps) + 1)]
    trace = {
        "type": "scatter", "mode": "lines+markers", "x": left, "y": [0.0, *(step["loss"] for step in steps)],
        "line": {"color": charts.SEEN, "width": 2}, "marker": {"color": charts.SEEN, "size": 7}, "showlegend": False,
        "hoverinfo": "text", "hovertext": [f"all {total} layers", *(
            f"{count} layers left, without {step['removed']} too<br><b>{number(step['loss'])}</b>"
            for count, step in zip(left[1:], steps, strict=True)
        )],
    }  # fmt: skip
    look = layout(
        xaxis=charts.names_axis("layers left", left),
        yaxis={"title": {"text": unit_of(subject)}},
        margin={"l": 60, "r": 8, "t": 24, "b": 44},
    )
    columns = ("layers left", "removed", "loss", "low", "high")
    rows = tuple(
        (int(count), step["removed"], step["loss"], step["low"], step["high"])
        for count, step in zip(left[1:], steps, strict=True)
    )
    words = f"{found}; removed in this order: {', '.join(str(layer) for layer in depth['removed'])}."
    alt = f"Line chart of {unit_of(subject)} as layers go. {words}"
    chart = Chart((Choice("removal", "", alt, _figure(trace, look)),), 340)
    return Part("removal", "Effective depth, measured", words, chart, Table("Layers removed", columns, rows), half=True)


def heads_part(subject: Subject) -> Part | None:
    """Layer × head: what every head does on text and what its weights are."""
    layers = [{**layer, "heads": [_flat(head) for head in layer.get("heads", [])]} for layer in subject["layers"]]
    heads = max((len(layer["heads"]) for layer in layers), default=0)
    keys = charts.head_measures(layers)
    if not heads or not keys:
        return None
    names = {**charts.MEASURES, **HEADS}
    measures = [
        Measure(
            name=names[key][0] if key in names else charts.measure_name(key),
            note=names[key][1] if key in names else "",
            rows=[[head.get(key) for head in layer["heads"]] for layer in layers],
            show=percent if key == "first_mass" else number,
            top=_TOPS.get(key, 0.0),
        )
        for key in keys
    ]
    height = 116 + heads * max(16, min(44, 320 // heads))
    chart = Chart(tuple(heat_map(layers, heads, measure) for measure in measures), height, "Measure")
    columns = ("layer", "head", *(measure.name for measure in measures))
    rows = tuple(
        (layer["index"], head["index"], *(head.get(key) for key in keys)) for layer in layers for head in layer["heads"]
    )
    caption = "Point at a cell, or walk through the cells with the arrow keys, for its value."
    return Part("heads", "Layer by head", caption, chart, Table("Every measure of every head", columns, rows))


def _flat(head: Mapping[str, Any]) -> dict[str, Any]:
    """A head with the error of its best static pattern among its measures."""
    plain = {key: value for key, value in head.items() if isinstance(value, int | float | None)}
    if "static" in head and "static_best" in head:
        plain["static_error"] = head["static"].get(head["static_best"])
    return plain


def notes_part(subject: Subject) -> Part | None:
    """What is missing and why, and which heads fast attention could serve."""
    notes = [*subject.get("notes", [])]
    plans = [layer["fast"]["line"] for layer in subject["layers"] if layer.get("fast") is not None]
    if not notes and not plans:
        return None
    table = Table("Fast attention: which heads could use it", ("layer by layer",), tuple((line,) for line in plans))
    caption = "; ".join(notes) or "Heads whose scores are proved small enough run on a polynomial, within a tolerance."
    return Part("notes", "Fast attention and remarks", caption, None, table if plans else None)


def _figure(trace: Figure, look: Figure) -> Figure:
    return {"data": [trace], "layout": look}
