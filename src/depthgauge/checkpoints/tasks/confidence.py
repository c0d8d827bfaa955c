"""Confidence intervals of means over windows, and of the accuracies of two models that answered the same items.

The mean is over one number per window, such as the loss that a window gains without a layer. The values are few and
often skewed. Percentiles of resampled means then cover less often than they say: an interval is needed that allows for
both.

An item is *lost* if only the first model answers it right, *gained* if only the other one does, else unchanged. With n
items drawn independently from one population, the numbers (B, C) of lost and gained items are trinomial with
probabilities (p, q), and the accuracy of the other model is p − q lower in the population.

Intervals of means need no `scipy.stats`, which takes about a second to import: functions that need it import it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import special
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.results.evaluate_record import AccuracyRecord
from depthgauge.results.gauge_record import LEAST_WINDOWS, Interval

# --- The mean of a few values and its 95 % confidence interval -------------------------------------------------------

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


# --- Compare two models that answered the same items: right or wrong, item by item -----------------------------------

Counts = tuple[int, int, int]
"""Lost, gained and all items of a task."""

_CELLS = 128
"""Pieces into which the interval of q is cut; the bound is at most one piece larger than without cutting."""
_NUISANCE = 0.002
"""Share of the error probability that is spent on the interval of q (Berger and Boos, 1994)."""
_ORDER = 0.2
"""Error probability of the intervals by whose ends outcomes are ordered: z′ = 1.28."""
_STEPS = 40
"""Bisections of p, to 2⁻⁴⁰."""
_DROPPED = 1e-12
"""Probability of the numbers of lost items that are not summed; it is added to the result."""


def accuracy_record(
    right: Sequence[bool], first: Sequence[bool] | None = None, confidence: float = 0.95
) -> AccuracyRecord:
    """Return the accuracy of a model, compared with the `first` model on the same items if that is given.

    `right` says for each item whether the answer of the model is right, and `first` the same of the first model.
    """
    accuracy = sum(right) / len(right)
    if first is None:
        return AccuracyRecord(accuracy=accuracy)
    lost, gained, items = changes(right, first)
    low, high = difference_interval(lost, gained, items)
    return AccuracyRecord(
        accuracy=accuracy,
        lost=lost,
        gained=gained,
        difference=(gained - lost) / items,
        low=low,
        high=high,
        p=mcnemar(lost, gained),
        falls_at_most=largest_fall(lost, gained, items, confidence),
    )


def mean_record(
    right: Sequence[Sequence[bool]], first: Sequence[Sequence[bool]] | None = None, confidence: float = 0.95
) -> AccuracyRecord:
    """Return the mean accuracy over tasks, every task with the same weight; the arguments have one entry per task.

    McNemar's test adds the items of all tasks: under its hypothesis, lost and gained items are equally likely in each.
    """
    accuracy = float(np.mean([sum(task) / len(task) for task in right]))
    if first is None:
        return AccuracyRecord(accuracy=accuracy)
    counts = [changes(ours, theirs) for ours, theirs in zip(right, first, strict=True)]
    lost, gained = sum(one[0] for one in counts), sum(one[1] for one in counts)
    low, high = mean_difference_interval(counts)
    return AccuracyRecord(
        accuracy=accuracy,
        lost=lost,
        gained=gained,
        difference=float(np.mean([(more - fewer) / items for fewer, more, items in counts])),
        low=low,
        high=high,
        p=mcnemar(lost, gained),
        falls_at_most=largest_mean_fall(counts, confidence),
    )


def changes(right: Sequence[bool], first: Sequence[bool]) -> Counts:
    """Count the items that only the first model answers right, those that only the other does, and all.

    >>> changes([True, False, False], [True, True, False])
    (1, 0, 3)
    """
    pairs = list(zip(right, first, strict=True))
    return sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs), len(pairs)


def mcnemar(lost: int, gained: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: if p = q, lost items are Binomial(lost + gained, 1/2).

    >>> mcnemar(0, 0), mcnemar(1, 6)
    (1.0, 0.125)
    """
    from scipy import stats

    changed = lost + gained
    return min(1.0, 2 * float(stats.binom.cdf(min(lost, gained), changed, 0.5)))


