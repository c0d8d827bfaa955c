"""What is shown of a monitored run: what was watched, layer × step heat maps, the measured depth, and the alarms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean as mean

from depthgauge.base.format import capital, counted, duration, number, ranges, span
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
from depthgauge.results.monitor_record import MonitorRecord, Probe, ProbedLayer

# --- Names of the alarms and of the quantities, with the text that logs and pages show for them -----------------------


@dataclass(frozen=True)
class AlarmLabel:
    """The text shown for one alarm: what it means, and what to do about it."""

    sentence: str
    advice: str


ALARM_LABELS: Mapping[str, AlarmLabel] = {
    "rank-collapse": AlarmLabel(
        "The tokens of a state point in almost the same direction.",
        "Check that the skip connections are in place, and that their branches do not shrink the stream.",
    ),
    "entropy-collapse": AlarmLabel(
        "The heads of a layer attend to single tokens while their scores grow.",
        "Lower the learning rate or lengthen the warm-up; normalizing queries and keys bounds the scores.",
    ),
    "dead-layer": AlarmLabel(
        "A layer adds almost nothing to the residual stream.",
        "Check the initialization and the scale of its residual branches; a layer that stays dead can be removed.",
    ),
    "score-explosion": AlarmLabel(
        "The attention scores of a head are very large and have grown.",
        "Lower the learning rate, clip the gradients, or normalize queries and keys.",
    ),
}
"""Alarm name → label, in the order in which alarms are checked and shown."""


def _head(name: str, combine: Callable[[Sequence[float]], float]) -> Callable[[ProbedLayer], float | None]:
    def of(layer: ProbedLayer) -> float | None:
        values = () if layer.heads is None else getattr(layer.heads, name)
        known = [value for value in values if value is not None]
        return combine(known) if known else None

    return of


def entropy_share(layer: ProbedLayer) -> float | None:
    """Return the mean entropy of a layer's heads as a share of the entropy of uniform attention."""
    entropy = _head("entropy", mean)(layer)
    return None if entropy is None or not layer.uniform_entropy else entropy / layer.uniform_entropy


largest_score_range = _head("score_range", max)


@dataclass(frozen=True)
class Quantity:
    """One quantity of the page: a number per layer and step.

    - `group`: the group under which the menu of the page lists it
    - `label`, `sentence`: the name and the definition
    - `of`: returns the value of a layer
    - `top`: the largest possible value where there is one
    - `alarms`: the alarms that judge this quantity
    """

    group: str
    label: str
    of: Callable[[ProbedLayer], float | None]
    sentence: str
    top: float = 0.0
    alarms: tuple[str, ...] = ()


