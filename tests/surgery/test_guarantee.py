"""Confidence bounds on the increase of the loss: coverage, exact oracles, and planted errors that must be caught."""

import itertools
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from increase_populations import CEILING, POPULATIONS, Population, hardest
from scipy import stats

from depthgauge.errors import InputError
from depthgauge.surgery.guarantee import (
    ASSUMPTION,
    MIXING_WEIGHT,
    largest_passing,
    loss_ceiling,
    mean_guarantee,
    mean_p_value,
    mixed_loss,
    quantile_guarantee,
    quantile_p_value,
    windows_needed,
)

DRAWS = 2000


def allowed(confidence: float, draws: int) -> int:
    """The number of failures that a bound with exactly this confidence exceeds in one of 10,000 experiments."""
    return int(stats.binom.ppf(1 - 1e-4, draws, 1 - confidence))


Bound = Callable[[np.ndarray], float | None]


def values_of(samples: np.ndarray, function: Bound) -> list[float | None]:
    """Apply a function that does not depend on the order of the windows; samples with equal values share one call."""
    known: dict[bytes, float | None] = {}
    for sample in np.sort(samples, axis=1):
        key = sample.tobytes()
        if key not in known:
            known[key] = function(np.random.default_rng(0).permutation(sample))
    return [known[sample.tobytes()] for sample in np.sort(samples, axis=1)]


def failures(truth: float, samples: np.ndarray, bound: Bound) -> int:
    """Count the samples whose bound is below the true value."""
    return sum(value is not None and value < truth for value in values_of(samples, bound))


def rank_failures(population: Population, m: int, share: float, rank: int | None, draws: int = DRAWS) -> int:
    """Count the samples whose increase of this rank, from 1, is below the quantile; None never fails."""
    if rank is None:
        return 0
    samples = population.draw(np.random.default_rng(m), (draws, m))
    return int(np.count_nonzero(np.sort(samples, axis=1)[:, rank - 1] < population.quantile(share)))


def rank_of(m: int, share: float = 0.95, confidence: float = 0.95) -> int | None:
    """Return the rank of the increase that `quantile_guarantee` chooses out of m."""
    increase = quantile_guarantee(
        np.random.default_rng(m).permutation(np.arange(1.0, m + 1)), share, confidence
    ).increase
    return None if increase is None else int(increase)


@pytest.mark.parametrize("m", [60, 93, 240])
@pytest.mark.parametrize("name", POPULATIONS)
def test_the_quantile_bound_covers(name: str, m: int) -> None:
    rank = rank_of(m)
    assert rank is not None
    assert rank_failures(POPULATIONS[name], m, 0.95, rank) <= allowed(0.95, DRAWS)
    for sample in POPULATIONS[name].draw(np.random.default_rng(m), (10, m)):
        assert quantile_guarantee(sample).increase == np.sort(sample)[rank - 1]


@pytest.mark.parametrize("m", [20, 60, 240])
@pytest.mark.parametrize("name", [*POPULATIONS, "hardest"])
def test_the_mean_test_covers(name: str, m: int) -> None:
    """The bound fails only if the true mean passes as a limit, by the agreement of bound and p-value."""
    population = POPULATIONS[name] if name != "hardest" else hardest(m, 0.95)
    samples = population.draw(np.random.default_rng(m), (DRAWS, m))
    p_values = np.array(values_of(samples, lambda x: mean_p_value(x, population.mean, CEILING)))
    for confidence in (0.8, 0.95, 0.99):
        assert np.count_nonzero(p_values <= 1 - confidence) <= allowed(confidence, DRAWS)


