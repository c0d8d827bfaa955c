"""Where a monitor writes: JSON lines always, TensorBoard and Weights & Biases where they are available."""

import os
import stat
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from depthgauge.base.errors import InputError, MissingPackageError, OutputError
from depthgauge.base.io import write_text
from depthgauge.results.monitor_labels import QUANTITIES
from depthgauge.results.monitor_options import MonitorOptions
from depthgauge.results.monitor_record import ALARMS, METRICS, RUN, Alarm, MonitorRun, Probe, ProbedHeads, read_log
from depthgauge.results.record import Record


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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write {folder}: {error.strerror or error}") from error
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
