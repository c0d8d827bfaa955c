"""What a task's parameters may be: each is checked before anything runs, and written one way only."""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from depthgauge.errors import InputError, require_count, require_positive, require_seed, unknown_name

Check = Callable[[str, Any], Any]
"""(name, value as given) → the value in its one form; raises InputError."""

REQUIRED = object()


@dataclass(frozen=True)
class Parameter:
    """A parameter's check and its default; one without a default must be given."""

    check: Check
    default: Any = REQUIRED

    @property
    def required(self) -> bool:
        """Whether a grid must name it."""
        return self.default is REQUIRED


def count(meaning: str, least: int = 1) -> Check:
    """A whole number of at least `least`."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}; it is {meaning}")
        return require_count(name, int(value), meaning, least)

    return check


def number(meaning: str) -> Check:
    """Any finite number, held as a float."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise InputError(f"{name} must be a finite number, got {value!r}; it is {meaning}")
        return float(value)

    return check


def positive(meaning: str) -> Check:
    """A positive number, held as a float."""
    finite = number(meaning)

    def check(name: str, value: Any) -> float:
        return require_positive(name, finite(name, value), meaning)

    return check


def choice(*names: str) -> Check:
    """One of a few names."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise unknown_name(name, value, names)
        return value

    return check


def flag(meaning: str) -> Check:
    """True or false."""

    def check(name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false, got {value!r}; it says {meaning}")
        return value

    return check


def or_word(word: str, check: Check) -> Check:
    """What `check` takes, or one word."""
    return lambda name, value: word if value == word else check(name, value)


def text(meaning: str) -> Check:
    """A word whose meaning the task itself knows."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise InputError(f"{name} must be a word, got {value!r}; it is {meaning}")
        return value

    return check


def _seed(name: str, value: Any) -> int:
    return require_seed(count("where the random numbers start", least=0)(name, value))


SEED = Parameter(_seed, default=0)
"""Every task takes a seed: another one gives other draws at the same settings."""


def check_parameters(task: str, known: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters in their one form, defaults filled in; an unknown or missing one is an error that lists them."""
    required = [name for name, parameter in known.items() if parameter.required]
    optional = [name for name, parameter in known.items() if not parameter.required]
    listed = f"{task} takes {', '.join(required)}, and optionally {', '.join(optional)}"
    for name in given:
        if name not in known:
            raise InputError(f"unknown parameter {name!r}; {listed}")
    missing = [name for name in required if name not in given]
    if missing:
        raise InputError(f"the parameter {missing[0]!r} is missing; {listed}")
    return {
        name: parameter.check(name, given[name]) if name in given else parameter.default
        for name, parameter in known.items()
    }
