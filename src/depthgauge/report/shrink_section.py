"""The page of a shrunk checkpoint: what was removed, what it costs on each text, what is guaranteed, what it saves."""

import sys
from collections.abc import Sequence

from depthgauge.base.format import DASH, counted, duration, number, ranges, short
from depthgauge.report.charts import MEASURED, PROVED, Figure, figure, hovering, label, names_axis, single
from depthgauge.report.evaluate_section import evaluate_parts
from depthgauge.report.markup import Table, capital, command_line, settings_table
from depthgauge.report.page_parts import Page, PagePart, Section, present
from depthgauge.report.recover_section import recovery_part
from depthgauge.results.labels import of_stack
from depthgauge.results.shrink_record import CurvePoint, ShrinkRecord, TextRecord
from depthgauge.results.shrink_verdicts import (
    SHORT_TEXTS,
    accuracy_sentence,
    cost_columns,
    durations_sentence,
    guarantee_sentences,
    increase_text,
    limit_failed,
    measured_increase,
    objective_label,
    recovery_sentences,
    reload_sentence,
    shrink_verdict,
    stage_sentence,
    text_label,
    texts_caption,
    times_sentence,
    why_not_guaranteed,
    with_error,
)

_OURS = "depthgauge"
"""The method of the curve that is this result."""
_COLORS = ("@blue", "@purple", "@green", "@faint")
"""Colours of the other methods, in the order of the record; ours has the colour of what is measured."""

_SAME, _REPAIRED, _REMOVED = 0, 1, 2
_STATES = (("kept, unchanged", "@shade-1"), ("kept, repaired", "@blue"), ("removed", "@vermilion"))
"""The name and the colour of each state of a block."""


def stack_part(record: ShrinkRecord) -> PagePart | None:
    """Return the stack before and after, one cell per block."""
    if not record.removed:
        return None
    gone, is_trained = set(record.removed), record.recovery is not None and record.recovery.kept
    # The repair changes blocks from the one before the first gap on.
    first = 0 if is_trained else min(gone) - 1 if record.repaired else record.layers_before
    kept = [layer for layer in range(record.layers_before) if layer not in gone]
    states = [_REMOVED if layer in gone else _state(layer, first) for layer in range(record.layers_before)]
    after = [*(_state(layer, first) for layer in kept), *[None] * len(gone)]
    before_text = [f"layer {layer}<br><b>{_STATES[state][0]}</b>" for layer, state in enumerate(states)]
    after_text = [
        f"layer {k} of the smaller model<br>layer {layer} of the source<br><b>{_STATES[_state(layer, first)][0]}</b>"
        for k, layer in enumerate(kept)
    ] + ["no layer here"] * len(gone)
    names = list(map(str, range(record.layers_before)))
    trace = {
        "type": "heatmap", "x": names, "y": ["before", "after"], "z": [states, after],
        **hovering([before_text, after_text]), "hoverongaps": False, "xgap": 2, "ygap": 10,
        "zmin": 0, "zmax": 2, "showscale": False,
        "colorscale": [[(state + end) / 3, color] for state, (_, color) in enumerate(_STATES) for end in (0, 1)],
    }  # fmt: skip
    shown = {state for state in (*states, *after) if state is not None}
    legend = [_legend(*_STATES[state]) for state in sorted(shown)]
    y = {"type": "category", "showgrid": False, "autorange": "reversed"}
    drawn = figure(trace, *legend, x=names_axis("layer", names), y=y, left=56, right=16, top=40)
    sizes = f"{counted(record.layers_before, 'layer')}{of_stack(record.plan.stack)} before, {record.layers_after} after"
    words = f"{sizes}; removed: {ranges(sorted(record.removed))}."
    rows = tuple(
        (layer, _STATES[state][0], kept.index(layer) if layer not in gone else None)
        for layer, state in enumerate(states)
    )
    table = Table("Every layer", ("layer", "what happened", "new number"), rows)
    chart = single(f"The stack of layers before and after. {words}", 200, drawn)
    caption = f"{words} Layers are counted from 0; the smaller model numbers its layers again."
    return PagePart("stack", "What was removed", caption, chart, table)


def _state(layer: int, first: int) -> int:
    return _REPAIRED if layer >= first else _SAME


def _legend(name: str, color: str) -> Figure:
    """Return an entry of the legend for a colour of the heat map; it draws nothing."""
    return {
        "type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "hoverinfo": "skip",
        "marker": {"color": color, "size": 11, "symbol": "square"}, "showlegend": True,
    }  # fmt: skip


