"""Paired accuracies: exact p-values, and bounds that cover as often as they say, by enumeration of all outcomes."""

from functools import cache
from itertools import pairwise, product
from math import comb, factorial

import numpy as np
import pytest
from scipy import stats

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.tasks import confidence as module
from depthgauge.checkpoints.tasks.confidence import (
    accuracy_record,
    difference_interval,
    largest_fall,
    largest_mean_fall,
    mcnemar,
    mean_difference_interval,
    mean_record,
)


def trinomial(b: int, c: int, n: int, p: float, q: float) -> float:
    rest = n - b - c
    return factorial(n) / factorial(b) / factorial(c) / factorial(rest) * p**b * q**c * max(0.0, 1 - p - q) ** rest


def outcomes(n: int) -> list[tuple[int, int]]:
    return [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]


@cache
def bounds(n: int, confidence: float) -> dict[tuple[int, int], float]:
    return {(b, c): largest_fall(b, c, n, confidence) for b, c in outcomes(n)}


def coverage(n: int, p: float, q: float, confidence: float) -> float:
    """Return the probability that the bound is at least p − q."""
    found = bounds(n, confidence)
    return sum(trinomial(b, c, n, p, q) for (b, c), bound in found.items() if bound >= p - q)


@pytest.mark.parametrize("changed", range(9))
def test_mcnemar_is_the_sum_over_all_ways_to_split_the_changed_items(changed: int) -> None:
    for lost in range(changed + 1):
        weights = [comb(changed, k) / 2**changed for k in range(changed + 1)]
        as_far = sum(w for k, w in enumerate(weights) if abs(2 * k - changed) >= abs(2 * lost - changed))
        assert mcnemar(lost, changed - lost) == pytest.approx(min(1.0, as_far))


@pytest.mark.parametrize(("n", "confidence"), [(1, 0.95), (4, 0.8), (8, 0.95)])
def test_the_bound_covers_at_every_point_of_a_grid(n: int, confidence: float) -> None:
    grid = np.linspace(0, 1, 26)
    found = [coverage(n, p, q, confidence) for p, q in product(grid, grid) if p + q <= 1 + 1e-12]
    assert min(found) >= confidence - 1e-9
    assert min(found) < confidence + 0.1  # it is not so large that it covers always


def test_the_bound_covers_just_below_every_bound() -> None:
    """The coverage is least where p − q is just above the bound of an outcome."""
    n, confidence = 6, 0.9
    for bound in sorted(set(bounds(n, confidence).values())):
        for q in np.linspace(0, 0.5, 11):
            p = bound + q + 1e-9
            if 0 <= p <= 1 - q:
                assert coverage(n, p, q, confidence) >= confidence - 1e-9


@pytest.mark.parametrize("counts", [(0, 0, 6), (3, 1, 6), (2, 4, 9)])
def test_the_bound_excludes_larger_falls_in_every_cell_and_no_smaller_one_does(counts: tuple[int, int, int]) -> None:
    """By the definition in `largest_fall`: sums over all outcomes, with q at the upper end of each of its cells."""
    *found, items = counts
    alpha, share = 0.1, module._NUISANCE

    def ends(count: int, error: float) -> tuple[float, float]:
        low = stats.beta.ppf(error / 2, count, items - count + 1) if count else 0.0
        return low, stats.beta.ppf(1 - error / 2, count + 1, items - count) if count < items else 1.0

    def score(b: int, c: int) -> float:
        return ends(b, module._ORDER)[1] - ends(c, module._ORDER)[0]

    at_most = [one for one in outcomes(items) if score(*one) <= score(*found) + 1e-9]
    cells = pairwise(np.linspace(*ends(found[1], share * alpha), module._CELLS + 1))
    bound, excess = largest_fall(*counts, 1 - alpha), list[float]()
    for first, last in cells:
        for p in (bound + first + 1e-6, bound + first - 1e-6):
            q = min(last, 1 - max(0.0, p))
            likely = sum(trinomial(b, c, items, max(0.0, p), q) for b, c in at_most)
            excess.append(likely - (1 - share) * alpha)
    assert max(excess[::2]) <= 0
    assert max(excess[1::2]) > 0


def test_a_smaller_bound_would_not_cover() -> None:
    n, confidence = 8, 0.95
    found = {outcome: bound - 0.15 for outcome, bound in bounds(n, confidence).items()}
    assert min(
        sum(trinomial(b, c, n, p, q) for (b, c), bound in found.items() if bound >= p - q)
        for p, q in product(np.linspace(0, 1, 26), repeat=2)
        if p + q <= 1
    ) < confidence  # fmt: skip


