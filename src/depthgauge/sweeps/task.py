"""The task of a sweep: its parameters, its version, and its function from a cell to its results.

The version of a task is part of the identity of its cells. Increase it when the results of the task change, so that old
rows are not reused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from depthgauge.sweeps.cells import Cell
from depthgauge.sweeps.parameters import Parameter

Values = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task: its name, version and parameters, and the function that computes a cell."""

    name: str
    version: int
    parameters: Mapping[str, Parameter]
    run: Callable[[Cell], Values]
    complete: Callable[[Values], Values] = lambda parameters: parameters
    """Checks the parameters against each other and fills in defaults that depend on other parameters."""
    repeats_inside: bool = False
    """Whether one cell computes all repetitions of its setting."""
