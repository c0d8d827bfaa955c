"""Progress callbacks. Long computations call a `Step`; the caller decides how to display it."""

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
