"""TensorBoard and Weights & Biases receive the numbers of the log; their packages are replaced by recorders."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from tiny_training import probe_ids, tiny_llama

import depthgauge as dg
from depthgauge.base.errors import MissingPackageError


class Writer:
    made: ClassVar[list["Writer"]] = []

    def __init__(self, log_dir: str) -> None:
        self.log_dir, self.calls, self.closed = log_dir, [], False
        Writer.made.append(self)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.calls.append(("scalar", tag, value, step))

    def add_histogram(self, tag: str, values: Any, step: int) -> None:
        assert isinstance(values, np.ndarray)  # a list is an error in the real writer
        self.calls.append(("histogram", tag, values, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.calls.append(("text", tag, text, step))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake: Any = ModuleType("wandb")
    fake.calls = []
    fake.run = SimpleNamespace(name="run")
    fake.Histogram = tuple
    fake.define_metric = lambda *names, **others: fake.calls.append(("define", *names))
    fake.log = lambda values: fake.calls.append(("log", values))
    fake.alert = lambda title, text: fake.calls.append(("alert", title))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def monitored(log: Path, **options: Any) -> tuple[dg.Monitor, dg.results.Probe]:
    thresholds = dg.results.AlarmThresholds(dead_update=100.0, dead_probes=1)
    monitor = dg.Monitor(
        tiny_llama(layers=2), probe_ids(), 1, log, action="log", thresholds=thresholds,
        options=dg.results.MonitorOptions(**options),
    )  # fmt: skip
    found = monitor.step(0, loss=2.5)
    assert found is not None
    return monitor, found


def test_tensorboard(tmp_path: Path, tensorboard: None) -> None:
    monitor, probe = monitored(tmp_path)
    (writer,) = Writer.made
    assert writer.log_dir == str(tmp_path)
    scalars = {tag: value for kind, tag, value, step in writer.calls if kind == "scalar"}
    assert scalars["monitor/loss"] == 2.5
    assert scalars["update/layer_01"] == probe.layers[1].update
    assert probe.layers[1].heads is not None
    assert scalars["score_range/layer_01"] == max(
        value for value in probe.layers[1].heads.score_range if value is not None
    )
    histograms = {tag: values for kind, tag, values, _ in writer.calls if kind == "histogram"}
    assert len(histograms["heads/entropy"]) == 8
    assert sum(kind == "text" for kind, *_ in writer.calls) == 2
    assert not writer.closed
    monitor.close()
    assert writer.closed
    monitor.step(1)  # the JSON lines are still written
    assert len(dg.results.read_log(tmp_path).probes) == 2


def test_tensorboard_can_be_refused(tmp_path: Path, tensorboard: None) -> None:
    monitored(tmp_path, tensorboard=False)
    assert Writer.made == []


def test_a_missing_package_is_named_only_if_it_was_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monitored(tmp_path / "a")
    with pytest.raises(MissingPackageError, match="pip install tensorboard"):
        monitored(tmp_path / "b", tensorboard=True)
    with pytest.raises(MissingPackageError, match="pip install wandb"):
        monitored(tmp_path / "c", wandb=True)


def test_weights_and_biases(tmp_path: Path, wandb: Any) -> None:
    _, probe = monitored(tmp_path)
    (values,) = [call[1] for call in wandb.calls if call[0] == "log"]
    assert values["depthgauge/step"] == 0
    assert values["depthgauge/block_influence/layer_00"] == probe.layers[0].block_influence
    assert len(values["depthgauge/heads/tv_mean"]) == 8
    assert [call[1] for call in wandb.calls if call[0] == "alert"] == ["dead-layer", "dead-layer"]


def test_weights_and_biases_without_a_run(tmp_path: Path, wandb: Any) -> None:
    wandb.run = None
    monitored(tmp_path / "a")
    assert wandb.calls == []
    with pytest.raises(dg.InputError, match=r"call wandb\.init\(\) before the monitor is made"):
        monitored(tmp_path / "b", wandb=True)