def text_part(record: ShrinkRecord) -> PagePart | None:
    """Return the increase on every kind of text with its interval."""
    texts = record.texts
    if not texts:
        return None
    known = [text for text in texts if text.increase is not None]
    names = [label(short(_short_name(text, texts), 18)) for text in known]
    trace = {
        "type": "bar", "orientation": "h", "y": list(range(len(known))), "x": [text.increase for text in known],
        "marker": {"color": MEASURED}, "showlegend": False,
        "error_x": {
            "type": "data", "symmetric": False, "width": 0, "thickness": 1.5, "color": "@ink",
            "array": [_error_bar(text)[1] for text in known], "arrayminus": [_error_bar(text)[0] for text in known],
        },
        **hovering([
            f"{label(text_label(text))}<br><b>{label(increase_text(text.increase, text.low, text.high))}</b>"
            f"<br>{counted(text.windows, record.plan.calibration.noun)}"
            for text in known
        ]),
    }  # fmt: skip
    x = {"title": objective_label(record.objective).added, "rangemode": "tozero"}
    y = {
        "tickvals": list(range(len(known))), "ticktext": names, "autorange": "reversed", "showgrid": False,
        "automargin": True,
    }  # fmt: skip
    drawn = figure(trace, x=x, y=y, left=16, right=16, top=16, bargap=0.45)
    words = "; ".join(f"{text_label(text)}: {increase_text(text.increase, text.low, text.high)}" for text in known)
    caption = texts_caption(record)
    if record.accuracy is not None:
        caption += f" {capital(accuracy_sentence(record))}."
    noun = record.plan.calibration.noun
    what = "text" if noun == "window" else noun
    by_kind = f" by kind of {what}" if len(texts) > 1 else ""
    table = Table(
        capital(objective_label(record.objective).title) + by_kind.replace(" by", ", by"),
        (what, f"{noun}s", "before", "after", "increase", "low", "high"),
        tuple((text_label(t), t.windows, t.dense, t.shrunk, t.increase, t.low, t.high) for t in texts),
    )
    alt = f"Bar chart of {objective_label(record.objective).added}{by_kind}. {words}."
    chart = single(alt, 96 + 56 * len(known), drawn) if known else None
    return PagePart(
        "texts", f"What it costs on {f'each {what}' if by_kind else f'your {what}s'}", caption, chart, table, half=True
    )


def _short_name(text: TextRecord, texts: Sequence[TextRecord]) -> str:
    """Return a name that fits next to a chart: that of the file if there are several, else the kind of text."""
    several = sum(1 for other in texts if other.kind == text.kind) > 1
    return text.name.rpartition("/")[2] if several else SHORT_TEXTS.get(text.kind, text.kind)


def _error_bar(text: TextRecord) -> tuple[float, float]:
    """Return the lengths of the two halves of an error bar."""
    if text.increase is None or text.low is None or text.high is None:
        return 0.0, 0.0
    below, above = text.increase - text.low, text.high - text.increase
    return min(below, sys.float_info.max), min(above, sys.float_info.max)  # infinity is not JSON


