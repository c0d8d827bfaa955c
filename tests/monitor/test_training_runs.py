"""Training runs: a healthy one raises no alarm, and each way to fail raises its own before the loss shows it."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom
from tiny_training import probe_ids, tiny_llama, train, watched, with_scaled_residuals, without_skips

import depthgauge as dg
from depthgauge.results.monitor_document import largest_score_range

SEEDS, HEALTHY = range(5), range(10)
UNSTABLE = {"optimizer": "sgd", "rate": 1.0, "warm_up": 0}
"""Ten times the learning rate of `STABLE`, without warm-up."""
STABLE = {"optimizer": "sgd", "rate": 0.1, "warm_up": 50}
DIVERGED = 10.0
"""A loss has diverged if it is this many times the first loss, or not finite."""


@dataclass(frozen=True)
class Share:
    """`found` of `runs` training runs had a property; docs/tasks/watch-training.md states these numbers."""

    found: int
    runs: int

    def least(self, runs: int) -> int:
        """Return how many of other runs have it at least, with a probability of 0.999.

        Other seeds and other machines, which round differently, give other runs. The probability of the property is
        taken to be (found + 1)/(runs + 2), Laplace's rule, which is below 1.
        """
        return int(binom.ppf(1e-3, runs, (self.found + 1) / (self.runs + 2)))


DIVERGING = Share(35, 40)
WARNED, NOT_LATE = Share(32, 35), Share(35, 35)
"""Of the runs that diverge: those with an alarm in an earlier step, and those with one no later than in that step."""
QUIET = {"adamw": Share(40, 40), "sgd": Share(20, 20)}
"""Healthy runs without an alarm, by optimizer."""
COLLAPSED = Share(20, 20)
"""Runs without skip connections that raise `rank-collapse` before step 50."""
GUIDE = Path(__file__).parents[2] / "docs" / "tasks" / "watch-training.md"


def test_the_guide_states_these_shares() -> None:
    text = " ".join(GUIDE.read_text(encoding="utf-8").split())
    assert f"{DIVERGING.found} of {DIVERGING.runs} diverge" in text
    assert f"before the divergence in {WARNED.found} of the {WARNED.runs}" in text
    assert f"in the same step in {NOT_LATE.found - WARNED.found}" in text
    assert f"no alarm in {QUIET['adamw'].found} of {QUIET['adamw'].runs} runs" in text
    assert f"no alarm in {QUIET['sgd'].found} of {QUIET['sgd'].runs} runs" in text
    assert f"`rank-collapse` in {COLLAPSED.found} of {COLLAPSED.runs} runs" in text


def first_steps(monitor: dg.Monitor) -> dict[str, int]:
    """Return the step of the first alarm of each name."""
    found: dict[str, int] = {}
    for alarm in monitor.alarms:
        found.setdefault(alarm.name, alarm.step)
    return found


@dataclass(frozen=True)
class Outcome:
    """The first alarms of a run, and the step at which its loss diverged and it was stopped; None if it did not."""

    alarms: dict[str, int]
    diverged: int | None

    @property
    def lead(self) -> float:
        """The number of steps from the first alarm to the divergence; −∞ without an alarm."""
        return math.inf if self.diverged is None else self.diverged - min(self.alarms.values(), default=math.inf)


class UntilAlarm(dg.Monitor):
    """A monitor that measures nothing after its first alarm."""

    def step(self, step: int, loss: Any = None) -> dg.results.Probe | None:
        return None if self.alarms else super().step(step, loss)


def unstable(seed: int, log: Path, steps: int) -> Outcome:
    """Train with too large a learning rate, and probe after every step until the first alarm."""
    model = tiny_llama(seed)
    monitor = UntilAlarm(model, probe_ids(), 1, log, action="log")
    losses = train(model, steps, seed=seed, monitor=monitor, ceiling=DIVERGED, **UNSTABLE)
    return Outcome(first_steps(monitor), None if losses[-1] <= DIVERGED * losses[0] else len(losses) - 1)


def check_warnings(runs: list[Outcome]) -> None:
    """Check that the alarms of runs that diverge come as early as documented."""
    leads = [run.lead for run in runs if run.diverged is not None]
    assert sum(lead > 0 for lead in leads) >= WARNED.least(len(leads))
    assert sum(lead >= 0 for lead in leads) >= NOT_LATE.least(len(leads))


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
    assert "rank-collapse" in first_steps(monitor)
    assert "skip connections" in monitor.alarms[0].message


def test_a_tenfold_learning_rate_raises_an_alarm_and_mostly_before_the_loss_diverges(tmp_path: Path) -> None:
    runs = [unstable(seed, tmp_path / str(seed), 40) for seed in SEEDS]
    assert all(run.alarms for run in runs)
    assert any(run.diverged is not None for run in runs)
    check_warnings(runs)


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
    quiet, ends = 0, []
    for seed in HEALTHY:
        model = tiny_llama(seed)
        monitor = watched(model, tmp_path / str(seed), every=20)
        losses = train(model, 2000, seed=seed, monitor=monitor, **(STABLE if name == "sgd" else {}))
        quiet += not monitor.alarms
        ends.append(round(sum(losses[-50:]) / 50, 3))
        record = dg.results.read_log(tmp_path / str(seed))
        score = max(largest_score_range(layer) or 0.0 for probe in record.probes for layer in probe.layers)
        report(run=name, seed=seed, alarms=first_steps(monitor), loss=ends[-1], largest_score=round(score, 1))
    assert quiet >= QUIET[name].least(len(HEALTHY))
    assert max(ends) < 1.8


@pytest.mark.soak
def test_runs_without_skip_connections_collapse_before_step_50(tmp_path: Path) -> None:
    collapsed = 0
    for seed in range(COLLAPSED.runs):
        model = without_skips(tiny_llama(seed))
        monitor = watched(model, tmp_path / str(seed), every=1)
        train(model, 50, seed=seed, monitor=monitor)
        report(run="no skips", seed=seed, alarms=first_steps(monitor))
        collapsed += "rank-collapse" in first_steps(monitor)
    assert collapsed >= COLLAPSED.least(COLLAPSED.runs)


@pytest.mark.soak
def test_runs_that_diverge_are_noticed_before_as_often_as_documented(tmp_path: Path) -> None:
    runs = []
    for seed in range(DIVERGING.runs):
        runs.append(unstable(seed, tmp_path / str(seed), 60))
        report(run="tenfold rate", seed=seed, alarms=runs[-1].alarms, diverged=runs[-1].diverged)
    leads = sorted(run.lead for run in runs if run.diverged is not None)
    early, late = sum(lead > 0 for lead in leads), sum(lead < 0 for lead in leads)
    report(run="tenfold rate", diverged=len(leads), earlier=early, later=late, leads=leads)
    assert all(run.alarms for run in runs)
    assert len(leads) >= DIVERGING.least(len(runs))
    check_warnings(runs)


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
