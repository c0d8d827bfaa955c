"""The ratio of two running times with a confidence interval that does not depend on how the clock is disturbed."""

import random
import time
from collections.abc import Callable
from math import inf
from statistics import median
from typing import NamedTuple

FIRST, WITHIN, ODDS = 8, 0.05, 20
"""Pairs before the first look at the interval; how far its ends may be from the ratio; it misses once in so many."""
FEW, FLAT, REPEATS = 8, 0.9, 3
"""Tokens of the shortest prompt that is timed. An amount of work is enough if its time per unit is at least this share
of that of half the amount; each is timed so often."""


class PairedTimes(NamedTuple):
    """How many `pairs` of runs of two programs were timed, and their times; None if these did not settle.

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
                return PairedTimes(due, ratio, low, high, *map(median, zip(*pairs, strict=True)))
            due, look = 2 * due, look + 1
        if clock() + (due - len(pairs)) * shortest > until:
            return PairedTimes(len(pairs))


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


def enough(run: Callable[[int], float], least: int, most: float, seconds: float) -> int:
    """Return how much work to time: so much that twice the work takes about twice as long.

    The work is doubled, from `least`, until the time per unit falls by less than 10 %: what does not grow with the
    work, such as launching kernels, is then at most a ninth of the time. It is not doubled beyond `most`, or if 32
    pairs of runs take half of the time limit `seconds`. `run` does so much work and returns its seconds.
    """
    size, before, long = least, inf, seconds / (16 * FIRST)
    while True:
        taken = min(run(size) for _ in range(REPEATS))  # the first run of a size may load kernels
        if taken > long or taken / size > FLAT * before or 2 * size > most:
            return size
        size, before = 2 * size, taken / size