def curve_part(record: ShrinkRecord) -> PagePart | None:
    """Return the increase against the number of removed layers, for this and the other ways to choose them."""
    points = [point for point in record.curve if point.increase is not None]
    if not points:
        return None
    methods = sorted(dict.fromkeys(point.method for point in points), key=lambda method: method != _OURS)
    colors = iter(_COLORS * len(methods))
    traces = [
        _line(method, [p for p in points if p.method == method], MEASURED if method == _OURS else next(colors))
        for method in methods
    ]
    most, added = max(point.removed for point in points), objective_label(record.objective).added
    x = {"title": "layers removed", "dtick": max(1, -(-most // 10)), "showgrid": False}
    last = [
        f"{point.method}: {number(point.increase)}"
        for point in sorted(points, key=lambda point: point.increase or 0.0)
        if point.removed == most
    ]
    words = f"After {counted(most, 'layer')}: {'; '.join(last)}."
    alt = f"Line chart of {added} by number of removed layers, one line per method. {words}"
    table = Table(
        "Increase by number of removed layers",
        ("method", "layers removed", "increase"),
        tuple((point.method, point.removed, point.increase) for point in record.curve),
    )
    noun, repaired = record.plan.calibration.noun, "only the result" if record.repaired else "nothing"
    caption = (
        f"Measured on the selection {noun}s; {repaired} was repaired. {words} The cost itself was measured on other "
        f"{noun}s."
    )
    chart = single(alt, 380, figure(*traces, x=x, y={"title": added}, right=12, top=76))
    return PagePart("curve", "Other ways to choose the layers", caption, chart, table, half=True)


def _line(method: str, points: Sequence[CurvePoint], color: str) -> Figure:
    ordered = sorted(points, key=lambda point: point.removed)
    return {
        "type": "scatter", "mode": "lines+markers", "name": label(short(method, 32)),
        "x": [point.removed for point in ordered], "y": [point.increase for point in ordered],
        "line": {"color": color, "width": 3 if method == _OURS else 1.5}, "showlegend": True,
        "marker": {"color": color, "size": 7 if method == _OURS else 5}, **hovering([
            f"{label(method)}<br>{counted(point.removed, 'layer')} removed<br><b>{number(point.increase)}</b>"
            for point in ordered
        ]),
    }  # fmt: skip


def candidate_part(record: ShrinkRecord) -> PagePart | None:
    """Return every set of blocks that was compared, without and with repair."""
    found = record.plan.candidates
    if not found:
        return None
    names = [label(short(f"{ranges(one.removed)} ({', '.join(one.methods)})", 40)) for one in found]
    places = list(range(len(found)))
    both = (("without repair", "@faint", "increase", "error"), ("repaired", MEASURED, "repaired", "repaired_error"))
    traces = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": places, "marker": {"color": color},
            "x": [getattr(one, value) for one in found], "showlegend": True,
            "error_x": {
                "type": "data", "width": 0, "thickness": 1.5, "color": "@ink",
                "array": [getattr(one, error) or 0.0 for one in found],
            },
            **hovering([
                f"without {ranges(one.removed)}, {name}<br>"
                f"<b>{with_error(getattr(one, value), getattr(one, error))}</b>"
                for one in found
            ]),
        }
        for name, color, value, error in both
    ]  # fmt: skip
    y = {"tickvals": places, "ticktext": names, "autorange": "reversed", "showgrid": False, "automargin": True}
    x = {"title": objective_label(record.objective).added, "rangemode": "tozero"}
    drawn = figure(*traces, x=x, y=y, left=16, right=16, top=40, bargap=0.35, barmode="group")
    rows = tuple(
        (", ".join(one.methods), ranges(one.removed), one.increase, one.error, one.repaired, one.repaired_error)
        for one in found
    )
    columns = ("chosen by", "removed", "without repair", "standard error", "repaired", "standard error")
    table = Table("Choices compared on the selection windows", columns, rows)
    stages = " ".join(f"{capital(stage_sentence(stage))}." for stage in record.stages)
    chosen = next((ranges(one.removed) for one in found if one.chosen), DASH)
    caption = (
        "Every set was measured on the same selection windows; the thin lines show the standard error. "
        f"Removed: {chosen}. {stages}"
    )
    alt = f"Bar chart of {x['title']} for {counted(len(found), 'set')} of layers, without and with repair."
    chart = single(alt, 120 + 56 * len(found), drawn)
    return PagePart("candidates", "Every choice, without and with repair", caption, chart, table)


def _recovery_part(record: ShrinkRecord) -> PagePart | None:
    return recovery_part(record.recovery, record.objective)


SAVED = "model"
"""The directory that a page suggests for a model that was shrunk in memory."""
_OUT = "smaller"
"""The output directory that a page suggests where none was written."""


def shrink_page(*records: ShrinkRecord) -> Page:
    """Return the page of a result of `shrink`, or of the results of all sizes of a run."""
    saving = (
        "The model was shrunk from Python and has no file. Save it and its tokenizer first with "
        f'`model.save_pretrained("{SAVED}")` and `tokenizer.save_pretrained("{SAVED}")`.'
    )
    record, plan = records[-1], records[-1].plan
    sections = tuple(
        Section(
            one.name if len(records) == 1 else f"{one.name} without {counted(len(one.removed), 'layer')}",
            capital(shrink_verdict(one)),
            shrink_facts(one),
            shrink_parts(one),
        )
        for one in records
    )
    if len(records) > 1:
        sizes = ", ".join(str(len(one.removed)) for one in records)
        lead = f"One search, {counted(len(records), 'model')}: {sizes} layers removed."
        sections = (Section(record.name, lead, (("source", plan.model),), (sizes_part(records),)), *sections)
    return Page(
        version=record.version,
        heading="How small can it be?",
        lead=f"A checkpoint shrunk with depthgauge {record.version}: what was removed, what it costs, what it saves.",
        sections=sections,
        command=shrink_command(record),
        settings=settings_table({"model": plan.model, **plan.settings.given()}),
        preparation="" if plan.files else saving,
    )


def sizes_part(records: Sequence[ShrinkRecord]) -> PagePart:
    """Return the increase with its interval, the size and the speed against the number of removed layers."""
    label_ = objective_label(records[0].objective)
    kinds = list(dict.fromkeys((text.kind, text.name) for one in records for text in one.texts))
    colors, traces, rows = iter((MEASURED, *_COLORS) * len(kinds)), [], []
    for kind, name in kinds:
        found = [(one, text) for one in records for text in one.texts if (text.kind, text.name) == (kind, name)]
        color = next(colors)
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": label(short(text_label(found[0][1]), 32)),
            "x": [len(one.removed) for one, _ in found], "y": [text.increase for _, text in found],
            "line": {"color": color}, "marker": {"color": color, "size": 7}, "showlegend": True,
            "error_y": {
                "type": "data", "symmetric": False, "width": 3, "color": color,
                "array": [_error_bar(text)[1] for _, text in found],
                "arrayminus": [_error_bar(text)[0] for _, text in found],
            },
            **hovering([
                f"{counted(len(one.removed), 'layer')} removed<br>"
                f"<b>{label(increase_text(text.increase, text.low, text.high))}</b>"
                for one, text in found
            ]),
        })  # fmt: skip
    for one in records:
        columns = cost_columns(one)
        costs = dict(zip(columns.get("cost", ()), columns.get("after ÷ before", ()), strict=True))
        bound = None if one.guarantee is None else one.guarantee.quantile.increase
        shown = [costs.get(name) for name in ("parameters", "size on disk", "prefill", "decode, per token")]
        rows.append((len(one.removed), measured_increase(one), bound, *shown, one.out or DASH))
    titles = (
        "layers removed", "increase", "guaranteed", "parameters", "size on disk", "prefill time", "decode time",
        "written to",
    )  # fmt: skip
    x = {"title": "layers removed", "tickvals": [len(one.removed) for one in records], "showgrid": False}
    drawn = figure(*traces, x=x, y={"title": label_.added, "rangemode": "tozero"}, right=12, top=76)
    words = "; ".join(f"{len(one.removed)}: {measured_increase(one)}" for one in records)
    caption = (
        "On windows that nothing was fitted or selected on, with 95 % confidence intervals. Costs are relative to the "
        "source model; below 1 is smaller or faster."
    )
    alt = f"Line chart of {label_.added} by number of removed layers, one line per kind of text. {words}."
    table = Table("Every size", titles, tuple(rows))
    return PagePart("sizes", "Choose by looking", caption, single(alt, 420, drawn), table, table_open=True)


