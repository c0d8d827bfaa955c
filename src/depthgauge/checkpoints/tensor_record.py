"""Equality and a short repr for dataclasses with tensor fields."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor


class TensorRecord:
    """Base class of dataclasses with tensor fields; declare them with `@dataclass(frozen=True, eq=False, repr=False)`.

    Two records are equal if they have the same type and all fields are equal. Two tensors are equal if their device,
    dtype, shape and entries are equal. The `__eq__` that `dataclass` generates would raise, because the truth value of
    an elementwise comparison is ambiguous. `repr` shows the dtype and shape of a tensor instead of its entries.
    """

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_equal(mine, theirs) for mine, theirs in zip(_values(self), _values(other), strict=True))

    __hash__ = None  # type: ignore[assignment]  # tensors can change in place

    def __repr__(self) -> str:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]  # every subclass is a dataclass
        shown = (f"{name}={_short(value)}" for name, value in zip(names, _values(self), strict=True))
        return f"{type(self).__name__}({', '.join(shown)})"


def _values(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in fields(record)]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape) and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
        return f"{len(value)} × {_short(value[0])}"
    return repr(value)
