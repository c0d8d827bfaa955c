"""Error types. Every error that depthgauge raises on purpose is a `DepthgaugeError`."""

from __future__ import annotations

import difflib
import math
import numbers
import re
import reprlib
import warnings
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar


class DepthgaugeError(Exception):
    """Base class of all errors raised by depthgauge. The message is one sentence that explains the problem."""

    exit_code: ClassVar[int] = 1


class InputError(DepthgaugeError, ValueError):
    """An argument, option or file cannot be used. The message says what was given, what was expected, what to do."""

    exit_code: ClassVar[int] = 2


class NetworkFileError(InputError):
    """A network file is damaged, has another format, or was written by a newer version."""


class InputFileError(InputError):
    """A file of input tokens cannot be used."""


class MissingPackageError(InputError, ImportError):
    """An optional package is needed and not installed. The message contains the `pip install` command."""


class InterruptedRunError(DepthgaugeError):
    """A run was interrupted from the keyboard. The message says what was kept and how to resume."""

    exit_code: ClassVar[int] = 130


class OutputError(DepthgaugeError):
    """A result could not be written. `result` is what `gauge` would have returned, if that is known."""

    result: Any = None


class VerificationError(DepthgaugeError):
    """The upper bound of a certificate could not be verified. The message names the step that failed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out; torch, which may not be imported, has several kinds of them."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    said = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


class EndedRunError(DepthgaugeError):
    """A process of the run has ended, so that the others cannot go on."""

    def __init__(self) -> None:
        super().__init__(
            "another process of this run has ended, or the run was stopped; what was finished is kept next to --out: "
            "run the same command again to continue"
        )


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra. It works however depthgauge itself was installed."""
    from importlib.metadata import PackageNotFoundError, requires  # slow to import, and rarely needed

    try:
        needed = [line.partition(";") for line in requires("depthgauge") or ()]
    except PackageNotFoundError:  # a source tree that is not installed
        needed = []
    names = [name.strip() for name, _, when in needed if re.search(rf"extra == ['\"]{extra}['\"]", when)]
    return "pip install " + " ".join(f"'{name}'" for name in sorted(names) or [f".[{extra}]"])


def missing_extra(what: str, extra: str) -> MissingPackageError:
    """Return the error for something that needs the packages of an extra, which are not installed."""
    return MissingPackageError(f"{what} needs the extra `{extra}`; install it with `{install_command(extra)}`")


def optional(module: str, what: str, extra: str) -> Any:
    """Import and return a module of an extra, without warnings; raise an error that names the extra if it is missing.

    `what` is what needs it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(module)
    except ImportError as error:
        raise missing_extra(what, extra) from error


def unknown_name(what: str, given: object, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not in `known`. It suggests the most similar known name."""
    names = list(known)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InputError(f"{what} must be one of {', '.join(names)}, got {given!r}{hint}")


def require_type(name: str, value: object, kind: type | tuple[type, ...], expected: str, hint: str = "") -> None:
    """Raise `InputError` unless the argument `name` has one of these types; `expected` names them in words."""
    if not isinstance(value, kind):
        given = "None" if value is None else f"{type(value).__name__} {reprlib.repr(value)}"
        raise InputError(f"{name} must be {expected}, got {given}{hint and f'; {hint}'}")


def require_path(name: str, value: object) -> Path:
    """Return `value` as a path if it can name a file or directory; raise `InputError` otherwise."""
    require_type(name, value, (str, Path), "the path of a file or directory, as a string or a Path")
    return Path(value)  # type: ignore[arg-type]


def require_options(options: object, kind: type, function: str) -> None:
    """Raise `InputError` unless `options` is None or a record of this type."""
    if options is not None:
        hint = f"single options can be given by name: {function}(…, **options)"
        require_type("options", options, kind, f"{kind.__name__} or None", hint)


def require_positive(name: str, value: float, meaning: str) -> float:
    """Return `value` as a float if it is a positive finite number; raise `InputError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{name} must be a positive number, got {value!r}; it is {meaning}")
    return float(value)


def require_count(name: str, value: int, meaning: str, least: int = 1) -> int:
    """Return `value` as an int if it is a whole number of at least `least`; raise `InputError` otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}; it is {meaning}")
    return int(value)


def require_seed(seed: int) -> int:
    """Return `seed` if it is a whole number from 0 to 2⁶³ − 1; raise `InputError` otherwise."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**63:
        meaning = "it starts the random number generator"
        raise InputError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed!r}; {meaning}")
    return int(seed)


LARGEST_RADIUS = 1e100
"""The largest radius of a set of inputs; beyond it squares and cubes leave the range of float64."""


def require_radius(value: float, name: str = "radius", meaning: str = "the largest |entry| an input may have") -> float:
    """Return `value` as a float if it is a positive number up to `LARGEST_RADIUS`, else raise InputError."""
    radius = require_positive(name, value, meaning)
    if radius > LARGEST_RADIUS:
        raise InputError(f"{name} must be at most {LARGEST_RADIUS:g}, got {value!r}; it is {meaning}")
    return radius