def shrink_command(record: ShrinkRecord) -> str:
    """Return the command that reproduces a result of `shrink`."""
    options = {**record.plan.settings.given(), "out": record.out or _OUT}
    return command_line("shrink", options, record.plan.model if record.plan.files else SAVED)


def shrink_facts(record: ShrinkRecord) -> tuple[tuple[str, str], ...]:
    """Return what the model is, how it was shrunk and on what text."""
    plan, settings = record.plan, record.plan.settings
    facts = [
        ("source", plan.model),
        ("family", plan.family),
        ("layers", f"{record.layers_before} → {record.layers_after}{of_stack(plan.stack)}"),
        ("removed layers", ranges(sorted(record.removed))),
        ("weights", "repaired" if record.repaired else "unchanged"),
    ]
    if record.parameters.before is not None and record.parameters.after is not None:
        facts.append(("parameters", f"{record.parameters.before:,} → {record.parameters.after:,}"))
    calibration = plan.calibration
    for part, meaning in (("fit", "fit the repair"), ("select", "select the plan"), ("certify", "certify")):
        counts = {source.name: getattr(source, part) for source in calibration.sources if getattr(source, part)}
        facts.append((f"to {meaning}", f"{sum(counts.values())} {calibration.windows}"))
    if calibration.bos is not None:
        facts.append(("BOS token", f"{'added' if calibration.bos else 'not added'}: {calibration.bos_reason}"))
    effort = ("effort, seed", f"{settings.effort}, {settings.seed}")
    return (*facts, effort, ("duration", duration(record.seconds)), ("written to", record.out or "nothing was written"))


def shrink_parts(record: ShrinkRecord) -> tuple[PagePart, ...]:
    """Return all parts of the section, in order."""
    first = (stack_part, guarantee_part, text_part, curve_part)
    rest = (candidate_part, _recovery_part, cost_part, search_part, notes_part)
    tasks = () if record.evaluation is None else evaluate_parts(record.evaluation)
    return present(*(make(record) for make in first), *tasks, *(make(record) for make in rest))


