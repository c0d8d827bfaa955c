"""Compare softmax attention with linear attention at one setting: exact probabilities and a Monte Carlo estimate."""

from dataclasses import asdict, dataclass
from typing import Any

from depthgauge.base.format import counted
from depthgauge.base.frames import frame, html_table
from depthgauge.base.progress import Step, silent
from depthgauge.papers.separation.exact import ExactProbabilities, exact
from depthgauge.papers.separation.montecarlo import Estimate, estimate, wilson
from depthgauge.papers.separation.settings import Regression, Setting, build_setting


@dataclass(frozen=True, repr=False)
class Separation:
    """The probability of success at one setting. `separate` returns it.

    Attributes:
        setting: The data sets and the network.
        exact: The exact probabilities, or None for regression, which has no closed form.
        estimate: The counts among the drawn networks.
        seed: The seed of the drawn networks.
    """

    setting: Setting
    exact: ExactProbabilities | None
    estimate: Estimate
    seed: int

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

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with five rows: success and its four conditions.

        The columns are `event`, `exact` (the exact probability, NaN for regression), `ratio` (the fraction among the
        drawn networks) and `low`, `high` (its 95 % Wilson interval).

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return frame([row | {"exact": float("nan")} if row["exact"] is None else row for row in self._rows()])

    def summary(self) -> str:
        """Return a table for the terminal: success and its four conditions, exact and sampled."""
        rows = self._rows()
        width = max(len(row["event"]) for row in rows)
        lines = [
            f"{self.setting.kind}: {self._parameters()}",
            f"{'':{width}}  exact     sampled ({counted(self.estimate.models, 'network')})",
        ]
        for row in rows:
            probability = "–".ljust(8) if row["exact"] is None else f"{row['exact']:.6f}"
            lines.append(f"{row['event']:{width}}  {probability}  {row['ratio']:.6f}")
        low, high = self.estimate.interval
        lines[2] += f"  95 % interval {low:.6f} … {high:.6f}"
        return "\n".join(lines)

    def __repr__(self) -> str:
        low, high = self.estimate.interval
        closed = "" if self.exact is None else f"exact probability {self.exact.success:.6f}, "
        return (
            f"Separation({self.setting.kind}: {self._parameters()};\n    success: {closed}"
            f"{self.estimate.ratio:.6f} of {counted(self.estimate.models, 'model')} [{low:.6f}, {high:.6f}])"
        )

    def _repr_html_(self) -> str:
        return html_table(f"{self.setting.kind}: {self._parameters()}", self._rows())

    def _parameters(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in asdict(self.setting).items())

    def _rows(self) -> list[dict[str, Any]]:
        kind = self.setting.attention
        events = ["success", f"F_{kind}(D₁) > 0", "F_lin(D₁) = 0", f"F_{kind}(D₀) = 0", "F_lin(D₀) = 0"]
        closed = [None] * 5 if self.exact is None else [self.exact.success, *self.exact.parts]
        models, counts = self.estimate.models, (self.estimate.successes, *self.estimate.conditions)
        rows = []
        for event, probability, count in zip(events, closed, counts, strict=True):
            low, high = wilson(count, models)
            rows.append({"event": event, "exact": probability, "ratio": count / models, "low": low, "high": high})
        return rows


def separate(
    kind: str = "self",
    *,
    attention: str = "exp",
    x: str | None = None,
    n: int | None = None,
    d: int | None = None,
    m: int | None = None,
    a0: float | None = None,
    a1: float | None = None,
    b: float | str | None = None,
    c: float | None = None,
    models: int = 1000,
    seed: int = 0,
    progress: Step = silent,
) -> Separation:
    """Compute the probability that softmax attention separates D₁ from D₀ where linear attention does not.

    A network with random sign vectors y_l computes F = φ(Σ_{j,l} φ_τ(⟨c_j, y_l⟩)) from the attention output c, where
    φ_τ(z) = max(z − τ, 0). *Success* means F(D₁) > 0 and F(D₀) = 0 with softmax, and F(D₁) = F(D₀) = 0 with linear
    attention, all with the same sign vectors. Omitted parameters take the values of the paper (Deng, Song and Zhou,
    2023).

    Args:
        kind: The data sets and the network: `"self"` (Definition D.1), `"cross"` (Definition F.1) or `"regression"`
            (Definition 3.8).
        attention: The attention that is compared with linear attention: `"exp"` for softmax, or `"poly:G"` for the
            Taylor polynomial of exp of degree G.
        x: QKᵀ: `"identity"` (the default) or `"ones"`. For self and cross.
        n: The number of tokens. A multiple of d − 2 (self) or d − 1 (cross). The default is 200 (self, cross) or 1000
            (regression).
        d: The width of a token. For self (default 22) and cross (default 11).
        m: The number of sign vectors. The default is max(⌈log(n/0.01)⌉, 15) (self), ⌈log(n/0.01)⌉ (cross) or ⌈log n⌉
            (regression).
        a0: a₀, the size of the special token in D₀. For self and cross; the default is 0.01.
        a1: a₁, the size of the special token in D₁. For self (default 1.2) and cross (default 3).
        b: The factor of the repeated identity, or `"tied"` for b = 1 − c. For self; the default is 0.2.
        c: The entries of the last column. For self; the default is 0.8.
        models: The number of networks to draw for the Monte Carlo estimate.
        seed: The seed. The same seed and parameters give the same networks.
        progress: A callback `(done, total, label)`.

    Returns:
        The exact probabilities (`exact`, None for regression) and the counts among the drawn networks (`estimate`).

    Raises:
        InputError: A parameter is out of range, or `kind` does not use it.

    >>> found = separate("self", models=100)
    >>> round(found.exact.success, 4), found.estimate.models
    (0.7633, 100)
    """
    setting = build_setting(kind, attention=attention, x=x, n=n, d=d, m=m, a0=a0, a1=a1, b=b, c=c)
    return separate_setting(setting, models, seed, progress)


def separate_setting(setting: Setting, models: int, seed: int = 0, progress: Step = silent) -> Separation:
    """Compute the record of one setting. `separate` builds the setting from its parameters."""
    closed = None if isinstance(setting, Regression) else exact(setting)
    return Separation(setting, closed, estimate(setting, models, seed, step=progress), seed)
