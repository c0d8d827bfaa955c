"""Upper confidence bounds on how much the loss grows.

The input is one number per certify window: the mean increase of the loss over the tokens of the window, in nats per
token. The bounds assume that the windows are exchangeable with future windows (`ASSUMPTION`). They assume no shape of
the distribution: no normality and no variance.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from depthgauge.errors import InputError
from depthgauge.results.shrink_record import QuantileRecord

ASSUMPTION = (
    "This holds for text like the certify windows: it assumes that these windows and future windows are exchangeable."
)
"""Shown wherever a guarantee appears."""


def quantile_guarantee(
    increases: Sequence[float] | Float[np.ndarray, "..."], share: float = 0.95, confidence: float = 0.95, looks: int = 1
) -> QuantileRecord:
    """Bound the `share`-quantile of the increases from above by an order statistic.

    The bound is the k-th smallest of the m increases, x_(k), with the smallest k such that

        P[Binomial(m, share) ≥ k] ≤ (1 − confidence)/looks.

    Let q be the smallest number with P[x ≤ q] ≥ share. Then P[x < q] ≤ share, and the bound fails exactly if
    x_(k) < q, so if at least k increases are below q. This has probability at most P[Binomial(m, share) ≥ k]. Ties need
    no special treatment. If the windows have chosen one of several models, the probability that the bound of any of
    them fails is at most the sum of their error probabilities (Bonferroni).

    Args:
        increases: x_1 … x_m, one increase per certify window.
        share: share of windows that the bound must cover, between 0 and 1.
        confidence: probability that the bound is true, between 0 and 1.
        looks: how many models were measured on these windows before this one was chosen.

    Returns:
        The bound. Its `increase` is None if m < `windows_needed(share, confidence)`.

    Raises:
        InputError: an increase is not finite, or `share` or `confidence` is not between 0 and 1.
    """
    x = np.sort(_checked(increases))
    tail = _tail(share, confidence) / looks
    m = len(x)
    enough = _binomial_tail(np.arange(1, m + 1), m, share) <= tail  # one entry per k
    increase = float(x[np.argmax(enough)]) if enough.any() else None
    return QuantileRecord(increase=increase, share=share, confidence=confidence, windows=m)


def windows_needed(share: float = 0.95, confidence: float = 0.95) -> int:
    """Return the smallest number of windows with a quantile bound: the smallest m with shareᵐ ≤ 1 − confidence.

    >>> windows_needed(0.95, 0.95)
    59
    """
    tail = _tail(share, confidence)
    m = max(1, math.floor(math.log(tail) / math.log(share)) - 1)
    while _binomial_tail(m, m, share) > tail:
        m += 1
    return m


def _binomial_tail(k: int | np.ndarray, m: int, share: float) -> Any:
    """Return P[Binomial(m, share) ≥ k], rounded up."""
    return np.minimum(1, stats.binom.sf(np.asarray(k) - 1, m, share) * (1 + 1e-12))


def _tail(share: float, confidence: float) -> float:
    """Return 1 − confidence, after checking both numbers."""
    meanings = {
        "share": (share, "the share of windows that the bound covers"),
        "confidence": (confidence, "the probability that the guarantee is true"),
    }
    for name, (value, meaning) in meanings.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < 1:
            raise InputError(f"{name} must be a number between 0 and 1, got {value!r}; it is {meaning}")
    return 1 - confidence


def _checked(increases: Sequence[float] | Float[np.ndarray, "..."]) -> Float[np.ndarray, " m"]:
    x = np.asarray(increases, dtype=np.float64)
    if x.ndim != 1:
        raise InputError(f"increases must be a list of numbers, one per window, got an array of shape {x.shape}")
    if not np.isfinite(x).all():
        index = int(np.argmin(np.isfinite(x)))
        raise InputError(f"increases must be finite numbers, got {x[index]} for window {index}")
    return x
