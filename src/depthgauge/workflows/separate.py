"""The workflow of `depthgauge separate`: the probability of success at one setting of paper B."""

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from depthgauge.progress import Step, silent
from depthgauge.separation.exact import Exact, exact
from depthgauge.separation.montecarlo import Estimate, estimate
from depthgauge.separation.settings import Regression, Setting


@dataclass(frozen=True, repr=False)
class Separation:
    """The probability of success at one setting: exact and sampled. `exact` is None for regression."""

    setting: Setting
    exact: Exact | None
    estimate: Estimate
    seed: int

    def __repr__(self) -> str:
        closed = "" if self.exact is None else f"exact {self.exact.success:.6f}, "
        return f"Separation({self.setting.kind}: {closed}sampled {self.estimate.ratio:.6f})"

    @classmethod
    def from_row(cls, setting: Setting, models: int, seed: int, result: Mapping[str, Any]) -> "Separation":
        """Return the record for the result of a `separation` cell of a sweep."""
        p, q, r, s = result["conditions"]
        closed = None
        if result["exact"] is not None:
            e, f, g, h = result["exact_parts"]
            closed = Exact(result["exact"], (e, f, g, h))
        return cls(setting, closed, Estimate(models, result["successes"], (p, q, r, s)), seed)

    def to_json(self) -> dict[str, Any]:
        """Return the document that `depthgauge separate --json` prints."""
        return {
            "exact": None if self.exact is None else self.exact.success,
            "exact_parts": None if self.exact is None else list(self.exact.parts),
            "ratio": self.estimate.ratio,
            "interval": list(self.estimate.interval),
            "parts": list(self.estimate.parts),
            "models": self.estimate.models,
        }

    def summary(self) -> str:
        """Return a text table: success and its four conditions, exact and sampled."""
        low, high = self.estimate.interval
        sampled = [self.estimate.ratio, *self.estimate.parts]
        closed = [None] * 5 if self.exact is None else [self.exact.success, *self.exact.parts]
        kind = self.setting.attention
        names = ["success", f"F_{kind}(D₁) > 0", "F_lin(D₁) = 0", f"F_{kind}(D₀) = 0", "F_lin(D₀) = 0"]
        width = max(map(len, names))
        parameters = ", ".join(f"{name} = {value}" for name, value in asdict(self.setting).items())
        lines = [
            f"{self.setting.kind}: {parameters}",
            f"{'':{width}}  exact     sampled ({self.estimate.models} networks)",
        ]
        for name, p, rate in zip(names, closed, sampled, strict=True):
            lines.append(f"{name:{width}}  {'–'.ljust(8) if p is None else f'{p:.6f}'}  {rate:.6f}")
        lines[2] += f"  95 % interval {low:.6f} … {high:.6f}"
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.summary())}</pre>"


def separate(setting: Setting, models: int, seed: int = 0, progress: Step = silent) -> Separation:
    """Compute how likely softmax attention separates the two data sets of paper B while linear attention does not.

    Args:
        setting: The data sets and the network, as `build_setting` returns it.
        models: Number of random networks for the Monte Carlo estimate.
        seed: Seed of the random numbers; the same seed gives the same networks.
        progress: Called as `progress(done, total, label)` while networks are sampled.

    Returns:
        The exact probability, where there is a closed form, and the estimate with a 95 % interval.
    """
    closed = None if isinstance(setting, Regression) else exact(setting)
    return Separation(setting, closed, estimate(setting, models, seed, step=progress), seed)
