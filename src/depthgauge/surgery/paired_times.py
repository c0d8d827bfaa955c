"""The ratio of two running times with a confidence interval that does not depend on how the clock is disturbed."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from statistics import median

FIRST, WITHIN, ODDS = 8, 0.05, 20
"""Pairs before the first look at the interval; how far its ends may be from the ratio; it misses in one of so many."""
_FLAT, _REPEATS, _FEW = 0.9, 3, 8
"""Work is enough if its time per unit is at least this share of that of half the work; how often each amount is timed;
tokens of the shortest prompt that is timed, or up to twice as many."""


@dataclass(frozen=True, kw_only=True)
class PairedTimes:
    """Times of two programs: how many `pairs` of runs were timed, and what they say; None if they did not settle.

    - `ratio`: the median over the pairs of the first time ÷ the second; `low`, `high`: its 95 % interval
    - `before`, `after`: the median seconds of the first program, and of the second
    """

    pairs: int
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    before: float | None = None
    after: float | None = None


def paired_times(
    run: Callable[[int], float],
    until: float,
    clock: Callable[[], float] = time.perf_counter,
    seed: int | None = None,
) -> PairedTimes:
    """Time two programs in pairs, in random order, until the interval of the ratio is within ± 5 % of it.

    The interval is that of the sign test. Let θ be the ratio, and let a run at a moment take u times as long as
    undisturbed. Whatever u does, the ratio of a pair is θ · (u₁ / u₂)^±1, with a sign that the coin of the order
    decides. So it is above θ with probability at most 1/2, independently of the other pairs, also if the machine has
    slow phases, drifts or stops now and then. Only this needs to be true: a disturbance multiplies the time, and does
    not depend on which program is running.

    Stopping where the interval is narrow favours narrow intervals that miss. The interval is therefore looked at after
    8, 16, 32, … pairs only, and may miss with probability 1/20 · 1/(k (k + 1)) at look k. The sum over all k is 1/20,
    which bounds the probability that any of them misses, and so that a wrong interval is returned.

    Args:
        run: runs program 0 or 1 and returns the seconds it took.
        until: the time of the clock at which to stop without a ratio; this is done where no further look fits.
        clock: returns the time in seconds.
        seed: of the coins.
    """
    coin, pairs, due, look, shortest = random.Random(seed), list[list[float]](), FIRST, 1, inf
    run(0), run(1)
    while True:
        pair, started = [0.0, 0.0], clock()
        for which in coin.sample((0, 1), 2):
            pair[which] = run(which)
        pairs.append(pair)
        shortest = min(shortest, clock() - started)
        if len(pairs) == due:
            ratios = [before / max(after, 1e-9) for before, after in pairs]
            ratio, (low, high) = median(ratios), sign_interval(ratios, ODDS * look * (look + 1))
            if ratio * (1 - WITHIN) <= low and high <= ratio * (1 + WITHIN):
                before, after = map(median, zip(*pairs, strict=True))
                return PairedTimes(pairs=due, ratio=ratio, low=low, high=high, before=before, after=after)
            due, look = 2 * due, look + 1
        if clock() + (due - len(pairs)) * shortest > until:
            return PairedTimes(pairs=len(pairs))


def sign_interval(values: list[float], odds: int) -> tuple[float, float]:
    """Return an interval that misses the median of independent values with probability at most 1 / `odds`.

    The k-th smallest of n values is above the median with probability at most P(B < k), for B binomial with n trials
    of probability 1/2. k is the largest number with 2 P(B < k) ≤ 1 / odds.
    """
    count, ordered = len(values), sorted(values)
    k, ways, below = 0, 1, 1  # C(n, k), and the sum of C(n, i) over i ≤ k
    while 2 * below * odds <= 2**count:
        k += 1
        ways = ways * (count - k + 1) // k
        below += ways
    return (ordered[k - 1], ordered[-k]) if k else (-inf, inf)


def enough(run: Callable[[int], float], most: float, seconds: float) -> int:
    """Return how many units of work to time: so many that twice the work takes about twice as long.

    The units are doubled until the time per unit falls by less than 10 %: what does not grow with the work, such as
    launching kernels, is then at most a ninth of the time. They are not doubled beyond `most`, or beyond a run that
    is so long that 32 pairs of it take half of the time limit `seconds`. `run` does the work and returns its seconds.
    """
    units, before, long = 1, inf, seconds / (16 * FIRST)
    while True:
        taken = run(units)
        if taken <= long:
            taken = min(run(units) for _ in range(_REPEATS))
        if taken > long or taken / units > _FLAT * before or 2 * units > most:
            return units
        units, before = 2 * units, taken / units


def prompt_lengths(tokens: int) -> tuple[int, int]:
    """Return the length of the shortest prompt that is timed, and of the longest within so many tokens.

    The longest is the shortest times a power of two.

    >>> prompt_lengths(512), prompt_lengths(300), prompt_lengths(5)
    ((8, 512), (9, 288), (5, 5))
    """
    unit = tokens
    while unit >= 2 * _FEW:
        unit //= 2
    return unit, unit << (tokens // unit).bit_length() - 1
