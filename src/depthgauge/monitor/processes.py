"""The processes that train a model together: they exchange what each measured, and a probe fails in all or in none."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from depthgauge.base.errors import DepthgaugeError

PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others in an exchange: longer than one of them needs to save a checkpoint."""


def ranks() -> int:
    """Return the number of processes that train the model together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the index of this process; 0 without a process group."""
    return dist.get_rank() if ranks() > 1 else 0


def cause_of(error: BaseException) -> str:
    """Return type and text of an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


@dataclass(frozen=True)
class Failure:
    """What one process exchanges instead of a value: `cause` is type and text of its error."""

    process: int
    cause: str


class ProbeError(Exception):
    """A probe failed in at least one process; raised in all of them. The message is the cause."""


class ExchangeError(DepthgaugeError):
    """The processes of a distributed run could not exchange what they measured."""


T = TypeVar("T")


class Processes:
    """All processes of a training run; one without a process group.

    They exchange Python objects through a group of their own on the CPU, because a process that fails in the middle of
    a sharded forward pass must not meet the collectives of the others in the exchange.
    """

    def __init__(self) -> None:
        self.count, self.index = ranks(), rank()
        self._group: Any = None
        if self.count > 1 and dist.is_gloo_available():
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def exchanged(self, value: T | Failure) -> list[T]:
        """Return the values of all processes, in the same order in every process.

        A process that has failed exchanges its failure at any time. The others receive it in their next exchange,
        whatever they exchange there.

        Raises:
            ProbeError: A process has failed.
            ExchangeError: A process has ended, or does not take part within `PATIENCE`.
        """
        found: list[Any] = [value]
        if self.count > 1:
            found = [None] * self.count
            try:
                dist.all_gather_object(found, value, group=self._group)
            except RuntimeError as error:
                raise ExchangeError(
                    f"process {self.index} could not exchange the measures of a probe with the other processes "
                    f"({cause_of(error)}); one of them has ended, or waits in a forward pass that failed here"
                ) from error
        for one in found:
            if isinstance(one, Failure):
                raise ProbeError(one.cause if self.count == 1 else f"{one.cause} (in process {one.process})")
        return cast(list[T], found)

    def mean(self, value: float) -> float:
        """Return the mean of a number over all processes."""
        return sum(self.exchanged(value)) / self.count

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Turn an error of this process into a `ProbeError` in all processes, in their next exchange."""
        try:
            yield
        except (ProbeError, ExchangeError):
            raise
        except Exception as error:
            self.exchanged(Failure(self.index, cause_of(error)))
