"""The mean of a few values and its 95 % confidence interval.

The values are one number per window, such as the loss that a window gains without a layer. They are few and often
skewed. Percentiles of resampled means then cover less often than they say: an interval is needed that allows for both.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from scipy import special
from torch import Tensor

from depthgauge.results.checkpoint_subject import LEAST_WINDOWS, Interval

LEVEL = 0.95


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of one value per window as `loss`, and from `LEAST_WINDOWS` windows on its interval."""
    v = torch.tensor(list(values), dtype=torch.float64)
    low, high = (None, None) if len(v) < LEAST_WINDOWS else map(float, interval_ends(v))
    return Interval(loss=float(v.mean()), low=low, high=high)


def interval_ends(values: Float[Tensor, "*batch n"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Compute the smallest interval that contains Student's and Hall's intervals of the mean of n values.

    With the mean m, the standard deviation s, the skewness γ and t = t_{n−1, 0.975}, they are

    - Student: m ± t s/√n, exact for normal values, too short for skewed ones
    - Hall (1992): from m − s w(t/√n) to m − s w(−t/√n), where w is the inverse of f(w) = w + γw²/3 + γ²w³/27 + γ/(6n),
      which removes the skewness of (m − μ)/s; too short for heavy tails

    The values are in the last dimension and independent of each other.
    """
    n = values.shape[-1]
    mean, spread = values.mean(dim=-1), values.std(dim=-1)
    about = values - mean[..., None]
    skewness = about.pow(3).mean(dim=-1) / about.square().mean(dim=-1).pow(1.5)
    skewness = skewness.nan_to_num(nan=0.0)  # 0/0: all values are equal
    z = float(special.stdtrit(n - 1, (1 + LEVEL) / 2)) / math.sqrt(n)
    low = mean - spread * _without_skewness(z, skewness, n).clamp(min=z)
    high = mean - spread * _without_skewness(-z, skewness, n).clamp(max=-z)
    return low, high


def _without_skewness(z: float, skewness: Float[Tensor, "*batch"], n: int) -> Float[Tensor, "*batch"]:
    """Return w(z) = (3/γ)(c − 1) with c³ = 1 + γ(z − γ/(6n)), in a form that is also accurate for γ near 0."""
    shifted = z - skewness / (6 * n)
    cube = 1 + skewness * shifted
    c = cube.sign() * cube.abs().pow(1 / 3)
    return 3 * shifted / (c * c + c + 1)
