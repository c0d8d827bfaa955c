"""Grids: a task, a list of values for each parameter, and a number of repetitions; from a TOML file or from Python."""

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, require_count, unknown_name
from depthgauge.sweeps.cells import Cell, canonical_json
from depthgauge.sweeps.parameters import Task, check_parameters

KEYS = ("task", "repetitions", "parameters")
MOST_CELLS = 1_000_000
"""Larger grids are rejected; they are usually a typing error."""


@dataclass(frozen=True)
class Grid:
    """All combinations of the listed parameter values, each repeated with new random numbers.

    The whole grid is checked when it is created. `parameters` has a list of values for each parameter of the task;
    optional ones may be left out. `name` is shown in the status of a store; it is not part of the grid's identity.
    """

    task: Task
    parameters: Mapping[str, Sequence[Any]]
    repetitions: int = 1
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        require_count("repetitions", self.repetitions, "how often every setting is repeated")
        for name, values in self.parameters.items():
            _check_list(name, values)
        seen: set[str] = set()
        for cell in self._cells:
            if cell.identity in seen:
                setting = canonical_json(dict(cell.parameters))
                raise InputError(f"the grid contains the same cell twice: {setting}; remove the duplicate values")
            seen.add(cell.identity)

    def document(self) -> dict[str, Any]:
        """Return the grid as the JSON document that a store keeps."""
        lists = {name: list(values) for name, values in self.parameters.items()}
        return {"task": self.task.name, "repetitions": self.repetitions, "parameters": lists}

    def cells(self) -> list[Cell]:
        """Return the cells in order: the repetition varies fastest, then the last parameter."""
        return list(self._cells)

    @cached_property
    def _cells(self) -> list[Cell]:
        repeats = [self.repetitions] if self.task.repeats_inside else range(self.repetitions)
        total = math.prod(len(values) for values in self.parameters.values()) * len(repeats)
        if total > MOST_CELLS:
            raise InputError(f"the grid has {total:,} cells, more than {MOST_CELLS:,}; split it into several grids")
        cells = []
        for values in itertools.product(*self.parameters.values()):
            first = make_cell(self.task, dict(zip(self.parameters, values, strict=True)), repeats[0])
            cells += [first, *(replace(first, repetition=repetition) for repetition in repeats[1:])]
        return cells


def make_cell(task: Task, setting: Mapping[str, Any], repetition: int) -> Cell:
    """Return the cell at a setting, with parameters checked, in normal form, and defaults filled in."""
    parameters = task.complete(check_parameters(task.name, task.parameters, setting))
    return Cell(task.name, task.version, parameters, repetition, task.run)


def _check_list(name: str, values: Any) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        shown = canonical_json(values) if isinstance(values, bool | int | float | str) else "…"
        raise InputError(f"parameters.{name} must be a list, got {values!r}; write {name} = [{shown}]")
    if not values:
        raise InputError(f"parameters.{name} is an empty list; give at least one value, or omit the key")


def read_grid(path: str | Path, tasks: Mapping[str, Task]) -> Grid:
    """Read a grid from a TOML file with the keys `task` and `repetitions` and the table `[parameters]`."""
    try:
        with open(path, "rb") as handle:
            document = tomllib.load(handle)
    except OSError as error:
        raise InputError(f"cannot read the grid {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not a TOML file: {error}") from error
    try:
        return parse_grid(document, tasks, name=Path(path).name)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def parse_grid(document: Mapping[str, Any], tasks: Mapping[str, Task], name: str = "") -> Grid:
    """Return the grid that a document describes; raise InputError for unknown or missing keys."""
    for key in document:
        if key not in KEYS:
            raise unknown_name("each key of a grid", key, KEYS)
    for key in ("task", "parameters"):
        if key not in document:
            raise InputError(f"the key {key!r} is missing; a grid has the keys {', '.join(KEYS)}")
    task = document["task"]
    if not isinstance(task, str) or task not in tasks:
        raise unknown_name("task", task, tasks)
    if not isinstance(document["parameters"], Mapping):
        raise InputError(f"parameters must be a table of lists, got {document['parameters']!r}")
    return Grid(tasks[task], document["parameters"], document.get("repetitions", 1), name)
