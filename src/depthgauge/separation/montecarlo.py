"""Monte Carlo: how often E_success happens among drawn models, with its interval."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool

from depthgauge.errors import require_count
from depthgauge.progress import Step, silent
from depthgauge.separation import regression, structured
from depthgauge.separation.counted_ratio import wilson
from depthgauge.separation.sampling import draw_attention, draw_regression
from depthgauge.separation.settings import Regression, Setting

_ENTRIES_AT_ONCE = 2**20


@dataclass(frozen=True)
class Estimate:
    """Counts over `models` drawn models: of E_success, and of each of its four conditions on its own."""

    models: int
    successes: int
    conditions: tuple[int, int, int, int]

    @property
    def ratio(self) -> float:
        """The ratio of success."""
        return self.successes / self.models

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the ratio."""
        return wilson(self.successes, self.models)

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """The ratios of F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0."""
        p, q, r, s = (count / self.models for count in self.conditions)
        return p, q, r, s

    def __add__(self, other: "Estimate") -> "Estimate":
        """The estimate from both lots of models, which must not overlap."""
        p, q, r, s = (x + y for x, y in zip(self.conditions, other.conditions, strict=True))
        return Estimate(self.models + other.models, self.successes + other.successes, (p, q, r, s))


def estimate(setting: Setting, models: int, seed: int = 0, first: int = 0, step: Step = silent) -> Estimate:
    """Draw the repetitions first, …, first + models − 1 of `setting` and count."""
    require_count("models", models, "how many networks are drawn")
    require_count("first", first, "the repetition to begin with", least=0)
    at_once = _batch(setting)
    total: Estimate | None = None
    for start in range(0, models, at_once):
        size = min(at_once, models - start)
        met = conditions(setting, seed, first + start, size)
        p, q, r, s = (int(count) for count in met.sum(axis=0))
        found = Estimate(size, int(met.all(axis=1).sum()), (p, q, r, s))
        total = found if total is None else total + found
        step(start + size, models, "models")
    assert total is not None
    return total


def conditions(setting: Setting, seed: int, first: int, models: int) -> Bool[np.ndarray, "models 4"]:
    """The four conditions of E_success for each of the repetitions first, …, first + models − 1."""
    if isinstance(setting, Regression):
        return regression.conditions(setting, draw_regression(setting, seed, first, models))
    return structured.conditions(setting, draw_attention(setting, seed, first, models))


def _batch(setting: Setting) -> int:
    """How many models are drawn at once: as many as fit a fixed amount of memory, which changes no result."""
    per_model = (setting.m + 8) * setting.n if isinstance(setting, Regression) else setting.m * (setting.d // 8 + 16)
    return max(1, _ENTRIES_AT_ONCE // per_model)
