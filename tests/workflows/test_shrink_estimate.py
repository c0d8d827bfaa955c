"""The expected duration of `shrink`: every part is counted, and only where it is done."""

from dataclasses import replace

import pytest

from depthgauge.surgery.student import EFFORT
from depthgauge.workflows.shrink_estimate import (
    PartCosts,
    ShrinkJob,
    heal_advice,
    heal_seconds,
    seconds_left,
    time_left,
)

JOB = ShrinkJob(EFFORT["quick"], layers=12, counts=(3,), certify=60, window=256, writes=True)
ONLY = {
    "window": PartCosts(1.0, 0.0, 0.0),
    "token": PartCosts(0.0, 1.0, 0.0),
    "fresh": PartCosts(0.0, 0.0, 1.0),
}
"""A second for one part, nothing for the others."""


def test_the_fresh_process_is_counted_once_if_the_model_is_written() -> None:
    """A tiny model computes nothing to speak of: what is left is the process that loads the result."""
    tiny = PartCosts(window=1e-4, token=1e-3, fresh=20.0)
    assert 20 < seconds_left(JOB, tiny) < 22
    assert seconds_left(replace(JOB, writes=False), tiny) < 2
    assert seconds_left(JOB, ONLY["fresh"]) == 1
    assert seconds_left(replace(JOB, counts=(1, 3)), ONLY["fresh"]) == 2


def test_a_run_that_stops_after_the_search_writes_and_measures_nothing() -> None:
    search = replace(JOB, stops=True)
    assert seconds_left(search, ONLY["fresh"]) == seconds_left(search, ONLY["token"]) == 0
    assert 0 < seconds_left(search, ONLY["window"]) < seconds_left(JOB, ONLY["window"])
    assert seconds_left(replace(search, is_given=True), ONLY["window"]) < seconds_left(search, ONLY["window"])


def test_repairs_are_those_of_the_finalists() -> None:
    job = replace(JOB, effort=EFFORT["default"], window=512)
    bare = seconds_left(replace(job, repairs=False), ONLY["window"])
    one = seconds_left(replace(job, effort=replace(job.effort, finalists=1)), ONLY["window"])
    assert seconds_left(job, ONLY["window"]) - bare == pytest.approx(job.effort.finalists * (one - bare))
    assert one - bare > 2 * job.effort.steps * job.effort.tokens / 512


def test_every_model_is_measured_and_the_dense_model_once() -> None:
    for counts in ((3,), (1, 2, 3)):
        job = replace(JOB, counts=counts)
        grown = replace(job, certify=job.certify + 7)
        more = seconds_left(grown, ONLY["window"]) - seconds_left(job, ONLY["window"])
        assert more == pytest.approx(7 * (len(counts) + 1))
    healed = seconds_left(replace(JOB, healed=10), ONLY["window"]) - seconds_left(JOB, ONLY["window"])
    assert healed == pytest.approx(10 * 2 * 4)  # 2 of the 48 fit windows in each step, four passes each


def test_the_tasks_are_answered_by_every_model_and_the_dense_one() -> None:
    for counts in ((3,), (1, 2, 3)):
        job = replace(JOB, counts=counts)
        more = seconds_left(replace(job, task_tokens=2560), ONLY["window"]) - seconds_left(job, ONLY["window"])
        assert more == pytest.approx(10 * (len(counts) + 1))
    search = replace(JOB, stops=True)
    assert seconds_left(replace(search, task_tokens=2560), ONLY["window"]) == seconds_left(search, ONLY["window"])
    assert "the tasks on both models" in time_left(replace(JOB, task_tokens=2560), ONLY["window"], is_most=False)
    assert "tasks" not in time_left(JOB, ONLY["window"], is_most=False)


def test_costs_add_up() -> None:
    costs = PartCosts(0.25, 0.125, 17.0)
    parts = [getattr(costs, name) * seconds_left(JOB, only) for name, only in ONLY.items()]
    assert seconds_left(JOB, costs) == pytest.approx(sum(parts))


def test_the_advice_about_healing_says_what_it_would_cost() -> None:
    seconds = heal_seconds(200, JOB.effort, JOB.window, 0.25)
    costs = PartCosts(0.25, 0.0, 0.0)
    assert seconds == pytest.approx(seconds_left(replace(JOB, healed=200), costs) - seconds_left(JOB, costs))
    assert heal_advice(200, 90.0).startswith("--heal 200 would train the kept blocks for about 2 minutes more")
