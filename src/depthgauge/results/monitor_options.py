"""The settings of a monitor: what is measured and where it goes, and the thresholds of the alarms."""

from typing import Any

from depthgauge.base.errors import InputError, require_count, require_positive
from depthgauge.results.record import Record


class AlarmThresholds(Record, frozen=True, kw_only=True):
    """When the alarms of a monitor fire. A threshold of None switches its alarm off.

    Attributes:
        rank_ratio: `rank-collapse` fires where the direction ratio of a state falls below this.
        dead_update: `dead-layer` fires where a layer changes its input by less than this share of its size, …
        dead_probes: … in this many probes in a row.
        entropy_share: `entropy-collapse` fires where the mean entropy of a layer's attention falls below this share of
            the entropy of uniform attention, …
        entropy_growth: … while its largest score range is at least this many times that of the first probe.
        score_limit: `score-explosion` fires where the score range of a head exceeds this, …
        score_growth: … and is at least this many times the largest score range of its layer in the first probe.
    """

    rank_ratio: float | None = 0.05
    dead_update: float | None = 1e-3
    dead_probes: int = 3
    entropy_share: float | None = 0.1
    entropy_growth: float = 2.0
    score_limit: float | None = 100.0
    score_growth: float = 4.0


class MonitorOptions(Record, frozen=True, kw_only=True):
    """What a monitor measures, and where it writes.

    Attributes:
        sequences: how many sequences of the probe batch are used.
        tokens: how many tokens of each sequence are used.
        weights_every: measure the sizes of the weights in every k-th probe.
        what_if_every: measure the loss without each block in every k-th probe; None never does.
        depth: in these probes, also remove blocks while the loss increases by at most this (of a model without a loss:
            while the final states change by at most this share of their norm), and record how many are left.
        tensorboard: whether to write TensorBoard events to the log directory; None does so if it is installed.
        wandb: whether to log to Weights & Biases; None does so if a run is active.
    """

    sequences: int = 2
    tokens: int = 256
    weights_every: int = 1
    what_if_every: int | None = None
    depth: float | None = None
    tensorboard: bool | None = None
    wandb: bool | None = None


class MonitorSettings(Record, frozen=True, kw_only=True):
    """The settings that a log records: every, options and thresholds of a monitor."""

    every: int
    options: MonitorOptions
    thresholds: AlarmThresholds

    def given(self) -> dict[str, Any]:
        """Return all settings by name, for a table."""
        return {"every": self.every, **self.options.to_json(), **self.thresholds.to_json()}


def check_options(options: object) -> MonitorOptions:
    """Return the options of a monitor, or the defaults for None; raise `InputError` for a value out of range."""
    options = MonitorOptions() if options is None else options
    if not isinstance(options, MonitorOptions):
        raise InputError(f"options must be MonitorOptions, got {type(options).__name__}; see depthgauge.MonitorOptions")
    require_count("sequences", options.sequences, "the number of sequences of the probe batch that are used")
    require_count("tokens", options.tokens, "the number of tokens of each probe sequence that are used", least=2)
    require_count("weights_every", options.weights_every, "the number of probes between two measurements of weights")
    if options.what_if_every is not None:
        require_count("what_if_every", options.what_if_every, "the number of probes between two measured what-ifs")
    if options.depth is not None:
        require_positive("depth", options.depth, "the largest increase of the probe loss when blocks are removed")
        if options.what_if_every is None:
            raise InputError(
                "depth is measured together with the what-ifs; set what_if_every to the number of probes between them"
            )
    return options


def check_thresholds(thresholds: object) -> AlarmThresholds:
    """Return the thresholds of the alarms, or the defaults for None; raise `InputError` for a value out of range."""
    thresholds = AlarmThresholds() if thresholds is None else thresholds
    if not isinstance(thresholds, AlarmThresholds):
        kind = type(thresholds).__name__
        raise InputError(f"thresholds must be AlarmThresholds, got {kind}; see depthgauge.results.AlarmThresholds")
    for name in ("rank_ratio", "dead_update", "entropy_share", "score_limit"):
        if getattr(thresholds, name) is not None:
            require_positive(name, getattr(thresholds, name), "the threshold of an alarm, or None to switch it off")
    for name in ("entropy_growth", "score_growth"):
        require_positive(name, getattr(thresholds, name), "a factor by which the score range must have grown")
    require_count("dead_probes", thresholds.dead_probes, "the number of probes in a row in which a layer does nothing")
    return thresholds