@pytest.mark.parametrize("confidence", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("m", [10, 60, 400])
def test_the_mean_bound_covers_the_hardest_population_and_is_not_loose_there(m: int, confidence: float) -> None:
    population = hardest(m, confidence)
    samples = population.draw(np.random.default_rng(m), (DRAWS, m))
    count = failures(population.mean, samples, lambda x: mean_guarantee(x, CEILING, confidence).increase)
    assert 0.7 * (1 - confidence) * DRAWS < count <= allowed(confidence, DRAWS)


@pytest.mark.parametrize("name", ["normal", "exponential", "pareto", "no lower limit", "ties"])
def test_the_mean_bound_covers(name: str) -> None:
    population = POPULATIONS[name]
    samples = population.draw(np.random.default_rng(3), (200, 30))
    count = failures(population.mean, samples, lambda x: mean_guarantee(x, CEILING, 0.5).increase)
    assert count <= allowed(0.5, 200)


def test_the_coverage_test_catches_planted_errors() -> None:
    normal = POPULATIONS["normal"]
    for m in (93, 240):
        rank = rank_of(m)
        assert rank is not None
        assert rank_failures(normal, m, 0.95, rank) <= allowed(0.95, DRAWS)
        assert rank_failures(normal, m, 0.95, rank - 1) > allowed(0.95, DRAWS)
    hard = hardest(60, 0.8)
    samples = hard.draw(np.random.default_rng(60), (DRAWS, 60))
    student = float(stats.t.ppf(0.95, 59)) / math.sqrt(60)
    planted: dict[str, Bound] = {
        "normality": lambda x: float(x.mean() + student * x.std(ddof=1)),
        "wrong sign": lambda x: 2 * float(x.mean()) - (mean_guarantee(x, CEILING).increase or 0),
        "low confidence": lambda x: mean_guarantee(x, CEILING, 0.8).increase,
        "low ceiling": lambda x: mean_guarantee(np.minimum(x, CEILING / 2), CEILING / 2).increase,
    }
    assert failures(hard.mean, samples, lambda x: mean_guarantee(x, CEILING).increase) <= allowed(0.95, DRAWS)
    for name, bound in planted.items():
        assert failures(hard.mean, samples, bound) > allowed(0.95, DRAWS), name


@pytest.mark.soak
@pytest.mark.parametrize("confidence", [0.5, 0.95])
@pytest.mark.parametrize("m", [1, 7, 59, 300, 1500])
@pytest.mark.parametrize("name", [*POPULATIONS, "hardest"])
def test_soak_coverage(name: str, m: int, confidence: float) -> None:
    population = POPULATIONS[name] if name != "hardest" else hardest(m, confidence)
    draws = 20_000 if m < 1000 else 4000
    for share in (0.5, 0.8, 0.95):
        count = rank_failures(population, m, share, rank_of(m, share, confidence), draws)
        assert count <= allowed(confidence, draws)
    samples = population.draw(np.random.default_rng(m + 1), (draws, m))
    p_values = np.array(values_of(samples, lambda x: mean_p_value(x, population.mean, CEILING)))
    assert np.count_nonzero(p_values <= 1 - confidence) <= allowed(confidence, draws)
    count = failures(population.mean, samples[:200], lambda x: mean_guarantee(x, CEILING, confidence).increase)
    assert count <= allowed(confidence, 200)


def _exact_tails(m: int, share: float) -> list[Fraction]:
    """Return P[Binomial(m, share) ≥ k] for k = 0 … m + 1 in rational arithmetic."""
    a, b = Fraction(share).as_integer_ratio()
    terms = [math.comb(m, j) * a**j * (b - a) ** (m - j) for j in range(m + 1)]
    tails = [*itertools.accumulate(reversed(terms), initial=0)][::-1]
    return [Fraction(tail, b**m) for tail in tails]


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9, 0.95, 0.999])
def test_the_order_statistic_agrees_with_rational_binomial_sums(share: float, confidence: float) -> None:
    """The chosen rank is exactly sound, and the rank below is not; P = 1 − confidence may be rounded to either side."""
    tail = 1 - Fraction(confidence)
    for m in (1, 2, 5, 19, 44, 59, 60, 93):
        exact = _exact_tails(m, share)
        rank = rank_of(m, share, confidence)
        assert exact[rank or m + 1] <= tail
        assert exact[m if rank is None else rank - 1] > tail * (1 - Fraction(1, 10**11))
    needed = windows_needed(share, confidence)
    assert Fraction(share) ** needed <= tail
    assert Fraction(share) ** (needed - 1) > tail * (1 - Fraction(1, 10**11))
    assert quantile_guarantee([0.1] * (needed - 1), share, confidence).increase is None
    guarantee = quantile_guarantee([0.1] * needed, share, confidence)
    assert guarantee.increase == 0.1
    assert (guarantee.share, guarantee.confidence, guarantee.windows) == (share, confidence, needed)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95])
