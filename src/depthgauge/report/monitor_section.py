"""The page of a monitored run: what was watched, layer × step heat maps, the measured depth, and the alarms."""

from collections.abc import Sequence
from typing import Any

from depthgauge.base.format import counted, duration, number
from depthgauge.report.charts import (
    LEGEND,
    MEASURED,
    Chart,
    Figure,
    HeatMap,
    View,
    figure,
    hovering,
    names_axis,
    single,
)
from depthgauge.report.markup import Table, capital, command_line, settings_table, span
from depthgauge.report.page_parts import Page, PagePart, Section, present
from depthgauge.results.monitor_labels import ALARM_LABELS, QUANTITIES, Quantity, monitor_verdict
from depthgauge.results.monitor_record import Alarm, MonitorRecord, Probe

MOST_STEPS = 120
"""Largest number of probes that the page shows; of a longer run, evenly spaced probes and those with alarms."""
ALARM = "@vermilion"
_LOSS, _GAP, _MARGINS = 110, 60, 96
"""Heights in pixels: of the loss, between the loss and the heat map (two lines of legend), and above and below both."""


def shown_probes(record: MonitorRecord) -> tuple[Probe, ...]:
    """Return the probes that the page shows."""
    probes = record.probes
    if len(probes) <= MOST_STEPS:
        return probes
    alarmed = {alarm.step for alarm in record.alarms}
    spaced = {round(k * (len(probes) - 1) / (MOST_STEPS - 1)) for k in range(MOST_STEPS)}
    return tuple(probe for k, probe in enumerate(probes) if k in spaced or probe.step in alarmed)


def known_quantities(probes: Sequence[Probe]) -> list[str]:
    """Return the quantities that at least one probe has."""
    return [
        name
        for name, quantity in QUANTITIES.items()
        if any(quantity.of(layer) is not None for probe in probes for layer in probe.layers)
    ]


def step_maps(record: MonitorRecord) -> Chart | None:
    """Return one heat map per quantity: layers from top to bottom, steps from left to right, the loss below."""
    probes = shown_probes(record)
    if not (known := known_quantities(probes)):
        return None
    layers = max(len(probe.layers) for probe in probes)
    views = tuple(_step_map(record, probes, layers, QUANTITIES[name]) for name in known)
    return Chart(views, _MARGINS + _LOSS + _GAP + _heat_height(layers), "Quantity")


