"""Upper bounds in float64, with operators that round up."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthgauge.theory.linalg.rounding import (
    add_down,
    div_up,
    down,
    mul_up,
    nonnegative_matmul_up,
    nonnegative_sum_up,
    sqrt_up,
    sub_down,
    tanh_up,
    up,
)


class OutwardUpper:
    """Upper bounds in float64; every operation rounds up."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @staticmethod
    def cat(parts: "Sequence[OutwardUpper]", dim: int = 0) -> "OutwardUpper":
        """Concatenate bounds."""
        return OutwardUpper(torch.cat([part.value for part in parts], dim))

    @property
    def shape(self) -> torch.Size:
        """The shape of the array."""
        return self.value.shape

    def __getitem__(self, index: Any) -> "OutwardUpper":
        return OutwardUpper(self.value[index])

    def __add__(self, other: Any) -> "OutwardUpper":
        return OutwardUpper(up(self.value + _value(other)))

    def __mul__(self, other: Any) -> "OutwardUpper":
        return OutwardUpper(up(self.value * _value(other)))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "OutwardUpper":
        return OutwardUpper(div_up(self.value, _value(other)))

    def __matmul__(self, other: "OutwardUpper") -> "OutwardUpper":
        return OutwardUpper(nonnegative_matmul_up(self.value, other.value))

    def sum(self, dim: int | tuple[int, ...]) -> "OutwardUpper":
        """Bound the sums of numbers that are not negative."""
        return OutwardUpper(nonnegative_sum_up(self.value, dim))

    def amax(self, dim: int | tuple[int, ...]) -> "OutwardUpper":
        """Return the largest bounds."""
        return OutwardUpper(self.value.amax(dim))

    def expand(self, *shape: int) -> "OutwardUpper":
        """As `torch.Tensor.expand`."""
        return OutwardUpper(self.value.expand(*shape))

    def reshape(self, *shape: int) -> "OutwardUpper":
        """As `torch.Tensor.reshape`."""
        return OutwardUpper(self.value.reshape(*shape))

    def least(self, other: Any) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(torch.fmin(self.value, torch.as_tensor(_value(other), dtype=torch.float64)))

    def most(self, other: Any) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(torch.maximum(self.value, torch.as_tensor(_value(other), dtype=torch.float64)))

    def sqrt(self) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(sqrt_up(self.value))

    def tanh(self) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(tanh_up(self.value))

    def over_rest(self, part: "OutwardUpper") -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        return OutwardUpper(div_up(self.value, sub_down(1.0, part.value).clamp(min=0.0)))

    def chord(self) -> "OutwardUpper":
        """As in `arithmetic.Upper`."""
        s = self.value
        cosine = down(sub_down(1.0, mul_up(s, s)).clamp(min=0.0).sqrt())
        chord = mul_up(s, sqrt_up(div_up(2.0, add_down(1.0, cosine))))
        return OutwardUpper(torch.where(s < 1, chord.clamp(max=2.0), 2.0))

    def floats(self) -> Tensor:
        """As in `arithmetic.Upper`."""
        return self.value


def _value(x: Any) -> Any:
    return x.value if isinstance(x, OutwardUpper) else x
