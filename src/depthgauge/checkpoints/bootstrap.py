"""Bootstrap confidence intervals for the mean of a few values, corrected for small samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy import stats

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """The mean over windows and its 95 % bootstrap interval; a single window has no interval.

    - `mean`: the mean
    - `low`, `high`: ends of the interval, or None
    """

    mean: float
    low: float | None
    high: float | None


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval:
    """Compute the mean of m values and its expanded percentile bootstrap interval (Hesterberg, 2015).

    Plain percentile intervals of small samples are too narrow: the bootstrap variance is (m−1)/m times the unbiased
    one, and normal quantiles are used where Student's t applies. The tail probability α/2 is therefore replaced by
    Φ(−√(m/(m−1)) · t_{m−1, 1−α/2}).

    Args:
        values: one value per window.
        seed: seed of the resampling.
    """
    v = torch.tensor(list(values), dtype=torch.float64)
    m = len(v)
    if m < 2:
        return Interval(float(v.mean()), None, None)
    draws = torch.randint(m, (RESAMPLES, m), generator=torch.Generator().manual_seed(seed))
    tail = float(stats.norm.cdf(-math.sqrt(m / (m - 1)) * stats.t.ppf((1 + LEVEL) / 2, m - 1)))
    low, high = torch.quantile(v[draws].mean(dim=1), torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Interval(float(v.mean()), low, high)
