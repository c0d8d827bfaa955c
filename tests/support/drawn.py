"""Hypothesis strategies: floats with many edge cases, vectors and matrices."""

import math

import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

TINY = 2.0**-1074
LEAST_NORMAL = 2.0**-1022
LARGEST = float.fromhex("0x1.fffffffffffffp+1023")

AWKWARD = [
    0.0,
    -0.0,
    TINY,
    -TINY,
    3 * TINY,
    LEAST_NORMAL,
    LEAST_NORMAL - TINY,
    -LEAST_NORMAL,
    1.0,
    -1.0,
    1.0 + 2.0**-52,
    1.0 - 2.0**-53,
    2.0**-53,  # 1 + 2⁻⁵³ is an exact tie
    3 * 2.0**-53,
    2.0**53 + 2.0,
    0.1,
    -0.3,
    2.0**-537,  # the square is near the smallest subnormal number
    1.5 * 2.0**-538,
    2.0**511,
    LARGEST,
    -LARGEST,
    LARGEST / 2,
]


def floats(low: float | None = None, high: float | None = None) -> st.SearchStrategy[float]:
    """Draw finite floats of every size, including subnormal numbers; edge cases are drawn often."""
    inside = [x for x in AWKWARD if (low is None or x >= low) and (high is None or x <= high)]
    anywhere = st.floats(low, high, allow_nan=False, allow_infinity=False)
    return st.one_of(anywhere, st.sampled_from(inside)) if inside else anywhere


def vectors(elements: st.SearchStrategy[float], least: int = 1, most: int = 12) -> st.SearchStrategy[Tensor]:
    """Draw float64 vectors."""
    return st.lists(elements, min_size=least, max_size=most).map(lambda x: torch.tensor(x, dtype=torch.float64))


@st.composite
def matrices(
    draw: st.DrawFn,
    rows: st.SearchStrategy[int] | None = None,
    columns: st.SearchStrategy[int] | None = None,
    elements: st.SearchStrategy[float] | None = None,
) -> Tensor:
    """Draw float64 matrices, by default with 1 to 6 rows and columns."""
    shape = draw(st.integers(1, 6) if rows is None else rows), draw(st.integers(1, 6) if columns is None else columns)
    entries = draw(hnp.arrays("float64", shape, elements=st.floats(-10, 10) if elements is None else elements))
    return torch.from_numpy(entries.copy())


@st.composite
def seeded(draw: st.DrawFn, *shape: int, spread: float = 1.0) -> Tensor:
    """Draw a matrix of normal entries from a random seed. This is faster than drawing each entry."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    return spread * torch.randn(*shape, generator=generator, dtype=torch.float64)


def probability(weights: Tensor) -> Tensor:
    """Normalise non-negative numbers to a probability vector; zeros give the uniform distribution."""
    total = weights.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), 1.0 / weights.shape[-1])


def ulps_between(low: float, high: float) -> float:
    """Return the number of float64 steps from `low` to `high`."""
    return (_index(high) - _index(low)) if math.isfinite(low) and math.isfinite(high) else math.inf


def _index(x: float) -> int:
    code = int(torch.tensor(x, dtype=torch.float64).view(torch.int64))
    return code if code >= 0 else -(code & 0x7FFFFFFFFFFFFFFF)
