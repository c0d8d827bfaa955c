"""Names of the alarms and of the quantities of a monitored run, with the text that logs and pages show for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from depthgauge._format import counted, number
from depthgauge.results.monitor_record import Alarm, MonitorRecord, ProbedLayer


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


@dataclass(frozen=True)
class Quantity:
    """One quantity of the page: a number per layer and step.

    - `label`, `sentence`: the name and the definition
    - `of`: reads the value from a layer's record
    - `top`: the largest possible value where there is one
    - `alarms`: the alarms that judge this quantity
    """

    label: str
    sentence: str
    of: Callable[[ProbedLayer], float | None]
    top: float = 0.0
    alarms: tuple[str, ...] = ()


def _head(name: str, combine: Callable[[Sequence[float]], float]) -> Callable[[ProbedLayer], float | None]:
    def of(layer: ProbedLayer) -> float | None:
        values = () if layer.heads is None else getattr(layer.heads, name)
        known = [value for value in values if value is not None]
        return combine(known) if known else None

    return of


def mean(values: Sequence[float]) -> float:
    """Return the mean of a few numbers."""
    return sum(values) / len(values)


def entropy_share(layer: ProbedLayer) -> float | None:
    """Return the mean entropy of a layer's heads as a share of the entropy of uniform attention."""
    entropy = _head("entropy", mean)(layer)
    return None if entropy is None or not layer.uniform_entropy else entropy / layer.uniform_entropy


largest_score_range = _head("score_range", max)

QUANTITIES: Mapping[str, Quantity] = {
    "direction_ratio": Quantity(
        "direction ratio",
        "‖Res X‖F/‖X‖F of the state after the layer, with every token scaled to length 1 and Res X = X minus the mean "
        "token: 0 if all tokens point in one direction.",
        lambda layer: layer.direction_ratio,
        1.0,
        ("rank-collapse",),
    ),
    "residual_ratio": Quantity(
        "residual ratio",
        "‖Res X‖F/‖X‖F of the state after the layer, with Res X = X minus the mean token: 0 if all tokens are equal.",
        lambda layer: layer.residual_ratio,
        1.0,
    ),
    "update": Quantity(
        "update of the block",
        "Size of what the layer changes divided by the size of its input, mean over tokens.",
        lambda layer: layer.update,
        0.0,
        ("dead-layer",),
    ),
    "attention_update": Quantity(
        "update of attention",
        "Size of what attention adds divided by the size of the stream that it reads, mean over tokens.",
        lambda layer: layer.attention_update,
    ),
    "mlp_update": Quantity(
        "update of the MLP",
        "Size of what the MLP adds divided by the size of the stream that it reads, mean over tokens.",
        lambda layer: layer.mlp_update,
    ),
    "block_influence": Quantity(
        "block influence (ShortGPT)",
        "1 − mean cosine of the states before and after the layer.",
        lambda layer: layer.block_influence,
    ),
    "score_range": Quantity(
        "score range, largest head",
        "The largest range (max − min) of a row of scores, over the heads of the layer.",
        largest_score_range,
        0.0,
        ("score-explosion",),
    ),
    "entropy": Quantity(
        "entropy, mean head",
        "Entropy of a row of attention in nats, mean over rows and heads.",
        _head("entropy", mean),
    ),
    "entropy_share": Quantity(
        "entropy as a share of uniform attention",
        "Mean entropy of the heads divided by the entropy of uniform attention: 1 averages, 0 selects one token.",
        entropy_share,
        1.0,
        ("entropy-collapse",),
    ),
    "least_entropy": Quantity(
        "entropy, sharpest head",
        "The smallest mean entropy of a head of the layer, in nats.",
        _head("entropy", min),
    ),
    "tv_mean": Quantity(
        "distance from averaging, mean head",
        "Total variation distance between a row of attention and uniform attention, mean over rows and heads.",
        _head("tv_mean", mean),
        1.0,
    ),
    "first_mass": Quantity(
        "attention on the first token, mean head",
        "Attention weight on the first visible token, mean over rows and heads.",
        _head("first_mass", mean),
        1.0,
    ),
    "eta": Quantity(
        "largest weight η",
        "The largest |entry| of the query, key and value–output matrices of the layer's heads.",
        lambda layer: layer.eta,
    ),
    "qk_norm": Quantity(
        "query–key circuit, largest head",
        "The largest spectral norm of QKᵀ over the heads of the layer.",
        lambda layer: layer.qk_norm,
    ),
    "ov_norm": Quantity(
        "value–output circuit, largest head",
        "The largest spectral norm of the value–output map over the heads of the layer.",
        lambda layer: layer.ov_norm,
    ),
    "skip_loss": Quantity(
        "cost of skipping the block",
        "Increase of the probe loss (of a model without a loss: relative change of the final states) if the layer "
        "returns its input.",
        lambda layer: layer.skip_loss,
    ),
}
"""Quantity → label, in the order in which they are shown."""


def alarm_words(name: str, where: str, evidence: str) -> str:
    """Return the message of an alarm: its name and place, the evidence, and the advice."""
    return f"{name} {where}: {evidence}. {ALARM_LABELS[name].advice}"


def layer_ranges(layers: Sequence[int]) -> str:
    """Return layers in words, with consecutive ones joined.

    >>> layer_ranges([3]), layer_ranges([0, 1, 2, 5])
    ('layer 3', 'layers 0–2, 5')
    """
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    return f"layer {words}" if len(set(layers)) == 1 else f"layers {words}"


def monitor_verdict(record: MonitorRecord) -> str:
    """State how long the run was watched, how the loss changed, and which alarms were raised first."""
    if not record.probes:
        return "nothing was measured yet"
    first, last = record.probes[0], record.probes[-1]
    parts = [f"{counted(len(record.probes), 'probe')} from step {first.step} to step {last.step}"]
    losses = [probe.loss for probe in record.probes if probe.loss is not None]
    if losses:
        parts.append(f"loss {number(losses[0])} → {number(losses[-1])}")
    parts += _alarm_parts(record.alarms) or ["no alarm"]
    return "; ".join(parts)


def _alarm_parts(alarms: Sequence[Alarm]) -> list[str]:
    parts = []
    for name in ALARM_LABELS:
        found = [alarm for alarm in alarms if alarm.name == name]
        if found:
            where = layer_ranges([alarm.layer for alarm in found])
            parts.append(f"{name} at {where}, first at step {min(alarm.step for alarm in found)}")
    return parts


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Residual stream": (
        "direction_ratio", "residual_ratio", "update", "attention_update", "mlp_update", "block_influence",
    ),
    "Attention": ("score_range", "entropy", "entropy_share", "least_entropy", "tv_mean", "first_mass"),
    "Weights": ("eta", "qk_norm", "ov_norm"),
    "What-ifs": ("skip_loss",),
}  # fmt: skip
"""Group of quantities → their names, in the order of `QUANTITIES`."""
