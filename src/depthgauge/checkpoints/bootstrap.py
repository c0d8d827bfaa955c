"""Intervals from few windows: the bootstrap, with its levels widened for small samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over windows and its 95 % bootstrap interval; no interval from a single window."""

    mean: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        """As in the result JSON."""
        return {"loss": self.mean, "low": self.low, "high": self.high}


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """The mean of values and the expanded percentile interval of its bootstrap distribution.

    Plain percentiles of few values are too narrow (their spread is √((m−1)/m) too small, and normal where Student's t
    is asked for): the tail α/2 is replaced by Φ(−√(m/(m−1))·t_{m−1, 1−α/2}).
    """
    v = torch.tensor(list(values), dtype=torch.float64)
    m = len(v)
    if m < 2:
        return Interval(float(v.mean()), None, None)
    draws = torch.randint(m, (RESAMPLES, m), generator=torch.Generator().manual_seed(seed))
    tail = NormalDist().cdf(-math.sqrt(m / (m - 1)) * student_quantile((1 + LEVEL) / 2, m - 1))
    low, high = torch.quantile(v[draws].mean(dim=1), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(float(v.mean()), low, high)


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t for a whole number of degrees of freedom, by bisection of its distribution."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, freedom: int) -> float:
    """P(T ≤ t) for t ≥ 0 and whole ν: the finite sums in θ = arctan(t/√ν) (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    theta = math.atan2(t, math.sqrt(freedom))
    c, s = math.cos(theta) ** 2, math.sin(theta)
    odd = freedom % 2
    term = total = math.cos(theta) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= c * (k - 1) / k
        total += term
    within = 2 / math.pi * (theta + (s * total if freedom > 1 else 0.0)) if odd else s * total
    return (1 + within) / 2
