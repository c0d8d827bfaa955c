"""Grids: a task, a list of values for each parameter, and a number of repetitions; from a TOML file or from Python.

A cell is the unit of work, identified by a hash of its definition. Each value of a parameter is checked before a sweep
starts and stored in one normal form. The version of a task is part of the identity of its cells. Increase it when the
results of the task change, so that old rows are not reused.
"""

import hashlib
import itertools
import json
import math
import numbers
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError, require_count, require_positive, require_seed, unknown_name


def canonical_json(document: Any) -> str:
    """Serialise a document in exactly one way: sorted keys, no spaces, floats that round-trip.

    >>> canonical_json({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True)
class Cell:
    """One computation of a sweep: a task, a value for every parameter, and a repetition number.

    For tasks that repeat inside a cell (`Task.repeats_inside`), `repetition` is the number of repetitions instead.
    """

    task: str
    version: int
    parameters: Mapping[str, Any]
    repetition: int
    run: "Callable[[Cell], dict[str, Any]] | None" = field(default=None, compare=False, repr=False)
    """The function of the task; None for a cell that was read from a store."""

    @cached_property
    def identity(self) -> str:
        """The SHA-256 of task, version, parameters and repetition; equal cells have equal identities."""
        document = {name: getattr(self, name) for name in ("task", "version", "repetition")}
        document["parameters"] = dict(self.parameters)
        return hashlib.sha256(canonical_json(document).encode()).hexdigest()

    def seed(self, purpose: str) -> int:
        """Return the seed for one use of random numbers (`"network"`, `"inputs"`, …), in [0, 2⁶³).

        It is the first 63 bits of the SHA-256 of the identity and the purpose.
        """
        return int.from_bytes(hashlib.sha256(f"{self.identity}|{purpose}".encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class CellOutcome:
    """The outcome of a cell: its `result`, or the `error` that stopped it, and how many `seconds` it took."""

    identity: str
    result: dict[str, Any] | None
    error: str | None
    seconds: float


Check = Callable[[str, Any], Any]
"""Maps (parameter name, given value) to the value in normal form, or raises InputError."""

REQUIRED = object()


@dataclass(frozen=True)
class Parameter:
    """The check of a parameter and its default; a parameter without a default is required."""

    check: Check
    default: Any = REQUIRED

    @property
    def required(self) -> bool:
        """Whether every grid of the task must list this parameter."""
        return self.default is REQUIRED


def count(meaning: str, least: int = 1) -> Check:
    """Accept an integer of at least `least`."""
    return lambda name, value: require_count(name, value, meaning, least)


def number(meaning: str) -> Check:
    """Accept a finite number; the normal form is a float."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise InputError(f"{name} must be a finite number, got {value!r}; it is {meaning}")
        return float(value)

    return check


def positive(meaning: str) -> Check:
    """Accept a positive finite number; the normal form is a float."""
    finite = number(meaning)
    return lambda name, value: require_positive(name, finite(name, value), meaning)


def choice(*names: str) -> Check:
    """Accept one of the given strings."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise unknown_name(name, value, names)
        return value

    return check


def _of_type(kind: type, words: str, meaning: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise InputError(f"{name} must be {words}, got {value!r}; it {meaning}")
        return value

    return check


def flag(meaning: str) -> Check:
    """Accept true or false."""
    return _of_type(bool, "true or false", f"sets {meaning}")


def or_word(word: str, check: Check) -> Check:
    """Accept `word`, or any value that `check` accepts."""
    return lambda name, value: word if value == word else check(name, value)


def text(meaning: str) -> Check:
    """Accept any string; the task itself interprets it."""
    return _of_type(str, "a string", f"is {meaning}")


_WHOLE = count("the seed of the random numbers", least=0)
SEED = Parameter(lambda name, value: require_seed(_WHOLE(name, value)), default=0)
"""The seed that every task takes; a different seed gives different draws at the same setting."""


def check_parameters(task: str, known: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters in normal form with defaults filled in; raise InputError for unknown or missing ones."""
    required = [name for name, parameter in known.items() if parameter.required]
    optional = [name for name, parameter in known.items() if not parameter.required]
    listed = f"{task} takes {', '.join(required)}, and optionally {', '.join(optional)}"
    for name in given:
        if name not in known:
            raise InputError(f"unknown parameter {name!r}; {listed}")
    for name in required:
        if name not in given:
            raise InputError(f"the parameter {name!r} is missing; {listed}")
    return {
        name: parameter.check(name, given[name]) if name in given else parameter.default
        for name, parameter in known.items()
    }


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
