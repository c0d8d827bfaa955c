"""Records of a monitored training run, and the reader of its log directory.

A log directory has three files. `run.json` describes the model and the settings. `metrics.jsonl` has one `Probe` per
line, and `alarms.jsonl` one `Alarm`. Lines are only ever appended. A run that is resumed starts a new segment: what
earlier segments recorded at its first step or later is superseded, because the resumed run repeats those steps.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from depthgauge.base.errors import InputError, require_count, require_path, require_positive
from depthgauge.base.format import counted
from depthgauge.base.frames import frame
from depthgauge.results.record import Count, Measured, Record, ResultError, load_document, read

# --- The settings: what is measured and where it goes, and the thresholds of the alarms -------------------------------


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


# --- The log ----------------------------------------------------------------------------------------------------------

MONITOR_SCHEMA = "depthgauge.monitor/1"
RUN, METRICS, ALARMS = "run.json", "metrics.jsonl", "alarms.jsonl"
"""The files of a log directory."""
MONITOR_ADVICE = "give the log directory of a `depthgauge.Monitor`"


class ProbedHeads(Record, frozen=True, kw_only=True):
    """The attention of one layer's heads on the probe: one entry per head in each list."""

    score_range: tuple[Measured, ...]
    entropy: tuple[Measured, ...]
    tv_mean: tuple[Measured, ...]
    first_mass: tuple[Measured, ...]


class ProbedLayer(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One layer at one step. What was not measured is None; docs/formats.md defines every key."""

    index: Count
    residual_ratio: Measured = None
    direction_ratio: Measured = None
    update: Measured = None
    attention_update: Measured = None
    mlp_update: Measured = None
    block_influence: Measured = None
    eta: Measured = None
    qk_norm: Measured = None
    ov_norm: Measured = None
    uniform_entropy: Measured = None
    skip_loss: Measured = None
    heads: ProbedHeads | None = None


class Probe(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What the monitor measured at one step.

    Attributes:
        step: the training step.
        segment: 0 in the first run of a log, 1 after it was resumed, and so on.
        loss: the training loss that was passed to the monitor.
        probe_loss: the loss of the model on the probe batch; None for a model without a loss.
        depth: the measured effective depth, where it was measured.
        seconds: how long the measurement took.
        layers: one record per layer.
    """

    step: Count
    segment: Count = 0
    loss: Measured = None
    probe_loss: Measured = None
    depth: Count | None = None
    seconds: Measured = None
    layers: tuple[ProbedLayer, ...]


class Alarm(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One alarm.

    Attributes:
        step: the training step.
        name: `rank-collapse`, `entropy-collapse`, `dead-layer` or `score-explosion`.
        layer: the layer, from 0.
        message: the evidence, and what to do.
        value: the measured value; None if it is not finite.
        threshold: the threshold that it crossed.
        segment: the segment of the log, as in `Probe`.
    """

    step: Count
    name: str
    layer: Count
    message: str
    value: Measured = None
    threshold: Measured = None
    segment: Count = 0


class MonitoredModel(Record, frozen=True, kw_only=True):
    """The model that is trained. `objective` is `loss` or `states`; `heads` has the number of heads per layer."""

    name: str
    architecture: str
    objective: str
    layers: Count
    heads: tuple[Count, ...]
    parameters: Count
    dtype: str = ""
    device: str = ""
    sequences: Count
    tokens: Count
    ranks: Count = 1


class MonitorRun(Record, frozen=True, kw_only=True):
    """The head of a log: what is trained, how it is measured, and remarks about what is not."""

    schema: str = MONITOR_SCHEMA
    version: str
    model: MonitoredModel
    settings: MonitorSettings
    notes: tuple[str, ...] = ()


class MonitorRecord(Record, frozen=True, kw_only=True):
    """The log of a monitor: its path and name, its head, all probes by step, and all alarms."""

    log: str
    name: str
    run: MonitorRun
    probes: tuple[Probe, ...]
    alarms: tuple[Alarm, ...]

    def summary(self) -> Mapping[str, str]:
        """Return the name and the number of probes and alarms."""
        return {"name": repr(self.name), "probes": str(len(self.probes)), "alarms": counted(len(self.alarms), "alarm")}

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with one row per probe and layer; measures of heads are lists.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows = []
        for probe in self.probes:
            for layer in probe.layers:
                row = layer.to_json()
                heads = row.pop("heads", None) or {}
                rows.append({"step": probe.step, "loss": probe.loss, "layer": row.pop("index"), **row, **heads})
        return frame(rows)


def read_log(path: str | Path) -> MonitorRecord:
    """Read the log of a monitor, also of a run that is going on or was killed.

    A last line without an end is ignored: the writer was interrupted in it.

    Args:
        path: the log directory.

    Raises:
        ResultError: the directory is not a log, or a line in it is damaged; the message names the place.
    """
    folder = require_path("path", path)
    if not (folder / RUN).is_file():
        raise ResultError(f"{path} is not the log of a monitor: it contains no {RUN}; {MONITOR_ADVICE}")
    document = load_document(folder / RUN, MONITOR_ADVICE)
    run = read(document, MonitorRun, str(folder / RUN), MONITOR_ADVICE)
    probes, alarms = read_lines(folder / METRICS, Probe), read_lines(folder / ALARMS, Alarm)
    return MonitorRecord(
        log=str(path), name=folder.resolve().name, run=run, probes=kept(probes, probes), alarms=kept(alarms, probes)
    )


Line = TypeVar("Line", Probe, Alarm)


def read_lines(path: Path, kind: type[Line]) -> list[Line]:
    """Return the records of a JSON lines file; a file that does not exist has none."""
    whole = path.read_bytes() if path.is_file() else b""
    found = []
    for number, line in enumerate(whole[: whole.rfind(b"\n") + 1].splitlines(), 1):
        place = f"{path}:{number}"
        try:
            document = json.loads(line)
        except ValueError as error:
            raise ResultError(f"{place} is not JSON ({error}); {MONITOR_ADVICE}") from error
        found.append(read(document, kind, place, MONITOR_ADVICE))
    return found


def kept(lines: Sequence[Line], probes: Sequence[Probe]) -> tuple[Line, ...]:
    """Return the lines that no later segment supersedes, by step; a segment starts with the first of its probes."""
    starts: dict[int, int] = {}
    for probe in probes:
        starts[probe.segment] = min(probe.step, starts.get(probe.segment, probe.step))
    valid = [line for line in lines if all(line.step < at for k, at in starts.items() if k > line.segment)]
    return tuple(sorted(valid, key=lambda line: line.step))
