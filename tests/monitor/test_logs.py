"""Logs: complete after every step, readable after a crash, continued by a resumed run."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import exit_code, forked
from tiny_training import probe_ids, tiny_llama

import depthgauge as dg
from depthgauge.base.errors import OutputError
from depthgauge.results.record import ResultError


def monitor(log: Path, layers: int = 2, **settings: Any) -> dg.Monitor:
    return dg.Monitor(tiny_llama(layers=layers), probe_ids(), 10, log, action="log", **settings)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_files_have_one_object_per_probe_and_per_alarm(tmp_path: Path) -> None:
    log = tmp_path / "runs" / "x"
    with monitor(log, thresholds=dg.results.AlarmThresholds(dead_update=100.0, dead_probes=2)) as made:
        found = [made.step(step, loss=torch.tensor(float(step))) for step in range(25)]
    assert [probe.step for probe in found if probe is not None] == [0, 10, 20]
    written = lines(log / "metrics.jsonl")
    assert [(probe["step"], probe["loss"], len(probe["layers"])) for probe in written] == [
        (0, 0.0, 2),
        (10, 10.0, 2),
        (20, 20.0, 2),
    ]
    assert set(written[0]["layers"][1]["heads"]) == {"score_range", "entropy", "tv_mean", "first_mass"}
    raised = lines(log / "alarms.jsonl")
    assert [(alarm["step"], alarm["name"], alarm["layer"]) for alarm in raised] == [
        (10, "dead-layer", 0),
        (10, "dead-layer", 1),
    ]
    assert all(alarm["message"] for alarm in raised)
    assert json.loads((log / "run.json").read_text())["schema"] == "depthgauge.monitor/1"
    record = dg.results.read_log(log)
    assert record.name == "x"
    assert list(record.probes) == [probe for probe in found if probe is not None]
    assert list(record.alarms) == made.alarms
    frame = record.to_frame()
    assert list(frame["step"]) == [0, 0, 10, 10, 20, 20]
    assert {"layer", "update", "entropy"} <= set(frame.columns)


def test_a_step_is_measured_once(tmp_path: Path) -> None:
    made = monitor(tmp_path)
    assert made.step(0) is not None
    assert made.step(0) is None  # as with gradient accumulation
    assert made.step(3) is None
    assert [probe.step for probe in dg.results.read_log(tmp_path).probes] == [0]
    with pytest.raises(dg.InputError, match="step must be a whole number of at least 0, got -1"):
        made.step(-1)


@pytest.mark.parametrize("loss", [float("nan"), torch.tensor(float("inf")), None])
def test_a_loss_that_is_not_finite_is_null(tmp_path: Path, loss: Any) -> None:
    monitor(tmp_path).step(0, loss)
    assert "loss" not in lines(tmp_path / "metrics.jsonl")[0] or lines(tmp_path / "metrics.jsonl")[0]["loss"] is None
    assert dg.results.read_log(tmp_path).probes[0].loss is None


def test_a_model_that_is_not_finite_is_logged(tmp_path: Path) -> None:
    model = tiny_llama(layers=2)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(float("nan"))
    made = dg.Monitor(model, probe_ids(), 1, tmp_path, action="log")
    made.step(0)
    probe = dg.results.read_log(tmp_path).probes[0]
    assert probe.probe_loss is None
    assert probe.layers[1].update is None
    assert "score-explosion" in {alarm.name for alarm in made.alarms}


def test_a_resumed_run_supersedes_the_steps_it_repeats(tmp_path: Path) -> None:
    thresholds = dg.results.AlarmThresholds(dead_update=100.0, dead_probes=3)
    first = monitor(tmp_path, thresholds=thresholds)
    for step in (0, 10, 20, 30):
        first.step(step, loss=1.0)
    assert [alarm.step for alarm in first.alarms] == [20, 20]
    again = monitor(tmp_path, thresholds=thresholds)  # resumed from a checkpoint at step 20
    again.step(20, loss=2.0)
    assert [alarm.step for alarm in again.alarms] == [20, 20]  # the two probes before it were remembered
    record = dg.results.read_log(tmp_path)
    assert [(probe.step, probe.loss, probe.segment) for probe in record.probes] == [
        (0, 1.0, 0),
        (10, 1.0, 0),
        (20, 2.0, 1),
    ]
    assert [(alarm.step, alarm.segment) for alarm in record.alarms] == [(20, 1), (20, 1)]
    third = monitor(tmp_path, thresholds=thresholds)
    third.step(30, loss=3.0)
    assert [alarm.step for alarm in third.alarms] == [20, 20]
    assert [(probe.step, probe.segment) for probe in dg.results.read_log(tmp_path).probes] == [
        (0, 0),
        (10, 0),
        (20, 1),
        (30, 2),
    ]
    monitor(tmp_path).step(0, loss=9.0)  # started from the beginning
    record = dg.results.read_log(tmp_path)
    assert [(probe.step, probe.loss) for probe in record.probes] == [(0, 9.0)]
    assert record.alarms == ()
    assert len(lines(tmp_path / "metrics.jsonl")) == 7  # nothing is ever deleted


@pytest.mark.parametrize("cut", [1, 7, 400])
def test_a_line_that_was_not_finished_is_ignored_and_removed_on_resume(tmp_path: Path, cut: int) -> None:
    made = monitor(tmp_path)
    made.step(0), made.step(10)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [probe.step for probe in dg.results.read_log(tmp_path).probes] == [0]
    resumed = monitor(tmp_path)
    resumed.step(10)
    assert [(probe.step, probe.segment) for probe in dg.results.read_log(tmp_path).probes] == [(0, 0), (10, 1)]
    assert len(lines(path)) == 2


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    made = monitor(tmp_path)
    made.step(0), made.step(10)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{" + path.read_bytes())
    with pytest.raises(ResultError, match=r"metrics\.jsonl:1 is not JSON"):
        dg.results.read_log(tmp_path)
    path.write_text('{"step": 0, "layers": 3}\n')
    with pytest.raises(ResultError, match=r"metrics\.jsonl:1: layers: expected a list"):
        dg.results.read_log(tmp_path)


def test_directories_that_are_no_log_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"is not the log of a monitor: it contains no run\.json"):
        dg.results.read_log(tmp_path)
    monitor(tmp_path / "x").step(0)
    with pytest.raises(dg.InputError, match=r"is the log of another model .LlamaForCausalLM, 2 layers.; this one is"):
        monitor(tmp_path / "x", layers=3)
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(dg.InputError, match=r"has a metrics\.jsonl that no monitor wrote"):
        monitor(tmp_path / "y")
    (tmp_path / "z").write_text("")
    for folder in (tmp_path / "z", tmp_path / "z" / "log"):
        with pytest.raises(OutputError, match=rf"cannot create the folder {folder}: .*z is a file; give another log"):
            monitor(folder)


def test_a_killed_run_has_a_complete_log_and_a_page(tmp_path: Path) -> None:
    log = tmp_path / "x"

    def train() -> None:
        monitor = dg.Monitor(tiny_llama(layers=2), probe_ids(), 1, log, action="log")
        for step in range(5):
            monitor.step(step, loss=1.0)
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(train)) == -signal.SIGKILL
    assert [probe.step for probe in dg.results.read_log(log).probes] == [0, 1, 2, 3]
    with open(log / "metrics.jsonl", "a", encoding="utf-8") as handle:
        handle.write('{"step": 4, "la')
    assert dg.results.write_report(log, tmp_path / "page.html").stat().st_size > 1e6
    resumed = dg.Monitor(tiny_llama(layers=2), probe_ids(), 1, log, action="log")
    resumed.step(4)
    assert [probe.step for probe in dg.results.read_log(log).probes] == [0, 1, 2, 3, 4]
