"""Progress callbacks, and durations. Long computations call a `Step`; the caller decides how to display it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable


@runtime_checkable
class Step(Protocol):
    """A callback that a computation calls as it advances."""

    def __call__(self, done: int, total: int, label: str) -> None:
        """Report that `done` of `total` units are finished; `label` describes the current unit."""


def no_message(sentence: str) -> None:
    """Ignore a sentence. This is the default callback for messages."""


def silent(done: int, total: int, label: str) -> None:
    """Ignore the report. This is the default callback."""


class Pace:
    """The time that a loop still takes, from the time that it has taken so far.

    A loop begins where the total changes, or where less is done than before.
    """

    def __init__(self) -> None:
        self._total, self._done, self._first, self._started = 0, 0, 0, 0.0

    def left(self, done: int, total: int) -> float | None:
        """Return the seconds left of a loop with `done` of `total` units finished; None if that is not known."""
        now = time.monotonic()
        if total != self._total or done < self._done:
            self._total, self._first, self._started = total, done, now
        self._done = done
        finished = done - self._first
        return (now - self._started) / finished * (total - done) if finished and done < total else None


class Durations:
    """The seconds that parts of a computation took, by name: `with durations("search"): …`.

    A part inside another one counts for itself alone.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time inside the block to a part."""
        started, before = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started - inside
