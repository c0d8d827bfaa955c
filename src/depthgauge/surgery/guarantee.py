"""Upper confidence bounds on how much the loss grows, and tests of a limit on it.

The input is one number per certify window: the mean increase of the loss over the tokens of the window, in nats per
token. The bounds assume that the windows are exchangeable with future windows (`ASSUMPTION`). They assume no shape of
the distribution: no normality and no variance.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy import stats
from torch import Tensor

from depthgauge.errors import InputError, require_count, require_positive

Increases = Sequence[float] | Float[np.ndarray, "..."]
"""One increase of the mean loss per certify window, in nats per token."""

ASSUMPTION = (
    "This holds for text like the certify windows: it assumes that these windows and future windows are exchangeable."
)
"""Shown wherever a guarantee appears."""

MIXING_WEIGHT = 0.01
"""Default ε of `mixed_loss`. It raises the loss of a token by at most −log(1 − ε) = 0.0101 nats, on both sides of the
comparison, while a smaller ε raises the ceiling log(V/ε) and with it the excess of the bound on the mean."""

BETTING = "betting: mixture of constant bets"
"""The method of `mean_guarantee`."""

_BETS = (2 / 3) ** np.arange(11)
"""Shares θ of the capital that are at risk: 1, 2/3, 4/9, …, 0.017."""
_WEIGHTS = np.array([0.95] + [0.005] * 10)
"""Share of the starting capital that each bet gets; the sum is 1.

