"""Training runs: a healthy one raises no alarm, and each way to fail raises its own before the loss shows it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_training import tiny_llama, train, watched, with_scaled_residuals, without_skips

import depthgauge as dg
from depthgauge.results.monitor_labels import largest_score_range

SEEDS = range(5)
UNSTABLE = {"optimizer": "sgd", "rate": 1.0, "warm_up": 0}
"""Ten times the learning rate of `STABLE`, without warm-up."""
STABLE = {"optimizer": "sgd", "rate": 0.1, "warm_up": 50}


def first_steps(monitor: dg.Monitor) -> dict[str, int]:
    """Return the step of the first alarm of each name."""
    found: dict[str, int] = {}
    for alarm in monitor.alarms:
        found.setdefault(alarm.name, alarm.step)
    return found


def diverged(losses: list[float]) -> int | None:
    """Return the first step with a loss that is not finite or ten times the first loss."""
    return next((k for k, loss in enumerate(losses) if not loss <= 10 * losses[0]), None)


def unstable(seed: int, log: Path, steps: int, every: int = 1) -> tuple[dict[str, int], int | None]:
    """Train with too large a learning rate; return the first alarms and the step at which the loss diverges."""
    model = tiny_llama(seed)
    monitor = watched(model, log, every)
    losses = train(model, steps, seed=seed, monitor=monitor, **UNSTABLE)
    return first_steps(monitor), diverged(losses)


def before_divergence(alarms: dict[str, int]) -> int:
    """Return the step of the first entropy-collapse or score-explosion."""
    return min(alarms[name] for name in ("entropy-collapse", "score-explosion") if name in alarms)


def test_a_healthy_run_raises_no_alarm(tmp_path: Path) -> None:
    model = tiny_llama(0)
    monitor = watched(model, tmp_path, every=15)
    losses = train(model, 61, monitor=monitor)
    assert monitor.alarms == []
    assert losses[-1] < 0.75 * losses[0]


def test_without_skip_connections_ranks_collapse(tmp_path: Path) -> None:
    model = without_skips(tiny_llama(0))
    monitor = watched(model, tmp_path, every=5)
    train(model, 21, monitor=monitor)
    assert first_steps(monitor)["rank-collapse"] < 50
    assert "skip connections" in monitor.alarms[0].message


def test_a_tenfold_learning_rate_is_noticed_before_the_loss_diverges(tmp_path: Path) -> None:
    alarms, step = unstable(0, tmp_path, 34, every=4)
    assert step is not None
    assert before_divergence(alarms) < step


def test_wrongly_scaled_residuals_name_the_dead_layers(tmp_path: Path) -> None:
    model = with_scaled_residuals(tiny_llama(0), 0.02)
    monitor = watched(model, tmp_path, every=5)
    train(model, 11, monitor=monitor)
    assert [(alarm.name, alarm.layer) for alarm in monitor.alarms] == [("dead-layer", 2), ("dead-layer", 3)]


# --- the campaign -----------------------------------------------------------------------------------------------------


def report(**numbers: Any) -> None:
    """Print the numbers of the campaign; `pytest -s` shows them."""
    print(json.dumps(numbers))  # noqa: T201


@pytest.mark.soak
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_healthy_runs_raise_no_alarm_in_2000_steps(tmp_path: Path, name: str) -> None:
    false, ends = 0, []
    for seed in SEEDS:
        model = tiny_llama(seed)
        monitor = watched(model, tmp_path / str(seed), every=50)
        losses = train(model, 2000, seed=seed, monitor=monitor, **(STABLE if name == "sgd" else {}))
        false += len(monitor.alarms)
        ends.append(round(sum(losses[-50:]) / 50, 3))
        record = dg.read_log(tmp_path / str(seed))
        score = max(largest_score_range(layer) or 0.0 for probe in record.probes for layer in probe.layers)
        report(run=name, seed=seed, alarms=first_steps(monitor), loss=ends[-1], largest_score=round(score, 1))
    assert false == 0
    assert max(ends) < 1.8


@pytest.mark.soak
def test_runs_without_skip_connections_collapse_before_step_50(tmp_path: Path) -> None:
    for seed in SEEDS:
        model = without_skips(tiny_llama(seed))
        monitor = watched(model, tmp_path / str(seed), every=1)
        train(model, 50, seed=seed, monitor=monitor)
        report(run="no skips", seed=seed, alarms=first_steps(monitor))
        assert first_steps(monitor)["rank-collapse"] < 50


@pytest.mark.soak
def test_every_run_that_diverges_is_noticed_before(tmp_path: Path) -> None:
    warned = []
    for seed in SEEDS:
        alarms, step = unstable(seed, tmp_path / str(seed), 60)
        report(run="tenfold rate", seed=seed, alarms=alarms, diverged=step)
        assert before_divergence(alarms) < (math.inf if step is None else step)
        if step is not None:
            warned.append(step - before_divergence(alarms))
    report(run="tenfold rate", steps_before=warned)
    assert warned


@pytest.mark.soak
def test_wrongly_scaled_residuals_name_the_same_layers_in_every_run(tmp_path: Path) -> None:
    for seed in SEEDS:
        model = with_scaled_residuals(tiny_llama(seed, layers=6), 0.02)
        monitor = watched(model, tmp_path / str(seed), every=10)
        train(model, 200, seed=seed, monitor=monitor)
        dead = sorted({alarm.layer for alarm in monitor.alarms if alarm.name == "dead-layer"})
        others = sorted({alarm.name for alarm in monitor.alarms} - {"dead-layer"})
        report(run="scaled residuals", seed=seed, dead=dead, others=others)
        assert dead == [2, 3, 4, 5]
