"""Every error a user can meet, so that one `except DepthgaugeError` catches what is ours and nothing else."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import ClassVar


class DepthgaugeError(Exception):
    """Something depthgauge can explain in a sentence."""

    exit_code: ClassVar[int] = 1


class InputError(DepthgaugeError, ValueError):
    """What was given cannot be used; the message says what was given, what was expected and what to do."""

    exit_code: ClassVar[int] = 2


class NetworkFileError(InputError):
    """A network file that is damaged, foreign, or written by a newer version."""


class InputFileError(InputError):
    """A file of input tokens that cannot be used."""


class OutputError(DepthgaugeError):
    """A result that could not be written."""


class VerificationError(DepthgaugeError):
    """A certificate whose upper bound could not be proved again; the message names the step that failed."""


def unknown_name(what: str, given: object, known: Iterable[str]) -> InputError:
    """The error for a name that is not one of a known few, with the nearest one offered."""
    names = list(known)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InputError(f"{what} must be one of {', '.join(names)}, got {given!r}{hint}")


def require_positive(name: str, value: float, meaning: str) -> float:
    """Return `value` if it is a positive finite number, else raise the error that says what it should be."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name} must be a positive number, got {value!r}; it is {meaning}")
    return float(value)


def require_count(name: str, value: int, meaning: str, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`, else raise the error that says what it is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}; it is {meaning}")
    return int(value)


def require_seed(seed: int) -> int:
    """Return `seed` if random numbers can be drawn from it: a whole number from 0 to 2⁶³ − 1."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**63:
        raise InputError(
            f"seed must be a whole number from 0 to 2^63 - 1, got {seed!r}; the same one gives the same draw"
        )
    return int(seed)