θ = 1 is the best bet if the variance of the increases is below ceiling² log(1/α)/m, where α = 1 − confidence. Its
weight replaces log(1/α) in the excess of the bound by log(1/α) + 0.05. The other bets keep the bound useful if some
windows are near the ceiling or the increases vary more."""
_ROUNDING = 64 * np.finfo(np.float64).eps
"""Bound on the relative rounding error of a factor, of its logarithm and of a sum of logarithms."""


@dataclass(frozen=True)
class QuantileGuarantee:
    """With this confidence, at least this share of windows has an increase of at most `increase`.

    - `increase`: the bound in nats per token, or None if there are too few windows for any bound
    - `share`: share of windows
    - `confidence`: probability, over the draw of the certify windows, that the statement is true
    - `windows`: number of certify windows
    """

    increase: float | None
    share: float
    confidence: float
    windows: int


@dataclass(frozen=True)
class MeanGuarantee:
    """With this confidence, the mean increase is at most `increase`.

    - `increase`: the bound in nats per token, or None if no bound below the ceiling holds
    - `confidence`: probability, over the draw of the certify windows, that the statement is true
    - `method`: how the bound was computed
    - `windows`: number of certify windows
    - `ceiling`: the largest increase that is possible
    """

    increase: float | None
    confidence: float
    method: str
    windows: int
    ceiling: float


def quantile_guarantee(increases: Increases, share: float = 0.95, confidence: float = 0.95) -> QuantileGuarantee:
    """Bound the `share`-quantile of the increases from above by an order statistic.

    The bound is the k-th smallest of the m increases, x_(k), with the smallest k such that

        P[Binomial(m, share) ≥ k] ≤ 1 − confidence.

    Let q be the smallest number with P[x ≤ q] ≥ share. Then P[x < q] ≤ share, and the bound fails exactly if
    x_(k) < q, so if at least k increases are below q. This has probability at most P[Binomial(m, share) ≥ k]. Ties need
    no special treatment.

    Args:
        increases: x_1 … x_m, one increase per certify window.
        share: share of windows that the bound must cover, between 0 and 1.
        confidence: probability that the bound is true, between 0 and 1.

    Returns:
        The bound. Its `increase` is None if m < `windows_needed(share, confidence)`.

    Raises:
        InputError: an increase is not finite, or `share` or `confidence` is not between 0 and 1.
    """
    x = np.sort(_checked(increases))
    _require_fraction("share", share, _SHARE)
    tail = 1 - _require_fraction("confidence", confidence, _CONFIDENCE)
    m = len(x)
    enough = _binomial_tail(np.arange(1, m + 1), m, share) <= tail  # one entry per k
    increase = float(x[np.argmax(enough)]) if enough.any() else None
    return QuantileGuarantee(increase, share, confidence, m)


def quantile_p_value(increases: Increases, limit: float, share: float = 0.95) -> float:
    """Return the p-value of the hypothesis that the `share`-quantile of the increases is above the limit.

        p = P[Binomial(m, share) ≥ #{i : x_i ≤ limit}]

    p ≤ 1 − confidence exactly if the bound of `quantile_guarantee` is at most the limit.

    Args:
        increases: x_1 … x_m, one increase per certify window.
        limit: the largest acceptable increase, in nats per token.
        share: share of windows that must not exceed the limit.

    Raises:
        InputError: an increase or the limit is not finite, or `share` is not between 0 and 1.
    """
    x = _checked(increases)
    _require_fraction("share", share, _SHARE)
    below = int(np.count_nonzero(x <= _require_limit(limit)))
    return float(_binomial_tail(below, len(x), share)) if below else 1.0


def windows_needed(share: float = 0.95, confidence: float = 0.95) -> int:
    """Return the smallest number of windows with a quantile bound: the smallest m with shareᵐ ≤ 1 − confidence.

    >>> windows_needed(0.95, 0.95)
    59

    Args:
        share: share of windows that the bound must cover.
        confidence: probability that the bound is true.

    Raises:
        InputError: `share` or `confidence` is not between 0 and 1.
    """
    _require_fraction("share", share, _SHARE)
    tail = 1 - _require_fraction("confidence", confidence, _CONFIDENCE)
    m = max(1, math.floor(math.log(tail) / math.log(share)) - 1)
    while _binomial_tail(m, m, share) > tail:
        m += 1
    return m


def mean_guarantee(increases: Increases, ceiling: float, confidence: float = 0.95) -> MeanGuarantee:
    """Bound the mean of the increases from above; the increases must not exceed a known ceiling.

    The bound is the smallest limit μ with `mean_p_value` ≤ 1 − confidence. It is above the sample mean by about

        (ceiling − mean) · log(1/(1 − confidence)) / m

    and no bound for this class of distributions can be much smaller: with probability 1 − confidence, m windows contain
    none of the values at the ceiling that have this effect on the mean.

    Args:
        increases: x_1 … x_m, one increase per certify window.
        ceiling: C, the largest increase that is possible; `loss_ceiling` for losses from `mixed_loss`.
        confidence: probability that the bound is true, between 0 and 1.

    Returns:
        The bound. Its `increase` is None if no limit below the ceiling passes.

    Raises:
        InputError: an increase is not finite or above the ceiling, or an option is out of range.
    """
    below = _below_ceiling(increases, ceiling)
    tail = 1 - _require_fraction("confidence", confidence, _CONFIDENCE)
    m = len(below)
    bound = None
    if m:
        # The capital at the sample mean is at most 1, because a product is at most the m-th power of the mean factor.
        low, high = float(ceiling - below.mean()), math.nextafter(ceiling, -math.inf)
        if low < high and _p_value(below, ceiling - high) <= tail:
            while low < (middle := low + (high - low) / 2) < high:
                if _p_value(below, ceiling - middle) <= tail:
                    high = middle
                else:
                    low = middle
            bound = high  # the last limit that passed
    return MeanGuarantee(bound, confidence, BETTING, m, ceiling)


def mean_p_value(increases: Increases, limit: float, ceiling: float) -> float:
    """Return a p-value of the hypothesis that the mean of the increases is above the limit.

    With y_i = C − x_i ≥ 0 and ν = C − limit, the capital of a player who stakes the share θ of it on every window is

        K_θ = Π_i (1 + λ(limit − x_i)) = Π_i (1 − θ + θ y_i/ν),     λ = θ/ν ∈ [0, 1/(C − limit)],

    and p = 1/K for the mean K = Σ_j w_j K_{θ_j} over fixed bets θ_j with weights w_j. The argument:

    - Every factor is at least 1 − θ ≥ 0, because y_i ≥ 0. There is no lower limit on x_i, so nothing is clipped.
    - If the mean increase is at least the limit, E[y] ≤ ν. Then every factor has expectation at most 1, so E[K_θ] ≤ 1
      for independent windows. For windows drawn without replacement from a finite set, E[K_θ] is an elementary
      symmetric mean of nonnegative numbers, and it is at most the power of their arithmetic mean (Maclaurin). For
      exchangeable windows of an infinite sequence the same holds given the limit of its empirical distribution.
    - E[K] = Σ_j w_j E[K_{θ_j}] ≤ 1, so P[p ≤ a] = P[K ≥ 1/a] ≤ a (Markov).
    - Every factor decreases in ν, so K increases with the limit. The limits that pass are an interval without gaps,
      and bisection in `mean_guarantee` finds its end.

    The p-value does not depend on the order of the windows. It is rounded up. p ≤ 1 − confidence exactly if the bound
    of `mean_guarantee` is at most the limit.

    Args:
        increases: x_1 … x_m, one increase per certify window.
        limit: the largest acceptable mean increase, in nats per token; it must be below the ceiling.
        ceiling: C, the largest increase that is possible.

    Raises:
        InputError: an increase is not finite or above the ceiling, or the limit is not below the ceiling.
    """
    below = _below_ceiling(increases, ceiling)
    if _require_limit(limit) >= ceiling:
        raise InputError(
            f"limit must be below the ceiling {ceiling!r}, got {limit!r}; no increase can be above the ceiling"
        )
    return _p_value(below, ceiling - limit)


def largest_passing(p_values: Sequence[float], confidence: float = 0.95) -> int | None:
    """Return the index of the last hypothesis that is rejected when they are tested in a fixed sequence.

    The test stops at the first p-value above 1 − confidence. A false rejection requires that the first true hypothesis
    of the sequence is rejected, so the probability of any false rejection is at most 1 − confidence. No correction for
    the number of hypotheses is needed. The order must be fixed before the certify windows are used.

    Args:
        p_values: p-values of "the increase is above the limit", from the gentlest size to the harshest.
        confidence: probability that every size that passes is within the limit.

    Returns:
        The index of the harshest size that passes, or None if the first one fails.

    Raises:
        InputError: a p-value is not between 0 and 1, or `confidence` is out of range.
    """
    tail = 1 - _require_fraction("confidence", confidence, _CONFIDENCE)
    for index, p in enumerate(p_values):
        if not 0 <= p <= 1:
            raise InputError(f"p-values must be between 0 and 1, got {p!r} at index {index}")
    passed = next((index for index, p in enumerate(p_values) if p > tail), len(p_values))
    return passed - 1 if passed else None


def mixed_loss(
    log_probabilities: Float[Tensor, "*tokens"], vocabulary: int, weight: float = MIXING_WEIGHT
) -> Float64[Tensor, "*tokens"]:
    """Return the losses of predictions that are mixed with the uniform distribution.

        loss = −log((1 − ε) p + ε/V) ∈ [0, log(V/ε)]

    The difference of two such losses, and its mean over a window, is therefore at most `loss_ceiling`. A bound on the
    mean of these losses is a statement about the mixed predictions: the loss of a token with p < ε/V is lower than
    −log p, and no other loss falls by more than log 2.

    Args:
        log_probabilities: log p of each token.
        vocabulary: V, the number of tokens that p is a distribution over.
        weight: ε, the weight of the uniform distribution, between 0 and 1.

    Raises:
        InputError: an entry is positive or not a number, or an option is out of range.
    """
    ceiling = loss_ceiling(vocabulary, weight)
    log_p = log_probabilities.double()
    if not bool((log_p <= 1e-3).all()):  # rounding of a log-softmax gives values slightly above 0
        worst = float(log_p.max())
        raise InputError(f"log-probabilities must not be positive, got {worst!r}; give log p and not the loss −log p")
    log_uniform = torch.full_like(log_p, -ceiling)
    mixed = -torch.logaddexp(log_p + math.log1p(-weight), log_uniform)
    return mixed.clamp(0, ceiling)  # the exact loss is in this interval


def loss_ceiling(vocabulary: int, weight: float = MIXING_WEIGHT) -> float:
    """Return the largest value log(V/ε) of `mixed_loss`.

    Args:
        vocabulary: V, the number of tokens that the predictions are distributions over.
        weight: ε, the weight of the uniform distribution, between 0 and 1.

    Raises:
        InputError: `vocabulary` is not a positive whole number, or `weight` is not between 0 and 1.
    """
    require_count("vocabulary", vocabulary, "the number of tokens that the model predicts")
    _require_fraction("weight", weight, "the weight of the uniform distribution that is mixed into the predictions")
    return math.log(vocabulary) - math.log(weight)


def _binomial_tail(k: int | np.ndarray, m: int, share: float) -> Any:
    """Return P[Binomial(m, share) ≥ k], rounded up."""
    return np.minimum(1, stats.binom.sf(np.asarray(k) - 1, m, share) * (1 + 1e-12))


def _p_value(below: Float64[np.ndarray, " m"], distance: float) -> float:
    """Return min(1, 1/K), rounded up, for y = `below` and ν = `distance`; K increases as ν decreases."""
    factors = (1 - _BETS)[:, None] + _BETS[:, None] * (below / distance)
    with np.errstate(divide="ignore"):  # a window at the ceiling takes the whole capital of θ = 1
        logs = np.log(factors)
    sums = logs.sum(axis=1) - _ROUNDING * (len(below) + np.abs(logs).sum(axis=1))
    capital = float(np.logaddexp.reduce(sums + np.log(_WEIGHTS)))
    return math.exp(-max(capital, 0.0))


def _below_ceiling(increases: Increases, ceiling: float) -> Float64[np.ndarray, " m"]:
    """Return y = C − x ≥ 0."""
    x = _checked(increases)
    require_positive("ceiling", ceiling, "the largest increase that is possible")
    if len(x) and x.max() > ceiling * (1 + 1e-9):
        raise InputError(
            f"increases must not be above the ceiling {ceiling!r}, got {float(x.max())!r}; "
            "compute them from losses with a ceiling, see mixed_loss"
        )
    return np.maximum(ceiling - x, 0)  # x is above C only by rounding, and a smaller y gives a larger p-value


_SHARE = "the share of windows that the bound covers"
_CONFIDENCE = "the probability that the guarantee is true"


def _require_fraction(name: str, value: float, meaning: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < 1:
        raise InputError(f"{name} must be a number between 0 and 1, got {value!r}; it is {meaning}")
    return float(value)


def _require_limit(limit: float) -> float:
    if not math.isfinite(limit):
        raise InputError(f"limit must be a finite number, got {limit!r}; it is the largest acceptable increase")
    return limit


def _checked(increases: Increases) -> Float64[np.ndarray, " m"]:
    x = np.asarray(increases, dtype=np.float64)
    if x.ndim != 1:
        raise InputError(f"increases must be a list of numbers, one per window, got an array of shape {x.shape}")
    if not np.isfinite(x).all():
        index = int(np.argmin(np.isfinite(x)))
        raise InputError(f"increases must be finite numbers, got {x[index]} for window {index}")
    return x
