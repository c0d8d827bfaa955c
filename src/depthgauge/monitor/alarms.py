"""Alarms: conditions on the measures of a probe and of the probes before it."""

from collections.abc import Iterator

from depthgauge._format import counted, number
from depthgauge.results.monitor_labels import alarm_words, entropy_share, largest_score_range, layer_ranges
from depthgauge.results.monitor_options import AlarmThresholds
from depthgauge.results.monitor_record import Alarm, Probe, ProbedLayer


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
        now = {(alarm.name, alarm.layer) for alarm in found}
        new = [alarm for alarm in found if (alarm.name, alarm.layer) not in self.on]
        self.on = now
        return new

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
        score, share = largest_score_range(layer), entropy_share(layer)
        finite = layer.heads is None or None not in layer.heads.score_range
        if score is not None and finite:
            self.first.setdefault(layer.index, score)
        yield from self._entropy(probe, layer, score, share)
        yield from self._dead(probe, layer)
        yield from self._scores(probe, layer, score, finite)

    def _grown(self, layer: ProbedLayer, score: float | None) -> float:
        """Return the score range divided by that of the first probe."""
        first = self.first.get(layer.index, 0.0)
        return score / first if score is not None and first > 0 else 0.0

    def _entropy(self, probe: Probe, layer: ProbedLayer, score: float | None, share: float | None) -> Iterator[Alarm]:
        t, grown = self.thresholds, self._grown(layer, score)
        if t.entropy_share is None or share is None or share >= t.entropy_share or grown < t.entropy_growth:
            return
        evidence = (
            f"the entropy of its attention is {number(100 * share, 2)} % of that of uniform attention, below "
            f"{number(100 * t.entropy_share)} %, and its score range is {number(score)}, {number(grown)} times that of "
            "the first probe"
        )
        yield _alarm(probe, "entropy-collapse", layer, evidence, share, t.entropy_share)

    def _dead(self, probe: Probe, layer: ProbedLayer) -> Iterator[Alarm]:
        t = self.thresholds
        if t.dead_update is None:
            return
        idle = layer.update is not None and layer.update < t.dead_update
        self.quiet[layer.index] = self.quiet.get(layer.index, 0) + 1 if idle else 0
        if self.quiet[layer.index] < t.dead_probes:
            return
        evidence = (
            f"the layer changes its input by {number(layer.update, 2)} of its size, below {number(t.dead_update)}, in "
            f"{counted(self.quiet[layer.index], 'probe')} in a row"
        )
        yield _alarm(probe, "dead-layer", layer, evidence, layer.update, t.dead_update)

    def _scores(self, probe: Probe, layer: ProbedLayer, score: float | None, finite: bool) -> Iterator[Alarm]:
        t = self.thresholds
        if t.score_limit is None:
            return
        if not finite:
            yield _alarm(probe, "score-explosion", layer, "the scores are not finite", None, t.score_limit)
            return
        grown = self._grown(layer, score)
        if score is None or layer.heads is None or score <= t.score_limit or grown < t.score_growth:
            return
        heads = [k for k, value in enumerate(layer.heads.score_range) if value is not None and value > t.score_limit]
        evidence = (
            f"the score range of {counted(len(heads), 'head')} (first: head {heads[0]}) exceeds "
            f"{number(t.score_limit)}; the largest is {number(score)}, {number(grown)} times that of the first probe"
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
