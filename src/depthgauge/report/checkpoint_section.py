"""The page section of a checkpoint: the cost of removing each layer, layer scores, heads."""

from collections.abc import Sequence
from dataclasses import replace

from depthgauge.base.format import DASH, counted, number
from depthgauge.report.charts import MEASURED, Chart, Figure, View, figure, hovering, log_axis, names_axis
from depthgauge.report.markup import Table, capital, percent
from depthgauge.report.page_parts import Measure, PagePart, head_part, heat_map, present, residual_part
from depthgauge.results.checkpoint_subject import CheckpointLayer, CheckpointSubject, Interval, ScoreTrust
from depthgauge.results.labels import EXPERT_MEASURES, SCORES, WHAT_IFS, of_stack, unit
from depthgauge.results.verdicts import (
    mean_caption,
    unobserved_sentence,
)


def checkpoint_facts(subject: CheckpointSubject) -> tuple[tuple[str, str], ...]:
    """Return what the checkpoint is, what it was gauged on, and how far its weights are from small."""
    model = subject.model
    shared = "" if model.kv_heads == model.heads else f", {model.kv_heads} for keys and values"
    facts = [] if model.hub is None else [("source", model.hub.target)]
    facts += [
        ("architecture", model.architecture),
        ("layers", f"{model.layers}{of_stack(model.stack)}"),
        ("heads per layer", f"{model.heads}{shared}"),
        ("token width", str(model.dim)),
        ("parameters", f"{model.parameters:,}"),
        ("precision", model.dtype),
    ]
    if (text := subject.text) is not None:
        facts.append((text.kind, f"{text.phrase()} of {text.source}"))
        if text.bos is not None:
            facts.append(("BOS token", f"{'added' if text.bos else 'not added'}: {text.bos_reason}"))
    if subject.baseline is not None:
        per = " per token" if model.objective == "loss" else ""
        facts.append(("loss, intact", f"{number(subject.baseline.loss)} nats{per}"))
    if subject.accuracy is not None:
        facts.append(("accuracy, intact", f"{number(100 * subject.accuracy)} %"))
    if (regime := subject.regime) is not None:
        distance = f"about {regime.corrected_orders:.1f} orders of magnitude from the small-weight regime (estimate)"
        facts.append(("weights", f"η = {number(regime.eta)}, {distance}"))
    return tuple(facts)


def checkpoint_parts(subject: CheckpointSubject) -> tuple[PagePart, ...]:
    """Return all parts of the section, the what-ifs first."""
    makers = (what_if_part, experts_part, trust_part, residual_part, heads_part, notes_part)
    return present(*(make(subject) for make in makers))


def heads_part(subject: CheckpointSubject) -> PagePart | None:
    """Return the map of heads, or the sentence that says why their attention could not be observed, or both."""
    part = head_part(subject)
    if subject.unobserved is None:
        return part
    statements = (f"{capital(unobserved_sentence(subject.unobserved))}.",)
    if part is None:
        return PagePart("heads", "Layer by head", "", statements=statements)
    return replace(part, statements=statements)


def what_if_part(subject: CheckpointSubject) -> PagePart | None:
    """Return bars with intervals per layer, with one view per what-if."""
    layers = subject.layers
    kinds = [kind for kind in WHAT_IFS if any(kind in layer.what_if for layer in layers)]
    if not kinds:
        return None
    measured = unit(subject.model.objective)
    views = tuple(_bars(layers, kind, measured) for kind in kinds)
    columns = ("layer", *(f"{WHAT_IFS[kind].label}{end}" for kind in kinds for end in ("", ", low", ", high")))
    rows = tuple((layer.index, *(end for kind in kinds for end in _ends(layer.what_if.get(kind)))) for layer in layers)
    caption = f"{mean_caption(subject)} Layers are counted from 0."
    table = Table(f"What if: {measured}", columns, rows)
    return PagePart("what-if", "What each layer is worth", caption, Chart(views, 340, "What if"), table)


