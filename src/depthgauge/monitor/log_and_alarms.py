"""What follows a probe: alarms, and the places where a monitor writes.

An alarm is a condition on the measures of a probe and of the probes before it. A monitor always writes JSON lines, and
writes to TensorBoard and Weights & Biases where they are available.
"""

import logging
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from depthgauge.base.errors import DepthgaugeError, InputError, MissingPackageError, OutputError, unknown_name
from depthgauge.base.format import counted, number
from depthgauge.base.io import make_folder, write_text
from depthgauge.results.monitor_document import (
    QUANTITIES,
    alarm_words,
    entropy_share,
    largest_score_range,
    layer_ranges,
)
from depthgauge.results.monitor_record import (
    ALARMS,
    METRICS,
    RUN,
    Alarm,
    AlarmThresholds,
    MonitorOptions,
    MonitorRun,
    Probe,
    ProbedHeads,
    ProbedLayer,
    read_log,
)
from depthgauge.results.record import Record

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


@runtime_checkable
class Sink(Protocol):
    """Receives every probe with the alarms that began with it."""

    def write(self, probe: Probe, alarms: Sequence[Alarm]) -> None:
        """Write one probe."""

    def close(self) -> None:
        """Finish writing."""


class JsonLines:
    """The log directory. A line is written with one call and synchronized to disk, so that a crash loses none."""

    def __init__(self, folder: str | Path, run: MonitorRun) -> None:
        self.folder = Path(folder)
        make_folder(self.folder, "log directory")
        self.earlier = read_log(folder) if (self.folder / RUN).is_file() else None
        if self.earlier is None and (self.folder / METRICS).is_file():
            raise InputError(f"{folder} has a {METRICS} that no monitor wrote; give another log directory")
        mine, other = run.model, run.model if self.earlier is None else self.earlier.run.model
        if (mine.architecture, mine.layers, mine.heads) != (other.architecture, other.layers, other.heads):
            raise InputError(
                f"{folder} is the log of another model ({other.architecture}, {other.layers} layers); this one is "
                f"{mine.architecture} with {mine.layers} layers. Give another log directory"
            )
        for path in (self.folder / METRICS, self.folder / ALARMS):
            whole = path.read_bytes() if path.is_file() else b"\n"
            if not whole.endswith(b"\n"):  # a run was killed while it wrote this line
                os.truncate(path, whole.rfind(b"\n") + 1)
        self.write_run(run)

    def write_run(self, run: MonitorRun) -> None:
        """Write the head of the log."""
        write_text(self.folder / RUN, run.dump())

    def write(self, probe: Probe, alarms: Sequence[Alarm]) -> None:
        """Append the alarms, then the probe, so that a probe in the log has its alarms in the log."""
        if alarms:
            self._append(ALARMS, alarms)
        self._append(METRICS, [probe])

    def _append(self, name: str, records: Sequence[Record]) -> None:
        lines = "".join(record.json_line() for record in records)
        path = self.folder / name
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                size, data = os.fstat(handle).st_size, lines.encode("utf-8")
                try:
                    while data:
                        data = data[os.write(handle, data) :]
                except OSError:
                    if stat.S_ISREG(os.fstat(handle).st_mode):
                        os.ftruncate(handle, size)  # so that the next line does not continue half a line
                    raise
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Do nothing: every line is already on disk."""


class TensorBoard:
    """TensorBoard events: one scalar per quantity and layer, one histogram over all heads per head measure."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def write(self, probe: Probe, alarms: Sequence[Alarm]) -> None:
        """Add the scalars, histograms and alarms of one probe."""
        for name, value in scalars(probe):
            self.writer.add_scalar(name, value, probe.step)
        for measure, values in histograms(probe):
            self.writer.add_histogram(measure, np.array(values), probe.step)
        for alarm in alarms:
            self.writer.add_text(f"alarms/{alarm.name}", alarm.message, probe.step)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class WeightsAndBiases:
    """Weights & Biases: the same scalars and histograms, over their own step, in the run that is active."""

    STEP = "depthgauge/step"

    def __init__(self, library: Any) -> None:
        self.library = library
        library.define_metric(self.STEP)
        library.define_metric("depthgauge/*", step_metric=self.STEP)

    def write(self, probe: Probe, alarms: Sequence[Alarm]) -> None:
        """Log one probe, and an alert for each alarm."""
        values: dict[str, Any] = {f"depthgauge/{name}": value for name, value in scalars(probe)}
        for measure, entries in histograms(probe):
            values[f"depthgauge/{measure}"] = self.library.Histogram(entries)
        self.library.log({self.STEP: probe.step, **values})
        for alarm in alarms:
            self.library.alert(title=alarm.name, text=alarm.message)

    def close(self) -> None:
        """Do nothing: the run belongs to the user."""


def scalars(probe: Probe) -> Iterator[tuple[str, float]]:
    """Yield name and value of every number of a probe, such as `update/layer_03`."""
    for name, value in (("loss", probe.loss), ("probe_loss", probe.probe_loss), ("depth", probe.depth)):
        if value is not None:
            yield f"monitor/{name}", float(value)
    for key, quantity in QUANTITIES.items():
        for layer in probe.layers:
            if (found := quantity.of(layer)) is not None:
                yield f"{key}/layer_{layer.index:02d}", found


def histograms(probe: Probe) -> Iterator[tuple[str, list[float]]]:
    """Yield each measure of the heads with its values over all layers and heads."""
    for measure in ProbedHeads.__struct_fields__:
        rows = [getattr(layer.heads, measure) for layer in probe.layers if layer.heads is not None]
        values = [value for row in rows for value in row if value is not None]
        if values:
            yield f"heads/{measure}", values


def further_sinks(folder: Path, options: MonitorOptions) -> list[Sink]:
    """Return the sinks other than JSON lines that the options ask for.

    Raises:
        MissingPackageError: a sink is requested whose package is not installed.
        InputError: Weights & Biases is requested without an active run.
        OutputError: TensorBoard events cannot be written.
    """
    sinks: list[Sink] = []
    events, runs = "torch.utils.tensorboard", "wandb"
    if options.tensorboard is not False and (found := _installed(events, "tensorboard", bool(options.tensorboard))):
        try:
            sinks.append(TensorBoard(found.SummaryWriter(log_dir=str(folder))))
        except OSError as error:
            raise OutputError(f"cannot write TensorBoard events to {folder}: {error.strerror or error}") from error
    if options.wandb is not False and (library := _installed(runs, "wandb", bool(options.wandb))):
        if library.run is not None:
            sinks.append(WeightsAndBiases(library))
        elif options.wandb:
            raise InputError("wandb=True needs an active run; call wandb.init() before the monitor is made")
    return sinks


def _installed(module: str, name: str, required: bool) -> Any:
    """Return a module; None if it is not installed and not required."""
    try:
        return import_module(module)
    except ImportError as error:
        if required:
            raise MissingPackageError(f"{name}=True needs the package: pip install {name}") from error
        return None