def largest_fall(lost: int, gained: int, items: int, confidence: float) -> float:
    """Bound p − q, the fall of the accuracy in the population, from above; no approximation is made.

    The outcomes (b, c) are ordered by a number S(b, c) that increases in b and decreases in c; see `_gains_needed`. Let
    s be its value here, α = 1 − confidence, and β = α/500. With probability 1 − (α − β) at least,

        P_{p,q}[S(B, C) ≤ s] > α − β   at the true p and q,

    and with probability 1 − β at least, q is in its Clopper–Pearson interval, which is cut into cells [q₁, q₂]. Moving
    probability from "unchanged" to "gained" makes S smaller, so P_{p,q}[S ≤ s] ≤ P_{p,q₂}[S ≤ s] for q ≤ q₂. It
    decreases in p. Hence p < p*, the largest p with P_{p,q₂}[S ≤ s] > α − β, and p − q < p* − q₁. The bound is the
    largest p* − q₁ of all cells; cells in which no p is possible, not even 0, are left out. Where p + q₂ would exceed
    1, 1 − p ≥ q replaces q₂.

    Args:
        lost: items that the first model answers right and the other one wrong.
        gained: items that the other model answers right and the first one wrong.
        items: n, all items.
        confidence: probability that the bound is true, between 0 and 1.

    Returns:
        The bound, between −1 and 1. A negative bound proves that the accuracy grows.
    """
    if not (lost >= 0 and gained >= 0 and lost + gained <= items and items > 0):
        raise InputError(f"{lost} lost and {gained} gained items are not among {items} items")
    if not 0 < confidence < 1:
        raise InputError(f"confidence must be a number between 0 and 1, got {confidence!r}")
    alpha, needed = 1 - confidence, _gains_needed(lost, gained, items)
    low, high = _clopper_pearson(gained, items, _NUISANCE * alpha)
    ends = np.linspace(low, high, _CELLS + 1)
    possible = _probability(needed, np.zeros(_CELLS), ends[1:]) > (1 - _NUISANCE) * alpha
    first, last = ends[:-1][possible], ends[1:][possible]
    below, above = np.zeros(len(first)), 1 - first
    for _ in range(_STEPS):
        p = (below + above) / 2
        q = np.minimum(last, 1 - p)
        excluded = _probability(needed, p, q) <= (1 - _NUISANCE) * alpha
        below, above = np.where(excluded, below, p), np.where(excluded, p, above)
    return float((above - first).max())


def difference_interval(lost: int, gained: int, items: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of q − p, the difference of the accuracies: two exact bounds, each at (1 + confidence)/2."""
    each = (1 + confidence) / 2
    return -largest_fall(lost, gained, items, each), largest_fall(gained, lost, items, each)


def mean_difference_interval(counts: Sequence[Counts], confidence: float = 0.95) -> tuple[float, float]:
    """Return an interval of the mean over tasks of q − p; `counts` has lost, gained and all items of each task.

    It is Wald's interval of independent tasks, with 1/2 added to each of the four cells of a task (Agresti and Min,
    2005). It is approximate, unlike `difference_interval`.
    """
    from scipy import stats

    lost, gained, items = np.array(counts, dtype=np.float64).T
    n = items + 2
    differences = (gained - lost) / n
    variances = ((lost + gained + 1) / n - differences**2) / n
    half = float(stats.norm.ppf((1 + confidence) / 2)) * float(np.sqrt(variances.sum())) / len(counts)
    middle = float(differences.mean())
    return max(-1.0, middle - half), min(1.0, middle + half)


def largest_mean_fall(counts: Sequence[Counts], confidence: float) -> float:
    """Bound the mean over tasks of p − q by the mean of their bounds.

    The error probability 1 − confidence is divided among the tasks, so that all bounds hold at once (Bonferroni).
    """
    each = 1 - (1 - confidence) / len(counts)
    return float(np.mean([largest_fall(*one, each) for one in counts]))


def _clopper_pearson(count: Any, items: int, alpha: float) -> tuple[Any, Any]:
    """Return the ends of the interval of a binomial probability; each end fails with probability `alpha`/2 at most."""
    from scipy import stats

    low = stats.beta.ppf(alpha / 2, np.maximum(count, 1), items - count + 1)
    high = stats.beta.ppf(1 - alpha / 2, count + 1, np.maximum(items - count, 1))
    return np.where(count == 0, 0.0, low), np.where(count == items, 1.0, high)


def _gains_needed(lost: int, gained: int, items: int) -> Int[np.ndarray, " losses"]:
    """Return for b = 0 … n the smallest c with S(b, c) ≤ S(lost, gained), or n + 1 if there is none.

    S(b, c) is the upper end of an interval of p less the lower end of one of q (Clopper–Pearson). It increases in b and
    decreases in c, which is all that the proof needs. The bound is sharpest if S orders outcomes as the upper end of an
    interval of p − q does. Such an end grows with z√(b + c), and S with z′(√b + √c): equal for b = c and z′ = z/√2. The
    same z′ for every confidence makes the bound grow with the confidence.
    """
    low, high = _clopper_pearson(np.arange(items + 1), items, _ORDER)
    slack = 1e-12  # more outcomes count as S ≤ s, which makes the bound larger
    return np.asarray(np.searchsorted(low, high - (high[lost] - low[gained]) - slack))


def _probability(
    needed: Int[np.ndarray, " losses"], p: Float[np.ndarray, " cells"], q: Float[np.ndarray, " cells"]
) -> Float[np.ndarray, " cells"]:
    """Return P[C ≥ needed[B]] for trinomial (B, C) with probabilities p and q, rounded up.

    It is Σ_b P[B = b] P[C ≥ needed[b] | B = b], where C given B = b is Binomial(n − b, q/(1 − p)). Numbers b that B
    takes with a probability of at most `_DROPPED` together are left out, and their probability is added.
    """
    from scipy import stats

    n = len(needed) - 1
    few, many = stats.binom.ppf(_DROPPED / 2, n, p.min()), stats.binom.isf(_DROPPED / 2, n, p.max())
    b = np.arange(max(0, int(few)), min(n, int(many)) + 1)[:, None]
    rest = np.divide(q, 1 - p, out=np.zeros_like(q), where=p < 1).clip(0, 1)
    terms = stats.binom.pmf(b, n, p) * stats.binom.sf(needed[b] - 1, n - b, rest)
    return np.asarray(terms.sum(axis=0) * (1 + 1e-9) + _DROPPED)