def guarantee_part(record: ShrinkRecord) -> PagePart:
    """Return the guarantee in sentences, and the sizes that were tested against a limit."""
    guarantee, title = record.guarantee, "What is guaranteed"
    sentences = guarantee_sentences(record)
    if guarantee is None or (not sentences and not limit_failed(guarantee)):
        statement = f"{capital(why_not_guaranteed(record))}."
        return PagePart("guarantee", title, "The increases below were measured.", statements=(statement,))
    statements = sentences[:-1] or (f"{capital(shrink_verdict(record))}.",)
    if not guarantee.tested:
        return PagePart("guarantee", title, guarantee.assumption, statements=statements)
    names = [str(size.removed) for size in guarantee.tested]
    bars = {
        "type": "bar", "x": names, "y": [size.bound for size in guarantee.tested], "showlegend": False,
        "marker": {"color": [PROVED if size.passed else "@rule-strong" for size in guarantee.tested]},
        **hovering([
            f"{counted(size.removed, 'layer')} removed<br>bound <b>{number(size.bound)}</b><br>"
            f"within the limit: {'yes' if size.passed else 'no'}"
            for size in guarantee.tested
        ]),
    }  # fmt: skip
    legend = {
        "type": "scatter", "mode": "lines", "x": [None], "y": [None], "hoverinfo": "skip", "name": "limit",
        "line": {"color": "@ink", "width": 1.5, "dash": "dash"}, "showlegend": True,
    }  # fmt: skip
    line = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": guarantee.limit, "y1": guarantee.limit,
        "line": {"color": "@ink", "width": 1.5, "dash": "dash"},
    }  # fmt: skip
    bounds = [size.bound for size in guarantee.tested if size.bound is not None]
    known = [0.0, guarantee.limit or 0.0, *bounds]
    low, high = min(known), max(known)
    margin = min(0.1 * (high / 2 - low / 2), sys.float_info.max - max(high, -low))
    y = {"title": "bound", "range": [low - margin if low else 0.0, high + margin or 1.0]}
    shapes = [] if guarantee.limit is None else [line]
    drawn = figure(bars, legend, x=names_axis("layers removed", names), y=y, top=32, bargap=0.4, shapes=shapes)
    passed = [size.removed for size in guarantee.tested if size.passed]
    found = f"{counted(max(passed), 'layer')} removed is the largest size that passed" if passed else "no size passed"
    alt = f"Bar chart of the bound by number of removed layers. The limit is {number(guarantee.limit)}; {found}."
    table = Table(
        "Sizes tested against the limit",
        ("layers removed", "bound", "within the limit"),
        tuple((size.removed, size.bound, "yes" if size.passed else "no") for size in guarantee.tested),
    )
    chart = single(alt, 300, drawn)
    return PagePart("guarantee", title, guarantee.assumption, chart, table, table_open=True, statements=statements)


def cost_part(record: ShrinkRecord) -> PagePart | None:
    """Return parameters, bytes, memory and times before and after."""
    columns = cost_columns(record)
    if not columns:
        return None
    table = Table("Size and speed", tuple(columns), tuple(zip(*columns.values(), strict=True)))
    caption = "Both models were measured in turns in one run; a ratio below 1 is smaller or faster."
    caption = f"{caption} {times_sentence(record)}".rstrip()
    return PagePart("costs", "Size, memory and speed", caption, None, table, table_open=True, half=True)


def search_part(record: ShrinkRecord) -> PagePart | None:
    """Return the removals of the search in their order."""
    plan = record.plan
    if not plan.search:
        return None
    rows = tuple((k + 1, step.layer, step.objective) for k, step in enumerate(plan.search))
    columns = ("removal", "layer", "objective")
    caption = "The objective on the selection windows after each removal, without repair."
    return PagePart("search", "The search", caption, None, Table("Removals in order", columns, rows), table_open=True)


def notes_part(record: ShrinkRecord) -> PagePart | None:
    """Return the check of the written model, the recovery, remarks and versions."""
    lines = [reload_sentence(record.reload)] if record.reload is not None else []
    lines += [] if record.recovery is None else recovery_sentences(record.recovery)
    lines += [durations_sentence(record)] if record.durations else []
    caption = " ".join(f"{capital(line)}." for line in (*lines, *record.notes))
    if not caption and not record.versions:
        return None
    table = Table("Versions", ("package", "version"), tuple(record.versions.items()))
    return PagePart("notes", "Checks and notes", caption or DASH, None, table if record.versions else None)
