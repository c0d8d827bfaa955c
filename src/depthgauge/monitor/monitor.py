"""The training monitor: measures a model on a probe batch every few steps, logs it, and raises alarms.

It is used by itself, or as a callback of transformers' `Trainer`.
"""

import logging
import numbers
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthgauge._version import __version__
from depthgauge.base.errors import DepthgaugeError, InputError, require_count
from depthgauge.base.format import counted
from depthgauge.monitor.log_and_alarms import (
    LOGGER,
    Action,
    Detector,
    JsonLines,
    Sink,
    act,
    check_action,
    further_sinks,
)
from depthgauge.monitor.measurement import combined, moved
from depthgauge.monitor.probes import ModelProbe, NetworkProbe, make_batch, make_inputs
from depthgauge.monitor.undisturbed import ProbeError, Processes, cause_of, rank
from depthgauge.results.monitor_record import (
    Alarm,
    AlarmThresholds,
    MonitorOptions,
    MonitorRecord,
    MonitorRun,
    MonitorSettings,
    Probe,
    check_options,
    check_thresholds,
)
from depthgauge.theory.network.network import SelfAttentionNetwork

EVERY = 200
LOG = "runs/depthgauge"


class Monitor:
    """Watch the depth of a model while it trains.

    Every `every` steps the model is evaluated on a small fixed batch. Per layer, the residual ratio, the size of the
    updates, block influence and weight sizes are recorded; per head, the range of the scores, the entropy, the distance
    from uniform attention and the attention on the first token. The training is not affected: the model, its
    gradients and all random number generators are left as they were.

    In a distributed run (DDP or FSDP2), every process makes a monitor and calls `step` at the same steps. Each measures
    its own probe batch, the measures are combined, and process 0 writes. A log directory that exists is continued.

    A probe that fails does not end the training: an error in the forward pass, too little memory, or a full disk. The
    logger `depthgauge.monitor` gets one warning per cause, `step` returns None, and the next probe tries again. If a
    probe fails in one process, it fails in all. The exception is a sharded model whose forward pass fails in some
    processes only: the others cannot finish it, and `step` raises after 30 minutes.

    Args:
        model: A transformers model or a `SelfAttentionNetwork`, also if it is compiled, wrapped in
            `DistributedDataParallel`, or sharded with `fully_shard`.
        probe: A batch of the model: what its data loader yields, or token ids of shape [batch, tokens]. For a
            `SelfAttentionNetwork`, input states of shape [batch, tokens, d].
        every: The number of steps between two probes.
        log: The log directory; `metrics.jsonl`, `alarms.jsonl` and `run.json` are written there.
        action: What to do with an alarm: `"log"` (to the logger `depthgauge.monitor`), `"warn"`, `"raise"` (an
            `AlarmError`), or a function that is called with the `Alarm`.
        thresholds: When alarms fire; see `AlarmThresholds`.
        options: What else to measure, on how many tokens, and where to write; see `MonitorOptions`.

    Raises:
        InputError: The model cannot be monitored, the probe does not fit it, or an argument is out of range.
        OutputError: The log cannot be written when the monitor is made. Later this is a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        probe: Any,
        every: int = EVERY,
        log: str | Path = LOG,
        *,
        action: Action = "warn",
        thresholds: AlarmThresholds | None = None,
        options: MonitorOptions | None = None,
    ) -> None:
        self.every = require_count("every", every, "the number of steps between two probes")
        self.log = Path(log)
        self.action = check_action(action)
        self.thresholds, self.options = check_thresholds(thresholds), check_options(options)
        self._probe = _make_probe(model, probe, self.options)
        self._detector = Detector(self.thresholds)
        self._sinks: list[Sink] = []
        self._segment, self._count, self._last = 0, 0, -1
        self._processes: Processes | None = None
        self._causes: set[str] = set()
        self._alarms: list[Alarm] = []
        self._is_main = rank() == 0
        self._json = JsonLines(self.log, self._run()) if self._is_main else None

    @property
    def alarms(self) -> list[Alarm]:
        """The alarms so far, oldest first. A resumed run includes those of the steps before it."""
        return list(self._alarms)

    @property
    def notes(self) -> tuple[str, ...]:
        """What cannot be measured for this model, or was not measured in a probe that failed, and why."""
        return tuple(self._probe.notes)

    def step(self, step: int, loss: float | Tensor | None = None) -> Probe | None:
        """Measure the model if `step` is a multiple of `every`; call this once per training step.

        Args:
            step: The number of the training step.
            loss: The training loss of this step, for the log: a number or a tensor, of which the mean is logged. A
                tensor is read only in steps that are measured.

        Returns:
            The record of the probe, or None if nothing was measured.

        Raises:
            AlarmError: An alarm began, and the action is `"raise"`.
            InputError: An argument is no step or no loss. In the first step: Weights & Biases was requested and has no
                active run.
            MissingPackageError: In the first step: a package that was requested is not installed.
            DepthgaugeError: In a distributed run, another process has ended or does not answer.
        """
        step = require_count("step", step, "the number of the training step", least=0)
        _check_loss(loss)
        if step % self.every or step == self._last:
            return None
        processes = self._processes or self._begin(step)
        self._last = step
        found = self._measure(step, loss, processes)
        if found is None:
            return None
        begun = self._detector.feed(found)
        self._alarms += begun
        for sink in self._sinks:
            self._attempt(f"the probe at step {step} was not logged", sink.write, found, begun)
        act(self.action, begun, self._is_main)
        return found

    def close(self) -> None:
        """Close the event files. The JSON lines are complete after every step, also without this."""
        for sink in self._sinks:
            self._attempt("a log was not closed", sink.close)
        self._sinks = [] if self._json is None else [self._json]

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        model = self._probe.describe()
        return (
            f"Monitor({model.architecture}, {counted(model.layers, 'layer')}, every {counted(self.every, 'step')}, "
            f"log={str(self.log)!r}, {counted(len(self._alarms), 'alarm')})"
        )

    def _run(self) -> MonitorRun:
        settings = MonitorSettings(every=self.every, options=self.options, thresholds=self.thresholds)
        return MonitorRun(version=__version__, model=self._probe.describe(), settings=settings, notes=self.notes)

    def _begin(self, step: int) -> Processes:
        """Open the sinks, and continue from what the log has recorded before this step. All processes do the same."""
        processes = Processes()
        earlier: MonitorRecord | None = None
        failed: DepthgaugeError | None = None
        if self._json is not None:
            try:
                self._sinks = [self._json, *further_sinks(self.log, self.options)]
                earlier = self._json.earlier
            except DepthgaugeError as error:
                failed = error
        earlier, failed = processes.exchanged((earlier, failed))[0]
        if failed is not None:
            raise failed
        if earlier is not None and earlier.probes:
            self._segment = 1 + max(probe.segment for probe in earlier.probes)
            self._alarms = [alarm for alarm in earlier.alarms if alarm.step < step]
            for probe in earlier.probes:
                if probe.step < step:
                    self._detector.feed(probe)
        self._processes = processes
        return processes

    def _measure(self, step: int, loss: float | Tensor | None, processes: Processes) -> Probe | None:
        """Measure the model and return the record, equal in all processes; None in all if it failed in one."""
        options, started = self.options, time.perf_counter()
        skip = options.what_if_every is not None and self._count % options.what_if_every == 0
        weights = self._count % options.weights_every == 0
        notes = len(self._probe.notes)
        self._count += 1
        try:
            with processes.failing_together():
                own = self._probe.measure(weights, skip, options.depth if skip else None, processes)
                found = combined(processes.exchanged(moved(own, loss, self._probe.device)))
        except ProbeError as error:
            if self._report(f"nothing was measured at step {step}", str(error)):
                self._probe.notes.append(f"nothing was measured at step {step}: {error}")
            found = None
        if self._json is not None and len(self._probe.notes) > notes:
            self._attempt("the notes were not logged", self._json.write_run, self._run())
        return None if found is None else found.record(step, self._segment, time.perf_counter() - started)

    def _attempt(self, otherwise: str, write: Callable[..., None], *arguments: Any) -> None:
        """Write to a log; report an error, which must not end the training."""
        try:
            write(*arguments)
        except Exception as error:
            self._report(otherwise, cause_of(error))

    def _report(self, what: str, cause: str) -> bool:
        """Warn about a cause once, and return whether it is new; numbers in it do not make it another one."""
        kind = re.sub(r"0x[\da-f]+|\d[\d.]*", "0", cause)
        if kind in self._causes:
            return False
        self._causes.add(kind)
        if self._is_main:
            after = "The training goes on, and the next probe tries again. This cause is not reported again."
            logging.getLogger(LOGGER).warning("%s: %s. %s", what, cause.rstrip("."), after)
        return True


def _check_loss(loss: object) -> None:
    """Raise `InputError` if a training loss is neither None nor a real number nor a tensor of real numbers."""
    shown = f"{loss!r:.60} of type {type(loss).__name__}"
    if isinstance(loss, Tensor):
        shown = f"a tensor of {loss.dtype} with shape {list(loss.shape)}"
        if loss.numel() and not loss.is_complex() and loss.dtype != torch.bool:
            return
    elif loss is None or (isinstance(loss, numbers.Real) and not isinstance(loss, bool)):
        return
    raise InputError(
        f"loss must be a number or a tensor of numbers, got {shown}; give the loss of the training step, or None"
    )


def _make_probe(model: object, probe: Any, options: MonitorOptions) -> ModelProbe | NetworkProbe:
    """Return the probe of a model, by its kind."""
    plain = unwrapped(model)
    if isinstance(plain, SelfAttentionNetwork):
        return NetworkProbe(plain, make_inputs(plain, probe, options.sequences, options.tokens))
    if isinstance(plain, nn.Module) and hasattr(plain, "set_attn_implementation") and hasattr(plain, "config"):
        return ModelProbe(plain, make_batch(probe, options.sequences, options.tokens))
    raise InputError(
        f"model must be a transformers model or a SelfAttentionNetwork, got {type(model).__name__}; a part of a larger "
        "module can be monitored on its own"
    )


def unwrapped(model: object) -> object:
    """Return a model without the wrappers of `torch.compile` and of data parallelism.

    Raises:
        InputError: The model is sharded with FSDP1, whose parts cannot run on their own.
    """
    while isinstance(model, nn.Module):
        if type(model).__name__ == "FullyShardedDataParallel":
            raise InputError(
                "a model wrapped in FullyShardedDataParallel cannot be monitored; shard it with "
                "torch.distributed.fsdp.fully_shard instead"
            )
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if inner is None:
            break
        model = inner
    return model


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
