"""The monitor as a callback of transformers' `Trainer`."""

from pathlib import Path
from typing import Any

from depthgauge.monitor.alarms import Action, check_action
from depthgauge.monitor.monitor import EVERY, Monitor
from depthgauge.results.monitor_options import AlarmThresholds, MonitorOptions, check_options, check_thresholds
from depthgauge.results.monitor_record import Alarm


class MonitorCallback:
    """A callback of transformers' `Trainer` that runs a `Monitor`: `Trainer(..., callbacks=[MonitorCallback(batch)])`.

    The model is measured before the first step, and whenever the number of optimizer steps is a multiple of `every`.
    The loss in the log is the last one that the trainer has logged.

    Args:
        probe: A batch of the model, as in `Monitor`.
        every: The number of optimizer steps between two probes.
        log: The log directory; by default `monitor` in the output directory of the trainer.
        action: What to do with an alarm, as in `Monitor`.
        thresholds: When alarms fire; see `AlarmThresholds`.
        options: What else to measure, on how many tokens, and where to write; see `MonitorOptions`.

    Attributes:
        monitor: The monitor; None before the training begins.
    """

    def __init__(
        self,
        probe: Any,
        every: int = EVERY,
        log: str | Path | None = None,
        *,
        action: Action = "warn",
        thresholds: AlarmThresholds | None = None,
        options: MonitorOptions | None = None,
    ) -> None:
        self.probe, self.every, self.log = probe, every, log
        self.action, self.thresholds = check_action(action), check_thresholds(thresholds)
        self.options = check_options(options)
        self.monitor: Monitor | None = None
        self._loss: float | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms so far, oldest first."""
        return [] if self.monitor is None else self.monitor.alarms

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Make the monitor and measure the model before the first step."""
        log = Path(args.output_dir) / "monitor" if self.log is None else Path(self.log)
        chosen: dict[str, Any] = {"action": self.action, "thresholds": self.thresholds, "options": self.options}
        self.monitor = Monitor(others["model"], self.probe, self.every, log, **chosen)
        self.monitor.step(int(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure the model after an optimizer step."""
        if self.monitor is not None:
            self.monitor.step(int(state.global_step), self._loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Keep the training loss that the trainer logs."""
        if logs and "loss" in logs:
            self._loss = float(logs["loss"])

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close the event files."""
        if self.monitor is not None:
            self.monitor.close()

    def __getattr__(self, name: str) -> Any:
        """Ignore the other events of the trainer, which calls a method for every event."""
        if name.startswith("on_"):
            return lambda *args, **others: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
