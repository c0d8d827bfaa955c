"""Monte Carlo: results do not depend on how the work is divided, and the intervals have the stated coverage."""

import hashlib
import math
from functools import lru_cache

import numpy as np
import pytest

from depthgauge.base.errors import InputError
from depthgauge.papers.separation import probability
from depthgauge.papers.separation.decisions import draw_attention, draw_regression, stream_key, unpack
from depthgauge.papers.separation.probability import conditions, estimate, exact, wilson
from depthgauge.papers.separation.settings import CrossAttention, Regression, SelfAttention, Setting, build_setting

SETTINGS: list[Setting] = [
    build_setting("self"),
    build_setting("self", d=102, n=200),
    build_setting("cross", x="ones", a0=0.3),
    Regression(100, 4),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=repr)
def test_results_do_not_depend_on_how_the_work_is_divided(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = conditions(setting, 7, 0, 60)
    for start, stop in ((0, 1), (1, 2), (17, 40), (59, 60)):
        np.testing.assert_array_equal(conditions(setting, 7, start, stop - start), whole[start:stop])
    expected = estimate(setting, 60, seed=7)
    assert expected.successes == whole.all(axis=1).sum()
    assert expected.conditions == tuple(whole.sum(axis=0))
    halves = estimate(setting, 25, seed=7), estimate(setting, 35, seed=7, first=25)
    assert sum(half.successes for half in halves) == expected.successes
    counts = zip(*(half.conditions for half in halves), strict=True)
    assert tuple(map(sum, counts)) == expected.conditions
    monkeypatch.setattr(probability, "_ENTRIES_AT_ONCE", 5000)
    assert estimate(setting, 60, seed=7) == expected


def test_the_key_depends_on_the_task_the_seed_and_every_parameter() -> None:
    base = build_setting("self")
    others = [
        build_setting("self", x="ones"),
        build_setting("self", n=400),
        build_setting("self", d=12),
        build_setting("self", m=16),
        build_setting("self", a0=0.02),
        build_setting("self", a1=1.3),
        build_setting("self", b=0.3),
        build_setting("self", c=0.7),
        build_setting("cross"),
        Regression(200, 15),
    ]
    keys = [stream_key(base, 0), stream_key(base, 1), *(stream_key(other, 0) for other in others)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**128 for key in keys)


def test_all_attention_kinds_use_the_same_models() -> None:
    assert stream_key(build_setting("self", attention="poly:3"), 0) == stream_key(build_setting("self"), 0)


def test_equal_numbers_of_different_types_give_the_same_key() -> None:
    assert stream_key(build_setting("self", a1=1), 0) == stream_key(build_setting("self", a1=1.0), 0)
    assert stream_key(build_setting("self", a1=np.float64(1.5)), 0) == stream_key(build_setting("self", a1=1.5), 0)


def test_the_drawn_networks_do_not_depend_on_the_names_of_modules():
    text = "depthgauge.separation/1|regression|n=100|m=5|seed=0"
    expected = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")
    assert stream_key(build_setting("regression", n=100), 0) == expected


def test_draws_are_fair() -> None:
    """Signs, special tokens and uniforms have the right mean and variance, within five standard errors."""
    setting = SelfAttention(30, 12, 20, 0.01, 1.2, 0.2, 0.8)
    draws = draw_attention(setting, 0, 0, 4000)
    bits = unpack(draws.words, 12)
    assert abs(bits.mean(axis=(0, 1)) - 0.5).max() < 5 * 0.5 / math.sqrt(80_000)
    assert abs(np.corrcoef(bits.reshape(-1, 12).T) - np.eye(12)).max() < 5 / math.sqrt(80_000)
    for column in (*draws.j3.T, *draws.j2.T):
        counts = np.bincount(column, minlength=30)
        assert len(counts) == 30
        chi2 = float(((counts - 4000 / 30) ** 2 / (4000 / 30)).sum())
        assert abs(chi2 - 29) < 5 * math.sqrt(58)
    together = np.corrcoef(np.concatenate([draws.j3, draws.j2], axis=1).T)
    assert abs(together - np.eye(4)).max() < 5 / math.sqrt(4000)
    uniform = draw_regression(Regression(70, 3), 0, 0, 1000).uniform
    assert 0 <= uniform.min() < uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / uniform.size)
    assert abs(uniform.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / uniform.size)


def test_no_model_is_drawn_twice() -> None:
    words = draw_attention(build_setting("cross"), 0, 0, 3000).words  # type: ignore[arg-type]
    assert len(np.unique(words.reshape(3000, -1), axis=0)) == 3000


@pytest.mark.parametrize(("models", "first", "seed"), [(0, 0, 0), (-1, 0, 0), (5, -1, 0), (5, 0, -1)])
def test_counts_must_be_counts(models: int, first: int, seed: int) -> None:
    with pytest.raises(InputError, match="must be a whole number"):
        estimate(build_setting("self"), models, seed, first)


def test_a_million_tokens() -> None:
    found = estimate(build_setting("self", n=10**6, d=1002), 100)
    assert found.models == 100
    assert found.successes >= 95  # the exact probability is 0.9958


def test_progress_reaches_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probability, "_ENTRIES_AT_ONCE", 2000)
    seen: list[tuple[int, int]] = []
    estimate(build_setting("cross"), 50, step=lambda done, total, label: seen.append((done, total)))
    assert len(seen) > 2
    assert seen[-1] == (50, 50)
    assert seen == sorted(seen)


cached_wilson = lru_cache(maxsize=None)(wilson)


def coverage(p: float, models: int) -> float:
    """Return the probability that the Wilson interval of `models` draws contains p."""
    total = 0.0
    for k in range(models + 1):
        low, high = cached_wilson(k, models)
        if low <= p <= high:
            total += math.comb(models, k) * p**k * (1 - p) ** (models - k)
    return total


def test_the_intervals_have_the_stated_coverage() -> None:
    """In 300 settings, the number of covering intervals and the squared deviations agree with the binomial law."""
    models, covered, expected, variance, chi2, degrees = 200, 0, 0.0, 0.0, 0.0, 0
    rng = np.random.default_rng(5)
    for index in range(300):
        a0, a1 = round(float(rng.uniform(0, 0.7)), 3), round(float(rng.uniform(0.5, 2.5)), 3)
        x = ["identity", "ones"][index % 2]
        if index % 3:
            setting: SelfAttention | CrossAttention = SelfAttention(60, 14, 10, a0, a1, 0.25, 0.75, x)
        else:
            setting = CrossAttention(60, 11, 8, a0 if x == "identity" else a0 / 10, a1, x)
        p = exact(setting).success
        found = estimate(setting, models, seed=index)
        chance = coverage(p, models)
        covered += found.interval[0] <= p <= found.interval[1]
        expected += chance
        variance += chance * (1 - chance)
        if 5 < models * p < models - 5:
            chi2 += (found.successes - models * p) ** 2 / (models * p * (1 - p))
            degrees += 1
        for rate, q in zip(found.parts, exact(setting).parts, strict=True):
            assert abs(rate - q) <= 5 * math.sqrt(q * (1 - q) / models) + 5 / models
    assert 0.93 < expected / 300 < 0.99
    assert abs(covered - expected) < 4 * math.sqrt(variance)
    assert degrees > 150
    assert abs(chi2 - degrees) < 4 * math.sqrt(2 * degrees)