def _heat_height(layers: int) -> int:
    return max(90, layers * max(12, min(36, 360 // layers)))


def _step_map(record: MonitorRecord, probes: Sequence[Probe], layers: int, quantity: Quantity) -> View:
    """Return the heat map of one quantity; crosses mark the alarms that judge it, or all alarms of other quantities."""
    steps = [str(probe.step) for probe in probes]
    z = [[quantity.of(probe.layers[ell]) for probe in probes] for ell in range(layers)]
    heat = HeatMap(
        quantity.label, z, steps, lambda ell, k, between: f"step {steps[k]}{between}layer {ell}", quantity.top
    )
    marked = [alarm for alarm in record.alarms if alarm.name in quantity.alarms or not quantity.alarms]
    plot = _LOSS + _GAP + _heat_height(layers)
    drawn = figure(
        heat.trace(1), *_marks(marked, steps), *_losses(probes, steps),
        x={**names_axis("training step", steps), "anchor": "y2", "range": [-0.5, len(steps) - 0.5]},
        y={
            "type": "category", "title": "layer", "showgrid": False, "range": [layers - 0.5, -0.5],
            "domain": [(_LOSS + _GAP) / plot, 1.0],
        },
        yaxis2={"title": "loss", "domain": [0.0, _LOSS / plot], "anchor": "x"},
        right=28, top=52,
        legend={**LEGEND, "y": (_LOSS + 4) / plot},
        shapes=[_line(k) for k, step in enumerate(steps) if step in {str(alarm.step) for alarm in marked}],
    )  # fmt: skip
    words = heat.extremes("No layer has a value.")
    crosses = f" Crosses mark {', '.join(sorted({alarm.name for alarm in marked}))}." if marked else ""
    note = " ".join(filter(None, (quantity.sentence, words, heat.scale.note))) + crosses
    alt = f"Heat map of {quantity.label} by layer and training step, with the loss below. {words}{crosses}"
    return View(quantity.label, note, alt, drawn, quantity.group)


def _marks(alarms: Sequence[Alarm], steps: Sequence[str]) -> list[Figure]:
    """Return crosses at the cells where alarms began."""
    shown = [alarm for alarm in alarms if str(alarm.step) in steps]
    if not shown:
        return []
    return [{
        "type": "scatter", "mode": "markers", "name": "alarm", "showlegend": False,
        "x": [str(alarm.step) for alarm in shown], "y": [str(alarm.layer) for alarm in shown],
        "marker": {"color": ALARM, "symbol": "x", "size": 9, "line": {"color": "@raised", "width": 1}},
        **hovering([
            f"step {alarm.step} · layer {alarm.layer}<br><b>{alarm.name}</b><br>value {number(alarm.value)}, threshold "
            f"{number(alarm.threshold)}" for alarm in shown
        ]),
    }]  # fmt: skip


def _losses(probes: Sequence[Probe], steps: Sequence[str]) -> list[Figure]:
    """Return the training loss and the loss on the probe batch."""
    curves = (("training loss", "@blue", "solid", "loss"), ("loss on the probe", "@green", "dot", "probe_loss"))
    traces: list[dict[str, Any]] = []
    for name, color, dash, key in curves:
        values = [getattr(probe, key) for probe in probes]
        if any(value is not None for value in values):
            traces.append({
                "type": "scatter", "mode": "lines+markers", "name": name, "x": list(steps), "y": values, "yaxis": "y2",
                "line": {"color": color, "width": 2, "dash": dash}, "marker": {"color": color, "size": 4},
                "showlegend": True, **hovering([
                    f"step {step}<br>{name} <b>{number(value)}</b>" for step, value in zip(steps, values, strict=True)
                ]),
            })  # fmt: skip
    return traces


def _line(column: int) -> Figure:
    """Return a vertical line through the loss at the column of an alarm."""
    return {
        "type": "line", "xref": "x", "x0": column, "x1": column, "yref": "y2 domain", "y0": 0, "y1": 1,
        "line": {"color": ALARM, "width": 1, "dash": "dash"},
    }  # fmt: skip


def depth_chart(record: MonitorRecord) -> Chart | None:
    """Return the measured effective depth over the steps."""
    measured = [probe for probe in record.probes if probe.depth is not None]
    if not measured:
        return None
    steps, layers = [str(probe.step) for probe in measured], record.run.model.layers
    trace = {
        "type": "scatter", "mode": "lines+markers", "x": steps, "y": [probe.depth for probe in measured],
        "line": {"color": MEASURED, "width": 2, "shape": "hv"}, "marker": {"color": MEASURED, "size": 7},
        "showlegend": False,
        **hovering([f"step {probe.step}<br>effective depth <b>{probe.depth}</b>" for probe in measured]),
    }  # fmt: skip
    words = f"From {measured[0].depth} to {measured[-1].depth} of {counted(layers, 'layer')}."
    alt = f"Line chart of the measured effective depth by training step. {words}"
    y = {"title": "layers", "range": [0, layers + 0.5]}
    return single(alt, 300, figure(trace, x=names_axis("training step", steps), y=y), words)


def monitor_page(record: MonitorRecord) -> Page:
    """Return the page of the log of a monitor."""
    parts = present(alarm_part(record), map_part(record), depth_part(record), notes_part(record))
    section = Section(record.name, capital(monitor_verdict(record)), monitor_facts(record), parts)
    return Page(
        version=record.run.version,
        heading="How does depth change in training?",
        lead=f"A training run watched with depthgauge {record.run.version}: measured on a fixed probe batch.",
        sections=(section,),
        command=command_line("report", {}, record.log),
        settings=settings_table(record.run.settings.given()),
        how="`depthgauge.Monitor` wrote the log while the model trained. This command makes the page from it again:",
    )


def monitor_facts(record: MonitorRecord) -> tuple[tuple[str, str], ...]:
    """Return what is trained and how it is watched."""
    model, probes = record.run.model, record.probes
    facts = [
        ("architecture", model.architecture),
        ("layers", str(model.layers)),
        ("heads per layer", span(model.heads)),
        ("parameters", f"{model.parameters:,}"),
        ("precision", model.dtype),
        ("device", model.device),
        ("probe batch", f"{counted(model.sequences, 'sequence')} of {model.tokens} tokens"),
        ("probes", f"{len(probes)}, every {counted(record.run.settings.every, 'step')}"),
    ]
    if model.ranks > 1:
        facts.append(("processes", str(model.ranks)))
    seconds = [probe.seconds for probe in probes if probe.seconds is not None]
    if seconds:
        facts.append(("time of the probes", f"{duration(sum(seconds))} in total, {number(seconds[-1], 2)} s the last"))
    resumed = len({probe.segment for probe in probes}) - 1
    if resumed > 0:
        facts.append(("resumed", counted(resumed, "time")))
    facts.append(("alarms", str(len(record.alarms))))
    return tuple(facts)


def alarm_part(record: MonitorRecord) -> PagePart:
    """Return the alarms in sentences and as a table; of many alarms, the first of each kind in sentences."""
    if not record.alarms:
        return PagePart("alarms", "Alarms", "No alarm was raised.")
    first = {alarm.name: alarm for alarm in reversed(record.alarms)}
    rows = tuple((a.step, a.name, a.layer, a.value, a.threshold, a.message) for a in record.alarms)
    table = Table("Alarms", ("step", "alarm", "layer", "value", "threshold", "message"), rows)
    names = [name for name in ALARM_LABELS if name in first]
    caption = " ".join(f"{capital(name)}: {ALARM_LABELS[name].sentence}" for name in names)
    statements = tuple(capital(first[name].message) for name in names)
    return PagePart("alarms", "Alarms", caption, None, table, table_open=len(rows) <= 20, statements=statements)


def map_part(record: MonitorRecord) -> PagePart | None:
    """Return the heat maps with the table of all quantities by step and layer."""
    if (chart := step_maps(record)) is None:
        return None
    probes = shown_probes(record)
    known = known_quantities(probes)
    rows = tuple(
        (probe.step, layer.index, *(QUANTITIES[name].of(layer) for name in known))
        for probe in probes
        for layer in probe.layers
    )
    columns = ("step", "layer", *(QUANTITIES[name].label for name in known))
    left_out = len(record.probes) - len(probes)
    caption = "Point at a cell, or move through the cells with the arrow keys, to read its value."
    if left_out:
        caption += f" {counted(left_out, 'probe')} between the shown ones are in the log and not on this page."
    return PagePart("steps", "Layer by step", caption, chart, Table("Every quantity by step and layer", columns, rows))


def depth_part(record: MonitorRecord) -> PagePart | None:
    """Return the measured effective depth over the steps."""
    if (chart := depth_chart(record)) is None:
        return None
    increase = record.run.settings.options.depth
    table = Table(
        "Measured effective depth",
        ("step", "layers"),
        tuple((probe.step, probe.depth) for probe in record.probes if probe.depth is not None),
    )
    limit = (
        f"the loss on the probe increases by at most {number(increase)}"
        if record.run.model.objective == "loss"
        else f"the final states change by at most {number(increase)} of their norm"
    )
    caption = f"Layers that are left when blocks are removed greedily while {limit}."
    return PagePart("depth", "Effective depth, measured", caption, chart, table, half=True)


def notes_part(record: MonitorRecord) -> PagePart | None:
    """Return what was not measured, and why."""
    if not record.run.notes:
        return None
    return PagePart("notes", "Notes", " ".join(f"{capital(note)}." for note in record.run.notes))
