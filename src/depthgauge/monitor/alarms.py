"""Alarms: conditions on the measures of a probe and of the probes before it, and what happens when one is raised."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence

from depthgauge.base.errors import DepthgaugeError, InputError, unknown_name
from depthgauge.base.format import counted, number
from depthgauge.results.monitor_labels import alarm_words, entropy_share, largest_score_range, layer_ranges
from depthgauge.results.monitor_options import AlarmThresholds
from depthgauge.results.monitor_record import Alarm, Probe, ProbedLayer

Action = str | Callable[[Alarm], None]
"""One of `ACTIONS`, or a function of an alarm."""
ACTIONS = ("log", "warn", "raise")
LOGGER = "depthgauge.monitor"
"""The name of the logger that the action `log` writes to."""


class AlarmWarning(UserWarning):
    """The warning that the action `warn` of a monitor gives."""


class AlarmError(DepthgaugeError):
    """The error that the action `raise` of a monitor raises. All alarms are in the log before.

    Attributes:
        alarms: the alarms that began with the last probe.
    """

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        self.alarms = tuple(alarms)
        more = f" ({len(alarms) - 1} more alarms are in the log)" if len(alarms) > 1 else ""
        super().__init__(f"{alarms[0].message}{more}")


def check_action(action: object) -> Action:
    """Return the action if it is one; raise `InputError` otherwise."""
    if callable(action):
        return action
    if not isinstance(action, str):
        raise InputError(
            f"action must be one of {', '.join(ACTIONS)} or a function of an alarm, got {type(action).__name__}"
        )
    if action not in ACTIONS:
        raise unknown_name("action", action, ACTIONS)
    return action


def act(action: Action, alarms: Sequence[Alarm], is_main: bool) -> None:
    """Report the alarms that began with a probe, in the main process; each process raises, so that none waits."""
    if not alarms:
        return
    if action == "raise":
        raise AlarmError(alarms)
    if not is_main:
        return
    for alarm in alarms:
        if callable(action):
            action(alarm)
        elif action == "log":
            logging.getLogger(LOGGER).warning(alarm.message)
        else:
            warnings.warn(alarm.message, AlarmWarning, stacklevel=4)


class Detector:
    """Checks every probe, in the order of the steps, and returns the alarms that begin with it.

    An alarm is returned when its condition becomes true for a layer, and again only after it was false in between. The
    state depends on the probes alone, so that a resumed run continues by feeding the recorded probes.
    """

    def __init__(self, thresholds: AlarmThresholds) -> None:
        self.thresholds = thresholds
        self.first: dict[int, float] = {}
        self.quiet: dict[int, int] = {}
        self.on: set[tuple[str, int]] = set()

    def feed(self, probe: Probe) -> list[Alarm]:
        """Return the alarms that begin with this probe."""
        found = [*self._ranks(probe), *(alarm for layer in probe.layers for alarm in self._layer(probe, layer))]
        before, self.on = self.on, {(alarm.name, alarm.layer) for alarm in found}
        return [alarm for alarm in found if (alarm.name, alarm.layer) not in before]

    def _ranks(self, probe: Probe) -> Iterator[Alarm]:
        """Yield `rank-collapse` for the first layer after which the tokens have one direction."""
        limit = self.thresholds.rank_ratio
        if limit is None:
            return
        low = [x for x in probe.layers if x.direction_ratio is not None and x.direction_ratio < limit]
        if not low:
            return
        least = min(low, key=lambda layer: layer.direction_ratio or 0.0)
        evidence = (
            f"the direction ratio after {layer_ranges([x.index for x in low])} is down to "
            f"{number(least.direction_ratio)}, below {number(limit)}, so the tokens are almost equal"
        )
        yield _alarm(probe, "rank-collapse", low[0], evidence, low[0].direction_ratio, limit)

    def _layer(self, probe: Probe, layer: ProbedLayer) -> Iterator[Alarm]:
        """Yield the alarms of one layer."""
        t, index, score, share = self.thresholds, layer.index, largest_score_range(layer), entropy_share(layer)
        finite = layer.heads is None or None not in layer.heads.score_range
        if score is not None and finite:
            self.first.setdefault(index, score)
        first = self.first.get(index, 0.0)
        grown = score / first if score is not None and first > 0 else 0.0
        if t.entropy_share is not None and share is not None and share < t.entropy_share and grown >= t.entropy_growth:
            evidence = (
                f"the entropy of its attention is {number(100 * share, 2)} % of that of uniform attention, below "
                f"{number(100 * t.entropy_share)} %, and its score range is {number(score)}, {number(grown)} times "
                "that of the first probe"
            )
            yield _alarm(probe, "entropy-collapse", layer, evidence, share, t.entropy_share)
        if t.dead_update is not None:
            idle = layer.update is not None and layer.update < t.dead_update
            self.quiet[index] = self.quiet.get(index, 0) + 1 if idle else 0
            if self.quiet[index] >= t.dead_probes:
                evidence = (
                    f"the layer changes its input by {number(layer.update, 2)} of its size, below "
                    f"{number(t.dead_update)}, in {counted(self.quiet[index], 'probe')} in a row"
                )
                yield _alarm(probe, "dead-layer", layer, evidence, layer.update, t.dead_update)
        if t.score_limit is None:
            return
        if not finite:
            yield _alarm(probe, "score-explosion", layer, "the scores are not finite", None, t.score_limit)
        elif score is not None and layer.heads is not None and score > t.score_limit and grown >= t.score_growth:
            ranges = enumerate(layer.heads.score_range)
            heads = [head for head, value in ranges if value is not None and value > t.score_limit]
            evidence = (
                f"the score range of {counted(len(heads), 'head')} (first: head {heads[0]}) exceeds "
                f"{number(t.score_limit)}; the largest is {number(score)}, {number(grown)} times that of the first "
                "probe"
            )
            yield _alarm(probe, "score-explosion", layer, evidence, score, t.score_limit)


def _alarm(probe: Probe, name: str, layer: ProbedLayer, evidence: str, value: float | None, threshold: float) -> Alarm:
    where = f"at step {probe.step} in layer {layer.index}"
    return Alarm(
        step=probe.step,
        name=name,
        layer=layer.index,
        message=alarm_words(name, where, evidence),
        value=value,
        threshold=threshold,
        segment=probe.segment,
    )
