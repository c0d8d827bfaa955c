"""The expected duration of `shrink`: every part is counted, and only where it is done."""

from dataclasses import replace

import pytest

from depthgauge.surgery.student import EFFORT
from depthgauge.workflows.shrink_estimate import PartCosts, ShrinkJob, seconds_left

JOB = ShrinkJob(EFFORT["quick"], layers=12, count=3, certify=60, writes=True)
ONLY = {
    "window": PartCosts(1.0, 0.0, 0.0, 0.0),
    "repair": PartCosts(0.0, 1.0, 0.0, 0.0),
    "token": PartCosts(0.0, 0.0, 1.0, 0.0),
    "fresh": PartCosts(0.0, 0.0, 0.0, 1.0),
}
"""A second for one part, nothing for the others."""


def test_the_fresh_process_is_counted_once_if_the_model_is_written() -> None:
    """A tiny model computes nothing to speak of: what is left is the process that loads the result."""
    tiny = PartCosts(window=1e-4, repair=1e-3, token=1e-3, fresh=20.0)
    assert 20 < seconds_left(JOB, tiny) < 22
    assert seconds_left(replace(JOB, writes=False), tiny) < 2
    assert seconds_left(JOB, ONLY["fresh"]) == 1


def test_a_run_that_stops_after_the_search_writes_and_measures_nothing() -> None:
    search = replace(JOB, stops=True)
    assert seconds_left(search, ONLY["fresh"]) == seconds_left(search, ONLY["token"]) == 0
    for part in ("window", "repair"):
        rest = replace(JOB, is_planned=True)
        whole = seconds_left(search, ONLY[part]) + seconds_left(rest, ONLY[part])
        assert seconds_left(JOB, ONLY[part]) == pytest.approx(whole)


def test_repairs_are_those_of_the_search_and_of_every_kept_block() -> None:
    kept = JOB.layers - JOB.count
    assert seconds_left(replace(JOB, is_planned=True), ONLY["repair"]) == pytest.approx(3 * kept)
    finalists = JOB.count * JOB.effort.finalists
    assert seconds_left(replace(JOB, stops=True), ONLY["repair"]) > finalists
    assert seconds_left(replace(JOB, stops=True, sizes=4), ONLY["repair"]) == finalists


def test_every_model_is_measured_and_the_dense_model_once() -> None:
    """Without a search, repairs and swaps, what grows with the certify windows is one pass per model and one more."""
    planned = replace(JOB, is_planned=True)
    for sizes in (1, 5):
        job = replace(planned, sizes=sizes)
        grown = replace(job, certify=job.certify + 7)
        assert seconds_left(grown, ONLY["window"]) - seconds_left(job, ONLY["window"]) == pytest.approx(7 * (sizes + 1))
    healed = replace(planned, healed=10)
    assert seconds_left(healed, ONLY["window"]) - seconds_left(planned, ONLY["window"]) == pytest.approx(40)


def test_costs_add_up() -> None:
    costs = PartCosts(0.25, 3.0, 0.125, 17.0)
    parts = [getattr(costs, name) * seconds_left(JOB, only) for name, only in ONLY.items() if name != "window"]
    with_repair = seconds_left(JOB, PartCosts(1.0, 1e-9, 0.0, 0.0))  # repairs have forward passes of their own
    assert seconds_left(JOB, costs) == pytest.approx(sum(parts) + costs.window * with_repair, rel=1e-6)
