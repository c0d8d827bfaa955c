"""Equality and `repr` for records that hold tensors or arrays."""

from dataclasses import fields
from typing import Any

import numpy as np
import torch


class ArrayRecord:
    """Base class of frozen dataclasses with tensor or array fields.

    The `__eq__` that `dataclass` generates raises for tensors of more than one entry, and the `repr` prints every
    entry. Subclasses are declared with `@dataclass(frozen=True, eq=False, repr=False)` and inherit the two methods
    below. They are not hashable.
    """

    def __eq__(self, other: object) -> bool:
        """Compare field by field. Arrays are equal if device, shape, dtype and entries agree; NaN equals NaN."""
        if type(other) is not type(self):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = (f"{f.name}={_brief(getattr(self, f.name))}" for f in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(shown)})"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.device != b.device:
            return False
    elif not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return type(a) is type(b) and bool(a == b)
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _brief(value: Any) -> str:
    """Return the value of a scalar, or the dtype and shape of an array, such as `float64[2, 3]`."""
    if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        return f"{len(value)} × {_brief(value[0])}"
    if not isinstance(value, torch.Tensor | np.ndarray):
        return repr(value)
    if value.ndim == 0:
        return f"{value.item():.6g}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