def test_the_quantile_p_value_agrees_with_rational_binomial_sums_and_is_rounded_up(share: float) -> None:
    for m in (1, 19, 60):
        for below, exact in enumerate(_exact_tails(m, share)[:-1]):
            p_value = quantile_p_value(np.arange(1.0, m + 1), below + 0.5, share)
            assert p_value == pytest.approx(float(exact), rel=1e-10)
            assert Fraction(p_value) >= exact


def test_59_windows_are_needed_for_95_and_95() -> None:
    assert windows_needed() == windows_needed(0.95, 0.95) == 59
    assert quantile_guarantee([]).increase is None
    assert quantile_p_value([], 0.1) == 1


@pytest.mark.parametrize("name", POPULATIONS)
def test_the_p_values_agree_with_the_bounds(name: str) -> None:
    rng = np.random.default_rng(5)
    for m, confidence in itertools.product((1, 13, 60, 250), (0.8, 0.95)):
        x = POPULATIONS[name].draw(rng, (1, m))[0]
        quantile = quantile_guarantee(x, 0.9, confidence).increase
        mean = mean_guarantee(x, CEILING, confidence).increase
        around = [value for bound in (quantile, mean) if bound is not None for value in _neighbours(bound)]
        for limit in [*around, *x[:10], *rng.uniform(-1, CEILING, 10)]:
            passes = quantile_p_value(x, limit, 0.9) <= 1 - confidence
            assert passes == (quantile is not None and quantile <= limit)
            if limit < CEILING:
                passes = mean_p_value(x, limit, CEILING) <= 1 - confidence
                assert passes == (mean is not None and mean <= limit)


def _neighbours(bound: float) -> list[float]:
    return [bound - 1e-6, math.nextafter(bound, -math.inf), bound, math.nextafter(bound, math.inf), bound + 1e-6]


def _capital(increases: list[float], limit: float, ceiling: float) -> Fraction:
    """Return the capital in rational arithmetic, as 1 + λ(limit − x) with λ = θ/(ceiling − limit)."""
    total = Fraction(0)
    for j in range(11):
        bet = Fraction(2, 3) ** j / (Fraction(ceiling) - Fraction(limit))
        weight = Fraction(95, 100) if j == 0 else Fraction(5, 1000)
        total += weight * math.prod(1 + bet * (Fraction(limit) - Fraction(x)) for x in increases)
    return total


@pytest.mark.parametrize("name", POPULATIONS)
def test_the_mean_p_value_agrees_with_rational_arithmetic_and_is_rounded_up(name: str) -> None:
    x = POPULATIONS[name].draw(np.random.default_rng(6), (1, 30))[0].tolist()
    for limit in (-1.0, float(np.mean(x)), 0.7, 2.0, 5.0, 13.0, 13.9):
        if limit < CEILING:
            exact = min(Fraction(1), 1 / _capital(x, limit, CEILING))
            p_value = mean_p_value(x, limit, CEILING)
            assert p_value == pytest.approx(float(exact), rel=1e-10)
            assert Fraction(p_value) >= exact
            assert mean_p_value(x[::-1], limit, CEILING) == pytest.approx(p_value, rel=1e-10)


@pytest.mark.parametrize("values", [(0.0, 0.5, 14.0), (-20.0, 1.0, 13.0), (0.4, 0.41, 14.0), (5.0, 13.9, 14.0)])
@pytest.mark.parametrize("weights", [(1, 1, 1), (80, 15, 5), (1, 30, 1), (10, 0, 1)])
def test_every_level_of_the_mean_test_is_exact_by_enumeration(
    values: tuple[float, ...], weights: tuple[int, ...]
) -> None:
    """P[p ≤ a] ≤ a at every a, over all samples of 7 windows from a distribution whose mean is the limit."""
    m, total = 7, sum(weights)
    mean = float(sum(Fraction(w, total) * Fraction(v) for v, w in zip(values, weights, strict=True)))
    outcomes = []
    for counts in itertools.product(range(m + 1), repeat=3):
        if sum(counts) == m:
            ways = math.factorial(m) // math.prod(map(math.factorial, counts))
            probability = ways * math.prod((w / total) ** c for w, c in zip(weights, counts, strict=True))
            outcomes.append((mean_p_value(np.repeat(values, counts), mean, CEILING), probability))
    assert math.fsum(probability for _, probability in outcomes) == pytest.approx(1)
    _assert_valid(outcomes)