def test_without_lost_and_gained_items_it_is_the_bound_of_a_binomial() -> None:
    """With no change, the bound is at least 1 − α^(1/n), the Clopper–Pearson bound, and hardly larger."""
    exact = 1 - 0.05 ** (1 / 100)
    assert exact <= largest_fall(0, 0, 100, 0.95) < exact + 0.001


@pytest.mark.parametrize(
    ("lost", "gained", "items"), [(60, 40, 500), (20, 5, 100), (10, 10, 100), (3, 0, 20), (0, 28, 100), (1, 9, 40)]
)
def test_the_bound_is_sharper_than_two_clopper_pearson_bounds(lost: int, gained: int, items: int) -> None:
    above = stats.beta.ppf(0.975, lost + 1, items - lost)
    below = stats.beta.ppf(0.025, gained, items - gained + 1) if gained else 0.0
    assert (lost - gained) / items < largest_fall(lost, gained, items, 0.95) < above - below


def test_the_bound_grows_with_lost_items_and_falls_with_gained_ones() -> None:
    found = bounds(8, 0.95)
    for (b, c), bound in found.items():
        assert found.get((b + 1, c), 1.0) >= bound - 1 / 128  # the width of a cell
        assert found.get((b, c + 1), -1.0) <= bound + 1 / 128
        assert largest_fall(b, c, 8, 0.975) >= bound - 1e-9


def test_the_interval_has_the_two_bounds_and_is_symmetric() -> None:
    low, high = difference_interval(12, 5, 80)
    assert (low, high) == (-largest_fall(12, 5, 80, 0.975), largest_fall(5, 12, 80, 0.975))
    assert low < (5 - 12) / 80 < high
    assert difference_interval(5, 12, 80) == (-high, -low)


def test_the_mean_of_tasks_covers_in_simulations() -> None:
    draw, tasks = np.random.default_rng(0), [(0.1, 0.05, 120), (0.02, 0.02, 80), (0.3, 0.1, 100)]
    truth = np.mean([q - p for p, q, _ in tasks])
    hits, runs = 0, 2000
    for _ in range(runs):
        drawn = [(*draw.multinomial(n, [p, q, 1 - p - q])[:2].tolist(), n) for p, q, n in tasks]
        low, high = mean_difference_interval(drawn)
        hits += low <= truth <= high
    assert 0.935 <= hits / runs <= 0.975


def test_the_bound_of_the_mean_is_corrected_for_the_number_of_tasks() -> None:
    counts = [(9, 4, 60), (5, 5, 50)]
    each = [largest_fall(*one, 0.975) for one in counts]
    assert largest_mean_fall(counts, 0.95) == pytest.approx(sum(each) / 2)


def test_a_record_counts_lost_and_gained_items() -> None:
    first, other = [True, True, True, False, False], [True, False, False, True, False]
    record = accuracy_record(other, first, 0.9)
    assert (record.accuracy, record.lost, record.gained, record.difference) == (0.4, 2, 1, -0.2)
    assert record.p == 1.0
    assert record.falls_at_most == largest_fall(2, 1, 5, 0.9)
    alone = accuracy_record(first)
    assert (alone.accuracy, alone.difference, alone.p) == (0.6, None, None)


def test_the_mean_gives_every_task_the_same_weight() -> None:
    first, other = [[True] * 4, [True, False] * 10], [[True, True, False, False], [False] * 20]
    record = mean_record(other, first)
    assert record.accuracy == 0.25
    assert record.difference == pytest.approx(-0.5)
    assert (record.lost, record.gained) == (12, 0)
    assert record.p == pytest.approx(2 * 0.5**12)


@pytest.mark.parametrize("counts", [(-1, 0, 5), (3, 3, 5), (0, 0, 0)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="items are not among"):
        largest_fall(*counts, 0.95)


@pytest.mark.soak
@pytest.mark.parametrize(("p", "q", "n"), [(0.1, 0.05, 150), (0.02, 0.01, 300), (0.3, 0.3, 60), (0.01, 0.2, 100)])
def test_the_bound_covers_in_simulations(p: float, q: float, n: int) -> None:
    draw, runs = np.random.default_rng(1), 1000
    drawn = [tuple(draw.multinomial(n, [p, q, 1 - p - q])[:2].tolist()) for _ in range(runs)]
    known = {outcome: largest_fall(*outcome, n, 0.95) for outcome in set(drawn)}
    missed = sum(known[outcome] < p - q for outcome in drawn)
    assert stats.binom.sf(missed - 1, runs, 0.05) > 1e-3
