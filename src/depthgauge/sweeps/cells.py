"""The unit of a sweep: one computation, known by what it is."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


def canonical_json(document: Any) -> str:
    """The one way to write a document: keys sorted, no spaces, every float so that reading it gives the same float.

    >>> canonical_json({"b": 0.1, "a": [1, None]})
    '{"a":[1,null],"b":0.1}'
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def derived_seed(*parts: str | int) -> int:
    """A seed from 0 to 2⁶³ − 1 that follows from the parts: the head of their SHA-256."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True)
class Cell:
    """A task at one setting of its parameters, defaults written out, and one repetition of it.

    Where a task repeats inside a cell, `repetition` is how many repetitions it makes.
    """

    task: str
    version: int
    parameters: Mapping[str, Any]
    repetition: int

    @cached_property
    def identity(self) -> str:
        """The SHA-256 of task, version, parameters and repetition: equal for equal cells, wherever they came from."""
        document = {
            "task": self.task,
            "version": self.version,
            "parameters": dict(self.parameters),
            "repetition": self.repetition,
        }
        return hashlib.sha256(canonical_json(document).encode()).hexdigest()

    def seed(self, purpose: str) -> int:
        """The seed for one purpose of the computation, such as its network or its inputs; follows from the identity."""
        return derived_seed(self.identity, purpose)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: its `result`, or the `error` that stopped it; `seconds` is no part of either."""

    identity: str
    result: dict[str, Any] | None
    error: str | None
    seconds: float
