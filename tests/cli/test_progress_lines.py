"""Progress on standard error where it is not a terminal."""

import re
import time

import pytest

from depthgauge.base import progress
from depthgauge.cli import output


def test_slow_work_is_announced_and_progress_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "START_DELAY", 0.0)
    monkeypatch.setattr(output, "HEARTBEAT", 0.01)
    said: list[str] = []
    monkeypatch.setattr(output, "note", said.append)
    with output.progress_bar("measuring") as step:
        step(1, 3, "layer 0")
        for _ in range(1000):
            if len(said) > 1:
                break
            time.sleep(0.01)
    assert said[0] == "measuring …"
    assert re.fullmatch(r"measuring: layer 0, 1 of 3 \(\d+ s\)", said[1])


def test_the_time_left_is_that_of_the_current_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    pace = progress.Pace()
    assert pace.left(2, 10) is None  # a resumed loop has done two already
    now[0] += 8
    assert pace.left(6, 10) == 8
    assert pace.left(0, 10) is None  # the next loop
    assert pace.left(1, 4) is None
    now[0] += 2
    assert pace.left(3, 4) == 1
