"""Charts of a monitored run: layer × step heat maps with the loss below, and the measured depth over the steps."""

from collections.abc import Sequence
from typing import Any

from depthgauge._format import counted, number
from depthgauge.report.charts import LEGEND, MEASURED, Chart, Choice, Figure, figure, label, layout, names_axis
from depthgauge.report.layer_charts import color_scale
from depthgauge.results.monitor_labels import GROUPS, QUANTITIES, Quantity
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
    known = known_quantities(probes)
    if not known:
        return None
    layers = max(len(probe.layers) for probe in probes)
    groups = {name: group for group, names in GROUPS.items() for name in names}
    choices = tuple(_step_map(record, probes, layers, QUANTITIES[name], groups[name]) for name in known)
    return Chart(choices, _MARGINS + _LOSS + _GAP + _heat_height(layers), "Quantity")


def _heat_height(layers: int) -> int:
    return max(90, layers * max(12, min(36, 360 // layers)))


def _step_map(record: MonitorRecord, probes: Sequence[Probe], layers: int, quantity: Quantity, group: str) -> Choice:
    """Return the heat map of one quantity; crosses mark the alarms that judge it, or all alarms of other quantities."""
    steps = [str(probe.step) for probe in probes]
    z = [[quantity.of(probe.layers[ell]) for probe in probes] for ell in range(layers)]
    known = {(k, ell): value for ell, row in enumerate(z) for k, value in enumerate(row) if value is not None}
    scale = color_scale(list(known.values()), quantity.top)
    text = [
        [
            f"step {step} · layer {ell}<br>{label(quantity.label)} <b>{number(z[ell][k])}</b>"
            for k, step in enumerate(steps)
        ]
        for ell in range(layers)
    ]
    heat = {
        "type": "heatmap", "z": [[scale.color(value) for value in row] for row in z], "x": steps,
        "y": [str(ell) for ell in range(layers)], "hovertext": text, "hoverinfo": "text", "hoverongaps": False,
        "xgap": 1, "ygap": 1, "zmin": scale.color(scale.low), "zmax": scale.color(scale.high),
        "colorscale": [[k / 4, f"@shade-{k}"] for k in range(5)],
        "colorbar": {
            "orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom", "ypad": 8, "len": 0.4,
            "thickness": 8, "outlinewidth": 0, "ticks": "", "tickfont": {"size": 12, "color": "@faint"},
            "tickvals": [scale.color(scale.low), scale.color(scale.high)],
            "ticktext": [number(scale.low), number(scale.high)], "ticklabelposition": "outside top",
        },
    }  # fmt: skip
    marked = [alarm for alarm in record.alarms if alarm.name in quantity.alarms or not quantity.alarms]
    traces = [heat, *_marks(marked, steps), *_losses(probes, steps)]
    plot = _LOSS + _GAP + _heat_height(layers)
    look = layout(
        xaxis={**names_axis("training step", steps), "anchor": "y2", "range": [-0.5, len(steps) - 0.5]},
        yaxis={
            "type": "category", "title": {"text": "layer"}, "showgrid": False, "range": [layers - 0.5, -0.5],
            "domain": [(_LOSS + _GAP) / plot, 1.0],
        },
        yaxis2={"title": {"text": "loss"}, "domain": [0.0, _LOSS / plot], "anchor": "x"},
        margin={"l": 60, "r": 28, "t": 52, "b": 44},
        legend={**LEGEND, "y": (_LOSS + 4) / plot},
        shapes=[_line(k) for k, step in enumerate(steps) if step in {str(alarm.step) for alarm in marked}],
    )  # fmt: skip
    words = _words(known, probes)
    crosses = f" Crosses mark {', '.join(sorted({alarm.name for alarm in marked}))}." if marked else ""
    note = " ".join(filter(None, (quantity.sentence, words, scale.note))) + crosses
    alt = f"Heat map of {quantity.label} by layer and training step, with the loss below. {words}{crosses}"
    return Choice(quantity.label, note, alt, figure(*traces, layout=look), group)


def _words(known: dict[tuple[int, int], float], probes: Sequence[Probe]) -> str:
    """Return the smallest and the largest value with their places, for readers who cannot use the colours."""
    if not known:
        return "No layer has a value."

    def place(at: tuple[int, int]) -> str:
        return f"{number(known[at])} (step {probes[at[0]].step}, layer {at[1]})"

    return f"Here from {place(min(known, key=lambda at: known[at]))} to {place(max(known, key=lambda at: known[at]))}."


def _marks(alarms: Sequence[Alarm], steps: Sequence[str]) -> list[Figure]:
    """Return crosses at the cells where alarms began."""
    shown = [alarm for alarm in alarms if str(alarm.step) in steps]
    if not shown:
        return []
    return [{
        "type": "scatter", "mode": "markers", "name": "alarm", "showlegend": False,
        "x": [str(alarm.step) for alarm in shown], "y": [str(alarm.layer) for alarm in shown],
        "marker": {"color": ALARM, "symbol": "x", "size": 9, "line": {"color": "@raised", "width": 1}},
        "hoverinfo": "text", "hovertext": [
            f"step {alarm.step} · layer {alarm.layer}<br><b>{alarm.name}</b><br>value {number(alarm.value)}, threshold "
            f"{number(alarm.threshold)}" for alarm in shown
        ],
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
                "showlegend": True, "hoverinfo": "text", "hovertext": [
                    f"step {step}<br>{name} <b>{number(value)}</b>" for step, value in zip(steps, values, strict=True)
                ],
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
    steps = [str(probe.step) for probe in measured]
    trace = {
        "type": "scatter", "mode": "lines+markers", "x": steps, "y": [probe.depth for probe in measured],
        "line": {"color": MEASURED, "width": 2, "shape": "hv"}, "marker": {"color": MEASURED, "size": 7},
        "showlegend": False, "hoverinfo": "text",
        "hovertext": [f"step {probe.step}<br>effective depth <b>{probe.depth}</b>" for probe in measured],
    }  # fmt: skip
    layers = record.run.model.layers
    look = layout(
        xaxis=names_axis("training step", steps),
        yaxis={"title": {"text": "layers"}, "range": [0, layers + 0.5]},
        margin={"l": 60, "r": 8, "t": 24, "b": 44},
    )
    words = f"From {measured[0].depth} to {measured[-1].depth} of {counted(layers, 'layer')}."
    alt = f"Line chart of the measured effective depth by training step. {words}"
    return Chart((Choice("depth", words, alt, figure(trace, layout=look)),), 300)
