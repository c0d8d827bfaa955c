"""Bounds checks of every address that a kernel reads or writes under Triton's interpreter.

A launch runs on copies of its tensors. The copies lie in separate buffers with wide margins of NaN, so an address
outside of one tensor is not inside of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from depthgauge.fast_attention.launches import Launch

MARGIN = 2**18
"""Bytes before and after every tensor."""


class OutOfBoundsError(AssertionError):
    """A kernel used an address outside of its tensors."""


@dataclass
class Memory:
    """The tensors of the launch that runs, as address ranges, and the number of addresses checked so far."""

    ranges: list[tuple[int, int]] = field(default_factory=list)
    checked: int = 0

    def check(self, addresses: Any, size: int, action: str) -> None:
        """Raise an error unless all addresses of `size` bytes are inside of tensors."""
        starts, ends = np.array(sorted(self.ranges), dtype=np.int64).T
        at = addresses.astype(np.int64).ravel()
        place = np.searchsorted(starts, at, side="right") - 1
        is_inside = (place >= 0) & (at + size <= ends[np.maximum(place, 0)])
        if not is_inside.all():
            raise OutOfBoundsError(f"{action} of {int((~is_inside).sum())} addresses outside of all tensors")
        self.checked += at.size


def _apart(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return copies of the tensors, and for every storage its bytes and their copy."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    copies = []
    for x in tensors:
        storage = x.untyped_storage()
        if storage.data_ptr() not in found:
            own = torch.empty(0, dtype=torch.uint8).set_(storage)
            buffer = torch.full((own.numel() + 2 * MARGIN,), 255, dtype=torch.uint8)
            buffer[MARGIN : MARGIN + own.numel()] = own
            found[storage.data_ptr()] = own, buffer
        buffer = found[storage.data_ptr()][1]
        offset = MARGIN // x.element_size() + x.storage_offset()
        copies.append(torch.empty(0, dtype=x.dtype).set_(buffer.untyped_storage(), offset, x.shape, x.stride()))
    return copies, list(found.values())


def _range(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size() if x.numel() else x.data_ptr()


def checked_memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Check every address of every launch from now on."""
    from triton.runtime.interpreter import InterpreterBuilder

    memory = Memory()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    atomic, launch = InterpreterBuilder.create_atomic_rmw, Launch.__call__

    def used(pointers: Any, mask: Any) -> tuple[Any, int]:
        return pointers.data[mask.data.astype(bool)], pointers.get_element_ty().primitive_bitwidth // 8

    def checked_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        memory.check(*used(pointers, mask), "a read")
        return load(self, pointers, mask, *others)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        memory.check(*used(pointers, mask), "a write")
        return store(self, pointers, value, mask, *others)

    def checked_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        memory.check(*used(pointers, mask), "an atomic write")
        return atomic(self, operation, pointers, value, mask, *others)

    def checked_launch(self: Launch, tensors: Sequence[Tensor], floats: Sequence[float] = ()) -> None:
        copies, storages = _apart(tensors)
        memory.ranges = [_range(x) for x in copies]
        launch(self, copies, floats)
        for own, buffer in storages:
            assert bool((buffer[:MARGIN] == 255).all() and (buffer[-MARGIN:] == 255).all())
            own.copy_(buffer[MARGIN:-MARGIN])

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", checked_atomic)
    monkeypatch.setattr(Launch, "__call__", checked_launch)
    return memory
