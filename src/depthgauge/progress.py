"""How long work reports where it stands; whoever shows it supplies the function."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Step(Protocol):
    """Called as work advances: `done` of `total` units, and a word on the present one."""

    def __call__(self, done: int, total: int, label: str) -> None:
        """Show it."""


def silent(done: int, total: int, label: str) -> None:
    """Report to nobody."""
