"""What is shown of a monitored run: what was watched, layer × step heat maps, the measured depth, and the alarms."""

from collections.abc import Sequence

from depthgauge.base.format import capital, counted, duration, number, span
from depthgauge.results.document import (
    MEASURED,
    Axis,
    Chart,
    Document,
    Heat,
    Line,
    Part,
    Place,
    Plot,
    Section,
    Series,
    Table,
    command_line,
    present,
    settings_table,
)
from depthgauge.results.monitor_labels import ALARM_LABELS, QUANTITIES, Quantity, monitor_verdict
from depthgauge.results.monitor_record import MonitorRecord, Probe

MOST_STEPS = 120
"""Largest number of probes that the page shows; of a longer run, evenly spaced probes and those with alarms."""
ALARM = "@vermilion"
_LOSSES = (("training loss", "@blue", "solid", "loss"), ("loss on the probe", "@green", "dot", "probe_loss"))
"""Name, colour, dash and field of the losses."""


def monitor_document(record: MonitorRecord) -> Document:
    """Return what is shown of the log of a monitor."""
    verdict, parts = capital(monitor_verdict(record)), monitor_parts(record)
    return Document(
        version=record.run.version,
        heading="How does depth change in training?",
        lead=f"A training run watched with depthgauge {record.run.version}: measured on a fixed probe batch.",
        sections=(Section(record.name, "", verdict, monitor_facts(record), parts),),
        command=command_line("report", {}, record.log),
        settings=settings_table(record.run.settings.given()),
        how="`depthgauge.Monitor` wrote the log while the model trained. This command makes the page from it again:",
    )


def monitor_parts(record: MonitorRecord) -> tuple[Part, ...]:
    """Return all parts of the section, in order."""
    notes = Part("notes", "Notes", statements=record.run.notes, place=Place.PAGE) if record.run.notes else None
    return present(alarm_part(record), map_part(record), depth_part(record), notes)


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


def alarm_part(record: MonitorRecord) -> Part:
    """Return the alarms in sentences and as a table; of many alarms, the first of each kind in sentences."""
    if not record.alarms:
        return Part("alarms", "Alarms", "No alarm was raised.", place=Place.PAGE)
    first = {alarm.name: alarm for alarm in reversed(record.alarms)}
    rows = tuple((a.step, a.name, a.layer, a.value, a.threshold, a.message) for a in record.alarms)
    columns = ("step", "alarm", "layer", "value", "threshold", "message")
    names = [name for name in ALARM_LABELS if name in first]
    caption = " ".join(f"{capital(name)}: {ALARM_LABELS[name].sentence}" for name in names)
    statements = tuple(first[name].message for name in names)
    table = Table("Alarms", columns, rows, is_open=len(rows) <= 20)
    return Part("alarms", "Alarms", caption, None, table, statements, place=Place.PAGE)


def map_part(record: MonitorRecord) -> Part | None:
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
    table = Table("Every quantity by step and layer", columns, rows)
    return Part("steps", "Layer by step", caption, chart, table, place=Place.PAGE)


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
    return Chart(views, 266 + max(90, layers * max(12, min(36, 360 // layers))), "Quantity")


def _step_map(record: MonitorRecord, probes: Sequence[Probe], layers: int, quantity: Quantity) -> Plot:
    """Return the heat map of one quantity; crosses mark the alarms that judge it, or all alarms of other quantities."""
    steps, names = [str(probe.step) for probe in probes], [str(ell) for ell in range(layers)]
    z = [[quantity.of(probe.layers[ell]) for probe in probes] for ell in range(layers)]
    heat = Heat(
        quantity.label, z, steps, lambda ell, k, between: f"step {steps[k]}{between}layer {ell}", quantity.top, gap=1
    )
    marked = [alarm for alarm in record.alarms if alarm.name in quantity.alarms or not quantity.alarms]
    shown = [alarm for alarm in marked if str(alarm.step) in steps]
    series = []
    if shown:
        series.append(
            Series(
                "points", "alarm", [str(alarm.step) for alarm in shown], [str(alarm.layer) for alarm in shown], ALARM,
                places=[f"step {alarm.step} · layer {alarm.layer}\n{alarm.name}" for alarm in shown],
                texts=[f"value {number(one.value)}, threshold {number(one.threshold)}" for one in shown],
                legend=False, symbol="x", size=9,
            )
        )  # fmt: skip
    for name, color, dash, key in _LOSSES:
        values = [getattr(probe, key) for probe in probes]
        if any(value is not None for value in values):
            places = [f"step {step}" for step in steps]
            series.append(
                Series("line", name, steps, values, color, places=places, dash=dash, size=4, is_second=True)
            )  # fmt: skip
    words = heat.extremes("No layer has a value.")
    crosses = f" Crosses mark {', '.join(sorted({alarm.name for alarm in marked}))}." if marked else ""
    note = f"{quantity.sentence} {words}{crosses}"
    alt = f"Heat map of {quantity.label} by layer and training step, with the loss below. {words}{crosses}"
    lines = [Line(steps.index(step), color=ALARM, is_base=True) for step in {str(alarm.step): 0 for alarm in shown}]
    across, down = Axis("training step", "names", steps), Axis("layer", "down", names)
    second = Axis("loss")
    return Plot(alt, across, down, series, quantity.label, note, quantity.group, heat, second, lines)


def depth_part(record: MonitorRecord) -> Part | None:
    """Return the measured effective depth over the steps."""
    measured = [probe for probe in record.probes if probe.depth is not None]
    if not measured:
        return None
    steps, layers = [str(probe.step) for probe in measured], record.run.model.layers
    line = Series(
        "steps", "effective depth", steps, [probe.depth for probe in measured], MEASURED,
        places=[f"step {step}" for step in steps], legend=False, size=7,
    )  # fmt: skip
    words = f"From {measured[0].depth} to {measured[-1].depth} of {counted(layers, 'layer')}."
    alt = f"Line chart of the measured effective depth by training step. {words}"
    across, up = Axis("training step", "names", steps), Axis("layers", range=(0, layers + 0.5))
    chart = Chart((Plot(alt, across, up, (line,), note=words),), 300)
    increase = record.run.settings.options.depth
    table = Table(
        "Measured effective depth", ("step", "layers"), tuple((probe.step, probe.depth) for probe in measured)
    )
    limit = (
        f"the loss on the probe increases by at most {number(increase)}"
        if record.run.model.objective == "loss"
        else f"the final states change by at most {number(increase)} of their norm"
    )
    caption = f"Layers that are left when blocks are removed greedily while {limit}."
    return Part("depth", "Effective depth, measured", caption, chart, table, half=True, place=Place.PAGE)
