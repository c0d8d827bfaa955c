"""Names of the alarms and of the quantities of a monitored run, with the text that logs and pages show for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean as mean

from depthgauge._format import counted, number
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


@dataclass(frozen=True)
class Quantity:
    """One quantity of the page: a number per layer and step.

    - `label`, `sentence`: the name and the definition
    - `read`: reads the value from a layer's record; None reads the attribute with the name of the quantity
    - `top`: the largest possible value where there is one
    - `alarms`: the alarms that judge this quantity
    """

    label: str
    sentence: str
    read: Callable[[ProbedLayer], float | None] | None = None
    top: float = 0.0
    alarms: tuple[str, ...] = ()

    def of(self, layer: ProbedLayer) -> float | None:
        """Return the value of a layer."""
        assert self.read is not None
        return self.read(layer)


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

_QUANTITIES: Mapping[str, Quantity] = {
    "direction_ratio": Quantity(
        "direction ratio",
        "‖Res X‖F/‖X‖F of the state after the layer, with every token scaled to length 1 and Res X = X minus the mean "
        "token: 0 if all tokens point in one direction.",
        top=1.0,
        alarms=("rank-collapse",),
    ),
    "residual_ratio": Quantity(
        "residual ratio",
        "‖Res X‖F/‖X‖F of the state after the layer, with Res X = X minus the mean token: 0 if all tokens are equal.",
        top=1.0,
    ),
    "update": Quantity(
        "update of the block",
        "Size of what the layer changes divided by the size of its input, mean over tokens.",
        alarms=("dead-layer",),
    ),
    "attention_update": Quantity(
        "update of attention",
        "Size of what attention adds divided by the size of the stream that it reads, mean over tokens.",
    ),
    "mlp_update": Quantity(
        "update of the MLP",
        "Size of what the MLP adds divided by the size of the stream that it reads, mean over tokens.",
    ),
    "block_influence": Quantity(
        "block influence (ShortGPT)",
        "1 − mean cosine of the states before and after the layer.",
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
    ),
    "qk_norm": Quantity(
        "query–key circuit, largest head",
        "The largest spectral norm of QKᵀ over the heads of the layer.",
    ),
    "ov_norm": Quantity(
        "value–output circuit, largest head",
        "The largest spectral norm of the value–output map over the heads of the layer.",
    ),
    "skip_loss": Quantity(
        "cost of skipping the block",
        "Increase of the probe loss (of a model without a loss: relative change of the final states) if the layer "
        "returns its input.",
    ),
}
QUANTITIES = {name: replace(quantity, read=quantity.read or attrgetter(name)) for name, quantity in _QUANTITIES.items()}
"""Quantity → label, in the order in which they are shown."""


def alarm_words(name: str, where: str, evidence: str) -> str:
    """Return the message of an alarm: its name and place, the evidence, and the advice."""
    return f"{name} {where}: {evidence}. {ALARM_LABELS[name].advice}"


def layer_ranges(layers: Sequence[int]) -> str:
    """Return layers in words, with consecutive ones joined.

    >>> layer_ranges([3]), layer_ranges([0, 1, 2, 5])
    ('layer 3', 'layers 0–2, 5')
    """
    found = set(layers)
    starts, ends = (sorted(layer for layer in found if layer + step not in found) for step in (-1, 1))
    words = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))
    return f"layer {words}" if len(found) == 1 else f"layers {words}"


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


GROUPS: Mapping[str, tuple[str, ...]] = {
    "Residual stream": (
        "direction_ratio", "residual_ratio", "update", "attention_update", "mlp_update", "block_influence",
    ),
    "Attention": ("score_range", "entropy", "entropy_share", "least_entropy", "tv_mean", "first_mass"),
    "Weights": ("eta", "qk_norm", "ov_norm"),
    "What-ifs": ("skip_loss",),
}  # fmt: skip
"""Group of quantities → their names, in the order of `QUANTITIES`."""
