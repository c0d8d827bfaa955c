"""Progress on standard error where it is not a terminal."""

import re
import time

import pytest

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
