"""Distributions of loss increases up to a ceiling, with their means and quantiles in closed form."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

CEILING = 14.0
"""The largest increase."""


@dataclass(frozen=True)
class Population:
    """A distribution of increases up to `CEILING`, with its mean and its quantiles in closed form."""

    draw: Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
    mean: float
    quantile: Callable[[float], float]


def discrete(values: list[float], weights: list[float]) -> Population:
    """The given values with probability in proportion to the weights."""
    total = sum(weights)
    shares = np.array(weights) / total

    def quantile(share: float) -> float:
        reached = 0.0
        for value, weight in sorted(zip(values, weights, strict=True)):
            reached += weight
            if reached / total >= share:
                return value
        return max(values)

    mean = math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total
    return Population(lambda rng, size: rng.choice(values, size=size, p=shares), mean, quantile)


def pareto(scale: float, shape: float) -> Population:
    """min(X, C) with P[X > t] = (scale/t)^shape; its mean is scale + ∫ P[X > t] dt from scale to C."""
    tail = scale**shape * (scale ** (1 - shape) - CEILING ** (1 - shape)) / (shape - 1)
    return Population(
        lambda rng, size: np.minimum(scale * rng.random(size) ** (-1 / shape), CEILING),
        scale + tail,
        lambda share: min(scale * (1 - share) ** (-1 / shape), CEILING),
    )


def rare(probability: float) -> Population:
    return discrete([0.3, CEILING], [1 - probability, probability])


POPULATIONS = {
    "normal": Population(
        lambda rng, size: rng.normal(0.4, 0.15, size), 0.4, lambda share: float(stats.norm.ppf(share, 0.4, 0.15))
    ),
    "wide normal": Population(
        lambda rng, size: rng.normal(0.4, 1.0, size), 0.4, lambda share: float(stats.norm.ppf(share, 0.4, 1.0))
    ),
    "exponential": Population(
        lambda rng, size: np.minimum(rng.exponential(size=size), CEILING),
        1 - math.exp(-CEILING),
        lambda share: -math.log(1 - share),
    ),
    "pareto": pareto(0.1, 1.1),
    "pareto without a mean": pareto(0.1, 0.5),
    "no lower limit": Population(
        lambda rng, size: 0.5 - rng.lognormal(0, 1.5, size),
        0.5 - math.exp(1.125),
        lambda share: 0.5 - float(stats.lognorm.ppf(1 - share, 1.5)),
    ),
    "near the ceiling": Population(
        lambda rng, size: CEILING - rng.random(size), CEILING - 0.5, lambda share: CEILING - 1 + share
    ),
    "rare 1 %": rare(0.01),
    "rare 4 %": rare(0.04),
    "rare 6 %": rare(0.06),
    "half": rare(0.5),
    "ties": discrete([0.0, 0.25, 0.5, 1.0], [50, 30, 14, 6]),
    "constant": discrete([0.2], [1]),
}