@pytest.mark.parametrize("population", [(0.1, 0.2, 0.3, 0.4, 0.5, 14.0), (0.0, 0.0, 3.0, 9.0, 13.0, 14.0, 14.0)])
def test_the_mean_test_holds_for_windows_drawn_without_replacement(population: tuple[float, ...]) -> None:
    mean = math.fsum(population) / len(population)
    for m in range(1, len(population) + 1):
        samples = list(itertools.combinations(population, m))
        _assert_valid([(mean_p_value(sample, mean, CEILING), 1 / len(samples)) for sample in samples])


def _assert_valid(outcomes: list[tuple[float, float]]) -> None:
    """Check P[p ≤ a] ≤ a for all pairs (p, probability)."""
    for level, _ in outcomes:
        assert math.fsum(probability for p, probability in outcomes if p <= level) <= level * (1 + 1e-9)


@pytest.mark.parametrize("m", [60, 240, 1000, 2000])
@pytest.mark.parametrize(("mean", "sd"), [(0.0, 0.05), (0.4, 0.15), (1.0, 0.3)])
def test_the_mean_bound_is_close_to_the_smallest_possible(m: int, mean: float, sd: float) -> None:
    """No valid bound for m equal values can exceed them by less than (C − x)(1 − α^(1/m))."""
    x = np.random.default_rng(m).normal(mean, sd, m)
    bound = mean_guarantee(x, CEILING).increase
    assert bound is not None
    unavoidable = (CEILING - x.mean()) * (1 - 0.05 ** (1 / m))
    variance_term = x.var() / (2 * (CEILING - x.mean()))
    assert unavoidable < bound - x.mean() < 1.02 * unavoidable + 1.1 * variance_term


def test_the_mean_bound_stays_useful_with_windows_at_the_ceiling() -> None:
    x = np.concatenate([np.full(980, 0.3), np.full(20, CEILING)])
    bound = mean_guarantee(x, CEILING).increase
    assert bound is not None
    assert x.mean() < bound < x.mean() + 0.4


def test_the_mean_bound_grows_with_the_confidence_and_exists_below_the_ceiling_only() -> None:
    x = np.random.default_rng(1).normal(0.4, 0.15, 100)
    bounds = [mean_guarantee(x, CEILING, confidence).increase for confidence in (0.01, 0.5, 0.9, 0.95, 0.999)]
    assert all(bound is not None and bound > x.mean() for bound in bounds)
    assert bounds == sorted(bounds)
    assert mean_guarantee([CEILING] * 50, CEILING).increase is None
    assert mean_guarantee([], CEILING).increase is None
    guarantee = mean_guarantee(x, CEILING, 0.9)
    assert (guarantee.confidence, guarantee.windows, guarantee.ceiling) == (0.9, 100, CEILING)
    assert "betting" in guarantee.method
    assert mean_guarantee([*x, CEILING + 1e-12], CEILING).increase == mean_guarantee([*x, CEILING], CEILING).increase


SIZES = (0.995, 0.98, 0.949, 0.949, 0.948, 0.947, 0.949, 0.949)
"""P[increase ≤ limit] of sizes from gentle to harsh; from index 2 on, the 95 % quantile is above the limit."""


def _sequence_failures(decide: Callable[[list[float]], int | None], together: bool) -> tuple[int, int]:
    """Count the experiments in which a size above the limit passes, and those in which index 1 passes."""
    rng, m = np.random.default_rng(8), 250
    uniforms = rng.random((DRAWS, 1 if together else len(SIZES), m))
    below = np.stack([(uniforms[:, -1 if together else i] <= size).sum(axis=1) for i, size in enumerate(SIZES)], axis=1)
    p_values = [quantile_p_value(np.arange(m) + 1.0, count, 0.95) for count in map(float, range(m + 1))]
    passed = [decide([p_values[count] for count in counts]) for counts in below]
    return sum(i is not None and i >= 2 for i in passed), sum(i is not None and i >= 1 for i in passed)


@pytest.mark.parametrize("together", [False, True], ids=["independent sizes", "the same windows"])
def test_fixed_sequence_testing_controls_the_family_wise_error(together: bool) -> None:
    wrong, right = _sequence_failures(lambda p: largest_passing(p, 0.95), together)
    assert wrong <= allowed(0.95, DRAWS)
    assert right > 0.4 * DRAWS