def experts_part(subject: CheckpointSubject) -> PagePart | None:
    """Return the layer × expert heat maps of the what-if `expert`, and the table of all experts."""
    layers = [layer for layer in subject.layers if layer.experts]
    if not layers:
        return None
    most, measured = max(len(layer.experts) for layer in layers), unit(subject.model.objective)
    loss, share = EXPERT_MEASURES["loss"], EXPERT_MEASURES["share"]
    measures = (
        Measure(
            loss.label, f"{loss.sentence} {capital(measured)}.",
            [[expert.what_if.loss for expert in layer.experts] for layer in layers],
        ),
        Measure(
            share.label, share.sentence, [[expert.share for expert in layer.experts] for layer in layers], percent,
            top=share.top,
        ),
    )  # fmt: skip
    views = tuple(heat_map(layers, most, measure, "expert") for measure in measures)
    columns = ("layer", "expert", loss.label, f"{loss.label}, low", f"{loss.label}, high", share.label)
    rows = tuple((layer.index, one.index, *_ends(one.what_if), one.share) for layer in layers for one in layer.experts)
    chart = Chart(views, 116 + most * max(16, min(44, 320 // most)), "Measure")
    table = Table(f"Without one expert: {measured}", columns, rows)
    return PagePart("experts", "What each expert is worth", mean_caption(subject), chart, table)


def _ends(found: Interval | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if found is None else (found.loss, found.low, found.high)


def _bars(layers: Sequence[CheckpointLayer], kind: str, measured: str) -> View:
    names = [str(layer.index) for layer in layers]
    title, note = WHAT_IFS[kind].label, WHAT_IFS[kind].sentence
    found = [layer.what_if.get(kind) for layer in layers]
    trace = {
        "type": "bar", "x": names, "y": [None if one is None else one.loss for one in found],
        "marker": {"color": MEASURED}, "showlegend": False,
        "error_y": {
            "type": "data", "symmetric": False, "width": 0, "thickness": 1.5, "color": "@ink",
            "array": [0.0 if one is None or one.high is None else one.high - one.loss for one in found],
            "arrayminus": [0.0 if one is None or one.low is None else one.loss - one.low for one in found],
        },
        **hovering([_bar_text(name, title, one) for name, one in zip(names, found, strict=True)]),
    }  # fmt: skip
    known = {name: one.loss for name, one in zip(names, found, strict=True) if one is not None}
    least, most = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    words = f"Smallest at layer {least} ({number(known[least])}), largest at layer {most} ({number(known[most])})."
    alt = f"Bar chart of {measured} by layer, {title}. {words}"
    y = {"title": measured, "rangemode": "tozero"}
    return View(title, f"{note} {words}", alt, figure(trace, x=names_axis("layer", names), y=y, bargap=0.25))


def _bar_text(name: str, title: str, one: Interval | None) -> str:
    if one is None:
        return f"layer {name}<br>{title} {DASH}"
    between = "" if one.low is None else f"<br>from {number(one.low)} to {number(one.high)}"
    return f"layer {name}<br>{title} <b>{number(one.loss)}</b>{between}"


def trust_part(subject: CheckpointSubject) -> PagePart | None:
    """Return each layer score against the measured cost, one point per layer."""
    rows = [row for row in subject.scores if row.score in SCORES and row.what_if in WHAT_IFS]
    if not rows:
        return None
    views = tuple(_scatter(subject, row) for row in rows)
    table = Table(
        "Rank correlation of layer scores with the measured cost",
        ("score", "against", "rank correlation"),
        tuple((SCORES[row.score].label, WHAT_IFS[row.what_if].label, row.spearman) for row in rows),
    )
    caption = "A useful score ranks the layers in the order of the measured cost; rank correlation 1 is the same order."
    title = "Which layer score predicts the cost"
    return PagePart("trust", title, caption, Chart(views, 340, "Score"), table, table_open=True, half=True)


def _scatter(subject: CheckpointSubject, row: ScoreTrust) -> View:
    score, title = SCORES[row.score], WHAT_IFS[row.what_if].label
    points = [
        (layer.index, value, layer.what_if[row.what_if].loss)
        for layer in subject.layers
        if row.what_if in layer.what_if and (value := layer.scores.get(row.score)) is not None
    ]
    x, y = [point[1] for point in points], [point[2] for point in points]
    trace = {
        "type": "scatter", "mode": "markers+text", "x": x, "y": y, "text": [str(index) for index, _, _ in points],
        "textposition": "top center", "textfont": {"size": 10, "color": "@faint"}, "showlegend": False,
        "marker": {"color": MEASURED, "size": 8}, **hovering([
            f"layer {index}<br>{score.label} <b>{number(a)}</b><br>{title} <b>{number(b)}</b>" for index, a, b in points
        ]),
    }  # fmt: skip
    down = {"title": f"{title}: {unit(subject.model.objective)}", **_axis(y)}
    drawn = figure(trace, x={"title": score.label, **_axis(x)}, y=down, left=64, right=16)
    words = f"Rank correlation {number(row.spearman, 2)} over {counted(row.layers, 'layer')}."
    alt = f"Scatter plot of {score.label} against {title}, one point per layer. {words}"
    return View(score.label, f"{score.sentence} {words}", alt, drawn)


def _axis(values: Sequence[float]) -> Figure:
    """Return a logarithmic axis if the values span more than a factor of 20."""
    return log_axis(values) if values and min(values) > 0 and max(values) > 20 * min(values) else {}


def notes_part(subject: CheckpointSubject) -> PagePart | None:
    """Return what was not measured and why, and which heads can use fast attention."""
    plans = [layer.fast.line for layer in subject.layers if layer.fast is not None]
    if not subject.notes and not plans:
        return None
    table = Table("Fast attention: which heads can use it", ("layer by layer",), tuple((line,) for line in plans))
    default = "Heads whose scores are proved to be small enough can run on a polynomial within the tolerance."
    caption = "; ".join(subject.notes) or default
    return PagePart("notes", "Fast attention and notes", caption, None, table if plans else None)
