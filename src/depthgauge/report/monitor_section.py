"""The page of a monitored run: what was watched, layer × step heat maps, the measured depth, and the alarms."""

from depthgauge._format import counted, duration, number
from depthgauge.report.markup import Table, capital, command_line, settings_table, span
from depthgauge.report.monitor_charts import depth_chart, known_quantities, shown_probes, step_maps
from depthgauge.report.page_parts import Page, PagePart, Section, present
from depthgauge.results.monitor_labels import ALARM_LABELS, QUANTITIES, monitor_verdict
from depthgauge.results.monitor_record import Alarm, MonitorRecord


def monitor_page(record: MonitorRecord) -> Page:
    """Return the page of the log of a monitor."""
    section = Section(record.name, capital(monitor_verdict(record)), monitor_facts(record), monitor_parts(record))
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


def monitor_parts(record: MonitorRecord) -> tuple[PagePart, ...]:
    """Return all parts of the section, in order."""
    return present(alarm_part(record), map_part(record), depth_part(record), notes_part(record))


def alarm_part(record: MonitorRecord) -> PagePart:
    """Return the alarms in sentences and as a table; of many alarms, the first of each kind in sentences."""
    if not record.alarms:
        return PagePart("alarms", "Alarms", "No alarm was raised.")
    first: dict[str, Alarm] = {}
    for alarm in record.alarms:
        first.setdefault(alarm.name, alarm)
    rows = tuple((a.step, a.name, a.layer, a.value, a.threshold, a.message) for a in record.alarms)
    table = Table("Alarms", ("step", "alarm", "layer", "value", "threshold", "message"), rows)
    names = [name for name in ALARM_LABELS if name in first]
    caption = " ".join(f"{capital(name)}: {ALARM_LABELS[name].sentence}" for name in names)
    statements = tuple(capital(first[name].message) for name in names)
    return PagePart("alarms", "Alarms", caption, None, table, table_open=len(rows) <= 20, statements=statements)


def map_part(record: MonitorRecord) -> PagePart | None:
    """Return the heat maps with the table of all quantities by step and layer."""
    chart = step_maps(record)
    if chart is None:
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
    chart = depth_chart(record)
    if chart is None:
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
