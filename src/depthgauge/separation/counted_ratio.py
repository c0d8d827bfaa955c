"""How sure a counted ratio is."""

from math import sqrt
from statistics import NormalDist

from depthgauge.errors import InputError

_Z95 = NormalDist().inv_cdf(0.975)


def wilson(successes: int, trials: int, z: float = _Z95) -> tuple[float, float]:
    """The Wilson score interval, 95 % unless another z is given.

    (p + z²/2N ± z·√(p(1−p)/N + z²/4N²)) / (1 + z²/N), p = successes/N, N = trials.

    >>> [round(end, 4) for end in wilson(50, 100)]
    [0.4038, 0.5962]
    """
    if not 0 <= successes <= trials or trials < 1:
        raise InputError(f"successes must lie between 0 and the number of trials, got {successes} of {trials}")
    p = successes / trials
    shrink = 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / shrink
    half = z * sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / shrink
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high
