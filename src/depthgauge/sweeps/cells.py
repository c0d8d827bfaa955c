"""Cells: the unit of work of a sweep, identified by a hash of its definition."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


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
