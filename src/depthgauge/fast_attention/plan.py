"""The plan of an `attention` call: for every head the chosen path, the bounds behind it, and the reason."""

import math
from dataclasses import dataclass, field
from itertools import product as every

import torch
from torch import Tensor

from depthgauge.base.format import number
from depthgauge.fast_attention.problem import GuaranteeError, Request
from depthgauge.fast_attention.theory.bounds import unit


@dataclass(frozen=True)
class HeadPlan:
    """The plan of one key head and the query heads that share it.

    `index` is the position of the head in the leading axes of k. `bound_before` and `bound_after` are the proved bound
    B on |scores| without and with centring. `exact_rows` counts the rows that are computed exactly beside the
    polynomial. Costs are predicted operations. `guarantee` and `rounding` are fractions of range(v); `gradient` is the
    relative bound of the gradients, or None if no gradient is needed.
    """

    index: tuple[int, ...]
    path: str
    why: str
    bound_before: float
    bound_after: float
    centring: str
    degree: int | None
    features: int
    exact_rows: int
    cost_exact: float
    cost_polynomial: float
    guarantee: float
    rounding: float
    gradient: float | None
    backend: str


@dataclass(frozen=True, eq=False)
class Fixed:
    """What calls that follow a plan need: one polynomial for all heads.

    - `shapes`, `dtype`: those of q, k and v
    - `options`: (is_causal, tolerance, scale, enable_gqa)
    - `coefficients`: those of p
    - `bound`: the largest scores that p covers within the tolerance
    - `query`, `key`: the largest norms of every head when the plan was made
    - `has_gradients`: whether the tolerance holds for gradients of q and k too
    - `violations`: the number of calls whose scores may exceed `bound`, on the device
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    options: tuple[bool, float, float, bool]
    coefficients: tuple[float, ...]
    bound: float
    query: tuple[float, ...]
    key: tuple[float, ...]
    has_gradients: bool
    violations: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """What `attention` does with some arguments. `str(plan)` is a table with one row per key head.

    Pass it to `attention` as `plan` to use its decision for other tensors of the same shapes: no number is then copied
    to the host, so that the call can be captured in a CUDA graph. `fixed` is what such calls need, or why there can be
    none. Call `check` after them.

    Every output entry of a head differs from exact attention by at most

        (guarantee + rounding) × range(v column) + output_unit × |entry| + output_floor.
    """

    tolerance: float
    dtype: torch.dtype
    heads: tuple[HeadPlan, ...]
    notes: tuple[str, ...]
    fixed: Fixed | str = field(compare=False, repr=False)

    def check(self) -> None:
        """Raise an error if a call that followed this plan had scores beyond its bound. Waits for the device.

        Raises:
            GuaranteeError: The outputs of at least one call since the last check have no guarantee.
        """
        if isinstance(self.fixed, str):
            return  # no call can follow this plan, unless it is exact, and exact attention needs no check
        count = int(self.fixed.violations)
        if count:
            self.fixed.violations.zero_()
            raise GuaranteeError(
                f"{count} calls that followed this plan may have scores beyond B = {self.fixed.bound:.3g}, or numbers "
                "that are not finite: their outputs have no guarantee; make a new plan from such tensors, or call "
                "attention without plan"
            )

    @property
    def path(self) -> str:
        """`exact`, `polynomial`, or `mixed` if heads take different paths."""
        paths = {head.path for head in self.heads}
        return paths.pop() if len(paths) == 1 else "mixed" if paths else "exact"

    @property
    def guarantee(self) -> float:
        """The largest guaranteed error of any head, as a fraction of range(v)."""
        return max((head.guarantee for head in self.heads), default=0.0)

    @property
    def rounding(self) -> float:
        """The largest rounding allowance of any head on the polynomial path, as a fraction of range(v)."""
        return max((head.rounding for head in self.heads), default=0.0)

    @property
    def output_unit(self) -> float:
        """The relative error of storing an entry in the output dtype, including values with a large mean."""
        return 4 * unit(self.dtype)

    @property
    def output_floor(self) -> float:
        """The absolute error of entries below the normal range of the dtype: its smallest normal number."""
        return float(torch.finfo(self.dtype).tiny)

    def __str__(self) -> str:
        rows = [
            ("head", "path", "B", "centred", "degree", "features", "exact rows", "cost", "exact cost", "error", "why")
        ]
        for h in self.heads:
            is_fast = h.path == "polynomial"
            rows.append((
                ",".join(map(str, h.index)), f"{h.path} ({h.backend})" if is_fast else h.path,
                number(h.bound_before), number(h.bound_after), "-" if h.degree is None else str(h.degree),
                str(h.features) if is_fast else "-", str(h.exact_rows) if is_fast else "-",
                number(h.cost_polynomial, 2), number(h.cost_exact, 2),
                f"{number(h.guarantee, 2)} + {number(h.rounding, 1)}" if is_fast else "0", h.why,
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([f"attention at tolerance {self.tolerance:g}: {self.path}", *lines, *self.notes])


def exact_plan(request: Request, why: str) -> AttentionPlan:
    """Return the plan of a call that only the exact path supports, so that nothing has to be bounded."""
    heads = tuple(
        HeadPlan(
            index=tuple(at), path="exact", why=why, bound_before=math.nan, bound_after=math.nan, centring="none",
            degree=None, features=0, exact_rows=0, cost_exact=math.nan, cost_polynomial=math.nan, guarantee=0.0,
            rounding=0.0, gradient=None, backend="torch",
        )
        for at in every(*map(range, request.k.shape[:-2]))
    )  # fmt: skip
    return AttentionPlan(request.options.tolerance, request.q.dtype, heads, (), why)