_STREAM, _ATTENTION, _WEIGHTS, _WHAT_IFS = "Residual stream", "Attention", "Weights", "What-ifs"
QUANTITIES: Mapping[str, Quantity] = {
    "direction_ratio": Quantity(
        _STREAM, "direction ratio", attrgetter("direction_ratio"),
        "‖Res X‖F/‖X‖F of the state after the layer, with every token scaled to length 1 and Res X = X minus the mean "
        "token: 0 if all tokens point in one direction.", 1.0, ("rank-collapse",),
    ),
    "residual_ratio": Quantity(
        _STREAM, "residual ratio", attrgetter("residual_ratio"),
        "‖Res X‖F/‖X‖F of the state after the layer, with Res X = X minus the mean token: 0 if all tokens are equal.",
        1.0,
    ),
    "update": Quantity(
        _STREAM, "update of the block", attrgetter("update"),
        "Size of what the layer changes divided by the size of its input, mean over tokens.", alarms=("dead-layer",),
    ),
    "attention_update": Quantity(
        _STREAM, "update of attention", attrgetter("attention_update"),
        "Size of what attention adds divided by the size of the stream that it reads, mean over tokens.",
    ),
    "mlp_update": Quantity(
        _STREAM, "update of the MLP", attrgetter("mlp_update"),
        "Size of what the MLP adds divided by the size of the stream that it reads, mean over tokens.",
    ),
    "block_influence": Quantity(
        _STREAM, "block influence (ShortGPT)", attrgetter("block_influence"),
        "1 − mean cosine of the states before and after the layer.",
    ),
    "score_range": Quantity(
        _ATTENTION, "score range, largest head", largest_score_range,
        "The largest range (max − min) of a row of scores, over the heads of the layer.", alarms=("score-explosion",),
    ),
    "entropy": Quantity(
        _ATTENTION, "entropy, mean head", _head("entropy", mean),
        "Entropy of a row of attention in nats, mean over rows and heads.",
    ),
    "entropy_share": Quantity(
        _ATTENTION, "entropy as a share of uniform attention", entropy_share,
        "Mean entropy of the heads divided by the entropy of uniform attention: 1 averages, 0 selects one token.",
        1.0, ("entropy-collapse",),
    ),
    "least_entropy": Quantity(
        _ATTENTION, "entropy, sharpest head", _head("entropy", min),
        "The smallest mean entropy of a head of the layer, in nats.",
    ),
    "tv_mean": Quantity(
        _ATTENTION, "distance from averaging, mean head", _head("tv_mean", mean),
        "Total variation distance between a row of attention and uniform attention, mean over rows and heads.", 1.0,
    ),
    "first_mass": Quantity(
        _ATTENTION, "attention on the first token, mean head", _head("first_mass", mean),
        "Attention weight on the first visible token, mean over rows and heads.", 1.0,
    ),
    "eta": Quantity(
        _WEIGHTS, "largest weight η", attrgetter("eta"),
        "The largest |entry| of the query, key and value–output matrices of the layer's heads.",
    ),
    "qk_norm": Quantity(
        _WEIGHTS, "query–key circuit, largest head", attrgetter("qk_norm"),
        "The largest spectral norm of QKᵀ over the heads of the layer.",
    ),
    "ov_norm": Quantity(
        _WEIGHTS, "value–output circuit, largest head", attrgetter("ov_norm"),
        "The largest spectral norm of the value–output map over the heads of the layer.",
    ),
    "skip_loss": Quantity(
        _WHAT_IFS, "cost of skipping the block", attrgetter("skip_loss"),
        "Increase of the probe loss (of a model without a loss: relative change of the final states) if the layer "
        "returns its input.",
    ),
}  # fmt: skip
"""Quantity → label, in the order in which they are shown, group by group."""


def alarm_words(name: str, where: str, evidence: str) -> str:
    """Return the message of an alarm: its name and place, the evidence, and the advice."""
    return f"{name} {where}: {evidence}. {ALARM_LABELS[name].advice}"


def layer_ranges(layers: Sequence[int]) -> str:
    """Return layers in words, with consecutive ones joined.

    >>> layer_ranges([3]), layer_ranges([0, 1, 2, 5])
    ('layer 3', 'layers 0–2, 5')
    """
    found = sorted(set(layers))
    return f"{'layer' if len(found) == 1 else 'layers'} {ranges(found)}"


def monitor_verdict(record: MonitorRecord) -> str:
    """State how long the run was watched, how the loss changed, and which alarms were raised first."""
    if not record.probes:
        return "nothing was measured yet"
    first, last = record.probes[0], record.probes[-1]
    parts = [f"{counted(len(record.probes), 'probe')} from step {first.step} to step {last.step}"]
    losses = [probe.loss for probe in record.probes if probe.loss is not None]
    if losses:
        parts.append(f"loss {number(losses[0])} → {number(losses[-1])}")
    for name in ALARM_LABELS:
        if found := [alarm for alarm in record.alarms if alarm.name == name]:
            where = layer_ranges([alarm.layer for alarm in found])
            parts.append(f"{name} at {where}, first at step {min(alarm.step for alarm in found)}")
    return "; ".join(parts if record.alarms else [*parts, "no alarm"])


# --- The document -----------------------------------------------------------------------------------------------------

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
