"""Confidence bounds on the increase of the loss: coverage, exact oracles, and planted errors that must be caught."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from increase_populations import POPULATIONS, Population
from scipy import stats

from depthgauge.base.errors import InputError
from depthgauge.base.progress import Durations
from depthgauge.results.shrink_record import ShrinkOptions
from depthgauge.surgery import candidates as shrunk_model
from depthgauge.surgery.candidates import Candidates, largest_within
from depthgauge.surgery.certify import assumption, quantile_guarantee, windows_needed
from depthgauge.surgery.student import effort_of

DRAWS = 2000


def allowed(confidence: float, draws: int) -> int:
    """The number of failures that a bound with exactly this confidence exceeds in one of 10,000 experiments."""
    return int(stats.binom.ppf(1 - 1e-4, draws, 1 - confidence))


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


def test_the_coverage_test_catches_planted_errors() -> None:
    normal = POPULATIONS["normal"]
    for m in (93, 240):
        rank = rank_of(m)
        assert rank is not None
        assert rank_failures(normal, m, 0.95, rank) <= allowed(0.95, DRAWS)
        assert rank_failures(normal, m, 0.95, rank - 1) > allowed(0.95, DRAWS)


@pytest.mark.soak
@pytest.mark.parametrize("confidence", [0.5, 0.95])
@pytest.mark.parametrize("m", [1, 7, 59, 300, 1500])
@pytest.mark.parametrize("name", POPULATIONS)
def test_soak_coverage(name: str, m: int, confidence: float) -> None:
    population = POPULATIONS[name]
    draws = 20_000 if m < 1000 else 4000
    for share in (0.5, 0.8, 0.95):
        count = rank_failures(population, m, share, rank_of(m, share, confidence), draws)
        assert count <= allowed(confidence, draws)


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


def test_59_windows_are_needed_for_95_and_95() -> None:
    assert windows_needed() == windows_needed(0.95, 0.95) == 59
    assert quantile_guarantee([]).increase is None


@pytest.mark.parametrize("effort", ["quick", "default", "high"])
@pytest.mark.parametrize("confidence", [0.95, 0.999])
def test_every_effort_has_enough_windows_for_the_bounds_of_all_sizes(effort: str, confidence: float) -> None:
    for count in (1, 2, 3, 7, 30):
        sizes = ",".join(map(str, range(1, count + 1)))
        windows = effort_of(ShrinkOptions(remove=sizes, effort=effort, confidence=confidence)).certify
        assert quantile_guarantee([0.1] * windows, 0.95, confidence, looks=count).increase == 0.1


SIZES = (0.995, 0.98, 0.949, 0.949, 0.948, 0.947, 0.949, 0.949)
"""P[increase ≤ limit] of sizes from gentle to harsh; from index 2 on, the 95 % quantile is above the limit."""


Decide = Callable[[list[float | None]], int | None]
"""Returns the index of the chosen size for bounds from gentle to harsh; the limit is 0.5."""


def _sequence_failures(decide: Decide, together: bool) -> tuple[int, int]:
    """Count the experiments in which a size above the limit passes, and those in which index 1 passes."""
    rng, m = np.random.default_rng(8), 250
    uniforms = rng.random((DRAWS, 1 if together else len(SIZES), m))
    below = np.stack([(uniforms[:, -1 if together else i] <= size).sum(axis=1) for i, size in enumerate(SIZES)], axis=1)
    bounds = [quantile_guarantee(np.arange(m) >= count).increase for count in range(m + 1)]  # increases 0 and 1
    passed = [decide([bounds[count] for count in counts]) for counts in below]
    return sum(i is not None and i >= 2 for i in passed), sum(i is not None and i >= 1 for i in passed)


def in_sequence(bounds: list[float | None]) -> int | None:
    """Run `largest_within` on models that are their sizes."""
    steps = [SimpleNamespace(layer=layer) for layer in range(len(bounds))]
    search: Any = SimpleNamespace(steps=steps, remove_until=lambda count, limit: None, sets=range)
    student: Any = SimpleNamespace(runner=[*steps, None], durations=Durations())
    certifier: Any = SimpleNamespace(
        measure=lambda model, label: model, bound=lambda size: SimpleNamespace(increase=bounds[size - 1])
    )
    best, tested = largest_within(search, Candidates(student), certifier, 0.5, None)
    failed = [size.removed for size in tested if not size.passed]
    assert failed in ([], [len(tested)])
    return None if best is None else best.model - 1


@pytest.fixture
def models_are_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shrunk_model, "make_model", lambda candidates, sets, *others, **more: SimpleNamespace(model=len(sets))
    )


@pytest.mark.usefixtures("models_are_sizes")
@pytest.mark.parametrize("together", [False, True], ids=["independent sizes", "the same windows"])
def test_fixed_sequence_testing_controls_the_family_wise_error(together: bool) -> None:
    wrong, right = _sequence_failures(in_sequence, together)
    assert wrong <= allowed(0.95, DRAWS)
    assert right > 0.4 * DRAWS


def test_testing_without_stopping_is_caught() -> None:
    def best(bounds: list[float | None]) -> int | None:
        return max((i for i, bound in enumerate(bounds) if bound is not None and bound <= 0.5), default=None)

    wrong, _ = _sequence_failures(best, False)
    assert wrong > allowed(0.95, DRAWS)


@pytest.mark.usefixtures("models_are_sizes")
def test_fixed_sequence_testing_stops_at_the_first_failure() -> None:
    assert in_sequence([]) is None
    assert in_sequence([0.6, 0.1]) is None
    assert in_sequence([None, 0.1]) is None
    assert in_sequence([0.1, 0.4, 0.6, 0.1]) == 1
    assert in_sequence([0.0, 0.5]) == 1


def test_several_looks_divide_the_error_probability() -> None:
    x = np.random.default_rng(2).normal(size=400)
    for looks in (2, 5):
        assert quantile_guarantee(x, looks=looks).increase == quantile_guarantee(x, 0.95, 1 - 0.05 / looks).increase
        assert quantile_guarantee(x, looks=looks).increase > quantile_guarantee(x).increase
        assert quantile_guarantee(x, looks=looks).confidence == 0.95


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantile_guarantee([0.1, math.nan]), "finite numbers, got nan for window 1"),
        (lambda: quantile_guarantee(np.zeros((2, 3))), "one per window"),
        (lambda: quantile_guarantee([0.1], share=1.0), "share must be a number between 0 and 1, got 1.0"),
        (lambda: quantile_guarantee([0.1], confidence=95), "confidence must be a number between 0 and 1, got 95"),
        (lambda: windows_needed(0.0, 0.95), "share must be a number between 0 and 1"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        call()


def test_the_assumption_is_one_sentence_about_the_inputs() -> None:
    words = "it assumes that these windows and future windows are exchangeable."
    assert assumption("window") == f"This holds for text like the certify windows: {words}"
    for noun in ("text", "image"):
        expected = f"This holds for {noun}s like the certify windows: {words}".replace("window", noun)
        assert assumption(noun) == expected
