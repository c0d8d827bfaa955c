"""The processes that divide the windows of a run among them, each with the whole model.

What a process finds on its windows is exchanged before anything is decided, so that all of them take the same
decisions. Sums are added in the order of the processes. A run in one process exchanges nothing.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from depthgauge.base.errors import DepthgaugeError, InputError
from depthgauge.base.format import counted

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
ENDED = (
    "another process of this run has ended, or the run was stopped; what was finished is kept next to --out: add "
    "--resume to the same command to continue"
)
"""What a process says that cannot go on."""
_TOGETHER = 2**24
"""Numbers that are exchanged together, where there are many small tensors."""


class EndedRunError(DepthgaugeError):
    """A process of the run has ended, so that the others cannot go on."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run: this one is `index` of `count`, and has the windows index, index + count, ….

    With `count` > 1, the default process group of torch has these processes.
    """

    index: int = 0
    count: int = 1

    def part(self, windows: Any) -> Any:
        """Return the windows of this process.

        Raises:
            InputError: there are fewer windows than processes.
        """
        if len(windows) < self.count:
            found = counted(len(windows), "window")
            raise InputError(f"{self.count} processes cannot divide {found}; start fewer, with --nproc-per-node")
        return windows if self.count == 1 else windows[self.index :: self.count]

    def among(self, windows: slice) -> slice:
        """Return which windows of this process are among the first ones of all, `windows`."""
        if self.count == 1 or windows.stop is None:
            return windows
        return slice(0, len(range(self.index, windows.stop, self.count)))

    def exchanged(self, value: T) -> list[T]:
        """Return the values of all processes, in their order."""
        if self.count == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.count
        with _no_traceback():
            dist.all_gather_object(found, value)
        return cast(list[T], found)

    def shared(self, make: Callable[[], T]) -> T:
        """Return what process 0 makes; the others wait for it."""
        if self.count == 1:
            return make()
        import torch.distributed as dist

        held: list[Any] = [make() if self.index == 0 else None]
        with _no_traceback():
            dist.broadcast_object_list(held, src=0)
        return cast(T, held[0])

    def wait(self) -> None:
        """Wait for all processes."""
        self.exchanged(None)

    def each(self, make: Callable[[int], T], count: int) -> list[T]:
        """Return make(0) … make(count − 1), each of which one of the processes computes."""
        parts = self.exchanged([make(number) for number in range(self.index, count, self.count)])
        return [parts[number % self.count][number // self.count] for number in range(count)]

    def in_order(self, rows: "Tensor") -> "Tensor":
        """Return one row for every window, in their order, given those of the windows of this process, on the CPU."""
        if self.count == 1:
            return rows
        parts = self.exchanged(rows)
        made = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
        for index, part in enumerate(parts):
            made[index :: self.count] = part
        return made

    def sum(self, value: "Tensor") -> "Tensor":
        """Return the sum of the tensors of all processes, added in their order: it is the same in all of them."""
        if self.count == 1:
            return value
        import torch
        import torch.distributed as dist

        own = value.contiguous()
        total = torch.zeros_like(own)
        for source in range(self.count):
            one = own if source == self.index else torch.empty_like(own)
            with _no_traceback():
                dist.broadcast(one, source)
            total += one
        return total

    def sums(self, values: "Sequence[Tensor]") -> "list[Tensor]":
        """Return the sums of several tensors of one dtype and device; small ones are exchanged together."""
        if self.count == 1:
            return [*values]
        import torch

        made: list[Tensor] = []
        while len(made) < len(values):
            some = [values[len(made)]]
            for value in values[len(made) + 1 :]:
                if sum(one.numel() for one in some) + value.numel() > _TOGETHER:
                    break
                some.append(value)
            total = self.sum(torch.cat([one.flatten() for one in some]))
            parts = torch.split(total, [one.numel() for one in some])
            made += [part.view_as(one) for part, one in zip(parts, some, strict=True)]
        return made

    def refuse(self, what: str) -> None:
        """Raise an InputError if there are several processes."""
        if self.count > 1:
            raise InputError(f"{what} needs one process; start the command without torchrun")

    def check_placement(self, options: Any) -> None:
        """Raise an InputError if options place the models of all processes on the same devices."""
        if self.count == 1:
            return
        device: str = options.device or ""
        given = "--device-map" if options.device_map is not None else f"--device {device}" if ":" in device else None
        if given is not None:
            raise InputError(
                f"{given} cannot be combined with several processes, each of which has its own GPU; leave it out, or "
                "start one process without torchrun"
            )

    def require_same(self, read: Mapping[str, Any]) -> None:
        """Raise an InputError in all processes unless all have read the same, given by what it is."""
        if self.count == 1:
            return
        digests = {
            name: hashlib.sha256(json.dumps(value, default=str).encode()).digest() for name, value in read.items()
        }
        first, *others = self.exchanged(digests)
        for index, other in enumerate(others, 1):
            for name in first:
                if other[name] != first[name]:
                    raise InputError(
                        f"process {index} has read another {name} than process 0; give all of them the same files and "
                        "the same command"
                    )


ALONE = Ranks()
"""A run in one process."""


@contextmanager
def _no_traceback() -> Iterator[None]:
    """Turn the errors of torch about a process that has ended into one sentence."""
    try:
        yield
    except RuntimeError as error:
        raise EndedRunError(ENDED) from error
