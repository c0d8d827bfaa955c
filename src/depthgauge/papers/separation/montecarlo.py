"""Monte Carlo estimates: how often success occurs among randomly drawn models."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from depthgauge.base.errors import InputError, require_count
from depthgauge.base.progress import Step, silent
from depthgauge.papers.separation import decisions, regression
from depthgauge.papers.separation.sampling import draw_attention, draw_regression
from depthgauge.papers.separation.settings import Regression, Setting

_ENTRIES_AT_ONCE = 2**20


@dataclass(frozen=True)
class Estimate:
    """Counts over randomly drawn models: those for which all four conditions hold, and those for which each holds.

    The conditions are F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0 and F_lin(D₀) = 0, in this order.
    """

    models: int
    successes: int
    conditions: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if self.models < 1 or not all(0 <= count <= self.models for count in (self.successes, *self.conditions)):
            counts = (self.successes, *self.conditions)
            raise InputError(f"counts must be between 0 and the number of models, got {counts} of {self.models}")

    @property
    def ratio(self) -> float:
        """The fraction of models that succeed."""
        return self.successes / self.models

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson score interval of `ratio`."""
        return wilson(self.successes, self.models)

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """The fractions of models with F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0 and F_lin(D₀) = 0."""
        p, q, r, s = (count / self.models for count in self.conditions)
        return p, q, r, s


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a binomial proportion."""
    from scipy.stats import binomtest  # imported here because importing scipy.stats takes about a second

    interval = binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def estimate(setting: Setting, models: int, seed: int = 0, first: int = 0, step: Step = silent) -> Estimate:
    """Draw the models first, …, first + models − 1 of `setting` and count the successes."""
    require_count("models", models, "the number of networks to draw")
    require_count("first", first, "the index of the first network", least=0)
    at_once = _batch(setting)
    successes, counts = 0, np.zeros(4, dtype=np.int64)
    for start in range(0, models, at_once):
        size = min(at_once, models - start)
        met = conditions(setting, seed, first + start, size)
        successes, counts = successes + int(met.all(axis=1).sum()), counts + met.sum(axis=0)
        step(start + size, models, "models")
    p, q, r, s = counts.tolist()
    return Estimate(models, successes, (p, q, r, s))


def conditions(setting: Setting, seed: int, first: int, models: int) -> Bool[np.ndarray, "models 4"]:
    """Return the four conditions for each of the models first, …, first + models − 1."""
    if isinstance(setting, Regression):
        return regression.conditions(setting, draw_regression(setting, seed, first, models))
    return decisions.conditions(setting, draw_attention(setting, seed, first, models))


def _batch(setting: Setting) -> int:
    """Return the number of models per batch, from a fixed memory budget. It does not affect the results."""
    per_model = (setting.m + 8) * setting.n if isinstance(setting, Regression) else setting.m * (setting.d // 8 + 16)
    return max(1, _ENTRIES_AT_ONCE // per_model)