def test_testing_without_stopping_is_caught() -> None:
    wrong, _ = _sequence_failures(lambda p: max((i for i, v in enumerate(p) if v <= 0.05), default=None), False)
    assert wrong > allowed(0.95, DRAWS)


def test_fixed_sequence_testing_stops_at_the_first_failure() -> None:
    assert largest_passing([], 0.95) is None
    assert largest_passing([0.06, 0.01], 0.95) is None
    assert largest_passing([0.01, 0.04, 0.06, 0.01], 0.95) == 1
    assert largest_passing([0.0, 1 - 0.95], 0.95) == 1
    assert largest_passing([0.01, 0.04, 0.06], 0.9) == 2


@pytest.mark.parametrize("weight", [1e-6, MIXING_WEIGHT, 0.5])
@pytest.mark.parametrize("vocabulary", [2, 49152])
def test_the_mixed_loss_agrees_with_decimal_arithmetic(vocabulary: int, weight: float) -> None:
    log_p = [0.0, -1e-12, -0.3, -5.0, -17.0, -60.0, -900.0, -1e5]
    losses = mixed_loss(torch.tensor([log_p, log_p], dtype=torch.float64), vocabulary, weight)
    assert losses.shape == (2, 8)
    with localcontext() as context:
        context.prec = 60
        e = Decimal(weight)
        expected = [float(-((1 - e) * Decimal(v).exp() + e / vocabulary).ln()) for v in log_p]
    assert losses[0].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert torch.equal(losses[0], losses[1])
    ceiling = loss_ceiling(vocabulary, weight)
    assert ceiling == pytest.approx(math.log(vocabulary / weight), rel=1e-14)
    assert float(mixed_loss(torch.tensor(-math.inf), vocabulary, weight)) == ceiling
    assert bool((losses >= 0).all())
    assert bool((losses <= ceiling).all())
    assert mixed_loss(torch.tensor([1e-7], dtype=torch.float32), vocabulary, weight).dtype == torch.float64


def test_mixing_raises_the_loss_of_a_token_by_little() -> None:
    log_p = -torch.linspace(0, 40, 1000, dtype=torch.float64)
    assert float((mixed_loss(log_p, 49152) + log_p).max()) <= -math.log1p(-MIXING_WEIGHT) + 1e-12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantile_guarantee([0.1, math.nan]), "finite numbers, got nan for window 1"),
        (lambda: quantile_guarantee(np.zeros((2, 3))), "one per window"),
        (lambda: quantile_guarantee([0.1], share=1.0), "share must be a number between 0 and 1, got 1.0"),
        (lambda: quantile_guarantee([0.1], confidence=95), "confidence must be a number between 0 and 1, got 95"),
        (lambda: quantile_p_value([0.1], math.inf), "limit must be a finite number"),
        (lambda: windows_needed(0.0, 0.95), "share must be a number between 0 and 1"),
        (lambda: mean_guarantee([0.1, 14.1], 14.0), "must not be above the ceiling 14.0, got 14.1"),
        (lambda: mean_guarantee([math.inf], 14.0), "finite numbers, got inf for window 0"),
        (lambda: mean_guarantee([0.1], -1.0), "ceiling must be a positive number, got -1.0"),
        (lambda: mean_p_value([0.1], 14.0, 14.0), "limit must be below the ceiling 14.0, got 14.0"),
        (lambda: mean_p_value([0.1], math.nan, 14.0), "limit must be a finite number"),
        (lambda: largest_passing([0.01, 1.2]), "between 0 and 1, got 1.2 at index 1"),
        (lambda: mixed_loss(torch.tensor([2.0]), 10), "give log p and not the loss"),
        (lambda: mixed_loss(torch.tensor([math.nan]), 10), "must not be positive, got nan"),
        (lambda: mixed_loss(torch.tensor([-2.0]), 10, 0.0), "weight must be a number between 0 and 1, got 0.0"),
        (lambda: loss_ceiling(0), "vocabulary must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        call()


def test_the_assumption_is_one_sentence() -> None:
    assert "exchangeable" in ASSUMPTION
    assert ASSUMPTION.count(".") == 1
    assert ASSUMPTION.endswith(".")
