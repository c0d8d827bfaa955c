"""The interval of a ratio of times on clocks that are disturbed, with planted errors that these clocks find."""

import math
import random
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest

from depthgauge.surgery import fresh_process as module
from depthgauge.surgery.fresh_process import PairedTimes, enough, paired_times, sign_interval

RATIO = 1.13
Disturbed = Callable[[int, random.Random], float]
"""From the number of a run to how many times longer it takes than undisturbed."""


def phases() -> Disturbed:
    """A machine that is slow for some time, as if another program ran."""
    state = {"factor": 1.0}

    def factor(run: int, noise: random.Random) -> float:
        if noise.random() < 0.1:
            state["factor"] = noise.choice([1, 1.5, 2.5])
        return state["factor"] * math.exp(noise.gauss(0, 0.03))

    return factor


CLOCKS: dict[str, Callable[[], Disturbed]] = {
    "noise": lambda: lambda run, noise: math.exp(noise.gauss(0, 0.06)),
    "outliers": lambda: lambda run, noise: math.exp(noise.gauss(0, 0.02)) * (3 if noise.random() < 0.15 else 1),
    "drift": lambda: lambda run, noise: (1 + 0.01 * run) * math.exp(noise.gauss(0, 0.05)),
    "phases": phases,
    # Every second run is slower by 8 %. The interval is narrow where it misses, and nowhere else.
    "every second": lambda: lambda run, noise: 1.08 if run % 2 else 1.0,
}


def timed(name: str, seed: int, until: float = 5.0) -> PairedTimes:
    """Time two programs of 11.3 and 10 ms on one of the clocks."""
    factor, noise, now, runs = CLOCKS[name](), random.Random(seed), [0.0], [0]

    def run(which: int) -> float:
        runs[0] += 1
        taken = (0.01, 0.01 * RATIO)[which == 0] * factor(runs[0], noise)
        now[0] += taken
        return taken

    found = paired_times(run, until, clock=lambda: now[0], seed=seed)
    assert now[0] <= until + 0.1
    return found


def misses(name: str, count: int) -> tuple[float, float]:
    """Return the share of measurements that settle, and of those whose interval misses the ratio."""
    found = [timed(name, seed) for seed in range(count)]
    missed = [one for one in found if one.ratio is not None and not one.low <= RATIO <= one.high]
    return sum(one.ratio is not None for one in found) / count, len(missed) / count


@pytest.mark.parametrize("name", CLOCKS)
def test_at_most_one_interval_in_twenty_misses(name: str) -> None:
    settled, missed = misses(name, 1000)
    assert missed <= 0.05
    assert settled > (0.5 if name != "every second" else 0)


def test_looking_often_without_a_correction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "sign_interval", lambda values, odds: sign_interval(values, module.ODDS))
    assert misses("every second", 500)[1] > 0.06


def test_a_fixed_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = SimpleNamespace(Random=lambda seed: SimpleNamespace(sample=lambda both, count: both))
    monkeypatch.setattr(module, "random", fixed)
    assert misses("every second", 20)[1] == 1


def test_what_settles_has_all_numbers_and_is_narrow() -> None:
    found = timed("noise", 3)
    assert found.ratio is not None
    assert 0.95 * found.ratio <= found.low < found.ratio < found.high <= 1.05 * found.ratio
    assert found.before == pytest.approx(0.0113, rel=0.05)
    assert found.after == pytest.approx(0.01, rel=0.05)
    assert found.pairs in (8, 16, 32, 64, 128, 256)


def test_what_does_not_settle_has_no_number() -> None:
    found = timed("every second", 1)
    assert found == PairedTimes(found.pairs)
    assert found.pairs >= 128  # until no further look fits
    assert timed("noise", 0, until=0.15) == PairedTimes(1)  # 8 pairs take longer


@pytest.mark.parametrize("count", [1, 5, 8, 9, 12])
@pytest.mark.parametrize("odds", [4, 20, 40])
def test_the_sign_interval_is_the_narrowest_that_misses_seldom_enough(count: int, odds: int) -> None:
    """Against the enumeration of all signs: values on a side of the median are equal to its index."""

    def missed(k: int) -> int:
        """Return for how many signs the k-th smallest or the k-th largest value is on the wrong side."""
        return sum(sum(signs) < k or sum(signs) > count - k for signs in product((0, 1), repeat=count))

    low, high = sign_interval([float(value) for value in range(count)], odds)
    k = int(low) + 1 if low >= 0 else 0
    assert (low, high) == ((k - 1, count - k) if k else (-math.inf, math.inf))
    assert k == 0 or missed(k) * odds <= 2**count
    assert missed(k + 1) * odds > 2**count


def test_enough_work_is_timed() -> None:
    """Work of which 40 ms do not depend on its amount: at the end they are at most a ninth of the time."""

    def taken(size: int) -> float:
        return 0.04 + 1e-6 * size

    size = enough(taken, 8, math.inf, seconds=1000)
    assert 0.04 / taken(size) <= 1 / 9 < 0.04 / taken(size // 2)
    assert enough(lambda size: 1e-6 * size, 8, math.inf, seconds=1000) == 16
    assert enough(taken, 8, 100, seconds=1000) == 64  # 128 are too many
    assert enough(taken, 8, math.inf, seconds=4) == 8  # 32 pairs take half of the limit
    assert enough(taken, 1, 0.5, seconds=1000) == 1
    seen = set[int]()

    def loaded(size: int) -> float:
        """Return a time that is long at the first run of each size."""
        longer = 0 if size in seen else 20
        seen.add(size)
        return longer + taken(size)

    assert enough(loaded, 8, math.inf, seconds=1000) == enough(taken, 8, math.inf, seconds=1000)
