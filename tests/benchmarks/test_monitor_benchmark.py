"""The benchmark of the monitor works on a tiny model."""

import pytest
from benchmark_files import benchmark

pytestmark = pytest.mark.soak
monitor = benchmark("monitor")


def test_the_share_is_measured() -> None:
    found = monitor.timed("cpu", (2, 16), 1, small=True)
    assert found["share"] > 0
    expected = (found["probe_seconds"] + 199 * found["idle_seconds"]) / (200 * found["step_seconds"])
    assert abs(found["share"] - expected) < 1e-12
    assert found["idle_seconds"] < found["probe_seconds"]


def test_training_is_compared_bit_by_bit() -> None:
    assert monitor.identical("cpu", (2, 16), 3, small=True)
