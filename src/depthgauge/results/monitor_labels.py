"""Names of the alarms and of the quantities of a monitored run, with the text that logs and pages show for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean as mean

from depthgauge.base.format import counted, number, ranges
from depthgauge.results.monitor_record import MonitorRecord, ProbedLayer


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
