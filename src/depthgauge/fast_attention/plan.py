"""What `attention` does with its arguments, said: a table that a reader can check."""

import math
from dataclasses import dataclass
from itertools import product as every

import torch

from depthgauge._format import number
from depthgauge.fast_attention.decide.bounds import unit
from depthgauge.fast_attention.problem import Request


@dataclass(frozen=True)
class HeadPlan:
    """What is done for one key head (and the query heads that share it), and why."""

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


@dataclass(frozen=True)
class Plan:
    """What `attention` does with these arguments; `str(plan)` is a table.

    Every output entry of head h is within (guarantee + rounding) × range(v column) + output_unit × |entry| +
    output_floor of exact attention. Costs are predicted operations. `bound_before` and `bound_after` are B without and
    with centring.
    """

    tolerance: float
    dtype: torch.dtype
    heads: tuple[HeadPlan, ...]
    notes: tuple[str, ...]

    @property
    def path(self) -> str:
        """`exact`, `polynomial`, or `mixed` where heads differ."""
        paths = {head.path for head in self.heads}
        return paths.pop() if len(paths) == 1 else "mixed" if paths else "exact"

    @property
    def guarantee(self) -> float:
        """The largest guaranteed error of any head, as a share of range(v)."""
        return max((head.guarantee for head in self.heads), default=0.0)

    @property
    def rounding(self) -> float:
        """The largest rounding allowance of any head on the fast path, as a share of range(v)."""
        return max((head.rounding for head in self.heads), default=0.0)

    @property
    def output_unit(self) -> float:
        """What storing an entry, and values with a mean, may cost in their dtype, as a share of the entry."""
        return 4 * unit(self.dtype)

    @property
    def output_floor(self) -> float:
        """What is lost where values are so small that their dtype has no digits left: its smallest normal number."""
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


def exact_plan(request: Request, why: str) -> Plan:
    """The plan where nothing is surveyed, because only the exact path can do what is asked."""
    nan = math.nan
    heads = tuple(
        HeadPlan(tuple(at), "exact", why, nan, nan, "none", None, 0, 0, nan, nan, 0.0, 0.0, None, "torch")
        for at in every(*map(range, request.k.shape[:-2]))
    )
    return Plan(request.tolerance, request.q.dtype, heads, ())
