"""The tasks of a sweep and their parameters: each value is checked before a sweep starts and stored in one normal form.

The version of a task is part of the identity of its cells. Increase it when the results of the task change, so that old
rows are not reused.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from depthgauge.base.errors import InputError, require_count, require_positive, require_seed, unknown_name
from depthgauge.sweeps.cells import Cell

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
